"""The command ``batchai`` itself: its nouns, how errors are shown, exit codes."""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import os
import sys
from pathlib import Path
from typing import cast

import click
from click.shell_completion import CompletionItem

from mlflow_batchai import __version__
from mlflow_batchai.cli.options import NOUNS, Noun
from mlflow_batchai.cli.output import echo
from mlflow_batchai.errors import BatchAIError, JobFailedError, NotFoundError, UsageError
from mlflow_batchai.terminal import silence

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_FOUND = 1, 2, 3

_HELP = """Batch AI jobs on machines of your own.

Jobs come from `mlflow run PROJECT --backend batchai` or from `batchai job create`; these commands see and steer both. Names and
options are those of `az batchai`; an MLflow run id may stand wherever a job's name does.
"""


class _Nouns(Noun):
    """The nouns: their names and help cost no import of theirs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NOUNS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in NOUNS:
            return None
        return cast(click.Command, getattr(importlib.import_module(f"mlflow_batchai.cli.{cmd_name}"), cmd_name))

    def summaries(self) -> list[tuple[str, str]]:
        return list(NOUNS.items())

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        nouns = [CompletionItem(name, help=text) for name, text in NOUNS.items() if name.startswith(incomplete)]
        return [*nouns, *click.Command.shell_complete(self, ctx, incomplete)]


batchai = _Nouns("batchai", _HELP)
click.version_option(__version__, prog_name="batchai")(batchai)


def main() -> None:
    """Entry point of the command: errors become one sentence and an exit code."""
    _open_streams()
    # A process that ends looks through all of its objects, of which MLflow has a second's worth.
    atexit.register(gc.freeze)
    # MLflow's client would print a run's address among the results when it ends one on a server.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # Nor is a small file worth a bar, as MLflow draws one where tqdm is installed.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        code = batchai.main(prog_name="batchai", complete_var="_BATCHAI_COMPLETE", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        click.echo("batchai: interrupted; jobs that run go on", err=True)
        sys.exit(EXIT_FAILED)
    except BatchAIError as error:
        if os.environ.get("BATCHAI_DEBUG"):
            raise
        echo(f"batchai: {error}", err=True)
        sys.exit(_code(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            silence(sys.stdout)
            sys.exit(EXIT_FAILED)
        if os.environ.get("BATCHAI_DEBUG"):
            raise
        from mlflow_batchai.tracking import stores

        sentence = stores.away(error) or f"{stores.sentence(error)} (with --debug: where)"
        echo(f"batchai: {sentence}", err=True)
        sys.exit(EXIT_FAILED)
    sys.exit(code if isinstance(code, int) else 0)


def _open_streams() -> None:
    """Give the process what a shell's ``>&-`` took: else the first file that is opened would be its standard output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (for as long as the process lives)


def _code(error: BatchAIError) -> int:
    if isinstance(error, JobFailedError):
        return error.exit_code or EXIT_FAILED
    if isinstance(error, NotFoundError):
        return EXIT_NOT_FOUND
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
