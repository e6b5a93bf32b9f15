"""The index of an attempt: one listing says what is new, and is asked for no more often than is worth a request."""

from __future__ import annotations

import pytest

from mlflow_batchai.agent import protocol
from mlflow_batchai.errors import ShareError
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import FAST_SECONDS, IDLE_SECONDS, Index


class Counting:
    """A share that counts what is asked of it, and fails when told to."""

    def __init__(self, share):
        self._share = share
        self.calls = []
        self.broken = False

    def __getattr__(self, name):
        def call(*arguments):
            if self.broken:
                raise ShareError("it is away")
            self.calls.append(name)
            return getattr(self._share, name)(*arguments)

        return call


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def made(folder, request):
    return folder(nodes=2, board=getattr(request, "param", True))


@pytest.fixture
def job(made):
    """The job, over a share that counts, with a clock that stands still until it is moved."""
    found = made.job
    found.share = Counting(made.share)
    if found.index:
        found.index = Index(found.share, found.paths, Clock())
    return found


def later(job, seconds=60.0):
    if job.index:
        job.index._clock.now += seconds


def read(reader, *arguments):
    return [(writer, sequence, [record["n"] for record in records]) for writer, sequence, records in reader.read(*arguments)]


def test_looks_are_as_rare_as_news(made, job):
    looks = []
    for _ in range(400):
        before = len(job.share.calls)
        job.index.look()
        if len(job.share.calls) > before:
            looks.append(job.index._clock.now)
        later(job, 0.25)
    gaps = [second - first for first, second in zip(looks, looks[1:], strict=False)]
    assert gaps[0] <= 2 * FAST_SECONDS and gaps == sorted(gaps) and gaps[-1] == pytest.approx(IDLE_SECONDS, abs=0.25)
    made.add_marker("beats-agent-1", 5)
    later(job, IDLE_SECONDS)
    assert job.index.look()["beats-agent-1"] == 5
    later(job, IDLE_SECONDS - 0.01)
    assert job.index.look() and len(job.share.calls) == len(looks) + 1, "a heartbeat is no reason to hurry"
    made.add_marker("segments-agent-0", 1)
    later(job, 0.02)
    assert job.index.look()["segments-agent-0"] == 1
    later(job, FAST_SECONDS)
    job.share.broken = True
    with pytest.raises(ShareError):
        job.index.look()
    job.share.broken = False
    job.index.look()
    assert len(job.share.calls) == len(looks) + 3, "one that failed is made up for at once"


@pytest.mark.parametrize(
    ("made", "asked"), [(True, ["list"]), (False, ["read_many", "read_many", "list"])], indirect=["made"], ids=["index", "none"]
)
def test_an_idle_round_asks_for_no_more_than_it_must(made, job, asked):
    """Next segments; the verdict and requests: on a share that may be slow, whatever the number of nodes."""
    for node in range(2):
        made.announce(node)
        made.add_marker(f"announce-{node}")
    for number in range(2):
        made.segment(number, {"k": "beat", "n": number})
    made.share.write(made.paths.segment("agent-0", 2), protocol.encode([{"k": "beat", "n": 2}], compress=True))
    made.add_marker("segments-agent-0", 3)
    reader = EventReader(job)
    assert read(reader) == [("agent-0", 0, [0]), ("agent-0", 1, [1]), ("agent-0", 2, [2])]
    assert job.state(reader.ending).execution_state == "running"
    job.share.calls.clear()
    for _ in range(5):
        later(job)
        assert read(reader) == []
        assert job.state(reader.ending).execution_state == "running"
    assert job.share.calls == asked * 5


def test_what_has_no_notice_is_not_there_yet_but_at_the_end(made, job):
    made.segment(0, {"k": "beat", "n": 0})
    made.segment(0, {"k": "beat", "n": 5}, writer="agent-1")
    made.add_marker("segments-agent-0", 1)
    reader = EventReader(job)
    assert read(reader) == [("agent-0", 0, [0])]
    made.segment(1, {"k": "beat", "n": 1})
    later(job)
    assert read(reader) == []
    assert read(reader, True) == [("agent-0", 1, [1]), ("agent-1", 0, [5])]


def test_a_cancel_request_and_a_verdict_are_put_up(made, job):
    job.request_cancel("me", "enough")
    other = made.job
    assert [request["who"] for request in other.snapshot().requests] == ["me"]
    verdict = made.verdict()
    assert not job.claim_verdict({**verdict, "by": "someone else"})
    # The agent died between its verdict and the notice of it: who finds the verdict there puts it up.
    assert other.index.look(now=True).keys() >= {"verdict"}
    assert other.state().ended


def test_the_exit_of_a_node_that_is_gone_is_looked_for_without_its_notice(made, job):
    made.exit(1, failure={"code": "JobFailed"})
    assert job.snapshot().exits == {}
    assert set(job.snapshot((1,)).exits) == {1}
