"""Following a file while others write it: nothing lost, nothing twice, whatever the file goes through."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from mlflow_batchai.errors import ShareError
from mlflow_batchai.job import streams
from mlflow_batchai.job.streams import Tail, follow, so_far
from mlflow_batchai.storage import credentials, open_share
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.directory import DirectoryShare

PAUSE = 0.01


@pytest.fixture
def share(tmp_path):
    return DirectoryShare(tmp_path / "share")


class Reader:
    """Follows one file in a thread, as a command does; ``text`` is what it has given so far."""

    def __init__(self, share, path="logs/stdout.txt", trying=contextlib.nullcontext):
        self.ended = threading.Event()
        self.text = ""
        self.restarts = []
        self.tail = Tail(share, path)
        pieces = follow(self.tail, self.ended.is_set, lambda: self.restarts.append(len(self.text)), PAUSE, trying)
        self._thread = threading.Thread(target=self._read, args=(pieces,), daemon=True)
        self._thread.start()

    def _read(self, pieces):
        for piece in pieces:
            self.text += piece

    def sees(self, text, seconds=60):
        until = time.monotonic() + seconds
        while self.text != text:
            assert time.monotonic() < until, (self.text, text)
            time.sleep(0.002)

    def end(self):
        self.ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.text


def append(share, data):
    file = share.local("logs/stdout.txt")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        out.write(data)


def test_a_file_that_comes_later_or_never_and_grows(share):
    assert Reader(share, "logs/none.txt").end() == ""
    reader = Reader(share)
    time.sleep(5 * PAUSE)
    assert not reader.tail.found
    append(share, b"one\n")
    reader.sees("one\n")
    append(share, b"no line's end")
    reader.sees("one\nno line's end")
    append(share, b"\nlast\n")
    assert reader.end() == "one\nno line's end\nlast\n"
    assert reader.restarts == []


def test_nothing_is_lost_between_the_last_look_and_the_end(share):
    """The end is made known by whoever looks: what is written in that very moment is read all the same."""
    append(share, b"first\n")
    asked = []

    def ended():
        asked.append(1)
        if len(asked) < 3:
            return False
        append(share, b"written just before the end\n")
        return True

    assert "".join(follow(Tail(share, "logs/stdout.txt"), ended, pytest.fail, PAUSE)) == "first\nwritten just before the end\n"


def test_characters_that_are_split_between_two_looks(share):
    text = "Größe 你好 🎓\n"
    left = list(text.encode())
    append(share, b"")

    def ended():
        append(share, bytes([left.pop(0)]))
        return not left

    # Every look finds one more byte; nothing of a character is given before all of it is there.
    assert list(follow(Tail(share, "logs/stdout.txt"), ended, pytest.fail, 0)) == list(text)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"a\xffb\n", "a\ufffdb\n"),
        (b"cut \xe4\xbd", "cut \ufffd"),
        (b"nul \x00 inside", "nul \x00 inside"),
        (b"end\x00", "end\x00"),
    ],
    ids=["no UTF-8", "half a character", "NUL inside", "NUL at the end"],
)
def test_what_is_no_text(share, written, shown):
    reader = Reader(share)
    append(share, written)
    assert reader.end() == shown


def test_a_range_that_is_not_written_yet_is_waited_for(share):
    """A log grows by REST: it is made longer first, and full of NULs until its data comes."""
    append(share, b"one\n")
    reader = Reader(share)
    reader.sees("one\n")
    append(share, bytes(8))
    time.sleep(5 * PAUSE)
    assert reader.text == "one\n"
    with share.local("logs/stdout.txt").open("r+b") as file:
        file.seek(4)
        file.write(b"two 345\n")
    assert reader.end() == "one\ntwo 345\n"


@pytest.mark.parametrize("again", [b"new\n", b"a new one, and longer than what was there\n"])
def test_a_file_that_is_replaced_begins_anew(share, again):
    append(share, b"first of all\nold\xe4")
    reader = Reader(share)
    reader.sees("first of all\nold")
    share.write("logs/stdout.txt", again)
    # What was half a character is no longer waited for.
    reader.sees("first of all\nold\ufffd" + again.decode())
    append(share, b"more\n")
    assert reader.end() == "first of all\nold\ufffd" + again.decode() + "more\n"
    assert reader.restarts == [len("first of all\nold\ufffd")]


def test_a_file_that_is_removed_is_waited_for(share):
    append(share, b"old\n")
    reader = Reader(share)
    reader.sees("old\n")
    share.delete("logs/stdout.txt")
    time.sleep(5 * PAUSE)
    append(share, b"new\n")
    assert reader.end() == "old\nnew\n"
    assert len(reader.restarts) == 1


def test_more_than_one_look_asks_for(share, monkeypatch):
    monkeypatch.setattr(streams, "PIECE", 1000)
    text = "".join(f"line {number} ü\n" for number in range(1000))
    append(share, text.encode())
    assert Reader(share).end() == text
    assert "".join(so_far(Tail(share, "logs/stdout.txt"), ended=True)) == text


def test_so_far_leaves_out_what_is_not_written_yet(share):
    append(share, b"one\n" + bytes(5))
    assert "".join(so_far(Tail(share, "logs/stdout.txt"), ended=False)) == "one\n"
    assert "".join(so_far(Tail(share, "logs/none.txt"), ended=False)) == ""
    text = so_far(Tail(share, "logs/stdout.txt"), ended=False)
    assert next(text) == "one\n"
    share.write("logs/stdout.txt", b"new\n")  # meanwhile
    assert "".join(text) == "new\n"


def test_a_share_that_is_away_is_waited_for(share):
    append(share, b"one\n")
    away, failed = threading.Event(), []
    read = share.read

    def sometimes(*arguments):
        if away.is_set():
            raise ShareError("away")
        return read(*arguments)

    share.read = sometimes

    @contextlib.contextmanager
    def trying():
        try:
            yield
        except ShareError as error:
            failed.append(error)

    reader = Reader(share, trying=trying)
    reader.sees("one\n")
    away.set()
    append(share, b"two\n")
    reader.ended.set()
    while not failed:
        time.sleep(0.002)
    away.clear()
    # That the job has ended meanwhile doesn't end the reading before the share has answered.
    assert reader.end() == "one\ntwo\n"


def test_a_look_costs_one_request(azure):
    """On an Azure share, whether there is something new or not."""
    azure.share("looks")
    credentials.remember(azure.account, Credential(azure.key))
    share = open_share(azure.url("looks"))
    share.write("stdout.txt", b"one\n" * 50)
    tail = Tail(share, "stdout.txt")
    azure.reset()
    assert [tail.read() for _ in range(3)] == [b"one\n" * 50, b"", b""]
    assert [(one.method, one.path.rpartition("/")[2]) for one in azure.requests()] == [("GET", "stdout.txt")] * 3
