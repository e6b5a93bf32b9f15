"""examples/azure_share, command by command as it stands there, on four SSH servers and an endpoint that stand for machines and Azure."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from azure_server import AzureServer
from example_text import commands
from ssh_world import on_servers
from sshd import SshNodes

from mlflow_batchai.tracking import runs

EXAMPLE = Path(__file__).parents[2] / "examples" / "azure_share"

# What is not run as it stands, and why.
NOT_RUN = {
    "pip install": "this environment has the extra",
    "export ": "a shell of its own would forget it: the test puts both variables into every command's environment",
    "read -rs": "as above",
}


@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this machine has no FUSE, which rclone mounts with")
def test_from_nothing_to_a_result(world: Any, ssh_servers: SshNodes, azure: AzureServer, tmp_path: Path) -> None:
    """Four nodes mount the share by rclone and train; metrics, logs and the .h5 come back; nothing stays mounted."""
    share = azure.share("batchai")
    home = tmp_path / "user"
    world.home = home / ".batchai"
    world.cwd = EXAMPLE.parents[1]
    variables = {
        "HOME": str(home),
        "BATCHAI_HOME": str(world.home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "AZURE_BATCHAI_STORAGE_ACCOUNT": azure.account,
        "AZURE_BATCHAI_STORAGE_KEY": azure.key,
    }
    skipped = []
    for command in commands(EXAMPLE):
        if reason := next((word for word in NOT_RUN if command.startswith(word)), None):
            skipped.append(reason)
            continue
        if command.startswith("mlflow run"):
            command = command.replace("epochs=12", "epochs=8")  # two epochs a rank: the example's numbers aren't the point here
        done = world.call(["bash", "-c", command.replace("~", str(home))], timeout=280, **variables)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if command.startswith("cp "):
            path = world.home / "clusters" / "nc6azure.yaml"
            document = yaml.safe_load(path.read_text(encoding="utf-8"))
            # The machines, and the account's address: the job document is used as it is.
            document.update(on_servers(ssh_servers, world), share=azure.url("batchai"), python=sys.executable)
            document.update(user=ssh_servers.user, fileEndpoint=azure.endpoint.replace(azure.account, "ACCOUNT"))
            path.write_text(json.dumps(document), encoding="utf-8")
        if command.startswith("batchai doctor"):
            assert "4 of 4 nodes are ready" in done.stdout, done.stdout
    assert set(skipped) == set(NOT_RUN)
    assert "containers: ignore" in done.stderr
    run = world.last
    assert run.info.status == "FINISHED" and "batchai.notes" not in run.data.tags
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert [point.step for point in world.client.get_metric_history(run.info.run_id, name)] == [0, 1], name
    assert "4 ranks train 2 epochs" in world.artifact("logs/stdout.txt")
    saved = world.artifact_file("outputs/MODEL/saved_models/keras_cifar10_trained_model.h5")
    assert saved.read_bytes().startswith(b"\x89HDF")
    folder = share / runs.tags_of(run)["batchai.folder"]
    kept = folder / "outputs" / "models" / "saved_models" / "keras_cifar10_trained_model.h5"
    assert kept.read_bytes() == saved.read_bytes()
    assert (folder / "stdouterr" / "stdout.txt").read_text() == world.artifact("logs/stdout.txt")
    world.wait_gone()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_the_documents_say_what_the_text_says() -> None:
    cluster = yaml.safe_load((EXAMPLE / "nc6azure.yaml").read_text(encoding="utf-8"))
    job = json.loads((EXAMPLE / "job.json").read_text(encoding="utf-8"))
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    assert job["cluster"] == "nc6azure" and cluster["mount"] == "rclone" and cluster["containers"] == "ignore"
    for word in ("mystorage", "batchai"):
        assert word in cluster["share"] and word in text
