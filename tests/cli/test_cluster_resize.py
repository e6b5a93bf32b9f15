"""A job on a cluster that is resized under it; and the cluster over SSH, with real servers."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from sshd import SshNodes, free_port
from waiting import wait_for

from mlflow_batchai.engines.shell.target import Target, ssh_command

HOLD = 'echo attempt $BATCHAI_JOB; until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/end" ]; do sleep 0.05; done'
JOB = {
    "properties": {
        "nodeCount": 2,
        "stdOutErrPathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share",
        "customToolkitSettings": {"commandLine": HOLD},
    }
}


def states(cli: Cli, name: str = "c") -> list[str]:
    return [row["state"] for row in cli.json("cluster", "node", "list", "-c", name)]


def test_a_job_is_put_back_in_the_queue_and_goes_on(cli: Cli) -> None:
    (cli.world.cwd / "job.json").write_text(json.dumps(JOB), encoding="utf-8")
    cli("cluster", "create", "-n", "c", "-t", "2", "-o", "none")
    assert cli("job", "create", "-n", "j", "-c", "c", "-f", "job.json", "-o", "none").code == 0
    wait_for(lambda: states(cli) == ["running", "running"])
    assert [row["job"] for row in cli.json("cluster", "node", "list", "-c", "c")] == ["j", "j"]
    assert cli.json("cluster", "show", "c", "--query", "nodeStateCounts.runningNodeCount") == 2
    said = cli("cluster", "resize", "-n", "c", "--target", "0")
    assert said.code == 0 and "job j is in the queue again (attempt 2)" in said.err
    shown = json.loads(said.out)
    assert (shown["allocationState"], shown["currentNodeCount"]) == ("steady", 0)
    assert cli.json("job", "show", "j", "--query", "executionState") == "queued"
    (cli.world.folder() / "shared").mkdir(exist_ok=True)
    (cli.world.folder() / "shared" / "end").touch()
    assert cli("cluster", "resize", "-n", "c", "-t", "2", "-o", "none").code == 0
    assert cli("job", "wait", "-n", "j").code == 0
    assert cli.json("job", "show", "j", "--query", "[executionState, attempt]")[0] == "succeeded"
    # More nodes than take jobs: it waits, and says for what; deleting the cluster ends it.
    cli("cluster", "resize", "-n", "c", "-t", "1", "-o", "none")
    waiting = cli("job", "create", "-n", "k", "-c", "c", "-f", "job.json", "-o", "none")
    assert "1 of the 2 nodes of cluster 'c' take jobs; it starts after: batchai cluster resize -n c -t 2" in waiting.err
    # So it is if nobody relays it any more.
    wait_for(lambda: cli.json("job", "show", "k", "--query", "follower.state") == "relaying")
    assert cli.world.lose_followers()
    assert "job k is terminated" in cli("cluster", "delete", "-n", "c", "-y").err
    cli.world.wait(lambda: cli.world.last.info.status == "KILLED")
    assert cli("cluster", "show", "c").code == 3


@pytest.fixture
def over_ssh(cli: Cli, ssh_servers: SshNodes) -> Cli:
    """With a cluster ``c`` of two machines."""
    (cli.world.cwd / "share").mkdir()
    document: dict[str, Any] = {
        "engine": "ssh",
        "hosts": [f"{server.user}@{server.address}:{server.port}" for server in list(ssh_servers)[:2]],
        "keyFile": str(ssh_servers.key_file),
        "knownHosts": str(ssh_servers.known_hosts),
        "root": "~/node",
        "share": str(cli.world.cwd / "share"),
        "python": sys.executable,
    }
    (cli.world.cwd / "c.yaml").write_text(json.dumps(document), encoding="utf-8")
    made = cli("cluster", "create", "-n", "c", "-f", "c.yaml", "-u", "nobody", "-t", "1")
    assert made.code == 0, made.err
    return cli


def test_machines_over_ssh(over_ssh: Cli, ssh_servers: SshNodes, capfd: pytest.CaptureFixture[str]) -> None:
    assert states(over_ssh) == ["idle", "closed"]
    resized = over_ssh("cluster", "resize", "-n", "c", "-t", "0")
    assert "the machines of cluster 'c' keep running, and cost what they cost" in resized.err
    assert json.loads(resized.out)["currentNodeCount"] == 0
    assert "has 2 hosts; name more in its document" in over_ssh("cluster", "resize", "-n", "c", "-t", "3").err
    rows = over_ssh.json("cluster", "node", "list", "-c", "c")
    assert [(row["ipAddress"], row["port"]) for row in rows] == [(s.address, s.port) for s in list(ssh_servers)[:2]]
    node = rows[1]["nodeId"]
    capfd.readouterr()
    assert over_ssh("cluster", "node", "exec", "-c", "c", "-n", node, "--exec", 'pwd; echo "it\'s $((6*7))"; exit 7').code == 7
    assert capfd.readouterr().out == f"{ssh_servers[1].home}\nit's 42\n"
    ssh_servers[1].stop()
    try:
        shown = over_ssh.json("cluster", "show", "-n", "c")
        assert shown["nodeStateCounts"]["unusableNodeCount"] == 1
        assert "refused the connection" in shown["errors"][0]["message"] and shown["errors"][0]["code"] == "NodeUnusable"
        assert over_ssh("cluster", "node", "exec", "-c", "c", "-n", node, "--exec", "true").code == 255
    finally:
        ssh_servers[1].start()
    # Its machines are others' as well: they take jobs again.
    assert over_ssh("cluster", "delete", "-n", "c", "-y").code == 0
    assert not list(Path(ssh_servers[0].home, "node").glob("closed"))


def test_a_port_is_forwarded(over_ssh: Cli, ssh_servers: SshNodes) -> None:
    """To the node's own sshd, which says who it is; by way of another machine, whose key and known hosts are ours, too."""
    node = over_ssh.json("cluster", "node", "list", "-c", "c")[0]["nodeId"]
    port = free_port(["127.0.0.1"])
    forward = f"{port}:{ssh_servers[0].address}:{ssh_servers[0].port}"
    heard: list[bytes] = []
    line = f"until [ -e heard-{port} ]; do sleep 0.05; done"
    command = ("cluster", "node", "exec", "-c", "c", "-n", node, "--exec", line, "-L", forward)

    def listen() -> None:
        def said() -> bytes:
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as there:
                    return there.recv(100)
            except OSError:
                return b""

        try:
            heard.append(wait_for(said))
        finally:
            (ssh_servers[0].home / f"heard-{port}").touch()

    listener = threading.Thread(target=listen)
    listener.start()
    code = over_ssh(*command).code
    listener.join()
    assert code == 0 and heard[0].startswith(b"SSH-2.0-")
    first, second = (
        Target(server.address, server.address, server.port, server.user, (server.key_file,), known_hosts=(server.known_hosts,))
        for server in list(ssh_servers)[:2]
    )
    through = Target(**{**second.__dict__, "jump": Target(**{**first.__dict__, "jump": second})})
    done = subprocess.run(ssh_command(through, 'echo "$HOME"'), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{ssh_servers[1].home}\n", "")


def test_ssh_is_told_all_that_we_know() -> None:
    jump = Target("j", "j.example", 22, "me", (Path("/k/100%"),), known_hosts=(Path("/a b/known"),))
    target = Target("n", "10.0.0.4", 2222, "you", (), known_hosts=(), host_key_alias="n4", jump=jump, identities_only=True)
    argv = ssh_command(target, "nvidia-smi", ["8080:localhost:80"], terminal=True)
    assert argv[-3:] == ["--", "10.0.0.4", "nvidia-smi"] and argv[:7] == ["ssh", "-F", "/dev/null", "-p", "2222", "-l", "you"]
    assert {"StrictHostKeyChecking=yes", "UserKnownHostsFile=/dev/null", "HostKeyAlias=n4", "IdentitiesOnly=yes"} < set(argv)
    proxy = next(word for word in argv if word.startswith("ProxyCommand="))
    assert re.match(r"ProxyCommand=ssh -W '\[%h\]:%p' -F /dev/null -p 22 -l me -i '?/k/100%%%%'? ", proxy)
    assert "'UserKnownHostsFile=\"/a b/known\"'" in proxy and proxy.endswith(" -- j.example")
    assert {"-t", "-L", "8080:localhost:80", "ExitOnForwardFailure=yes"} < set(argv)
    assert ssh_command(target, None, ["1:h:2"])[-3:] == ["-N", "--", "10.0.0.4"]
