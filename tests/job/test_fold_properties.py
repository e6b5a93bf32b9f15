"""Whatever lies in a job folder, in whatever order it came: a lawful state, each point once, and nothing but what is documented."""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_folder import JobFolder, line, report
from plans import BARE
from relay_world import history

from mlflow_batchai.agent import outcome, protocol, records
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import MetricRule, plain
from mlflow_batchai.agent.protocol import JobPaths, TornFileError
from mlflow_batchai.errors import JobNotFoundError, JobUnreadableError
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.metrics import MetricFold
from mlflow_batchai.job.states import fold

few = settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None, derandomize=True, database=None)
many = settings(few, max_examples=70)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**63), 2**70, 10**400, -1, 0, 1]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["", "queued", "succeeded", "failed", "cancel", "requeue", "nan", "inf", "1e999", "\0", "\ud800", "1", "9" * 5000]
    ),
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=5
)


def mutated(valid: list[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A valid record, mostly after a change of some of its values."""
    keys = sorted({key for record in valid for key in record})
    changes = st.dictionaries(st.sampled_from(keys) | st.text(max_size=6), anything, max_size=3)
    gone = st.sets(st.sampled_from(keys), max_size=2)
    return st.builds(
        lambda record, change, without: {key: value for key, value in {**record, **change}.items() if key not in without},
        st.sampled_from(valid),
        st.just({}) | changes,
        st.just(set()) | gone,
    )


FAILURE = Failure(protocol.JOB_FAILED, "rank 1 on node-1 exited with code 3", 1, 1, 3, ["the last line"], details=[["a", "b"]])
ANNOUNCES = [{"node": 0, "host": "h", "address": "127.0.0.1", "time": 5, "gpus": [], "cores": 2}]
EXITS = [
    {"node": 0, "failure": None, "stopped": None, "ranks": [], "left": [], "segments": 3},
    {"node": 1, "failure": FAILURE.as_record(), "stopped": None},
    {"node": 1, "failure": None, "stopped": "node 0 said so"},
]
REQUESTS = [protocol.request_record(kind, attempt, "me", "why") for kind in ("cancel", "requeue") for attempt in (1, 2)]
VERDICTS = [
    outcome.verdict(None, None),
    outcome.verdict(FAILURE, None),
    outcome.verdict(None, outcome.Stop("cancel", "why", by="me")),
    protocol.requeued_record("room", "agent-0", 1),
    {**outcome.verdict(FAILURE, None), "executionState": "queued", "retry": True, "retriesLeft": 1, "next": 2},
]
EVENTS = [
    report(1, loss=0.5, acc=1),
    {"k": "report", "t": 1, "body": {"type": "model", "path": "/x.h5", "meta": {}}},
    line("Epoch 1/2\n2/2 - 0s - loss: 0.5"),
    line("my loss 1", rank=1),
    line("prepared", rank=None),
    {"k": "phase", "t": 1, "phase": "running", "node": 0},
    {"k": "reached", "t": 1, "node": 1, "findings": [{"why": "no answer", "name": "", "address": ""}]},
    {"k": "ready", "t": 1, "node": 1},
    {"k": "failed", "t": 1, **FAILURE.as_record()},
    {"k": "stop", "t": 1, "why": "why"},
    {"k": "done", "t": 1},
    {"k": "dropped", "t": 1, "lines": 3},
    {"k": "beat", "t": 1, "n": 3},
]


# Files.


@st.composite
def contents(draw: st.DrawFn, record: st.SearchStrategy[Any]) -> bytes:
    """A closed file of a record, or one that was cut, overwritten, or never was one."""
    data = protocol.encode([draw(record)])
    how = draw(st.sampled_from(["whole"] * 5 + ["cut", "nulls", "garbage", "another"]))
    where = draw(st.integers(0, len(data)))
    if how == "cut":
        return data[:where]
    if how == "nulls":
        return data[:where] + bytes(len(data) - where)
    return draw(st.binary(max_size=60)) if how == "garbage" else protocol.encode([draw(anything)]) if how == "another" else data


def files(attempts: int = 2, nodes: int = 2) -> st.SearchStrategy[list[tuple[str, bytes]]]:
    """What others may write into a job folder, in any order: (path, content)."""
    one: list[st.SearchStrategy[tuple[str, bytes]]] = []
    folder = "workspaces/default/experiments/Default/jobs/toy/0123456789"
    for attempt in range(1, attempts + 1):
        paths = JobPaths(folder, attempt)
        for node in range(nodes):
            one.append(st.tuples(st.just(paths.announce(node)), contents(mutated(ANNOUNCES))))
            one.append(st.tuples(st.just(paths.exit(node)), contents(mutated(EXITS))))
        one.append(st.tuples(st.just(paths.verdict_file), contents(mutated(VERDICTS))))
        one.append(st.tuples(st.just(paths.submitted), contents(st.just({"nodes": [0]}))))
    asked = [JobPaths(folder).request(str(number)) for number in range(3)]
    one += [st.tuples(st.just(path), contents(mutated(REQUESTS))) for path in asked]
    return st.lists(st.one_of(one), max_size=14, unique_by=lambda pair: pair[0])


LAWFUL = {protocol.QUEUED, protocol.RUNNING, protocol.TERMINATING, protocol.SUCCEEDED, protocol.FAILED}
RANK = {protocol.QUEUED: 0, protocol.RUNNING: 1, protocol.TERMINATING: 2, protocol.SUCCEEDED: 3, protocol.FAILED: 3}


@few
@given(files(), st.randoms())
def test_any_files_in_any_order_give_a_lawful_state(written, chance):
    """Each prefix is a moment at which somebody may look."""
    with tempfile.TemporaryDirectory() as folder:
        made = JobFolder(Path(folder, "a"), nodes=2)
        watching = made.job  # one who keeps what he has seen
        before = None
        for path, data in written:
            made.share.write(path, data)
            state, fresh = watching.state(), made.job.at(1).state()
            assert state == fresh
            assert state.execution_state in LAWFUL and state.run_status in (
                "SCHEDULED",
                "RUNNING",
                "FINISHED",
                "FAILED",
                "KILLED",
            )
            assert state.next_attempt is None or state.next_attempt >= 1
            assert isinstance(state.error_code, str) and isinstance(state.reason, str)
            assert all(value is None or isinstance(value, int) for value in (state.exit_code, state.start_time, state.end_time))
            if before is not None and (before.ended or before.next_attempt):
                assert (state.execution_state, state.next_attempt) == (before.execution_state, before.next_attempt)
            assert made.job.newest() >= 1
            assert all(record["kind"] in ("cancel", "requeue") for record in made.job.requests())
            before = state
        again = JobFolder(Path(folder, "b"), nodes=2)
        chance.shuffle(written)
        for path, data in written:
            again.share.write(path, data)
        for attempt in (1, 2):
            assert again.job.at(attempt).state() == made.job.at(attempt).state()


@few
@given(files(attempts=1))
def test_a_job_never_goes_back(written):
    """Files only come; where all of them are lawful a job's state only goes forward, and a verdict wins."""
    lawful = []
    for path, data in written:
        try:
            record = protocol.decode_one(data)
        except TornFileError:
            continue
        shape = {"announce.json": records.ANNOUNCE, "exit.json": records.EXIT}.get(path.rpartition("/")[2], {})
        if records.has(record, shape) and record.get("kind") != "requeue":
            lawful.append((path, data))
    with tempfile.TemporaryDirectory() as folder:
        made = JobFolder(Path(folder, "a"), nodes=2)
        ranks = [0]
        for path, data in lawful:
            made.share.write(path, data)
            state = made.job.at(1).state()
            if state.next_attempt is not None:
                return  # it is that one's state that counts now
            # An exit without a failure says that a job runs which somebody wants ended: the only step back.
            back = ranks[-1] == 2 and RANK[state.execution_state] == 1 and path.endswith("exit.json")
            assert RANK[state.execution_state] >= ranks[-1] or back
            ranks.append(RANK[state.execution_state])


@few
@given(st.one_of(anything, mutated([BARE.record() | {"volumes": [{"scope": "cluster", "path": "share", "kind": "link"}]}])))
def test_any_plan_is_one_or_none(plan):
    with tempfile.TemporaryDirectory() as folder:
        made = JobFolder(Path(folder, "a"))
        made.share.write(made.paths.plan, protocol.encode([plan]))
        try:
            assert made.job.node_count >= 1
        except (JobNotFoundError, JobUnreadableError) as error:
            assert "\n" not in str(error)


@many
@given(mutated([record["failure"] for record in EXITS if record["failure"]]))
def test_any_failure_can_be_told_of(record):
    failure = Failure.from_record(record)
    told = outcome.verdict(outcome.first_cause([failure, FAILURE]), None)
    assert records.is_verdict(json.loads(json.dumps(told)))
    assert Failure.from_record(json.loads(json.dumps(failure.as_record()))).as_record() == failure.as_record()


# Bytes.


@many
@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_any_bytes_are_records_or_torn(data, deflated, closed):
    if closed:
        data += b'{"end":%d,"crc32":"%08x"}\n' % (data.count(b"\n"), zlib.crc32(data))
    if deflated:
        data = zlib.compress(data)
    for decode in (protocol.decode, protocol.decode_one):
        try:
            found = decode(data)
        except TornFileError:
            continue
        assert all(isinstance(record, dict) for record in (found if isinstance(found, list) else [found]))


# Points.


names = st.text(max_size=15) | st.sampled_from(["loss", "a b%", "a b?", "/", "..", "x" * 300, "\0", "\ud800", "rank_1/loss"])
bodies = st.fixed_dictionaries(
    {"type": st.just("metric")},
    optional={
        "values": anything | st.dictionaries(names, scalars, max_size=4),
        "step": anything,
        "rank": anything,
        "ts": anything,
    },
)
numbers = st.sampled_from(["1", "0.5", "nan", "-inf", "1e400", "x", "9" * 400])
printed = st.one_of(
    numbers.map(lambda text: f"loss {text}"),
    st.tuples(st.integers(0, 10**30), numbers).map(lambda pair: "step {}: f1 {}".format(*pair)),
    st.integers(0, 10**25).map(lambda epoch: f"Epoch {epoch}/9"),
    st.tuples(numbers, numbers).map(lambda pair: "5/5 - 1s - loss: {} - auc: {}".format(*pair)),
    st.text(max_size=20),
).map(lambda text: line(text.replace("\n", " ")))
said = st.lists(
    st.one_of(mutated(EVENTS), bodies.map(lambda body: {"k": "report", "t": 1, "body": body}), printed), max_size=12
)
RULES = [
    MetricRule("loss", r"loss (\S+)"),
    MetricRule("f 1", r"step (?P<step>\d+): f1 (?P<value>\S+)"),
]


def as_sent(events: list[Any]) -> list[Any]:
    """What arrives of records."""
    return records.sort_out(protocol.decode(protocol.encode(events)))[0]


@many
@given(said, st.lists(st.integers(0, 12), max_size=3))
def test_any_records_give_points_that_mlflow_takes_each_once_wherever_a_relay_goes_on(events, cuts):
    from mlflow.utils.validation import _validate_metric

    events = as_sent(events)
    whole = MetricFold(RULES)
    expected = [*whole.feed(events), *whole.finish()]
    for point in expected:
        _validate_metric(point.key, point.value, point.timestamp, point.step)
        assert abs(point.step) < 2**63 and 0 <= point.timestamp < 2**63
        assert point.key.encode()  # no half letters
    assert len({(point.key, point.step) for point in expected}) == len(expected)
    parts, found = MetricFold(RULES), []
    for number, event in enumerate(events):
        if number in cuts:
            memory = json.loads(json.dumps({"metrics": parts.remember()}))
            parts = MetricFold(RULES, memory["metrics"])
        found += parts.feed([event])
    found += parts.finish()
    assert repr(found) == repr(expected)
    assert (parts.repeated, parts.unread, parts.names.notices()) == (whole.repeated, whole.unread, whole.names.notices())
    assert all(notice.isprintable() for notice in whole.names.notices())


def test_a_real_store_takes_them(relayed):
    """What the pure properties say of MLflow's rules, asked of MLflow."""
    made, client, relay = relayed
    made.plan.update(model=None, metrics=[plain(rule) for rule in RULES])
    made.write(made.paths.plan, made.plan)
    sent: list[Any] = []

    @settings(many, max_examples=60)
    @given(said)
    def collect(events: list[Any]) -> None:
        sent.append(events)

    collect()
    for number, events in enumerate(sent):
        made.segment(number, *events)
    fold = MetricFold(RULES)
    reader = EventReader(made.job)
    expected = [*(point for _, _, found in reader.read() for point in fold.feed(found)), *fold.finish()]
    made.verdict()
    relay().finish(made.job.state())
    stored = history(client, made.plan["runId"])
    assert sorted((key, step) for key, points in stored.items() for step, _, _ in points) == sorted(
        (point.key, point.step) for point in expected
    )
    assert len(expected) > 15
    assert "was refused" not in client.get_run(made.plan["runId"]).data.tags["batchai.notes"]


def test_what_is_changed_was_lawful(folder):
    for verdict in VERDICTS:
        assert records.is_verdict(verdict)
    assert all(map(records.is_event, EVENTS))
    assert all(records.has(record, records.EXIT) for record in EXITS)
    assert fold(folder().job.snapshot()).execution_state == protocol.QUEUED
