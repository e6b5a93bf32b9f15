"""Clusters over SSH for the tests of whole jobs: their documents, jobs submitted from this process, and toy ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.tracking import runs

NAME = "nc6"

# A rank that says that it is up, waits for a file on the share, and reports two metrics.
WAITS = """
    import os, time
    from mlflow_batchai.training import report
    print("up", flush=True)
    while not os.path.exists(os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/go"):
        time.sleep(0.05)
    report.log(step=0, loss=0.5)
    report.log(step=1, loss=0.25)
"""


def on_servers(servers: Any, world: Any, numbers: Iterable[int] = range(4)) -> dict[str, Any]:
    """What a document says of servers (``sshd.py``): their folders lie in the world's own."""
    hosts = [{"host": servers[number].address, "root": str(world.root / f"root{number}")} for number in numbers]
    return {"hosts": hosts, "port": servers.port, "keyFile": str(servers.key_file), "knownHosts": str(servers.known_hosts)}


def on_machines(machines: Any, world: Any, numbers: Iterable[int] = range(4)) -> dict[str, Any]:
    """What a document says of machines (``netns.py``); what runs there counts as the world's."""
    world.machines = list(machines)
    return {
        "hosts": [machines[number].address for number in numbers],
        "user": machines.user,
        "keyFile": str(machines.key_file),
        "knownHosts": str(machines.known_hosts),
        "shareOnNodes": machines[0].share,
    }


def describe(world: Any, document: dict[str, Any], home: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Write the cluster document (None drops a key), and make its share unless the document names one; what was written."""
    share = world.root / "share"
    share.mkdir(exist_ok=True)
    everything = {"engine": "ssh", "share": str(share), "python": sys.executable, **document, **changes}
    written = {key: value for key, value in everything.items() if value is not None}
    path = (home or world.home) / "clusters" / f"{NAME}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written), encoding="utf-8")
    return written


def config(nodes: int, horovod: bool = True, **properties: Any) -> str:
    """A batchai.yaml for the cluster: one rank a node, or one alone without Horovod."""
    framework = {"horovodSettings": {}} if horovod else {}
    return json.dumps({"cluster": NAME, "properties": {"nodeCount": nodes, **framework, **properties}})


class HereClient:
    """The client in this process: what ``mlflow run`` would do without the seconds that its start takes."""

    def __init__(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import mlflow

        self._world = world
        monkeypatch.setenv("BATCHAI_HOME", str(world.home))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", world.uri)
        monkeypatch.chdir(world.cwd)
        mlflow.set_tracking_uri(world.uri)

    def submit(self, project: Path) -> Any:
        """Submit it; MLflow's handle of the run, which ``folder`` and ``log`` of the world take too."""
        import mlflow

        handle = mlflow.projects.run(str(project), backend="batchai", synchronous=False)
        return self._world.client.get_run(handle.run_id)

    def cluster(self) -> Any:
        """The cluster as its document says."""
        from mlflow_batchai.cluster import clusters

        return clusters.load(NAME)[0]

    def refused(self, nodes: int = 4) -> str:
        """Why a job of that many nodes is refused before anything exists."""
        from mlflow_batchai.errors import BatchAIError

        cluster = None
        try:
            cluster = self.cluster()
            cluster.engine.check(nodes)
        except BatchAIError as error:
            return str(error)
        finally:
            if cluster:
                cluster.engine.close()
        raise AssertionError("it was not refused")


def running(world: Any, ranks: int = 2) -> Any:
    """Wait until all ranks of the newest run have said that they are up; the run."""
    until(world, lambda: world.runs() and "batchai.folder" in runs.tags_of(world.last))

    def up() -> bool:
        path = world.folder() / "stdouterr" / "stdout.txt"
        return path.exists() and path.read_text().count("up") == ranks

    until(world, up)
    until(world, lambda: world.last.info.status == "RUNNING")
    return world.last


def ended(world: Any, run: Any, seconds: float = 120) -> Any:
    """Wait until a run has ended; the run."""

    def now() -> Any:
        found = world.client.get_run(run.info.run_id)
        return found if found.info.status not in ("SCHEDULED", "RUNNING") else None

    return until(world, now, seconds)


def until(world: Any, condition: Callable[[], Any], seconds: float = 120) -> Any:
    """The first true value of a condition; AssertionError with all that the world's agents and followers have said."""
    try:
        return world.wait(condition, seconds)
    except AssertionError as error:
        places = [world.root, *(Path(runs.tags_of(run)["batchai.share"].removeprefix("file://")) for run in world.runs()[:1])]
        logs = [
            log for place in places for kind in ("followers/*.log", "logs/*.log", "execution*.log") for log in place.rglob(kind)
        ]
        said = "".join(f"\n{log}:\n{log.read_text()}" for log in dict.fromkeys(logs))
        raise AssertionError(f"{error}; statuses {[run.info.status for run in world.runs()]}{said}") from None
