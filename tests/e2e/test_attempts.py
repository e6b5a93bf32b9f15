"""More than one attempt of a job: after its failure, and in place of one that made room, in one run and one folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer
from command_line import Cli
from ssh_world import HereClient

from mlflow_batchai.tracking import runs

# Each step is one line of its checkpoint; what lies in its output folder says when to wait, fail or go on.
TOY = """
    import os, pathlib, sys, time
    from mlflow_batchai.training import report
    out = pathlib.Path(os.environ["AZ_BATCHAI_OUTPUT_OUT"])
    checkpoint = out / "checkpoint"
    done = len(checkpoint.read_text().split()) if checkpoint.exists() else 0
    print("from step", done, "with", len(os.environ.get("TOKEN", "")), flush=True)
    for step in range(max(0, done - 1), 4):  # the last one again, as who saves before he reports has to
        report.log(step=step, loss=10.0 * done + step)
        if step >= done:
            with open(checkpoint, "a") as file:
                file.write(f"{step}\\n")
        while step == 1 and not (out / "go").exists():
            time.sleep(0.05)
        if step == 1 and (out / "fail").exists() and not done:
            sys.exit(3)
    print("done", flush=True)
"""
EXPECTED = [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0)]


def toy(world: Any, name: str = "toy", **properties: Any) -> Path:
    """The project, for both nodes of the cluster ``two``."""
    output = {"id": "OUT", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share"}
    document = {
        "cluster": "two",
        "properties": {"nodeCount": 2, "customToolkitSettings": {}, "outputDirectories": [output], **properties},
    }
    return world.project(TOY, batchai=json.dumps(document), name=name)


def describe(world: Any, **document: Any) -> None:
    folder = world.home / "clusters"
    folder.mkdir(parents=True)
    (folder / "two.yaml").write_text(json.dumps({"nodes": 2, **document}))


@pytest.fixture
def share(azure: AzureServer, world: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control share, an Azure file share, of a cluster ``two``."""
    for name, value in (("ACCOUNT", azure.account), ("KEY", azure.key)):
        monkeypatch.setenv(f"AZURE_BATCHAI_STORAGE_{name}", value)
    folder = azure.share("attempts")
    endpoint = azure.endpoint.replace(azure.account, "ACCOUNT")
    where = {f"{azure.account}/attempts": str(folder)}
    describe(world, share=azure.url("attempts"), fileEndpoint=endpoint, mount="bind", mountedAt=where)
    return Path(folder)


def outputs(share: Path, run: Any) -> Path:
    return share / runs.tags_of(run)["batchai.folder"] / "outputs"


def test_a_retry_goes_on_from_the_checkpoint(world: Any, here: HereClient, cli: Cli) -> None:
    """``batchai job retry``: refused where there is nothing to retry, or a secret is missing; then the job's folder and run go on."""
    describe(world)
    run = here.submit(toy(world, secrets=[{"name": "TOKEN", "value": "s3cr3t-canary"}]))
    name = run.data.tags["batchai.job"]
    there = outputs(world.home / "share", run)
    there.mkdir(parents=True, exist_ok=True)
    early = cli("job", "retry", name)
    (there / "fail").touch()
    (there / "go").touch()
    assert (early.code, early.out) == (1, "")
    assert re.search(rf"job {name} is (queued|running); a job can be retried when it has ended", early.err)
    assert cli("job", "wait", name).code == 3
    failed = world.client.get_run(run.info.run_id)
    assert (failed.info.status, failed.data.tags["batchai.exitCode"]) == ("FAILED", "3")
    refused = cli("job", "retry", name)
    assert refused.code == 1 and f"job {name} needs what only its submitter had; set BATCHAI_SECRET_TOKEN" in refused.err
    unchanged = world.client.get_run(run.info.run_id)
    assert (unchanged.info, unchanged.data.tags) == (failed.info, failed.data.tags)

    shown = cli.json("job", "retry", "-n", run.info.run_id, BATCHAI_SECRET_TOKEN="s3cr3t-canary")
    assert (shown["name"], shown["attempt"], shown["runStatus"], shown["executionInfo"]) == (name, 2, "SCHEDULED", None)
    again = world.client.get_run(run.info.run_id)
    assert not {"batchai.exitCode", "batchai.errorCode", "batchai.reason"} & set(again.data.tags)
    streamed = cli("job", "file", "stream", "-j", name, "-f", "stdout.txt")
    assert streamed.out == "from step 2 with 13\ndone\n"
    assert cli("job", "wait", name).code == 0

    run = world.client.get_run(run.info.run_id)
    tags = run.data.tags
    assert run.info.status == "FINISHED" and run.info.end_time > failed.info.end_time
    assert (tags["batchai.attempt"], "batchai.exitCode" in tags, "batchai.reason" in tags) == ("2", False, False)
    # A step that was trained again is counted, and not stored again.
    assert world.points("loss", run) == EXPECTED
    assert "1 metric values came for a step that had one" in tags["batchai.notes"]
    logs = {"stdout.txt": "from step 0 with 13\n", "attempt-2/stdout.txt": streamed.out}
    for path, text in logs.items():
        assert world.log(path, run) == world.artifact(f"logs/{path}", run) == text
    for file in world.home.rglob("*"):
        assert not file.is_file() or b"s3cr3t-canary" not in file.read_bytes(), file
    assert cli("job", "logs", name).out == streamed.out
    assert cli("job", "logs", name, "--attempt", "1").out == logs["stdout.txt"]
    assert cli("job", "file", "stream", "-j", name, "-f", "stdout.txt", "--attempt", "1").out == logs["stdout.txt"]
    for arguments in ((), ("--attempt", "1")):
        assert "stdout.txt" in [file["name"] for file in cli.json("job", "file", "list", "-j", name, *arguments)]
    unknown = cli("job", "logs", name, "--attempt", "3")
    assert unknown.code == 3 and f"job {name} has no attempt 3; it has 2" in unknown.err
    late = cli("job", "retry", name)
    assert late.code == 1 and f"job {name} has succeeded; only a job that has not can be retried" in late.err
    assert cli("job", "retry", "nonsense").code == 3
