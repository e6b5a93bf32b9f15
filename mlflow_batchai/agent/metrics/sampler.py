"""The agent's sampling thread: read the node's metrics every few seconds and send them as records."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable

from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.metrics.gpu import GpuMeter
from mlflow_batchai.agent.metrics.machine import JobProcesses, Machine, Values
from mlflow_batchai.agent.transport.shipper import Shipper

# The first sample comes early, so that a short job has one.
FIRST_SECONDS = 1.0
# The plan's interval is kept to for so long; then it grows with the time that the job takes.
STEADY_SECONDS = 3600.0
LONGEST_SECONDS = 60.0
# A last sample is taken at the end, if there is that much to say since the one before; it is waited for that long.
LEAST_SECONDS = 1.0
LAST_SECONDS = 0.5

Look = Callable[[], Values]


def moments(interval: float) -> Iterator[float]:
    """When samples are taken, in seconds from the start: one early, then every interval for an hour, then ever less often."""
    if interval > FIRST_SECONDS:
        yield FIRST_SECONDS
    moment = interval
    while True:
        yield moment
        moment += max(interval, min(interval * moment / STEADY_SECONDS, LONGEST_SECONDS))


class Sampler:
    """Samples a node from ``start`` to ``stop``, in a thread of its own: what hangs there holds up nothing.

    Args:
        layout: the job on this node; its plan says how often (``systemMetrics``, seconds; None: never).
        others: pids of the job's processes that don't descend from this one.
    """

    def __init__(self, layout: NodeLayout, shipper: Shipper, others: Callable[[], Iterable[int]] = tuple) -> None:
        self._layout = layout
        self._shipper = shipper
        self._others = others
        self._interval = layout.plan.system_metrics
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._count = 0

    def start(self, gpus: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        """Begin, if the plan wants it; ``gpus``: the node's own, as ``CUDA_VISIBLE_DEVICES`` takes them."""
        if self._interval is None:
            return
        self._thread = threading.Thread(target=self._run, args=(gpus, environment), name="meters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread:
            self._thread.join(LAST_SECONDS)

    def _run(self, gpus: Sequence[str], environment: Mapping[str, str]) -> None:
        assert self._interval
        makers: dict[str, Callable[[], Look]] = {
            "machine": lambda: Machine(self._layout.root).look,
            "job's processes": lambda: JobProcesses(os.getpid(), self._others).look,
            "GPUs": lambda: GpuMeter(gpus, environment, self._shipper.note).look,
        }
        made = {name: self._try(name, make) for name, make in makers.items()}
        looks: dict[str, Look] = {name: look for name, look in made.items() if look}
        begun = last = time.monotonic()
        for moment in moments(self._interval):
            if begun + moment < last:
                continue  # the one before took longer than that
            if self._done.wait(max(0.0, begun + moment - time.monotonic())):
                break
            self._sample(looks)
            last = time.monotonic()
        if time.monotonic() - last >= LEAST_SECONDS or not self._count:
            self._sample(looks)

    def _sample(self, looks: dict[str, Look]) -> None:
        found: Values = {}
        for name, look in list(looks.items()):
            values = self._try(name, look)
            if values is None:
                del looks[name]
            else:
                found.update(values)
        if found:
            rounded = {name: round(value, 3 if name.startswith("network_") else 1) for name, value in found.items()}
            self._shipper.sample(node=self._layout.node, n=self._count, v=rounded)
            self._count += 1

    def _try(self, name: str, look: Callable[[], Any]) -> Any:
        """Read a meter; None if it fails: the job goes on without it."""
        try:
            return look()
        except Exception as error:
            self._shipper.note(f"the metrics of the {name} are missing: {type(error).__name__}: {error}")
            return None
