"""`batchai cluster create` and what it shows, lists and deletes, without a job."""

from __future__ import annotations

import json
import re
import stat
from typing import Any

import pytest
import yaml
from command_line import Cli

CLUSTER: dict[str, Any] = yaml.safe_load("""
properties:
  vmSize: STANDARD_NC6
  scaleSettings: {manual: {targetNodeCount: 3, nodeDeallocationOption: terminate}}
  userAccountSettings: {adminUserName: demo, adminUserPassword: hush-hush}
  nodeSetup: {mountVolumes: {azureFileShares: [{accountName: acc, azureFileUrl: "https://acc.file.core.windows.net/files",
    credentials: {accountKey: "aHVzaA=="}, relativeMountPath: files}]}}
""")


def document(cli: Cli, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((cli.world.home / "clusters" / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


def written(cli: Cli, data: Any, name: str = "cluster.json") -> str:
    (cli.world.cwd / name).write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return name


def counts(cli: Cli, name: str) -> str:
    """Idle, running, preparing, leaving, unusable."""
    found = cli.json("cluster", "show", "-n", name)
    numbers = found["nodeStateCounts"]
    assert found["currentNodeCount"] == sum(numbers.values())
    return " ".join(str(numbers[f"{state}NodeCount"]) for state in ("idle", "running", "preparing", "leaving", "unusable"))


def test_the_tutorials_cluster(cli: Cli) -> None:
    cli("workspace create -n myworkspace -l eastus")
    where = "-w myworkspace -g batchai.horovod"
    made = cli.json(f"cluster create -n nc6 {where} -s STANDARD_NC6 -t 4 --vm-priority lowpriority")
    said = cli(f"cluster create -n other {where} -s A -u me -p hush-hush --generate-ssh-keys -t 1")
    assert said.err.count("\n") == 1
    assert "--vm-size, --generate-ssh-keys, --user-name, --password play no part with engine: local" in said.err
    assert "hush-hush" not in (cli.world.home / "clusters" / "other.yaml").read_text()
    shown = cli.json(f"cluster show nc6 {where}")
    assert made == shown, "its nodes have been told, and asked"
    assert (shown["allocationState"], shown["nodeStateCounts"]["idleNodeCount"]) == ("steady", 4)
    group = "/subscriptions/local/resourceGroups/batchai.horovod/providers/Microsoft.BatchAI"
    assert (shown["id"], shown["type"]) == (
        f"{group}/workspaces/myworkspace/clusters/nc6",
        "Microsoft.BatchAI/workspaces/clusters",
    )
    assert (shown["location"], shown["resourceGroup"], shown["workspace"]) == ("eastus", "batchai.horovod", "myworkspace")
    assert (shown["vmSize"], shown["vmPriority"], shown["engine"]) == ("STANDARD_NC6", "lowpriority", "local")
    for key in ("creationTime", "provisioningStateTransitionTime", "allocationStateTransitionTime"):
        assert shown[key].endswith("+00:00")
    assert shown["scaleSettings"]["manual"] == {"targetNodeCount": 4, "nodeDeallocationOption": "requeue"}
    assert cli(f"cluster show -n nc6 {where} -o table").out.splitlines() == [
        "Name  Resource Group   Workspace    VM Size       State   Idle  Running  Preparing  Leaving  Unusable",
        "----  ---------------  -----------  ------------  ------  ----  -------  ---------  -------  --------",
        "nc6   batchai.horovod  myworkspace  STANDARD_NC6  steady  4     0        0          0        0",
    ]
    for options, names in (("", ["local", "nc6", "other"]), ("-w myworkspace", ["nc6", "other"]), ("-w default", ["local"])):
        assert cli.json(f"cluster list {options} --query [].name") == names
    elsewhere = cli("cluster show -n nc6 -w default")
    assert elsewhere.code == 3 and "no cluster 'nc6' in workspace 'default' (it is in 'myworkspace')" in elsewhere.err


def test_a_document_with_options_over_it(cli: Cli) -> None:
    file = written(cli, CLUSTER)
    made = cli.json("cluster", "create", "-n", "c", "-f", file)
    assert made["scaleSettings"]["manual"] == {"targetNodeCount": 3, "nodeDeallocationOption": "terminate"}
    assert made["userAccountSettings"] == {"adminUserName": "demo", "adminUserSshPublicKey": None}
    [share] = made["nodeSetup"]["mountVolumes"]["azureFileShares"]
    assert share["credentials"] == {"accountKey": None, "accountKeySecretReference": None}
    path = cli.world.home / "clusters" / "c.yaml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert document(cli, "c") == CLUSTER
    options = f"-f {file} --min 1 --max 4 -s X -i UbuntuLTS -k 'ssh-rsa AAAA' --subnet /s --share here"
    assert cli(f"cluster create -n d {options} --python python3").code == 1  # no program
    assert not (cli.world.home / "clusters" / "d.yaml").exists()
    shown = cli.json(f"cluster create -n d {options}")
    scale = {"manual": None, "autoScale": {"minimumNodeCount": 1, "maximumNodeCount": 4, "initialNodeCount": 0}}
    assert (shown["scaleSettings"], shown["vmSize"], shown["subnet"]) == (scale, "X", {"id": "/s"})
    assert shown["userAccountSettings"]["adminUserSshPublicKey"] == "ssh-rsa AAAA"
    assert shown["virtualMachineConfiguration"]["imageReference"]["offer"] == "UbuntuServer"
    assert document(cli, "d")["share"] == str(cli.world.cwd / "here")
    assert counts(cli, "d") == "1 0 0 0 0"


def test_volumes(cli: Cli) -> None:
    """``--use-auto-storage`` among them, a traceback of `az batchai` (azure-cli 7129)."""
    account = "--storage-account-name acc --storage-account-key aHVzaA=="
    mounts = f"{account} --afs-name files --bfs-name blobs --bfs-mount-path b --nfs n"
    said = cli(f"cluster create -n c {mounts}")
    assert said.code == 1 and "doesn't say where the file server n is; add it to fileServers" in said.err
    (cli.world.cwd / "servers.yaml").write_text("fileServers: {n: 'host:/data'}", encoding="utf-8")
    said = cli(f"cluster create -n c -f servers.yaml {mounts}")
    assert (said.code, said.err.count("\n")) == (0, 1)
    assert "--storage-account-key is not kept" in said.err and "aHVzaA" not in json.dumps(document(cli, "c"))
    assert document(cli, "c")["nodeSetup"]["mountVolumes"] == {
        "azureFileShares": [{"azureFileUrl": "https://acc.file.core.windows.net/files", "relativeMountPath": "afs"}],
        "azureBlobFileSystems": [{"containerName": "blobs", "relativeMountPath": "b", "accountName": "acc"}],
        "fileServers": [{"fileServer": {"id": "n"}, "relativeMountPath": "nfs"}],
    }
    paths = "nodeSetup.mountVolumes.azureFileShares[].relativeMountPath"
    said = cli(f"cluster create -n auto --use-auto-storage --query {paths}")
    assert json.loads(said.out) == ["autoafs"] and "file share 'batchaishare' of the account 'autostorage'" in said.err
    assert cli.json("storage share list --account-name autostorage --query [].name") == ["batchaishare"]


def test_a_mount_that_is_none(cli: Cli) -> None:
    (cli.world.cwd / "odd.yaml").write_text("nodeSetup: {mountVolumes: {azureBlobFileSystems: [x]}}", encoding="utf-8")
    said = cli("cluster create -n c -f odd.yaml --storage-account-name acc")
    assert said.code == 1 and said.err.startswith("batchai: odd.yaml: nodeSetup.mountVolumes.azureBlobFileSystems[0] ")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("-t", "1", "--max", "2"), 2, "give one or the other"),
        (("--min", "1"), 2, "--min and --max belong together"),
        (("--min", "3", "--max", "2"), 2, "--min 3 is more than --max 2"),
        (("--custom-image", "x"), 2, "--custom-image needs --image"),
        (("-i", "x"), 2, "--image 'x' must be UbuntuLTS"),
        (("--setup-task-output", "x"), 2, "--setup-task-output says where the logs of --setup-task go; give that, too"),
        (("--setup-task", "x", "--setup-task-output", "y"), 1, "stdOutErrPathPrefix is 'y', which lies on no mounted volume"),
        (("--host", "a", "--share", "/", "--use-auto-storage"), 1, "--use-auto-storage made a storage account in Azure"),
        (("-f", "bad.json"), 1, "bad.json: properties.vmSise is not a known key; did you mean vmSize?"),
        (("-f", "batch.yaml"), 1, "batch.yaml: engine is 'azureBatch'; allowed: 'local', 'ssh', 'slurm'"),
        (("-k", "id"), 2, "--ssh-key is a private key, which is not kept; give the public one"),
        (("-k", "binary"), 2, "--ssh-key binary can't be read as a public key: "),
        (("-w", "nope"), 3, "there is no workspace 'nope'; the workspaces are: default"),
    ],
)
def test_refusals_leave_nothing(cli: Cli, options: tuple[str, ...], code: int, message: str) -> None:
    written(cli, {"properties": {"vmSise": "x"}}, "bad.json")
    written(cli, "engine: azureBatch", "batch.yaml")
    written(cli, "-----BEGIN OPENSSH PRIVATE KEY-----", "id")
    (cli.world.cwd / "binary").write_bytes(b"\xff")
    said = cli("cluster", "create", "-n", "c", *options)
    assert (said.code, said.out) == (code, "") and message in said.err, said
    folder = cli.world.home / "clusters"
    assert not folder.exists() or list(folder.iterdir()) == []


def test_names(cli: Cli) -> None:
    assert cli("cluster", "create", "-n", "a/b").code == 2
    assert cli("cluster", "create", "-n", "zero", "-t", "0", "-o", "none").code == 0
    again = cli("cluster", "create", "-n", "zero")
    assert again.code == 2 and "there is a cluster 'zero' already" in again.err
    assert counts(cli, "zero") == "0 0 0 0 0"
    for verb in (("show",), ("delete", "-y"), ("resize", "-t", "1"), ("auto-scale", "--min", "0", "--max", "1")):
        said = cli("cluster", verb[0], "-n", "nope", *verb[1:])
        assert said.code == 3 and "the clusters are: local, zero" in said.err, said
    assert cli("cluster", "show", "-n", "../clusters/zero").code == cli("cluster", "file", "list", "-c", "nope").code == 3
    files = cli("cluster", "file", "list", "-c", "zero")
    assert json.loads(files.out) == [] and "has no setup task" in files.err


def test_a_cluster_whose_nodes_cant_be_asked_is_made(cli: Cli) -> None:
    (cli.world.cwd / "share").mkdir()
    file = written(cli, {"engine": "slurm", "nodes": 2, "share": str(cli.world.cwd / "share")})
    made = cli("cluster", "create", "-n", "c", "-f", file, PATH="/nowhere")
    shown = json.loads(made.out)
    assert (made.code, shown["name"], shown["currentNodeCount"], shown["engine"]) == (0, "c", 0, "slurm")
    assert made.err.startswith("batchai: cluster 'c' is made, and its nodes can't be asked yet: ")
    assert "there is no squeue on this machine" in made.err and made.err.count("\n") == 1
    assert cli("cluster", "show", "-n", "c", PATH="/nowhere").code == 1


def test_resize_and_delete(cli: Cli) -> None:
    cli("cluster", "create", "-n", "c", "-t", "0", "-o", "none")
    assert cli.json("cluster", "resize", "-n", "c", "-t", "5", "--query", "currentNodeCount") == 5
    assert cli.json("cluster", "resize", "c", "--target", "2", "--node-deallocation-option", "Terminate")["scaleSettings"][
        "manual"
    ] == {"targetNodeCount": 2, "nodeDeallocationOption": "terminate"}
    rows = cli("cluster", "node", "list", "-c", "c", "-o", "table").out.splitlines()
    assert re.split(r" {2,}", rows[0]) == ["ID", "IP", "SSH Port", "State", "Job"]
    assert [row.split() for row in rows[2:]] == [
        *([str(index), "127.0.0.1", "idle"] for index in range(2)),
        *([str(index), "127.0.0.1", "closed"] for index in range(2, 5)),
    ]
    assert cli.json("cluster", "auto-scale", "-n", "c", "--min", "1", "--max", "3")["currentNodeCount"] == 1
    asked = cli("cluster", "delete", "-n", "c")
    assert asked.code == 2 and "Delete cluster c: this needs -y" in asked.err
    assert cli("cluster", "delete", "-n", "c", "-y") == (0, "", "")
    assert cli("cluster", "show", "-n", "c").code == 3
    assert not (cli.world.home / "nodes" / "c").exists()
    local = cli("cluster", "delete", "-n", "local", "-y")
    assert local.code == 2 and "is always there" in local.err


def test_a_document_that_cant_be_used_spoils_no_list(cli: Cli) -> None:
    folder = cli.world.home / "clusters"
    folder.mkdir(parents=True)
    (folder / "wrong.yaml").write_text("nodes: many\n", encoding="utf-8")
    (folder / "mine.yaml").write_text("nodes: 3\nvmSize: A\n", encoding="utf-8")
    local, mine, wrong = cli.json("cluster", "list")
    assert (local["name"], mine["currentNodeCount"], mine["creationTime"], mine["workspace"]) == ("local", 3, None, "default")
    assert (wrong["provisioningState"], wrong["errors"][0]["code"]) == ("failed", "ClusterUnusable")
    assert "nodes must be a whole number" in wrong["errors"][0]["message"]
    assert "wrong  batchai         default             failed" in cli("cluster", "list", "-o", "table").out
    assert cli("cluster", "show", "-n", "wrong").code == 1
    (folder / "mine.state.json").write_text("{", encoding="utf-8")
    assert [row["provisioningState"] for row in cli.json("cluster", "list")] == ["succeeded", "failed", "failed"]
    assert cli("cluster", "delete", "-n", "mine", "-y").code == 0
    assert [path.name for path in folder.iterdir()] == ["wrong.yaml"]


def test_commands_on_a_node(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    said = cli("cluster", "node", "exec", "-c", "local", "-n", "1", "--exec", 'pwd; echo $((6*7)) "\'"; exit 7', "-L", "1:h:2")
    assert said.code == 7 and "-L plays no part" in said.err
    assert capfd.readouterr().out == f"{cli.world.home}/nodes/local/1\n42 '\n"
    assert cli("cluster", "node", "exec", "-c", "local", "-n", "0", "--exec", "kill -TERM $$").code == 143
    unknown = cli("cluster", "node", "exec", "-c", "local", "-n", "9", "--exec", "true")
    assert unknown.code == 3 and "cluster 'local' has no node '9'; its nodes are: 0, 1" in unknown.err
    for options, message in (
        (("-L", "1:h:2"), "there is nothing to do"),
        (("--exec", "true", "-L", "x"), "must be PORT:HOST:PORT"),
    ):
        refused = cli("cluster", "node", "exec", "-c", "local", "-n", "0", *options)
        assert refused.code == 2 and message in refused.err


def test_where_and_what_is_said_of_a_document(cli: Cli) -> None:
    """Its location is shown as -l is; what it says without effect is told when it is created, and not by later commands, unless it is
    changed."""
    text = json.dumps({"location": "westus2", "type": "x", "properties": {"vmSize": "NC6"}})
    (cli.world.cwd / "c.json").write_text(text, encoding="utf-8")
    said = cli("cluster create -n c -f c.json --query location -o tsv")
    assert said.out == "westus2\n" and "type has no effect" in said.err
    said = cli("cluster show -n c --query location -o tsv")
    assert (said.out, said.err) == ("westus2\n", "")
    with (cli.world.home / "clusters" / "c.yaml").open("a", encoding="utf-8") as file:
        file.write("tags: {}\n")
    assert [cli("cluster show -n c").err.count("tags has no effect") for _ in range(2)] == [1, 0]
    assert cli.json("cluster create -n d -f c.json -l eastus --query location") == "eastus"
    # One that is written by hand: once.
    (cli.world.home / "clusters" / "hand.yaml").write_text(text, encoding="utf-8")
    assert [cli("cluster show -n hand").err.count("no effect") for _ in range(3)] == [1, 0, 0]
    assert cli.json("cluster show -n hand --query location") == "westus2"


def test_mounts_that_no_job_could_use(cli: Cli) -> None:
    """Refused when a cluster is created; of a document that is written by hand ``errors`` tells."""
    mounts = {"fileServers": [{"fileServer": {"id": "n"}, "relativeMountPath": "x"}]}
    text = json.dumps({"properties": {"nodeSetup": {"mountVolumes": mounts}}})
    (cli.world.cwd / "c.json").write_text(text, encoding="utf-8")
    said = cli("cluster create -n c -f c.json")
    assert said.code == 1 and "nodeSetup.mountVolumes.fileServers[0]: the document of cluster 'c' doesn't say" in said.err
    assert "c" not in cli.json("cluster list --query [].name")
    (cli.world.home / "clusters").mkdir(parents=True)
    (cli.world.home / "clusters" / "hand.yaml").write_text(text, encoding="utf-8")
    errors = cli.json("cluster list --query [].errors[]")
    assert [error["code"] for error in errors] == ["ClusterUnusable"] and "add it to fileServers" in errors[0]["message"]
