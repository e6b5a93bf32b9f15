"""The interpreter that a wheel is for: its properties, and what a build for it needs of the machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class HorovodBuildError(Exception):
    """The wheel could not be built; ``str(error)`` is one sentence, at times with the last lines of a log.

    This package may not import the client's own errors: it travels to nodes.
    """


FRAMEWORKS = {"tensorflow": "TensorFlow", "torch": "PyTorch"}

# Runs inside that interpreter. It imports no framework: that takes seconds, and can fail for want of a GPU.
_PROBE = """
import json, os, runpy, sys, sysconfig
report = {"version": list(sys.version_info[:2])}
if sys.version_info >= (3, 9):
    import importlib.metadata, importlib.util, platform
    def version(*names):
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                pass
    def folders(package):
        found = importlib.util.find_spec(package)
        return list(found.submodule_search_locations or []) if found else []
    torch = {}
    for file in (os.path.join(folder, "version.py") for folder in folders("torch")):
        if os.path.isfile(file):
            torch = runpy.run_path(file)
    implementation = {"cpython": "cp"}.get(sys.implementation.name, sys.implementation.name)
    report.update(
        tag="{}{}{}{}-{}".format(
            implementation, sys.version_info[0], sys.version_info[1], getattr(sys, "abiflags", ""),
            sysconfig.get_platform().replace("-", "_").replace(".", "_"),
        ),
        libc="-".join(platform.libc_ver()),
        tensorflow=version(
            "tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-gpu", "tensorflow-rocm",
            "tensorflow-cpu-aws", "tensorflow-aarch64", "tensorflow-macos", "tf-nightly", "tf-nightly-cpu",
            "intel-tensorflow",
        ),
        torch=torch.get("__version__") and str(torch["__version__"]) or version("torch"),
        cuda=torch.get("cuda"),
        nvidia=folders("nvidia"),
        tools={name: version(name) for name in
               ("pip", "setuptools", "wheel", "cloudpickle", "psutil", "PyYAML", "packaging", "cffi", "pycparser")},
        headers=os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")),
    )
print(json.dumps(report))
"""


class Interpreter(NamedTuple):
    """The target interpreter: what it is and has.

    Its absolute path (links kept, for a virtual environment is known by them), its tag with the platform
    ("cp311-linux_x86_64"), the C library's name and version, the framework and its version, the versions of
    the tools a build needs (None: not installed), whether Python.h is there, which CUDA its PyTorch is made for
    ("13.0"; None: none), and the folders of NVIDIA's pip packages.
    """

    path: str
    tag: str
    libc: str
    framework: str
    framework_version: str
    tools: dict[str, str | None]
    headers: bool
    cuda: str | None = None
    nvidia: tuple[str, ...] = ()


def probe(python: str, framework: str) -> Interpreter:
    """Ask ``python`` (a path, or a name on PATH) what it is, without importing the framework; takes 0.1 s.

    Raises:
        HorovodBuildError: it is no Python 3.9 or newer, or has no such framework.
    """
    if framework not in FRAMEWORKS:
        raise HorovodBuildError(
            f"{framework!r} is not a framework Horovod is built for here: use one of {', '.join(sorted(FRAMEWORKS))}."
        )
    found = shutil.which(str(Path(python).expanduser()) if python.startswith("~") else python)
    if found is None:
        raise HorovodBuildError(f"{python} is not an executable: give the path of a Python interpreter.")
    path = str(Path.cwd() / found)
    try:
        answer = subprocess.run([path, "-c", _PROBE], capture_output=True, stdin=subprocess.DEVNULL)
        report = json.loads(answer.stdout.decode().splitlines()[-1])
        version = tuple(report["version"])
    except OSError as error:
        raise HorovodBuildError(f"{path} can't be run: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError) as error:
        said = " ".join(answer.stderr.decode(errors="replace").split())[-300:]
        raise HorovodBuildError(
            f"{path} is no Python interpreter, or a broken one: asked for its version it exits with "
            f"{answer.returncode} and says {said!r}."
        ) from error
    if version < (3, 9):
        raise HorovodBuildError("{} is Python {}.{}: Horovod is built here for 3.9 or newer.".format(path, *version))
    if report[framework] is None:
        package = {"tensorflow": "tensorflow-cpu", "torch": "torch"}[framework]
        raise HorovodBuildError(
            f"{FRAMEWORKS[framework]} is not installed in {path}: run `{path} -m pip install {package}`, or "
            "name the interpreter that has it."
        )
    return Interpreter(
        path=path,
        tag=report["tag"],
        libc=report["libc"],
        framework=framework,
        framework_version=report[framework],
        tools=report["tools"],
        headers=report["headers"],
        cuda=report["cuda"] if framework == "torch" else None,
        nvidia=tuple(report["nvidia"]),
    )


def search_path(python: str, environ: Mapping[str, str]) -> str:
    """PATH of the build: the interpreter's folder first, so that a CMake that pip put there is found."""
    return os.pathsep.join(filter(None, [str(Path(python).parent), environ.get("PATH", "")]))


def check_programs(interpreter: Interpreter, environ: Mapping[str, str]) -> None:
    """Look for a C++ compiler, CMake and make on PATH, and for Python's headers if PyTorch needs them.

    Raises:
        HorovodBuildError: names all that is missing, and the command that installs it.
    """
    path = search_path(interpreter.path, environ)
    compilers = [shlex.split(environ["CXX"])[0]] if environ.get("CXX", "").strip() else ["c++", "g++", "clang++"]
    # Debian's package -> what is missing.
    missing = {}
    if not any(shutil.which(name, path=path) for name in compilers):
        missing["g++"] = f"a C++ compiler ({' or '.join(compilers)})"
    if not shutil.which(environ.get("HOROVOD_CMAKE") or "cmake", path=path):
        missing["cmake"] = "CMake 3.13 or newer"
    if not any(shutil.which(name, path=path) for name in ("make", "gmake")):
        missing["make"] = "make"
    if interpreter.framework == "torch" and not interpreter.headers:
        missing["python3-dev"] = "Python.h"
    if missing:
        instead = f" (CMake also by `{interpreter.path} -m pip install cmake`)" if "cmake" in missing else ""
        what = " and ".join(filter(None, [", ".join([*missing.values()][:-1]), [*missing.values()][-1]]))
        raise HorovodBuildError(f"Building Horovod needs {what}: run `apt-get install {' '.join(missing)}`{instead}.")
