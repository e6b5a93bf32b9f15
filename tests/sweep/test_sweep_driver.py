"""Driving a sweep to its end: how many jobs at once, which process leads, what a signal and a failure do. Jobs are toys."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from plans import bare_plan
from sweep_world import Toys, add_job, begin, end_job

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.client import attempts, lookup
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.errors import JobDetachedError, JobError, NotFoundError, ParameterError, TrackingError
from mlflow_batchai.follower import detached
from mlflow_batchai.sweep import driver, leader_lock, sweeps
from mlflow_batchai.sweep.driver import Driver
from mlflow_batchai.sweep.leader_lock import LeaderLock
from mlflow_batchai.tracking import runs

FAR = json.dumps({"machine": "far", "pid": 7, "started": 1, "host": "far.example"})


@pytest.fixture
def store(store_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runs.Tracking:
    shutil.copy(store_template, tmp_path / "m.db")
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "PAUSE_SECONDS", 0.0)
    return runs.absolute("sqlite:///m.db", tmp_path)


@pytest.fixture
def mlflow(store: runs.Tracking) -> Any:
    return runs.client(store)


@pytest.fixture
def toys(mlflow: Any) -> Toys:
    return Toys(mlflow)


def drive(sweep: Any, toys: Any, *pauses: Callable[[], Any], signals: Signals | None = None, **options: Any) -> Driver:
    """Drive it to its end.

    Args:
        pauses: what happens in each pause between two looks; the last goes on happening.
    """
    left = list(pauses)
    sleep = lambda seconds: (left.pop(0) if len(left) > 1 else left[0])()  # noqa: E731
    made = Driver(sweep, toys.submit, JobConsole(1), signals or Signals(), sleep=sleep, **options)
    made.run()
    return made


def parent(mlflow: Any, sweep: Any) -> Any:
    return mlflow.get_run(sweep.run_id)


def test_from_its_start_to_its_end(store, mlflow, toys, capsys) -> None:
    sweep = begin(store, {sweeps.TAG_LEADER: leader_lock.this_process()})
    made = drive(
        sweep,
        toys,
        lambda: toys.end(2, accuracy=0.9),
        lambda: toys.end(1, accuracy=0.5),
        lambda: toys.end(3, "FAILED", "rank 0 died\nboom"),
        lambda: toys.end(4, accuracy=0.7),
    )
    assert (toys.started, toys.most) == ([1, 2, 3, 4], 2)
    assert [row.name for row in made.results.rows] == ["toy-2", "toy-4", "toy-1", "toy-3"]
    run = parent(mlflow, sweep)
    assert (run.info.status, made.status, run.data.metrics) == ("FAILED", "FAILED", {"accuracy": 0.9})
    assert run.data.tags[sweeps.TAG_BEST] == made.results.rows[0].runId
    assert sweeps.TAG_LEADER not in run.data.tags
    assert run.data.tags["mlflow.note.content"] == made.results.description
    kept = json.loads(Path(mlflow.download_artifacts(sweep.run_id, sweeps.RESULTS)).read_text())
    assert kept == made.results.data(sweep.run_id, "FAILED")
    said = capsys.readouterr().err
    assert "job toy-2 succeeded, accuracy 0.9 (lr=0.1, bs=8)" in said
    assert "job toy-3 failed (lr=0.2, bs=4): rank 0 died: boom" in said


@pytest.mark.parametrize("name", ["toy", "it's", 'a "b"', "n" * 32, "per%cent; é `x` \\"])
def test_a_sweep_is_found_by_name_and_id(store, name: str) -> None:
    sweep = begin(store, name=name, settings={"properties": {"nodeCount": 2}}, version="v1")
    assert sweeps.find(store, sweep.run_id).info.run_id == sweep.run_id
    assert sweeps.of_run(sweeps.find(store, name), store) == sweep
    for other in ("'\"", "x' OR '1'='1", name[:-1]):
        with pytest.raises(NotFoundError, match="the newest are"):
            sweeps.find(store, other)


def test_a_plan_that_is_none(store, mlflow) -> None:
    sweep = begin(store)
    mlflow.log_text(sweep.run_id, json.dumps({"name": "toy"}), sweeps.PLAN)
    with pytest.raises(JobError, match="is no plan of a sweep"):
        sweeps.of_run(sweeps.find(store, "toy"), store)


def test_a_job_whose_run_is_deleted_is_not_started_again(store, mlflow, toys, capsys) -> None:
    def delete() -> None:
        toys.end(1, "FAILED", "boom")
        for run in sweeps.read_runs(mlflow, sweep)[1].values():  # the second one runs
            mlflow.delete_run(run.info.run_id)

    sweep = begin(store, {sweeps.TAG_LEADER: leader_lock.this_process()})
    made = drive(sweep, toys, delete, lambda: [toys.end(number) for number in (3, 4) if number in toys.active])
    assert (toys.started, made.status) == ([1, 2, 3, 4], "FINISHED")
    assert made.results.counts == "2 succeeded, 2 deleted"
    assert "job toy-2 deleted" in capsys.readouterr().err


def test_a_sweep_that_has_ended_is_shown(store, mlflow, toys) -> None:
    sweep = begin(store, combinations=[{"a": "1"}])
    end_job(mlflow, add_job(mlflow, sweep, 1), loss=0.5)
    mlflow.set_terminated(sweep.run_id, "FINISHED")
    made = drive(sweep, toys, lambda: None)
    assert (made.status, toys.started, made.results.summary) == ("FINISHED", [], "best is toy-1 with loss 0.5")


def test_a_sweep_whose_run_is_deleted(store, mlflow, toys) -> None:
    sweep = begin(store)
    with pytest.raises(JobError, match="the run of sweep toy is deleted"):
        drive(sweep, toys, lambda: mlflow.delete_run(sweep.run_id))


# Going on with what another process has begun.


def test_attach_starts_jobs_of_which_nothing_was_started(store, mlflow, toys, tmp_path) -> None:
    sweep = begin(store, parallel=9)
    end_job(mlflow, add_job(mlflow, sweep, 1))
    (tmp_path / "share" / ".batchai" / "objects" / "ab").mkdir(parents=True)
    share = {runs.TAG_SHARE: f"file://{tmp_path}/share", runs.TAG_FOLDER: "jobs/toy-2", runs.TAG_CLUSTER: "local"}
    without_folder = add_job(mlflow, sweep, 2, **share)
    assert drive(sweep, toys, toys.end_all).status == "FINISHED"
    assert sorted(toys.started) == [2, 3, 4]
    assert mlflow.get_run(without_folder).info.lifecycle_stage == "deleted"


def test_a_job_whose_submit_was_cut_off_is_retried(store, mlflow, toys, monkeypatch, capsys) -> None:
    sweep = begin(store, combinations=[{"a": "1"}, {"a": "2"}])
    toys.active = {number: add_job(mlflow, sweep, number) for number in (1, 2)}
    verdicts: list[str] = []
    half = SimpleNamespace(attempt=1, plan=bare_plan(cluster="local"), name="toy", handle=lambda: None)
    half.claim_verdict = lambda verdict: verdicts.append(verdict["reason"])

    def retry(*_: Any) -> None:
        if len(verdicts) == 2:
            raise JobError("its secrets are not here")

    monkeypatch.setattr(lookup, "of_run", lambda run, tracking: detached.Submitted(half, run.info.run_id, tracking))
    monkeypatch.setattr(attempts, "retry", retry)
    monkeypatch.setattr(detached, "keep_follower", lambda submitted: None)
    made = drive(sweep, toys, lambda: None, lambda: [toys.end(1), toys.end(2, "FAILED")])
    assert (made.status, toys.started, len(verdicts)) == ("FAILED", [], 2)
    assert "could not be started again: its secrets are not here" in capsys.readouterr().err


def test_jobs_that_nobody_can_follow(store, mlflow, toys, monkeypatch) -> None:
    def keep(submitted: Any) -> None:
        raise JobError("waiting for attach (needs TOKEN)")

    monkeypatch.setattr(detached, "keep_follower", keep)
    sweep = begin(store, combinations=[{"a": "1"}])
    with pytest.raises(JobError, match=r"needs TOKEN\); then: batchai sweep attach toy"):
        drive(sweep, toys, lambda: None)
    assert parent(mlflow, sweep).info.status == "RUNNING"


def test_a_sweep_that_no_process_drives_is_ended(store, mlflow, toys) -> None:
    def told() -> str:
        return Driver(sweep, toys.submit, JobConsole(1), Signals()).end_if_over()

    sweep = begin(store, {sweeps.TAG_LEADER: FAR})
    assert [run.info.run_id for run in sweeps.unended(mlflow)] == [sweep.run_id]
    assert told() == "process 7 on far.example starts its jobs"
    mlflow.delete_tag(sweep.run_id, sweeps.TAG_LEADER)
    assert told().startswith("4 of its jobs are not started")
    made = [add_job(mlflow, sweep, number) for number in (1, 2, 3, 4)]
    assert told() == "4 of its jobs have not ended"
    for run_id in made:
        end_job(mlflow, run_id)
    assert told() == "its jobs have ended, and its run is FINISHED"
    assert [run.info.run_id for run in sweeps.search(mlflow)] == [sweep.run_id] and sweeps.unended(mlflow) == []


# The leader lock.


def test_the_second_process_watches_and_goes_on(store, mlflow, toys, capsys) -> None:
    sweep = begin(store)
    first = LeaderLock(mlflow, sweep.run_id)
    assert not first.acquire(parent(mlflow, sweep)), "it has only asked"
    assert first.acquire(parent(mlflow, sweep))

    def leave() -> None:
        assert toys.started == []
        first.release()

    assert drive(sweep, toys, lambda: None, leave, toys.end_all).status == "FINISHED"
    assert toys.started == [1, 2, 3, 4]
    assert f"on {socket.gethostname()} starts the jobs of sweep toy; watching it" in capsys.readouterr().err


def test_a_process_of_another_machine_leads_until_it_is_taken_over(store, mlflow, toys) -> None:
    sweep = begin(store, {sweeps.TAG_LEADER: FAR})
    lock = LeaderLock(mlflow, sweep.run_id)
    for _ in range(2):
        assert not lock.acquire(parent(mlflow, sweep)) and lock.leader == "process 7 on far.example"
    assert drive(sweep, toys, toys.end_all, take_over=True).status == "FINISHED"


def test_a_leader_that_was_taken_over_leads_no_more(store, mlflow) -> None:
    sweep = begin(store)
    # A process of this machine that has ended leads no more.
    mlflow.set_tag(sweep.run_id, sweeps.TAG_LEADER, json.dumps({**proc.identity(), "started": 1}))
    lock, other = LeaderLock(mlflow, sweep.run_id), LeaderLock(mlflow, sweep.run_id, take_over=True)
    assert [lock.acquire(parent(mlflow, sweep)) for _ in range(3)] == [False, True, True]
    assert not other.acquire(parent(mlflow, sweep)), "one that lives on this machine can't be taken over"
    mlflow.set_tag(sweep.run_id, sweeps.TAG_LEADER, FAR)
    assert not lock.acquire(parent(mlflow, sweep)) and not lock.held
    assert [other.acquire(parent(mlflow, sweep)) for _ in range(2)] == [False, True]
    other.release()
    assert sweeps.TAG_LEADER not in parent(mlflow, sweep).data.tags


# Signals.


@pytest.mark.parametrize(("interrupts", "started"), [([], [1, 2]), ([1], [1])], ids=["waiting", "submitting"])
def test_ctrl_c_ends_all_jobs(store, mlflow, toys, interrupts: list[int], started: list[int]) -> None:
    sweep, signals, toys.interrupts = begin(store), Signals(), interrupts
    made = drive(
        sweep,
        toys,
        lambda: None,
        lambda: signals._interrupt(2, None) if not signals.cancelled else None,
        signals=signals,
    )
    assert (toys.started, made.status) == (started, "KILLED")
    assert made.results.counts == f"{len(started)} terminated, {4 - len(started)} not started"
    assert made.results.rows[-1].reason == "the sweep was ended"


def test_ctrl_c_leaves_a_sweep_that_was_attached_to(store, mlflow, toys) -> None:
    sweep, toys.interrupts = begin(store), [2]  # during a submit, which is finished first
    with pytest.raises(JobDetachedError, match=r"2 job\(s\) of sweep toy go on, 2 are not started until somebody attaches: "):
        drive(sweep, toys, lambda: None, signals=Signals(cancels=False))
    assert toys.started == [1, 2]
    run = parent(mlflow, sweep)
    assert run.info.status == "RUNNING" and sweeps.TAG_LEADER not in run.data.tags


# Jobs that can't be started, and a store that is away.

GONE = ParameterError("parameter 'data': /gone is not there")
REFUSED = MlflowException("no such param", INVALID_PARAMETER_VALUE)


@pytest.mark.parametrize(
    ("failures", "error", "started", "outcome"),
    [
        pytest.param({2: 2}, None, [1, 3, 4, 2], "4 succeeded", id="after-the-others"),
        pytest.param({2: 9}, GONE, [1, 3, 4], "3 succeeded, 1 failed", id="one-never"),
        pytest.param({4: 9}, GONE, [1, 2, 3], "3 succeeded, 1 failed", id="the-last-never"),
        pytest.param({2: 9}, REFUSED, [1, 3, 4], "3 succeeded, 1 failed", id="mlflow-refuses"),
        pytest.param(
            {4: 9}, None, [1, 2, 3], "toy-4 could not be started: .*; 0 job.* go on, 1 are not", id="no-share-at-last"
        ),
        pytest.param({2: 9, 3: 9, 4: 9}, GONE, [1], "toy-4 could not be started: .*; 1 job.* go on, 3 are not", id="several"),
        pytest.param({1: 1}, None, [], "^job toy-1 could not be started: the share is away$", id="nothing"),
        pytest.param({1: 1}, KeyError("ours"), [], "ours", id="a-bug"),
    ],
)
def test_jobs_that_can_not_be_started(store, mlflow, toys, failures, error, started, outcome: str) -> None:
    sweep, toys.failures, toys.error = begin(store), failures, error or toys.error
    if "succeeded" in outcome:
        made = drive(sweep, toys, lambda: None, toys.end_all, fresh=True)
        assert made.results.counts == outcome
        assert made.status == ("FAILED" if "failed" in outcome else "FINISHED")
        if made.status == "FAILED":
            lost = made.results.rows[-1]
            run = mlflow.get_run(lost.runId)
            assert lost.reason == f"it could not be started: {error}" and run.info.run_name == lost.name
            assert run.data.tags["mlflow.parentRunId"] == sweep.run_id
    else:
        ends = lambda: toys.end_all() if len(toys.started) > 1 else None  # noqa: E731
        with pytest.raises(KeyError if outcome == "ours" else JobError, match=outcome):
            drive(sweep, toys, lambda: None, ends, fresh=True)
        run = parent(mlflow, sweep)
        assert run.info.status == ("FAILED" if outcome.endswith("away$") else "RUNNING")
        assert run.data.tags.get(runs.TAG_REASON) == ("the share is away" if run.info.status == "FAILED" else None)
    assert toys.started == started


def test_a_store_that_is_away_is_waited_for(store, toys, monkeypatch, capsys) -> None:
    """That costs no failed start."""
    toys.error = ConnectionError("http://ada:s3cret@server refused")
    toys.failures = {1: driver.MOST_FAILURES + 1}
    assert drive(begin(store), toys, lambda: None, toys.end_all).status == "FINISHED"
    assert capsys.readouterr().err.count("can't be asked: http://server refused (still trying)") == 1
    monkeypatch.setattr(driver, "PATIENCE_SECONDS", -1.0)
    toys.failures = {2: 1}
    with pytest.raises(TrackingError, match=r"server refused; 1 job\(s\) of sweep toy go on, 3 are not started"):
        drive(begin(store), toys, lambda: None)
