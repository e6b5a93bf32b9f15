"""``batchai horovod build``: the Horovod wheel for one's own TensorFlow or PyTorch."""

from __future__ import annotations

import sys
import time

import click

from mlflow_batchai import horovod_wheel
from mlflow_batchai.client import signals
from mlflow_batchai.errors import HorovodBuildError


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: batchai horovod build --framework torch --cuda-arch 80,90",
)
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

    A build takes minutes; the wheel is kept in ~/.cache/mlflow-batchai/horovod (or $BATCHAI_HOROVOD_CACHE),
    and the next call with the same interpreter and framework prints its path at once. Nothing is installed
    into the interpreter. Horovod's build variables (HOROVOD_GPU_OPERATIONS, ...) are honoured.
    """
    line = ProgressLine()
    try:
        with signals.raised():  # compilers would go on for minutes
            path = horovod_wheel.build(
                python,
                framework,
                out=out,
                progress=line.show,
                gpu=gpu,
                architectures=cuda_arch.split(","),
                source=source,
            )
    except horovod_wheel.HorovodBuildError as error:
        raise HorovodBuildError(str(error)) from error
    finally:
        line.end()
    click.echo(path)


class ProgressLine:
    """One line on standard error that changes in place; if that is no terminal, a line for each step."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._width = 0
        self._step = ""

    def show(self, text: str) -> None:
        """Show a few words of progress, with the minutes and seconds since the start."""
        if not self._terminal:
            step = text.rstrip("% 0123456789") if text.endswith("%") else text
            if step != self._step:
                click.echo(f"Horovod: {step}", err=True)
            self._step = step
            return
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        line = f"Horovod: {text} ({minutes}:{seconds:02d})"
        click.echo("\r" + line.ljust(self._width), nl=False, err=True)
        self._width = len(line)

    def end(self) -> None:
        """Leave the line, so that what is printed next starts on its own."""
        if self._width:
            click.echo(err=True)
