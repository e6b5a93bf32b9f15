"""Retry calls to a tracking server or share at growing intervals; log errors; give up after a deadline."""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from mlflow_batchai.errors import BatchAIError, JobChangedError, JobError, ShareError
from mlflow_batchai.job.lease import LeaseLostError
from mlflow_batchai.tracking.stores import LONGEST_SENTENCE, is_answer, sentence

Result = TypeVar("Result")

FIRST_WAIT_SECONDS, LEAST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 0.5, 60.0
# An error that was logged comes again after so long, so that a log of days still says what is going on.
REMIND_SECONDS = 3600.0
_VARYING = re.compile(r"0x[0-9a-f]+|\d+")


class GivenUpError(JobError):
    """A tracking server or a share was away for longer than the job's relayDeadline, or the run of a job that has ended is
    deleted; `job attach` goes on."""


class LogThrottle:
    """A log that grows slowly: each kind of error when it is new, and once an hour after that.

    Args:
        file: what it is written to; None: standard error.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, file: TextIO | None = None) -> None:
        self._clock = clock
        self._file = file
        self._logged_at: dict[str, float] = {}
        self._since: float | None = None

    def error(self, error: BaseException, wait: float) -> None:
        """Log an error, and when it is tried again."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        kind = _VARYING.sub("#", f"{type(error)} {error}")[:LONGEST_SENTENCE]
        if now - self._logged_at.get(kind, -REMIND_SECONDS) < REMIND_SECONDS:
            return
        self._logged_at[kind] = now
        self.say(f"{_text(error)}\ntrying again in {wait:.0f} s, later every {LONGEST_WAIT_SECONDS:.0f} s at most")

    def over(self) -> None:
        """Note a success; log it if the last call failed."""
        if self._since is not None:
            self.say(f"it works again, after {spoken(self._clock() - self._since)}")
        self._logged_at.clear()
        self._since = None

    def say(self, text: str) -> None:
        """Log anything else, with the time."""
        print(f"{time.strftime('%F %T')} {text}", file=self._file or sys.stderr, flush=True)

    def failed(self, error: BaseException) -> None:
        """Log an error that nothing is tried after."""
        self.say(_text(error))


class RetryPolicy:
    """Does what must be done in the end, however long a tracking server or a share is away; gives up after a deadline.

    A share's time begins when it was there last. A tracking server's begins when the job has ended, not before: as long as the
    job goes on, its nodes have to be watched anyway.

    Args:
        ended: when the job was seen to have ended (``time.monotonic``); None: it goes on, as far as we know.
        on_error: called after each failure with what failed and for how many seconds it has; what it raises ends the trying.
    """

    def __init__(
        self,
        seconds: float,
        log: LogThrottle,
        ended: Callable[[], float | None] = lambda: None,
        on_error: Callable[[BaseException, float], None] = lambda error, since: None,
    ) -> None:
        self._seconds = seconds
        self._log = log
        self._ended = ended
        self._on_error = on_error

    def do(
        self,
        act: Callable[[], Result],
        sleep: Callable[[float], Any] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Result | None:
        """Result of a call, once it succeeds; None after giving up.

        Args:
            enough: whether it needs no more trying after a failure.

        Raises:
            GivenUpError: it has failed for longer than the deadline.
            LeaseLostError: another relay has taken over.
            JobChangedError: what it would obey was changed on the share.
        """

        def tried() -> Result | None:
            result = act()
            self._log.over()
            return result

        return Retrying(
            retry=retry_if_exception(_is_worth_retrying),
            wait=wait_random_exponential(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, min=LEAST_WAIT_SECONDS),
            stop=lambda state: enough() or self._late(state) > self._seconds,
            before_sleep=self._failed,
            sleep=sleep or time.sleep,
            retry_error_callback=lambda state: None if enough() else self._give_up(state),
        )(tried)

    def _failed(self, state: RetryCallState) -> None:
        error = _error(state)
        self._log.error(error, state.upcoming_sleep)
        self._on_error(error, time.monotonic() - state.start_time)

    def _late(self, state: RetryCallState) -> float:
        """The seconds that count."""
        now = time.monotonic()
        if isinstance(_error(state), ShareError):
            return now - state.start_time
        ended = self._ended()
        return 0.0 if ended is None else now - max(ended, state.start_time)

    def _give_up(self, state: RetryCallState) -> None:
        error = _error(state)
        what = "its share" if isinstance(error, ShareError) else "the tracking server"
        raise GivenUpError(f"{what} could not be used for {spoken(self._late(state))} (at last: {sentence(error)})") from error


def _is_worth_retrying(error: BaseException) -> bool:
    """Whether it is worth trying again: anything may be, from a store that raises whatever it likes."""
    return isinstance(error, Exception) and not isinstance(error, (LeaseLostError, GivenUpError, JobChangedError))


def _error(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome else None
    assert error is not None
    return error


def _text(error: BaseException) -> str:
    """For the log: where an error comes from that is neither ours nor a store's."""
    if isinstance(error, BatchAIError) or is_answer(error):
        return sentence(error)
    return "".join(traceback.format_exception(error)).rstrip()


def spoken(seconds: float) -> str:
    """``24 h``, ``1:30 h``, ``5 min``, ``7 s``."""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes % 60 == 0 else f"{minutes // 60}:{minutes % 60:02} h"
