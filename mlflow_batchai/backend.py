"""MLflow's front door: ``mlflow run --backend batchai`` and ``mlflow.projects.run(backend="batchai")``.

The one place that turns our errors into MLflow's ExecutionException. MLflow's CLI never waits for a plugin, so ``run`` itself
blocks until the job has ended, unless the configuration says ``wait: false``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from mlflow.entities import Experiment, RunStatus
from mlflow.exceptions import ExecutionException, MlflowException
from mlflow.projects.backend.abstract_backend import AbstractBackend
from mlflow.projects.submitted_run import SubmittedRun

from mlflow_batchai import detached, experiments, runner, runs
from mlflow_batchai.cluster import clusters
from mlflow_batchai.config import default
from mlflow_batchai.console import JobConsole
from mlflow_batchai.errors import BatchAIError, DocumentError, NotSupportedError, ProjectError
from mlflow_batchai.node import protocol
from mlflow_batchai.plan import projects
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.plan.volumes import check_volumes
from mlflow_batchai.signals import Signals
from mlflow_batchai.spec.batchai import BatchaiFile, merge
from mlflow_batchai.spec.loading import parse_batchai, read, read_batchai
from mlflow_batchai.spec.mlproject import MLProject, bind, find_entry_point, load_project

# What MLflow puts into the backend configuration itself.
MLFLOW_KEYS = ("ENV_MANAGER", "SYNCHRONOUS", "DOCKER_ARGS", "STORAGE_DIR", "build_image", "docker_auth")
DEFAULT_EXPERIMENT = "0"


class BatchAISubmittedRun(SubmittedRun):
    """A job, as MLflow's Python API sees it."""

    def __init__(self, submitted: detached.Submitted) -> None:
        super().__init__()
        self._submitted = submitted

    @property
    def run_id(self) -> str:
        return self._submitted.run_id

    @property
    def job_name(self) -> str:
        """The job's name, for the command line."""
        return self._submitted.job.name

    def wait(self) -> bool:
        """Show the job until it has ended and its run is finished; whether it succeeded."""
        with _as_execution_exception():
            state = runner.watch(self._submitted, JobConsole(self._submitted.job.plan["ranks"]), Signals())
        return state.execution_state == protocol.SUCCEEDED

    def get_status(self) -> str:
        return RunStatus.to_string(RunStatus.from_string(runner.state(self._submitted).run_status))

    def cancel(self) -> None:
        """End the job; returns when its run is KILLED (or had ended before)."""
        with _as_execution_exception():
            runner.cancel(self._submitted, "cancel()")
            runner.watch(self._submitted, JobConsole(self._submitted.job.plan["ranks"]), Signals(), from_start=False)


class BatchAIBackend(AbstractBackend):
    """The backend ``batchai``."""

    def run(
        self,
        project_uri: str,
        entry_point: str,
        params: Mapping[str, Any] | None,
        version: str | None,
        backend_config: Mapping[str, Any],
        tracking_uri: str,
        experiment_id: str,
    ) -> BatchAISubmittedRun:
        """Submit the project as a job; from MLflow's command line, stay until it has ended.

        Raises:
            ExecutionException: the job can't be submitted, or has not succeeded (then its reason is in the message).
        """
        command_line = _command_line()
        with _as_execution_exception():
            prepared, cluster, request, wait = _prepare(
                project_uri, entry_point, params or {}, version, backend_config, tracking_uri, experiment_id, command_line
            )
            signals = Signals()
            with signals.installed() if command_line else contextlib.nullcontext():
                console = JobConsole(prepared.plan["ranks"])
                with contextlib.closing(console):
                    submitted = runner.submit(prepared, cluster, request, console.transfer)
                page = runs.page(request.tracking.uri, request.experiment_id, submitted.run_id)
                how = f"see it with: mlflow ui --backend-store-uri {request.tracking.uri}"
                console.say(f"run {submitted.run_id}: {page or runs.shown(request.tracking.uri)}")
                if command_line and wait:
                    runner.outcome(submitted, runner.watch(submitted, console, signals))
                    console.say(f"job {submitted.job.name} succeeded; {page or how}")
                elif command_line:
                    console.say(f"job {submitted.job.name} is on its way; batchai job attach {submitted.job.name}")
                    signals.check(lambda: runner.cancel(submitted, "Ctrl-C"))
        return BatchAISubmittedRun(submitted)


def _prepare(
    project_uri: str,
    entry_name: str,
    params: Mapping[str, Any],
    version: str | None,
    backend_config: Mapping[str, Any],
    tracking_uri: str,
    experiment_id: str,
    command_line: Mapping[str, Any],
) -> tuple[Prepared, clusters.Cluster, runner.RunRequest, bool]:
    """All that can be checked and worked out before anything exists; whether to stay until the job has ended."""
    cwd = Path.cwd()
    _refuse_unusable(backend_config)
    directory = _fetch(project_uri, version, entry_name, params)
    project = load_project(directory)
    entry = find_entry_point(project, entry_name)
    config, source, documents, warnings = _configuration(project, backend_config)
    values = bind(entry, params, project.source)
    cluster, more = clusters.load(config.cluster or default("cluster"))
    manager = backend_config.get("ENV_MANAGER")
    prepared = projects.prepare(project, entry, values, config, cluster, cwd, manager, source, documents)
    console = JobConsole(1)
    for warning in [*warnings, *more, *prepared.warnings]:
        console.say(warning)
    check_volumes(prepared.plan["volumes"], cluster)
    for warning in cluster.engine.check(prepared.plan["nodeCount"], prepared.needs):
        console.say(warning)
    prepared = prepared.with_tools(cluster.engine.lacking)
    tracking = runs.absolute(tracking_uri, cwd)
    experiment = _experiment(tracking, experiment_id, config, command_line)
    container = prepared.plan["container"]
    python = "python_env.yaml" if prepared.plan["environment"] else container["image"] if container else cluster.python
    nodes, ranks = prepared.plan["nodeCount"], prepared.plan["ranks"]
    console.say(f"job {prepared.name}: {nodes} node(s) of cluster {cluster.name}, {ranks} rank(s), training with {python}")
    request = runner.RunRequest(
        tracking,
        experiment.experiment_id,
        experiment.name,
        config.workspace or default("workspace") or experiments.workspace_of(experiment),
        runs.source_tags(_source_name(project_uri), entry_name, directory, runner.user()),
        command_line.get("run_name"),
        command_line.get("run_id"),
    )
    return prepared, cluster, request, config.wait


def _refuse_unusable(backend_config: Mapping[str, Any]) -> None:
    """MLflow's options that mean nothing here are refused, never ignored."""
    if backend_config.get("DOCKER_ARGS"):
        raise NotSupportedError(
            "--docker-args: docker_env says what the container gets (volumes, environment); drop the option"
        )
    if backend_config.get("build_image"):
        raise NotSupportedError(
            "--build-image: nodes pull the image that docker_env names and get the code by the share; drop the option"
        )
    if backend_config.get("STORAGE_DIR"):
        raise NotSupportedError("--storage-dir: remote artifacts are not downloaded by this backend; drop the option")


def _fetch(project_uri: str, version: str | None, entry_point: str, params: Mapping[str, Any]) -> Path:
    """The project's folder here: as it is for a local one, a clone or an unpacked archive otherwise."""
    uri, _, subdirectory = project_uri.partition("#")
    local = Path(uri.removeprefix("file://")).expanduser()
    if version is None and local.is_dir():
        directory = local / subdirectory
        if not directory.is_dir():
            raise ProjectError(f"there is no folder '{subdirectory}' in {local}")
        return directory.absolute()
    if "://" not in uri and not uri.endswith((".git", ".zip")) and not uri.startswith("git@") and not local.exists():
        raise ProjectError(f"there is no project at {local.absolute()}")
    from mlflow.projects.utils import fetch_and_validate_project

    try:
        return Path(fetch_and_validate_project(project_uri, version, entry_point, dict(params)))
    except ExecutionException as error:
        raise ProjectError(str(error)) from error
    except Exception as error:  # git and zip raise what they like
        raise ProjectError(f"the project {runs.shown(project_uri)} can't be fetched: {' '.join(str(error).split())}") from error


def _configuration(project: MLProject, backend_config: Mapping[str, Any]) -> tuple[BatchaiFile, str, list[Path], list[str]]:
    """batchai.yaml (or the MLproject's block) with the backend configuration over it; its name, its files, warnings."""
    path = project.directory / "batchai.yaml"
    base: Mapping[str, Any] = {}
    source, files = project.source, [Path(project.source)]
    if path.is_file() and project.batchai is not None:
        raise DocumentError(f"{project.source} has a batchai block and there is a batchai.yaml beside it; keep one")
    if path.is_file():
        # An empty file says as much as none.
        base = read_batchai(path) if path.read_bytes().strip() else {}
        source, files = str(path), [path]
    elif project.batchai is not None:
        base, source = project.batchai, f"{project.source} (batchai)"
    override = {key: value for key, value in backend_config.items() if key not in MLFLOW_KEYS}
    named = override.pop("config", None)
    if named is not None:
        file = Path(str(named)).expanduser()
        override = merge(read(file), override)
        files.append(file)
    if override:
        source = f"{source} with --backend-config"
    config, warnings = parse_batchai(merge(base, override), source)
    return config, source, files, warnings


def _experiment(
    tracking: runs.Tracking, experiment_id: str, config: BatchaiFile, command_line: Mapping[str, Any]
) -> Experiment:
    """The experiment: the command line's, else batchai.yaml's, else config.yaml's, else MLflow's default."""
    mlflow = runs.client(tracking)
    named = any(command_line.get(key) for key in ("experiment_name", "experiment_id"))
    chosen = config.experiment or default("experiment")
    if chosen and not named and experiment_id == DEFAULT_EXPERIMENT:
        found = mlflow.get_experiment_by_name(chosen)
        return found or mlflow.get_experiment(mlflow.create_experiment(chosen))
    return mlflow.get_experiment(experiment_id)


def _command_line() -> Mapping[str, Any]:
    """Options of ``mlflow run``, if that is what called us: MLflow hands neither --run-id nor --run-name to plugins."""
    context = click.get_current_context(silent=True)
    callback = context.command.callback if context else None
    if context is None or callback is None or (callback.__module__, context.command.name) != ("mlflow.cli", "run"):
        return {}
    return {key: value for key, value in context.params.items() if value is not None}


def _source_name(project_uri: str) -> str:
    return str(Path(project_uri).absolute()) if Path(project_uri).exists() else runs.shown(project_uri)


@contextlib.contextmanager
def _as_execution_exception() -> Iterator[None]:
    try:
        yield
    except BatchAIError as error:
        raise ExecutionException(str(error)) from error
    except MlflowException as error:
        if isinstance(error, ExecutionException):
            raise
        raise ExecutionException(f"MLflow: {error.message}") from error
