"""Ctrl-C, SIGTERM and SIGHUP in a process that submits and watches a job."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import NoReturn

from mlflow_batchai.errors import JobDetachedError


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, by an exception: SystemExit. For what has to end its own processes.

    One that is ignored, as under nohup, stays so.
    """

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    heard = (number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN)
    with _handled(dict.fromkeys(heard, leave)):
        yield


@contextlib.contextmanager
def _handled(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handlers of signals for the time of the block; then those from before."""
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _at_terminal() -> bool:
    """Whether a person sees what is asked here, and can answer."""
    try:
        return os.isatty(2) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # standard input is no terminal, or not this process' own
        return False


class Signals:
    """Ctrl-C cancels the job (a further one leaves it); SIGTERM and SIGHUP leave it running.

    At a terminal the first Ctrl-C may only ask: a second one cancels the job then, Enter leaves it running.

    While the job is being submitted a signal only waits for that, since half a submit would leave agents that nobody follows; a
    second Ctrl-C undoes the submit. Installed only in the main thread: elsewhere Python has no signals.

    Args:
        cancels: whether Ctrl-C ends the job (for its submitter) or leaves it.
        asks: whether it asks at a terminal before it ends the job.
    """

    def __init__(self, cancels: bool = True, asks: bool = False) -> None:
        self._cancels = cancels
        self._asks = asks
        self._asked = False
        self._told = False
        self._left: str | None = None
        self.cancelled = False
        self.submitting = True

    @property
    def left(self) -> bool:
        """Whether a signal asked the process to leave."""
        return self._left is not None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handlers for the time of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with _handled({signal.SIGINT: self._interrupt, signal.SIGTERM: self._leave, signal.SIGHUP: self._leave}):
            yield

    def watching(self) -> None:
        """The job is submitted: from now on signals act at once."""
        self.submitting = False

    def check(self, cancel: Callable[[], None]) -> None:
        """Do what a signal has asked for: not in the handler, which may have interrupted a write to the terminal. What fails is
        done again at the next check.

        Raises:
            JobDetachedError: a signal that came during the submit says to leave, or one whose exception got lost.
        """
        if self._asked and not self.cancelled and select.select([0], [], [], 0)[0]:
            os.read(0, 1024)
            self._left = "left"
        if self._left:
            raise JobDetachedError(self._left)
        if self.cancelled and not self._told:
            cancel()
            self._told = True

    def _interrupt(self, number: int, frame: object) -> None:
        if self.submitting and not self._cancels:
            self._left = "Ctrl-C received"
            return
        if self.submitting:
            if self.cancelled:
                raise KeyboardInterrupt
            self.cancelled = True
            # os.write: what the handler interrupted may be in the middle of printing.
            os.write(2, b"\nbatchai: the job ends as soon as it is submitted; press Ctrl-C again to undo that\n")
            return
        if not self._cancels:
            self._leave_now("left")
        if self.cancelled:
            self._leave_now("left before it has ended (that was asked for)")
        if self._asks and not self._asked and _at_terminal():
            self._asked = True
            termios.tcflush(0, termios.TCIFLUSH)  # lines that were typed before are no answer
            os.write(2, b"\nbatchai: press Ctrl-C again to end the job, Enter to leave it running\n")
            return
        self.cancelled = True

    def _leave(self, number: int, frame: object) -> None:
        self._left = f"{signal.Signals(number).name} received"
        if not self.submitting:
            self._leave_now(self._left)

    def _leave_now(self, why: str) -> NoReturn:
        # MLflow takes whatever is raised in the midst of a call for a fault of its store: the next check says it again.
        self._left = why
        raise JobDetachedError(why)
