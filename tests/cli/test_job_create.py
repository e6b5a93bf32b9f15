"""``job create``: a document that names its own script, from the dry run to the finished run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

JOB_MOUNTS = "$AZ_BATCHAI_JOB_MOUNT_ROOT"
SECRET, KEY = "hush-hush-4711", "c2VjcmV0LWtleS1vZi1hbi1hY2NvdW50"
SHARE = {
    "azureFileUrl": "https://<AZURE_BATCHAI_STORAGE_ACCOUNT>.file.core.windows.net/scripts",
    "relativeMountPath": "external",
}
LOGS = ["stdout-0.txt", "stdout-1.txt"]
# What bash sets by itself.
OF_THE_SHELL = {"PWD", "SHLVL", "_", "OLDPWD"}

Write = Callable[..., Path]


@pytest.fixture
def job(cli: Cli) -> Write:
    """Writes ``job.json``; keyword arguments are properties, None removes one."""

    def write(name: str = "job.json", script: str = f"{JOB_MOUNTS}/external/hvd/train.py", **properties: Any) -> Path:
        content = {
            "nodeCount": 2,
            "horovodSettings": {"pythonScriptFilePath": script, "commandLineArgs": "--epochs 5 --lr=0.1"},
            "stdOutErrPathPrefix": f"{JOB_MOUNTS}/external",
            "mountVolumes": {"azureFileShares": [SHARE]},
            **properties,
        }
        given = {key: value for key, value in content.items() if value is not None}
        path = cli.world.cwd / name
        path.write_text(json.dumps({"properties": given}), encoding="utf-8")
        return path

    (cli.world.home / "clusters").mkdir(parents=True)
    (cli.world.home / "clusters" / "local.yaml").write_text("nodes: 2\n", encoding="utf-8")
    return write


def script(cli: Cli, text: str) -> Path:
    """A script on the share that stands for the account's."""
    path = cli.world.home / "shares" / "acct" / "scripts" / "hvd" / "train.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def files(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_a_job_is_what_its_dry_run_said(cli: Cli, job: Write) -> None:
    """The tutorial's form: script and logs on a share of the job's own, two ranks on two nodes; nothing of it by name of ours."""
    world, gate = cli.world, cli.world.root / "gate"
    path = script(
        cli,
        "import json, os, sys, time\n"
        "print('said', json.dumps([sys.argv, os.getcwd(), os.listdir(), dict(os.environ), os.umask(0o22)]), flush=True)\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
        "open(os.environ['AZ_BATCHAI_OUTPUT_MODEL'] + '/r' + os.environ['HOROVOD_RANK'], 'w').write('42')\n",
    )
    document = job(
        outputDirectories=[{"id": "MODEL", "pathPrefix": f"{JOB_MOUNTS}/external", "pathSuffix": "Models"}],
        environmentVariables=[{"name": "LINE", "value": "$AZ_BATCHAI_OUTPUT_MODEL/line.json"}],
        secrets=[{"name": "TOKEN", "value": SECRET}],
    )
    arguments = ("-n", "first", "-c", "/subscriptions/x/workspaces/w/clusters/local", "-f", document, "--umask", "022")
    given = {"AZURE_BATCHAI_STORAGE_ACCOUNT": "acct"}
    before = files(world.root)
    shown = cli.json("job", "create", *arguments, "--dry-run", **given)
    assert files(world.root) == before, "a dry run makes nothing"

    said = cli("job", "create", *arguments, **given)
    assert said.code == 0, said
    made = json.loads(said.out)
    assert (made["name"], made["cluster"]["name"]) == ("first", "local")
    assert made["executionState"] in ("queued", "running")  # its nodes are free: one that is slow to ask finds it there
    assert made["horovodSettings"]["processCount"] == 2 and made["secrets"] == [{"name": "TOKEN", "value": None}]
    assert f"it is the directory {world.home / 'shares' / 'acct'}" in said.err

    # While it runs its logs are there to be listed, though their prefix lies on another share than the job's folder.
    logs = world.home / "share" / made["folder"] / "stdouterr"
    world.wait(lambda: [file.name for file in sorted(logs.glob("stdout-*.txt")) if file.stat().st_size] == LOGS)
    gate.touch()
    assert cli("job", "wait", "first").code == 0
    external = path.parent.parent / made["jobOutputDirectoryPathSegment"]
    assert {file.name for file in (external / "stdouterr").iterdir()} >= {"stdout.txt", *LOGS}
    assert sorted(file.name for file in (external / "outputs" / "Models").iterdir()) == ["r0", "r1"]

    assert world.artifact("outputs/MODEL/r0") == "42"

    run = world.last
    assert run.info.run_id == made["runId"] and (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"epochs": "5", "lr": "0.1"} == shown["parameters"]
    assert (run.data.tags["mlflow.source.name"], run.data.tags["mlflow.source.type"]) == (str(document), "JOB")
    assert "mlflow.user" in run.data.tags

    # What a rank saw is what the dry run showed, but for what nobody could know.
    for rank in shown["ranks"]:
        line = (external / "stdouterr" / f"stdout-{rank['rank']}.txt").read_text().removeprefix("said ")
        argv, folder, listed, saw, umask = json.loads(line)
        assert umask == 0o022
        seen = {name: value for name, value in saw.items() if name not in OF_THE_SHELL}
        port = seen["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        known = json.dumps({**seen, "TOKEN": "**********", "HOROVOD_GLOO_RENDEZVOUS_PORT": "<port>"})
        known = known.replace(made["jobId"], "<job id>").replace(made["runId"], "<run id>")
        assert json.loads(known) == rank["environment"] and port.isdigit() and seen["TOKEN"] == SECRET
        assert folder.replace(made["jobId"], "<job id>") == rank["directory"] and listed == []
        assert argv[0] == f"{saw['AZ_BATCHAI_JOB_MOUNT_ROOT']}/external/hvd/train.py" and argv[1:] == [
            "--epochs",
            "5",
            "--lr=0.1",
        ]
        assert rank["argv"] == ["bash", "-c", made["command"]] and rank["node"] == f"node-{rank['rank']}"
    assert SECRET not in json.dumps(shown) + said.out + said.err
    assert [mount["path"] for mount in shown["mounts"]] == ["$AZ_BATCHAI_MOUNT_ROOT/share", f"{JOB_MOUNTS}/external"]
    assert (shown["files"], shown["secrets"]) == ({"count": 0, "bytes": 0}, ["TOKEN"])
    assert [node["command"][-1] for node in shown["nodes"]] == [f"--root={world.home}/nodes/local/{node}" for node in (0, 1)]

    # The name is taken now, in that experiment, however the job has ended.
    taken = cli("job", "create", *arguments, **given)
    assert (taken.code, taken.out) == (2, "")
    assert "there is a job 'first' in experiment 'Default' already; choose another name, or delete it" in taken.err
    assert len(world.runs()) == 1


def test_a_dry_run_as_a_table(cli: Cli, job: Write) -> None:
    document = job(horovodSettings=None, customToolkitSettings={"commandLine": "echo a\nsleep 1"})
    code, out, _ = cli("job", "create", "x", "-f", document, "--dry-run", "-o", "table")
    assert (code, [" ".join(line.split()) for line in out.splitlines()]) == (
        0,
        ["Rank Node Command", "---- ------ ---------------", r"0 node-0 echo a\nsleep 1", "node-1"],
    )
    assert cli.json("job", "create", "x", "-f", document, "--dry-run", "--query", "[length(ranks), parameters]") == [
        1,
        {"commandLine": "echo a\nsleep 1"},
    ]


def test_options_mount_what_the_document_does_not(cli: Cli, job: Write) -> None:
    (cli.world.home / "clusters" / "nfs.yaml").write_text("nodes: 2\nfileServers: {server: 'host:/data'}\n", encoding="utf-8")
    document = job(jobPreparation={"commandLine": "true"}, mountVolumes=None, stdOutErrPathPrefix=f"{JOB_MOUNTS}/afs")
    options = ("--afs-name", "data", "--nfs", "/subscriptions/x/fileservers/server", "--nfs-mount-path", "on/nfs")
    shown = cli.json("job", "create", "x", "-f", document, "-c", "nfs", "--dry-run", *options, "--storage-account-name", "acct")
    assert [(mount["path"], mount["name"], mount["how"]) for mount in shown["mounts"][1:]] == [
        (f"{JOB_MOUNTS}/afs", "file share acct/data", "directory"),
        (f"{JOB_MOUNTS}/on/nfs", "file server server", "nfs"),
    ]
    # With the account's key they are Azure's; the key is kept nowhere.
    options = ("--afs-name", "data", "--bfs-name", "blobs", "--storage-account-name", "acct", "--storage-account-key", KEY)
    said = cli("job", "create", "x", "-f", document, "--dry-run", *options)
    shown = json.loads(said.out)
    assert [(mount["path"], mount["source"]) for mount in shown["mounts"][1:]] == [
        (f"{JOB_MOUNTS}/afs", "https://acct.file.core.windows.net/data"),
        (f"{JOB_MOUNTS}/bfs", "https://acct.blob.core.windows.net/blobs"),
    ]
    assert KEY not in said.out + said.err
    assert not [path for path in files(cli.world.root) if path.is_file() and KEY.encode() in path.read_bytes()]
    code, _, err = cli("job", "create", "x", "-f", document, "--dry-run", "--storage-account-key", KEY)
    assert code == 2 and "--storage-account-key: of which account? give --storage-account-name" in err and KEY not in err
    document = job(mountVolumes={"azureFileShares": [{**SHARE, "relativeMountPath": "afs"}]})
    code, _, err = cli("job", "create", "x", "-f", document, "--afs-name", "data")
    assert code == 1 and "gives the relativeMountPath 'afs' twice" in err


def test_which_cluster(cli: Cli, job: Write) -> None:
    """The option's, else the document's, else everybody's default, else the local one."""
    for name in ("a", "b"):
        (cli.world.home / "clusters" / f"{name}.yaml").write_text("nodes: 2\n", encoding="utf-8")
    entries: dict[str, Any] = {"jobPreparation": {"commandLine": "true"}}

    def chosen(document: Path, *options: str, **environment: str) -> Any:
        return cli.json("job", "create", "x", "-f", document, "--dry-run", *options, **environment)["cluster"]

    assert chosen(job(**entries)) == "local"
    assert chosen(job(**entries), BATCHAI_CLUSTER="b") == "b"
    named = job(cluster={"id": "/subscriptions/s/resourceGroups/g/clusters/a"}, **entries)
    assert chosen(named, BATCHAI_CLUSTER="b") == "a"
    assert chosen(named, "-c", "b") == "b"
    code, _, err = cli("job", "create", "x", "-f", named, "-c", "nope", "--dry-run")
    assert code == 3 and "there is no cluster 'nope'" in err and "a, b, local" in err


def test_nodes_over_ssh_are_not_asked(cli: Cli, job: Write) -> None:
    share = cli.world.root / "mounted"
    share.mkdir()
    cluster = {"engine": "ssh", "hosts": ["10.255.255.1", "10.255.255.2"], "user": "me", "share": str(share), "gpusPerNode": 2}
    (cli.world.home / "clusters" / "far.yaml").write_text(json.dumps(cluster), encoding="utf-8")
    settings = {"pythonScriptFilePath": "/code/x.py", "processCount": 4}
    document = job(horovodSettings=settings, mountVolumes=None, stdOutErrPathPrefix="$AZ_BATCHAI_MOUNT_ROOT/share")
    shown = cli.json("job", "create", "x", "-f", document, "-c", "far", "--dry-run")
    assert [node["command"][:2] for node in shown["nodes"]] == [
        ["ssh", "ssh://me@10.255.255.1:22"],
        ["ssh", "ssh://me@10.255.255.2:22"],
    ]
    assert [rank["environment"]["CUDA_VISIBLE_DEVICES"] for rank in shown["ranks"]] == ["0", "1", "0", "1"]
    last = shown["ranks"][-1]["environment"]
    assert last["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "<address of node-0>" and last["HOROVOD_GLOO_IFACE"] == "<network interface>"
    assert last["AZ_BATCH_HOST_LIST"] == "<address of node-0>,<address of node-1>"
    assert last["OMP_NUM_THREADS"] == "<cores of node-1 / 2>"
    assert last["PATH"].startswith("<folder of python3>:") and last["PATH"].endswith(":<PATH of the node>")
    assert not list(share.iterdir())


BAD = {
    "no mapping": ("job.json", '{"properties": [1]}', "job.json: properties must be a mapping"),
    "mounts of no kind": ("job.json", '{"properties": {"mountVolumes": 5}}', "job.json: properties.mountVolumes"),
    "a masked secret": (
        "job.json",
        '{"properties": {"secrets": [{"name": "TOKEN", "value": "**********"}]}}',
        "job.json: '**********' stands in place of a secret",
    ),
    "a misspelt key": ("job.json", '{"properties": {"nodeCuont": 1}}', "did you mean nodeCount?"),
}


@pytest.mark.parametrize("case", BAD)
def test_documents_that_are_refused(cli: Cli, job: Write, case: str) -> None:
    name, text, words = BAD[case]
    (cli.world.cwd / name).write_text(text, encoding="utf-8")
    code, out, err = cli("job", "create", "-n", "x", "-f", name, "--afs-name", "data")
    assert (code, out) == (1, "") and words in err and err.count("\n") == 1, err


def test_names_that_are_refused(cli: Cli, job: Write) -> None:
    """Nothing is made for them: no run, no folder."""
    document = job("job.json", "/opt/x.py")
    document.write_bytes(b"\xef\xbb\xbf" + document.read_bytes())
    for arguments, code, words in (
        (("-n", "a b", "-f", document), 2, "the job 'a b' must have 1 to 64 letters, digits, '-' or '_'"),
        (("-f", document), 2, "the name of the job is missing"),
        (("-n", "x", "-f", document, "--umask", "0"), 2, "--umask"),
        (("-n", "x"), 2, "Missing option '-f' / '--config-file'"),
        (("-n", "x", "-f", document, "-w", "nope"), 3, "there is no workspace 'nope'; the workspaces are: default"),
        (("-n", "x", "-f", document, "-e", "nope"), 3, "there is no experiment 'nope'; the experiments are: Default"),
        (("-n", "x", "-f", job("other.json")), 1, "and there is no such file: looked for 'hvd/train.py' on the file share"),
    ):
        said = cli("job", "create", *arguments)
        assert (said.code, said.out) == (code, "") and words in said.err, said
    (cli.world.home / "config.yaml").write_text("notify: {url: '${HOOK}'}\n", encoding="utf-8")
    said = cli("job", "create", "-n", "x", "-f", document)
    assert said.code == 2 and "notify.url names HOOK: set BATCHAI_SECRET_HOOK" in said.err, said
    assert cli.world.runs() == [] and not (cli.world.home / "share").exists()


def test_an_experiment_has_its_workspace(cli: Cli, job: Write) -> None:
    for name in ("vision", "speech"):
        cli.json("workspace", "create", name)
    cli.json("experiment", "create", "digits", "-w", "vision")
    document = job("job.json", "/opt/x.py", nodeCount=3)
    refused = cli("job", "create", "x", "-f", document, "-e", "digits", "-w", "speech")
    assert refused.code == 3 and "there is no experiment 'digits' in workspace 'speech'" in refused.err
    for options in (("-e", "digits"), ("-e", "digits", "-w", "vision")):
        said = cli("job", "create", "x", "-f", document, *options)
        assert said.code == 1 and "nodeCount is 3 and cluster 'local' has 2 node(s)" in said.err
