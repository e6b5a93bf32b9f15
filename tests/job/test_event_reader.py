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


def test_another_process_goes_on_from_the_cursor_and_what_the_consumer_failed_on_comes_again(folder):
    made = folder()
    made.segment(0, {"k": "beat", "n": 0})
    whole = made.share.read(made.paths.segment("agent-0", 0))
    for cut in (0, 5, len(whole) - 1):  # it is not closed yet
        made.share.write(made.paths.segment("agent-0", 0), whole[:cut])
        assert read(EventReader(made.job)) == []
    made.share.write(made.paths.segment("agent-0", 0), whole)
    made.segment(1, {"k": "beat", "n": 1})
    reader = EventReader(made.job)
    for _, sequence, _ in reader.read():
        if sequence == 1:
            break
    assert read(EventReader(made.job, reader.cursor)) == [("agent-0", 1, [1])]
    assert reader.cursor == {"agent-0": 1}, "it is not shared"
    assert read(reader) == [("agent-0", 1, [1])]


def test_one_call_reads_all_whatever_the_folder(folder):
    made = folder()
    for number in range(995, 1005):
        made.segment(number, {"k": "beat", "n": number})
    assert len(read(EventReader(made.job, {"agent-0": 995}))) == 10


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
