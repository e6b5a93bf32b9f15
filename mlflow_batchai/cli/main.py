"""The command ``batchai`` itself: its nouns, how errors are shown, exit codes."""

from __future__ import annotations

import importlib
import sys

import click

from mlflow_batchai import __version__
from mlflow_batchai.errors import BatchAIError, JobFailedError, JobNotFoundError, UsageError

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_FOUND = 1, 2, 3

# noun -> (module, one line for --help): a noun's module is imported only when it is used.
NOUNS = {
    "doctor": ("mlflow_batchai.cli.doctor", "Whether a cluster is ready: what each node has, and what it lacks."),
    "job": ("mlflow_batchai.cli.job", "List, show, attach to and terminate jobs."),
    "horovod": ("mlflow_batchai.cli.horovod", "Build a Horovod wheel that works with today's frameworks."),
}


class Nouns(click.Group):
    """A group whose commands are modules that are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(NOUNS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in NOUNS:
            return None
        command: click.Command = getattr(importlib.import_module(NOUNS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, NOUNS[name][1]) for name in self.list_commands(ctx)])


@click.group(cls=Nouns, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="batchai")
@click.option("--debug", is_flag=True, hidden=True, help="Show the traceback of an error.")
@click.pass_context
def batchai(context: click.Context, debug: bool) -> None:
    """Batch AI jobs on machines of your own.

    Jobs are submitted with `mlflow run PROJECT --backend batchai`; these commands see and steer them.
    """
    context.obj = debug


def main() -> None:
    """Entry point of the command: errors become one sentence and an exit code."""
    debug = "--debug" in sys.argv[1:]
    try:
        code = batchai.main(prog_name="batchai", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Abort:
        click.echo("batchai: interrupted; jobs that run go on", err=True)
        sys.exit(EXIT_FAILED)
    except BatchAIError as error:
        if debug:
            raise
        click.echo(f"batchai: {error}", err=True)
        sys.exit(_code(error))
    except Exception as error:
        if debug:
            raise
        click.echo(f"batchai: {type(error).__name__}: {error} (with --debug: where)", err=True)
        sys.exit(EXIT_FAILED)
    sys.exit(code if isinstance(code, int) else 0)


def _code(error: BatchAIError) -> int:
    if isinstance(error, JobFailedError):
        return error.exit_code or EXIT_FAILED
    if isinstance(error, JobNotFoundError):
        return EXIT_NOT_FOUND
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
