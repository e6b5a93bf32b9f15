"""Nouns, verbs and options that commands share: names, scope, mounts, questions, notices."""

from __future__ import annotations

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from mlflow_batchai.cli import output as printing
from mlflow_batchai.cli.output import Column
from mlflow_batchai.config import RESOURCE_GROUP, WORKSPACE, default, home, untold
from mlflow_batchai.errors import UsageError
from mlflow_batchai.terminal import fit, is_quiet

if TYPE_CHECKING:
    from mlflow_batchai.tracking.runs import Tracking

OUTPUTS = ("json", "jsonc", "yaml", "table", "tsv", "none")
HELP = {"help_option_names": ["-h", "--help"]}
# Batch AI's first, then ours. Each is the attribute of its name of the module of its name.
NOUNS = {
    "run": "Run a command of this folder as a job, without an MLproject.",
    "workspace": "A name that clusters, experiments and jobs stand under.",
    "experiment": "MLflow experiments, which jobs are runs of.",
    "cluster": "Named sets of nodes.",
    "job": "Jobs: see, follow and steer them.",
    "sweep": "One project run with many sets of parameters (`sweep run` may be written `sweep`).",
    "storage": "File shares: Azure's, or directories that stand for them.",
    "doctor": "Whether a cluster is ready: what each node has, and what it lacks.",
    "gc": "Free what ended jobs have left: folders, staged files, environments, wheels.",
    "horovod": "Horovod for today's TensorFlow or PyTorch.",
    "key": "The key that signs your jobs.",
}
F = TypeVar("F", bound=Callable[..., Any])


def _setting(variable: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    """What an option calls that stands for an environment variable."""

    def chosen(context: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            os.environ[variable] = "1"

    return chosen


EVERYWHERE = [
    click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_setting("BATCHAI_QUIET"),
        help="Results and errors only: no notices, no progress.",
    ),
    click.Option(
        ["--no-color"], is_flag=True, expose_value=False, callback=_setting("NO_COLOR"), help="No colours, as with NO_COLOR."
    ),
    click.Option(["--debug"], is_flag=True, hidden=True, expose_value=False, callback=_setting("BATCHAI_DEBUG")),
]
"""Options of ``batchai``, its nouns and its verbs alike."""


class Noun(click.Group):
    """The commands on one kind of thing, in the order in which they were added.

    Args:
        text: its help; None: what ``NOUNS`` says.
        usual: the verb that is meant where none is named; None: one has to be.
        defaults: what ``command`` is told of each verb that doesn't say otherwise.
    """

    def __init__(self, name: str, text: str | None = None, usual: str | None = None, **defaults: Any) -> None:
        super().__init__(name, help=NOUNS[name] if text is None else text, context_settings=HELP)
        self.params += EVERYWHERE
        self._usual = usual
        self._defaults = defaults

    def verb(self, name: str, columns: Sequence[Column] | None = None, **options: Any) -> Callable[[F], click.Command]:
        """Add a function as a command; the arguments are those of ``command``."""

        def add(function: F) -> click.Command:
            made = command(columns, **{**self._defaults, **options})(function)
            self.add_command(made, name)
            return made

        return add

    def plain_verb(self, name: str, example: str) -> Callable[[Callable[..., Any]], click.Command]:
        """Add a function as a command that prints what is no data, and has no ``--output``."""
        return self.command(name, context_settings=HELP, epilog=f"Example: {example}", params=[*EVERYWHERE])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {name for option in EVERYWHERE for name in option.opts}
        first = next((word for word in args if word not in flags), None)
        if self._usual and first is not None and first not in (*self.list_commands(ctx), *ctx.help_option_names):
            args = [self._usual, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        # A shell that completes a line wants no errors.
        if args and not args[0].startswith("-") and args[0] not in known and not ctx.resilient_parsing:
            groups = {name: getattr(self.get_command(ctx, name), "commands", ()) for name in known}
            near = [f"{name} {args[0]}" for name, verbs in groups.items() if args[0] in verbs]
            near = near or difflib.get_close_matches(args[0], known, 1)
            meant = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
            raise click.UsageError(f"there is no command '{args[0]}' here{meant}; the commands are: {', '.join(known)}", ctx)
        return super().resolve_command(ctx, args)

    def summaries(self) -> list[tuple[str, str]]:
        """The commands, each with the first sentence of its help."""
        return [(name, f"{(made.help or '').split('.')[0]}.") for name, made in self.commands.items()]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.summaries())


class Scope(NamedTuple):
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
    output: str = "json",
) -> Callable[[F], click.Command]:
    """A command whose function returns plain data, which is printed as ``--output`` and ``--query`` say.

    Args:
        scoped: whether there are -g and -w, and the function takes ``scope`` first.
        experiment: whether there is -e.
        output: the format where neither an option nor the user's defaults name one.
    """
    common = [
        click.Option(["-o", "--output", "output_"], type=click.Choice(OUTPUTS), help=f"How the result is printed.  [{output}]"),
        click.Option(["--query", "query_"], metavar="JMESPATH", help="The part of the result that is printed."),
        *EVERYWHERE,
    ]
    if experiment:
        common.insert(0, click.Option(["-e", "--experiment", "experiment_"], metavar="NAME", help="MLflow experiment."))
    if scoped:
        common.insert(0, click.Option(["-w", "--workspace", "workspace_"], metavar="NAME", help="Workspace.  [default]"))
        common.insert(0, click.Option(["-g", "--resource-group", "group_"], metavar="NAME", help="Part of ids.  [batchai]"))

    def decorate(function: F) -> click.Command:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            chosen = values.pop("output_") or default_output(output)
            # A query that can't be used is refused before anything is done.
            query = printing.check_query(text) if (text := values.pop("query_")) is not None else None
            result = function(*([_scope(values)] if scoped else []), **values)
            printing.emit(result, chosen, query, columns)
            if isinstance(result, printing.Result) and not result.complete:
                raise click.exceptions.Exit(1)

        made = click.command(context_settings=HELP, epilog=f"Example: {example}")(run)
        made.params += common
        return made

    return decorate


def default_output(otherwise: str) -> str:
    """Form of results without ``--output``. Raises UsageError: BATCHAI_OUTPUT is no way to print them."""
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


def gathered(dest: str, make: Callable[..., Any], *options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Options that are one argument of a command's function.

    Args:
        make: called with the options' values, by name; returns the argument's value.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*arguments: Any, **values: Any) -> Any:
            import inspect  # help need not wait for it

            given = {name: values.pop(name) for name in inspect.signature(make).parameters}
            return function(*arguments, **values, **{dest: make(**given)})

        wrapped: Any = run
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped  # type: ignore[no-any-return]

    return decorate


def named(what: str, option: Sequence[str] = ("-n", "--name"), dest: str = "name", optional: bool = False) -> Callable[[F], F]:
    """The name of a thing, given as an argument or as ``az`` wanted it, by an option.

    Args:
        option: how the option is spelled.
        optional: whether it may be missing; it is None then.
    """

    def choose(name_argument: str | None, name_option: str | None) -> str | None:
        if name_argument and name_option and name_argument != name_option:
            raise click.UsageError(f"the {what} is named twice: '{name_argument}' and '{name_option}'")
        if not (name_argument or name_option or optional):
            raise click.UsageError(f"the name of the {what} is missing: {option[0]} NAME")
        return name_argument or name_option

    metavar = what.upper().replace(" ", "_")
    text = f"The {what}; may stand without the option."
    known = functools.partial(_records, what)
    return gathered(
        dest,
        choose,
        click.argument("name_argument", required=False, metavar=f"[{metavar}]", shell_complete=known),
        click.option(*option, "name_option", metavar=metavar, help=text, shell_complete=known),
    )


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
    """A name for something new, by Batch AI's pattern. Raises UsageError: it doesn't match."""
    if not re.fullmatch(r"[-\w]{1,64}", text):
        raise UsageError(f"the {what} '{text}' must have 1 to 64 letters, digits, '-' or '_'")
    return text


_noticed: set[str] = set()


def notice(*sentences: str, noted: bool = True) -> None:
    """Sentences of ours on standard error, each only once: a `Notice` in all, if that is noted, any other in this process.

    None with ``--quiet``.
    """
    if is_quiet():
        return
    for sentence in untold(sentences, noted):
        if sentence not in _noticed:
            _noticed.add(sentence)
            printing.echo(f"batchai: {sentence}", err=True)


def tracking() -> Tracking:
    """The tracking store: MLFLOW_TRACKING_URI, or MLflow's own default."""
    import logging

    # It tells of every table that it makes in a new store.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from mlflow_batchai.tracking import reading, runs, stores

    os.environ.setdefault(stores.RETRIES, stores.RETRIES_AT_A_PROMPT)
    if (uri := reading.default_uri()) is None:
        from mlflow import get_tracking_uri

        uri = get_tracking_uri()
    return runs.absolute(uri, Path.cwd())


class MountOptions(NamedTuple):
    """Options for more mounts than a document has, as in ``az batchai``, for jobs and clusters alike."""

    storage_account_name: str | None = None
    storage_account_key: str | None = None
    afs_name: str | None = None
    afs_mount_path: str = "afs"
    bfs_name: str | None = None
    bfs_mount_path: str = "bfs"
    nfs: str | None = None
    nfs_mount_path: str = "nfs"

    def __repr__(self) -> str:
        return f"MountOptions({self._replace(storage_account_key=None)[:]!r})"

    def use_account(self) -> None:
        """Have this process, and those that it starts, know the account by Batch AI's variables for it.

        Raises:
            UsageError: a key of no account.
        """
        from mlflow_batchai.plan.volumes import ACCOUNT_VARIABLE, KEY_VARIABLE

        name, key = self.storage_account_name, self.storage_account_key
        if name and name != os.environ.get(ACCOUNT_VARIABLE):
            os.environ[ACCOUNT_VARIABLE] = name
            # It opens another one.
            os.environ.pop(KEY_VARIABLE, None)
        if key:
            if not os.environ.get(ACCOUNT_VARIABLE):
                raise UsageError(
                    f"--storage-account-key: of which account? give --storage-account-name, or set {ACCOUNT_VARIABLE}"
                )
            os.environ[KEY_VARIABLE] = key

    def added_to(self, mounts: Mapping[str, Any] | None) -> dict[str, Any]:
        """A document's ``mountVolumes``, as plain data, with what the options add."""
        from mlflow_batchai.plan.volumes import ACCOUNT

        found = dict(mounts or {})
        share = {"azureFileUrl": f"https://{ACCOUNT}.file.core.windows.net/{self.afs_name}"}
        for given, key, entry, path in (
            (self.afs_name, "azureFileShares", share, self.afs_mount_path),
            (self.bfs_name, "azureBlobFileSystems", {"containerName": self.bfs_name}, self.bfs_mount_path),
            (self.nfs, "fileServers", {"fileServer": {"id": self.nfs}}, self.nfs_mount_path),
        ):
            if given:
                found[key] = [*(found.get(key) or ()), {**entry, "relativeMountPath": path}]
        return found


_MOUNT_OPTIONS = (
    ("--storage-account-name", "NAME", "The storage account of placeholders and of --afs-name, --bfs-name."),
    ("--storage-account-key", "KEY", "Its key; AZURE_BATCHAI_STORAGE_KEY keeps it out of `ps`."),
    ("--afs-name", "SHARE", "Azure file share to mount."),
    ("--afs-mount-path", "PATH", "Where, relative."),
    ("--bfs-name", "CONTAINER", "Azure blob container to mount."),
    ("--bfs-mount-path", "PATH", "Where, relative."),
    ("--nfs", "NAME", "File server to mount, by name or id."),
    ("--nfs-mount-path", "PATH", "Where, relative."),
)
mount_options = gathered(
    "mounts",
    MountOptions,
    *(
        click.option(option, metavar=metavar, default=value, show_default=value is not None, help=text)
        for (option, metavar, text), value in zip(_MOUNT_OPTIONS, MountOptions(), strict=True)
    ),
)
