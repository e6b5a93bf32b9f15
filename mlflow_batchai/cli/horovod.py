"""``batchai horovod build``: build the Horovod wheel for an installed TensorFlow or PyTorch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click

from mlflow_batchai import horovod_wheel
from mlflow_batchai.cli.options import Noun
from mlflow_batchai.client import signals
from mlflow_batchai.errors import HorovodBuildError
from mlflow_batchai.horovod_wheel import builder
from mlflow_batchai.terminal import is_quiet

horovod = Noun("horovod")


@horovod.plain_verb("build", "batchai horovod build --framework torch --cuda-arch 80,90")
@click.option(
    "--python",
    metavar="PATH",
    default=sys.executable,
    help="Interpreter the wheel is for; it must have the framework.  [default: the one that runs batchai]",
)
@click.option(
    "--framework",
    type=click.Choice(["tensorflow", "torch"]),
    default="tensorflow",
    show_default=True,
    help="What Horovod is built for.",
)
@click.option(
    "--gpu/--no-gpu",
    default=None,
    help="Build for NVIDIA GPUs, with NCCL, or without (PyTorch only).  [default: for GPUs if that PyTorch is one for CUDA and "
    "this machine has a GPU]",
)
@click.option(
    "--cuda-arch",
    metavar="LIST",
    default="",
    help="Compute capabilities of the GPUs to build for, such as 80,90.  [default: those of this machine's GPUs]",
)
@click.option(
    "--source",
    metavar="FILE",
    help="Horovod's source archive (horovod-0.28.1.tar.gz of PyPI); nothing is fetched then.",
)
@click.option("--out", metavar="DIR", help="Folder to copy the wheel to; the printed path is then the copy's.")
def build(python: str, framework: str, gpu: bool | None, cuda_arch: str, source: str | None, out: str | None) -> None:
    """Build a Horovod wheel, try it, and print its path.

    A build takes a minute or more; the wheel is kept in ~/.cache/mlflow-batchai/horovod (or $BATCHAI_HOROVOD_CACHE),
    and the next call with the same interpreter and framework prints its path at once. Nothing is installed
    into the interpreter. Horovod's build variables (HOROVOD_GPU_OPERATIONS, ...) are honoured.
    """
    architectures = cuda_arch.split(",")
    try:
        with signals.raised(), _progress() as show:  # compilers would go on for minutes
            path = horovod_wheel.build(
                python, framework, out=out, progress=show, gpu=gpu, architectures=architectures, source=source
            )
    except horovod_wheel.HorovodBuildError as error:
        raise HorovodBuildError(str(error)) from error
    click.echo(path)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show progress on standard error: one line with the time on a terminal, else a line for each step."""
    if is_quiet():
        yield lambda text: None
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, TextColumn, TimeElapsedColumn

        words = TextColumn("Horovod: {task.description}", markup=False)
        with Progress(words, TimeElapsedColumn(), console=Console(stderr=True, highlight=False)) as line:
            task = line.add_task("")
            yield lambda text: line.update(task, description=text)
        return
    yield builder.each_step(lambda text: click.echo(f"Horovod: {text}", err=True))
