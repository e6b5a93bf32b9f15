"""GPU builds: architectures, and CUDA's toolkit and NCCL laid out as Horovod's build expects them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .interpreter import FRAMEWORKS, HorovodBuildError, Interpreter

_SECONDS = 30.0
_ARCHITECTURE = re.compile(r"^(\d{1,2})\.?(\d)$")
# Where the libraries of a prefix lie.
_LIBRARIES = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_SYSTEM = Path("/usr")
_INSTEAD = "or build without GPUs (--no-gpu)"
# What nvcc of pip's packages needs of others.
_NVCC_NEEDS = ("nvvm/bin/cicc", "include/cuda_runtime.h", "include/crt/host_config.h", "lib/libcudart.so.*")


class Target(NamedTuple):
    """The GPUs that a wheel is for.

    Attributes:
        cuda: the version of CUDA that PyTorch is made for ("13.0").
        architectures: compute capabilities without their points ("90"), in rising order.
    """

    cuda: str
    architectures: tuple[str, ...]

    @property
    def major(self) -> str:
        """The first number of ``cuda``: libraries of other minor versions do."""
        return self.cuda.split(".")[0]


class Toolkit(NamedTuple):
    """CUDA's toolkit: the folder that holds ``bin/nvcc``, its version ("13.0"), and whether it came with pip."""

    root: str
    version: str
    from_pip: bool


class Nccl(NamedTuple):
    """NCCL: the folder that holds ``nccl.h``, and the shared library."""

    include: str
    library: str


class Parts(NamedTuple):
    """Parts of a GPU build; ``nccl`` is None where the user's variables say where NCCL lies."""

    toolkit: Toolkit
    nccl: Nccl | None


def choose(
    interpreter: Interpreter, gpu: bool | None, architectures: Iterable[str], environ: Mapping[str, str]
) -> Target | None:
    """Choose the GPU architectures to build for; None: build without GPUs.

    Args:
        gpu: whether it is to be for GPUs; None: where PyTorch is one for CUDA and this machine has a GPU that works.
        architectures: compute capabilities ("9.0" or "90") to build for, of GPUs that may be elsewhere; none: those of
            $HOROVOD_BUILD_CUDA_CC_LIST, else of this machine's GPUs.

    Raises:
        HorovodBuildError: GPUs are asked for, and there is no PyTorch for CUDA, or nobody knows which GPUs; or an
            architecture is none.
    """
    named = _parsed(architectures)
    asked = bool(gpu or named)
    if gpu is False:
        if named:
            raise HorovodBuildError("--cuda-arch names GPUs to build for, and --no-gpu is to build for none: drop one of them.")
        return None
    if interpreter.framework != "torch" or interpreter.cuda is None:
        if not asked:
            return None
        if interpreter.framework != "torch":
            raise HorovodBuildError(
                f"Horovod for {FRAMEWORKS[interpreter.framework]} is built here without GPUs: use --framework torch, or set "
                "Horovod's own HOROVOD_GPU_OPERATIONS=NCCL and what it needs yourself."
            )
        raise HorovodBuildError(
            f"PyTorch {interpreter.framework_version} of {interpreter.path} is one without CUDA: install one for CUDA (see "
            f"pytorch.org), {_INSTEAD}."
        )
    named = named or _parsed(environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "").split(","))
    here, why_none = ((), "") if named else installed(environ)
    if named or here:
        return Target(interpreter.cuda, named or here)
    if gpu:
        raise HorovodBuildError(
            f"There is no GPU here to build for ({why_none}): say for which with --cuda-arch (90 for an H100), {_INSTEAD}."
        )
    return None


def installed(environ: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """(the compute capabilities of this machine's GPUs, each once; why there are none)."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is None:
        return (), "no nvidia-smi on PATH"
    process = subprocess.Popen(
        [program, "--query-gpu=compute_cap", "--format=csv,noheader"],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        lines = process.communicate(timeout=_SECONDS)[0].decode("utf-8", "replace").split("\n")
    except subprocess.TimeoutExpired:
        # Where a driver is broken it may hang, and may not be waited for either.
        process.kill()
        lines = [f"it does not answer within {_SECONDS:.0f} s"]
    said = [line.strip() for line in lines if line.strip()] or ["nothing"]
    found = _known(said) if process.returncode == 0 else ()
    return found, "" if found else "nvidia-smi: " + said[-1]


def find(target: Target, interpreter: Interpreter, environ: Mapping[str, str]) -> Parts:
    """Find the parts for a build for these GPUs.

    Raises:
        HorovodBuildError: a sentence for each part that is missing, with how to get it.
    """
    missing: list[str] = []
    toolkit = nccl = None
    try:
        toolkit = _find_toolkit(target, interpreter, environ)
    except HorovodBuildError as error:
        missing.append(str(error))
    try:
        if not ({"HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB"} <= set(environ)):
            nccl = _find_nccl(target, interpreter, environ)
    except HorovodBuildError as error:
        missing.append(str(error))
    if toolkit is None or missing:
        raise HorovodBuildError("\n".join(missing))
    return Parts(toolkit, nccl)


def arrange(parts: Parts, folder: Path) -> dict[str, str]:
    """Lay both out below ``folder``, by links, and return the variables that lead Horovod's build to them.

    pip's packages have only ``libnccl.so.2`` and ``libcudart.so.13``, and linkers look for names without numbers.
    """
    root = Path(parts.toolkit.root)
    if parts.toolkit.from_pip:
        root = folder / "cuda"
        _link_toolkit(Path(parts.toolkit.root), root)
    found = dict.fromkeys(("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"), str(root))
    found["CUDACXX"] = str(root / "bin" / "nvcc")
    if parts.nccl:
        home = folder / "nccl"
        # Not the folder itself: that of the system holds everything else, too.
        _link(Path(parts.nccl.include).glob("nccl*"), home / "include")
        (home / "lib").mkdir()
        (home / "lib" / "libnccl.so").symlink_to(parts.nccl.library)
        found["HOROVOD_NCCL_HOME"] = str(home)
    return found


def _parsed(names: Iterable[str]) -> tuple[str, ...]:
    stripped = [name.strip() for name in names if name.strip()]
    for name in stripped:
        if not _ARCHITECTURE.match(name):
            raise HorovodBuildError(
                f"{name!r} is not a compute capability of GPUs: give numbers like 80, 90 or 9.0 (`nvidia-smi --query-gpu="
                "compute_cap --format=csv` says which a machine has)."
            )
    return _known(stripped)


def _known(names: Iterable[str]) -> tuple[str, ...]:
    """Select the names that are compute capabilities, without their points, in rising order."""
    return tuple(sorted({"".join(match.groups()) for match in map(_ARCHITECTURE.match, names) if match}, key=int))


def _find_toolkit(target: Target, interpreter: Interpreter, environ: Mapping[str, str]) -> Toolkit:
    """The first toolkit of PyTorch's CUDA: of $HOROVOD_CUDA_HOME, $CUDA_HOME, $CUDA_PATH, PATH, /usr/local, pip."""
    others = []
    for nvcc in _compilers(target, interpreter, environ):
        toolkit = _described(nvcc, interpreter)
        if toolkit is None:
            continue
        if toolkit.version.split(".")[0] == target.major:
            _check_architectures(toolkit, target)
            return toolkit
        others.append(f"{toolkit.root} is CUDA {toolkit.version}")
    found = f" ({'; '.join(dict.fromkeys(others))})" if others else ""
    package = f'"cuda-toolkit[nvcc,nvvm,crt,cccl,cudart]=={target.cuda}.*"'
    raise HorovodBuildError(
        f"Building Horovod for GPUs needs the toolkit of CUDA {target.cuda}, which PyTorch {interpreter.framework_version} is "
        f"made for{found}: install it (`apt-get install cuda-toolkit-{target.cuda.replace('.', '-')}` from NVIDIA's "
        f"repository, or `{interpreter.path} -m pip install {package}`), set CUDA_HOME if it lies elsewhere, {_INSTEAD}."
    )


def _compilers(target: Target, interpreter: Interpreter, environ: Mapping[str, str]) -> Iterator[str]:
    named = [environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    paths = [os.path.join(os.path.expanduser(home), "bin", "nvcc") for home in named]
    paths.append(shutil.which("nvcc", path=environ.get("PATH", os.defpath)) or "")
    paths += [str(_SYSTEM / "local" / name / "bin" / "nvcc") for name in (f"cuda-{target.cuda}", "cuda")]
    paths += [os.path.join(folder, f"cu{target.major}", "bin", "nvcc") for folder in interpreter.nvidia]
    return (path for path in dict.fromkeys(paths) if os.path.isfile(path) and os.access(path, os.X_OK))


def _described(nvcc: str, interpreter: Interpreter) -> Toolkit | None:
    """The toolkit of a compiler, which may be a script that starts the true one; None if it doesn't work."""
    release = re.search(r"release (\d+\.\d+)", _said(nvcc, "--version"))
    top = re.search(r"^#\$ TOP=(.+)$", _said(nvcc, "-v", "__batchai_where"), re.MULTILINE)
    roots = [os.path.realpath(top[1])] if top else []
    roots.append(os.path.dirname(os.path.dirname(os.path.abspath(nvcc))))
    root = next((path for path in roots if os.access(os.path.join(path, "bin", "nvcc"), os.X_OK)), None)
    if root is None or not release:
        return None
    from_pip = any(os.path.realpath(root).startswith(os.path.realpath(folder) + os.sep) for folder in interpreter.nvidia)
    if from_pip and not all(any(Path(root).glob(name)) for name in _NVCC_NEEDS):
        return None
    return Toolkit(root, release[1], from_pip)


def _check_architectures(toolkit: Toolkit, target: Target) -> None:
    known = re.findall(r"\bsm_(\d+)\b", _said(os.path.join(toolkit.root, "bin", "nvcc"), "--list-gpu-code"))
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


def _find_nccl(target: Target, interpreter: Interpreter, environ: Mapping[str, str]) -> Nccl:
    """NCCL of $HOROVOD_NCCL_HOME or $NCCL_HOME, of the interpreter's pip package (which PyTorch loads), or the system's."""
    named = next((name for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if environ.get(name)), None)
    if named:
        prefixes = [Path(environ[named]).expanduser()]
    else:
        prefixes = [Path(folder) / "nccl" for folder in interpreter.nvidia]
        prefixes += [_SYSTEM / "local", _SYSTEM, _SYSTEM / "local" / "cuda"]
    for prefix in prefixes:
        libraries = [prefix / folder / name for folder in _LIBRARIES for name in ("libnccl.so", "libnccl.so.2")]
        library = next((path for path in libraries if path.is_file()), None)
        if library and (prefix / "include" / "nccl.h").is_file():
            return Nccl(str(prefix / "include"), str(library))
    if named:
        raise HorovodBuildError(
            f"${named} is {environ[named]}, where there is no include/nccl.h with lib/libnccl.so.2: mend or unset it."
        )
    raise HorovodBuildError(
        f"Building Horovod for GPUs needs NCCL: install it (`{interpreter.path} -m pip install nvidia-nccl-cu{target.major}`, "
        f"or `apt-get install libnccl-dev` from NVIDIA's repository), set NCCL_HOME if it lies elsewhere, {_INSTEAD}."
    )


def _link_toolkit(root: Path, folder: Path) -> None:
    """pip's toolkit with the names that an installed one has."""
    # A folder, for nvcc looks for all else in bin/.., which of a link is elsewhere.
    _link((root / "bin").iterdir(), folder / "bin")
    for name in ("include", "nvvm"):
        (folder / name).symlink_to(root / name)
    libraries = folder / "lib64"
    _link((root / "lib").iterdir(), libraries)
    for path in (root / "lib").glob("*.so.*"):
        plain = libraries / (path.name.split(".so.")[0] + ".so")
        if not plain.is_symlink():
            plain.symlink_to(path)
    (folder / "lib").symlink_to("lib64")


def _link(paths: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in paths:
        (folder / path.name).symlink_to(path)
