"""Check the job's model on node 0: choose it, have it loaded and tried unless rank 0 has done so, and record the result."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.layout import archive_path
from mlflow_batchai.agent.outcome import Stop
from mlflow_batchai.agent.peers import Peers
from mlflow_batchai.agent.processes.tasks import TERMINATED, Task
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.training import saved_models
from mlflow_batchai.training.model_trial import NO_GPUS

# For what can be told of a model without loading it.
DESCRIBE_SECONDS = 20.0
LOG = "model-check.txt"
MOST_LOG_BYTES = 1 << 20
_TRIAL: records.Shape = {"meta": records.is_mapping, "check": records.is_mapping}
_CHECK: records.Shape = {
    "outcome": lambda value: value == saved_models.PASSED,
    "why": records.or_none(records.is_text),
    "seconds": records.is_number,
}


class ModelCheck:
    """The check of one job's model, on node 0, in the job's container where there is one.

    Args:
        python: the training interpreter; empty: there is none.
    """

    def __init__(self, runtime: Runtime, peers: Peers, python: str, environment: Mapping[str, str]) -> None:
        self.runtime, self.layout, self.shipper = runtime, runtime.layout, runtime.shipper
        self.peers = peers
        self.python = python
        self.environment = environment
        self._log = bytearray()

    def run(self) -> Stop | None:
        """Choose and check the model that the plan asks for, if it does.

        Returns:
            What has ended the check before its time: somebody wants the job's end.
        """
        wanted = self.layout.plan.model
        if not wanted:
            return None
        reported = self.runtime.reported_models
        folders = [path for name, path in sorted(self.layout.directories().items()) if name.startswith("AZ_BATCHAI_OUTPUT_")]
        chosen = saved_models.choose(saved_models.known(reported, folders, wanted.path), wanted.path)
        if chosen is None:
            return None  # the client says so
        body = {key: value for key, value in chosen.items() if key != "check"}
        body.update(ts=protocol.now_ms(), chosen=True)
        path, meta = str(chosen["path"]), chosen.get("meta") or {}
        if path.endswith(saved_models.TORCH_ENDINGS):
            body["meta"] = {"format": saved_models.TORCH}
            self._record(body)
            return None
        limit = wanted.check_seconds
        stop: Stop | None = None
        found = self._tried_by_rank(path) if limit else None
        if found is None:
            found, stop = self._try(path, meta, limit)
        if stop is None:
            said = found.get("meta")
            body["meta"] = {**meta, **(said if isinstance(said, dict) else {})}
            if meta.get("backend"):
                body["meta"]["backend"] = meta["backend"]
            if "error" in meta and isinstance(said, dict) and "error" not in said:
                del body["meta"]["error"]
            if limit:
                body["check"] = found["check"]
            self._record(body)
        if limit:
            self._write_log(path, body.get("check"))
        return stop

    def _tried_by_rank(self, path: str) -> dict[str, Any] | None:
        """What rank 0 said of a model that passed before its end; None: it didn't, or the file is another one by now."""
        said = self.runtime.trials.get(path, {})
        with contextlib.suppress(OSError):
            is_whole = records.has(said, _TRIAL) and records.has(said["check"], _CHECK)
            if is_whole and saved_models.stamp(path) == said.get("stamp"):
                return said
        return None

    def _try(self, path: str, reported: Mapping[str, Any], limit: float | None) -> tuple[dict[str, Any], Stop | None]:
        """(what a process of its own finds of a model, what has ended it before its time)"""
        if limit:
            self.shipper.record("phase", urgent=True, phase=protocol.CHECKING, node=self.layout.node)
        task = Task("model check", None, self._take)
        self._printed: list[bytes] = []
        begun = time.monotonic()
        stop, late = None, False
        cut = bool(self.peers.termination)
        if self.python and not cut:
            stop, late, cut = self._await(task, self._argv(path, reported, bool(limit)), reported, limit or DESCRIBE_SECONDS)
        found = self._answer()
        if limit and not found.get("check"):
            found["check"] = self._without_answer(task, late, cut, limit, time.monotonic() - begun)
        return found, stop

    def _argv(self, path: str, reported: Mapping[str, Any], load: bool) -> list[str]:
        argv = [self.python, archive_path(), "try-model"]
        if load:
            argv.append("--load")
        if reported.get("example") is not None:
            file = os.path.join(self.layout.temp, "model-example.json")
            with open(file, "w", encoding="utf-8") as stream:
                json.dump(reported["example"], stream)
            argv += ["--example", file]
        return [*argv, path]

    def _await(self, task: Task, argv: list[str], reported: Mapping[str, Any], limit: float) -> Any:
        """(what has ended it before its time, whether it didn't end by itself, whether this agent's end has ended it)"""
        own = dict(NO_GPUS, MLFLOW_TRACKING_URI="")
        if isinstance(reported.get("backend"), str):
            own["KERAS_BACKEND"] = reported["backend"]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", **self.environment, **own}
        self.runtime.start(task, argv, environment, cwd=self.layout.temp)
        until = time.monotonic() + limit
        stop: Stop | None = None
        while task.status is None and time.monotonic() < until:
            self.runtime.pump(0.05)
            wish = self.peers.wish(False)
            if wish and wish.kind == protocol.CANCEL:
                stop = wish
                break
            if self.shipper.inbox.verdict is not None or self.shipper.trouble or not self.shipper.is_alive():
                break  # nobody would hear of it
            if self.peers.termination:
                break
        late = task.status is None
        if task.exit_code == TERMINATED:
            self.peers.await_termination()
        cut = bool(self.peers.termination) and (late or task.exit_code == TERMINATED)
        self.runtime.end_everything(cut_short=late, rest=self.peers.processes_rest)
        self.runtime.drain([task], 0.5)
        return stop, late, cut

    def _take(self, task: Task, stream: str, lines: bytes) -> None:
        if stream == "out":
            self._printed.append(lines)
        elif len(self._log) < MOST_LOG_BYTES:
            self._log += lines

    def _answer(self) -> dict[str, Any]:
        try:
            found = json.loads(b"".join(self._printed).decode("utf-8", "replace"))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _without_answer(self, task: Task, late: bool, cut: bool, limit: float, seconds: float) -> dict[str, Any]:
        if not self.python:
            return saved_models.outcome(saved_models.UNCHECKED, "there is no Python in the job's container", seconds)
        if cut:
            return saved_models.outcome(
                saved_models.UNCHECKED, "the agent was told to end (SIGTERM) before it was tried", seconds
            )
        if late:
            why = f"it could not be loaded and tried in {limit:.0f} s (model.checkTimeout)"
        else:
            why = f"the check {self.runtime.how(task)}"
            if task.tail:
                why = f"{why}: {task.tail[-1].strip()}"
        return saved_models.outcome(saved_models.FAILED, why, seconds)

    def _record(self, body: Mapping[str, Any]) -> None:
        self.shipper.record("report", body=body)

    def _write_log(self, path: str, check: Mapping[str, Any] | None) -> None:
        result = f"{check['outcome']}: {check['why'] or 'loaded and tried'}" if check else "ended before its time"
        self.shipper.note(f"model check of {path}: {result}")
        with contextlib.suppress(OSError):  # the last line stands in the execution log
            file = self.layout.control.log_file(f"{self.layout.paths.stdouterr}/{LOG}")
            file.append(b"%s\n%s%s\n" % (path.encode(), bytes(self._log), result.encode("utf-8", "backslashreplace")))
            file.flush(last=True)
            file.close()
