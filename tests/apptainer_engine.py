"""An Apptainer of the tests' own, in the user's cache folder, and an image in a folder.

Debian has it in sid alone: apt gets it and sid's C library from the mirror that this machine's apt uses anyway (8 s, 20 MB), and
patchelf ties the two together, so that nothing of them is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from podman_engine import cache_folder, image_layer

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
# Where a program that was moved looks for its folders.
LINKS = {"usr/etc": "../etc", "usr/var": "../var", "usr/lib/etc": "../../etc", "usr/lib/var": "../../var"}


@dataclass(frozen=True)
class Apptainer:
    """An Apptainer that works.

    Attributes:
        image: an image with Python, as a folder.
        environment: what agents need to find it.
    """

    image: Path
    environment: dict[str, str]

    def without_pid_namespaces(self, folder: Path) -> dict[str, str]:
        """What agents need to find one whose administrator allows no PID namespaces."""
        program = Path(str(shutil.which("apptainer", path=self.environment["PATH"])))
        text = (program.parents[2] / "etc" / "apptainer" / "apptainer.conf").read_text()
        assert "allow pid ns = yes" in text
        settings, front = folder / "apptainer.conf", folder / "apptainer"
        settings.write_text(text.replace("allow pid ns = yes", "allow pid ns = no"))
        front.write_text(f'#!/bin/sh\nexec {program} --config={settings} "$@"\n')
        front.chmod(0o755)
        return {**self.environment, "PATH": f"{folder}:{self.environment['PATH']}"}


@contextlib.contextmanager
def apptainer() -> Iterator[Apptainer]:
    """Have Apptainer and an image, which is gone at the end. Skips, with the reason, where it can't run."""
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    for program in ("apt-get", "patchelf", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} on this machine (apt-get install {program})")
    program = _program()
    # Not below pytest's folder, which is kept.
    with tempfile.TemporaryDirectory(prefix="batchai-apptainer-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        files, image = folder / "files", folder / "image"
        files.mkdir()
        subprocess.run(["tar", "-C", str(files), "-xf", str(image_layer())], check=True)
        argv = [str(program), "build", "--sandbox", str(image), str(files)]
        made = subprocess.run(argv, capture_output=True, text=True, check=False)
        shutil.rmtree(files)
        tried = subprocess.run([str(program), "exec", str(image), "true"], capture_output=True, text=True, check=False)
        if made.returncode or tried.returncode:
            pytest.skip(f"Apptainer can't run a container here: {made.stderr}{tried.stderr}")
        cache = {"APPTAINER_CACHEDIR": str(folder / "cache"), "APPTAINER_NOHTTPS": "1"}
        yield Apptainer(image, {"PATH": f"{program.parent}:{os.environ['PATH']}", **cache})


def _program() -> Path:
    """The program, got if this machine has none yet."""
    cache = cache_folder()
    kept = cache / "apptainer"
    with (cache / "lock-apptainer").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                try:
                    made = _get(Path(folder), kept)
                except subprocess.CalledProcessError as error:
                    pytest.skip(f"Apptainer can't be had here: {' '.join(error.cmd)}: {error.stderr.strip()}")
                made.rename(kept)
    return kept / "usr" / "bin" / "apptainer"


def _get(folder: Path, kept: Path) -> Path:
    """Unpack it in a folder, for its later place."""

    def run(*argv: str) -> str:
        return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True).stdout

    shown = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(RELEASE)", "Created-By: Packages")
    mirrors = [line.split()[0] for line in shown.splitlines() if line.split()[1:] and line.split()[1] == "Debian"]
    mirrors = [mirror for mirror in mirrors if "security" not in mirror]
    if not mirrors:
        pytest.skip("this machine's apt knows no mirror of Debian")
    (folder / "sources").write_text(f"deb [signed-by={KEYS}] {mirrors[0]} sid main\n")
    options = [f"Dir::Etc::sourcelist={folder}/sources", "Dir::Etc::sourceparts=-", f"Dir::State::lists={folder}/lists"]
    options += [f"Dir::Cache={folder}/cache", "Acquire::Languages=none", "APT::Sandbox::User=root"]
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    apt = ["apt-get", "-q", *(word for option in options for word in ("-o", option))]
    run(*apt, "update")
    run(*apt, "download", "apptainer", "libc6")
    made = folder / "made"
    for package in folder.glob("*.deb"):
        run("dpkg-deb", "-x", str(package), str(made))
    for name, target in LINKS.items():
        (made / name).symlink_to(target)
    libraries = kept / LIBRARIES
    paths = f"{libraries}:/{LIBRARIES}:/lib/x86_64-linux-gnu"
    for program in ("usr/bin/apptainer", f"{LIBRARIES}/apptainer/bin/starter"):
        interpreter = ["--set-interpreter", f"{libraries}/ld-linux-x86-64.so.2"]
        run("patchelf", *interpreter, "--force-rpath", "--set-rpath", paths, str(made / program))
    # A machine of tests may not give root all the rights that Apptainer would give a root in its container.
    settings = made / "etc" / "apptainer" / "apptainer.conf"
    settings.write_text(settings.read_text().replace("root default capabilities = full", "root default capabilities = no"))
    return made
