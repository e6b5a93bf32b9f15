"""`batchai doctor` on real nodes: every check, what it says of what is wrong, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from command_line import Cli
from netns import SHARE, Machines, Setup, unavailable
from ssh_world import on_machines, on_servers
from waiting import wait_for

from mlflow_batchai.admin.doctor import CHECKS
from mlflow_batchai.cli import main as front_door

BATCHAI = Path(sys.executable).parent / "batchai"
# Of a cluster whose document does not ask for Apptainer.
REMOTE = [name for name in CHECKS if name != "container"]
TOLD = re.compile(rf"batchai: \S+: ({'|'.join(CHECKS)}) (ok|warning|failed)\n")
LOCAL = [name for name in REMOTE if name not in ("host key", "network")]
TRAINER = """#!/bin/sh
echo "2026-01-01 a framework's notice" >&2
echo 'batchai-training {"version": "3.11.2", "horovod": "0.28.1", "works": [["tensorflow", "2.21.0", ["gloo"]]], "missing": ["torch"], "broken": []}'
"""


class Client:
    """A user's machine with one cluster document, ``c``.

    Attributes:
        share: the control share here; ``trainer``: a stand-in for an interpreter with TensorFlow and Horovod.
    """

    def __init__(self, root: Path, capsys, monkeypatch) -> None:
        self.root, self.capsys, self.monkeypatch = root, capsys, monkeypatch
        self.share, self.home = root / "share", root / "home"
        self.share.mkdir(exist_ok=True)
        (self.home / "clusters").mkdir(parents=True)
        # A node that is off is known as such sooner.
        (root / ".ssh").mkdir()
        (root / ".ssh" / "config").write_text("Host *\n  ConnectTimeout 5\n")
        self.trainer = root / "trainer"
        self.trainer.write_text(TRAINER)
        self.trainer.chmod(0o755)
        monkeypatch.setenv("HOME", str(root))
        monkeypatch.setenv("BATCHAI_HOME", str(self.home))

    def document(self, **keys) -> None:
        given = {"python": str(self.trainer), "share": str(self.share), **keys}
        kept = {key: value for key, value in given.items() if value is not None}
        (self.home / "clusters" / "c.yaml").write_text(yaml.safe_dump(kept))

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """(exit code, standard output, standard error but for the ends of checks) of ``batchai doctor``."""
        self.monkeypatch.setattr(sys, "argv", ["batchai", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            front_door()
        out, err = self.capsys.readouterr()
        lines = err.splitlines(keepends=True)
        self.told = [line for line in lines if TOLD.fullmatch(line)]
        err = "".join(line for line in lines if line not in self.told)
        assert not (self.share / ".batchai" / "doctor").exists() or not list((self.share / ".batchai" / "doctor").iterdir())
        return int(ended.value.code or 0), out, err

    def checks(self, code: int) -> dict[str, dict[str, tuple[str, str]]]:
        """Node -> check -> (state, text), of a run that ends with that code."""
        ended, out, err = self.run("c", "-o", "json")
        assert (ended, err) == (code, ""), err
        said = json.loads(out)
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for check in said["checks"]:
            found.setdefault(check["node"], {})[check["name"]] = (check["state"], check["text"])
        assert said["nodes"] - said["ready"] == sum(any(s == "failed" for s, _ in node.values()) for node in found.values())
        return found


@pytest.fixture
def client(tmp_path, capsys, monkeypatch):
    return Client(tmp_path, capsys, monkeypatch)


@pytest.fixture
def ssh(client, ssh_servers):
    """The client with a document of the SSH servers; each test's nodes have folders of their own."""
    client.servers = ssh_servers
    client.base = {"engine": "ssh", **on_servers(ssh_servers, client)}
    client.document(**client.base)
    return client


def serving(root):
    """What answers on the nodes of a client."""
    return [process for process in psutil.process_iter() if _serves(process, str(root))]


def _serves(process, root):
    try:
        line = [] if process.status() == "zombie" else process.cmdline()
    except psutil.Error:
        return False
    return line[-1:] == ["serve"] and root in " ".join(line)


def test_a_cluster_that_is_ready(ssh):
    code, out, err = ssh.run("c")
    assert (code, err) == (0, "")
    assert sorted(ssh.told) == sorted(f"batchai: {server.address}: {name} ok\n" for server in ssh.servers for name in REMOTE)
    *lines, summary = out.splitlines()
    assert summary == "4 of 4 nodes are ready"
    assert [line for line in lines if not line.startswith("  ")] == [server.address for server in ssh.servers]
    told = [line[2:].split("  ") for line in lines[1 : len(REMOTE) + 1]]
    assert [parts[0] for parts in told] == ["ok"] * len(REMOTE)
    assert [line[11:22].strip() for line in lines[1 : len(REMOTE) + 1]] == REMOTE
    text = dict(zip(REMOTE, (line[22:].strip() for line in lines[1:]), strict=False))
    server = ssh.servers[0]
    assert text["reachable"].startswith(f"{server.user}@{server.address}:{server.port} in ")
    assert text["host key"].startswith("ED25519 SHA256:") and f"({server.known_hosts}, line 1)" in text["host key"]
    assert text["python"].startswith("Python 3.")
    assert text["training"] == f"{ssh.trainer} (Python 3.11.2): TensorFlow 2.21.0, Horovod 0.28.1 (gloo)"
    assert text["folder"] == str(ssh.root / "root0")
    wait_for(lambda: not serving(ssh.root), what="what answered on the nodes has ended")


def test_a_real_training_interpreter(ssh):
    ssh.document(**{**ssh.base, "hosts": ssh.base["hosts"][:1], "python": sys.executable})
    found = ssh.checks(0)["127.0.0.11"]
    assert found["training"][1].startswith(f"{sys.executable} (Python 3.")
    assert "TensorFlow 2." in found["training"][1] and "Horovod 0.28.1 (gloo" in found["training"][1]
    assert found["network"][1].startswith("no other node to reach")


@pytest.mark.parametrize(
    ("script", "part"),
    [
        (None, "there is no program no-such-python there"),
        ("#!/bin/sh\necho it is broken >&2; exit 3\n", "it exits with 3 and says: it is broken"),
        ("#!/bin/sh\nkill -ILL $$\n", "it was ended by signal 4"),
        (f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', "has neither TensorFlow nor PyTorch"),
    ],
)
def test_an_interpreter_that_does_not_train(ssh, script, part):
    if script:
        ssh.trainer.write_text(script)
    ssh.document(**{**ssh.base, "hosts": ssh.base["hosts"][:2], "python": str(ssh.trainer) if script else "no-such-python"})
    for found in ssh.checks(1).values():
        state, text = found["training"]
        assert state == "failed" and part in text and "--env-manager virtualenv" in text
        assert all(state == "ok" for name, (state, _) in found.items() if name != "training")


def test_a_node_that_is_off_and_one_that_is_unknown(ssh):
    known = ssh.root / "known_hosts"
    lines = Path(ssh.base["knownHosts"]).read_text().splitlines(keepends=True)
    known.write_text("".join(line for line in lines if "127.0.0.13" not in line))
    ssh.document(**{**ssh.base, "knownHosts": str(known)})
    ssh.servers[1].stop()
    try:
        code, out, _ = ssh.run("c")
        found = ssh.checks(1)
    finally:
        ssh.servers[1].start()
    assert code == 1 and out.splitlines()[-1] == "2 of 4 nodes are ready; 2 checks failed"
    assert list(found["127.0.0.12"]) == ["reachable"] and "refused the connection" in found["127.0.0.12"]["reachable"][1]
    assert list(found["127.0.0.13"]) == ["host key"] and "ssh-keyscan" in found["127.0.0.13"]["host key"][1]
    for address in ("127.0.0.11", "127.0.0.14"):
        assert list(found[address]) == REMOTE


def test_a_python_that_is_too_old(ssh):
    old = ssh.root / "old"
    pretend = "import sys; sys.version_info, sys.version, sys.executable = (3, 6, 15), '3.6.15 (default)', sys.argv[1]"
    run = "text = sys.argv[2]; exec(compile(text, 'boot', 'exec'), {'__name__': '__main__'})"
    old.write_text(f'#!/bin/sh\nshift 3\nexec python3 -I -S -c "{pretend}; {run}" "$0" "$@"\n')
    old.chmod(0o755)
    ssh.document(**{**ssh.base, "hosts": ssh.base["hosts"][:1], "agentPython": str(old)})
    found = ssh.checks(1)["127.0.0.11"]
    assert list(found) == ["reachable", "host key", "python"]
    assert (
        found["python"][1] == f"{old} is Python 3.6.15; install 3.9 or newer, or name one (agentPython in the cluster document)"
    )


def test_a_node_under_two_names_and_a_folder_in_the_way(ssh):
    first, second = ssh.base["hosts"][:2]
    again = {"host": f"{ssh.servers.user}@127.0.0.11", "root": first["root"]}
    Path(second["root"]).write_text("in the way")
    ssh.document(**{**ssh.base, "hosts": [first, again, second]})
    found = ssh.checks(1)
    assert found["127.0.0.11"]["folder"][0] == "ok"
    assert "is node 127.0.0.11 again" in found[again["host"]]["folder"][1]
    assert list(found["127.0.0.12"]) == ["reachable", "host key", "python"]
    assert found["127.0.0.12"]["python"][1].startswith(f"{second['root']} is not a folder; mend that, or name another folder")


def test_the_local_cluster(client):
    client.document(nodes=3)
    found = client.checks(0)
    assert list(found) == ["node-0", "node-1", "node-2"]
    for node in found.values():
        assert list(node) == LOCAL
    assert found["node-2"]["reachable"][1] == "this machine"


def test_neither_mlflow_nor_paramiko_is_imported(client):
    client.document(nodes=1)
    code = (
        "import sys; from mlflow_batchai.cli import main; sys.argv = ['batchai', 'doctor', 'c', '-q']\n"
        "try: main()\n"
        "finally: print(*({'mlflow', 'paramiko'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "\n")


@pytest.mark.parametrize("plain", [False, True])
def test_colors_on_a_terminal_only_where_they_are_welcome(client, plain):
    client.document(nodes=1, python="/bin/false")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", **({"NO_COLOR": "1"} if plain else {})}
    with os.fdopen(ours, "rb", 0) as terminal:
        done = subprocess.run([BATCHAI, "doctor", "c", "-q"], env=environment, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        out = terminal.read(65536).decode()
    assert (done.returncode, done.stderr) == (1, b"")
    assert ("\x1b[32mok" in out and "\x1b[31mfailed" in out) is not plain
    assert plain is ("\x1b" not in out)


@pytest.mark.parametrize(
    ("keys", "arguments", "code", "part"),
    [
        ({"engine": "ssh"}, ["c"], 1, "has engine: ssh and no hosts"),
        ({}, ["nobody"], 3, "there is no cluster 'nobody'"),
        ({}, ["c", "--query", "ready["], 2, "is no JMESPath expression"),
    ],
)
def test_what_can_not_be_examined_is_one_sentence(client, keys, arguments, code, part):
    client.document(**keys)
    ended, out, err = client.run(*arguments)
    assert (ended, out) == (code, "") and part in err and len(err.splitlines()) == 1


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    if reason := unavailable():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("doctor")
    for name in ("share", "other"):
        (root / name).mkdir()
    good = Setup(share=root / "share")
    bad = [Setup(share=root / "other"), Setup(), Setup(share=root / "share", without=("python3",))]
    full = Setup(share=root / "share", var_tmp=4 << 20)
    with Machines(root, [good, good, good, *bad, full]) as made:
        made.share_here = root / "share"
        yield made


@pytest.fixture
def islands(client, machines):
    """The client with a document of some of the machines: a function of their indexes and more keys."""

    def document(*indexes, **keys):
        client.share = machines.share_here
        client.document(engine="ssh", **on_machines(machines, client, indexes), **keys)
        return [machines[index].address for index in indexes]

    return document


def failures(found):
    return {node: [name for name, (state, _) in checks.items() if state == "failed"] for node, checks in found.items()}


def test_what_a_machine_lacks(client, machines, islands):
    good, other, none, no_python, full = islands(0, 3, 4, 5, 6)
    found = client.checks(1)
    assert failures(found) == {good: [], other: ["share"], none: ["share"], no_python: ["python"], full: ["folder"]}
    assert f"its {SHARE} is not the share that this machine has" in found[other]["share"][1]
    assert f"there is no folder {SHARE} there" in found[none]["share"][1]
    assert "install python3" in found[no_python]["python"][1]
    assert "MiB are free for /var/tmp/batchai-root" in found[full]["folder"][1]


def test_a_firewall_and_an_unplugged_machine(client, machines, islands):
    one, two, three = islands(0, 1, 2)
    machines[0].block(machines[1])
    try:
        found = client.checks(1)
    finally:
        machines[0].unblock(machines[1])
    assert failures(found) == {one: ["network"], two: ["network"], three: []}
    assert found[one]["network"][1].startswith(f"eth0 ({one}) is not reached by {two} (no ")
    assert "open TCP ports 32768-60999 on this node to the other nodes" in found[two]["network"][1]

    machines[2].unplug()
    try:
        found = client.checks(1)
    finally:
        machines[2].plug()
    assert failures(found) == {one: [], two: [], three: ["reachable"]}
    assert list(found[three]) == ["reachable"] and "within 5 s" in found[three]["reachable"][1]


# An Azure file share.


def test_an_azure_share(ssh, azure):
    """All nodes use it by REST."""
    azure.share("batchai")
    on_azure = {"share": azure.url("batchai"), "fileEndpoint": azure.endpoint, "credentials": {"accountKey": azure.key}}
    ssh.document(**{**ssh.base, **on_azure, "python": sys.executable})
    found = ssh.checks(0)
    for checks in found.values():
        assert set(checks) == set(REMOTE)
        assert checks["share"] == ("ok", f"{azure.url('batchai')}, the same as here, writable (Azure Files)")
    left = [path for path in (azure.root / "file" / "batchai").rglob("*") if path.is_file()]
    assert left == []


def test_the_users_default_cluster(cli: Cli) -> None:
    said = cli("doctor", BATCHAI_CLUSTER="mine")
    assert (said.code, said.out) == (3, "") and "there is no cluster 'mine'" in said.err
