"""A cluster with a setup task, from its making to the list of its logs: each node runs it before its first job, and then no more."""

from __future__ import annotations

import json

from command_line import Cli

SECRET = "s3tup-canary"
COMMAND = 'echo "${#TOKEN} $PLACE"; echo once >> "$PLACE/ran"'
TOY = 'cat "$AZ_BATCHAI_MOUNT_ROOT/share/ran"'


def toy(cli: Cli, name: str) -> str:
    """What a job of both nodes says, which has to succeed."""
    prefix = "$AZ_BATCHAI_MOUNT_ROOT/share"
    custom = {"nodeCount": 2, "stdOutErrPathPrefix": prefix, "customToolkitSettings": {"commandLine": TOY}}
    document = {"properties": custom}
    (cli.world.cwd / "job.json").write_text(json.dumps(document), encoding="utf-8")
    made = cli("job", "create", "-n", name, "-c", "two", "-f", "job.json", "-o", "none")
    assert made.code == 0, made
    assert cli("job", "wait", name).code == 0
    return cli("job", "logs", name).out


def test_a_setup_task(cli: Cli) -> None:
    share = cli.world.home / "share"
    task = {
        "commandLine": "replaced by the option",
        "stdOutErrPathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share/setup logs",
        "environmentVariables": [{"name": "PLACE", "value": "$AZ_BATCHAI_MOUNT_ROOT/share"}],
        "secrets": [{"name": "TOKEN", "value": SECRET}],
    }
    (cli.world.cwd / "two.json").write_text(json.dumps({"nodes": 2, "nodeSetup": {"setupTask": task}}), encoding="utf-8")
    shown = cli.json("cluster", "create", "-n", "two", "-f", "two.json", "--setup-task", COMMAND)["nodeSetup"]["setupTask"]
    assert shown == {
        **task,
        "commandLine": COMMAND,
        "secrets": [{"name": "TOKEN", "value": None, "valueSecretReference": None}],
        "stdOutErrPathSuffix": shown["stdOutErrPathSuffix"],
    }
    assert shown["stdOutErrPathSuffix"].startswith("workspaces/default/clusters/two/")
    early = cli("cluster", "file", "list", "-c", "two")
    assert json.loads(early.out) == [] and "the setup task of cluster 'two' has not written anything yet" in early.err

    assert (toy(cli, "first"), toy(cli, "second")) == ("once\nonce\n", "once\nonce\n"), "once a node, not once a job"

    files = cli.json("cluster", "file", "list", "-c", "two")
    assert [file["name"] for file in files] == ["stdout-0.txt", "stdout-1.txt"]
    where = share / "setup logs" / shown["stdOutErrPathSuffix"]
    text = (where / "stdout-1.txt").read_text()
    assert text == f"{len(SECRET)} {cli.world.home}/nodes/two/1/mounts/share\n"
    assert files[1] == {
        "name": "stdout-1.txt",
        "isDirectory": False,
        "contentLength": len(text),
        "downloadUrl": (where / "stdout-1.txt").as_uri(),
    }
    table = cli("cluster", "file", "list", "-c", "two", "-p", "stdout-1.txt", "-o", "table").out.splitlines()
    assert [row.split("  ")[0] for row in (table[0], table[2])] == ["Name", "stdout-1.txt"], table
    assert "Is directory" in table[0] and "Size" in table[0]
    nowhere = cli("cluster", "file", "list", "-c", "two", "-p", "nope")
    assert nowhere.code == 3 and "there is no 'nope' in the setup task's logs; there is: " in nowhere.err
    for file in cli.world.home.rglob("*"):
        kept = file.is_file() and not file.is_relative_to(cli.world.home / "clusters")
        assert not kept or SECRET.encode() not in file.read_bytes(), file
