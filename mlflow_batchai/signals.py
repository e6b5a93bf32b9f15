"""What Ctrl-C and the signals of a closing terminal mean to a process that watches a job."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from mlflow_batchai.errors import JobDetachedError


class Signals:
    """Ctrl-C cancels the job (a second one leaves it); SIGTERM and SIGHUP leave it running.

    Installed only in the main thread: elsewhere Python has no signals.
    """

    def __init__(self, on_cancel: Callable[[], None] | None) -> None:
        self._on_cancel = on_cancel
        self.cancelled = False
        self._told = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handlers for the time of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            signal.signal(signal.SIGINT, self._interrupt)
            signal.signal(signal.SIGTERM, self._leave)
            signal.signal(signal.SIGHUP, self._leave)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> None:
        if self._on_cancel is None:
            raise JobDetachedError("left")
        if self.cancelled:
            raise JobDetachedError("left while it ends")
        self.cancelled = True

    def cancel_if_asked(self) -> None:
        """Cancel after Ctrl-C: not in the handler, which may have interrupted a write to the terminal."""
        if self.cancelled and not self._told and self._on_cancel is not None:
            self._told = True
            self._on_cancel()

    def _leave(self, number: int, frame: object) -> None:
        raise JobDetachedError(f"{signal.Signals(number).name} received")
