"""What commands have in common: how they are made, named things, scope, questions, notices."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mlflow_batchai.cli import output as printing
from mlflow_batchai.cli.output import Column
from mlflow_batchai.config import RESOURCE_GROUP, WORKSPACE, default, home
from mlflow_batchai.errors import UsageError
from mlflow_batchai.terminal import fit

if TYPE_CHECKING:
    from mlflow_batchai.tracking.runs import Tracking

OUTPUTS = ("json", "jsonc", "yaml", "table", "tsv", "none")
_COMMON = ("group_", "workspace_", "experiment_", "output_", "query_")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Scope:
    """Where names are looked for.

    Attributes:
        workspace_given: whether the person named it (option, environment or config.yaml), and it must be there.
        experiment: an MLflow experiment's name, empty for MLflow's default.
    """

    resource_group: str
    workspace: str
    workspace_given: bool
    experiment: str = ""
    experiment_given: bool = False


def command(
    columns: Sequence[Column] | None = None,
    *,
    example: str,
    scoped: bool = True,
    experiment: bool = False,
    output: str | None = None,
) -> Callable[[F], click.Command]:
    """A command whose function returns plain data, which is printed as ``--output`` and ``--query`` say.

    Args:
        columns: the table's columns.
        example: a command line, for the help.
        scoped: whether there are -g and -w, and the function takes ``scope`` first.
        experiment: whether there is -e.
        output: the format where nobody asked for one; None: json, or the user's default.
    """

    def decorate(function: F) -> click.Command:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            chosen = values.pop("output_") or default_output(output or "json")
            # A query that can't be used is refused before anything is done.
            query = printing.check_query(text) if (text := values.pop("query_")) is not None else None
            arguments = [_scope(values)] if scoped else []
            result = function(*arguments, **values)
            if isinstance(result, printing.Incomplete):
                printing.emit(result.result, chosen, query, columns)
                raise click.exceptions.Exit(1)
            printing.emit(result, chosen, query, columns)

        printed = f"How the result is printed.  [{output or 'json'}]"
        options = [
            click.option("-o", "--output", "output_", type=click.Choice(OUTPUTS), help=printed),
            click.option("--query", "query_", metavar="JMESPATH", help="The part of the result that is printed."),
            click.option("--debug", is_flag=True, hidden=True, expose_value=False),
        ]
        if scoped:
            options.insert(0, click.option("-w", "--workspace", "workspace_", metavar="NAME", help="Workspace.  [default]"))
            options.insert(0, click.option("-g", "--resource-group", "group_", metavar="NAME", help="Part of ids.  [batchai]"))
        if experiment:
            options.insert(2, click.option("-e", "--experiment", "experiment_", metavar="NAME", help="MLflow experiment."))
        wrapped: Callable[..., Any] = run
        for option in reversed(options):
            wrapped = option(wrapped)
        made = click.command(context_settings={"help_option_names": ["-h", "--help"]})(wrapped)
        # Options are listed as they are written: the command's own first.
        made.params = sorted(made.params, key=lambda param: param.name in _COMMON)
        made.epilog = f"Example: {example}"
        return made

    return decorate


def default_output(otherwise: str) -> str:
    """How results are printed where no option says it.

    Raises:
        UsageError: BATCHAI_OUTPUT is no way to print them.
    """
    chosen = default("output") or otherwise
    if chosen not in OUTPUTS:
        raise UsageError(f"BATCHAI_OUTPUT is '{chosen}'; it must be one of {', '.join(OUTPUTS)}")
    return chosen


def _scope(values: dict[str, Any]) -> Scope:
    workspace = values.pop("workspace_", None) or default("workspace")
    group = values.pop("group_", None) or default("resource_group") or RESOURCE_GROUP
    experiment = (values.pop("experiment_", None) or default("experiment")) if "experiment_" in values else None
    if not re.fullmatch(r"[-\w.]{1,90}", group):
        raise UsageError(f"the resource group '{group}' must have 1 to 90 letters, digits, '-', '_' or '.'")
    return Scope(group, workspace or WORKSPACE, bool(workspace), experiment or "", bool(experiment))


def named(
    what: str,
    option: Sequence[str] = ("-n", "--name"),
    dest: str = "name",
    optional: bool = False,
) -> Callable[[F], F]:
    """The name of a thing, given as an argument or as ``az`` wanted it, by an option.

    Args:
        what: the thing, for messages.
        option: how the option is spelled.
        dest: the function's argument.
        optional: whether it may be missing; it is None then.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*arguments: Any, **values: Any) -> Any:
            first, second = values.pop(f"{dest}_argument"), values.pop(f"{dest}_option")
            if first and second and first != second:
                raise click.UsageError(f"the {what} is named twice: '{first}' and '{second}'")
            if not (first or second or optional):
                raise click.UsageError(f"the name of the {what} is missing: {option[0]} NAME")
            return function(*arguments, **values, **{dest: first or second})

        wrapped: Callable[..., Any] = run
        metavar = what.upper().replace(" ", "_")
        text = f"The {what}; may stand without the option."
        known = functools.partial(_records, what)
        wrapped = click.option(*option, f"{dest}_option", metavar=metavar, help=text, shell_complete=known)(wrapped)
        argument = click.argument(f"{dest}_argument", required=False, metavar=f"[{metavar}]", shell_complete=known)
        return argument(wrapped)  # type: ignore[return-value]

    return decorate


_RECORDS = {"cluster": ("clusters", ".yaml"), "workspace": ("workspaces", ".json")}


def _records(what: str, context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names that a shell may complete: of what lies in the client's folder, at no more cost than a look into it."""
    folder, ending = _RECORDS.get(what, ("", ""))
    try:
        names = sorted(path.name.removesuffix(ending) for path in (home() / folder).glob(f"?*{ending}")) if folder else []
    except Exception:  # a shell that completes shows no errors
        return []
    return [name for name in names if name.startswith(incomplete)]


confirmed = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def ask(question: str, yes: bool) -> None:
    """Have a person agree, unless ``--yes`` has.

    Raises:
        UsageError: there is nobody to ask.
        click.Abort: he doesn't.
    """
    if yes:
        return
    if not os.isatty(0):
        raise UsageError(f"{question.rstrip('?')}: this needs -y where there is no terminal to ask on")
    click.confirm(fit(question, sys.stderr), abort=True, err=True)


def new_name(text: str, what: str) -> str:
    """A name for something new, by Batch AI's pattern.

    Raises:
        UsageError: it doesn't match.
    """
    if not re.fullmatch(r"[-\w]{1,64}", text):
        raise UsageError(f"the {what} '{text}' must have 1 to 64 letters, digits, '-' or '_'")
    return text


_noticed: set[str] = set()


def notice(sentence: str) -> None:
    """A sentence of ours on standard error, each only once."""
    if sentence not in _noticed:
        _noticed.add(sentence)
        printing.echo(f"batchai: {sentence}", err=True)


def tracking() -> Tracking:
    """The tracking store: MLFLOW_TRACKING_URI, or MLflow's own default."""
    from mlflow import get_tracking_uri

    # It tells of every table that it makes in a new store.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow_batchai.tracking import runs, stores

    os.environ.setdefault(stores.RETRIES, stores.RETRIES_AT_A_PROMPT)
    return runs.absolute(get_tracking_uri(), Path.cwd())
