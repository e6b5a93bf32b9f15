"""Run several calls at once in daemon threads, so that an interrupted program does not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 64


def in_background(call: Callable[[], T]) -> Future[T]:
    """Begin a call; its future has the value, or the error that it ended in."""
    return begin([call])[0]


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The values of all calls, up to 64 of them running; the first error is raised when all have ended."""
    futures = begin(calls)
    for future in futures:
        future.exception()
    return [future.result() for future in futures]


def begin(calls: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Begin calls, up to 64 of them running, for a caller that waits for each no longer than it may take."""
    slots = threading.Semaphore(AT_ONCE)

    def work(call: Callable[[], T], future: Future[T]) -> None:
        with slots:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    futures: list[Future[T]] = [Future() for _ in calls]
    for call, future in zip(calls, futures, strict=True):
        threading.Thread(target=work, args=(call, future), daemon=True, name="node").start()
    return futures
