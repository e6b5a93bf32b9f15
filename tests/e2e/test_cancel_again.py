"""Ending jobs more than once, in every way, at once, and when nobody relays them any more: each time the same comes of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from command_line import Cli

from mlflow_batchai.backend import BatchAISubmittedRun
from mlflow_batchai.client import lookup
from mlflow_batchai.tracking import runs

SLEEPER = '{"properties": {"nodeCount": 1, "stdOutErrPathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "customToolkitSettings": '
SLEEPER += '{"commandLine": "echo up; exec sleep 300"}}}'


def of(world: Any, name: str) -> Any:
    return next(run for run in world.runs() if run.data.tags["batchai.job"] == name)


def outcome(world: Any, name: str) -> tuple[Any, ...]:
    """All that another ending of a job could have changed."""
    run = of(world, name)
    requests = world.folder(run) / "batchai" / "requests"
    return run.info.status, run.info.end_time, run.data.tags["batchai.reason"], len(list(requests.iterdir()))


def test_each_job_ends_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits and one that runs; both have lost their followers."""
    world = cli.world
    monkeypatch.setenv("BATCHAI_HOME", str(world.home))  # what is called in this process has the commands' key
    (world.cwd / "job.json").write_text(SLEEPER, encoding="utf-8")
    cli("cluster", "create", "-n", "c", "-t", "1", "-o", "none")
    for name in ("runs", "waits"):
        assert cli("job", "create", "-n", name, "-c", "c", "-f", "job.json", "-o", "none").code == 0
    world.wait(lambda: of(world, "runs").info.status == "RUNNING")
    assert world.lose_followers() == 1
    assert cli.json("job", "show", "waits", "--query", "[executionState, follower.state]") == ["queued", "none"]
    assert "nobody relays job waits into its run: batchai job attach waits" in cli("job", "show", "waits").err

    # The one that waits: from the command line without waiting, and twice at once by MLflow's API.
    assert cli("job", "terminate", "waits", "-y", "--no-wait").code == 0
    store = runs.absolute(world.uri, world.cwd)
    handles = [BatchAISubmittedRun(lookup.find("waits", store)) for _ in range(2)]
    threads = [threading.Thread(target=handle.cancel) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [handle.get_status() for handle in handles] == ["KILLED", "KILLED"]
    ended = outcome(world, "waits")
    assert ended[0] == "KILLED"

    # The one that runs: by its tag, which nobody reads, and from the command line.
    world.client.set_tag(of(world, "runs").info.run_id, "batchai.cancel", "true")
    said = cli("job", "terminate", "runs", "-y")
    assert (said.code, "job runs: failed (" in said.err) == (0, True)
    both = {"runs": outcome(world, "runs"), "waits": ended}
    assert both["runs"][0] == "KILLED"
    world.wait(lambda: not world.processes())

    # And again, now that they have ended.
    for name in ("runs", "waits"):
        world.client.set_tag(of(world, name).info.run_id, "batchai.cancel", "true")
        said = cli("job", "terminate", name, "-y")
        assert (said.code, said.err) == (0, f"batchai: job {name} has ended already\n")
        BatchAISubmittedRun(lookup.find(name, store)).cancel()
    assert {name: outcome(world, name) for name in both} == both
    assert not world.processes()
