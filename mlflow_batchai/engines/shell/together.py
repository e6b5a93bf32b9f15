"""Several calls at once, in threads that a program which is interrupted doesn't wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 64


def in_background(call: Callable[[], T]) -> Future[T]:
    """Begin a call; its future has the value, or the error that it ended in."""
    return _begin([call], 1)[0]


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The values of all calls, up to 64 of them running; the first error is raised when all have ended."""
    futures = begin(calls)
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def begin(calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Begin calls, up to 64 of them running, for who waits for each no longer than it may take."""
    return _begin(calls, AT_ONCE)


def _begin(calls: Sequence[Callable[[], T]], most: int) -> list[Future[T]]:
    waiting: queue.SimpleQueue[tuple[Callable[[], T], Future[T]]] = queue.SimpleQueue()
    futures: list[Future[T]] = []
    for call in calls:
        futures.append(Future())
        waiting.put((call, futures[-1]))

    def work() -> None:
        while True:
            try:
                call, future = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(most, len(futures))):
        threading.Thread(target=work, daemon=True, name="node").start()
    return futures
