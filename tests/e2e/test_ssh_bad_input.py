"""Clusters over SSH that can't be used: one sentence that names the node and the remedy, exit code 1, and nothing left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from netns import Machines, Setup, unavailable
from ssh_world import NAME, HereClient, config, describe, ended, on_machines, on_servers
from sshd import SshNodes, make_key

from mlflow_batchai.engines import archive, ssh_hosts

on_namespaces = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

OLD_PYTHON = """#!/bin/sh
exec /usr/bin/python3 -c 'import sys
sys.version, sys.version_info = "3.6.9 (default)", (3, 6, 9, "final", 0)
text, sys.argv[1:] = sys.argv[4], sys.argv[5:]
exec(text, {"__name__": "__main__"})' "$@"
"""
GOOD, NO_PYTHON, OTHER_SHARE, NO_SHARE, FULL, READ_ONLY = range(6)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A good one, and one for each thing that can be wrong with a machine."""
    root = tmp_path_factory.mktemp("netns")
    for name in ("share", "other"):
        (root / name).mkdir()
    share = Setup(share=root / "share")
    odd = [Setup(share=share.share, without=("python3",)), Setup(share=root / "other"), Setup()]
    disks = [Setup(share=share.share, var_tmp=80 << 20), share]
    with Machines(root, [share, *odd, *disks]) as made:
        assert made[READ_ONLY].run(["mount", "-o", "remount,ro,bind", made[READ_ONLY].share]).returncode == 0
        yield made


def sentence(world: Any, pattern: str) -> None:
    """``mlflow run`` fails with that, and says it once."""
    project = world.project("print('never')", batchai=config(4))
    err = world.refused(project)
    assert re.search(pattern, err), err
    assert len([line for line in err.splitlines() if "ERROR" in line]) == 1
    assert world.runs() == [] and world.processes() == []


# Through the real command.


def test_a_key_that_opens_nothing(world: Any, ssh_servers: SshNodes) -> None:
    describe(world, on_servers(ssh_servers, world), keyFile=str(make_key(world.root / "stranger")))
    sentence(world, r"node 127\.0\.0\.11 \(.*\) refused the login \(tried the key file .*stranger.*ssh-copy-id")


def test_an_unknown_host(world: Any, ssh_servers: SshNodes) -> None:
    describe(world, on_servers(ssh_servers, world), knownHosts=str(world.root / "known"))
    sentence(world, rf"node 127\.0\.0\.11 .*host key .* is not known.*ssh-keyscan -p {ssh_servers.port} 127\.0\.0\.11 >> ")


def test_a_changed_host_key(world: Any, ssh_servers: SshNodes) -> None:
    """Of one node of four; its key stands in the file, of another machine."""
    text = ssh_servers.known_hosts.read_text()
    key = (world.root / "other").with_suffix(".pub")
    make_key(world.root / "other")
    _, body = key.read_text().split()[:2]
    lines = [f"{line.rpartition(' ')[0]} {body}" if line.startswith("[127.0.0.13]") else line for line in text.splitlines()]
    (world.root / "known").write_text("\n".join(lines) + "\n")
    describe(world, on_servers(ssh_servers, world), knownHosts=str(world.root / "known"))
    sentence(world, r"node 127\.0\.0\.13 .*its host key has changed: .*/known, line 3, .*ssh-keygen -R")


def test_a_node_that_is_down(world: Any, ssh_servers: SshNodes) -> None:
    describe(world, on_servers(ssh_servers, world))
    ssh_servers[1].stop()
    try:
        sentence(world, r"node 127\.0\.0\.12 .*refused the connection; check that sshd runs there")
    finally:
        ssh_servers[1].start()


def test_a_share_that_no_node_has(world: Any, ssh_servers: SshNodes) -> None:
    describe(world, on_servers(ssh_servers, world), shareOnNodes="/mnt/nowhere")
    sentence(world, r"node 127\.0\.0\.11: there is no folder /mnt/nowhere there; mount the share, or say where it lies")


def test_an_agent_that_cant_be_started(world: Any, ssh_servers: SshNodes, here: HereClient) -> None:
    """Found when the run exists: it is FAILED with the reason, what was started is ended, and the nodes are free."""
    describe(world, on_servers(ssh_servers, world))
    (world.root / "root2").mkdir(mode=0o700)
    (world.root / "root2" / "logs").write_text("in the way")
    err = world.refused(world.project("print('never')", batchai=config(4)))
    assert re.search(r"node 127\.0\.0\.13: File exists: .*/root2/logs", err), err
    assert world.last.info.status == "FAILED" and "127.0.0.13" in world.last.data.tags["batchai.reason"]
    assert world.processes() == []
    (world.root / "root2" / "logs").unlink()
    assert ended(world, here.submit(world.project("print('mine')", batchai=config(4)))).info.status == "FINISHED"


# Before anything is started; the command line adds nothing to these but seconds.


def test_documents(world: Any, ssh_servers: SshNodes, here: HereClient) -> None:
    good = on_servers(ssh_servers, world)
    one = good["hosts"][0]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"engine": "local"}, r"has hosts, which needs engine: ssh"),
        ({"engine": None}, r"has hosts, which needs engine: ssh"),
        ({"hosts": []}, r"has engine: ssh and no hosts; name the nodes"),
        ({"hosts": [{**one, "root": "relative"}]}, r"hosts\[0\]\.root .*'relative'.* must be an absolute path"),
        ({"hosts": [one, one]}, r"gives the host '127\.0\.0\.11' twice"),
        ({"nodes": 3}, r"says nodes: 3 and names 4 hosts; drop nodes"),
        ({"share": None}, r"has engine: ssh and no share; name the folder"),
        ({"share": "relative"}, r"share is 'relative', but must be an absolute path"),
        ({"share": "/mnt/nowhere"}, r"there is no folder /mnt/nowhere on this machine; mount the share there"),
        ({"hosts": [{"hots": "a"}]}, r"hosts\[0\]\.hots is not a known key; did you mean host\?"),
        ({"hosts": ["me@"]}, r"'me@' is not an address; write name, user@name"),
        ({"port": 70000}, r"port must be at most 65535"),
        ({"root": "/"}, r"root .*'/', but must be an absolute path"),
    ]
    for changes, pattern in cases:
        described = describe(world, good, **changes)
        said = here.refused()
        assert re.search(pattern, said) and "\n" not in said, (described, said)
        # The file, or the one address that is wrong.
        assert said.startswith((f"{world.home}/clusters/{NAME}.yaml", "node address")), said


def test_the_same_machine_twice(world: Any, ssh_servers: SshNodes, here: HereClient) -> None:
    document = on_servers(ssh_servers, world)
    root = document["hosts"][0]["root"]
    describe(world, document, hosts=[*document["hosts"], {"host": f"{ssh_servers.user}@127.0.0.11", "root": root}])
    said = here.refused(5)
    assert re.search(
        rf"node {ssh_servers.user}@127\.0\.0\.11 is node 127\.0\.0\.11 again: the same machine and folder .*; name it once",
        said,
    )


def test_a_node_that_hangs(world: Any, ssh_servers: SshNodes, here: HereClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes the connection, and nothing answers: for as long as ConnectTimeout says."""
    (world.root / ".ssh").mkdir()
    (world.root / ".ssh" / "config").write_text("Host *\n  ConnectTimeout 2\n")
    monkeypatch.setenv("HOME", str(world.root))
    describe(world, on_servers(ssh_servers, world))
    ssh_servers[3].freeze()
    try:
        said = here.refused()
    finally:
        ssh_servers[3].thaw()
    assert re.search(r"node 127\.0\.0\.14 .*takes connections but did not answer as an SSH server within 2 s; check", said)


def test_a_root_that_cant_be_one(world: Any, ssh_servers: SshNodes, here: HereClient) -> None:
    document = on_servers(ssh_servers, world)
    for root, pattern in (
        (
            "/proc/batchai",
            r"node 127\.0\.0\.11: /proc/batchai.* can't be made: No such file or directory; mend that, or name another",
        ),
        (
            str(ssh_servers.key_file),
            r"node 127\.0\.0\.11: .*/id_ed25519 is not a folder; mend that, or name another",
        ),
    ):
        document["hosts"][0]["root"] = root
        describe(world, document)
        said = here.refused()
        assert re.search(pattern, said), said


@on_namespaces
def test_a_folder_of_somebody_else(world: Any, machines: Machines, here: HereClient) -> None:
    """Whoever is on the node may make it first, in /var/tmp, with a program of his own in place of ours: it is not run."""
    describe(world, on_machines(machines, world, [GOOD]), share=str(machines[GOOD].setup.share), root="/var/tmp/theirs")
    program = "/var/tmp/theirs/agents/" + archive.name_of(archive.build())
    run = machines[GOOD].run
    run(["mkdir", "-p", "/var/tmp/theirs/agents"], check=True)
    run(["sh", "-c", f'echo \'open("/var/tmp/theirs/ran", "w")\' > {program}; chown -R nobody /var/tmp/theirs'], check=True)
    said = here.refused(1)
    assert re.search(r": /var/tmp/theirs\S* belongs to another user; mend that, or name another folder \(root in", said), said
    assert run(["ls", "/var/tmp/theirs"]).stdout == "agents\n"


@on_namespaces
@pytest.mark.parametrize(
    ("odd", "pattern"),
    [
        (NO_PYTHON, r": there is no python3; install python3 \(3\.9 or newer\), or name one \(agentPython\)"),
        (OTHER_SHARE, r": its /mnt/share is not the share that this machine has; mount the same one"),
        (NO_SHARE, r": there is no folder /mnt/share there; mount the share, or say where it lies \(shareOnNodes\)"),
        (READ_ONLY, r": its login may not write in /mnt/share; give it the right to"),
    ],
    ids=["no python", "another share", "no share", "read-only share"],
)
def test_machines(world: Any, machines: Machines, here: HereClient, odd: int, pattern: str) -> None:
    describe(world, on_machines(machines, world, [GOOD, odd]), share=str(machines[GOOD].setup.share))
    said = here.refused(2)
    assert said.startswith(f"node {machines[odd].address}") and re.search(pattern, said), said
    world.wait_gone()


@on_namespaces
def test_a_python_that_is_too_old(world: Any, machines: Machines, here: HereClient) -> None:
    describe(world, on_machines(machines, world, [GOOD]), share=str(machines[GOOD].setup.share))
    program = machines[GOOD].install("python3", OLD_PYTHON)
    try:
        said = here.refused(1)
    finally:
        program.unlink()
    assert re.search(
        rf"node {machines[GOOD].address}.*python3 is Python 3\.6\.9; install 3\.9 or newer, or name one \(agentPython", said
    ), said


@on_namespaces
def test_no_way_to_a_node(world: Any, machines: Machines, here: HereClient) -> None:
    document = on_machines(machines, world, [GOOD])
    missing = machines.network.address(200)
    describe(world, document, hosts=[*document["hosts"], missing], share=str(machines[GOOD].setup.share))
    said = here.refused(2)
    assert re.search(
        rf"node {re.escape(missing)} .*(can't be reached|did not answer within).*; check that the machine is up", said
    )


@on_namespaces
def test_a_root_on_a_network_file_system(
    world: Any, machines: Machines, here: HereClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tmpfs stands for NFS."""
    describe(world, on_machines(machines, world, [GOOD, FULL]), share=str(machines[GOOD].setup.share))
    monkeypatch.setattr(ssh_hosts, "NETWORK_FILESYSTEMS", {"tmpfs"})
    said = here.refused(2)
    assert re.search(rf"node {machines[FULL].address}: its folder .* lies on tmpfs, which can't be trusted with locks", said)


@on_namespaces
def test_a_disk_that_is_full(world: Any, machines: Machines, here: HereClient, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of a job: it fails with the reason and leaves nothing; then the node is refused, and left out."""
    describe(world, on_machines(machines, world, [GOOD, FULL]), share=str(machines[GOOD].setup.share))
    fills = """
        import os
        from mlflow_batchai.training import report
        with open("/var/tmp/filler", "ab", 0) as file:
            try:
                while os.environ["HOROVOD_RANK"] == "1":
                    file.write(bytes(1 << 20))
            except OSError:
                pass
        for step in range(2000):
            report.log(step=step, loss=1.0)
        with open("result", "ab", 0) as file:
            file.write(bytes(1 << 20))
    """
    run = ended(world, here.submit(world.project(fills, batchai=config(2))))
    assert run.info.status == "FAILED"
    assert "rank 1 on node-1" in run.data.tags["batchai.reason"] and "No space left" in run.data.tags["batchai.reason"]
    world.wait_gone()
    said = here.refused(2)
    assert re.search(
        rf"node {machines[FULL].address}.* only 0 MiB are free for /var/tmp/batchai-root; free some space there", said
    ), said
    run = here.submit(world.project("print('mine')", name="next", batchai=config(1)))
    assert ended(world, run).info.status == "FINISHED"
    assert f"node {machines[FULL].address}" in capsys.readouterr().err
    assert machines[FULL].run(["rm", "/var/tmp/filler"]).returncode == 0
