"""GPU metrics of a node, from nvidia-smi."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Callable

from mlflow_batchai.agent import gpus
from mlflow_batchai.agent.metrics.machine import MEGABYTE, Values

# A broken driver holds nvidia-smi for ever; the other values of a sample wait no longer than this.
ANSWER_SECONDS = 5.0
# Until nvidia-smi is asked again when it gave no values; each time twice as long.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 10.0, 600.0

FIELDS = (
    "index",
    "uuid",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "power.draw",
    "enforced.power.limit",
    "temperature.gpu",
)
_MEBIBYTE = 1 << 20


class GpuMeter:
    """The meter of some GPUs.

    Args:
        ids: indexes or UUIDs; values of the first are ``gpu_0_...``, whatever its index on the machine. Of MIG instances
            nvidia-smi tells nothing.
        note: is told once why there are no values, in a sentence.
    """

    def __init__(
        self,
        ids: Sequence[str],
        environment: Mapping[str, str],
        note: Callable[[str], None],
        seconds: float = ANSWER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ids = list(ids)
        self._environment = dict(environment)
        self._note = note
        self._seconds = seconds
        self._clock = clock
        measured = [name for name in ids if not name.startswith("MIG-")]
        if ids and not measured:
            note("no metrics of GPUs: nvidia-smi has none of MIG instances")
        self._program = gpus.nvidia_smi(environment) if measured else None
        self._pause = FIRST_PAUSE_SECONDS
        self._next = clock()

    def look(self) -> Values:
        if self._program is None or self._clock() < self._next:
            return {}
        argv = [self._program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        # The agent's main thread collects all children, so the exit code says nothing.
        _, text = gpus.ask(argv, self._environment, self._seconds)
        found = values(text, self._ids)
        if found:
            self._pause = FIRST_PAUSE_SECONDS
            return found
        if self._pause == FIRST_PAUSE_SECONDS:
            said = next((line.strip() for line in text.splitlines() if line.strip()), "it said nothing")
            self._note(f"no metrics of GPUs: {said}; nvidia-smi is asked again later")
        self._next = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return {}


def values(text: str, ids: Sequence[str]) -> Values:
    found: Values = {}
    for line in text.splitlines():
        columns = [column.strip() for column in line.split(",")]
        if len(columns) != len(FIELDS):
            continue  # a message, among the lines of those GPUs that answered
        place = next((ids.index(name) for name in columns[:2] if name in ids), None)
        if place is not None:
            found.update((f"gpu_{place}_{name}", value) for name, value in _of_one(columns[2:]).items())
    return found


def _of_one(columns: Sequence[str]) -> Values:
    use, used, total, power, most_power, heat = map(_number, columns)
    found = {
        "utilization_percentage": use,
        "memory_usage_megabytes": None if used is None else used * _MEBIBYTE / MEGABYTE,
        "memory_usage_percentage": _percentage(used, total),
        "power_usage_watts": power,
        "power_usage_percentage": _percentage(power, most_power),
        "temperature_celsius": heat,
    }
    return {name: value for name, value in found.items() if value is not None}


def _number(word: str) -> float | None:
    """A number; None for what a GPU can't say, which stands there as [N/A], [Not Supported], None and in other words."""
    return float(word) if word.lstrip("-").replace(".", "", 1).isdigit() else None


def _percentage(part: float | None, whole: float | None) -> float | None:
    return 100.0 * part / whole if part is not None and whole else None
