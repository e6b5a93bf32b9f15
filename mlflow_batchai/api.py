"""Jobs from Python, for notebooks and programs: ``mlflow_batchai.submit`` and ``mlflow_batchai.attach``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_batchai.client import lookup, submitting
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.submitted import SubmittedJob
from mlflow_batchai.documents.batchai import merge
from mlflow_batchai.follower import detached
from mlflow_batchai.tracking import runs, stores


def submit(
    project: str | os.PathLike[str],
    *,
    entry_point: str = "main",
    parameters: Mapping[str, Any] | None = None,
    cluster: str | None = None,
    nodes: int | None = None,
    config: Mapping[str, Any] | None = None,
    experiment: str | None = None,
    run_name: str | None = None,
    run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    env_manager: str | None = None,
    version: str | None = None,
    tracking_uri: str | None = None,
    wait: bool = False,
) -> SubmittedJob:
    """Run an MLproject as a job, and return at once.

    What can be checked is checked before anything exists. Inside ``with mlflow.start_run()`` the job's run is a child of that
    run. May be called by several threads at once.

    Args:
        project: a folder, a git repository or an archive, as ``mlflow run`` takes it (``...#folder``: a folder inside).
        entry_point: of the MLproject.
        parameters: name -> value, of the entry point.
        cluster: default: what batchai.yaml says, else what ``config.yaml`` does, else ``local``.
        nodes: ``properties.nodeCount``.
        config: over the keys of batchai.yaml, key by key: ``{"properties": {"secrets": [...]}, "retries": 2}``.
        experiment: by name, made if it isn't there; default: as MLflow was told (``mlflow.set_experiment``), else what
            batchai.yaml says, else what ``config.yaml`` does.
        run_name: default: MLflow makes one up.
        run_id: a run that is there, to be used for the job.
        tags: of the run, besides those that every job's has.
        env_manager: ``virtualenv`` or ``uv`` build the project's python_env.yaml on the nodes; default: they train with the
            cluster's ``python``.
        version: git commit or branch of a project in a repository.
        tracking_uri: default: MLflow's.
        wait: whether to stay until the job has ended, with its output shown; Ctrl-C then ends the job.

    Raises:
        JobFailedError: with ``wait``: it has failed.
        BatchAIError: it can't be submitted; nothing of it is left running.
    """
    console = JobConsole(1)
    named = {"cluster": cluster, "properties": {"nodeCount": nodes} if nodes is not None else None}
    settings = merge(dict(config or {}), {key: value for key, value in named.items() if value is not None})
    with stores.as_tracking_error():
        source = submitting.read(os.fspath(project), entry_point, version, settings, console.say, "config=")
        ready = submitting.check(submitting.prepare(source, parameters or {}, env_manager, console.say), console.say)
        tracking = _tracking(tracking_uri)
        console.say(ready.sentence)
        given = {**submitting.parent_tags(tracking, run_id), **(tags or {})}
        with contextlib.closing(console):
            where = submitting.choose_experiment(tracking, source, experiment)
            submitted = submitting.submit(ready, tracking, where, run_name, run_id, given, console.transfer)
    job = SubmittedJob(submitted)
    console.say(f"run {job.run_id}: {job.url or tracking.uri}")
    return job.stay() if wait else job


def attach(name: str, *, tracking_uri: str | None = None) -> SubmittedJob:
    """A job that was submitted earlier, by whomever: this machine only has to see its share.

    If nobody relays it into MLflow any more, that goes on from here.

    Args:
        name: the job's name, or the id of its run.
        tracking_uri: default: MLflow's.

    Raises:
        JobNotFoundError: there is no such job.
        JobError: its folder is not on its share.
        ShareError: its share is not on this machine.
    """
    with stores.as_tracking_error():
        found = lookup.find(name, _tracking(tracking_uri))
    detached.ensure_follower(found)
    return SubmittedJob(found)


def _tracking(uri: str | None) -> runs.Tracking:
    import mlflow

    return runs.absolute(uri or mlflow.get_tracking_uri(), Path.cwd())
