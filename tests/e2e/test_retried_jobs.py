"""A job that fails starts again by itself: after a rank's failure, a lost node, a dead follower; and what ends that."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from command_line import Cli
from ssh_world import HereClient, ended, until

CANARY = "s3cr3t-canary"
# Says which attempt it is; fails in those that FAIL names, waits in those that WAIT names.
TOY = """
    import os, sys, time
    from mlflow_batchai.training import report
    attempt = os.environ["BATCHAI_ATTEMPT"]
    report.log(step=int(attempt), loss=1.0)
    report.log(step=0, start=float(attempt))
    print("attempt", attempt, "with", len(os.environ.get("TOKEN", "")), flush=True)
    while attempt in os.environ.get("WAIT", "").split() and not os.path.exists(os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/go"):
        time.sleep(0.05)
    if attempt in os.environ.get("FAIL", "").split():
        sys.exit(int(attempt) + 2)
"""


def project(world: Any, fail: str = "", wait: str = "", secret: bool = False, nodes: int = 1, **document: Any) -> Path:
    properties: dict[str, Any] = {
        "nodeCount": nodes,
        "environmentVariables": [{"name": "FAIL", "value": fail}, {"name": "WAIT", "value": wait}],
    }
    if secret:
        properties["secrets"] = [{"name": "TOKEN", "value": CANARY}]
    if nodes > 1:
        properties["horovodSettings"] = {}
    return Path(world.project(TOY, batchai=json.dumps({**document, "properties": properties})))


def trains(world: Any, run: Any, attempt: int, ranks: int = 1) -> None:
    """Wait until all ranks of an attempt have said so, and wait."""
    path = world.folder(run) / "stdouterr" / ("" if attempt == 1 else f"attempt-{attempt}") / "stdout.txt"
    until(world, lambda: path.exists() and path.read_text().count("with") == ranks)


def test_a_rank_that_fails_once(world: Any) -> None:
    """The job goes on in its run and folder, with its secret; what was stored stands; who watches is told."""
    result = world.run(project(world, fail="1", secret=True, retries=2))
    assert result.returncode == 0, result.stderr
    why = "rank 0 on node-0 exited with code 3"
    assert f"batchai: attempt 1 ended: {why}; the job starts again, as attempt 2 of at most 3\n" in result.stderr
    run = world.last
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("FINISHED", "2")
    assert "batchai.reason" not in run.data.tags
    assert world.points("loss", run) == [(1, 1.0), (2, 1.0)] and world.points("start", run) == [(0, 1.0)]
    assert f"attempt 1 ended: {why}" in run.data.tags["batchai.notes"]
    logs = {"stdout.txt": "attempt 1 with 13\n", "attempt-2/stdout.txt": "attempt 2 with 13\n"}
    for path, text in logs.items():
        assert world.log(path) == world.artifact(f"logs/{path}") == text
    for file in world.home.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file


def test_a_job_that_waits_for_its_next_attempt_is_terminated(world: Any, here: HereClient, cli: Cli) -> None:
    """After two that failed at once there is a pause before each attempt, which grows: a job's end doesn't wait for it."""
    run = here.submit(project(world, fail=" ".join(map(str, range(1, 60))), retries=50))

    def reason() -> str:
        return str(world.client.get_run(run.info.run_id).data.tags.get("batchai.reason"))

    until(world, lambda: re.fullmatch(r"attempt \d+ begins in \d+ s, as \d+ in a row failed at once", reason()), 120)
    assert cli("job", "terminate", "-y", run.data.tags["batchai.job"]).code == 0
    run = ended(world, run)
    assert run.info.status == "KILLED" and int(run.data.tags["batchai.attempt"]) >= 3


def test_a_node_of_low_priority_is_taken_away(world: Any, here: HereClient, cli: Cli) -> None:
    """That costs no retry: the job has none."""
    folder = world.home / "clusters"
    folder.mkdir(parents=True)
    (folder / "spot.yaml").write_text(json.dumps({"nodes": 2, "vmPriority": "lowpriority"}))
    run = here.submit(project(world, wait="1", nodes=2, cluster="spot"))
    trains(world, run, 1, ranks=2)
    world.agents()[1].kill()
    run = ended(world, run)
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("FINISHED", "2"), run.data.tags
    assert "attempt 1 ended: node-1 was lost" in run.data.tags["batchai.notes"]
    assert [one["retriesLeft"] for one in cli.json("job", "show", run.data.tags["batchai.job"])["attempts"]] == [0, 0]


def test_a_secret_that_nobody_has_any_more(world: Any, here: HereClient, cli: Cli) -> None:
    """The follower is killed, and the rank fails: the job waits until somebody attaches who has the secret."""
    run = here.submit(project(world, fail="1", wait="1", secret=True, retries=1))
    name = run.data.tags["batchai.job"]
    trains(world, run, 1)
    assert world.lose_followers() == 1
    (world.home / "share" / "go").touch()
    waits = "waiting for attach (needs BATCHAI_SECRET_TOKEN)"
    refused = cli("job", "attach", name)
    assert refused.code == 1 and f"job {name}: {waits}" in refused.err
    until(world, lambda: not world.followers())
    found = world.client.get_run(run.info.run_id)
    assert (found.info.status, found.data.tags["batchai.reason"]) == ("SCHEDULED", waits)
    assert cli.json("job", "show", name)["reason"] == waits
    attached = cli("job", "attach", name, BATCHAI_SECRET_TOKEN=CANARY)
    assert attached.code == 0, attached.err
    run = ended(world, run)
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("FINISHED", "2")
    assert world.log("attempt-2/stdout.txt", run) == "attempt 2 with 13\n"
    assert re.search(r"attempt 1 ended: rank 0 on node-0 exited with code 3", run.data.tags["batchai.notes"])
