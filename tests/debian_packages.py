"""Programs of another Debian than this machine's, unpacked in the user's cache folder; nothing of them is installed.

apt gets them, and the C library that they need, from the mirror that this machine's apt uses anyway; patchelf ties the two together.
"""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from podman_engine import cache_folder

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def unpacked(name: str, suite: str, packages: list[str], finish: Callable[[Path, Path], None]) -> Path:
    """The folder of that name in the cache, made if this machine has none yet; LookupError if it can't be.

    Args:
        packages: they, and the C library.
        finish: gets the folder where they are being unpacked, and its later place.
    """
    cache = cache_folder()
    kept = cache / name
    with (cache / f"lock-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                try:
                    made = _get(Path(folder), suite, packages)
                    finish(made, kept)
                except subprocess.CalledProcessError as error:
                    raise LookupError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
                made.rename(kept)
    return kept


def tie(file: Path, kept: Path, *folders: str) -> None:
    """Have a program or a library use the C library that lies in ``kept``, and what lies in these folders there."""
    paths = [*(f"{kept}/{folder}" for folder in (*folders, LIBRARIES)), f"/{LIBRARIES}", "/lib/x86_64-linux-gnu"]
    interpreter = [] if ".so" in file.name else ["--set-interpreter", f"{kept}/{LIBRARIES}/ld-linux-x86-64.so.2"]
    _run(file.parent, "patchelf", *interpreter, "--force-rpath", "--set-rpath", ":".join(paths), str(file))


def _run(folder: Path, *argv: str) -> str:
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True).stdout


def _get(folder: Path, suite: str, packages: list[str]) -> Path:
    shown = _run(folder, "apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(RELEASE)", "Created-By: Packages")
    mirrors = [line.split()[0] for line in shown.splitlines() if line.split()[1:] and line.split()[1] == "Debian"]
    mirrors = [mirror for mirror in mirrors if "security" not in mirror]
    if not mirrors:
        raise LookupError("this machine's apt knows no mirror of Debian")
    (folder / "sources").write_text(f"deb [signed-by={KEYS}] {mirrors[0]} {suite} main\n")
    options = [f"Dir::Etc::sourcelist={folder}/sources", "Dir::Etc::sourceparts=-", f"Dir::State::lists={folder}/lists"]
    options += [f"Dir::Cache={folder}/cache", "Acquire::Languages=none", "APT::Sandbox::User=root"]
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    _run(folder, *apt, "update")
    _run(folder, *apt, "download", *packages, "libc6")
    made = folder / "made"
    for package in folder.glob("*.deb"):
        _run(folder, "dpkg-deb", "-x", str(package), str(made))
    return made
