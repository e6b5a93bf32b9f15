"""Damaged or unlawful files on the share stop nothing: they are left out, counted and reported."""

from __future__ import annotations

import pytest
from job_folder import line, report
from relay_world import Crash, Gone, history

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.errors import JobChangedError
from mlflow_batchai.follower.watch import Watch
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.lease import Lease, LeaseState

BEAT = {"k": "beat", "t": 1}


def seen(reader, **how):
    return [(writer, number, [one["k"] for one in found]) for writer, number, found in reader.read(**how)]


def cut(made, sequence, keep, writer="agent-0"):
    """Leave so many bytes of a segment; negative: all but so many."""
    path = made.paths.segment(writer, sequence)
    made.share.write(path, made.share.read(path)[:keep])


# Segments.


def test_a_damaged_segment_is_skipped(folder, clock):
    made = folder()
    for number in range(3):
        made.segment(number, report(number, loss=number), report(number, acc=number), BEAT)
    cut(made, 1, -40)  # the terminator, and a part of the last record
    reader = EventReader(made.job)
    assert seen(reader) == [("agent-0", 0, ["report", "report", "beat"])]
    clock.now += records.SETTLE_SECONDS - 1
    assert seen(reader) == []
    clock.now += 1
    assert seen(reader) == [("agent-0", 1, ["skipped"]), ("agent-0", 2, ["report", "report", "beat"])]
    assert reader.cursor == {"agent-0": 3}
    assert reader.ending, "what is missing may have said so"


def test_what_a_mount_shows_late_is_not_lost(folder, clock):
    made = folder()
    for number in range(2):
        made.segment(number, BEAT)
    whole = made.share.read(made.paths.segment("agent-0", 0))
    reader = EventReader(made.job)
    for length in (0, 5, 20):
        made.share.write(made.paths.segment("agent-0", 0), whole[:length])
        for _ in range(4):
            assert seen(reader) == []
            clock.now += 1.0
    made.share.write(made.paths.segment("agent-0", 0), whole)
    assert seen(reader) == [("agent-0", 0, ["beat"]), ("agent-0", 1, ["beat"])]


def test_the_last_segment_of_a_writer_waits_until_nothing_more_will_be_written(folder, clock):
    made = folder(nodes=2)
    made.segment(0, BEAT, report(0, loss=1))
    cut(made, 0, -1)
    made.segment(0, BEAT, writer="agent-1")
    reader = EventReader(made.job)
    assert seen(reader) == [("agent-1", 0, ["beat"])]
    clock.now += 1000.0
    assert seen(reader) == []
    before = clock.now
    assert seen(reader, to_the_end=True) == [("agent-0", 0, ["skipped"])]
    assert clock.now - before >= records.SETTLE_SECONDS
    assert seen(reader, to_the_end=True) == []


def test_at_the_end_more_may_be_missing_than_is_looked_ahead_for(folder, clock):
    made = folder()
    for number in (0, 2, 1500, 1501):
        made.segment(number, BEAT)
    reader = EventReader(made.job)
    assert seen(reader) == [("agent-0", 0, ["beat"])]
    found = list(reader.read(to_the_end=True))
    assert [(number, [event["k"] for event in events]) for _, number, events in found] == [
        *((1, ["skipped"]), (2, ["beat"]), (1499, ["skipped"]), (1500, ["beat"]), (1501, ["beat"]))
    ]
    assert sum(event["files"] for _, _, events in found for event in events if event["k"] == "skipped") == 1 + 1497


@pytest.mark.parametrize("board", [False, True])
def test_segments_that_are_missing_are_passed_over_together(folder, clock, board):
    made = folder(board=board)
    made.segment(0, BEAT)
    made.segment(4, BEAT)
    made.add_marker("segments-agent-0", 5)
    reader = EventReader(made.job)
    found = []
    for _ in range(30):
        found += seen(reader)
        clock.now += 1.0
    lost = [("agent-0", number, ["skipped"]) for number in ((1, 2, 3) if board else (3,))]
    assert found == [("agent-0", 0, ["beat"]), *lost, ("agent-0", 4, ["beat"])]


BAD = [
    {"k": 5},
    {"n": 1},
    {"k": "log", "r": "0", "s": "out", "x": "x\n", "t": 1},
    {"k": "log", "r": 0, "s": "out", "x": None, "t": 1},
    {"k": "log", "r": 0, "s": "out", "x": "x\n", "t": float("nan")},
    {"k": "report"},
    {"k": "report", "body": [1]},
    {"k": "phase", "phase": "x"},
    {"k": "reached", "node": 1, "findings": [{"why": ""}]},
    {"k": "dropped", "lines": "many"},
    {"k": "dropped", "lines": -1},
    {"k": "dropped", "lines": 2**70},
]


def test_records_of_another_shape_are_counted(folder):
    made = folder()
    made.segment(0, *BAD, {"k": "unknown to us"}, BEAT)
    [(_, _, found)] = EventReader(made.job).read()
    assert [one["k"] for one in found] == ["unknown to us", "beat", "skipped"]
    assert (found[-1]["lines"], found[-1]["files"]) == (len(BAD), 0)


# The relay.


@pytest.fixture
def plain(relayed):
    """``relayed``, of a job that makes no model."""
    made, client, relay = relayed
    made.plan["model"] = None
    made.write(made.paths.plan, made.plan)
    return made, client, relay


def notes(made, client):
    return client.get_run(made.plan["runId"]).data.tags["batchai.notes"].splitlines()


def test_what_was_skipped_is_counted_once_and_shown(plain, clock):
    made, client, relay = plain
    made.segment(0, report(0, loss=1.5), *BAD[:3])
    made.segment(1, report(1, loss=0.5), report(2, loss=0.25), {"k": "dropped", "lines": 7})
    cut(made, 1, -40)
    made.segment(2, report(3, loss=0.1, word="word", none=None), {"k": "report", "t": 1, "body": {"type": "model"}})
    first = relay()
    first.step()
    clock.now += records.SETTLE_SECONDS
    client.after["log_batch"] = [Crash()]  # after the points, before the cursor
    with pytest.raises(Crash):
        first.step()
    client.dead = False
    second = relay()
    second.step()
    clock.now += records.SETTLE_SECONDS
    second.step()
    made.verdict()
    relay().finish(made.job.state())
    assert history(client, made.plan["runId"])["loss"] == [(0, 1.5, 5), (3, 0.1, 5)]
    assert notes(made, client) == [
        "4 lines of what agents and ranks had reported could not be read, and were left out",
        "1 event files were damaged or missing on the share, and were left out",
        "2 metric values were no numbers, and were left out",
    ]


def test_names_that_were_changed_are_told_of_once(plain):
    made, client, relay = plain
    odd = {"a b%": 1, "x/../y": 2, "null\0": 3, "\ud800": 4, "plain": 5, "plain?": 6, "plain_": 7, "q?": 8, "q*": 9}
    made.segment(0, report(0, **odd))
    first = relay()
    first.step()
    made.segment(1, report(1, **odd))
    made.verdict()
    relay().finish(made.job.state())
    assert notes(made, client) == [
        "4 metric values came for a step that had one; the first stands",
        "metric 'a b%' is stored as 'a b_'",
        "metric 'x/../y' is stored as 'x/__/y'",
        "metric 'null\\x00' is stored as 'null_'",
        "metric '\\ud800' is stored as '_'",
        "metrics 'plain?' and 'plain_' are all stored as 'plain_': of each step the first value stands",
        "metrics 'q?' and 'q*' are all stored as 'q_': of each step the first value stands",
    ]
    assert history(client, made.plan["runId"])["plain_"] == [(0, 6.0, 5), (1, 6.0, 5)]


def test_odd_values_and_a_report_of_thousands(plain):
    made, client, relay = plain
    values = {"huge": 10**400, "text": "1e3", "none": None, "list": [1], "yes": True, "nan": "nan", "inf": "-inf", "map": {}}
    steps = [1.9, -3, 2**70, "7", None]
    odd = [report(0, **values), *(report(step, odd=number) for number, step in enumerate(steps))]
    made.segment(0, *odd, report(0, ts=-5, early=1), report(0, **{f"m{number}": number for number in range(2500)}))
    made.segment(1, line("NUL \0 and \udcff"), line("\0" * 1000))
    made.verdict()
    relay().finish(made.job.state())
    run_id = made.plan["runId"]
    found = client.get_run(run_id).data.metrics
    assert len([key for key in found if key.startswith("m")]) == 2500
    assert [point.step for point in client.get_metric_history(run_id, "odd")] == [-3, 0, 1, 7]
    assert [point.timestamp for point in client.get_metric_history(run_id, "early")] == [0]
    assert found["yes"] == 1.0 and found["text"] == 1000.0 and "huge" not in found
    assert "4 metric values were no numbers, and were left out" in notes(made, client)


@pytest.mark.parametrize("reason", ["NUL \0", "half \ud800 a letter", "é" * 9000])
def test_a_reason_that_no_store_takes_ends_the_run_all_the_same(relayed, reason):
    made, client, relay = relayed
    made.verdict("failed", reason=reason)
    relay().finish(made.job.state())
    run = client.get_run(made.plan["runId"])
    assert run.info.status == "FAILED"
    assert "\0" not in run.data.tags["batchai.reason"]


def test_a_backlog_goes_through_memory_in_pieces(relayed):
    made, client, relay = relayed
    for number in range(40):
        made.segment(number, *(report(number * 100 + step, loss=1) for step in range(100)))
    first = relay()
    sizes, real = [], client._real.log_batch
    client._real.log_batch = lambda run_id, metrics=(), **more: (
        sizes.append(len(metrics)),
        real(run_id, metrics=metrics, **more),
    )
    # The store goes away in the middle: nothing is taken twice when it is back.
    client.before["log_batch"] = [None, ConnectionError("down")]
    with pytest.raises(ConnectionError):
        first.step()
    first.step()
    assert sizes == [1000, 1000, 1000, 1000]
    assert len(history(client, made.plan["runId"])["loss"]) == 4000
    made.announce(0)
    made.verdict()
    first.finish(made.job.state())
    assert "came for a step that had one" not in client.get_run(made.plan["runId"]).data.tags["batchai.notes"]


# The relay's own memory.


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, protocol.encode([{"counter": "x", "attempt": [], "holder": 5, "finished": "no"}])]
)
def test_a_damaged_cursor_is_none(relayed, content):
    made, client, relay = relayed
    made.segment(0, report(0, loss=1.5))
    relay().step()
    made.share.write(made.paths.cursor(1), content)
    made.share.claim(made.paths.relay + "/²")  # no number, though it looks like one
    lease = Lease(made.job)
    assert not lease.finished() and lease.view().state is not LeaseState.HELD and lease.left_out() == []
    made.verdict()
    relay().finish(made.job.state())
    assert history(client, made.plan["runId"]) == {"loss": [(0, 1.5, 5)]}


# Files of one record.


def test_a_torn_verdict_is_not_overwritten_at_once(folder, clock):
    """A mount with a cache may show an old piece of it."""
    made = folder()
    made.verdict("succeeded", exitCode=0)
    whole = made.share.read(made.paths.verdict_file)
    made.share.write(made.paths.verdict_file, whole[:-1])
    job = made.job
    job.finish_claim({"executionState": "failed"})
    assert made.share.read(made.paths.verdict_file) == whole[:-1] and not job.state().ended
    made.share.write(made.paths.verdict_file, whole)
    clock.now += records.SETTLE_SECONDS
    job.finish_claim({"executionState": "failed"})
    assert job.state().execution_state == "succeeded"


GARBAGE = [
    b"",
    b"\0" * 300,
    b"half a verd",
    protocol.encode([{"executionState": "succeeded"}]),
    protocol.encode([{"a": 1}, {}]),
    protocol.encode([{"executionState": "succeeded", "exitCode": 7}]).replace(b"7", b"8"),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_verdict_that_can_t_be_read_leaves_no_job_running_for_ever(folder, clock, garbage):
    made = folder()
    made.announce(0)
    made.exit(0)
    made.verdict()
    made.share.write(made.paths.verdict_file, garbage)
    made.handle()
    job = made.job
    watch = Watch(job, Gone(), clock=clock.clock)
    for _ in range(20):
        watch.check()
        clock.now += 1.0
    state = job.state()
    assert (state.ended, state.execution_state, state.exit_code) == (True, "succeeded", 0)


def test_announces_exits_and_requests_of_another_shape_are_none(folder):
    made = folder(nodes=2)
    made.announce(0)
    made.write(made.paths.announce(1), {"host": 5})
    made.write(made.paths.exit(0), {"failure": "x", "stopped": None})
    made.write(made.paths.request("1"), {"kind": "delete everything", "attempt": 1})
    made.write(made.paths.request("2"), {"who": "me"})
    snapshot = made.job.snapshot()
    assert (set(snapshot.announces), set(snapshot.exits), list(snapshot.requests)) == ({0}, set(), [])
    made.write(made.paths.plan, {**made.plan, "nodeCount": "two"})
    with pytest.raises(JobChangedError, match=r"the plan of job toy was changed on the share"):
        _ = made.job
