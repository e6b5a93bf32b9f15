"""List the packages of the training interpreter, by a process beside the ranks that no rank waits for."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from typing import Any

from mlflow_batchai.agent.layout import archive_path
from mlflow_batchai.agent.processes.tasks import Task
from mlflow_batchai.agent.runtime import Runtime

# How long an agent that has nothing else to do waits for the end of it.
PATIENCE_SECONDS = 2.0


class Inventory:
    """The packages of one interpreter, asked for and passed on as an ``environment`` event."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._shipper = runtime, runtime.shipper
        self._task: Task | None = None

    def ask(self, python: str, environment: Mapping[str, str], cwd: str) -> None:
        """Start to ask. What keeps an interpreter from telling is noted in the execution log, if anything is."""
        try:
            task = Task("list of packages", None, self._hear)
            self._runtime.start(task, [python, archive_path(), "packages"], environment, cwd=cwd, helper=True)
            self._task = task
        except OSError as error:
            self._shipper.note(f"the packages of {python} can't be listed: {error.strerror}")

    def wait(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while self._task and self._task.status is None and time.monotonic() < until:
            self._runtime.pump(0.02)
        if self._task and self._task.status is not None:
            self._runtime.drain([self._task], 0.5)

    def _hear(self, task: Task, stream: str, lines: bytes) -> None:
        for line in lines.splitlines() if stream == "out" else ():
            found = _answer(line)
            if found:
                self._shipper.record("environment", **found)


def _answer(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) and set(found) == {"python", "packages"} else None


def main(arguments: list[str]) -> int:
    """Print this interpreter's version and its packages, as one line of JSON."""
    from importlib import metadata

    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        # The first of a name is the one that is imported.
        if name and distribution.version:
            found.setdefault(name, distribution.version)
    packages = ["{}=={}".format(*pair) for pair in sorted(found.items(), key=lambda pair: pair[0].lower())]
    print(json.dumps({"python": platform.python_version(), "packages": packages}))
    return 0
