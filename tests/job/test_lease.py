"""The lease: one holder at a time, taken over when its counter stands still by the reader's own clock."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.errors import ShareError
from mlflow_batchai.job import lease as lease_module
from mlflow_batchai.job import signing
from mlflow_batchai.job.lease import GRACE_SECONDS, Lease, LeaseLostError, LeaseState


class Time:
    """A clock that only sleeping moves; ``during`` runs at each sleep."""

    def __init__(self, during=lambda: None):
        self.now = 1000.0
        self.during = during

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.during()


def lease(made, time=None):
    time = time or Time()
    return Lease(made.job, time.clock, time.sleep)


def held(made, memory=None):
    """A lease that somebody has taken, and what he remembers."""
    holder = lease(made)
    assert holder.acquire()
    if memory is not None:
        holder.save(memory)
    return holder


def test_the_first_takes_it_at_once(folder):
    time = Time()
    first = lease(folder(), time)
    assert first.acquire()
    assert (first.number, first.memory, time.now) == (1, {}, 1000.0)
    assert not first.finished()


TAKES = (
    "import sys; from mlflow_batchai.job.jobs import Job; from mlflow_batchai.job.lease import Lease;"
    "from mlflow_batchai.storage import open_share;"
    "asked = iter([False, True]);"
    "print(Lease(Job(open_share(sys.argv[1]), sys.argv[2])).acquire(lambda: next(asked)), flush=True); sys.stdin.read()"
)


def test_one_of_many_processes_has_it_and_when_that_has_ended_there_is_no_grace_time(folder):
    made = folder()
    argv = [sys.executable, "-c", TAKES, made.share.url, made.paths.folder]
    processes = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sorted(process.stdout.readline().strip() for process in processes) == ["False"] * 3 + ["True"]
    for process in processes:
        process.communicate(timeout=60)
    time = Time()
    assert lease(made, time).acquire()
    assert time.now == 1000.0


def test_a_holder_that_sends_heartbeats_is_never_pushed_out_and_nobody_waits_behind_it(folder):
    made = folder()
    holder = held(made)
    time = Time(during=lambda: time.now > 1015 and holder.save({}))
    assert not lease(made, time).acquire()
    assert 1015 < time.now < 1000 + GRACE_SECONDS
    holder.check()


def test_who_waits_where_looks_cost_requests_looks_seldom(folder):
    made = folder(board=True)
    held(made)
    looks = []
    time = Time(during=lambda: looks.append(1))
    assert lease(made, time).acquire()
    assert len(looks) <= 15 and time.now - 1000 > GRACE_SECONDS


def test_takeover_after_the_grace_time_and_the_holder_notices(folder):
    made = folder()
    holder = held(made, {"cursor": {"agent-0": 3}})
    time = Time()
    heir = lease(made, time)
    assert heir.acquire()
    assert GRACE_SECONDS < time.now - 1000 < GRACE_SECONDS + 2
    assert (heir.number, heir.memory) == (2, {"cursor": {"agent-0": 3}})
    with pytest.raises(LeaseLostError):
        holder.check()
    heir.check()
    # What the old holder still writes, it writes into its own folder.
    holder.save({"cursor": {}}, finished=True)
    assert not heir.finished()
    kept = protocol.decode_one(made.job.share.read(made.paths.cursor(2)))
    assert (kept["counter"], kept["memory"], kept["finished"]) == (1, {"cursor": {"agent-0": 3}}, False)


def test_a_claimer_that_died_before_its_first_word_is_waited_for_too(folder):
    made = folder()
    held(made, {"state": "running"})
    made.share.claim(made.paths.lease(2))
    time = Time()
    third = lease(made, time)
    assert third.acquire()
    assert (third.number, third.memory) == (3, {"state": "running"})
    assert time.now - 1000 > GRACE_SECONDS


def test_a_slow_first_word_counts_as_life(folder):
    made = folder()
    made.share.claim(made.paths.lease(1))
    first_word = {"counter": 1, "memory": {}, "finished": False}
    time = Time(during=lambda: time.now == 1015.0 and made.write(made.paths.cursor(1), first_word))
    assert not lease(made, time).acquire()
    assert time.now == 1015.0


def test_one_look_tells_what_it_can(folder):
    made = folder()
    assert lease(made).view()[:3] == (LeaseState.FREE, 0, None)
    made.share.claim(made.paths.lease(1))
    assert lease(made).view()[:3] == (LeaseState.UNKNOWN, 1, None)
    me = proc.identity()
    for holder, hold in [
        (me, LeaseState.HELD),
        ({**me, "started": 1}, LeaseState.FREE),
        ({**me, "machine": "another pid:[1]", "host": "far"}, LeaseState.UNKNOWN),
        ({}, LeaseState.UNKNOWN),
    ]:
        made.write(made.paths.cursor(1), {"counter": 7, "attempt": 1, "finished": False, "holder": holder})
        assert lease(made).view() == (hold, 1, 7, holder, "", "")
    assert lease(made).view().who == "process ? on another machine"
    assert lease(made).view()._replace(holder=me).who == f"process {os.getpid()} on {socket.gethostname()}"
    # One that died in its trouble is no more than dead.
    gone = {"counter": 7, "attempt": 1, "finished": False, "holder": {**me, "started": 1}, "trouble": "401"}
    made.write(made.paths.cursor(1), gone)
    assert lease(made).view()[0::4] == (LeaseState.FREE, "")
    made.write(made.paths.cursor(1), {"counter": 7, "attempt": 1, "finished": True, "holder": me})
    assert lease(made).view().state is LeaseState.FINISHED
    # Its next attempt waits for a relay.
    made.verdict("failed")
    made.begin(2)
    assert lease(made).view().state is LeaseState.FREE


def test_nothing_is_taken_after_the_end(folder):
    made = folder()
    holder = held(made)
    heir = lease(made)
    claim = made.share.claim

    class LateShare:
        """Between the heir's look and its claim, the holder finishes."""

        def __getattr__(self, name):
            return getattr(made.share, name)

        def claim(self, path):
            holder.save({}, finished=True)
            return claim(path)

    heir._job.share = LateShare()
    assert not heir.acquire()
    assert lease(made).finished() and not lease(made).acquire()


def test_nothing_is_written_below_an_empty_mount_point(folder):
    """Who holds the lease, wants it, ends the job or asks for its end waits for the share."""
    made = folder()
    made.segment(0, {"k": "beat"})
    heir = lease(made)
    holder = held(made, {"cursor": {"agent-0": 1}})
    root = made.share.root
    root.rename(root.with_name("elsewhere"))
    root.mkdir()
    job = holder._job
    acts = (
        lambda: holder.save({"cursor": {"agent-0": 2}}),
        heir.acquire,
        lambda: job.request_cancel("ann", ""),
        lambda: job.claim_verdict({}),
        lambda: job.afresh().claim_verdict({}),
        lambda: job.at(2).begin(2, {}),
    )
    for act in acts:
        with pytest.raises(ShareError, match="isn't mounted at"):
            act()
    holder.check()
    root.rmdir()
    root.with_name("elsewhere").rename(root)
    holder.save({"cursor": {"agent-0": 3}})
    assert protocol.decode_one(made.share.read(made.paths.cursor(1)))["memory"] == {"cursor": {"agent-0": 3}}
    assert not made.share.list(made.paths.requests) and holder._job.claim_verdict({})


def test_heartbeats_keep_it_and_stop_with_the_block(folder, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    made = folder()
    holder = held(made)
    beaten = threading.Event()
    save = holder.save

    def saved(*arguments, **named):
        save(*arguments, **named)
        beaten.set()

    holder.save = saved
    with holder.beating():
        assert beaten.wait(60)
        holder.save({"state": "running"}, finished=True)
        written = made.share.read(made.paths.cursor(1))
    assert all(thread.name != "lease" for thread in threading.enumerate())
    assert made.share.read(made.paths.cursor(1)) == written
    assert holder.finished()


def test_heartbeats_go_on_when_the_users_key_can_be_read_again(folder, monkeypatch, tmp_path):
    """His home may be away for a while, as the share may."""
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    home, other, file = (tmp_path / name for name in ("home", "other", "file"))
    other.symlink_to(signing.key_path().parent)
    other.replace(home)
    file.touch()
    monkeypatch.setenv("BATCHAI_HOME", str(home))
    made = folder()
    holder = held(made)
    asked, key_path = threading.Event(), signing.key_path
    monkeypatch.setattr(signing, "key_path", lambda: (asked.set(), key_path())[1])
    with holder.beating():
        other.symlink_to(file)
        real = home.readlink()
        other.replace(home)
        for _ in range(2):  # the key is read after the first
            asked.clear()
            assert asked.wait(60)
        other.symlink_to(real)
        other.replace(home)
        before = lease(made).view().counter
        wait_for(lambda: lease(made).view().counter > before)


def test_a_holder_in_trouble_is_pushed_out_by_who_can_reach_the_store(folder):
    """Its token has expired, say: it lives, and would hold the lease for ever."""
    made = folder()
    holder = held(made, {"cursor": {"agent-0": 3}})
    asked = []

    def able(answer):
        def asks():
            asked.append(answer)
            time.now += 100  # a store that is away for us too may take its time to say so
            holder.save({})
            return answer

        return asks

    # One that can go on is left alone, and nobody is asked for its sake.
    time = Time(during=lambda: holder.save({}))
    assert not lease(made, time).acquire(able=able(True)) and asked == []
    holder.trouble = "401"
    holder.save({})
    assert lease(made).view()[0::4] == (LeaseState.HELD, "401")
    assert not lease(made, time).acquire(able=able(False))
    holder.check()
    before = time.now
    heir = lease(made, time)
    assert heir.acquire(able=able(True)) and asked == [False, True] and time.now == before + 100
    assert (heir.number, heir.memory, lease(made).view().trouble) == (2, {"cursor": {"agent-0": 3}}, "")
    with pytest.raises(LeaseLostError):
        holder.check()


def test_who_asked_for_long_whether_it_can_reach_the_store_still_looks_whether_the_holder_lives(folder):
    made = folder()
    holder = held(made)
    holder.trouble = "401"
    holder.save({})
    time = Time(during=lambda: holder.save({}))

    def able():
        time.now += 1000
        return False

    assert not lease(made, time).acquire(able=able)


def test_one_that_was_let_go_is_taken_at_once_with_its_memory(folder, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    made = folder()
    holder = held(made, {"state": "running"})
    with holder.beating():
        holder.release("the server has been away for 24 h")
        assert lease(made).view()[0::4] == (LeaseState.FREE, "the server has been away for 24 h")
        assert not lease(made).finished()
        counter = lease(made).view().counter
        time = Time()
        heir = lease(made, time)
        assert heir.acquire() and time.now == 1000.0
    assert (heir.number, heir.memory, heir.trouble) == (2, {"state": "running"}, "")
    assert protocol.decode_one(made.job.share.read(made.paths.cursor(1)))["counter"] == counter
    assert lease(made).view()[0::4] == (LeaseState.HELD, "")
