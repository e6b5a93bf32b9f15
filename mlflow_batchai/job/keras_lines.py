"""Keras' progress lines of one rank: which of them are an epoch's, and how far a training has come.

Keras 2 and 3 write ``Epoch 1/5`` and then, with ``verbose=1``, a bar that is redrawn with carriage returns, with ``verbose=2``
one line. An evaluation looks the same, and callbacks of an epoch evaluate before its own line is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# An epoch that doesn't fit into 64 bits is none.
_EPOCH = re.compile(r"Epoch (?P<epoch>\d{1,18})/(?P<epochs>\d{1,18})\s*")
# Up to Keras 2.3 verbose=2 gave no number of steps: " - 1s - loss: 0.5".
_PROGRESS = re.compile(r"\s*(?:(?P<done>\d+)/(?P<steps>\d+)\s|\s- \d+m?s -)(?P<values>.*)")
_VALUE = re.compile(r"(?P<name>[^:]+): (?P<value>[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|inf|nan))")


class EpochValues(NamedTuple):
    """An epoch's own line: its number from 0, when it came (milliseconds since the epoch), name -> number as written."""

    epoch: int
    time: int
    values: dict[str, str]


class _Line(NamedTuple):
    """A complete line: of how many steps (0: it doesn't say), when, and what it says."""

    steps: int
    time: int
    values: dict[str, str]


def _line(memory: Any) -> _Line | None:
    return _Line(int(memory[0]), int(memory[1]), dict(memory[2])) if memory else None


class Pace(NamedTuple):
    """How far a training has come.

    Attributes:
        epoch: the one that is being trained, from 1.
        epochs: how many there will be.
        end: when the last of them will have ended, as it goes: milliseconds since the epoch; None: that can't be told yet.
    """

    epoch: int
    epochs: int
    end: int | None


class KerasLines:
    """Reads lines, colours and all but the last state of each taken away already; JSON in, JSON out (``remember``)."""

    def __init__(self, memory: Mapping[str, Any] | None = None) -> None:
        memory = memory or {}
        # The epoch that is being trained, from 1, and of how many; 0: none.
        self._epoch = int(memory.get("epoch", 0))
        self._epochs = int(memory.get("epochs", 0))
        self._time = int(memory.get("time", 0))
        # The first epoch line of this training: number, time.
        self._first = int(memory.get("first", 0))
        self._begun = int(memory.get("begun", 0))
        # Steps of an epoch of this training, once one is over; 0: not known.
        self._steps = int(memory.get("steps", 0))
        # Of the epoch's complete lines the one that is its own, if it is the last epoch; and the last one.
        self._best = _line(memory.get("best"))
        self._last = _line(memory.get("last"))

    def remember(self) -> dict[str, Any]:
        """All that another process needs to go on, as JSON."""
        return {
            "epoch": self._epoch,
            "epochs": self._epochs,
            "time": self._time,
            "first": self._first,
            "begun": self._begun,
            "steps": self._steps,
            "best": self._best and list(self._best),
            "last": self._last and list(self._last),
        }

    def feed(self, line: str, time: int) -> EpochValues | None:
        """Take a line; the values of the epoch before, if the line begins another one."""
        if match := _EPOCH.fullmatch(line):
            return self._begin(int(match["epoch"]), int(match["epochs"]), time)
        match = _PROGRESS.match(line) if self._epoch and " - " in line else None
        if match and match["done"] == match["steps"]:
            found = [_VALUE.fullmatch(part.strip()) for part in match["values"].split(" - ")]
            if values := {value["name"]: value["value"] for value in found if value}:
                self._consider(_Line(int(match["steps"] or 0), time, values))
        return None

    def finish(self) -> EpochValues | None:
        """No more lines come: the values of the last epoch."""
        found = self._taken(self._best)
        self._epoch = 0
        return found

    @property
    def pace(self) -> Pace | None:
        """How far the training has come; None: there is none."""
        if not self._epoch:
            return None
        done = self._epoch - self._first
        left = self._epochs - self._epoch + 1
        end = self._time + (self._time - self._begun) * left // done if done else None
        return Pace(self._epoch, self._epochs, end)

    def _begin(self, epoch: int, epochs: int, time: int) -> EpochValues | None:
        goes_on = epoch == self._epoch + 1 and epochs == self._epochs
        # What is written last before the next epoch is the epoch's own line: callbacks come before it.
        last = self._last
        found = self._taken(last if goes_on else self._best)
        if goes_on and last:
            self._steps = last.steps
        if not goes_on:
            self._first, self._begun, self._steps = epoch, time, 0
        self._epoch, self._epochs, self._time = epoch, epochs, time
        return found

    def _consider(self, line: _Line) -> None:
        best, self._last = self._best, line
        fits = self._steps == line.steps != 0
        # A bar that something else was written into is drawn again, with what it lacked.
        if best is None or line.values.keys() > best.values.keys() or (fits and best.steps != self._steps):
            self._best = line

    def _taken(self, line: _Line | None) -> EpochValues | None:
        self._best = self._last = None
        return EpochValues(self._epoch - 1, line.time, line.values) if line else None
