"""The tutorial's steps and its own job document on four nodes over SSH, its file share Azure's; the script is a toy."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer
from command_line import Cli
from ssh_world import on_servers, until
from sshd import SshNodes

pytestmark = pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this machine has no FUSE, which rclone mounts with")

DOCUMENT = Path(__file__).parents[2] / "examples" / "tutorial" / "job.json"
CLUSTER = "nc6cluster"
JOB = "cifar_distributed"
IN = ("-e", "cifar", "-w", "myworkspace")
# Takes the arguments of the tutorial's document; its second epoch begins when a file comes to the share.
SCRIPT = """
    import argparse, os, pathlib, time
    parser = argparse.ArgumentParser()
    for name in ("--data", "--epochs", "--output"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    rank = int(os.environ["HOROVOD_RANK"])
    print(f"rank {rank} of {os.environ['HOROVOD_SIZE']}: Epoch 1/2", flush=True)
    while not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.1)
    if rank == 0:
        print("Epoch 2/2, ümlaut", flush=True)
        pathlib.Path(arguments.output, "cifar_cnn.h5").write_bytes(b"\\x89HDF" + bytes(100_000))
"""
MODEL = b"\x89HDF" + bytes(100_000)


def table(cli: Cli, *arguments: str) -> list[dict[str, str]]:
    """Rows of a table by their titles; no cell of theirs is empty."""
    said = cli(*arguments, "--output", "table")
    assert said.code == 0, said
    titles, _, *rows = (re.split(r" {2,}", line.strip()) for line in said.out.splitlines())
    return [dict(zip(titles, row, strict=True)) for row in rows]


def files(cli: Cli, identity: str) -> dict[str, dict[str, Any]]:
    """What ``job file list`` shows, by name."""
    found: list[dict[str, Any]] = cli.json("job", "file", "list", "-j", JOB, *IN, "-d", identity)
    return {file["name"]: file for file in found}


def fetched(url: str) -> bytes:
    """What anyone with the address gets."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        content: bytes = answer.read()
    return content


def test_from_first_to_last(cli: Cli, ssh_servers: SshNodes, azure: AzureServer) -> None:
    world = cli.world
    for name in [name for name in world.environment if name.startswith("AZURE_")]:
        del world.environment[name]
    # All in one variable, as Azure's portal gives it.
    parts = {"AccountName": azure.account, "AccountKey": azure.key, "FileEndpoint": azure.endpoint}
    world.environment["AZURE_STORAGE_CONNECTION_STRING"] = ";".join(f"{name}={value}" for name, value in parts.items())
    share = azure.root / "file" / "myshare"
    (world.root / "share").mkdir()
    said = []

    def step(*arguments: str | Path) -> Any:
        done = cli(*arguments)
        assert done.code == 0, done
        said.append(done.err)
        return json.loads(done.out) if done.out else None

    step("workspace", "create", "-n", "myworkspace", "-g", "batchai.horovod", "-l", "eastus")
    step("experiment", "create", "-n", "cifar", "-w", "myworkspace", "-g", "batchai.horovod")

    described = {
        "engine": "ssh",
        "share": str(world.root / "share"),
        **on_servers(ssh_servers, world),
        "python": sys.executable,
    }
    (world.cwd / "cluster.json").write_text(json.dumps(described))
    created = step(
        *("cluster", "create", "-n", CLUSTER, "-w", "myworkspace", "-g", "batchai.horovod", "-f", "cluster.json"),
        *("-s", "STANDARD_NC6", "--vm-priority", "lowpriority"),
    )
    assert created["scaleSettings"]["manual"]["targetNodeCount"] == 4
    (row,) = table(cli, "cluster", "show", "-n", CLUSTER, "-w", "myworkspace", "-g", "batchai.horovod")
    assert (row["State"], row["Idle"], row["Workspace"], row["VM Size"]) == ("steady", "4", "myworkspace", "STANDARD_NC6")

    assert step("storage", "share", "create", "-n", "myshare") == {"created": True}
    assert step("storage", "directory", "create", "-s", "myshare", "-n", "cifar") == {"created": True}
    (world.cwd / "cifar_cnn_distributed.py").write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    step("storage", "file", "upload", "-s", "myshare", "--source", "cifar_cnn_distributed.py", "--path", "cifar")
    assert (share / "cifar" / "cifar_cnn_distributed.py").is_file()

    submitted = ("job", "create", "-n", JOB, "-c", CLUSTER, *IN, "-g", "batchai.horovod", "--config-file", str(DOCUMENT))
    assert step(*submitted)["executionState"] in ("queued", "running")
    stream = world.start(
        [str(Path(sys.executable).with_name("batchai")), "job", "file", "stream", "-j", JOB, *IN, "-f", "stdout.txt"]
    )
    assert stream.stdout is not None
    first = [stream.stdout.readline() for _ in range(4)]
    wanted = [f"[{rank}] rank {rank} of 4: Epoch 1/2\n" for rank in range(4)]
    assert sorted(first) == wanted, stream.communicate()[1] if "" in first else first
    until(world, lambda: step("job", "show", "-n", JOB, *IN, "--query", "executionState") == "running")
    counts = step("cluster", "show", "-n", CLUSTER, "-w", "myworkspace", "--query", "nodeStateCounts")
    assert (counts["runningNodeCount"], counts["idleNodeCount"]) == (4, 0)
    assert {row["IP"] for row in table(cli, "job", "node", "list", "-j", JOB, *IN)} == {
        ssh_servers[number].address for number in range(4)
    }
    (world.cwd / "go").touch()
    step("storage", "file", "upload", "-s", "myshare", "--source", "go", "--path", "cifar/")
    rest, noted = stream.communicate(timeout=120)
    assert (stream.returncode, rest) == (0, "[0] Epoch 2/2, ümlaut\n"), noted

    step("job", "wait", "-n", JOB, *IN)
    assert world.client.get_run(step("job", "show", JOB, *IN, "--query", "runId")).data.params["epochs"] == "24"
    names = {row["Name"] for row in table(cli, "job", "file", "list", "-j", JOB, *IN)}
    assert {"stdout.txt", "stdout-0.txt", "stderr.txt", "execution-node-3.log", "stdout-job_prep-node-2.txt"} <= names
    logs, models = files(cli, "stdouterr"), files(cli, "MODEL")
    for file in [*logs.values(), *models.values()]:
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:.]+\+00:00", file["lastModified"]), file
    assert list(models) == ["cifar_cnn.h5"] and models["cifar_cnn.h5"]["contentLength"] == len(MODEL)
    assert models["cifar_cnn.h5"]["downloadUrl"].startswith(azure.endpoint)
    assert fetched(models["cifar_cnn.h5"]["downloadUrl"]) == MODEL
    assert fetched(logs["stdout.txt"]["downloadUrl"]).decode() == "".join(first) + rest

    segment = step("job", "show", "-n", JOB, *IN, "--query", "jobOutputDirectoryPathSegment")
    path = f"{segment}/outputs/Models/cifar_cnn.h5"
    step("storage", "file", "download", "-s", "myshare", "--path", path, "--dest", "cifar_cnn.h5")
    assert (world.cwd / "cifar_cnn.h5").read_bytes() == (share / path).read_bytes() == MODEL
    # The document's stdOutErrPathPrefix lies on that share, the control share elsewhere: logs come there at the end.
    copied = share / segment / "stdouterr" / "stdout.txt"
    until(world, lambda: copied.is_file() and copied.read_text(encoding="utf-8").endswith(rest))

    resized = cli("cluster", "resize", "-n", CLUSTER, "-w", "myworkspace", "--target", "0")
    assert resized.code == 0 and f"the machines of cluster '{CLUSTER}' keep running" in resized.err
    assert json.loads(resized.out)["currentNodeCount"] == 0

    step("job", "delete", "-n", JOB, *IN, "-y")
    step("storage", "share", "delete", "-n", "myshare", "-y")
    step("workspace", "delete", "-n", "myworkspace", "-y")
    assert not share.exists()
    for noun, name in (("job", JOB), ("cluster", CLUSTER), ("workspace", "myworkspace")):
        assert cli(noun, "show", name).code == 3
    assert not [line for line in said if "is the directory" in line], "no directory stands for the account"
    until(world, lambda: not world.processes())
    written = [file for place in (world.root, azure.root) for file in place.rglob("*") if file.is_file()]
    assert not [file for file in written if azure.key.encode() in file.read_bytes()]
    assert azure.key not in "".join(said)
    assert str(world.root) not in Path("/proc/self/mountinfo").read_text()
