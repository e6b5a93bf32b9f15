"""A podman of the tests' own: its storage and settings in a folder that goes with them, and an image made without a registry.

The image is Debian's minimal system with Python (debootstrap), made once per machine (about 50 s, 105 MB) and kept as a tar file
under the user's cache directory. Its settings are what lets podman run without systemd, without room to raise limits, and in
hybrid cgroups; they stand in ``containers.conf`` and ``storage.conf``, which the environment names, and nowhere in the product.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

IMAGE = "localhost/batchai-test:1"
SUITE = "bookworm"
PACKAGES = "python3"
# What a running system would need and an image doesn't.
NEEDLESS = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")

CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=1024:20000", "nproc=1024:1024"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{0}/graph"
runroot = "{0}/run"
"""


@dataclass(frozen=True)
class Podman:
    """A podman that works, and has ``IMAGE``.

    Attributes:
        folder: its storage and settings.
        environment: what its clients need to find them.
        layer: the image's only layer, as a tar file.
    """

    folder: Path
    environment: dict[str, str]
    layer: Path

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Run podman; its output."""
        argv = ["podman", *arguments]
        done = subprocess.run(argv, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, (argv, done.stderr)
        return done.stdout

    def containers(self) -> list[str]:
        """Names of all containers that there are."""
        return self("ps", "--all", "--format={{.Names}}").split()

    def trust(self, registry: str) -> None:
        """Let it use a registry without TLS."""
        (self.folder / "CONTAINERS_REGISTRIES_CONF").write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')


@contextlib.contextmanager
def podman() -> Iterator[Podman]:
    """Set podman up; all of it is gone at the end. Skips, with the reason, where it can't run."""
    if os.geteuid() != 0:
        pytest.skip("podman as it is set up here, and debootstrap, need root")
    for program, package in (("podman", "podman"), ("runc", "runc"), ("debootstrap", "debootstrap")):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} on this machine (apt-get install {package})")
    layer = image_layer()
    # Not below pytest's folder, which is kept: the storage is large.
    folder = Path(tempfile.mkdtemp(prefix="batchai-podman-"))
    try:
        texts = {
            "CONTAINERS_CONF": CONTAINERS_CONF,
            "CONTAINERS_STORAGE_CONF": STORAGE_CONF.format(folder),
            "CONTAINERS_REGISTRIES_CONF": "",
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
        made = Podman(folder, {name: str(folder / name) for name in texts}, layer)
        made("import", "--quiet", str(layer), IMAGE)
        try:
            made("run", "--rm", "--network=host", IMAGE, "true")
        except AssertionError as error:
            pytest.skip(f"podman can't run a container here: {error}")
        yield made
        made("rm", "--all", "--force", "--time=0", check=False)
    finally:
        subprocess.run(["umount", str(folder / "graph" / "overlay")], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def cache_folder() -> Path:
    """Where the tests keep what takes long to make."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlflow-batchai" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def image_layer() -> Path:
    """The image's file system as a tar file, made if this machine has none yet."""
    cache = cache_folder()
    key = hashlib.sha256(" ".join((SUITE, PACKAGES, *NEEDLESS)).encode()).hexdigest()[:8]
    layer = cache / f"{SUITE}-{key}.tar"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not layer.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                root, part = Path(folder) / "root", Path(folder) / "part"
                argv = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
                done = subprocess.run(argv, capture_output=True, text=True, check=False)
                if done.returncode:
                    pytest.skip(f"debootstrap can't make an image here: {done.stdout.strip().splitlines()[-1:]}")
                for name in NEEDLESS:
                    shutil.rmtree(root / name, ignore_errors=True)
                subprocess.run(["tar", "-C", str(root), "-cf", str(part), "."], check=True)
                part.rename(layer)
    return layer
