"""Files of a job as text on the terminal, as far as they are written and as they grow."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable, Iterator

import click

from mlflow_batchai.cli.options import notice
from mlflow_batchai.cli.output import echo, quiet_end
from mlflow_batchai.client import streaming
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.terminal import safe_pieces


def stream_file(found: Submitted, identity: str, path: str, required: bool = True) -> Iterator[str]:
    """A file of a job's directory as it grows (``streaming.stream_file``); what there is to say goes to standard error."""
    return streaming.stream_file(
        found,
        identity,
        path,
        notice,
        lambda address: notice(f"{address} (Ctrl-C leaves the job running)"),
        lambda sentence: echo(f"\nbatchai: {sentence}", err=True),
        required,
    )


def show_text(pieces: Iterable[str], job: str) -> None:
    """Print text as it comes; Ctrl-C, and a reader that leaves (``| head``), end that and nothing else."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for piece in safe_pieces(pieces) if sys.stdout.isatty() else pieces:
            sys.stdout.write(piece.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
    except KeyboardInterrupt:
        click.echo(f"\nbatchai: job {job} goes on", err=True)
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        quiet_end()
