"""An Apptainer of the tests' own, in the user's cache folder, and an image in a folder.

Debian has it in sid alone (8 s, 20 MB).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from debian_packages import LIBRARIES, tie, unpacked
from podman_engine import image_layer

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
    try:
        return unpacked("apptainer", "sid", ["apptainer"], _finish) / "usr" / "bin" / "apptainer"
    except LookupError as error:
        pytest.skip(f"Apptainer can't be had here: {error}")


def _finish(made: Path, kept: Path) -> None:
    for name, target in LINKS.items():
        (made / name).symlink_to(target)
    for program in ("usr/bin/apptainer", f"{LIBRARIES}/apptainer/bin/starter"):
        tie(made / program, kept)
    # A machine of tests may not give root all the rights that Apptainer would give a root in its container.
    settings = made / "etc" / "apptainer" / "apptainer.conf"
    settings.write_text(settings.read_text().replace("root default capabilities = full", "root default capabilities = no"))
