"""CUDA's toolkit and NCCL on this machine, and both laid out as Horovod's build looks for them."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional

from .cards import Target
from .errors import HorovodBuildError
from .interpreter import Interpreter

_RELEASE = re.compile(r"release (\d+\.\d+)")
_TOP = re.compile(r"^#\$ TOP=(.+)$", re.MULTILINE)
# Where the libraries of a prefix lie.
_LIBRARIES = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_SYSTEM = Path("/usr")
_INSTEAD = "or build without GPUs (--no-gpu)"


class Toolkit(NamedTuple):
    """CUDA's toolkit: the folder that holds ``bin/nvcc``, its version ("13.0"), and whether it came with pip."""

    root: str
    version: str
    pips: bool


class Nccl(NamedTuple):
    """NCCL: the folder that holds ``nccl.h``, and the shared library."""

    include: str
    library: str


class Parts(NamedTuple):
    """What a build for GPUs takes; ``nccl`` is None where the user's variables say where NCCL lies."""

    toolkit: Toolkit
    nccl: Optional[Nccl]


def find(target: Target, interpreter: Interpreter, environ: Mapping[str, str]) -> Parts:
    """What a build for these GPUs takes.

    Raises:
        HorovodBuildError: a sentence for each part that is missing, with how to get it.
    """
    missing: List[str] = []
    toolkit, nccl = None, None
    try:
        toolkit = find_toolkit(target, interpreter, environ)
    except HorovodBuildError as error:
        missing.append(str(error))
    try:
        if not ({"HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB"} <= set(environ)):
            nccl = find_nccl(target, interpreter, environ)
    except HorovodBuildError as error:
        missing.append(str(error))
    if toolkit is None or missing:
        raise HorovodBuildError("\n".join(missing))
    return Parts(toolkit, nccl)


def find_toolkit(target: Target, interpreter: Interpreter, environ: Mapping[str, str]) -> Toolkit:
    """The first toolkit of PyTorch's CUDA: of $HOROVOD_CUDA_HOME, $CUDA_HOME, $CUDA_PATH, PATH, /usr/local, pip.

    Raises:
        HorovodBuildError: there is none, or only of another CUDA, or it is too new or too old for these GPUs.
    """
    others = []
    for nvcc in _compilers(target, interpreter, environ):
        toolkit = _described(nvcc, interpreter)
        if toolkit is None:
            continue
        if toolkit.version.split(".")[0] == target.major:
            _check_architectures(toolkit, target)
            return toolkit
        others.append(f"{toolkit.root} is CUDA {toolkit.version}")
    found = " ({})".format("; ".join(dict.fromkeys(others))) if others else ""
    package = f'"cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]=={target.cuda}.*"'
    raise HorovodBuildError(
        f"Building Horovod for GPUs needs the toolkit of CUDA {target.cuda}, which PyTorch {interpreter.framework_version} is "
        f"made for{found}: install it (`apt-get install cuda-toolkit-{target.cuda.replace('.', '-')}` from NVIDIA's "
        f"repository, or `{interpreter.path} -m pip install {package}`), set CUDA_HOME if it lies elsewhere, {_INSTEAD}."
    )


def find_nccl(target: Target, interpreter: Interpreter, environ: Mapping[str, str]) -> Nccl:
    """NCCL of $HOROVOD_NCCL_HOME or $NCCL_HOME, of the interpreter's pip package, or the system's.

    Raises:
        HorovodBuildError: there is none, or a variable names a folder that lacks it.
    """
    for variable in ("HOROVOD_NCCL_HOME", "NCCL_HOME"):
        home = environ.get(variable)
        if home:
            found = _nccl_in(Path(home).expanduser())
            if found is None:
                raise HorovodBuildError(
                    f"${variable} is {home}, where there is no include/nccl.h with lib/libnccl.so.2: mend or unset it."
                )
            return found
    # PyTorch loads that one, whatever else lies here.
    prefixes = [Path(folder) / "nccl" for folder in interpreter.nvidia]
    for prefix in [*prefixes, _SYSTEM / "local", _SYSTEM, _SYSTEM / "local" / "cuda"]:
        found = _nccl_in(prefix)
        if found is not None:
            return found
    raise HorovodBuildError(
        f"Building Horovod for GPUs needs NCCL: install it (`{interpreter.path} -m pip install nvidia-nccl-cu{target.major}`, "
        f"or `apt-get install libnccl-dev` from NVIDIA's repository), set NCCL_HOME if it lies elsewhere, {_INSTEAD}."
    )


def arrange(parts: Parts, folder: Path) -> Dict[str, str]:
    """Lay both out below ``folder``, by links, and return the variables that lead Horovod's build to them.

    pip's packages have only ``libnccl.so.2`` and ``libcudart.so.13``, and linkers look for names without numbers.
    """
    root = parts.toolkit.root
    if parts.toolkit.pips:
        root = str(folder / "cuda")
        _link_toolkit(Path(parts.toolkit.root), folder / "cuda")
    found = dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"), root)
    found["CUDACXX"] = os.path.join(root, "bin", "nvcc")
    if parts.nccl:
        home = folder / "nccl"
        (home / "include").mkdir(parents=True)
        (home / "lib").mkdir()
        # Not the folder itself: that of the system holds everything else, too.
        for path in Path(parts.nccl.include).glob("nccl*"):
            (home / "include" / path.name).symlink_to(path)
        (home / "lib" / "libnccl.so").symlink_to(parts.nccl.library)
        found["HOROVOD_NCCL_HOME"] = str(home)
    return found


def _compilers(target: Target, interpreter: Interpreter, environ: Mapping[str, str]) -> Iterator[str]:
    """Paths where nvcc may be, each a program."""
    named = [environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    paths = [os.path.join(os.path.expanduser(home), "bin", "nvcc") for home in named]
    paths.append(shutil.which("nvcc", path=environ.get("PATH", os.defpath)) or "")
    paths += [str(_SYSTEM / "local" / name / "bin" / "nvcc") for name in (f"cuda-{target.cuda}", "cuda")]
    paths += [os.path.join(folder, f"cu{target.major}", "bin", "nvcc") for folder in interpreter.nvidia]
    return (path for path in dict.fromkeys(paths) if os.path.isfile(path) and os.access(path, os.X_OK))


def _described(nvcc: str, interpreter: Interpreter) -> Optional[Toolkit]:
    """The toolkit of a compiler, which may be a script that starts the true one; None if it doesn't work."""
    release = _RELEASE.search(_said(nvcc, "--version"))
    if not release:
        return None
    top = _TOP.search(_said(nvcc, "-v", "__batchai_where"))
    roots = [os.path.realpath(top.group(1))] if top else []
    roots.append(os.path.dirname(os.path.dirname(os.path.abspath(nvcc))))
    root = next((path for path in roots if os.access(os.path.join(path, "bin", "nvcc"), os.X_OK)), None)
    if root is None:
        return None
    pips = any(os.path.realpath(root).startswith(os.path.realpath(folder) + os.sep) for folder in interpreter.nvidia)
    return Toolkit(root, release.group(1), pips) if not pips or _is_whole(Path(root)) else None


def _is_whole(root: Path) -> bool:
    """Whether the packages that a compiler of pip's needs are there: they are apart."""
    return (
        (root / "nvvm" / "bin" / "cicc").is_file()
        and (root / "include" / "cuda_runtime.h").is_file()
        and (root / "include" / "crt" / "host_config.h").is_file()
        and bool(list((root / "lib").glob("libcudart.so.*")))
    )


def _check_architectures(toolkit: Toolkit, target: Target) -> None:
    nvcc = os.path.join(toolkit.root, "bin", "nvcc")
    known = re.findall(r"\bsm_(\d+)\b", _said(nvcc, "--list-gpu-code"))
    unknown = [name for name in target.architectures if known and name not in known]
    if unknown:
        raise HorovodBuildError(
            f"CUDA {toolkit.version} ({toolkit.root}) has no code for GPUs of compute capability {', '.join(unknown)}, but for "
            f"{', '.join(known)}: use another toolkit (CUDA_HOME), name others of these with --cuda-arch, {_INSTEAD}."
        )


def _said(*argv: str) -> str:
    try:
        answer = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/")
    except OSError:
        return ""
    return answer.stdout.decode("utf-8", "replace")


def _nccl_in(prefix: Path) -> Optional[Nccl]:
    if not (prefix / "include" / "nccl.h").is_file():
        return None
    for folder in _LIBRARIES:
        for name in ("libnccl.so", "libnccl.so.2"):
            if (prefix / folder / name).is_file():
                return Nccl(str(prefix / "include"), str(prefix / folder / name))
    return None


def _link_toolkit(root: Path, folder: Path) -> None:
    """pip's toolkit with the names that an installed one has."""
    # A folder, for nvcc looks for all else in bin/.., which of a link is elsewhere.
    (folder / "bin").mkdir(parents=True)
    for path in (root / "bin").iterdir():
        (folder / "bin" / path.name).symlink_to(path)
    for name in ("include", "nvvm"):
        (folder / name).symlink_to(root / name)
    libraries = folder / "lib64"
    libraries.mkdir()
    for path in (root / "lib").iterdir():
        (libraries / path.name).symlink_to(path)
        plain = libraries / (path.name.split(".so.")[0] + ".so")
        if ".so." in path.name and not (root / "lib" / plain.name).exists() and not plain.is_symlink():
            plain.symlink_to(path)
    (folder / "lib").symlink_to("lib64")
