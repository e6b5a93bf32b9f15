"""A rank that has MLflow and not our package: what it is started with is what an agent gives to ranks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from plans import toy_plan

from mlflow_batchai.agent import staging
from mlflow_batchai.agent.attempt import phases
from mlflow_batchai.agent.attempt.ranks import Known, Slot, rank_environment
from mlflow_batchai.agent.gpus import Gpus
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.plan import read_plan
from mlflow_batchai.engines import archive

ROOT = Path(__file__).parents[1]


class ScriptRank:
    """Runs scripts as one rank of a job.

    Args:
        root: a folder of its own.
        version: of MLflow, one that ``mlflow_of`` has put aside; None: the installed one.
        plan: changes to the toy plan.

    Attributes:
        artifacts: the folder on the share.
    """

    def __init__(self, root: Path, rank: int = 0, version: Path | None = None, **plan: Any) -> None:
        facts = {"experiment": "exp", "experimentId": "7", "runName": "seen", "runParameters": {"epochs": "5"}}
        share = root / "share"
        share.mkdir(parents=True)
        layout = NodeLayout(str(root / "node"), read_plan(toy_plan(share, ranks=2, **{**facts, **plan})), 0)
        (share / layout.paths.folder).mkdir(parents=True)  # as its submitter did
        staging.prepare_folders(layout)
        Path(layout.cluster_mounts).mkdir(parents=True)
        Path(layout.mounted_share).symlink_to(share)
        staging.write_run(layout, *phases._plugins())
        slot = Slot(rank, 2, 0, rank, 2, 0, 1)
        packages = str(_packages(root / "packages"))
        found = os.pathsep.join([*([str(version)] if version else []), packages])
        known = Known(os.environ, ["127.0.0.1"], Gpus([], ""), {}, sys.executable)
        environment = rank_environment(
            layout, known, slot, {"address": "127.0.0.1", "port": 1}, None, 2, str(archive.stored(root / "agents"))
        )
        self.environment = {**environment, "PYTHONPATH": environment["PYTHONPATH"] + os.pathsep + found}
        self.artifacts = Path(layout.artifacts)
        self._root, self._spool = root, Path(layout.spool)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        file = self._root / "train.py"
        file.write_text(textwrap.dedent(script), encoding="utf-8")
        # No site-packages: what is installed there, and who says where it lies, is not seen.
        argv = [sys.executable, "-S", "-W", "ignore", str(file)]
        return subprocess.run(argv, env=self.environment, cwd=self._root, capture_output=True, text=True, timeout=120)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """What has been reported of a kind."""
        found = []
        for file in sorted(self._spool.glob("report-*.jsonl")):
            found += [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [record for record in found if record["type"] == kind]


def _packages(folder: Path) -> Path:
    """All that is installed, without our package."""
    folder.mkdir()
    for entry in Path(os.path.dirname(_mlflow())).iterdir():
        if "mlflow_batchai" not in entry.name and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


@functools.cache
def _mlflow() -> str:
    from importlib.util import find_spec

    spec = find_spec("mlflow")
    assert spec is not None and spec.submodule_search_locations
    return str(spec.submodule_search_locations[0])
