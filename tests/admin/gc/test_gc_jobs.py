"""Job folders: which can go, and that removing them may be interrupted, and done by two at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from mlflow_batchai.admin.gc import jobs
from mlflow_batchai.admin.gc.items import Age, Item
from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import JobPaths
from mlflow_batchai.errors import ShareError
from mlflow_batchai.job import places
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.storage.directory import DirectoryShare

DAY = 86400.0


def look(control: Any, days: float = 30, deleted: Iterable[str] = ()) -> dict[str, Item]:
    """Folder -> item of those that can go."""
    control.said.clear()
    found = jobs.find(control.share, places.find(control.share), Age(days * DAY), set(deleted), control.said.append)
    assert [item.path for item in found.values()] == [f"{control.share.url}/{folder}" for folder in found]
    return found


def test_what_has_ended_long_ago_can_go(control: Any) -> None:
    old, young, lives = control.job("old", ended=31), control.job("young", ended=29), control.job("lives")
    found = look(control)
    assert list(found) == [old]
    item = found[old]
    assert item.size > 1000 and item.reason == "ended; results are in MLflow"
    assert item.modified == pytest.approx(time.time() - 31 * DAY, abs=60)
    assert item.remove()
    assert not control.there(old) and control.there(young) and control.there(lives)
    # Another gc that had found it as well.
    assert item.remove()
    assert look(control) == {} and control.said == []


def test_results_that_are_not_in_mlflow_stay(control: Any) -> None:
    folder = control.job("waiting", ended=50, relayed=False)
    assert look(control) == {}
    assert control.said == [
        f"{control.share.url}: {folder} stays: its results are not in MLflow yet: batchai job attach waiting"
    ]


def test_a_job_whose_run_was_deleted_while_it_ran_goes_once_nobody_relays_it(control: Any) -> None:
    """Its follower has let go of it, or is dead; one on another machine may live, but not for that long."""
    left, relayed, old = (control.job(name, ended=days, relayed=False) for name, days in (("left", 1), ("at", 1), ("old", 31)))
    control.write(JobPaths(left).cursor(1), {"finished": False, "counter": 3, "released": True, "trouble": "run is deleted"})
    for folder in (relayed, old):
        control.write(JobPaths(folder).cursor(1), {"finished": False, "counter": 3, "holder": {"machine": "far", "pid": 7}})
    assert sorted(look(control, deleted=["run-left", "run-at", "run-old"])) == sorted([left, old])
    assert control.said == [f"{control.share.url}: {relayed} stays: its run was deleted, and a process may relay it still"]


def test_results_that_could_not_be_sent_stay(control: Any) -> None:
    """The share has the only copy."""
    folder = control.job("large", ended=50)
    control.write(JobPaths(folder).cursor(2), {"finished": True, "memory": {"leftOut": ["outputs: disk full"]}})
    assert look(control) == {}
    assert control.said == [
        f"{control.share.url}: {folder} stays: not all of its results are in MLflow (outputs: disk full); batchai job delete"
        " large gives them up"
    ]
    assert look(control, deleted=["run-large"])[folder].reason == "its run was deleted"


def test_a_later_attempt_that_was_not_started_comes_after_results(control: Any) -> None:
    """Put back in the queue, and then its submitter could not start it, or died: nobody has sent what the first has left."""
    refused, died = control.job("refused", relayed=False), control.job("died", relayed=False)
    for folder in (refused, died):
        control.share.claim(JobPaths(folder).verdict)
        control.write(JobPaths(folder).verdict_file, protocol.requeued_record("it makes room", "agent-0", 1))
    control.share.claim(JobPaths(refused, 2).begun)
    control.verdict(refused, 31, by="submitter", attempt=2)
    control.share.claim(JobPaths(died, 2).begun)
    control.aged(died, 40)
    assert look(control) == {}
    assert control.said == [
        f"{control.share.url}: {died} stays: its attempt 2 was never started: batchai job attach died",
        f"{control.share.url}: {refused} stays: its results are not in MLflow yet: batchai job attach refused",
    ]


def test_a_deleted_run_goes_at_once_but_not_while_its_job_lives(control: Any) -> None:
    ended = control.job("ended", ended=0.1)
    control.job("runs")
    found = look(control, deleted=["run-ended", "run-runs"])
    assert [(folder, item.reason) for folder, item in found.items()] == [(ended, "its run was deleted")]


@pytest.mark.parametrize(("age", "goes"), [(6.9, False), (7.1, True)])
def test_a_submit_that_died_half_way(control: Any, age: float, goes: bool) -> None:
    """Whatever was asked for: its agents may wait for a week."""
    only_plan = control.job("planned", handle=False)
    only_document = control.job("begun", handle=False)
    control.share.delete(JobPaths(only_document).plan)
    for folder in (only_plan, only_document):
        control.aged(folder, age)
    assert sorted(look(control, days=0)) == (sorted([only_plan, only_document]) if goes else [])
    assert look(control, days=8) == {}


def test_one_whose_submit_failed_needs_no_relay(control: Any) -> None:
    folder = control.job("failed", ended=31, relayed=False, handle=False, by="submitter")
    assert look(control)[folder].reason == "its submit failed"


def test_outputs_and_logs_elsewhere_on_the_share(control: Any) -> None:
    """They belong to the job; what lies beside them doesn't, nor what a plan names that isn't the job's."""
    outputs = [{"id": "M", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share/models", "pathSuffix": "best"}]
    plan = {"outputDirectories": outputs, "logCopyPrefix": {"volume": 0, "path": "logs/all"}}
    old, lives = control.job("old", ended=31, **plan), control.job("lives", **plan)
    segment = old[old.index("workspaces") :]
    for path in (f"models/{segment}/outputs/best/m.h5", f"logs/all/{segment}/stdouterr/stdout.txt", "models/mine.h5"):
        control.share.write(path, b"x" * 5000)
    control.share.write(f"models/{lives}/outputs/best/m.h5", b"x")
    item = look(control)[old]
    assert item.size > 11000 and item.reason == f"ended; results are in MLflow; also models/{segment}; also logs/all/{segment}"
    assert item.remove()
    assert not control.there(f"models/{segment}") and not control.there(f"logs/all/{segment}")
    assert control.there("models/mine.h5") and control.there(f"models/{lives}/outputs/best/m.h5")
    # Outputs of a job whose folder lies elsewhere are no job folder.
    assert look(control, days=0) == {}
    for segment in ("", lives, "workspaces/x/experiments/x/jobs/x/y"):
        bad = control.job("bad", ended=31, **{**plan, "segment": segment})
        assert jobs.elsewhere(Job(control.share, bad)) == []


def test_under_every_prefix(control: Any) -> None:
    one, two = control.job("one", ended=31, prefix="external"), control.job("two", ended=31, prefix="deep/down")
    assert list(look(control)) == [one]
    places.note(control.share, "deep/down")
    places.note(control.share, "")
    assert sorted(look(control)) == sorted([one, two])


def test_a_removal_that_was_interrupted_is_gone_on_with(on_directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it was: each time it may delete one thing more."""
    control = on_directory
    outputs = [{"id": "M", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share/models", "pathSuffix": None}]
    folder = control.job("old", ended=31, outputDirectories=outputs)
    control.share.write(f"models/{folder}/outputs/m.h5", b"x")
    real = DirectoryShare.delete
    left = [0]

    def delete(self: DirectoryShare, path: str) -> None:
        if not left[0]:
            raise ShareError("cut off")
        left[0] -= 1
        real(self, path)

    monkeypatch.setattr(DirectoryShare, "delete", delete)
    for number in range(20):
        left[0] = number
        found = look(control)
        if not found:
            break
        try:
            assert found[folder].remove()
        except ShareError:
            assert look(control)[folder].reason.startswith("its removal was interrupted")
            # Nobody can begin another attempt of it.
            assert control.there(f"{folder}/batchai/attempts/2/begun") or not control.there(f"{folder}/batchai/attempts")
    assert found == {} and not control.there(folder) and not control.there(f"models/{folder}")


def test_one_that_is_retried_meanwhile_stays(control: Any) -> None:
    folder = control.job("old", ended=31)
    item = look(control)[folder]
    assert Job(control.share, folder).begin(2, {}) is not None
    assert not item.remove()
    assert control.there(f"{folder}/stdouterr/stdout.txt") and not control.there(f"{folder}/batchai/removing")
    assert look(control) == {}


def test_two_at_once(control: Any) -> None:
    """Neither fails, and nothing is left."""
    made = [control.job(f"job{number}", ended=31) for number in range(5)]
    items = [look(control), look(control)]
    errors: list[BaseException] = []

    def run(found: dict[str, Item]) -> None:
        try:
            for item in found.values():
                item.remove()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(found,)) for found in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [folder for folder in made if control.there(folder)] == []


def test_what_cant_be_understood_stays(control: Any) -> None:
    newer = control.job("newer", ended=31, protocol=99)
    odd = control.job("odd", ended=31, volumes=None)
    assert look(control) == {}
    assert any(f"{newer} stays: a newer mlflow-batchai made it" in text for text in control.said)
    assert any(f"{odd} stays: the plan of job odd was changed" in text for text in control.said)


@pytest.mark.parametrize("memory", ["x", [1], None])
def test_a_cursor_that_another_user_has_written_ends_no_search(on_directory: Any, memory: object) -> None:
    folder = on_directory.job("one", ended=31)
    on_directory.write(JobPaths(folder).cursor(2), {"finished": True, "counter": 1, "memory": memory})
    assert list(look(on_directory)) == [folder]


def test_other_users_jobs_are_theirs(on_directory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    control = on_directory
    control.job("one", ended=31)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert look(control) == {} and control.said == [f"{control.share.url}: 1 job folder of another user stays"]
    control.job("two", ended=31)
    assert look(control) == {} and control.said == [f"{control.share.url}: 2 job folders of other users stay"]
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert len(look(control)) == 2
