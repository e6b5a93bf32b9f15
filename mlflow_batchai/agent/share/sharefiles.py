"""Follow, or wait for, files of the share: a peer's segments, the verdict of a job."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Callable

from mlflow_batchai.agent import records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.share.base import Attempt, ControlError, NotMountedError

if TYPE_CHECKING:
    from concurrent import futures

# A server that is away comes back; for so long nobody else on the share knows that we are still there.
AWAY_SECONDS = 900.0

_FULL = "make room there, or raise its quota, and start the job again"
_AGAIN = "mount it again there, and start the job again"
_WORDS = {
    errno.ENOSPC: ("the share is full", _FULL),
    errno.EDQUOT: ("the share's quota is used up", _FULL),
    errno.EROFS: ("the share is read-only", "make it writable, and start the job again"),
    errno.EACCES: ("the share refuses this node's user", "give it the right to write there, and start the job again"),
    errno.EPERM: ("the share refuses this node's user", "give it the right to write there, and start the job again"),
    # Of a share that is there: one that isn't mounted is waited for (``MountedShare.gone``).
    errno.ENOENT: ("the job's folder is gone from the share", "was it deleted?"),
    errno.ENOTDIR: ("the job's folder is gone from the share", "was it deleted?"),
    errno.ESTALE: ("the share's mount is no longer valid", _AGAIN),
    errno.ENOTCONN: ("the share's mount has lost its file system", _AGAIN),
    # The call during which it did.
    errno.ECONNABORTED: ("the share's mount has lost its file system", _AGAIN),
}
# Of a share by REST: its sentence says all, and who isn't let in is waited for longer (``peers.REFUSED_SECONDS``).
_DEFINITE_BY_REST = (errno.ENOSPC, errno.ENOENT)

PATIENCE_SECONDS = 60.0
# Writers that say more than can be read must not keep an agent from saying something itself: others would think it gone.
ROUNDS_SECONDS = 5.0
# A writer that has said nothing for so long may have gone on behind a segment that is missing.
QUIET_SECONDS = 8.0


def sentence(error: OSError) -> str | None:
    """Describe an error of the share that doesn't pass by itself, with the remedy; None: it may pass."""
    if isinstance(error, ControlError):
        return str(error) if error.errno in _DEFINITE_BY_REST else None
    if error.errno not in _WORDS:
        return None
    what, remedy = _WORDS[error.errno]
    return f"{what} ({os.strerror(error.errno)}); {remedy}"


class ShareErrors:
    """For how long the share has failed, and how.

    Args:
        patience: seconds for which an error that doesn't pass by itself is borne: somebody may be making room.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._good = clock()
        self._definite: float | None = None
        self._seen = self._good
        self._sentence = ""
        self._error: OSError | None = None

    def saw(self, error: OSError | None) -> None:
        now = self._seen = self._clock()
        found = sentence(error) if error else None
        self._error = error
        if error is None:
            self._good = now
        if found is None:
            self._definite = None
        elif self._definite is None:
            self._definite = now
        self._sentence = found or ""

    def told(self) -> str | None:
        """Why the job has to end, or None. A round that hangs is one that has not succeeded, and has not failed for good."""
        now, since = self._clock(), self._definite
        if since is not None and self._seen - since > self._patience:
            return self._sentence
        if now - self._good > AWAY_SECONDS:
            why = (self._error.strerror or str(self._error)) if self._error else "it doesn't answer"
            return f"the share could not be used for {now - self._good:.0f} s ({why})"
        return None


class SegmentReader:
    """Reads one writer's segments in order, each once.

    One that is damaged or missing for a while, though its writer went on, is skipped: a record of kind ``records.SKIPPED``
    stands for it.

    Attributes:
        heartbeats: the last heartbeat that was seen apart from segments.
        silent: for how many seconds we have looked and seen nothing new. Time in which the share let us see nothing at all
            says nothing of the writer, so a look adds ``Attempt.longest_silence`` at most.
        final: how many segments there are in all, once the writer has said so.
    """

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.sequence = 0
        self.heartbeats = 0
        self.silent = 0.0
        self.final = 0
        self._looked = time.monotonic()
        self._heard = time.monotonic()
        # Since when the next segment is damaged or missing, though it will not be written any more.
        self._stuck: float | None = None

    def read(self, attempt: Attempt, most: int | None = None, heeds: bool = True) -> list[Record]:
        """Records of the segments that have been closed since the last call, those that readers can take.

        Args:
            most: of so many segments at most.
            heeds: whether silence means something: a share that takes nothing from us takes nothing from others either.

        Raises:
            OSError: the share can't be read (what was read before that is returned first).
        """
        found: list[Record] = []
        before = self.sequence
        while most is None or self.sequence - before < most:
            try:
                events = self._next(attempt)
            except OSError:
                if self.sequence == before:
                    raise
                break
            if events is None:
                break
            found.extend(events)
            self.sequence += 1
            self._heard = time.monotonic()
        looked, heartbeats = attempt.looked, attempt.heartbeats(self.writer)
        if self.sequence > before or heartbeats > self.heartbeats:
            self.silent = 0.0
        elif heeds:
            self.silent += min(max(0.0, looked - self._looked), attempt.longest_silence)
        self._looked, self.heartbeats = looked, heartbeats
        return found

    def _next(self, attempt: Attempt) -> list[Record] | None:
        """The next segment's records; None while it may still be closed."""
        closed = attempt.segment(self.writer, self.sequence)
        if closed is None:
            return self._skip(attempt)
        self._stuck = None
        events, others = records.sort_out(closed)
        return [*events, records.skipped(others)] if others else events

    def _skip(self, attempt: Attempt) -> list[Record] | None:
        """Placeholder for a segment that will never be closed; None while it may be."""
        now = time.monotonic()
        if self.sequence >= self.final:
            # Who is well says something more often than that; to look ahead costs a few requests to the file system.
            if self._stuck is None and now - self._heard < QUIET_SECONDS:
                return None
            self._heard = now
            if not attempt.went_on(self.writer, self.sequence):
                self._stuck = None
                return None
        if self._stuck is None:
            self._stuck = now
        # Several may be missing in a row: those behind this one are not waited for anew.
        return [records.skipped(0, 1)] if now - self._stuck >= records.SETTLE_SECONDS else None


class SegmentReaders:
    def __init__(self, followers: Mapping[int, SegmentReader], attempt: Attempt, at_once: int) -> None:
        self._followers = followers
        self._attempt = attempt
        self._at_once = min(at_once, len(followers))
        self._pool: futures.ThreadPoolExecutor | None = None

    def read(self, take: Callable[[int, list[Record]], None], heeds: bool = True) -> None:
        """Take what has come since the last call, as far as that can be done in a while: a segment of each writer at a time, so
        that none waits for the many of another.

        Raises:
            OSError: the share can't be read (what was read before that is taken).
        """
        errors: list[OSError] = []

        def read(node: int) -> list[Record]:
            if errors:
                return []  # it would only take time
            try:
                return self._followers[node].read(self._attempt, 1, heeds)
            except OSError as error:
                errors.append(error)
                return []

        until = time.monotonic() + ROUNDS_SECONDS
        waiting = list(self._followers)
        while waiting:
            before = {node: self._followers[node].sequence for node in waiting}
            for node, found in zip(waiting, self._workers().map(read, waiting) if self._at_once > 1 else map(read, waiting)):
                take(node, found)
            waiting = [node for node in waiting if self._followers[node].sequence > before[node]]
            if time.monotonic() > until:
                break
        if errors:
            raise errors[0]

    def _workers(self) -> futures.ThreadPoolExecutor:
        if self._pool is None:
            # Only here: most agents start no thread for it.
            from concurrent import futures

            self._pool = futures.ThreadPoolExecutor(self._at_once, "peers", self._attempt.hasty)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def patiently(step: Callable[[], None], seconds: float, away: float = AWAY_SECONDS) -> None:
    """Do something on a share that may be failing just now: the last word of a job is worth waiting for.

    Raises:
        OSError: it still failed after so many seconds (``away`` where the share isn't mounted), or at once for a file that is
            there already.
    """
    began = time.monotonic()
    while True:
        try:
            return step()
        except FileExistsError:
            raise
        except OSError as error:
            if time.monotonic() - began > (away if isinstance(error, NotMountedError) else seconds):
                raise
        time.sleep(0.2)


def comes(ask: Callable[[], Record | None], seconds: float) -> bool:
    """Whether a closed file is there within so many seconds; a share that can't be read just now shows none."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if ask() is not None:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
