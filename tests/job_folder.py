"""A job folder as an agent and a submitter leave it, on a share in a temporary directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plans import toy_plan

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.job import signing
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.storage.base import Share
from mlflow_batchai.storage.directory import DirectoryShare

FOLDER = "workspaces/default/experiments/Default/jobs/toy/0123456789"

# Of agents that have counted nothing: so nothing of theirs can be missing.
NO_TOTALS: Record = {"segments": 0, "logs": {}, "reports": {}, "uncounted": [], "unsent": 0}


class JobFolder:
    """Writes what others write; ``job`` reads it."""

    def __init__(self, root: Path | Share, nodes: int = 1, **plan: Any) -> None:
        self.share: Any = DirectoryShare(root) if isinstance(root, Path) else root
        own = {
            "job": "0123456789",
            "name": "toy-0123",
            "nodeCount": nodes,
            "ranks": nodes,
            "runId": "r" * 32,
            "cluster": "local",
        }
        own |= {"terminateSeconds": 0.0, "segment": FOLDER, "folder": FOLDER}
        if not isinstance(root, Path):
            own["volumes"] = [{"scope": "cluster", "path": "share", "kind": "link", "share": root.url}]
        self.plan: Record = toy_plan(root if isinstance(root, Path) else Path("/unused"), **{**own, **plan})
        self.paths = protocol.JobPaths(self.plan["folder"])
        self.write(self.paths.plan, self.plan)

    @property
    def job(self) -> Job:
        """The job, freshly opened: as another process sees it."""
        return Job(self.share, self.paths.folder)

    def begin(self, attempt: int) -> None:
        """From now on write what belongs to that attempt, which somebody has begun."""
        self.paths = protocol.JobPaths(self.paths.folder, attempt)
        self.share.claim(self.paths.begun)

    def write(self, path: str, record: Record) -> None:
        """Write a file of one record: signed, where clients do that."""
        directing = path.endswith(("/plan.json", "/submitted.json", "/attempt.json", "/cursor.json"))
        self.share.write(path, protocol.encode([signing.sign(path, record) if directing else record]))

    def add_marker(self, name: str, count: int | None = None) -> None:
        """A marker in the index: a folder, or a file as long as its number."""
        if count is None:
            self.share.claim(self.paths.marker(name))
        else:
            self.share.write(self.paths.marker(name), bytes(count))

    def announce(self, node: int) -> None:
        self.write(self.paths.announce(node), {"node": node, "host": "h", "address": "127.0.0.1"})

    def exit(self, node: int, **fields: Any) -> None:
        self.write(self.paths.exit(node), {"node": node, "failure": None, "stopped": None, **NO_TOTALS, **fields})

    def verdict(self, state: str = protocol.SUCCEEDED, **fields: Any) -> Record:
        record = {
            "executionState": state,
            "exitCode": 0 if state == protocol.SUCCEEDED else 1,
            "errors": [],
            "reason": "",
            "terminated": False,
            "by": "agent-0",
            "endTime": 1_700_000_000_000,
            "totals": {str(node): NO_TOTALS for node in range(self.plan["nodeCount"])},
            **fields,
        }
        self.share.claim(self.paths.verdict)
        self.write(self.paths.verdict_file, record)
        return record

    def segment(self, sequence: int, *records: Record, writer: str = "agent-0") -> None:
        self.share.write(self.paths.segment(writer, sequence), protocol.encode(records))

    def handle(self, nodes: int = 1, engine: str = "fake") -> None:
        self.write(self.paths.submitted, {"engine": engine, "nodes": list(range(nodes))})


def report(step: int, rank: int = 0, ts: int = 5, **values: Any) -> Record:
    """A ``report`` record of metrics."""
    return {"k": "report", "t": ts, "body": {"type": "metric", "rank": rank, "ts": ts, "step": step, "values": values}}


def line(text: str, rank: int | None = 0, stream: str = "out", t: int = 7) -> Record:
    """A ``log`` record of whole lines."""
    return {"k": "log", "t": t, "r": rank, "s": stream, "x": text if text.endswith("\n") else text + "\n"}
