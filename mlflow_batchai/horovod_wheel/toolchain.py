"""Are the programs a build needs there? Asked before anything is downloaded."""

import re
import shlex
import shutil
import subprocess
from typing import List, Mapping, Optional, Tuple

from .errors import HorovodBuildError
from .interpreter import Interpreter
from .settings import search_path

_CMAKE_MINIMUM = (3, 13)


def check_toolchain(interpreter: Interpreter, environ: Mapping[str, str]) -> None:
    """Look for a C++ compiler, CMake and make on PATH, and for Python's headers if PyTorch needs them.

    Raises:
        HorovodBuildError: names all that is missing, and the command that installs it.
    """
    path = search_path(interpreter.path, environ)
    compilers = [shlex.split(environ["CXX"])[0]] if environ.get("CXX", "").strip() else ["c++", "g++", "clang++"]
    missing: List[Tuple[str, str]] = []
    if not any(shutil.which(name, path=path) for name in compilers):
        missing.append(("a C++ compiler ({})".format(" or ".join(compilers)), "g++"))
    cmake = shutil.which(environ.get("HOROVOD_CMAKE") or "cmake", path=path)
    version = cmake_version(cmake) if cmake else None
    if version is None or version < _CMAKE_MINIMUM:
        found = "" if version is None else " (found {}.{})".format(*version)
        missing.append(("CMake 3.13 or newer" + found, "cmake"))
    if not any(shutil.which(name, path=path) for name in ("make", "gmake")):
        missing.append(("make", "make"))
    if interpreter.framework == "torch" and not interpreter.headers:
        missing.append(("Python.h", "python3-dev"))
    if not missing:
        return
    packages = [package for _, package in missing]
    instead = f" (CMake also by `{interpreter.path} -m pip install cmake`)" if "cmake" in packages else ""
    raise HorovodBuildError(
        "Building Horovod needs {}: run `apt-get install {}`{}.".format(
            _listed([what for what, _ in missing]), " ".join(packages), instead
        )
    )


def cmake_version(cmake: str) -> Optional[Tuple[int, int]]:
    """Major and minor version of that CMake, or None if it doesn't run."""
    try:
        answer = subprocess.run([cmake, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"version (\d+)\.(\d+)", answer.stdout.decode(errors="replace"))
    return (int(match.group(1)), int(match.group(2))) if match else None


def _listed(words: List[str]) -> str:
    return words[0] if len(words) == 1 else "{} and {}".format(", ".join(words[:-1]), words[-1])
