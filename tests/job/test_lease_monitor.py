"""The monitor of a lease: who relays a job, as one comes to know it by looking again; and followers that are not started in vain."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.errors import ShareError
from mlflow_batchai.follower import detached, follower, service_client
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job import lease
from mlflow_batchai.job.lease import GRACE_SECONDS, LOOK_SECONDS, Lease, LeaseMonitor, LeaseState

FAR = {"machine": "another pid:[1]", "pid": 7, "started": 1, "host": "far"}


class Scene:
    """A job, a monitor over it, and its clock."""

    def __init__(self, made):
        self.made = made
        self.now = 1000.0
        self.here = set()
        self.monitor = LeaseMonitor(made.job, lambda: self.here, lambda: self.now)

    def holder(self, counter, holder=FAR, number=1, **fields):
        self.made.share.claim(self.made.paths.lease(number))
        record = {"counter": counter, "attempt": 1, "finished": False, "memory": {}, "holder": holder, **fields}
        self.made.write(self.made.paths.cursor(number), record)

    def after(self, seconds):
        self.now += seconds
        return self.monitor.look().state


@pytest.fixture
def scene(folder):
    return Scene(folder())


def test_a_counter_that_moves_lives_and_one_that_stood_still_is_dead(scene):
    scene.holder(1)
    assert scene.after(0) is LeaseState.UNKNOWN
    assert scene.after(GRACE_SECONDS - 1) is LeaseState.UNKNOWN
    scene.holder(2)
    assert scene.after(LOOK_SECONDS) is LeaseState.HELD
    assert scene.after(GRACE_SECONDS) is LeaseState.HELD
    assert scene.after(1) is LeaseState.FREE
    assert scene.monitor.look().who == "process 7 on far"
    # Another took it over.
    scene.holder(1, number=2)
    assert scene.after(1) is LeaseState.HELD
    scene.holder(2, number=2, finished=True)
    assert scene.after(1) is LeaseState.FINISHED


def test_what_is_certain_needs_no_time(scene):
    assert scene.after(0) is LeaseState.FREE
    scene.holder(1, proc.identity())
    assert scene.after(1) is LeaseState.HELD
    scene.holder(1, {**proc.identity(), "started": 1})
    assert scene.after(1) is LeaseState.FREE


def test_one_of_this_machine_that_was_stopped_is_no_help(scene):
    scene.holder(1, proc.identity())
    scene.here = {os.getpid()}
    assert scene.after(0) is LeaseState.HELD
    scene.holder(2, proc.identity())
    assert (scene.after(GRACE_SECONDS), scene.after(GRACE_SECONDS)) == (LeaseState.HELD, LeaseState.HELD)
    assert scene.after(1) is LeaseState.FREE
    scene.here |= {1}
    assert (scene.after(1), scene.monitor.look().holder["pid"]) == (LeaseState.HELD, 1)


def test_one_that_is_kept_from_the_store(scene):
    """It is there, and whoever isn't kept from it may try; whoever has begun to try is enough."""
    for holder in (FAR, proc.identity()):
        scene.holder(1, holder, trouble="401")
        scene.after(1)
        scene.holder(2, holder, trouble="401")
        assert (scene.after(1), scene.monitor.look().trouble) == (LeaseState.HELD, "401")
        scene.here = {1}
        assert (scene.after(1), scene.monitor.look().trouble) == (LeaseState.HELD, "")
        scene.here = set()


def test_a_follower_that_has_only_begun_is_enough(scene):
    who = f"process 23 on {socket.gethostname()}"
    scene.here = {23, 42}
    assert (scene.after(0), scene.monitor.look().who) == (LeaseState.HELD, who)
    # It waits to see whether another lives.
    scene.holder(1)
    late = Scene(scene.made)
    assert late.after(0) is LeaseState.UNKNOWN
    late.here = {23}
    assert (late.after(1), late.monitor.look().who) == (LeaseState.HELD, who)
    assert late.after(GRACE_SECONDS) is LeaseState.HELD


def test_looks_have_a_pace(scene):
    scene.after(0)
    scene.holder(1, finished=True)
    assert scene.after(LOOK_SECONDS / 2) is LeaseState.FREE
    assert scene.after(LOOK_SECONDS) is LeaseState.FINISHED


@pytest.fixture
def submitted(scene, monkeypatch):
    """A job that was submitted elsewhere; followers are only counted."""
    found = Submitted(scene.made.job, "r" * 32, None)
    monkeypatch.setattr(detached, "start_follower", lambda job: setattr(job, "starts", job.starts + 1))
    return found


@pytest.mark.parametrize(
    ("holder", "starts"),
    [(None, 1), (FAR, 1), ({**proc.identity(), "started": 1}, 1), (proc.identity(), 0)],
    ids=["nobody", "elsewhere", "gone", "lives here"],
)
def test_who_gets_a_follower(scene, submitted, holder, starts):
    if holder:
        scene.holder(1, holder)
    detached.ensure_follower(submitted)
    assert submitted.starts == starts


def test_no_follower_for_a_job_that_is_finished_or_has_one_on_its_way(scene, submitted, monkeypatch):
    here = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(service_client, "answers", lambda: {here: {(scene.made.share.url, scene.made.paths.folder)}, 42: set()})
        assert detached.ensure_follower(submitted).holder["pid"] == here
        detached.keep_follower(submitted)
        assert submitted.starts == 0
    # One that has said so and is dead by now is no follower.
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(service_client, "answers", lambda: {gone.pid: {(scene.made.share.url, scene.made.paths.folder)}})
    assert service_client.followers((scene.made.share.url, scene.made.paths.folder)) == set()
    scene.holder(1, finished=True)
    monkeypatch.setattr(detached.runs, "lacks_end", lambda *_: False)
    detached.ensure_follower(Submitted(scene.made.job, "r" * 32, None))
    assert submitted.starts == 0


def test_no_follower_for_a_job_that_cannot_be_seen(scene, submitted):
    """Its share isn't mounted, say: then nobody can be seen who relays it either, and one more could not."""
    plan = Path(scene.made.share.local(scene.made.paths.plan))
    plan.rename(plan.with_name("aside"))
    with pytest.raises(ShareError, match=r"the folder of job toy\S* is not on .* any more; is the share mounted there"):
        detached.keep_follower(submitted)
    assert submitted.starts == 0
    plan.with_name("aside").rename(plan)
    detached.keep_follower(submitted)
    assert submitted.starts == 1


def test_who_watches_notices_that_nobody_relays_any_more(scene, submitted, monkeypatch):
    submitted._monitor = scene.monitor
    scene.monitor.job = submitted.job
    scene.holder(1)
    for seconds, starts in [(0, 0), (GRACE_SECONDS, 0), (1, 1)]:
        scene.now += seconds
        detached.keep_follower(submitted)
        assert submitted.starts == starts


def test_a_follower_that_lost_the_race_ends(folder, monkeypatch, capsys):
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.01)
    made = folder()
    holder = Lease(made.job)
    holder.acquire()
    over = threading.Event()

    def heartbeats() -> None:
        while not over.wait(0.1):
            holder.save({})

    thread = threading.Thread(target=heartbeats)
    thread.start()
    try:
        assert follower.follow(made.job, None) is None
    finally:
        over.set()
        thread.join()
    assert f"process {os.getpid()} on {socket.gethostname()} relays job toy-0123" in capsys.readouterr().err
