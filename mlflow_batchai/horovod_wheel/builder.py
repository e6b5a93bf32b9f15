"""From an interpreter to a Horovod wheel for it: fetch, patch, compile, keep."""

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Callable, Iterator, Optional, Sequence

from . import cuda, trial
from .cards import Target, cards, choose
from .errors import HorovodBuildError
from .interpreter import Interpreter, probe
from .pip import Pip, missing_tools, pip_command, refuse_missing
from .settings import build_environment, cache_key, cache_root, parallel_jobs, wheel_pattern
from .source import HOROVOD_VERSION, PATCHES, SDIST_SHA256, apply_patches, unpack
from .toolchain import check_toolchain


def _silent(text: str) -> None:
    """The default progress: none."""


def cached(
    python: str = sys.executable,
    framework: str = "tensorflow",
    cache: Optional[str] = None,
    gpu: Optional[bool] = None,
    architectures: Sequence[str] = (),
) -> Optional[str]:
    """Path of the wheel an earlier build made for this interpreter, framework and GPUs, or None; takes 0.1 s.

    Raises:
        HorovodBuildError: ``python`` is no usable interpreter, or doesn't have the framework, or not for GPUs.
    """
    interpreter = probe(python, framework)
    wheel = _used(_wheel_in(_folder(interpreter, choose(interpreter, gpu, architectures, os.environ), cache)))
    return str(wheel) if wheel else None


def build(
    python: str = sys.executable,
    framework: str = "tensorflow",
    out: Optional[str] = None,
    cache: Optional[str] = None,
    progress: Callable[[str], None] = _silent,
    gpu: Optional[bool] = None,
    architectures: Sequence[str] = (),
    source: Optional[str] = None,
) -> str:
    """Path of a Horovod wheel for ``python`` and its framework, built unless an earlier build made it.

    A build takes minutes and as many cores as memory allows (2 GiB each), and installs nothing into that
    interpreter. A wheel that can't be imported, or reduces wrongly on a GPU, is no result. Of two builds of the
    same wheel at once the second waits and takes the first one's. A build that fails leaves its log in the cache,
    and no wheel.

    Args:
        python: path or name of the interpreter the wheel is for.
        framework: "tensorflow" or "torch".
        out: folder that gets a copy, made if it isn't there; the result is then the copy's path.
        cache: folder that keeps wheels; by default $BATCHAI_HOROVOD_CACHE, else mlflow-batchai/horovod below
            $XDG_CACHE_HOME or ~/.cache.
        progress: called with a few words whenever there is news ("compiling 42 %").
        gpu: whether it is to be for GPUs, with NCCL (PyTorch only); None: where PyTorch is one for CUDA and this
            machine has a GPU.
        architectures: compute capabilities ("90") to build for; by default those of this machine's GPUs.
        source: Horovod's source archive, a file; nothing is fetched then.

    Raises:
        HorovodBuildError: something is missing (named with what to install), or fetching or compiling failed.
    """
    interpreter = probe(python, framework)
    target = choose(interpreter, gpu, architectures, os.environ)
    folder = _folder(interpreter, target, cache)
    wheel = _used(_wheel_in(folder))
    if wheel is None:
        archive = Path(source).expanduser().absolute() if source else None
        with _lock(folder.parent / (folder.name + ".lock"), progress):
            if target is None and gpu is None and interpreter.cuda:
                progress(f"for CPUs only, for there is no GPU here ({cards(os.environ)[1]}); --cuda-arch names those elsewhere")
            wheel = _wheel_in(folder) or _build_into(folder, interpreter, target, archive, progress)
    if out is None:
        return str(wheel)
    there = Path(out).expanduser().absolute()
    with _io_errors(f"The output folder {there}"):
        return str(_copy(wheel, there))


def _build_into(
    folder: Path, interpreter: Interpreter, target: Optional[Target], archive: Optional[Path], progress: Callable[[str], None]
) -> Path:
    check_toolchain(interpreter, os.environ)
    parts = cuda.find(target, interpreter, os.environ) if target else None
    command = pip_command(interpreter)
    requirements = missing_tools(interpreter)
    if archive:
        refuse_missing(requirements, interpreter)
    log = folder.parent / (folder.name + ".log")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_io_errors(f"The folder for builds {tempfile.gettempdir()} (set TMPDIR for another)"))
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="horovod-build-")))
        jobs = parallel_jobs(_cores(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        arranged = cuda.arrange(parts, work) if parts else None
        environment = build_environment(interpreter, os.environ, str(work / "tools"), jobs, target, arranged)
        log.write_text(f"Horovod {HOROVOD_VERSION} for {interpreter}\n{target}, {parts}\n", encoding="utf-8")
        pip = Pip(command, environment, log, progress)
        if archive:
            environment["PIP_NO_INDEX"] = "1"
        if requirements:
            progress("fetching build tools")
            pip.run("Fetching the build tools", "install", "--target", str(work / "tools"), *requirements)
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
        progress(trial.check(made, interpreter, os.environ, nccl, log, work / "tools"))
        with _io_errors(f"The cache of Horovod wheels {folder.parent}"):
            kept = _copy(made, folder)
            log.unlink()
    return kept


def _fetched(pip: Pip, work: Path) -> Path:
    """Horovod's source archive from pip's index."""
    pip.progress(f"fetching Horovod {HOROVOD_VERSION}")
    pinned = work / "requirements.txt"
    pinned.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8")
    pip.run(
        f"Fetching Horovod {HOROVOD_VERSION}",
        *("download", "--no-binary", "horovod", "--no-deps", "--no-build-isolation"),
        *("--dest", str(work), "--requirement", str(pinned)),
    )
    return work / f"horovod-{HOROVOD_VERSION}.tar.gz"


def _folder(interpreter: Interpreter, target: Optional[Target], cache: Optional[str]) -> Path:
    return cache_root(cache, os.environ) / cache_key(interpreter, os.environ, target)


def _wheel_in(folder: Path) -> Optional[Path]:
    return next(iter(sorted(folder.glob(wheel_pattern()))), None)


def _used(wheel: Optional[Path]) -> Optional[Path]:
    """A wheel of the cache, marked as used now: `batchai gc` removes those that nobody uses."""
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


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
