"""Segments of a job's log, read each once and in order."""

from __future__ import annotations

import pytest

from mlflow_batchai.errors import ShareError
from mlflow_batchai.job.events import EventReader


def read(reader):
    return [(writer, sequence, [record["n"] for record in records]) for writer, sequence, records in reader.read()]


def test_each_once_in_order_and_never_past_a_gap(folder):
    made = folder(nodes=2)
    reader = EventReader(made.job)
    assert read(reader) == []
    made.segment(1, {"k": "beat", "n": 1})
    assert read(reader) == []
    made.segment(0, {"k": "beat", "n": 0}, {"k": "beat", "n": 0.5})
    made.segment(0, {"k": "beat", "n": 10}, writer="agent-1")
    assert read(reader) == [("agent-0", 0, [0, 0.5]), ("agent-1", 0, [10]), ("agent-0", 1, [1])]
    assert read(reader) == []
    assert reader.cursor == {"agent-0": 2, "agent-1": 1}


def test_an_open_segment_is_not_there_yet(folder):
    made = folder()
    made.segment(0, {"k": "beat", "n": 0})
    whole = made.share.read(made.paths.segment("agent-0", 0))
    for cut in (0, 5, len(whole) - 1):
        made.share.write(made.paths.segment("agent-0", 0), whole[:cut])
        assert read(EventReader(made.job)) == []


def test_another_process_goes_on_from_the_cursor(folder):
    made = folder()
    made.segment(0, {"k": "beat", "n": 0})
    reader = EventReader(made.job)
    read(reader)
    made.segment(1, {"k": "beat", "n": 1})
    assert read(EventReader(made.job, reader.cursor)) == [("agent-0", 1, [1])]
    assert reader.cursor == {"agent-0": 1}  # not shared


def test_a_segment_that_the_consumer_fails_on_comes_again(folder):
    made = folder()
    for number in range(3):
        made.segment(number, {"k": "beat", "n": number})
    reader = EventReader(made.job)
    seen = []
    for _, sequence, _ in reader.read():
        seen.append(sequence)
        if sequence == 1:
            break
    assert read(reader) == [("agent-0", 1, [1]), ("agent-0", 2, [2])]


def test_one_call_reads_all_whatever_the_folder(folder):
    made = folder()
    for number in range(995, 1005):
        made.segment(number, {"k": "beat", "n": number})
    assert len(read(EventReader(made.job, {"agent-0": 995}))) == 10
    assert read(EventReader(made.job, {"agent-0": 1005})) == []


class Counting:
    """A share that counts what is asked of it."""

    def __init__(self, share):
        self._share = share
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return getattr(self._share, name)(*arguments)

        return call


def test_an_idle_poll_costs_one_look(folder):
    made = folder(nodes=2)
    for number in range(30):
        made.segment(number, {"k": "beat", "n": number})
    job = made.job
    job.share = Counting(made.share)
    reader = EventReader(job)
    assert len(read(reader)) == 30
    job.share.calls.clear()
    assert read(reader) == []
    assert job.share.calls == ["read_many"]


def test_the_end_shows_in_what_agents_say(folder):
    made = folder(nodes=2)
    made.segment(0, {"k": "beat"}, {"k": "done"})
    reader = EventReader(made.job)
    assert [sequence for _, sequence, _ in reader.read()] == [0]
    assert not reader.ending
    made.segment(0, {"k": "beat"}, {"k": "failed"}, writer="agent-1")
    made.segment(1, {"k": "beat"})
    for _ in reader.read():
        pass
    assert reader.ending
    assert not EventReader(made.job, reader.cursor).ending
    assert EventReader(made.job, reader.cursor, reader.ending).ending


def test_a_broken_share_is_an_error(folder, tmp_path):
    made = folder()
    reader = EventReader(made.job)
    made.share.write(made.paths.events, b"a file where a folder should be")
    assert read(reader) == [], "the job's own affair"
    made.share.root.rename(tmp_path / "away")
    made.share.root.write_bytes(b"a file where the share should be")
    with pytest.raises(ShareError):
        read(reader)
