"""MLflow's entry point: ``mlflow run --backend batchai`` and ``mlflow.projects.run(backend="batchai")``.

The one place that turns our errors into MLflow's ExecutionException. MLflow's CLI never waits for a plugin, so ``run`` itself
blocks until the job has ended, unless the configuration says ``wait: false``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import inspect
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import mlflow
import mlflow.projects
from mlflow.entities import Experiment
from mlflow.exceptions import ExecutionException, MlflowException
from mlflow.projects.backend.abstract_backend import AbstractBackend
from mlflow.projects.submitted_run import SubmittedRun

from mlflow_batchai.client import submitting
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.submitted import SubmittedJob
from mlflow_batchai.errors import BatchAIError, JobFailedError, NotSupportedError
from mlflow_batchai.follower import detached
from mlflow_batchai.terminal import fit
from mlflow_batchai.tracking import runs, stores

# MLflow's options that mean nothing here.
UNUSABLE = {
    "DOCKER_ARGS": "--docker-args: docker_env says what the container gets (volumes, environment)",
    "build_image": "--build-image: nodes pull the image that docker_env names and get the code by the share",
    "STORAGE_DIR": "--storage-dir: remote artifacts are not downloaded by this backend",
}
# What MLflow puts into the backend configuration itself.
MLFLOW_KEYS = ("ENV_MANAGER", "SYNCHRONOUS", "docker_auth", *UNUSABLE)


class BatchAISubmittedRun(SubmittedRun):
    """A job, as MLflow's Python API sees it."""

    def __init__(self, submitted: detached.Submitted) -> None:
        super().__init__()
        self._job = SubmittedJob(submitted)
        self._shown = False

    @property
    def run_id(self) -> str:
        return self._job.run_id

    @property
    def job_name(self) -> str:
        """The job's name, for the command line."""
        return self._job.name

    def wait(self) -> bool:
        """Show the job until it has ended and its run is finished; whether it succeeded. Ctrl-C ends the wait, not the job."""
        with _as_execution_exception():
            try:
                self._job.wait(show=not self._shown)
            except JobFailedError as error:
                click.echo(f"batchai: {fit(str(error), sys.stderr)}", err=True)
                return False
            finally:
                self._shown = True
        return True

    def stay(self) -> None:
        """Show the job to its end; Ctrl-C ends it.

        For ``mlflow.projects.run(synchronous=True)``: where MLflow waits itself, it says no more than that a run has failed,
        and sets a run FAILED that was KILLED.

        Raises:
            ExecutionException: it has not succeeded.
        """
        with _as_execution_exception():
            self._job.stay()
        self._shown = True

    def get_status(self) -> str:
        """The run's status: SCHEDULED, RUNNING, or, once all of it is in MLflow, FINISHED, FAILED, KILLED."""
        with _as_execution_exception():
            return self._job.status

    def cancel(self) -> None:
        """End the job; returns when its run is KILLED (or had ended before)."""
        with _as_execution_exception():
            self._job.cancel()


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
        """Submit the project as a job; stay until it has ended, if MLflow is to wait for it or is a command line.

        Raises:
            ExecutionException: the job can't be submitted, or has not succeeded (then its reason is in the message).
        """
        command_line, run_name, run_id = _caller(JobConsole(1).say)
        with _as_execution_exception():
            ready = _prepare(project_uri, entry_point, params or {}, version, backend_config, JobConsole(1).say)
            tracking = runs.absolute(tracking_uri, Path.cwd())
            if command_line:
                # A process that ends looks through all of its objects, of which MLflow has a second's worth.
                atexit.register(gc.freeze)
            with stores.tried_shortly() if command_line else contextlib.nullcontext():
                experiment = _experiment(tracking, ready.source, experiment_id, command_line)
            submitted = submitting.run(ready, tracking, experiment, run_name, run_id, attended=bool(command_line))
        run = BatchAISubmittedRun(submitted)
        if backend_config.get("SYNCHRONOUS"):
            run.stay()
        return run


def _prepare(
    project_uri: str,
    entry_point: str,
    params: Mapping[str, Any],
    version: str | None,
    backend_config: Mapping[str, Any],
    say: submitting.Say,
) -> submitting.Ready:
    """Check and plan everything that is possible before anything exists."""
    _refuse_unusable(backend_config)
    settings = {key: value for key, value in backend_config.items() if key not in MLFLOW_KEYS}
    source = submitting.read(project_uri, entry_point, version, settings, say)
    ready = submitting.prepare(source, params, backend_config.get("ENV_MANAGER"), say)
    return submitting.check(ready, say)


def _experiment(
    tracking: runs.Tracking, source: submitting.Source, experiment_id: str, command_line: Mapping[str, Any]
) -> Experiment:
    """MLflow gives its default experiment for one that nobody named, which batchai.yaml may name instead."""
    named = any(command_line.get(key) for key in ("experiment_name", "experiment_id"))
    given = named or experiment_id != submitting.DEFAULT_EXPERIMENT
    return submitting.choose_experiment(tracking, source, experiment_id=experiment_id if given else None)


def _refuse_unusable(backend_config: Mapping[str, Any]) -> None:
    """MLflow's options that mean nothing here are refused, never ignored."""
    for key, told in UNUSABLE.items():
        if backend_config.get(key):
            raise NotSupportedError(f"{told}; drop the option")


def _caller(say: submitting.Say) -> tuple[Mapping[str, Any], str | None, str | None]:
    """(options of ``mlflow run`` if that is what called us, run_name and run_id that ``mlflow.projects.run`` was given).

    MLflow tells plugins none of it: it is read where it stands, and ``say`` is told if this MLflow has it elsewhere.
    """
    context = click.get_current_context(silent=True)
    callback = context.command.callback if context else None
    options: Mapping[str, Any] = {}
    if context and callback and (callback.__module__, context.command.name) == ("mlflow.cli", "run"):
        options = {key: value for key, value in context.params.items() if value is not None}
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not mlflow.projects.run.__code__:
        frame = frame.f_back
    found = frame.f_locals if frame else {}
    if not {"run_name", "run_id"} <= found.keys() or (sys.argv[:1] == [shutil.which("mlflow")] and not options):
        say(
            f"MLflow {mlflow.__version__} calls backends in another way than is known here: the run's name, --run-id, and that"
            " `mlflow run` stays until the job has ended may get lost; take an earlier MLflow"
        )
    return options, found.get("run_name"), found.get("run_id")


@contextlib.contextmanager
def _as_execution_exception() -> Iterator[None]:
    try:
        yield
    except BatchAIError as error:
        raise ExecutionException(fit(str(error), sys.stderr)) from error  # which MLflow's command prints
    except MlflowException as error:
        if isinstance(error, ExecutionException):
            raise
        raise ExecutionException(fit(stores.away(error) or f"MLflow: {error.message}", sys.stderr)) from error
