"""What the interpreter that the wheel is for is, and has installed."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Tuple

from .errors import HorovodBuildError

FRAMEWORKS = {"tensorflow": "TensorFlow", "torch": "PyTorch"}

# Runs inside that interpreter. It imports no framework: that takes seconds, and can fail for want of a GPU.
_PROBE = """
import json, os, runpy, sys, sysconfig
report = {"version": list(sys.version_info[:2])}
if sys.version_info >= (3, 8):
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
    tools: Dict[str, Optional[str]]
    headers: bool
    cuda: Optional[str] = None
    nvidia: Tuple[str, ...] = ()


def probe(python: str, framework: str) -> Interpreter:
    """Ask ``python`` (a path, or a name on PATH) what it is, without importing the framework; takes 0.1 s.

    Raises:
        HorovodBuildError: it is no Python 3.8 or newer, or has no such framework.
    """
    if framework not in FRAMEWORKS:
        raise HorovodBuildError(
            "{!r} is not a framework Horovod is built for here: use one of {}.".format(framework, ", ".join(sorted(FRAMEWORKS)))
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
    if version < (3, 8):
        raise HorovodBuildError("{} is Python {}.{}: Horovod is built here for 3.8 or newer.".format(path, *version))
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
