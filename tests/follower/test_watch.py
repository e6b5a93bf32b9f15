"""The watch ends a job whose agents can't: lost nodes, unwritten verdicts, cancel requests that nobody heeds."""

from __future__ import annotations

import re

import pytest

from mlflow_batchai.agent.attempt.ending import LAST_DRAIN_SECONDS
from mlflow_batchai.engines.base import Poll, PollState
from mlflow_batchai.errors import ClusterError, ShareError
from mlflow_batchai.follower import watch as watch_module
from mlflow_batchai.follower.watch import (
    CANCEL_PATIENCE_SECONDS,
    DRAIN_PATIENCE_SECONDS,
    INDEX_PATIENCE_SECONDS,
    SILENCE_MARGIN_SECONDS,
    Silence,
    Watch,
)


class World:
    """An engine whose nodes can be made to go, and a clock."""

    poll_seconds = 1.0

    def __init__(self, nodes):
        self.nodes = nodes
        self.gone = set()
        self.unknown = set()
        self.frozen = set()
        self.waiting = False
        self.agents = True
        self.failures = {}
        self.now = 0.0
        self.polls = 0
        self.cancelled = 0
        self.on_poll = lambda: None
        self.broken = None

    def poll(self, handle):
        self.polls += 1
        if self.broken:
            raise ClusterError(self.broken)
        gone = Poll(PollState.GONE, "killed", tuple(sorted(self.gone)), started=self.agents)
        answer = gone if self.gone else Poll(PollState.ALIVE)
        if self.waiting:
            answer = Poll(PollState.QUEUED, started=self.agents)
        if self.unknown:
            answer = Poll(PollState.UNKNOWN, "node a can't be reached", (), tuple(sorted(self.unknown)))
        self.on_poll()
        return answer._replace(frozen=tuple(self.frozen), failures=self.failures)

    def cancel(self, handle):
        self.cancelled += 1
        self.gone = set(range(self.nodes))


@pytest.fixture
def scene(folder):
    def make(nodes=2, announced=True, **plan):
        made = folder(nodes=nodes, **plan)
        made.handle(nodes)
        for node in range(nodes) if announced else ():
            made.announce(node)
        world = World(nodes)
        watch = Watch(made.job, world, clock=lambda: world.now)

        def check(seconds=2.0):
            world.now += seconds
            watch.check()
            return made.job.state()

        return made, world, watch, check

    return make


def test_nothing_is_done_while_agents_live(scene):
    _, world, _, check = scene()
    assert not check().ended
    assert check(0.1).execution_state == "running"
    assert world.polls == 1  # not more than once a second


def test_a_job_that_waits_is_polled_less_and_less_often_at_one_moment_for_all(scene):
    _, world, watch, _ = scene(announced=False)
    world.waiting = True
    moments = []
    while world.now < 120:
        watch.check()
        if world.polls > len(moments):
            moments.append(world.now)
        world.now += watch.seconds
    assert moments == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    watch.check()
    # The follower has seen that it waits no longer (``Supervisor.look``).
    world.now, world.waiting = 125.5, False
    for _ in range(3):
        watch.check()
        world.now += watch.seconds
    assert world.now == 128.0


@pytest.mark.parametrize("asked_before", [True, False])
def test_a_scheduler_that_is_away_says_nothing_of_a_job_that_waits(folder, asked_before):
    """Its agents were not started yet, as far as is known, so their silence means nothing until they are."""
    made = folder()
    made.handle(1, "slurm")
    world = World(1)
    check = checker(made, world)
    world.waiting, world.agents = True, False
    if asked_before:
        check(600)
    world.unknown = {0}
    assert not check(300).ended
    world.waiting, world.unknown = False, set()
    check(2)
    world.unknown = {0}
    assert check(60 + SILENCE_MARGIN_SECONDS + 4).error_code == "NodeSetupFailed"


def test_a_job_that_waits_in_a_queue_of_agents_ends_at_once(scene):
    made, world, _, check = scene(announced=False)
    world.waiting = True
    made.job.request_cancel("me", "")
    made.announce(0)
    state = check()
    assert (state.reason, state.error_code, world.cancelled) == ("terminated by me", "JobTerminated", 1)


def test_a_poll_that_is_older_than_the_nodes_of_a_job_cuts_no_rank_short(scene):
    made, world, _, check = scene(announced=True)
    world.waiting = True
    made.job.request_cancel("me", "")
    assert not check().ended and not world.cancelled


def test_a_job_that_the_scheduler_has_stopped_for_a_while_goes_on(folder):
    made = folder()
    made.handle(1, "slurm")
    made.announce(0)
    world = World(1)
    check = checker(made, world)
    world.frozen = {0}
    check(300)
    world.unknown = {0}
    assert not check(300).ended
    world.frozen, world.unknown = set(), set()
    check(2)
    world.unknown = {0}
    assert not check(60).ended
    assert check(SILENCE_MARGIN_SECONDS + 4).error_code == "NodeLost"


@pytest.mark.parametrize(
    ("announced", "started", "code"),
    [(True, True, "JobTerminated"), (False, False, "JobTerminated"), (False, True, "NodeSetupFailed")],
)
def test_a_job_that_the_scheduler_calls_cancelled(scene, announced, started, code):
    """It was a person if an agent had come, or none could; else it may have been a node that is broken."""
    _, world, _, check = scene(announced=announced)
    world.gone, world.agents = {0, 1}, started
    world.failures = {0: {"code": "JobTerminated", "message": "cancelled"}}
    assert check().error_code == code


def checker(made, world):
    """What watches a job for some seconds, unless it ends before; its state."""
    watch = Watch(made.job, world, clock=lambda: world.now)

    def check(seconds):
        until = world.now + seconds
        while world.now < until and not made.job.state().ended:
            world.now += 2
            watch.check()
        return made.job.state()

    return check


def test_an_agent_that_is_gone_without_an_exit_is_a_lost_node(scene):
    _, world, _, check = scene()
    world.gone = {1}
    state = check()
    assert (state.execution_state, state.error_code, state.exit_code) == ("failed", "NodeLost", None)
    assert state.reason == "node-1 was lost: killed"
    assert state.run_status == "FAILED"


def test_one_that_never_announced_could_not_be_set_up(scene):
    _, world, _, check = scene(announced=False)
    world.gone = {0, 1}
    state = check()
    assert state.error_code == "NodeSetupFailed"
    assert state.reason.startswith("node-0 was lost")


def test_one_that_has_said_goodbye_is_not_lost(scene):
    made, world, _, check = scene()
    made.exit(1)
    world.gone = {1}
    assert not check().ended


def test_an_exit_that_comes_during_the_poll_counts(scene):
    made, world, _, check = scene()
    world.gone = {1}
    world.on_poll = lambda: made.exit(1)
    assert not check().ended


def test_node_0_gone_after_its_exit_but_without_a_verdict(scene):
    made, world, _, check = scene()
    made.exit(0, stopped="why")
    made.exit(1)
    world.gone = {0, 1}
    assert check().error_code == "NodeLost"


@pytest.mark.parametrize(
    "failure", [None, {"code": "JobFailed", "message": "rank 1 on node-1 exited with code 3", "exitCode": 3}]
)
def test_what_the_exits_of_all_nodes_say_is_the_verdict_that_is_missing(scene, failure):
    made, world, _, check = scene()
    made.exit(0)
    made.exit(1, failure=failure)
    world.gone = {0, 1}
    state = check()
    if failure is None:
        assert (state.execution_state, state.exit_code) == ("succeeded", 0)
    else:
        assert (state.execution_state, state.exit_code, state.reason) == ("failed", 3, failure["message"])


def test_a_verdict_that_was_claimed_and_never_written(scene):
    made, world, _, check = scene()
    made.share.claim(made.paths.verdict)
    world.gone = {0}
    assert not check().ended  # someone is left who may still write it
    world.gone = {0, 1}
    assert check().error_code == "NodeLost"


def test_the_verdict_stands(scene):
    made, world, _, check = scene()
    made.verdict()
    world.gone = {0, 1}
    assert check().execution_state == "succeeded"


def test_a_cancel_request_is_left_to_the_agents_for_a_while(scene):
    made, world, _, check = scene()
    made.job.request_cancel("me", "")
    assert not check().ended
    assert not check(CANCEL_PATIENCE_SECONDS - 1).ended
    state = check(2.0)
    assert (state.run_status, state.error_code, world.cancelled) == ("KILLED", "JobTerminate", 1)


def test_ranks_may_save_what_they_have_before_they_are_ended(scene):
    made, world, _, check = scene(terminateSeconds=300.0)
    made.job.request_cancel("me", "")
    check()
    check(CANCEL_PATIENCE_SECONDS + 299.0)
    assert world.cancelled == 0
    check()
    assert (world.cancelled, made.job.state().run_status) == (1, "KILLED")


def test_agents_that_look_seldom_hear_of_it_later(scene):
    made, world, _, check = scene(board=True)
    made.job.request_cancel("me", "")
    made.job.index.look(now=True)
    check()
    check(CANCEL_PATIENCE_SECONDS + 1)
    assert world.cancelled == 0
    check(INDEX_PATIENCE_SECONDS)
    assert world.cancelled == 1


@pytest.mark.parametrize(("announced", "code"), [(True, "JobTerminate"), (False, "JobTerminated")])
def test_cancelled_and_gone(scene, announced, code):
    made, world, _, check = scene(announced=announced)
    made.job.request_cancel("me", "")
    world.gone = {0, 1}
    state = check()
    assert (state.run_status, state.error_code) == ("KILLED", code)


def test_a_node_that_cant_be_told_holds_up_no_end(scene, monkeypatch):
    made, world, _, check = scene()
    monkeypatch.setattr(world, "cancel", refuses)
    made.job.request_cancel("me", "")
    check()
    with pytest.raises(ClusterError, match="no route"):
        check(CANCEL_PATIENCE_SECONDS + 1)
    assert made.job.state().run_status == "KILLED"


def refuses(handle):
    raise ClusterError("node 1: no route")


def test_a_cluster_that_cant_be_asked_says_nothing_of_the_job(scene):
    made, world, _, _ = scene()
    said = []
    watch = Watch(made.job, world, clock=lambda: world.now, say=said.append)
    world.broken = "ssh: no route"
    for _ in range(3):
        world.now += 2
        watch.check_or_complain()
    assert not made.job.state().ended
    assert said == ["ssh: no route"]


def test_without_a_handle_there_is_nothing_to_ask(folder):
    made = folder()
    world = World(1)
    watch = Watch(made.job, world, clock=lambda: world.now)
    world.now = 9
    watch.check()
    watch.clean_up()
    assert (world.polls, world.cancelled) == (0, 0)


def test_a_job_whose_submitter_died_before_its_handle_can_be_ended(folder):
    made = folder()
    world = World(1)
    watch = Watch(made.job, world, clock=lambda: world.now)
    made.job.request_cancel("me", "")
    for world.now in (2.0, CANCEL_PATIENCE_SECONDS, CANCEL_PATIENCE_SECONDS + 4.0):
        assert not made.job.state().ended
        watch.check()
    assert (made.job.state().run_status, made.job.state().error_code) == ("KILLED", "JobTerminated")
    assert (world.polls, world.cancelled) == (0, 0)


def test_clean_up_does_not_wait_for_nodes_that_cant_be_asked(scene, monkeypatch):
    _, world, watch, _ = scene()
    world.unknown = {0, 1}
    monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: pytest.fail("waited"))
    watch.clean_up()
    assert world.cancelled == 1


@pytest.mark.parametrize(("engine", "pause"), [("fake", 0.05), ("slurm", 2.0)])
def test_clean_up_waits_for_agents_to_leave(scene, monkeypatch, engine, pause):
    made, world, watch, _ = scene()
    made.handle(2, engine)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        world.now += seconds
        if len(slept) == 3:
            world.gone = {0, 1}

    monkeypatch.setattr(watch_module.time, "sleep", sleep)
    watch.clean_up()
    assert (slept, world.cancelled) == ([pause] * 3, 1)


@pytest.mark.parametrize("grace", [0.0, 40.0])
def test_clean_up_does_not_wait_for_ever(scene, monkeypatch, grace):
    _, world, watch, _ = scene(terminateSeconds=grace)
    monkeypatch.setattr(watch_module.time, "sleep", lambda seconds: setattr(world, "now", world.now + seconds))
    watch.clean_up()
    assert world.cancelled == 1
    assert watch_module.LEAVE_SECONDS + grace <= world.now < watch_module.LEAVE_SECONDS + grace + 1


def test_node_0_unreachable_and_silent_is_lost(scene):
    made, world, _, check = scene()
    grace = 60 + SILENCE_MARGIN_SECONDS
    world.unknown = {0}
    check()
    for number in range(int(grace)):  # it can't be asked, and goes on writing
        made.segment(number, {"k": "beat"})
        assert not check().ended
    begun = world.now
    while world.now - begun < grace - 2:
        assert not check().ended
    state = check()
    assert (state.error_code, state.exit_code) == ("NodeLost", None)
    assert (
        state.reason == f"node-0 was lost: it has not been heard of for {world.now - begun:.0f} s, and node a can't be reached"
    )


FULL = {"code": "ShareFailed", "message": "node-1: the share is full", "node": 1}


def test_what_an_agent_cant_say_on_the_share_is_said_by_us(scene):
    _, world, _, check = scene()
    world.failures = {1: FULL}
    state = check()
    assert (state.execution_state, state.error_code, state.reason) == ("failed", "ShareFailed", "node-1: the share is full")


def test_a_person_who_wants_the_end_of_a_job_that_lost_its_share(scene):
    made, world, _, check = scene()
    made.job.request_cancel("me", "")
    world.failures = {1: FULL}
    assert check().run_status == "KILLED"


def test_the_room_that_was_kept_on_a_share_that_is_full_is_for_the_verdict(scene, monkeypatch):
    made, world, watch, check = scene()
    made.share.write(made.paths.reserve, bytes(1000))
    claim, room = made.share.claim, made.share.local(made.paths.reserve)

    def full(path):
        if room.exists():
            raise ShareError("No space left on device")
        return claim(path)

    monkeypatch.setattr(watch._job.share, "claim", full)
    world.failures = {0: FULL}
    assert check().error_code == "ShareFailed"


def test_node_0_stopped_and_silent_is_lost(scene):
    _, world, _, check = scene()
    world.frozen = {0}
    state = silent(check)
    assert state.error_code == "NodeLost"
    assert re.fullmatch(
        r"node-0 was lost: it has not been heard of for \d+ s, and its agent was stopped \(SIGSTOP\)", state.reason
    )


def silent(check, seconds=60 + SILENCE_MARGIN_SECONDS):
    """Check every 2 s until the job has ended, for two looks more than the grace time."""
    for _ in range(int(seconds / 2) + 2):
        if (state := check()).ended:
            return state
    return check()


def test_a_verdict_that_node_0_has_begun_to_give_is_finished_after_its_silence(scene):
    made, world, _, check = scene()
    made.share.claim(made.paths.verdict)
    world.unknown = {0}
    assert silent(check).error_code == "NodeLost"


def test_node_0_silent_while_a_person_has_asked_for_the_end(scene):
    made, world, _, check = scene()
    made.share.claim(made.paths.verdict)  # begun, and never written: the request alone can't end it
    made.job.request_cancel("me", "")
    world.unknown = {0}
    state = silent(check)
    assert (state.run_status, state.error_code) == ("KILLED", "JobTerminate")


@pytest.mark.parametrize(("announced", "code"), [(0, "NodeSetupFailed"), (2, "NodeLost")])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_job_without_a_handle_ends_when_node_0_falls_silent(folder, announced, code, claimed):
    made = folder(nodes=2)
    for node in range(announced):
        made.announce(node)
    if claimed:
        made.share.claim(made.paths.verdict)
    world = World(2)
    watch = Watch(made.job, world, clock=lambda: world.now)

    def check():
        world.now += 2
        watch.check()
        return made.job.state()

    for number in range(50):  # it runs without one
        made.segment(number, {"k": "beat"})
        assert not check().ended
    state = silent(check)
    assert state.error_code == code
    assert "s, and its submitter died before it had started every agent" in state.reason
    assert (world.polls, world.cancelled) == (0, 0)


def test_heartbeats_of_an_agent_that_sleeps_count(scene):
    made, world, _, check = scene(announced=False)
    world.unknown = {0}
    for number in range(60):
        made.share.write(made.paths.heartbeats("agent-0"), b"." * (number // 5))
        assert not check().ended
    assert silent(check).error_code == "NodeSetupFailed"


def test_segments_that_were_relayed_before_are_not_counted_anew(scene):
    made, world, _, _ = scene()
    made.segment(7, {"k": "beat"})
    watch = Watch(made.job, world, 7, lambda: world.now)
    assert watch._count() == 8
    assert Watch(made.job, world)._count() == 0


def test_silence_of_a_node_that_lives_or_of_another_one_ends_nothing(scene):
    _, world, _, check = scene()
    for unknown in (set(), {1}):
        world.unknown = unknown
        for _ in range(100):
            assert not check().ended  # a share that stalls, or a node that node 0 watches


def test_time_in_which_nobody_looked_is_no_silence():
    silence = Silence(3.0)
    assert silence.seconds(0.0, 5) == 0.0
    assert silence.seconds(2.0, 5) == 2.0
    assert silence.seconds(1000.0, 5) == 5.0
    assert silence.seconds(1001.0, 6) == 0.0
    assert silence.seconds(1002.0, 6) == 1.0


def test_agents_may_send_what_ranks_have_written_before_they_are_ended(folder):
    volume = {"scope": "job", "path": "data", "kind": "azureFiles", "how": "rclone", "share": None}
    made = folder(volumes=[volume])
    made.handle(1)
    world = World(1)
    watch = Watch(made.job, world, clock=lambda: world.now)
    made.job.request_cancel("me", "")
    for world.now in (2.0, CANCEL_PATIENCE_SECONDS + 3.0, CANCEL_PATIENCE_SECONDS + DRAIN_PATIENCE_SECONDS):
        watch.check()
        assert world.cancelled == 0
    world.now += 5.0
    watch.check()
    assert world.cancelled == 1
    # An agent sees the request, ends its ranks, and drains twice.
    assert 15.0 + 2 * 3 * LAST_DRAIN_SECONDS < CANCEL_PATIENCE_SECONDS + DRAIN_PATIENCE_SECONDS
