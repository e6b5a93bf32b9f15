"""Remove staged files from a share while others submit jobs, without taking a file that a plan names.

Who removes says so first (``Sweep``), then reads all plans, then removes what none of them names. Who submits finds or sends
his files, writes his plan, and looks for sweeps after that (``settle``). Each writes first and looks second, so one of them
sees the other: either the plan was there when plans were read, or the submitter sees the sweep, waits for its end, and sends
again what is gone. No clock is compared with another: a sweep removes nothing once it has gone on for ``LONGEST_SECONDS``, and
is waited for that long and a margin; then whoever waited ends it in its place, which it heeds.

`.batchai/sweeps/<n>/` is a sweep, ``<n>.ended`` says that it is over. The newest stays, for those who look late.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from mlflow_batchai.agent import protocol
from mlflow_batchai.errors import ShareError
from mlflow_batchai.storage import objects
from mlflow_batchai.storage.base import Share
from mlflow_batchai.storage.objects import StagedFile

SWEEPS = ".batchai/sweeps"
ENDED = ".ended"
LONGEST_SECONDS, MARGIN_SECONDS, LOOK_SECONDS = 60.0, 30.0, 1.0
# So many files are removed between two looks whether the sweep may go on.
AT_A_TIME = 256


def _clock() -> float:
    """Seconds that go on while a machine sleeps, where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Sweep:
    """The right to remove staged files for a minute. Several at once do no harm."""

    def __init__(self, share: Share, clock: Callable[[], float] = _clock) -> None:
        self._share = share
        self._clock = clock
        self.number = 1 + max((number for number, _ in _sweeps(share)), default=0)
        while True:
            self._begun = clock()
            if share.claim(f"{SWEEPS}/{self.number}"):
                break
            self.number += 1

    def may_go_on(self) -> bool:
        """Whether anything may still be removed."""
        return self._clock() - self._begun < LONGEST_SECONDS and (self.number, False) in _sweeps(self._share)

    def remove(self, paths: Sequence[str]) -> int:
        """Remove files, as far as the time reaches; how many were."""
        removed = 0
        for start in range(0, len(paths), AT_A_TIME):
            if not self.may_go_on():
                break
            part = paths[start : start + AT_A_TIME]
            objects.each(self._share, self._share.delete, part)
            removed += len(part)
        return removed

    def end(self) -> None:
        """Say that it is over, and forget earlier ones."""
        _end(self._share, self.number)
        for number, is_over in _sweeps(self._share):
            if number < self.number and is_over:
                self._share.delete(f"{SWEEPS}/{number}")
                self._share.delete(f"{SWEEPS}/{number}{ENDED}")


@contextlib.contextmanager
def sweeping(share: Share) -> Iterator[Sweep]:
    """A sweep for the time of the block; what its end costs must not hide why it failed."""
    sweep = Sweep(share)
    try:
        yield sweep
    except BaseException:
        with contextlib.suppress(ShareError):
            sweep.end()
        raise
    sweep.end()


def settle(
    share: Share,
    sets: Iterable[Sequence[StagedFile]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Called once the plan lies on the share that names these sets of files, which were sent before: from here on they stay.

    Returns:
        Bytes that had to be sent again, since they were removed in between.

    Raises:
        ProjectError: a file that has to be sent again has changed or gone.
    """
    seen = _sweeps(share)
    left = {number for number, is_over in seen if not is_over}
    begun = clock()
    # Those that begin from now on read our plan.
    while left:
        if clock() - begun >= LONGEST_SECONDS + MARGIN_SECONDS:
            for number in left:
                _end(share, number)
            break
        sleep(LOOK_SECONDS)
        left &= {number for number, is_over in _sweeps(share) if not is_over}
    return sum(objects.confirm(share, files, anew=bool(seen)) for files in sets)


def _sweeps(share: Share) -> list[tuple[int, bool]]:
    """(number, whether it is over) of every sweep that is known."""
    names = {entry.name for entry in share.list(SWEEPS)}
    return sorted((int(name), name + ENDED in names) for name in names if name.isdigit())


def _end(share: Share, number: int) -> None:
    share.write(f"{SWEEPS}/{number}{ENDED}", protocol.encode([{"number": number}]))
