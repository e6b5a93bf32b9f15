"""More than one attempt of a job: after its failure, and in place of one that made room, in one run and one folder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlflow_batchai import attempts, clusters, lookup, runner, runs
from mlflow_batchai.errors import JobError

OUTPUT = "properties: {nodeCount: %d, outputDirectories: [{id: OUT, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share}]%s}"
# Each step is one line of its checkpoint; what the test puts into the folder says when to fail, wait or go on.
TOY = """
    import os, pathlib, sys, time
    from mlflow_batchai.training import report
    out = pathlib.Path(os.environ["AZ_BATCHAI_OUTPUT_OUT"])
    checkpoint = out / "checkpoint"
    done = len(checkpoint.read_text().split()) if checkpoint.exists() else 0
    print("from step", done, "secret", os.environ.get("TOKEN"), flush=True)
    for step in range(max(0, done - 1), 4):  # the last one again, as a script does that saves before it reports
        report.log(step=step, loss=10.0 * done + step)
        with open(checkpoint, "a") as file:
            file.write(f"{step}\\n" if step >= done else "")
        while step == 1 and not (out / "go").exists():
            time.sleep(0.05)
        if step == 1 and (out / "fail").exists() and not done:
            sys.exit(3)
    print("done", flush=True)
"""


@pytest.fixture
def here(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process as a client of the world."""
    for name in ("BATCHAI_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, world.environment[name])
    monkeypatch.chdir(world.cwd)
    return runs.absolute(world.environment["MLFLOW_TRACKING_URI"], world.cwd)


def points(world: Any) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in world.client.get_metric_history(world.last.info.run_id, "loss")]


def test_a_retry_goes_on_from_the_checkpoint(world: Any, here: Any) -> None:
    secrets = ", secrets: [{name: TOKEN, value: s3cr3t-canary}]"
    project = world.project(TOY, batchai=OUTPUT % (1, secrets))
    process = world.start(world.command(project))
    world.wait(lambda: world.runs() and world.last.info.status == "RUNNING")
    run = world.last
    outputs = world.folder(run) / "outputs"
    world.wait(lambda: (outputs / "checkpoint").exists())
    (outputs / "fail").touch()
    (outputs / "go").touch()
    assert process.wait(60) == 1
    failed = world.last
    assert (failed.info.status, failed.data.tags["batchai.exitCode"]) == ("FAILED", "3")

    found = lookup.find(run.info.run_id, here)
    cluster, _ = clusters.load("local")
    refused = world.batchai("job", "retry", run.info.run_id)
    assert refused.returncode == 1 and "set BATCHAI_SECRET_TOKEN" in refused.stderr, refused.stderr
    assert world.last.info.status == "FAILED"
    retried = world.call([str(world.command("")[0]).replace("mlflow", "batchai"), "job", "retry", run.info.run_id], BATCHAI_SECRET_TOKEN="s3cr3t-canary")
    assert retried.returncode == 0, retried.stderr
    shown = json.loads(retried.stdout)
    assert (shown["attempt"], shown["executionState"], shown["runStatus"]) == (2, "queued", "SCHEDULED")
    assert runner.wait(found, print).execution_state == "failed"  # what it was opened for
    now = lookup.find(run.info.run_id, here)
    assert now.job.attempt == 2
    assert runner.wait(now, print).execution_state == "succeeded"
    run = world.last
    tags = run.data.tags
    assert run.info.status == "FINISHED" and run.info.end_time > failed.info.end_time
    assert (tags["batchai.attempt"], tags["batchai.exitCode"], "batchai.reason" in tags) == ("2", "0", False)
    # Trained again: counted, and not stored again.
    assert points(world) == [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0)]
    assert "1 metric values came for a step that had one" in tags["batchai.notes"]
    assert world.log() == "from step 0 secret s3cr3t-canary\n"
    assert world.log("attempt-2/stdout.txt") == "from step 2 secret s3cr3t-canary\ndone\n"
    for name, text in (("stdout.txt", world.log()), ("attempt-2/stdout.txt", world.log("attempt-2/stdout.txt"))):
        assert world.artifact(f"stdouterr/{name}") == text
    with pytest.raises(JobError, match="has succeeded; only a job that has not can be retried"):
        attempts.retry(now, cluster)
    world.wait_gone()
