"""examples/ssh_cluster, command by command as it stands there, on four machines of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_text import commands
from netns import Machines, Setup, unavailable

from mlflow_batchai.tracking import runs

EXAMPLE = Path(__file__).parents[2] / "examples" / "ssh_cluster"
ADDRESSES = ["10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7"]

# What is not run as it stands, and what stands for it here.
STAND_INS = {
    "ssh-copy-id": "the machines have no password to log in with at first: the test puts the key there",
    "python3 -m venv": "the machines have no way to a package index: this environment stands for the one on the share",
    "pip install": "as above",
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    (tmp_path / "share").mkdir()
    with Machines(tmp_path / "machines", [Setup(share=tmp_path / "share")] * 4) as made:
        yield made


@pytest.mark.timeout(600)
def test_from_nothing_to_a_result(world: Any, machines: Machines, tmp_path: Path) -> None:
    home = tmp_path / "user"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    world.home = home / ".batchai"
    world.cwd = EXAMPLE.parents[1]
    variables = {
        "HOME": str(home),
        "BATCHAI_HOME": str(world.home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for name in ("SSH_AUTH_SOCK", "BATCHAI_SSH_PASSPHRASE", "BATCHAI_SSH_PASSWORD"):
        world.environment.pop(name, None)
    # OpenSSH asks the user database for home, not HOME; what its tools are told by path is replaced below.
    replaced = {"~": str(home), **dict(zip(ADDRESSES, (machine.address for machine in machines), strict=True))}

    def here(text: str) -> str:
        for word, value in replaced.items():
            text = text.replace(word, value)
        return text

    skipped = []
    for command in commands(EXAMPLE):
        stand_in = next((word for word in STAND_INS if word in command), None)
        if stand_in:
            skipped.append(stand_in)
            if stand_in == "ssh-copy-id":
                assert command.count("~/.ssh/batchai") == 1
                _let_in(machines, (home / ".ssh" / "batchai.pub").read_text(encoding="utf-8"))
            continue
        if command.startswith("mlflow run"):
            command = command.replace("epochs=12", "epochs=4")  # one epoch a rank: the example's numbers aren't the point here
        done = world.call(["bash", "-c", here(command)], timeout=400, **variables)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if command.startswith("cp "):
            path = world.home / "clusters" / "nc6cluster.yaml"
            text = here(path.read_text(encoding="utf-8"))
            text = text.replace("share: /mnt/share ", f"share: {tmp_path}/share ").replace("azbatch", machines.user)
            text = text.replace("/mnt/share/venv/bin/python", sys.executable)
            text += f"knownHosts: {home}/.ssh/known_hosts\n"
            path.write_text(text, encoding="utf-8")
        if command.startswith("batchai doctor"):
            assert "4 of 4 nodes are ready" in done.stdout, done.stdout
    assert set(skipped) == set(STAND_INS)
    run = world.last
    assert (run.info.status, run.data.tags["batchai.cluster"], runs.tags_of(run)["batchai.nodes"]) == (
        "FINISHED",
        "nc6cluster",
        "4",
    )
    assert run.data.metrics["test_accuracy"] > 0.8
    assert "batchai.model" in run.data.tags and "batchai.notes" not in run.data.tags
    assert [step for step, _ in world.points("val_accuracy", run)] == [0]
    logs = {Path(entry.path).name for entry in world.client.list_artifacts(run.info.run_id, "logs")}
    # Ranks but the first say nothing but what TensorFlow writes to standard error.
    assert all({f"stdout-{rank}.txt", f"stderr-{rank}.txt"} & logs for rank in range(4)), logs
    assert {f"execution-node-{node}.log" for node in range(4)} <= logs
    hosts = {machine.hostname for machine in machines}
    shown = world.call([str(Path(sys.executable).parent / "batchai"), "job", "show", run.data.tags["batchai.job"]], **variables)
    assert all(host in shown.stdout for host in hosts)
    for machine in machines:
        world.wait(lambda machine=machine: not machine.processes(), what=f"processes are left on {machine.hostname}")


def _let_in(machines: Machines, key: str) -> None:
    """What ssh-copy-id does, on machines that read one file of keys."""
    with Path(f"{machines.key_file}.pub").open("a", encoding="utf-8") as file:
        file.write(key)


def test_the_document_says_what_the_text_says() -> None:
    document = yaml.safe_load((EXAMPLE / "nc6cluster.yaml").read_text(encoding="utf-8"))
    assert document["hosts"] == ADDRESSES
    text = "\n".join(commands(EXAMPLE))
    assert document["keyFile"] in text and document["user"] in text and document["shareOnNodes"] in text
