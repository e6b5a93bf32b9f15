"""Text files of a job: follow them while they grow, and rewrite log files from events."""

from __future__ import annotations

import codecs
import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.transport import logfiles
from mlflow_batchai.errors import ShareNotFoundError
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.storage import Share

# What one look asks for at most.
PIECE = 4 << 20
# Bytes before the place where we are that every look asks for again: they tell whether it is still the same file. A range that
# begins inside of a file also saves the second request that one behind its end would cost (``storage/azure_files.py``).
KNOWN = 64


class RestartedError(Exception):
    """The file was cut or replaced: what was read of it before is gone."""


class Tail:
    """A file of which every look gives what is new."""

    def __init__(self, share: Share, path: str) -> None:
        self.found = False
        self._share = share
        self._path = path
        self.position = 0
        self._known = b""

    def read(self, last: bool = False) -> bytes:
        """Up to ``PIECE`` new bytes; none while it isn't there.

        NULs at its end are not given before something comes behind them: a file that grows by REST is made longer before it is
        written.

        Args:
            last: nothing more will be written, so they are given.

        Raises:
            RestartedError: the next call begins at its start.
            ShareError: the share can't be read now; the call may be repeated.
        """
        try:
            data = self._share.read(self._path, self.position - len(self._known), len(self._known) + PIECE)
        except ShareNotFoundError:
            return b""
        self.found = True
        if not data.startswith(self._known):
            self.position, self._known = 0, b""
            raise RestartedError
        data = data[len(self._known) :]
        if not last and len(data) < PIECE:
            data = data.rstrip(b"\0")
        self.position += len(data)
        self._known = (self._known + data)[-KNOWN:]
        return data


def follow(
    tail: Tail,
    ended: Callable[[], bool],
    restarted: Callable[[], None],
    pause: float,
    trying: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[str]:
    """The file's text as it grows, until its writers have ended; bytes that are no UTF-8 become U+FFFD.

    Args:
        ended: whether nothing more will be written; asked before each look, so that what was written before is seen.
        restarted: told when the file was cut or replaced and its text begins anew.
        pause: seconds between looks that found nothing.
        trying: around each look; what it swallows is tried again.
    """
    decoder = _decoder()
    while True:
        last, anew, data = False, False, b""
        with trying():
            over = ended()
            try:
                data = tail.read(last=over)
                last = over and len(data) < PIECE
            except RestartedError:
                anew = True
        text = decoder.decode(data, final=last or anew)
        if text:
            yield text
        if last:
            return
        if anew:
            restarted()
        elif len(data) < PIECE:
            time.sleep(pause)


def so_far(tail: Tail, ended: bool) -> Iterator[str]:
    """The file's text up to now; of one that is cut or replaced meanwhile also what it has then.

    Args:
        ended: whether nothing more will be written.
    """
    decoder = _decoder()
    while True:
        try:
            data = tail.read(last=ended)
        except RestartedError:
            continue
        if not data:
            break
        yield decoder.decode(data)
    if rest := decoder.decode(b"", final=True):
        yield rest


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def write_anew(job: Job, names: Collection[str], folder: Path) -> dict[str, int]:
    """Write an attempt's log files into a folder of this machine, from its events: their text is in these as well.

    Returned is the number of lines of each that has any. Of a progress line that was overwritten they have the last state, as
    the joined files do.
    """
    lines: dict[str, int] = {}
    for writer, _, found in EventReader(job).read(to_the_end=True):
        texts: dict[str, list[str]] = {}
        node = int(writer.rpartition("-")[2])
        for name, text in (piece for record in found for piece in _pieces(job.plan, node, record)):
            if name in names:
                texts.setdefault(name, []).append(text)
        for name, pieces in texts.items():
            text = "".join(pieces)
            # Of a job of many ranks not all can be open.
            with (folder / name).open("ab") as file:
                file.write(logfiles.encoded(text))
            lines[name] = lines.get(name, 0) + text.count("\n")
    return lines


def _pieces(plan: Plan, node: int, record: Record) -> Iterator[tuple[str, str]]:
    """(file, text) of all that a record adds to log files."""
    if record["k"] == logfiles.NOTE:
        yield logfiles.own_file(plan, node, logfiles.EXECUTION, None), record["x"]
    elif record["k"] == "log":
        yield logfiles.own_file(plan, node, record["s"], record["r"]), record["x"]
        if (text := logfiles.joined(plan, record)) is not None:
            yield logfiles.joined_file(record["s"]), text
