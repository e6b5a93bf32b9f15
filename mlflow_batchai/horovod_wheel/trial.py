"""A wheel that was just built, tried in its interpreter before anybody gets it."""

import json
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Dict, Mapping

from .errors import HorovodBuildError
from .interpreter import Interpreter

# A first import of a framework from a slow disk, and a GPU's first use.
_SECONDS = 600.0
_MARK = "batchai-wheel "
_NAMES = {"gloo": "gloo", "mpi": "MPI", "nccl": "NCCL", "cuda": "CUDA", "rocm": "ROCm"}

# A GPU that PyTorch itself can't use just now, taken by somebody else, says nothing of the wheel.
_TRIAL = """
import sys
sys.path.insert(0, sys.argv[1])
sys.path.append(sys.argv[6])
import importlib, json
hvd = importlib.import_module("horovod." + sys.argv[2])
said = {"file": hvd.__file__, "built": [name for name in sys.argv[4].split(",") if getattr(hvd, name + "_built")()]}
hvd.init()
if sys.argv[3] == "gpu":
    import torch
    try:
        mine = torch.arange(4.0, device="cuda")
        said["gpu"] = torch.cuda.get_device_name()
    except Exception as error:
        said["idle"] = " ".join(str(error).split())[:200] or type(error).__name__
    else:
        said["right"] = hvd.allreduce(mine, op=hvd.Sum).tolist() == [0.0, 1.0, 2.0, 3.0]
hvd.shutdown()
print("\\n" + sys.argv[5] + json.dumps(said))
"""


def check(wheel: Path, interpreter: Interpreter, environ: Mapping[str, str], nccl: bool, log: Path, tools: Path) -> str:
    """A few words on what the wheel can do, after it was imported and, with ``nccl``, has reduced a tensor on a GPU.

    Args:
        nccl: whether it was to be built for GPUs.
        log: what the trial says is appended.
        tools: folder with what Horovod needs and the interpreter lacks; pip installs that along with the wheel.

    Raises:
        HorovodBuildError: it can't be imported, reduces wrongly, or has no NCCL though it was to have it.
    """
    with tempfile.TemporaryDirectory(prefix="horovod-trial-") as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        said = _said(interpreter, environ, folder, tools, nccl, log)
    if nccl and "nccl" not in said["built"]:
        raise HorovodBuildError(
            f"The wheel that was built has no NCCL, though it was to be for GPUs; the build's log is {log}."
        )
    built = "built with " + ", ".join(_NAMES[name] for name in said["built"])
    if not nccl:
        return built
    if "idle" in said:
        return f"{built}; not tried on a GPU: {said['idle']}"
    if not said["right"]:
        raise HorovodBuildError(
            f"The wheel that was built reduces a tensor on {said['gpu']} wrongly; the build's log is {log}."
        )
    return f"{built}; an allreduce on {said['gpu']} is right"


def _said(
    interpreter: Interpreter, environ: Mapping[str, str], unpacked: str, tools: Path, gpu: bool, log: Path
) -> Dict[str, Any]:
    # Variables of a launcher above us would have it wait for ranks that aren't there.
    clean = {name: value for name, value in environ.items() if not name.startswith(("HOROVOD_", "OMPI_", "PMI_"))}
    arguments = [unpacked, interpreter.framework, "gpu" if gpu else "cpu", ",".join(_NAMES), _MARK, str(tools)]
    process = subprocess.Popen(
        [interpreter.path, "-c", _TRIAL, *arguments],
        env=clean,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        text, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise HorovodBuildError(
            f"The wheel that was built hangs: importing it and one allreduce took longer than {_SECONDS:.0f} s; the build's "
            f"log is {log}."
        ) from None
    with log.open("a", encoding="utf-8") as sink:
        sink.write(text)
    for line in text.splitlines():
        if line.startswith(_MARK):
            return dict(json.loads(line[len(_MARK) :]))
    last = ([line.strip() for line in text.splitlines() if line.strip()] or ["nothing"])[-1]
    raise HorovodBuildError(
        f"The wheel that was built does not work in {interpreter.path}, which exits with {process.returncode} and says: "
        f"{last[:300]} (the build's log is {log})."
    )
