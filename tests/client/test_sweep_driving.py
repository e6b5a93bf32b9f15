"""Driving a sweep to its end: how many jobs at once, in what order it ends, who drives, and what a signal does. Jobs are toys."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from plans import bare_plan
from sweep_world import Toys, add_job, begin, end_job, plan

from mlflow_batchai import attempts, detached, lookup, runner, runs
from mlflow_batchai.cli import sweep as cli_sweep
from mlflow_batchai.console import JobConsole
from mlflow_batchai.errors import JobDetachedError, JobError, NotFoundError, ParameterError, TrackingError
from mlflow_batchai.node import processes
from mlflow_batchai.signals import Signals
from mlflow_batchai.sweep import background, driving, right, starts, sweeps
from mlflow_batchai.sweep.driving import Driving, end_if_over


@pytest.fixture
def store(store_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runs.Tracking:
    shutil.copy(store_template, tmp_path / "m.db")
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(right, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(detached, "keep_follower", lambda submitted: None)
    return runs.absolute("sqlite:///m.db", tmp_path)


@pytest.fixture
def mlflow(store: runs.Tracking) -> Any:
    return runs.client(store)


@pytest.fixture
def toys(mlflow: Any) -> Toys:
    return Toys(mlflow)


@pytest.fixture
def between() -> Between:
    return Between()


class Between(list[Any]):
    """What happens in each pause between two looks; the last goes on happening."""

    def sleep(self, seconds: float) -> None:
        (self.pop(0) if len(self) > 1 else self[0])()


def drive(sweep: Any, toys: Any, between: Between, **options: Any) -> Driving:
    signals = options.pop("signals", None) or Signals()
    made = Driving(sweep, toys, JobConsole(1), signals, sleep=between.sleep, **options)
    made.run()
    return made


def parent(mlflow: Any, sweep: Any) -> Any:
    return mlflow.get_run(sweep.run_id)


def test_from_its_start_to_its_end(store, mlflow, toys, between, capsys) -> None:
    sweep = begin(store, {sweeps.TAG_DRIVER: right.mark()})
    between[:] = [
        lambda: toys.end(2, accuracy=0.9),
        lambda: toys.end(1, accuracy=0.5),
        lambda: toys.end(3, "FAILED", "rank 0 died\nboom"),
        lambda: toys.end(4, accuracy=0.7),
    ]
    made = drive(sweep, toys, between, fresh=True)
    assert (toys.started, toys.most) == ([1, 2, 3, 4], 2)
    results = made.results()
    assert [row.name for row in results.rows] == ["toy-2", "toy-4", "toy-1", "toy-3"]
    run = parent(mlflow, sweep)
    assert (run.info.status, run.info.run_name, made.status) == ("FAILED", "toy", "FAILED")
    assert run.data.tags[sweeps.TAG_BEST] == results.rows[0].run_id
    assert run.data.tags[sweeps.TAG_BEST_METRIC] == "accuracy=0.9"
    assert run.data.metrics == {"accuracy": 0.9}, "those of its best job"
    assert sweeps.TAG_DRIVER not in run.data.tags
    note = run.data.tags["mlflow.note.content"]
    assert "Sweep of 4 jobs: 3 succeeded, 1 failed." in note and "`toy-3` failed: `rank 0 died: boom`" in note
    kept = json.loads(Path(mlflow.download_artifacts(sweep.run_id, sweeps.RESULTS)).read_text())
    assert kept["best"]["parameters"] == {"lr": "0.1", "bs": "8"} and kept["runStatus"] == "FAILED"
    child = mlflow.get_run(results.rows[0].run_id)
    assert child.data.tags["mlflow.parentRunId"] == sweep.run_id
    said = capsys.readouterr().err
    assert "job toy-2 succeeded, accuracy 0.9 (lr=0.1, bs=8)" in said
    assert "job toy-3 failed (lr=0.2, bs=4): rank 0 died: boom" in said


def test_all_succeeded(store, mlflow, toys, between) -> None:
    sweep = begin(store, combinations=[{"a": "1"}])
    between[:] = [lambda: toys.end(1)]
    assert drive(sweep, toys, between, fresh=True).status == "FINISHED"
    with pytest.raises(NotFoundError, match=r"there is no sweep 'nope'; the newest are: toy"):
        sweeps.find(store, "nope")
    assert sweeps.find(store, "toy").info.run_id == sweeps.find(store, sweep.run_id).info.run_id == sweep.run_id


@pytest.mark.parametrize("name", ["it's", 'a "b"', "n" * 32, "per%cent; é `x` \\"])
def test_names(store, name: str) -> None:
    sweep = begin(store, name=name)
    assert sweeps.find(store, name).info.run_id == sweep.run_id
    for other in ("'\"", "x' OR '1'='1", name[:-1]):
        with pytest.raises(NotFoundError):
            sweeps.find(store, other)


def test_a_job_whose_run_is_deleted_is_not_started_again(store, mlflow, toys, between, capsys) -> None:
    sweep = begin(store)

    def delete() -> None:
        toys.end(1, "FAILED", "boom")
        mlflow.delete_run(toys.left[2])  # it runs
        mlflow.delete_run(sweeps.members(mlflow, sweep)[1][1].info.run_id)

    between[:] = [delete, lambda: [toys.end(index, accuracy=1.0) for index in (3, 4) if index in toys.left]]
    made = drive(sweep, toys, between, fresh=True)
    assert (toys.started, made.status) == ([1, 2, 3, 4], "FINISHED")
    assert made.results().counts == "2 succeeded, 2 deleted"
    assert "job toy-2 deleted" in capsys.readouterr().err


def test_polling_is_one_search(store, mlflow, toys, between, monkeypatch) -> None:
    sweep = begin(store, parallel=4)
    searches: list[bool] = []
    real = sweeps.members
    monkeypatch.setattr(sweeps, "members", lambda *given, **how: searches.append(bool(how)) or real(*given, **how))
    made = Driving(sweep, toys, JobConsole(1), Signals(), fresh=True, sleep=between.sleep)
    between[:] = [*[lambda: None] * 5, lambda: [toys.end(index) for index in list(toys.left)]]
    searches.clear()
    made.run()
    assert searches == [True] * 7 + [False] * 2, "one a look; all of them when jobs have ended, and at the end"


def test_attach_starts_each_that_was_not_once(store, mlflow, toys, between, monkeypatch) -> None:
    sweep = begin(store, parallel=9)
    ended, runs_on, stub = (add_job(mlflow, sweep, index) for index in (1, 2, 3))
    end_job(mlflow, ended.info.run_id)
    toys.left[2] = runs_on.info.run_id
    followed: list[str] = []

    class Handled:
        attempt = 1

        def handle(self) -> dict[str, Any]:
            return {"agents": []}

    def of_run(run: Any, tracking: Any) -> Any:
        if run.info.run_id == stub.info.run_id:
            raise lookup.NoFolderError(run, "file:///share")
        return detached.Submitted(Handled(), run.info.run_id, tracking)  # type: ignore[arg-type]

    monkeypatch.setattr(lookup, "of_run", of_run)
    monkeypatch.setattr(detached, "ensure_follower", lambda found: followed.append(found.run_id))
    between[:] = [lambda: [toys.end(index) for index in list(toys.left)]]
    assert drive(sweep, toys, between).status == "FINISHED"
    assert toys.started == [3, 4], "nothing of 3 had been started"
    assert followed == [runs_on.info.run_id]
    assert mlflow.get_run(stub.info.run_id).info.lifecycle_stage == "deleted"
    _, jobs = sweeps.members(mlflow, sweep)
    assert list(jobs) == [1, 2, 3, 4]


def test_a_job_whose_submitter_died_half_way_begins_again(store, mlflow, toys, between, monkeypatch, capsys) -> None:
    sweep = begin(store, combinations=[{"a": "1"}, {"a": "2"}])
    toys.left = {index: add_job(mlflow, sweep, index).info.run_id for index in (1, 2)}
    verdicts: list[Any] = []

    class Half:
        attempt, plan, name = 1, bare_plan(cluster="local"), "toy"

        def handle(self) -> None:
            return None

        def claim_verdict(self, verdict: Any) -> bool:
            verdicts.append(verdict["reason"])
            return True

    def retry(found: Any, cluster: Any, say: Any) -> None:
        if len(verdicts) == 2:
            raise JobError("its secrets are not here")

    monkeypatch.setattr(lookup, "of_run", lambda run, tracking: detached.Submitted(Half(), run.info.run_id, tracking))
    monkeypatch.setattr(attempts, "retry", retry)
    between[:] = [lambda: [toys.end(1), toys.end(2, "FAILED")]]
    assert drive(sweep, toys, between).status == "FAILED"
    assert toys.started == [] and verdicts == ["its submitter died before it had started every agent"] * 2
    assert "job toy: its submitter died before it had started every agent, and it could not be started again: its secrets" in (
        capsys.readouterr().err
    )


def test_who_is_second_watches_and_goes_on(store, mlflow, toys, between, monkeypatch, capsys) -> None:
    sweep = begin(store)
    first = right.Right(mlflow, sweep.run_id)
    assert first.take(parent(mlflow, sweep))

    def leave() -> None:
        assert toys.started == []
        first.release()

    between[:] = [lambda: None, leave, lambda: [toys.end(index) for index in list(toys.left)]]
    assert drive(sweep, toys, between).status == "FINISHED"
    assert toys.started == [1, 2, 3, 4]
    assert f"on {socket.gethostname()} starts the jobs of sweep toy; watching it" in capsys.readouterr().err


def test_another_machine_drives_until_it_is_given_up(store, mlflow, toys, between) -> None:
    far = json.dumps({"machine": "far", "pid": 7, "started": 1, "host": "far.example"})
    sweep = begin(store, {sweeps.TAG_DRIVER: far})
    seen = right.Right(mlflow, sweep.run_id)
    assert not seen.take(parent(mlflow, sweep)) and seen.who == "process 7 on far.example"
    assert end_if_over(sweep) == "process 7 on far.example starts its jobs"
    between[:] = [lambda: [toys.end(index) for index in list(toys.left)]]
    assert drive(sweep, toys, between, take_over=True).status == "FINISHED"


def test_who_was_taken_over_starts_no_more(store, mlflow) -> None:
    sweep = begin(store)
    ours = right.Right(mlflow, sweep.run_id)
    assert ours.take(parent(mlflow, sweep)) and ours.take(parent(mlflow, sweep))
    mlflow.set_tag(sweep.run_id, sweeps.TAG_DRIVER, json.dumps({"machine": "far", "pid": 7, "host": "far"}))
    assert not ours.take(parent(mlflow, sweep))
    # A process of this machine that is gone for certain is nobody.
    mlflow.set_tag(sweep.run_id, sweeps.TAG_DRIVER, json.dumps({**processes.identity(), "started": 1}))
    assert ours.take(parent(mlflow, sweep))
    ours.release()
    assert sweeps.TAG_DRIVER not in parent(mlflow, sweep).data.tags


@pytest.mark.parametrize("when", ["waiting", "submitting"])
def test_ctrl_c_ends_all_jobs(store, mlflow, toys, between, monkeypatch, when: str) -> None:
    sweep, signals, asked = begin(store), Signals(), []

    def cancel(submitted: Any, why: str) -> None:
        asked.append((submitted.run_id, why))
        end_job(mlflow, submitted.run_id, "KILLED")

    monkeypatch.setattr(runner, "cancel", cancel)
    toys.interrupts = [1] if when == "submitting" else []
    between[:] = [lambda: signals._interrupt(2, None) if not signals.cancelled else None]
    made = drive(sweep, toys, between, signals=signals, fresh=True)
    started = [1] if when == "submitting" else [1, 2]
    assert toys.started == started
    assert asked == [(toys.left[index], "the sweep was ended") for index in started]
    assert made.status == "KILLED"
    assert [row.state for row in made.results().rows].count("not started") == 4 - len(started)


def test_ctrl_c_while_a_sweep_that_nobody_stays_for_is_begun_ends_it(store, mlflow, monkeypatch, capfd) -> None:
    real = sweeps.begin

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*given)

    told: list[str] = []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    monkeypatch.setattr(sweeps, "begin", interrupted)
    monkeypatch.setattr(
        background, "start", lambda sweep: told.append(parent(mlflow, sweep).data.tags[runs.TAG_CANCEL]) or "its log"
    )
    source = SimpleNamespace(entry=SimpleNamespace(name="main"), project=SimpleNamespace(directory=Path.cwd()))
    cli_sweep._started(plan(), SimpleNamespace(source=source), JobConsole(1), "Default", no_wait=True)
    assert told == ["true"], "the process that is to start its jobs ends it"
    assert "batchai: the sweep ends as soon as this submit is done; press Ctrl-C again to undo that" in capfd.readouterr().err


def test_ctrl_c_leaves_a_sweep_that_was_attached_to(store, mlflow, toys, between) -> None:
    sweep = begin(store)
    toys.interrupts = [2]  # in the midst of a submit, which is finished first
    between[:] = [lambda: None]
    with pytest.raises(JobDetachedError) as left:
        drive(sweep, toys, between, signals=Signals(cancels=False))
    assert toys.started == [1, 2]
    assert str(left.value) == (
        "Ctrl-C received; 2 job(s) of sweep toy go on, 2 are not started until somebody attaches:"
        " batchai sweep attach toy | batchai sweep terminate toy"
    )
    assert parent(mlflow, sweep).info.status == "RUNNING"
    other = right.Right(mlflow, sweep.run_id)
    assert other.take(parent(mlflow, sweep)), "anybody may go on"
    other.release()


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "PAUSE_SECONDS", 0.0)


def test_a_job_that_can_not_be_started_is_tried_after_the_others(store, mlflow, toys, between, no_pause, monkeypatch, capsys):
    sweep = begin(store)
    toys.fails = {2: 2}
    between[:] = [lambda: [toys.end(index) for index in list(toys.left)]]
    monkeypatch.setattr(lookup, "of_run", lambda run, tracking: pytest.fail("ours are known"))
    assert drive(sweep, toys, between, fresh=True).status == "FINISHED"
    assert toys.started == [1, 3, 4, 2]
    assert capsys.readouterr().err.count("job toy-2 could not be started: the share is away") == 1


@pytest.mark.parametrize("index", [2, 4])
def test_one_job_that_can_never_be_started_has_failed_and_the_others_go_on(
    store, mlflow, toys, between, no_pause, capsys, index: int
) -> None:
    sweep = begin(store)
    toys.fails, toys.trouble = {index: 9}, ParameterError("parameter 'data': /gone is not there")
    between[:] = [lambda: [toys.end(index, accuracy=0.5) for index in list(toys.left)]]
    made = drive(sweep, toys, between, fresh=True)
    assert toys.started == [other for other in (1, 2, 3, 4) if other != index]
    assert (made.status, made.results().counts) == ("FAILED", "3 succeeded, 1 failed")
    lost = made.results().rows[-1]
    assert (lost.name, lost.state) == (f"toy-{index}", "failed")
    assert lost.reason == "it could not be started: parameter 'data': /gone is not there"
    run = mlflow.get_run(lost.run_id)
    assert (run.info.status, run.info.run_name) == ("FAILED", f"toy-{index}")
    assert run.data.tags["mlflow.parentRunId"] == sweep.run_id
    assert f"`toy-{index}` failed: `it could not be started" in parent(mlflow, sweep).data.tags["mlflow.note.content"]
    assert f"job toy-{index} could not be started: parameter 'data': /gone is not there" in capsys.readouterr().err


def test_several_that_can_not_be_started_stop_it(store, mlflow, toys, between, no_pause) -> None:
    """Then it is no matter of one of them, and none is lost."""
    sweep = begin(store)
    toys.fails = dict.fromkeys((2, 3, 4), 9)
    between[:] = [lambda: None]
    with pytest.raises(
        JobError, match=r"job toy-4 could not be started: the share is away; 1 job\(s\) of sweep toy go on, 3 are not"
    ):
        drive(sweep, toys, between, fresh=True)
    assert parent(mlflow, sweep).info.status == "RUNNING"
    assert list(sweeps.members(mlflow, sweep)[1]) == [1]


def test_the_last_one_is_not_lost_with_the_share(store, mlflow, toys, between, no_pause) -> None:
    sweep = begin(store)
    toys.fails = {4: 9}
    between[:] = [lambda: [toys.end(index) for index in list(toys.left)]]
    with pytest.raises(JobError, match=r"job toy-4 could not be started: the share is away; 0 job\(s\) of sweep toy go on, 1 "):
        drive(sweep, toys, between, fresh=True)
    assert parent(mlflow, sweep).info.status == "RUNNING"
    toys.fails = {}
    assert drive(sweep, toys, between).status == "FINISHED"


def test_a_job_that_mlflow_refuses_is_one_that_can_not_be_started(store, mlflow, toys, between, no_pause, monkeypatch) -> None:
    """Its run was made, and has failed by then."""
    sweep, real = begin(store), toys.submit

    def submit(sweep: Any, experiment: Any, index: int) -> Any:
        if index == 2:
            runs.fail(mlflow, add_job(mlflow, sweep, index).info.run_id, "MLflow: no such param")
            raise MlflowException("no such param", INVALID_PARAMETER_VALUE)
        return real(sweep, experiment, index)

    monkeypatch.setattr(toys, "submit", submit)
    between[:] = [lambda: [toys.end(index) for index in list(toys.left)]]
    made = drive(sweep, toys, between, fresh=True)
    assert (toys.started, made.status, made.results().counts) == ([1, 3, 4], "FAILED", "3 succeeded, 1 failed")


def test_a_sweep_of_which_nothing_could_be_started_has_ended(store, mlflow, toys, between) -> None:
    sweep = begin(store)
    toys.fails = {1: 1}
    with pytest.raises(JobError, match=r"^job toy-1 could not be started: the share is away$"):
        drive(sweep, toys, between, fresh=True)
    run = parent(mlflow, sweep)
    assert (run.info.status, run.data.tags[runs.TAG_REASON]) == ("FAILED", "the share is away")


def test_jobs_that_nobody_can_follow(store, mlflow, toys, between, monkeypatch, capsys) -> None:
    monkeypatch.setattr(driving, "FOLLOWER_SECONDS", 0.0)
    sweep = begin(store, combinations=[{"a": "1"}])

    def keep(submitted: Any) -> None:
        raise JobError("job toy-1: waiting for attach (needs TOKEN)")

    monkeypatch.setattr(detached, "keep_follower", keep)
    between[:] = [lambda: None]
    submit = toys.submit
    toys.submit = lambda *given: _named(submit(*given))
    with pytest.raises(JobError, match=r"needs TOKEN\); then: batchai sweep attach toy"):
        drive(sweep, toys, between, fresh=True)
    assert parent(mlflow, sweep).info.status == "RUNNING"


def _named(submitted: Any) -> Any:
    submitted.job = type("Named", (), {"name": "toy-1"})()
    return submitted


def test_a_sweep_that_nobody_drives_is_ended_by_who_looks(store, mlflow) -> None:
    sweep = begin(store)
    assert [run.info.run_id for run in sweeps.unended(mlflow)] == [sweep.run_id]
    assert end_if_over(sweep) == "4 of its jobs are not started, and nobody does that: batchai sweep attach toy"
    made = [add_job(mlflow, sweep, index).info.run_id for index in (1, 2, 3, 4)]
    assert end_if_over(sweep) == "4 of its jobs have not ended"
    for run_id in made:
        end_job(mlflow, run_id)
    assert end_if_over(sweep) == "its jobs have ended, and its run is FINISHED"
    assert [run.info.run_id for run in sweeps.every(mlflow)] == [sweep.run_id]
    assert sweeps.unended(mlflow) == []


def test_a_deleted_run_ends_the_driving(store, mlflow, toys, between) -> None:
    sweep = begin(store)
    between[:] = [lambda: mlflow.delete_run(sweep.run_id)]
    with pytest.raises(JobError, match=r"the run of sweep toy is deleted; jobs that run go on, no more are started"):
        drive(sweep, toys, between, fresh=True)


def test_a_plan_survives(store, mlflow) -> None:
    sweep = begin(store, settings={"properties": {"nodeCount": 2}}, version="v1")
    assert sweeps.of_run(sweeps.find(store, "toy"), store) == sweep
    assert sweep.plan == plan(settings={"properties": {"nodeCount": 2}}, version="v1")
    mlflow.log_text(sweep.run_id, "{}", "sweep/plan.json")
    with pytest.raises(JobError, match=r"is no plan of a sweep, or of another version: KeyError: 'name'"):
        sweeps.of_run(sweeps.find(store, "toy"), store)
    mlflow.delete_tag(sweep.run_id, sweeps.TAG_SWEEP)
    with pytest.raises(JobError, match=r"whoever started it died before its plan was kept"):
        sweeps.of_run(sweeps.find(store, "toy"), store)


def test_a_store_that_is_away(store, mlflow, toys, between, monkeypatch, capsys) -> None:
    sweep, real, away = begin(store, combinations=[{"a": "1"}]), sweeps.members, [True]

    def members(*given: Any, **how: Any) -> Any:
        if away and toys.started:
            raise ConnectionError("http://ada:s3cret@server refused")
        return real(*given, **how)

    monkeypatch.setattr(sweeps, "members", members)
    between[:] = [lambda: None, lambda: None, away.clear, lambda: toys.end(1)]
    assert drive(sweep, toys, between, fresh=True).status == "FINISHED"
    said = capsys.readouterr().err
    assert said.count("can't be asked: http://server refused (still trying)") == 1

    monkeypatch.setattr(driving, "PATIENCE_SECONDS", -1.0)
    away.append(True)
    toys.started.clear()
    sweep = begin(store, combinations=[{"a": "1"}])
    between[:] = [lambda: None]
    with pytest.raises(TrackingError, match=r"server refused; 1 job\(s\) of sweep toy go on: batchai sweep attach toy"):
        drive(sweep, toys, between, fresh=True)


def test_a_store_that_is_away_while_jobs_are_started_costs_no_failed_start(store, toys, between, monkeypatch, capsys) -> None:
    sweep, real, times = begin(store, combinations=[{"a": "1"}]), toys.submit, [1] * (starts.MOST + 1)

    def submit(*given: Any) -> Any:
        if times:
            raise ConnectionError(f"refused, {times.pop()}")
        return real(*given)

    monkeypatch.setattr(toys, "submit", submit)
    between[:] = [*[lambda: None] * len(times), lambda: toys.end(1)]
    assert drive(sweep, toys, between, fresh=True).status == "FINISHED"
    assert "can't be asked: refused, 1 (still trying)" in capsys.readouterr().err


def test_ctrl_c_in_the_midst_of_a_call_leaves(store, toys, between, monkeypatch, capsys) -> None:
    """MLflow makes an error of its store of whatever is raised while it asks a database."""
    sweep, signals, real = begin(store), Signals(cancels=False), sweeps.members

    def members(*given: Any, **how: Any) -> Any:
        if toys.started and not signals.left:
            try:
                signals._interrupt(2, None)
            except JobDetachedError as error:
                raise MlflowException(str(error)) from error
        return real(*given, **how)

    monkeypatch.setattr(sweeps, "members", members)
    between[:] = [lambda: None]
    with pytest.raises(JobDetachedError, match="left; 2 job"):
        drive(sweep, toys, between, signals=signals)
    assert "can't be asked" not in capsys.readouterr().err


def test_a_sweep_that_has_ended_is_shown(store, mlflow, toys, between) -> None:
    sweep = begin(store, combinations=[{"a": "1"}])
    end_job(mlflow, add_job(mlflow, sweep, 1).info.run_id, loss=0.5)
    mlflow.set_terminated(sweep.run_id, "FINISHED")
    made = drive(sweep, toys, between)
    assert (made.status, toys.started) == ("FINISHED", [])
    assert made.results().best_in_words == "best is toy-1 with loss 0.5"
