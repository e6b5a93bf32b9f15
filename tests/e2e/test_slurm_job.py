"""Whole jobs on a real Slurm of four nodes, which forgets a job two seconds after its end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli
from netns import unavailable
from slurm_daemons import SlurmDaemons, slurm_daemons
from ssh_world import WAITS, HereClient, config, describe, ended, running
from sshd import free_port

CIFAR = Path(__file__).parents[2] / "projects" / "cifar_horovod"
SECRET = "s3cr3t-canary-of-the-document"


@pytest.fixture(scope="module")
def slurm() -> Any:
    with slurm_daemons(4, MinJobAge="2", PreemptType="preempt/partition_prio", PreemptMode="CANCEL") as made:
        yield made


@pytest.fixture
def cluster(world: Any, slurm: SlurmDaemons) -> Any:
    """The cluster's document; nothing of the world's jobs stays on Slurm."""
    world.environment["SLURM_CONF"] = str(slurm.config)
    keys = {"engine": "slurm", "root": str(world.root / "node roots"), "exclusive": True}
    yield lambda **changes: describe(world, {**keys, **changes})
    world.wait(lambda: not slurm.ask("squeue", "-h"), what="jobs are left")


@pytest.fixture
def here(world: Any, monkeypatch: pytest.MonkeyPatch) -> HereClient:
    return HereClient(world, monkeypatch)


def go(world: Any) -> None:
    (world.root / "share" / "go").touch()


def test_four_nodes(world: Any, cluster: Any, here: HereClient) -> None:
    """Metrics, logs and the model are in MLflow; the secret is nowhere; nothing stays on the nodes."""
    cluster(gpusPerNode=2)
    train = """
        import os, pathlib
        from mlflow_batchai.training import report
        print("node", os.environ["BATCHAI_NODE"], "sees", os.environ["CUDA_VISIBLE_DEVICES"], "token", len(os.environ["TOKEN"]))
        report.log(step=0, loss=0.5)
        report.log(step=1, loss=0.25)
        if os.environ["HOROVOD_RANK"] == "0":
            pathlib.Path(os.environ["AZ_BATCHAI_OUTPUT_MODEL"], "model.txt").write_text("42")
    """
    outputs = [{"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": "models"}]
    limits = {"maxWallClockTime": "PT1H"}
    secrets = [{"name": "TOKEN", "value": SECRET}]
    batchai = config(4, outputDirectories=outputs, secrets=secrets, constraints=limits)
    run = ended(world, here.submit(world.project(train, batchai=batchai)))
    assert run.info.status == "FINISHED" and world.points("loss") == [(0, 0.5), (1, 0.25)]
    lines = world.artifact("logs/stdout.txt").splitlines()
    assert sorted(line.split("] ")[-1] for line in lines) == [f"node {node} sees 0 token {len(SECRET)}" for node in range(4)]
    assert world.artifact("outputs/MODEL/model.txt") == "42"
    own = world.root / "toy" / "batchai.yaml"
    files = [path for path in world.root.rglob("*") if path.is_file() and path != own]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    kept = [path.suffix for path in (world.root / "share" / ".batchai").glob("slurm-*/*")]
    assert sorted(kept) == [".out", ".pyz"]
    world.wait(lambda: not list((world.root / "node roots").iterdir()), what="the nodes' folders go")


def test_a_job_waits_for_its_nodes(world: Any, cluster: Any, here: HereClient, slurm: SlurmDaemons) -> None:
    """Its run is SCHEDULED, Slurm's reason is told, and it can be ended at once: no agent has to be waited for."""
    cluster()
    project = world.project(WAITS, batchai=config(4))
    first = here.submit(project)
    running(world, 4)
    run = here.submit(project)
    name = run.data.tags["batchai.job"]
    show = Cli(world).json
    world.wait(lambda: show("job", "show", name)["reason"].startswith("queued: PENDING (Resources)"))
    assert show("job", "show", name)["reason"].endswith(", 1 of 1 in the queue")
    assert world.client.get_run(run.info.run_id).info.status == "SCHEDULED"
    shown = Cli(world).json("cluster", "show", "-n", "nc6")
    assert (shown["currentNodeCount"], shown["scaleSettings"]) == (4, None)
    assert shown["nodeStateCounts"]["runningNodeCount"] == 4 and shown["allocationState"] == "steady"
    show("job", "terminate", name, "-y")
    assert ended(world, run).info.status == "KILLED"
    go(world)
    assert ended(world, first).info.status == "FINISHED"


def test_two_jobs_on_a_node_have_their_own_gpus(world: Any, cluster: Any, here: HereClient) -> None:
    cluster(exclusive=False, gpusPerNode=1, options=["--nodelist=n2"])
    script = WAITS.replace('"up"', '"up", "sees", os.environ["CUDA_VISIBLE_DEVICES"]')
    project = world.project(script, batchai=config(1))
    runs = []
    for _ in range(2):
        here.submit(project)
        runs.append(running(world, 1))
    go(world)
    assert [ended(world, run).info.status for run in runs] == ["FINISHED"] * 2
    assert sorted(world.log(run=run).split()[-1] for run in runs) == ["0", "1"]


def test_a_preempted_job_goes_on_as_a_new_one(world: Any, cluster: Any, here: HereClient, slurm: SlurmDaemons) -> None:
    cluster(partition="main")
    here.submit(world.project(WAITS, batchai=json.dumps({**json.loads(config(4)), "retries": 1})))
    run = running(world, 4)
    (first,) = slurm.ask("squeue", "-h", "-o", "%i").split()
    urgent = slurm.ask(
        "sbatch", "--parsable", "-p", "urgent", "-N", "4", "--exclusive", "-o", "none", "--wrap", "sleep 600"
    ).strip()
    jobs = world.wait(
        lambda: (found := slurm.ask("squeue", "-h", "-o", "%i").split()) and first not in found and len(found) == 2 and found
    )
    assert urgent in jobs
    slurm.ask("scancel", urgent)
    go(world)
    run = ended(world, run)
    assert (run.info.status, run.data.tags["batchai.attempt"]) == ("FINISHED", "2")


def test_scancel_by_hand(world: Any, cluster: Any, here: HereClient, slurm: SlurmDaemons) -> None:
    """The agents give the verdict before Slurm kills them, and leave nothing on their nodes; the ranks get their SIGTERM."""
    cluster()
    here.submit(world.project(WAITS, batchai=config(2)))
    run = running(world)
    slurm.ask("scancel", "--me")
    run = ended(world, run)
    assert run.info.status == "KILLED" and "was cancelled (scancel)" in run.data.tags["batchai.reason"]
    world.wait(lambda: not list((world.root / "node roots").iterdir()), what="the nodes' folders go")


def test_looking_into_nodes(
    world: Any, cluster: Any, here: HereClient, slurm: SlurmDaemons, capfd: pytest.CaptureFixture[str]
) -> None:
    """``doctor`` has a node for a moment; ``node exec`` gets into nodes of one's own jobs, with what Slurm gave these."""
    cluster(gpusPerNode=1)
    cli = Cli(world)
    # Programs are found as jobs find them there, not by the PATH of who asks.
    (bin := world.root / "bin").mkdir()
    (bin / "python3").write_text("#!/bin/sh\nexit 1\n")
    (bin / "python3").chmod(0o755)
    (world.root / ".bash_profile").write_text('PATH="/opt/a,b:$PATH"\n')
    search = {"PATH": f"{bin}:{world.environment['PATH']}", "HOME": str(world.root)}
    found = cli.json("doctor", "nc6", "-o", "json", **search)
    checks = {check["name"]: check["text"] for check in found["checks"]}
    assert list(checks) == ["reachable", "python", "training", "GPUs", "share", "folder"] and found["ready"] == 1, checks
    assert checks["reachable"].startswith("Slurm gave n") and checks["GPUs"].startswith("1")
    slurm.wait_idle()
    here.submit(world.project(WAITS, batchai=config(2)))
    run = running(world)
    (job, where), line = slurm.ask("squeue", "-h", "-o", "%i %N").split(), "echo $SLURM_JOB_ID $SLURMD_NODENAME; exit 3"
    capfd.readouterr()
    assert cli("job", "node", "exec", "-j", run.data.tags["batchai.job"], "-n", "node-1", "--exec", line).code == 3
    assert capfd.readouterr().out.split() == [job, "n1"] and where == "n[0-1]"
    assert cli("cluster", "node", "exec", "-c", "nc6", "-n", "n0", "--exec", line).code == 3
    refused = cli("cluster", "node", "exec", "-c", "nc6", "-n", "n3", "--exec", line)
    assert "no job of yours runs on node n3, and Slurm lets you on no other" in refused.err
    go(world)
    assert ended(world, run).info.status == "FINISHED"


def test_what_slurm_refuses(world: Any, cluster: Any, here: HereClient) -> None:
    """One sentence, and nothing is left: no run, no job in Slurm."""
    cluster()
    sentence = (
        "cluster 'nc6': Slurm refuses the job: allocation failure: Requested node configuration is not available; correct"
    )
    assert here.refused(5).startswith(sentence)
    cluster(partition="nope")
    refusal = r"Slurm refuses the job: allocation failure: Invalid partition name specified; .* --partition=nope --nodes=2\)"
    with pytest.raises(Exception, match=refusal):
        here.submit(world.project(batchai=config(2)))
    assert world.runs() == []


def test_eight_jobs_on_four_nodes(world: Any, cluster: Any, slurm: SlurmDaemons) -> None:
    """A sweep whose jobs Slurm queues: never more than four run at once."""
    cluster()
    train = """
        import os, sys, time
        from pathlib import Path
        from mlflow_batchai.training import report
        share = Path(os.environ["AZ_BATCHAI_MOUNT_ROOT"], "share")
        mine = share / ("up-" + sys.argv[1])
        mine.touch()
        while not (share / "go").exists():
            time.sleep(0.05)
        report.log(step=0, at_once=len(list(share.glob("up-*"))), lr=float(sys.argv[1]))
        mine.unlink()
    """
    mlproject = "name: toy\nentry_points:\n  main:\n    parameters: {lr: float}\n    command: python train.py {lr}\n"
    project, cli = world.project(train, mlproject, batchai=config(1)), Cli(world)
    values = [float(number) for number in range(1, 9)]
    grid = "lr=" + ",".join(map(str, values))
    said = cli("sweep", project, "-P", grid, "--parallel", "8", "--no-wait", "--run-name", "eight", "--metric", "lr")
    assert said.code == 0, said
    states = world.wait(lambda: len(found := slurm.ask("squeue", "-h", "-o", "%T").split()) == 8 and found)
    assert states.count("PENDING") >= 4
    world.wait(lambda: len(list((world.root / "share").glob("up-*"))) == 4)
    go(world)
    assert cli("sweep", "attach", "eight").code == 0
    jobs = [run for run in world.runs() if run.info.run_name != "eight"]
    assert sorted(run.data.metrics["lr"] for run in jobs) == values
    assert {run.info.status for run in jobs} == {"FINISHED"} and max(run.data.metrics["at_once"] for run in jobs) == 4


@pytest.mark.timeout(600)
def test_the_cifar_project_on_four_nodes(world: Any, cluster: Any) -> None:
    """``mlflow run`` of the real project: a rank a node; metrics, logs and a model that was tried are in MLflow."""
    cluster()
    asked = json.dumps({"cluster": "nc6", "properties": {"nodeCount": 4, "horovodSettings": {"processCount": 4}}})
    data = few_images(world.root / "few.npz")
    words = ("-P", f"data={data}", "-P", "epochs=8", "-P", "augment=false", "-P", "batch_size=16")
    result = world.run(CIFAR, *words, "--backend-config", asked, timeout=500)
    assert result.returncode == 0, result.stderr
    run = world.last
    assert run.info.status == "FINISHED"
    for metric in ("loss", "val_accuracy", "images_per_second"):
        assert [step for step, _ in world.points(metric)] == [0, 1], metric
    assert "4 ranks train 2 epochs each" in world.artifact("logs/stdout.txt")
    model = world.client.get_logged_model(run.data.tags["batchai.model"].removeprefix("models:/"))
    assert model.tags["batchai.modelCheck"].startswith("loaded and tried in ")
    world.wait(lambda: not list((world.root / "node roots").iterdir()), what="the nodes' folders go")


def few_images(path: Path) -> Path:
    """Random ones."""
    rng = np.random.default_rng(0)
    data = {f"x_{part}": rng.integers(0, 256, (count, 32, 32, 3), np.uint8) for part, count in (("train", 64), ("test", 8))}
    np.savez(path, **data, **{f"y{name[1:]}": np.arange(len(x), dtype=np.uint8)[:, None] % 10 for name, x in data.items()})
    return path


def test_without_slurm_here(
    world: Any, cluster: Any, here: HereClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        error = here.refused(1)
    assert "there is no sbatch on this machine; put Slurm's commands on its PATH, or name a login node" in error


def test_a_login_node_that_is_away(world: Any, cluster: Any, here: HereClient) -> None:
    """One sentence, and no run."""
    port = free_port(["127.0.0.1"])
    cluster(login=f"me@127.0.0.1:{port}")
    sentence = (
        f"^login node me@127.0.0.1:{port} .* refused the connection; check that sshd runs there and listens on port {port}$"
    )
    with pytest.raises(Exception, match=sentence):
        here.submit(world.project(batchai=config(2)))
    assert world.runs() == []


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
def test_a_share_that_a_node_does_not_see(world: Any, cluster: Any, here: HereClient, slurm: SlurmDaemons) -> None:
    """Its job ends at once, and the run says so; the secrets don't stay on the share."""
    cluster(options=["--nodelist=n3"])
    slurm.kill("n3")
    share = str(world.root / "share")
    slurm.start("n3", ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', share))
    try:
        slurm.wait_idle()
        run = ended(world, here.submit(world.project(batchai=config(1))))
    finally:
        slurm.kill("n3")
        slurm.start("n3")
        slurm.wait_idle()
    assert run.info.status == "FAILED" and run.data.tags["batchai.errorCode"] == "NodeSetupFailed"
    assert re.match(r"node-0 was lost: Slurm job \d+ has ended.*do Slurm's nodes see", run.data.tags["batchai.reason"])
    assert [path.suffix for path in (world.root / "share" / ".batchai").glob("slurm-*/*")] == [".pyz"]


def test_a_larger_cluster_is_slurms_business(world: Any, cluster: Any) -> None:
    cluster()
    for command in (("resize", "-t", "2"), ("auto-scale", "--min", "0", "--max", "2")):
        result = Cli(world)("cluster", command[0], "-n", "nc6", *command[1:])
        assert "slurm decides how many nodes there are" in result.err
