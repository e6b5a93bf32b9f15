"""What the node's GPUs do, as nvidia-smi says."""

import re
import threading
import time
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from mlflow_batchai.node import gpus
from mlflow_batchai.node.meters.machine import MEGABYTE, Values

# A driver that is broken holds nvidia-smi for ever; one that has to be loaded first takes its time, for which no other sample
# waits longer than its patience.
DEADLINE_SECONDS, PATIENCE_SECONDS = gpus.LISTING_SECONDS, 5.0
# Until one that gave no values is asked again; each time twice as long.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 10.0, 600.0

USE, USED, TOTAL, POWER, MOST_POWER, HEAT = (
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "power.draw",
    "enforced.power.limit",
    "temperature.gpu",
)
FIELDS = ("index", "uuid", USE, USED, TOTAL, POWER, MOST_POWER, HEAT)
_MEBIBYTE = 1 << 20
# What a GPU can't say stands there as [N/A], [Not Supported], None and in other words.
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class Graphics:
    """The meter of some GPUs.

    Args:
        ids: indexes or UUIDs; values of the first are ``gpu_0_...``, whatever its index on the machine. Of MIG instances
            nvidia-smi tells nothing.
        environment: where nvidia-smi is found.
        note: is told once why there are no values, in a sentence.
        run: asks nvidia-smi.
        clock: seconds.
    """

    def __init__(
        self,
        ids: Sequence[str],
        environment: Mapping[str, str],
        note: Callable[[str], None],
        run: Optional[gpus.Run] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ids = list(ids)
        self._environment = dict(environment)
        self._note = note
        self._run: gpus.Run = run or (lambda argv, variables: gpus.ask(argv, variables, DEADLINE_SECONDS))
        self._clock = clock
        measured = [name for name in ids if not name.startswith("MIG-")]
        if ids and not measured:
            note("no metrics of GPUs: nvidia-smi has none of MIG instances")
        self._program = gpus.nvidia_smi(environment) if measured else None
        self._asking: Optional[threading.Thread] = None
        self._said = ""
        self._pause = FIRST_PAUSE_SECONDS
        self._next = clock()

    def look(self) -> Values:
        """The values now, none while nvidia-smi is not to be asked or has not answered; takes no longer than its patience."""
        if self._program is None or (self._asking is None and self._clock() < self._next):
            return {}
        if self._asking is None:
            self._asking = threading.Thread(target=self._ask, args=(self._program,), name="nvidia-smi", daemon=True)
            self._asking.start()
        self._asking.join(PATIENCE_SECONDS)
        if self._asking.is_alive():
            return {}
        self._asking = None
        text = self._said
        found = values(text, self._ids)
        if found:
            self._pause, self._next = FIRST_PAUSE_SECONDS, self._clock()
            return found
        if self._pause == FIRST_PAUSE_SECONDS:
            said = next((line.strip() for line in text.splitlines() if line.strip()), "it said nothing")
            self._note("no metrics of GPUs: %s; nvidia-smi is asked again later" % said)
        self._next = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return {}

    def _ask(self, program: str) -> None:
        argv = [program, "--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
        # The agent's main thread collects all children, so that the exit code says nothing.
        _, self._said = self._run(argv, self._environment)


def values(text: str, ids: Sequence[str]) -> Values:
    """The metrics of some GPUs from nvidia-smi's table of ``FIELDS``: those that each can say."""
    found: Values = {}
    for line in text.splitlines():
        columns = [column.strip() for column in line.split(",")]
        if len(columns) != len(FIELDS):
            continue  # a message, among the lines of those GPUs that answered
        told = dict(zip(FIELDS, columns))
        place = next((ids.index(name) for name in (told["index"], told["uuid"]) if name in ids), None)
        if place is not None:
            found.update(("gpu_%d_%s" % (place, name), value) for name, value in _of_one(told).items())
    return found


def _of_one(told: Mapping[str, str]) -> Values:
    numbers: Dict[str, float] = {name: float(word) for name, word in told.items() if _NUMBER.fullmatch(word)}
    found: List[Tuple[str, Optional[float]]] = [
        ("utilization_percentage", numbers.get(USE)),
        ("memory_usage_megabytes", numbers[USED] * _MEBIBYTE / MEGABYTE if USED in numbers else None),
        ("memory_usage_percentage", _percentage(numbers.get(USED), numbers.get(TOTAL))),
        ("power_usage_watts", numbers.get(POWER)),
        ("power_usage_percentage", _percentage(numbers.get(POWER), numbers.get(MOST_POWER))),
        ("temperature_celsius", numbers.get(HEAT)),
    ]
    return {name: value for name, value in found if value is not None}


def _percentage(part: Optional[float], whole: Optional[float]) -> Optional[float]:
    return 100.0 * part / whole if part is not None and whole else None
