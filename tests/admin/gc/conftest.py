"""Control shares with jobs as submitters, agents and relays leave them."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from plans import toy_plan

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import JobPaths, object_path
from mlflow_batchai.storage import Share, credentials, open_share
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.directory import DirectoryShare

DAY = 86400.0


class ControlShare:
    """A share, the folder that its files lie in on this machine, and jobs on it.

    Attributes:
        said: what a search has told.
    """

    def __init__(self, share: Share, root: Path) -> None:
        self.share, self.root = share, root
        self.said: list[str] = []

    def job(
        self,
        name: str,
        ended: float | None = None,
        relayed: bool = True,
        prefix: str = "",
        code: tuple[str, ...] = (),
        handle: bool = True,
        by: str = "agent-0",
        **plan: Any,
    ) -> str:
        """The folder of a job, submitted 100 days ago, that ended so many days ago (None: it runs); ``code``: hashes."""
        segment = f"workspaces/default/experiments/Default/jobs/{name}/{name}0123"
        folder = f"{prefix}/{segment}" if prefix else segment
        paths = JobPaths(folder)
        self.write(paths.spec, {})
        own = {
            "name": name,
            "job": f"{name}0123",
            "runId": f"run-{name}",
            "segment": segment,
            "folder": folder,
            "volumes": [{"kind": "link", "scope": "cluster", "path": "share", "share": self.share.url}],
            "code": [{"path": f"{sha256}.py", "sha256": sha256, "mode": 0o644} for sha256 in code],
        }
        self.write(paths.plan, toy_plan(Path("/unused"), **{**own, **plan}))
        self.share.write(f"{folder}/stdouterr/stdout.txt", b"x" * 1000)
        if handle:
            self.write(paths.submitted, {"engine": "local", "host": "h", "ticket": 1, "nodes": []})
        if ended is not None:
            self.verdict(folder, ended, by)
        if ended is not None and relayed:
            self.write(paths.cursor(1), {"finished": True, "counter": 1})
        self.aged(folder, 100)
        return folder

    def verdict(self, folder: str, ended: float, by: str = "agent-0", attempt: int = 1) -> None:
        paths = JobPaths(folder, attempt)
        self.share.claim(paths.verdict)
        record = protocol.verdict_record(protocol.SUCCEEDED, by, 0)
        self.write(paths.verdict_file, {**record, "endTime": int((time.time() - ended * DAY) * 1000)})

    def staged(self, name: str, days: float) -> str:
        """A staged file of 10 bytes that was sent so many days ago; its hash (not that of its content)."""
        sha256 = f"{name:0<64}"
        self.share.write(object_path(sha256), b"0123456789")
        self.aged(object_path(sha256), days)
        return sha256

    def write(self, path: str, record: dict[str, Any]) -> None:
        self.share.write(path, protocol.encode([record]))

    def aged(self, path: str, days: float) -> None:
        """Have what lies there look as if it were so old."""
        for file in [self.root / path, *(self.root / path).rglob("*")]:
            os.utime(file, (time.time() - days * DAY,) * 2)

    def there(self, path: str) -> bool:
        return (self.root / path).exists()


@pytest.fixture(params=["directory", "azure"])
def control(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ControlShare:
    if request.param == "directory":
        return ControlShare(DirectoryShare(tmp_path / "share"), tmp_path / "share")
    azure = request.getfixturevalue("azure")
    monkeypatch.setattr(credentials, "_remembered", {azure.account: Credential(azure.key)})
    name = f"share-{uuid.uuid4().hex}"
    return ControlShare(open_share(azure.url(name)), azure.share(name))


@pytest.fixture
def on_directory(tmp_path: Path) -> ControlShare:
    return ControlShare(DirectoryShare(tmp_path / "share"), tmp_path / "share")
