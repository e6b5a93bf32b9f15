"""Whole jobs on four nodes over SSH whose share is an Azure file share: trained, cut off, and no secret anywhere."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import psutil
import pytest
from azure_server import AzureServer
from ssh_world import NAME, HereClient, config, describe, ended, on_servers, until
from sshd import SshNodes

DOCUMENT = json.loads((Path(__file__).parents[2] / "examples" / "azure_share" / "job.json").read_text(encoding="utf-8"))
INPUTS = [{"id": "DATA", "path": "$AZ_BATCHAI_JOB_MOUNT_ROOT/external/data"}]

pytestmark = pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this machine has no FUSE, which rclone mounts with")

TOY = """
    import os, pathlib, sys, time
    from mlflow_batchai.training import report
    rank = int(os.environ["BATCHAI_RANK"])
    data = pathlib.Path(os.environ["AZ_BATCHAI_INPUT_DATA"], "numbers.bin").read_bytes()
    assert len(data) == 3_000_000 and data == bytes(3_000_000)
    model = pathlib.Path(os.environ["AZ_BATCHAI_OUTPUT_MODEL"])
    for step in range(5):
        print(f"rank {rank} step {step}", flush=True)
        if rank == 0:
            report.log(step=step, loss=1 / (step + 1))
        with open(model / f"history-{rank}.csv", "a") as file:   # append, as Keras' CSVLogger does
            file.write(f"{step}\\n")
        time.sleep(0.3)
    if rank == 0:
        temporary = model / "model.h5.tmp"
        temporary.write_bytes(b"\\x89HDF" + bytes(2_000_000))
        temporary.rename(model / "model.h5")
"""


@pytest.fixture
def account(azure: AzureServer, world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    """The endpoint, healthy, with an empty share ``batchai``; the user has its key in his environment."""
    for name, value in (("ACCOUNT", azure.account), ("KEY", azure.key)):
        world.environment[f"AZURE_BATCHAI_STORAGE_{name}"] = value
        monkeypatch.setenv(f"AZURE_BATCHAI_STORAGE_{name}", value)
    share = azure.share("batchai")
    azure.reset()
    yield azure
    azure.fail(0)
    for path in sorted(share.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def on_azure(account: AzureServer, world: Any, servers: SshNodes, **changes: Any) -> dict[str, Any]:
    """A cluster document whose control share is a folder of the Azure share."""
    endpoint = account.endpoint.replace(account.account, "ACCOUNT")
    settings = {"share": account.url("batchai", "team"), "mount": "rclone", "fileEndpoint": endpoint, "containers": "ignore"}
    return describe(world, {**on_servers(servers, world), **settings}, **changes)


def share_of(account: AzureServer) -> Path:
    return account.share("batchai")


def mounts_below(folder: Path) -> list[str]:
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]


def document(world: Any, **properties: Any) -> str:
    """``--backend-config`` that names the cluster and the published document, kept in a file as its user would."""
    path = world.root / "job.json"
    path.write_text(json.dumps({**DOCUMENT, "cluster": NAME, "properties": {**DOCUMENT["properties"], **properties}}))
    return json.dumps({"config": str(path)})


def test_an_unsteady_service(world: Any, ssh_servers: SshNodes, account: AzureServer) -> None:
    """One request in ten fails, for agents, mounts and client alike: the job doesn't notice, and nothing is lost or doubled."""
    on_azure(account, world, ssh_servers)
    data = share_of(account) / "data"
    data.mkdir()
    (data / "numbers.bin").write_bytes(bytes(3_000_000))
    account.fail(0.1)
    result = world.run(world.project(TOY), "--backend-config", document(world, inputDirectories=INPUTS), timeout=150)
    account.fail(0)
    assert result.returncode == 0, result.stderr
    run = world.last
    assert world.points("loss", run) == [(step, pytest.approx(1 / (step + 1))) for step in range(5)]
    for rank in range(4):
        lines = [f"rank {rank} step {step}" for step in range(5)]
        assert world.artifact(f"logs/stdout-{rank}.txt").splitlines() == lines
        assert world.artifact(f"outputs/MODEL/history-{rank}.csv").split() == ["0", "1", "2", "3", "4"]
        assert [line.removeprefix(f"[{rank}] ") for line in result.stdout.splitlines() if f"rank {rank} " in line] == lines
    assert world.artifact_file("outputs/MODEL/model.h5").read_bytes() == b"\x89HDF" + bytes(2_000_000)
    assert any(request.status in (0, 429, 503) for request in account.requests())
    world.wait_gone()
    assert mounts_below(world.root) == []


def test_a_share_that_takes_no_more_of_logs(world: Any, ssh_servers: SshNodes, account: AzureServer) -> None:
    """Azure's quota can refuse the data of a file that was made longer: its lines are in the job's events as well."""
    on_azure(account, world, ssh_servers)
    says = "import time\nfor n in range(600):\n    print('line', n, flush=True)\n    time.sleep(0.02)"
    process = world.start(world.command(world.project(says, batchai=config(2))))
    until(world, lambda: any("line" in path.read_text() for path in share_of(account).rglob("stdout-1.txt")))
    account.fail(1.0, kinds=("full",), path="/stdouterr/", comp="range")
    _, err = process.communicate(timeout=120)
    account.fail(0)
    assert process.returncode == 0, err
    assert any(request.status == 403 for request in account.requests())
    lines = [f"line {number}" for number in range(600)]
    assert "batchai.complete" not in world.last.data.tags, world.last.data.tags.get("batchai.notes")
    for rank in (0, 1):
        assert world.artifact(f"logs/stdout-{rank}.txt").splitlines() == lines
    joined = world.artifact("logs/stdout.txt").splitlines()
    assert sorted(joined) == sorted(f"[{rank}] {line}" for rank in (0, 1) for line in lines)
    short = next(share_of(account).rglob("stdout-1.txt")).read_bytes()
    assert short.count(b"\n") < 600
    world.wait_gone()


LOGS_BY_MLFLOW = """
    import os
    import mlflow
    rank = int(os.environ["BATCHAI_RANK"])
    with mlflow.start_run():
        for value in (3, 2, 1):
            mlflow.log_metric("loss", value + 10 * rank)
        with open("a: b?.bin", "wb") as file:
            file.write(bytes([rank]) * 3_000_000)
        mlflow.log_artifact("a: b?.bin", "d")
        os.remove("a: b?.bin")
        mlflow.log_text("first", "d/rewritten.txt")
        mlflow.log_text("later", "d/rewritten.txt")
        assert mlflow.artifacts.load_text(mlflow.get_artifact_uri("d/rewritten.txt")) == "later"

        class Echo(mlflow.pyfunc.PythonModel):
            def predict(self, context, model_input: list[str]) -> list[str]:
                return model_input

        mlflow.pyfunc.log_model(name="net", python_model=Echo(), pip_requirements=[])
"""


def test_a_script_that_uses_mlflow(world: Any, ssh_servers: SshNodes, account: AzureServer, here: HereClient) -> None:
    """What two ranks log by MLflow goes through their mounts; rclone sends it a while after it was told of."""
    import mlflow
    from mlflow.utils.file_utils import local_file_uri_to_path

    on_azure(account, world, ssh_servers)
    batchai = json.dumps({**json.loads(config(2)), "ranks": "all"})
    run = ended(world, here.submit(world.project(LOGS_BY_MLFLOW, batchai=batchai)))
    assert (run.info.status, run.data.tags.get("batchai.notes")) == ("FINISHED", None)
    assert sorted(world.points("rank_1/loss", run)) == [(0, 11.0), (0, 12.0), (0, 13.0)]
    for rank, prefix in enumerate(("", "rank_1/")):
        # MLflow's own download takes what is behind the question mark for a query.
        artifacts = Path(local_file_uri_to_path(run.info.artifact_uri))
        assert (artifacts / f"{prefix}d" / "a: b?.bin").read_bytes() == bytes([rank]) * 3_000_000
        assert world.artifact(f"{prefix}d/rewritten.txt") == "later"
    (output,) = run.outputs.model_outputs
    assert mlflow.pyfunc.load_model(f"models:/{output.model_id}").predict(["a"]) == ["a"]
    world.wait_gone()
    assert mounts_below(world.root) == []


# Secrets.


class Watching(threading.Thread):
    """Looks at all argument lists of this machine all the time."""

    def __init__(self, secrets: list[str]) -> None:
        super().__init__(daemon=True)
        self.secrets = secrets
        self.looks = 0
        self.found: list[str] = []
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    line = " ".join(process.cmdline())
                    if any(secret in line for secret in self.secrets):
                        self.found.append(line)
            self.looks += 1
            time.sleep(0.02)


@pytest.mark.parametrize("kind", ["key", "sas"])
def test_secrets(world: Any, ssh_servers: SshNodes, account: AzureServer, kind: str) -> None:
    """The account's key, or a SAS: in no argument list at any time, file, tag, log or message."""
    secrets = [account.key]
    if kind == "sas":
        sas = account.sas(permissions="rcwdl")
        signature = parse_qs(sas)["sig"][0]
        secrets += [signature, sas]
        for name in ("ACCOUNT", "KEY"):
            del world.environment[f"AZURE_BATCHAI_STORAGE_{name}"]
        world.environment.update(AZURE_STORAGE_ACCOUNT=account.account, AZURE_STORAGE_SAS_TOKEN=sas)
        on_azure(account, world, ssh_servers)
    else:
        on_azure(account, world, ssh_servers, credentials={"accountKey": account.key})
    share = {"azureFileUrl": account.url("batchai", "data"), "relativeMountPath": "data"}
    if kind == "key":
        share["credentials"] = {"accountKey": account.key}
    (share_of(account) / "data").mkdir()
    look = """
        import os, sys
        print("up", [name for name in os.environ if "sig=" in os.environ[name] or os.environ[name].endswith("==")])
    """
    project = world.project(look, batchai=config(2, mountVolumes={"azureFileShares": [share]}))
    watching = Watching(secrets)
    watching.start()
    result = world.run(project)
    watching.done.set()
    watching.join()
    assert result.returncode == 0, result.stderr
    assert watching.looks > 20 and watching.found == []
    assert result.stdout.count("up []") == 2, result.stdout
    said = result.stdout + result.stderr + json.dumps([world.last.data.tags, world.last.data.params])
    assert not any(secret in said for secret in secrets)
    own = {project / "batchai.yaml", world.home / "clusters" / f"{NAME}.yaml"}
    looked = [path for place in (world.root, account.root) for path in place.rglob("*") if path.is_file() and path not in own]
    assert len(looked) > 20
    held = [path for path in looked if any(secret.encode() in path.read_bytes() for secret in secrets)]
    # The endpoint has to know its own key.
    assert held == []
    world.wait_gone()


# What can't be used.
