"""Waiting for what real processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], seconds: float = 20.0, what: str = "", pause: float = 0.02) -> Any:
    """The first true value of a condition; AssertionError if there is none in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(pause)
    raise AssertionError(f"not within {seconds} s: {what or condition}")
