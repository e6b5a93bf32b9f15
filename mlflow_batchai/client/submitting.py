"""Submit a job: read a project, prepare and check its plan, create its run, start it.

In steps, so that all of them but the last can be taken for many jobs before anything exists: ``read`` the project and its
documents, ``prepare`` one job of it, ``check`` that nodes can run it, ``submit`` it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_batchai import config, terminal
from mlflow_batchai.agent import protocol
from mlflow_batchai.client import runner
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.cluster import clusters
from mlflow_batchai.cluster.clusters import Cluster, share_secret
from mlflow_batchai.cluster.workspaces import arm_id
from mlflow_batchai.config import default, untold
from mlflow_batchai.documents.batchai import BatchaiFile, merge, parse_batchai, read_batchai
from mlflow_batchai.documents.mlproject import EntryPoint, MLProject, bind, find_entry_point, load_project, undeclared
from mlflow_batchai.documents.reading import read as read_document
from mlflow_batchai.documents.reading import read_text
from mlflow_batchai.errors import DocumentError, ProjectError, UsageError
from mlflow_batchai.follower import notify
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.follower.starting import attempt_fails_with_it, start
from mlflow_batchai.job import places, signing
from mlflow_batchai.job.jobs import Job, Origin
from mlflow_batchai.job.places import segment as place_of
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.plan import projects
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.plan.volumes import check_volumes
from mlflow_batchai.storage.objects import upload
from mlflow_batchai.tracking import experiments, index, runs
from mlflow_batchai.tracking.runs import Tracking

if TYPE_CHECKING:
    from mlflow.entities import Experiment


DEFAULT_EXPERIMENT = "0"
Say = Callable[[str], None]


def create(
    prepared: Prepared,
    cluster: Cluster,
    tracking: Tracking,
    experiment: Experiment,
    workspace: str,
    tags: Mapping[str, str],
    run_name: str | None = None,
    run_id: str | None = None,
    resource_group: str | None = None,
    unique: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Submitted:
    """Send the code, make the run, write the job folder, start the agents, start the follower.

    A submit that fails half-way is undone: what was started is ended, and a run that was made is FAILED with the reason.

    Args:
        tags: MLflow's own tags of the run.
        run_id: an existing run to use, or None.
        resource_group: part of the job's id; None: the default one.
        unique: whether its workspace and experiment may have no other job of that name.
        progress: told (bytes sent, bytes to send) while files go up.
    """
    share = cluster.share
    sets = (prepared.code, prepared.inputs, prepared.tools)
    if len(protocol.encode([prepared.plan.record()])) > protocol.LONGEST_DOCUMENT - protocol.LONGEST_RECORD:
        raise ProjectError(
            f"the project and its parameters have {sum(map(len, sets))} files, more than a plan takes: leave some out"
            " (.batchaiignore or .gitignore), or put them on the share in one archive"
        )
    for files in sets:
        upload(share, files, progress)
    places.note(share, prepared.plan.folder_prefix)
    segment = place_of(workspace, experiment.name, prepared.plan.name, prepared.plan.job)
    folder = "/".join(part for part in (prepared.plan.folder_prefix, segment) if part)
    mlflow = runs.client(tracking)
    tags = {**tags, **_tags(prepared, cluster, workspace, resource_group), runs.TAG_FOLDER: folder}
    with contextlib.ExitStack() as undo:
        run = runs.create(mlflow, experiment.experiment_id, tags, prepared.parameters, run_name, run_id)
        run_id = str(run.info.run_id)
        undo.enter_context(runs.fails_with_it(mlflow, run_id))
        if unique and not index.is_first(mlflow, run):
            mlflow.delete_run(run_id)  # so that it doesn't take the name
            raise UsageError(f"somebody else has just started a job '{prepared.plan.name}' in '{experiment.name}'")
        plan = replace(
            prepared.plan,
            secret_variables=tuple(sorted(prepared.secrets)),
            cluster=cluster.name,
            workspace=workspace,
            experiment=experiment.name,
            experiment_id=experiment.experiment_id,
            run_id=run_id,
            run_name=run.info.run_name or "",
            run_parameters=dict(prepared.parameters),
            segment=segment,
            folder=folder,
        )
        paths = protocol.JobPaths(folder)
        undo.enter_context(attempt_fails_with_it(share, folder))
        share.write(paths.spec, protocol.encode([prepared.document]))
        if prepared.changes:
            share.write(paths.code, protocol.encode([prepared.changes]))
        signed = signing.sign(paths.plan, plan.record())
        share.write(paths.plan, protocol.encode([signed]))
        told = {
            "variables": prepared.secrets,
            "share": share_secret(cluster.location, prepared.seconds),
            **prepared.credentials,
        }
        origin = Origin(plan, signing.examine(paths.plan, signed)[0], Signature.OWN)
        submitted = Submitted(Job(share, folder, 1, origin), run_id, tracking, told=prepared.told)
        start(submitted, cluster, told)
    return submitted


def _tags(prepared: Prepared, cluster: Cluster, workspace: str, resource_group: str | None) -> dict[str, str]:
    """Tags by which jobs are found; defaults are left out."""
    group = resource_group or config.default("resource_group") or config.RESOURCE_GROUP
    # A cluster may belong to another workspace than its job.
    placed = {runs.TAG_RESOURCE_GROUP: group, runs.TAG_CLUSTER_ID: _cluster_id(cluster)}
    usual = (config.RESOURCE_GROUP, arm_id(group, workspace, "clusters", cluster.name))
    return {
        runs.TAG_JOB: prepared.plan.name,
        runs.TAG_CLUSTER: cluster.name,
        runs.TAG_WORKSPACE: workspace,
        runs.TAG_SHARE: cluster.share.url,
        runs.TAG_STATE: protocol.QUEUED,
        **{tag: value for tag, value in placed.items() if value not in usual},
        runs.TAG_TOOL: prepared.plan.framework,
        runs.TAG_ENGINE: cluster.document.engine.value,
        **runs.sizes(prepared.plan),
    }


def _cluster_id(cluster: Cluster) -> str:
    record = cluster.record
    group, workspace = (record.resource_group, record.workspace) if record else (config.RESOURCE_GROUP, config.WORKSPACE)
    return arm_id(group, workspace, "clusters", cluster.name)


@dataclass(frozen=True)
class Source:
    """A project with the documents that say how it is to run.

    Attributes:
        config: batchai.yaml with the user's own settings over it.
        name: what the configuration is called in messages.
    """

    uri: str
    project: MLProject
    entry: EntryPoint
    config: BatchaiFile
    name: str
    documents: list[Path]
    cluster: clusters.Cluster


@dataclass(frozen=True)
class Ready:
    """A job that was checked, and nothing of it exists yet."""

    source: Source
    prepared: Prepared

    @property
    def sentence(self) -> str:
        """Describe the job that is about to start, and where it will run."""
        plan, cluster = self.prepared.plan, self.source.cluster
        container = plan.container
        file = self.source.project.python_env or self.source.project.conda_env
        python = file.name if file and plan.environment else container.image if container else cluster.python
        return (
            f"job {self.prepared.plan.name}: {plan.node_count} node(s) of cluster {cluster.name}, {plan.ranks} rank(s), "
            f"training with {python}"
        )


def read(
    uri: str,
    entry_point: str,
    version: str | None,
    settings: Mapping[str, Any],
    say: Say,
    settings_name: str = "--backend-config",
    entry: EntryPoint | None = None,
) -> Source:
    """Get the project and read what it says.

    Args:
        uri: a folder, a git repository or an archive, ``#folder`` behind it for a folder inside.
        version: git commit or branch, or None.
        settings: over the keys of batchai.yaml; ``config`` names a file that is over it as well.
        settings_name: what ``settings`` are called in messages.
        entry: what is run instead of an entry point of the project.
    """
    project = load_project(_fetch(uri, version))
    entry = entry or find_entry_point(project, entry_point)
    config, name, documents, warnings = _configuration(project, settings, settings_name, _here(uri, version) is None)
    cluster, more = clusters.load(config.cluster or default("cluster"))
    for warning in untold([*warnings, *more]):
        say(str(warning))  # noted already: a `say` that asks whether it was said must not drop it
    return Source(uri, project, entry, config, name, documents, cluster)


def prepare(
    source: Source,
    parameters: Mapping[str, Any],
    env_manager: str | None,
    say: Say,
    cwd: Path | None = None,
    like: Ready | None = None,
) -> Ready:
    """Work out one job of a project; no node is asked.

    Args:
        cwd: where relative paths start from; default: the current folder.
        like: another job of the same source, whose code is taken as it was then.

    Raises:
        BatchAIError: what would keep it from running and can be seen from here.
    """
    values = bind(source.entry, parameters, source.project.source)
    prepared = projects.prepare(
        source.project,
        source.entry,
        values,
        source.config,
        source.cluster,
        cwd or Path.cwd(),
        env_manager,
        source.name,
        source.documents,
        like.prepared if like else None,
    )
    for warning in untold([*undeclared(source.entry, values), *prepared.warnings]):
        say(str(warning))
    return Ready(source, prepared)


def check(ready: Ready, say: Say) -> Ready:
    """The same job, checked as by ``check_prepared``."""
    return replace(ready, prepared=check_prepared(ready.prepared, ready.source.cluster, say))


def check_prepared(prepared: Prepared, cluster: Cluster, say: Say) -> Prepared:
    """Ask the cluster's nodes whether they can run the job; the same job, with what they lack and are sent.

    Raises:
        BatchAIError: they can't.
    """
    notify.check(prepared.plan.notify, {**prepared.secrets, **prepared.told})
    check_volumes(prepared.plan.volumes, cluster)
    checked = cluster.engine.check(prepared.plan.node_count, prepared.needs)
    for warning in checked.warnings:
        say(warning)
    return prepared.with_tools(checked.missing)


def choose_experiment(
    tracking: runs.Tracking, source: Source, name: str | None = None, experiment_id: str | None = None
) -> Experiment:
    """The experiment that was named, else MLflow's own variables', batchai.yaml's, config.yaml's, else MLflow's default.

    One that isn't there yet is made, if it is called by its name.
    """
    # mlflow.set_experiment sets the first of them, as people may for programs.
    told = experiment_id or (os.environ.get("MLFLOW_EXPERIMENT_ID") if not name else None)
    name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or source.config.experiment or default("experiment")
    if name and not told:
        return experiment_named(tracking, name)
    return runs.client(tracking).get_experiment(told or DEFAULT_EXPERIMENT)


def experiment_named(tracking: runs.Tracking, name: str) -> Experiment:
    """The experiment of that name; one that isn't there yet is made."""
    from mlflow.exceptions import MlflowException

    mlflow = runs.client(tracking)
    if found := mlflow.get_experiment_by_name(name):
        return found
    try:
        return mlflow.get_experiment(mlflow.create_experiment(name))
    except MlflowException as error:
        # Somebody else may have made it since.
        if error.error_code == "RESOURCE_ALREADY_EXISTS" and (found := mlflow.get_experiment_by_name(name)):
            return found
        raise


def parent_tags(tracking: runs.Tracking, run_id: str | None) -> dict[str, str]:
    """Tags that make a job's run a child of this thread's active run, if that is in the same store.

    Args:
        run_id: the run that is to be the job's: it is no child of itself.
    """
    import mlflow

    parent = mlflow.active_run()
    if parent is None or parent.info.run_id == run_id:
        return {}
    same = runs.absolute(mlflow.get_tracking_uri(), Path.cwd()).uri == tracking.uri
    return {"mlflow.parentRunId": parent.info.run_id} if same else {}


def submit(
    ready: Ready,
    tracking: runs.Tracking,
    experiment: Experiment,
    run_name: str | None = None,
    run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Submitted:
    """Start the job and its follower.

    Args:
        run_id: a run that is there, to be used for it.
        tags: besides those that every run of a job has.

    Raises:
        BatchAIError: it could not be submitted; nothing of it is left running.
    """
    source = ready.source
    own = runs.source_tags(_shown(source.uri), source.entry.name, source.project.directory, runner.user())
    workspace = source.config.workspace or default("workspace") or experiments.workspace_of(experiment)
    whole = {**(tags or {}), **own}
    return create(ready.prepared, source.cluster, tracking, experiment, workspace, whole, run_name, run_id, progress=progress)


def run(
    ready: Ready,
    tracking: runs.Tracking,
    experiment: Experiment,
    run_name: str | None = None,
    run_id: str | None = None,
    attended: bool = True,
    tags: Mapping[str, str] | None = None,
) -> Submitted:
    """Submit a job as a command line does: say what is done, and stay until it has ended, unless its ``wait`` is false.

    Args:
        tags: of the run, besides those that every run of a job has.
        attended: False: no command line, but a program: signals are left to it, and nothing is waited for.

    Raises:
        JobFailedError: the job has not succeeded.
        JobDetachedError: a signal, or a person, says to leave it; it goes on.
    """
    signals = Signals(asks=True)
    with signals.installed() if attended else contextlib.nullcontext():
        console = JobConsole(ready.prepared.plan.ranks)
        console.say(ready.sentence)
        with contextlib.closing(console):
            tags = {**parent_tags(tracking, run_id), **(tags or {})}
            submitted = submit(ready, tracking, experiment, run_name, run_id, tags, console.transfer)
        page = runs.page(tracking.uri, experiment.experiment_id, submitted.run_id)
        console.say(f"run {submitted.run_id}: {page or tracking.uri}")
        if attended and ready.source.config.wait:
            runner.outcome(submitted, runner.watch(submitted, console, signals))
            local = runs.page("http://127.0.0.1:5000", experiment.experiment_id, submitted.run_id)
            how = f"see it with: mlflow ui --backend-store-uri {tracking.uri}, at {local}"
            console.say(f"job {submitted.job.name} succeeded; {page or how}")
        elif attended:
            console.say(f"job {submitted.job.name} submitted; follow it with: batchai job attach {submitted.job.name}")
            signals.check(lambda: runner.cancel(submitted, "Ctrl-C"))
    return submitted


def _shown(uri: str) -> str:
    return str(Path(uri).absolute()) if Path(uri).exists() else terminal.shown(uri)


def _here(project_uri: str, version: str | None) -> Path | None:
    """The folder of this machine that a project's address names, if it is not fetched."""
    local = Path(project_uri.partition("#")[0].removeprefix("file://")).expanduser()
    return local if version is None and local.is_dir() else None


def _fetch(project_uri: str, version: str | None) -> Path:
    """The project's folder here: as it is for a local one, a clone or an unpacked archive otherwise."""
    uri, _, subdirectory = project_uri.partition("#")
    subdirectory = subdirectory.strip("/")
    if local := _here(project_uri, version):
        directory = local / subdirectory
        if not directory.is_dir():
            raise ProjectError(f"there is no folder '{subdirectory}' in {local}")
        return directory.absolute()
    local = Path(uri.removeprefix("file://")).expanduser()
    if "://" not in uri and not uri.endswith((".git", ".zip")) and not uri.startswith("git@") and not local.exists():
        raise ProjectError(f"there is no project at {local.absolute()}")
    # Not fetch_and_validate_project: MLflow's own reader of an MLproject is another one than ours.
    from mlflow.projects.utils import _fetch_project

    logging.getLogger(_fetch_project.__module__).addFilter(_mask)  # it tells of the address
    try:
        return Path(_fetch_project(f"{uri}#{subdirectory}" if subdirectory else uri, version))
    except Exception as error:  # git, archives and servers raise what they like
        raise ProjectError(f"the project {terminal.shown(project_uri)} can't be fetched: {_why(error)}") from error


def _mask(record: logging.LogRecord) -> bool:
    record.msg, record.args = _masked(record.getMessage()), ()
    return True


def _masked(text: str) -> str:
    """A sentence with the addresses in it as they may be shown."""
    return terminal.printable(re.sub(r"\S+://\S+", lambda found: terminal.shown(found[0]), text))


def _why(error: Exception) -> str:
    """The reason for which a project can't be fetched, in the words of MLflow or git; others' are no words for people."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, ImportError):
        return str(error) if shutil.which("git") else "git is not installed, or not on PATH"
    if isinstance(error, zipfile.BadZipFile):
        return "it is no zip archive"
    if isinstance(error, MlflowException):
        # Of a version MLflow's sentence goes on with GitPython's account of a command.
        return _masked(error.message.partition(" Error: ")[0])
    if said := re.findall(r"(?:fatal|error): ([^\n]+)", str(getattr(error, "stderr", ""))):
        return _masked(said[0].strip())
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or "there is no answer, or none that is a project; get it by hand (git clone, unzip), and name the folder"


def _configuration(
    project: MLProject, settings: Mapping[str, Any], settings_name: str, is_fetched: bool
) -> tuple[BatchaiFile, str, list[Path], list[str]]:
    """batchai.yaml (or the MLproject's block) with the user's settings over it; its name, its files, warnings."""
    path = project.directory / "batchai.yaml"
    base: Mapping[str, Any] = {}
    source, files = project.source, [Path(project.source)]
    if path.exists() and project.batchai is not None:
        raise DocumentError(f"{project.source} has a batchai block and there is a batchai.yaml beside it; keep one")
    if path.exists():
        # An empty file says as much as none.
        base = read_batchai(path) if read_text(path).strip() else {}
        source, files = str(path), [path]
    elif project.batchai is not None:
        base, source = project.batchai, f"{project.source} (batchai)"
    told = base.get("notify")
    if is_fetched and isinstance(told, Mapping) and told.get("command"):
        raise DocumentError(
            f"{source}: notify.command would run on this machine, and the project is not of this machine; take it over by"
            f" {settings_name}, or into config.yaml, and drop it there"
        )
    override = dict(settings)
    named = override.pop("config", None)
    if named is not None:
        file = Path(str(named)).expanduser()
        override = merge(read_document(file), override)
        files.append(file)
    if override:
        source = f"{source} with {settings_name}"
    config, warnings = parse_batchai(merge(base, override), source)
    return config, source, files, warnings
