"""Build a Horovod wheel for an interpreter: fetch, patch, compile, try, keep."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import gpus
from .environment import build_environment, cache_key, cache_root, wheel_pattern
from .gpus import Target, choose
from .interpreter import FRAMEWORKS, HorovodBuildError, Interpreter, check_programs, probe
from .pip import Pip, missing_tools, pip_command
from .source import HOROVOD_VERSION, PATCHES, SDIST_SHA256, apply_patches, unpack

# A first import of a framework from a slow disk, and a GPU's first use.
_TRIAL_SECONDS = 600.0
# Memory that one compiler takes at most.
_COMPILER_BYTES = 2 << 30
_MARK = "batchai-wheel "
_OPERATIONS = {"gloo": "gloo", "mpi": "MPI", "nccl": "NCCL", "cuda": "CUDA", "rocm": "ROCm"}

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


def build(
    python: str = sys.executable,
    framework: str = "tensorflow",
    out: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    gpu: bool | None = None,
    architectures: Sequence[str] = (),
    source: str | None = None,
) -> str:
    """Path of a Horovod wheel for ``python`` and its framework, built unless an earlier build made it.

    Wheels are kept in ``environment.cache_root``. A build takes minutes and as many cores as memory allows (2 GiB each),
    and installs nothing into that interpreter. A wheel that can't be imported, or reduces wrongly on a GPU, is no
    result. Of two builds of the same wheel at once the second waits and takes the first one's. A build that fails
    leaves its log in the cache, and no wheel.

    Args:
        framework: "tensorflow" or "torch".
        out: folder that gets a copy, made if it isn't there; the result is then the copy's path.
        progress: called with a few words whenever there is news ("compiling 42 %"), at last with what the wheel can do.
        gpu: whether it is to be for GPUs, with NCCL (PyTorch only); None: where PyTorch is one for CUDA and this
            machine has a GPU.
        architectures: compute capabilities ("90") to build for; by default those of this machine's GPUs.
        source: Horovod's source archive, a file; nothing is fetched then.

    Raises:
        HorovodBuildError: something is missing (named with what to install), or fetching or compiling failed.
    """
    interpreter = probe(python, framework)
    target = choose(interpreter, gpu, architectures, os.environ)
    folder = cache_root(os.environ) / cache_key(interpreter, os.environ, target)
    wheel = _used(folder)
    if wheel is None:
        archive = Path(source).expanduser().absolute() if source else None
        with _lock(folder.parent / (folder.name + ".lock"), progress):
            if target is None and gpu is None and interpreter.cuda:
                why = gpus.installed(os.environ)[1]
                progress(f"for CPUs only, for there is no GPU here ({why}); --cuda-arch names those elsewhere")
            wheel = _wheel_in(folder) or _build_into(folder, interpreter, target, archive, progress)
    if out is None:
        return str(wheel)
    there = Path(out).expanduser().absolute()
    with _io_errors(f"The output folder {there}"):
        return str(_copy(wheel, there))


def main(arguments: list[str]) -> int:
    """``agent.pyz horovod-build --python PATH [--framework F] [--out DIR]``: print the wheel's path; on a node, where there is
    no command line of ours.

    A failure is one sentence and exit code 1. It is built for GPUs where PyTorch is one for CUDA and the node has some.
    """
    parser = argparse.ArgumentParser(prog="horovod-build")
    parser.add_argument("--python", required=True)
    parser.add_argument("--framework", choices=[*FRAMEWORKS], default="tensorflow")
    parser.add_argument("--out")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)  # compilers would go on for minutes
    try:
        show = each_step(lambda text: print("Horovod:", text, file=sys.stderr, flush=True))
        print(build(**vars(options), progress=show))
    except HorovodBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def each_step(show: Callable[[str], None]) -> Callable[[str], None]:
    """Progress in lines: shows each step once, without its percentages."""
    shown = ""

    def tell(text: str) -> None:
        nonlocal shown
        step = text.rstrip("% 0123456789") if text.endswith("%") else text
        if step != shown:
            show(step)
        shown = step

    return tell


def _build_into(
    folder: Path, interpreter: Interpreter, target: Target | None, archive: Path | None, progress: Callable[[str], None]
) -> Path:
    check_programs(interpreter, os.environ)
    parts = gpus.find(target, interpreter, os.environ) if target else None
    command = pip_command(interpreter)
    requirements = missing_tools(interpreter)
    if archive and requirements:
        install = shlex.join([interpreter.path, "-m", "pip", "install", *requirements])
        raise HorovodBuildError(
            f"Building from a source file fetches nothing, and {interpreter.path} lacks {', '.join(requirements)}: install "
            f"what is missing first, from wheel files if there is no network (`{install}`)."
        )
    log = folder.parent / (folder.name + ".log")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_io_errors(f"The folder for builds {tempfile.gettempdir()} (set TMPDIR for another)"))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="horovod-build-")))
        tools = work / "tools"
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        jobs = max(1, min(len(os.sched_getaffinity(0)), memory // _COMPILER_BYTES))
        arranged = gpus.arrange(parts, work) if parts else None
        environment = build_environment(interpreter, os.environ, str(tools), jobs, target, arranged)
        log.write_text(f"Horovod {HOROVOD_VERSION} for {interpreter}\n{target}, {parts}\n", encoding="utf-8")
        pip = Pip(command, environment, log, progress)
        if archive:
            environment["PIP_NO_INDEX"] = "1"
        if requirements:
            progress("fetching build tools")
            pip.run("Fetching the build tools", "install", "--target", str(tools), *requirements)
        source = unpack(archive or _fetched(pip, work), work)
        apply_patches(source, PATCHES[interpreter.framework])
        pip.run(
            f"Compiling Horovod {HOROVOD_VERSION} for {interpreter.path}",
            *("wheel", "-v", "--no-build-isolation", "--no-deps"),
            *("--wheel-dir", str(work / "wheel"), str(source)),
        )
        made = _wheel_in(work / "wheel")
        if made is None:
            raise HorovodBuildError(f"pip made no Horovod wheel and told of no error; its log is {log}.")
        progress("trying the wheel")
        nccl = environment.get("HOROVOD_GPU_OPERATIONS") == "NCCL" and target is not None
        progress(try_wheel(made, interpreter, os.environ, nccl, log, tools))
        with _io_errors(f"The cache of Horovod wheels {folder.parent}"):
            kept = _copy(made, folder)
            log.unlink()
    return kept


def _fetched(pip: Pip, work: Path) -> Path:
    pip.progress(f"fetching Horovod {HOROVOD_VERSION}")
    pinned = work / "requirements.txt"
    pinned.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8")
    pip.run(
        f"Fetching Horovod {HOROVOD_VERSION}",
        *("download", "--no-binary", "horovod", "--no-deps", "--no-build-isolation"),
        *("--dest", str(work), "--requirement", str(pinned)),
    )
    return work / f"horovod-{HOROVOD_VERSION}.tar.gz"


def try_wheel(wheel: Path, interpreter: Interpreter, environ: Mapping[str, str], nccl: bool, log: Path, tools: Path) -> str:
    """A few words on what the wheel can do, after it was imported and, with ``nccl``, has reduced a tensor on a GPU.

    Args:
        tools: folder with what Horovod needs and the interpreter lacks; pip installs that along with the wheel.

    Raises:
        HorovodBuildError: it can't be imported, reduces wrongly, or has no NCCL though it was to have it.
    """
    said = _tried(wheel, interpreter, environ, "gpu" if nccl else "cpu", log, tools)
    if nccl and "nccl" not in said["built"]:
        raise HorovodBuildError(
            f"The wheel that was built has no NCCL, though it was to be for GPUs; the build's log is {log}."
        )
    built = "built with " + ", ".join(_OPERATIONS[name] for name in said["built"])
    if not nccl:
        return built
    if "idle" in said:
        return f"{built}; not tried on a GPU: {said['idle']}"
    if not said["right"]:
        raise HorovodBuildError(
            f"The wheel that was built reduces a tensor on {said['gpu']} wrongly; the build's log is {log}."
        )
    return f"{built}; an allreduce on {said['gpu']} is right"


def _tried(wheel: Path, interpreter: Interpreter, environ: Mapping[str, str], kind: str, log: Path, tools: Path) -> Any:
    # Variables of a launcher above us would have it wait for ranks that aren't there.
    clean = {name: value for name, value in environ.items() if not name.startswith(("HOROVOD_", "OMPI_", "PMI_"))}
    with tempfile.TemporaryDirectory(prefix="horovod-trial-") as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        arguments = [unpacked, interpreter.framework, kind, ",".join(_OPERATIONS), _MARK, str(tools)]
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
            text, _ = process.communicate(timeout=_TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            raise HorovodBuildError(
                f"The wheel that was built hangs: importing it and one allreduce took longer than {_TRIAL_SECONDS:.0f} s; the "
                f"build's log is {log}."
            ) from None
        finally:
            process.kill()  # and not waited for: a GPU's driver may hold it in the kernel for ever
    with log.open("a", encoding="utf-8") as sink:
        sink.write(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(_MARK):
            return json.loads(line[len(_MARK) :])
    raise HorovodBuildError(
        f"The wheel that was built does not work in {interpreter.path}, which exits with {process.returncode} and says: "
        f"{(lines or ['nothing'])[-1][:300]} (the build's log is {log})."
    )


def _wheel_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(wheel_pattern()))), None)


def _used(folder: Path) -> Path | None:
    """The wheel of a folder of the cache, marked as used now: `batchai gc` removes those that nobody uses."""
    wheel = _wheel_in(folder)
    if wheel:
        with contextlib.suppress(OSError):
            os.utime(str(wheel))
    return wheel


def _copy(wheel: Path, folder: Path) -> Path:
    """Copy under a temporary name and rename, so that half a wheel is never seen under the wheel's name."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.name
    with tempfile.TemporaryDirectory(prefix=".part-", dir=str(folder)) as name:
        part = Path(name) / wheel.name
        shutil.copyfile(str(wheel), str(part))
        part.replace(target)
    return target


@contextlib.contextmanager
def _lock(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the file's lock, which ends with us; the file stays, for removing it would split the lock."""
    with contextlib.ExitStack() as stack:
        with _io_errors(f"The cache of Horovod wheels {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting for another build of the same wheel")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _io_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HorovodBuildError(f"{what} can't be used: {error}.") from error
