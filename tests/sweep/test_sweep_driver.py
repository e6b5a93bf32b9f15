"""Driving a sweep to its end: how many jobs at once, which process may, what a failure does. Jobs are toys."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.tracking import MlflowClient
from sweep_world import Toys, add_job, begin, end_job

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.lookup import NoFolderError
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.errors import ClusterError, JobDetachedError, JobError, NotFoundError, ParameterError, ShareError
from mlflow_batchai.follower import detached, spawning
from mlflow_batchai.sweep import driver, sweeps
from mlflow_batchai.sweep.driver import Driver
from mlflow_batchai.sweep.results import Results, judge
from mlflow_batchai.tracking import runs


@pytest.fixture
def toys(mlflow: Any) -> Toys:
    return Toys(mlflow)


def drive(sweep: Any, toys: Toys, *pauses: Callable[[], Any]) -> tuple[Results, str]:
    """Drive it to its end; its results and its status.

    Args:
        pauses: what happens in each pause between two looks; the last goes on happening.
    """
    left = list(pauses)
    toys.sweep = sweep
    sleep = lambda seconds: (left.pop(0) if len(left) > 1 else left[0])()  # noqa: E731
    Driver(sweep, lambda: toys, print, sleep).run()
    seen = sweeps.look(runs.client(sweep.tracking), sweep)
    return judge(sweep.plan, seen.jobs, protocol.now_ms()), seen.status


def test_from_its_start_to_its_end(store, mlflow, toys) -> None:
    sweep = begin(store)
    found, status = drive(
        sweep,
        toys,
        lambda: toys.end(2, accuracy=0.9),
        lambda: toys.end(1, accuracy=0.5),
        lambda: toys.end(3, "FAILED", "rank 0 died\nboom"),
        lambda: toys.end(4, accuracy=0.7),
    )
    assert (toys.started, toys.most) == ([1, 2, 3, 4], 2)
    assert [row.name for row in found.rows] == ["toy-2", "toy-4", "toy-1", "toy-3"]
    run = mlflow.get_run(sweep.run_id)
    assert (run.info.status, status, run.data.metrics) == ("FAILED", "FAILED", {"accuracy": 0.9})
    assert run.data.tags[sweeps.TAG_BEST] == found.rows[0].runId
    assert json.loads(run.data.tags[sweeps.TAG_DRIVER])["host"] == socket.gethostname()
    assert run.data.tags["mlflow.note.content"] == found.description
    kept = json.loads(Path(mlflow.download_artifacts(sweep.run_id, sweeps.RESULTS)).read_text())
    assert kept == found.data(sweep.run_id, "FAILED")
    assert toys.told == [("failed", "3 succeeded, 1 failed; best is toy-2 with accuracy 0.9 (lr=0.1, bs=8)")]


def test_a_sweep_of_whose_end_nobody_is_told_ends_without_its_project(store, mlflow) -> None:
    """Its driver may have been started anew when all jobs were."""
    for told in (None, []):
        sweep = begin(store, combinations=[{"lr": "1"}], told=told)
        end_job(mlflow, add_job(mlflow, sweep, 1))
        Driver(sweep, Mock(side_effect=AssertionError), print).run()
        assert mlflow.get_run(sweep.run_id).info.status == "FINISHED"


def test_a_sweep_of_which_not_all_is_there_does_not_run(store, mlflow, monkeypatch) -> None:
    """Its process may be killed meanwhile, and no other one knows of it."""
    seen: list[str] = []
    real = MlflowClient.log_text

    def log_text(client: Any, run_id: str, *what: str) -> None:
        seen.append(client.get_run(run_id).info.status)
        real(client, run_id, *what)

    monkeypatch.setattr(MlflowClient, "log_text", log_text)
    sweep = begin(store)
    run = mlflow.get_run(sweep.run_id)
    assert (seen, run.info.status, run.info.end_time) == (["FAILED"], "RUNNING", None)


@pytest.mark.parametrize("name", ["toy", "it's", 'a "b"', "n" * 32, "per%cent; é `x` \\"])
def test_a_sweep_is_found_by_name_and_id(store, mlflow, name: str) -> None:
    sweep = begin(store, name=name, settings={"properties": {"nodeCount": 2}}, version="v1")
    assert sweeps.find(store, sweep.run_id).info.run_id == sweep.run_id
    assert sweeps.of_run(sweeps.find(store, name), store) == sweep
    assert [run.info.run_id for run in sweeps.unended(mlflow)] == [sweep.run_id]
    for other in ("'\"", "x' OR '1'='1", name[:-1]):
        with pytest.raises(NotFoundError, match="the newest are"):
            sweeps.find(store, other)


def test_a_plan_that_is_none(store, mlflow) -> None:
    sweep = begin(store)
    mlflow.log_text(sweep.run_id, json.dumps({"name": "toy"}), sweeps.PLAN)
    with pytest.raises(JobError, match="is no plan of a sweep"):
        sweeps.of_run(sweeps.find(store, "toy"), store)


def test_a_job_whose_run_is_deleted_is_not_started_again(store, mlflow, toys) -> None:
    def delete() -> None:
        toys.end(1, "FAILED", "boom")
        for run in sweeps.look(mlflow, sweep).jobs.values():  # the second one runs
            mlflow.delete_run(run.info.run_id)

    sweep = begin(store)
    found, status = drive(sweep, toys, delete, lambda: [toys.end(number) for number in (3, 4) if number in toys.active])
    assert (toys.started, status, found.counts) == ([1, 2, 3, 4], "FINISHED", "2 succeeded, 2 deleted")


def test_a_sweep_whose_run_is_deleted(store, mlflow, toys) -> None:
    sweep = begin(store)
    with pytest.raises(JobError, match="the run of sweep toy is deleted"):
        drive(sweep, toys, lambda: mlflow.delete_run(sweep.run_id))


# Going on with what another process has begun.


def test_jobs_of_which_nothing_was_started_are_started_and_no_others(store, mlflow, toys, tmp_path) -> None:
    sweep = begin(store, parallel=9)
    end_job(mlflow, add_job(mlflow, sweep, 1))
    (tmp_path / "share" / ".batchai" / "objects" / "ab").mkdir(parents=True)
    share = {runs.TAG_SHARE: f"file://{tmp_path}/share", runs.TAG_FOLDER: "jobs/toy-2", runs.TAG_CLUSTER: "local"}
    without_folder = add_job(mlflow, sweep, 2, **share)
    assert drive(sweep, toys, toys.end_all)[1] == "FINISHED"
    assert sorted(toys.started) == [2, 3, 4]
    assert mlflow.get_run(without_folder).info.lifecycle_stage == "deleted"


def test_jobs_that_nobody_can_follow(store, mlflow, toys, monkeypatch) -> None:
    def keep(submitted: Any) -> None:
        raise JobError("waiting for attach (needs TOKEN)")

    monkeypatch.setattr(detached, "keep_follower", keep)
    sweep = begin(store, combinations=[{"a": "1"}])
    with pytest.raises(JobError, match=r"needs TOKEN\); then: batchai sweep attach toy"):
        drive(sweep, toys, lambda: None)
    assert mlflow.get_run(sweep.run_id).info.status == "RUNNING"


def test_one_machine_starts_the_jobs(store, mlflow, toys) -> None:
    sweep = begin(store, {sweeps.TAG_DRIVER: json.dumps({**proc.identity(), "host": "far.example"})})
    with pytest.raises(JobError, match=r"are started on far.example; .* delete the tag batchai.sweepDriver"):
        drive(sweep, toys, toys.end_all)
    assert toys.started == [] and driver.ensure(sweep) is None
    mlflow.set_tag(sweep.run_id, runs.TAG_CANCEL, "true")
    assert drive(sweep, toys, toys.end_all)[1] == "KILLED", "any machine may end it"


def test_one_process_of_a_machine_drives(store) -> None:
    sweep = begin(store)
    for _ in range(2):
        lock = driver._lock(sweep)
        assert lock and driver._lock(sweep) is None
        lock.close()


@pytest.mark.parametrize("tag", ["", "{", "[]", '{"host": "x"}', json.dumps({**proc.identity(), "pid": "1"})])
def test_a_tag_that_anybody_can_write(store, mlflow, toys, monkeypatch, tag: str) -> None:
    started: list[Any] = []
    monkeypatch.setattr(spawning, "spawn", lambda *given: started.append(given) or 7)
    sweep = begin(store, {sweeps.TAG_DRIVER: tag})
    assert driver.ensure(sweep) == 7 and len(started) == 1
    assert drive(sweep, toys, toys.end_all)[1] == "FINISHED"
    assert driver.ensure(sweep) is None, "it has ended"


# Ending it.


def test_a_sweep_that_is_to_end(store, mlflow, toys) -> None:
    sweep = begin(store)
    found, status = drive(sweep, toys, lambda: mlflow.set_tag(sweep.run_id, runs.TAG_CANCEL, "true"), lambda: None)
    assert (toys.started, status) == ([1, 2], "KILLED")
    assert found.counts == "2 terminated, 2 not started"
    assert found.rows[-1].reason == "the sweep was ended"


def test_a_job_that_another_machine_just_submits_keeps_its_run(store, mlflow, toys, monkeypatch) -> None:
    """It has a run and no folder yet when the sweep is ended from here; once it has one it is ended."""
    there = json.dumps({**proc.identity(), "host": "elsewhere"})
    sweep = begin(store, {sweeps.TAG_DRIVER: there, runs.TAG_CANCEL: "true"})
    toys.sweep = sweep
    submitted = toys.submit(1)

    def of_run(run: Any, tracking: Any) -> Any:
        if not looked:
            raise NoFolderError(run, "the share")
        return submitted

    looked: list[Any] = []
    monkeypatch.setattr(driver.lookup, "of_run", of_run)
    monkeypatch.setattr(driver.detached, "ensure_follower", lambda found: None)
    found, status = drive(sweep, toys, lambda: looked.append(sweeps.look(mlflow, sweep).active))
    assert looked[0] == {1}, "its run is not deleted"
    assert (found.counts, status) == ("1 terminated, 3 not started", "KILLED")


@pytest.mark.parametrize("cancels", [True, False])
def test_ctrl_c_of_who_watches(store, mlflow, monkeypatch, cancels: bool, capsys) -> None:
    """It ends the sweep, or leaves it; how its jobs end is told."""
    monkeypatch.setattr(driver, "LOOK_SECONDS", 0.01)
    sweep, signals = begin(store, {sweeps.TAG_DRIVER: json.dumps(proc.identity())}, combinations=[{"a": "1"}]), Signals(cancels)
    run_id = add_job(mlflow, sweep, 1)

    def interrupt(_: float) -> None:
        if mlflow.get_run(sweep.run_id).data.tags.get(runs.TAG_CANCEL):
            end_job(mlflow, run_id, "KILLED", loss=0.5)
            mlflow.set_terminated(sweep.run_id, "KILLED")
        elif not signals.cancelled:
            signals._interrupt(2, None)

    monkeypatch.setattr(driver.time, "sleep", interrupt)
    if cancels:
        found, status = driver.watch(sweep, JobConsole(1), signals)
        assert (found.counts, status) == ("1 terminated", "KILLED")
        assert "job toy-1 terminated, loss 0.5" in capsys.readouterr().err
    else:
        with pytest.raises(JobDetachedError, match="sweep toy goes on: batchai sweep attach toy"):
            driver.watch(sweep, JobConsole(1), signals)
        assert runs.TAG_CANCEL not in mlflow.get_run(sweep.run_id).data.tags


def test_who_watches_starts_a_driver_once_where_the_other_was_dying(store, monkeypatch) -> None:
    """One that ends as well has said why."""
    monkeypatch.setattr(driver, "LOOK_SECONDS", 0.01)
    dying = subprocess.Popen(["sleep", "600"])
    its = {**proc.identity(), "pid": dying.pid, "started": proc.start_time(dying.pid)}
    sweep = begin(store, {sweeps.TAG_DRIVER: json.dumps(its)})
    log = driver._log(sweep)
    log.parent.mkdir(parents=True)
    log.write_text("batchai: a\nbatchai: the project has changed\n")
    started: list[Any] = []
    monkeypatch.setattr(spawning, "spawn", lambda *given: started.append(given) or dying.pid)
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: (dying.kill(), dying.wait()))
    with pytest.raises(JobError, match="nobody drives sweep toy any more: the project has changed; batchai sweep attach toy"):
        driver.watch(sweep, JobConsole(1), Signals())
    assert len(started) == 1


# Jobs that can't be started, and a store or a share that is away.

REFUSED = MlflowException("no such param", INVALID_PARAMETER_VALUE)


@pytest.mark.parametrize(
    ("number", "error", "outcome"),
    [
        (2, ParameterError("parameter 'data': /gone is not there"), "3 succeeded, 1 failed"),
        (2, REFUSED, "3 succeeded, 1 failed"),
        (1, ParameterError("boom"), "^job toy-1 could not be started: boom$"),
        (1, KeyError("ours"), "ours"),
    ],
    ids=["one", "mlflow-refuses", "the-first", "a-bug"],
)
def test_jobs_that_can_not_be_started(store, mlflow, toys, number: int, error: Exception, outcome: str) -> None:
    sweep, toys.failures, toys.error = begin(store), {number: 9}, error
    if "succeeded" in outcome:
        found, status = drive(sweep, toys, toys.end_all)
        assert (found.counts, status, toys.started) == (outcome, "FAILED", [1, 3, 4])
        lost = found.rows[-1]
        run = mlflow.get_run(lost.runId)
        assert lost.reason == f"it could not be started: {error}" and run.info.run_name == lost.name
        assert run.data.tags["mlflow.parentRunId"] == sweep.run_id
        return
    with pytest.raises(KeyError if outcome == "ours" else JobError, match=outcome):
        drive(sweep, toys, toys.end_all)
    assert mlflow.get_run(sweep.run_id).info.status == ("RUNNING" if outcome == "ours" else "FAILED")
    assert toys.told == ([] if outcome == "ours" else [("failed", outcome.strip("^$"))])


@pytest.mark.parametrize("error", [ConnectionError("http://ada:s3cret@server refused"), ShareError("http://server refused")])
def test_what_is_away_is_waited_for(store, toys, monkeypatch, capsys, error: Exception) -> None:
    toys.error, toys.failures = error, {1: 9}
    assert drive(begin(store), toys, toys.end_all)[1] == "FINISHED"
    assert capsys.readouterr().out.count("http://server refused (still trying)") == 1
    monkeypatch.setattr(driver, "PATIENCE_SECONDS", -1.0)
    toys.failures = {2: 1}
    with pytest.raises(type(error)):
        drive(begin(store), toys, lambda: None)


@pytest.mark.parametrize("call", ["search_runs", "download_artifacts", "set_tag"])
def test_a_store_that_hangs_up_when_its_process_begins(store, toys, fails_once, monkeypatch, capsys, call: str) -> None:
    """Whoever began the sweep waits for this process, and starts no other."""
    toys.sweep = begin(store)
    monkeypatch.setattr(driver, "JobStarter", lambda sweep, say: toys)
    monkeypatch.setattr(toys, "submit", lambda number: (Toys.submit(toys, number), toys.end_all())[0])
    monkeypatch.setattr(driver, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(driver, "TROUBLE_SECONDS", 0.01)
    monkeypatch.setattr(driver.stores, "bound_calls", lambda: None)
    monkeypatch.setattr(driver.sys, "argv", ["-m", toys.sweep.run_id])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.address)
    failed = fails_once(call, MlflowException("it hung up"))
    driver.main()
    assert failed and toys.started == [1, 2, 3, 4]
    assert sweeps.find(store, toys.sweep.run_id).info.status == "FINISHED"
    assert capsys.readouterr().err.count("batchai: it hung up (still trying)\n") == 1


def test_a_cluster_that_takes_no_more_jobs_for_now_is_waited_for_while_some_run(store, toys, monkeypatch) -> None:
    """A scheduler may let a user have a few jobs only, and each may take days."""
    monkeypatch.setattr(driver, "PATIENCE_SECONDS", 0.0)
    toys.error, toys.failures = ClusterError("Slurm refuses the job: QOSMaxSubmitJobPerUserLimit"), {3: 3}
    assert drive(begin(store), toys, lambda: toys.end(1), *[lambda: None] * 3, toys.end_all)[1] == "FINISHED"
    toys.failures = {1: 1}
    with pytest.raises(ClusterError, match="QOSMax"):
        drive(begin(store), toys, toys.end_all)
