"""Is a wheel to be one for GPUs, and for which? Asked of the interpreter, the user and the machine's cards."""

import os
import re
import shutil
import subprocess
from typing import Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .errors import HorovodBuildError
from .interpreter import FRAMEWORKS, Interpreter

_SECONDS = 30.0
_ARCHITECTURE = re.compile(r"^(\d{1,2})\.?(\d)$")


class Target(NamedTuple):
    """The GPUs that a wheel is for.

    Attributes:
        cuda: the version of CUDA that PyTorch is made for ("13.0").
        architectures: compute capabilities without their points ("90"), in rising order.
    """

    cuda: str
    architectures: Tuple[str, ...]

    @property
    def major(self) -> str:
        """The first number of ``cuda``: libraries of other minor versions do."""
        return self.cuda.split(".")[0]


def choose(
    interpreter: Interpreter, gpu: Optional[bool], architectures: Iterable[str], environ: Mapping[str, str]
) -> Optional[Target]:
    """What to build for, or None: without GPUs.

    Args:
        gpu: whether it is to be for GPUs; None: where PyTorch is one for CUDA and this machine has a GPU that works.
        architectures: compute capabilities ("9.0" or "90") to build for, of GPUs that may be elsewhere; none: those of
            $HOROVOD_BUILD_CUDA_CC_LIST, else of this machine's GPUs.

    Raises:
        HorovodBuildError: GPUs are asked for, and there is no PyTorch for CUDA, or nobody knows which GPUs; or an
            architecture is none.
    """
    named = _parsed(architectures)
    if gpu is False:
        if named:
            raise HorovodBuildError("--cuda-arch names GPUs to build for, and --no-gpu is to build for none: drop one of them.")
        return None
    asked = bool(gpu or named)
    if interpreter.framework != "torch":
        if asked:
            raise HorovodBuildError(
                f"Horovod for {FRAMEWORKS[interpreter.framework]} is built here without GPUs: use --framework torch, or set "
                "Horovod's own HOROVOD_GPU_OPERATIONS=NCCL and what it needs yourself."
            )
        return None
    if interpreter.cuda is None:
        if asked:
            raise HorovodBuildError(
                f"PyTorch {interpreter.framework_version} of {interpreter.path} is one without CUDA: install one for CUDA (see "
                "pytorch.org), or build without GPUs (--no-gpu)."
            )
        return None
    named = named or _parsed(environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "").split(","))
    if named:
        return Target(interpreter.cuda, named)
    here, why_none = cards(environ)
    if here:
        return Target(interpreter.cuda, here)
    if gpu:
        raise HorovodBuildError(
            f"There is no GPU here to build for ({why_none}): say for which with --cuda-arch (90 for an H100), or build "
            "without GPUs (--no-gpu)."
        )
    return None


def cards(environ: Mapping[str, str]) -> Tuple[Tuple[str, ...], str]:
    """(the compute capabilities of this machine's GPUs, each once; why there are none)."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is None:
        return (), "no nvidia-smi on PATH"
    code, text = _ask([program, "--query-gpu=compute_cap", "--format=csv,noheader"], environ)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = _known(lines) if code == 0 else []
    return _in_order(found), "" if found else "nvidia-smi: " + (lines or ["nothing"])[-1]


def _parsed(names: Iterable[str]) -> Tuple[str, ...]:
    stripped = [name.strip() for name in names if name.strip()]
    known = _known(stripped)
    if len(known) < len(stripped):
        wrong = next(name for name in stripped if not _ARCHITECTURE.match(name))
        raise HorovodBuildError(
            f"{wrong!r} is not a compute capability of GPUs: give numbers like 80, 90 or 9.0 (`nvidia-smi --query-gpu="
            "compute_cap --format=csv` says which a machine has)."
        )
    return _in_order(known)


def _known(names: Iterable[str]) -> List[str]:
    return ["".join(match.groups()) for match in map(_ARCHITECTURE.match, names) if match]


def _in_order(names: Sequence[str]) -> Tuple[str, ...]:
    return tuple(sorted(set(names), key=int))


def _ask(argv: List[str], environ: Mapping[str, str]) -> Tuple[Optional[int], str]:
    """(exit code, output) of a program that may hang where a driver is broken, and then may not be waited for either."""
    process = subprocess.Popen(
        argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return None, "it does not answer within %.0f s" % _SECONDS
    return process.returncode, output.decode("utf-8", "replace")
