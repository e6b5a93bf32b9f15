"""Commands, files and streams over SSH to real servers, and one clear sentence for each way in which that fails."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
import traceback
from pathlib import Path

import paramiko
import psutil
import pytest
from sshd import SshNode, make_key, ssh_nodes
from waiting import wait_for

from mlflow_batchai.engines.parallel import in_background
from mlflow_batchai.engines.shell import transport
from mlflow_batchai.engines.shell.connection import Connection, open_all
from mlflow_batchai.engines.shell.target import resolve
from mlflow_batchai.errors import ClusterError, ConnectionLostError, HostKeyError, LoginError

SECRET = "tr0ub4dor&3"
# Seconds for connections that nobody answers.
TIMEOUT = 1.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with ssh_nodes(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user without keys, agent or config of his own; at the end no jump host is left open."""
    folder = tmp_path / "home"
    (folder / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    for name in ("SSH_AUTH_SOCK", "BATCHAI_SSH_PASSWORD", "BATCHAI_SSH_PASSPHRASE"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    assert not transport._JUMPS


@pytest.fixture
def reach(nodes):
    """Makes connections to nodes; they are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(node: SshNode | str, **arguments) -> Connection:
            given = {
                "port": nodes.port,
                "key_file": nodes.key_file,
                "known_hosts": nodes.known_hosts,
                "timeout": 5.0,
                **arguments,
            }
            address = node if isinstance(node, str) else node.address
            return stack.enter_context(Connection(resolve(address, **given)))

        yield make


@pytest.fixture
def special(nodes, tmp_path):
    """Starts one more server, with settings of its own."""
    with contextlib.ExitStack() as stack:

        def start(**settings) -> SshNode:
            node = SshNode(
                tmp_path / "special", "127.0.0.15", nodes.port, nodes.key_file, tmp_path / "special_known", **settings
            )
            stack.callback(node.stop)
            return node

        yield start


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """A running ssh-agent; adds keys to it."""
    path = tmp_path / "agent.sock"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        wait_for(path.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield lambda *keys: subprocess.run(["ssh-add", "-q", *map(str, keys)], check=True, stdin=subprocess.DEVNULL)
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def listener():
    """A server that isn't sshd, at 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@contextlib.contextmanager
def in_time():
    """What happens inside takes one TIMEOUT or two, on a busy machine too, and not a dozen."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < 6 * TIMEOUT


def problem(connection: Connection, kind: type[ClusterError] = ClusterError) -> str:
    """The sentence with which opening fails."""
    with pytest.raises(ClusterError) as caught:
        connection.open()
    assert type(caught.value) is kind
    assert not connection.alive
    text = str(caught.value)
    assert text.startswith(f"node {connection.target.name} ({connection.target.address})") and "\n" not in text
    return text


# What works


WORDS = ["a b", "'", '"', "$HOME", "`id`", "x\ny", "a;b", "", "é→", "*", "\\", "-n", "~", "#"]


def test_words_reach_the_command_as_they_are(nodes, reach):
    result = reach(nodes[0]).run(["/usr/bin/python3", "-c", "import sys; print(ascii(sys.argv[1:]))", *WORDS])
    assert (result.code, result.out) == (0, f"{WORDS!a}\n")


def test_how_a_command_ended(nodes, reach):
    connection = reach(nodes[0])
    assert connection.run(["sh", "-c", "echo out; echo err >&2; exit 3"]) == (3, "out\n", "err\n")
    assert connection.run(["no-such-command"]).code == 127
    assert connection.run(["sh", "-c", "kill -9 $$"]).code == -1
    assert connection.run(["printf", r"\377"]).out == "\\xff"
    assert connection.run(["pwd"]).out == f"{nodes[0].home}\n"
    assert connection.run(["tty"]).out == "not a tty\n"


def test_much_input_and_output(nodes, reach):
    data = os.urandom(10_000_000)
    result = reach(nodes[0]).run(["sh", "-c", "tee /dev/stderr | base64 -w0; echo done >&2"], data)
    assert base64.b64decode(result.out) == data
    assert result.err.endswith("done\n")


def test_a_secret_on_standard_input_is_in_no_argv(nodes, reach):
    connection = reach(nodes[0], password=SECRET)
    seen = []

    def look():
        wait_for(lambda: (nodes[0].home / "waiting").exists())
        seen.append(Path(f"/proc/{os.getpid()}/cmdline").read_bytes())
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                seen.append(path.read_bytes())
        (nodes[0].home / "go").touch()

    looker = threading.Thread(target=look)
    looker.start()
    result = connection.run(
        ["sh", "-c", "read w; touch waiting; while ! [ -e go ]; do sleep .01; done; echo $w"], f"{SECRET}\n".encode()
    )
    looker.join()
    assert result.out == f"{SECRET}\n"
    assert len(seen) > 2 and not [line for line in seen if SECRET.encode() in line]


def test_a_file_is_put_whole(nodes, reach):
    connection = reach(nodes[0])
    data = os.urandom(10_000_000)
    connection.put("new folder/ä/file", data)
    connection.put("new folder/ä/file", data[:-1])
    file = nodes[0].home / "new folder" / "ä" / "file"
    assert file.read_bytes() == data[:-1]
    assert [oct(path.stat().st_mode & 0o777) for path in (file, file.parent, file.parent.parent)] == ["0o600", "0o700", "0o700"]
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    connection.put(str(nodes[0].home / "script"), b"", 0o755)
    assert (nodes[0].home / "script").stat().st_mode & 0o777 == 0o755


def test_a_stream_answers_line_by_line(nodes, reach):
    script = 'echo ready; while read line; do echo "<$line>"; done'
    with reach(nodes[0]).stream(["sh", "-c", script]) as stream:
        assert stream.read_line(5) == b"ready"
        assert [stream.ask(line, 5) for line in (b"one", b"two three\n", b"")] == [b"<one>", b"<two three>", b"<>"]


def test_much_on_standard_error_blocks_no_stream(nodes, reach):
    script = "head -c 5000000 /dev/zero | tr '\\0' x | fold >&2; echo >&2; echo here; read line; echo the reason >&2; exit 4"
    with reach(nodes[0]).stream(["sh", "-c", script]) as stream:
        assert stream.read_line(20) == b"here"
        with pytest.raises(ConnectionLostError, match=r"^node 127.0.0.11 .*: sh has ended with exit code 4: the reason$"):
            stream.ask(b"go", 5)
        with pytest.raises(ConnectionLostError, match="exit code 4"):
            stream.ask(b"go", 5)


def test_an_answer_that_comes_late(nodes, reach):
    connection = reach(nodes[0])
    with connection.stream(["sh", "-c", "read line; sleep 1; echo late; read line"]) as stream:
        with pytest.raises(ClusterError, match=r"^node .*: sh did not answer within 0.1 s; check that the machine"):
            stream.ask(b"x", 0.1)
        # Else the late answer would be taken for the next one's.
        with pytest.raises(ConnectionLostError):
            stream.ask(b"y", 5)
    assert connection.alive


@pytest.mark.parametrize("held", ["<&- >&-", "<&- 2>&-"])
def test_what_runs_on_in_the_background_does_not_hold_up_the_command(nodes, reach, held):
    script = f"echo out; echo err >&2; sleep 20 {held} & exit 3"
    assert reach(nodes[0]).run(["sh", "-c", script], timeout=12) == (3, "out\n", "err\n")


def test_input_that_a_command_takes_later_arrives_whole(nodes, reach):
    size = 12_000_000  # more than the window and all buffers hold
    done = reach(nodes[0]).run(["sh", "-c", "sleep 2.5; wc -c"], stdin=b"x" * size, timeout=60)
    assert (done[0], done[1].strip()) == (0, str(size))


def test_commands_that_end_at_once_break_no_connection(nodes, reach):
    # What is sent behind a channel's end makes sshd hang up (seen with busy cores and twenty threads).
    connection = reach(nodes[0])
    connection.open()
    problems = []

    def work() -> None:
        # More in all than MaxSessions: each is given back.
        for _ in range(6):
            try:
                assert connection.run(["no-such-command"], b"x" * 100_000).code == 127
            except ClusterError as error:
                problems.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert "nonexistent channel" not in nodes[0].log.read_text()


def test_a_dropped_connection_is_replaced_before_anything_is_sent(nodes, reach):
    connection = reach(nodes[0])
    with connection.stream(["cat"]) as stream:
        assert stream.ask(b"x", 5) == b"x"
        nodes[0].drop()
        with pytest.raises(ConnectionLostError, match=r"^node .*: the connection was lost while cat ran; check that"):
            stream.ask(b"y", 5)
    assert connection.run(["echo", "back"]).out == "back\n"
    nodes[0].drop()
    connection.put("again", b"x")
    assert (nodes[0].home / "again").read_bytes() == b"x"
    nodes[0].drop()
    with connection.stream(["cat"]) as stream:
        assert stream.ask(b"z", 5) == b"z"


def test_a_write_that_finds_the_connection_ended_before_the_reader_does(nodes, reach):
    connection = reach(nodes[0])
    with connection.stream(["cat"]) as stream:
        assert stream.ask(b"x", 5) == b"x"
        connection._link.transport.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLostError, match=r"^node .*: the connection was lost while cat ran; check that"):
            stream.ask(b"y", 5)
    with connection.stream(["cat"]) as stream:
        connection._link.transport.sock.shutdown(socket.SHUT_WR)
    assert connection.run(["echo", "back"]).out == "back\n"


@contextlib.contextmanager
def dropped_after(node, mark):
    """A node whose connections are dropped once a file is there."""

    def drop():
        wait_for(mark.exists)
        node.drop()

    dropper = threading.Thread(target=drop)
    dropper.start()
    yield
    dropper.join()


def test_a_command_whose_connection_drops_is_not_sent_again(nodes, reach):
    connection = reach(nodes[0])
    marks = nodes[0].home / "marks"
    with (
        dropped_after(nodes[0], marks),
        pytest.raises(
            ConnectionLostError, match=r"the connection was lost while sh ran; check that the machine is up, then try again$"
        ),
    ):
        connection.run(["sh", "-c", "echo x >> marks; sleep 1; echo y >> marks"])
    # What ran goes on, once.
    wait_for(lambda: marks.read_text() == "x\ny\n")
    assert connection.run(["cat", "marks"]).out == "x\ny\n"


def test_output_that_the_end_of_the_connection_cuts_off(nodes, reach):
    """The exit code has come before it: all the same the result is not taken for whole."""
    connection = reach(nodes[0])
    # sshd tells the code at once; what runs on writes in its place, so that nobody takes silence for the end.
    script = "(sleep 0.3; touch coded; while echo more; do sleep 0.05; done) & echo some; exit 3"
    with (
        dropped_after(nodes[0], nodes[0].home / "coded"),
        pytest.raises(ConnectionLostError, match="the connection was lost while sh ran"),
    ):
        connection.run(["sh", "-c", script])


def test_a_connection_that_ends_just_before_a_command_is_started(nodes, reach, monkeypatch):
    begin_to_wait = paramiko.Channel._event_pending

    def late(channel):
        nodes[0].drop()
        wait_for(lambda: channel.closed)
        begin_to_wait(channel)

    connection = reach(nodes[0], timeout=TIMEOUT)
    connection.open()
    monkeypatch.setattr(paramiko.Channel, "_event_pending", late)
    with in_time(), pytest.raises(ConnectionLostError, match="the connection was lost while true was started"):
        connection.run(["true"])


def test_a_node_that_goes_away_and_comes_back(nodes, reach):
    connection = reach(nodes[3])
    connection.open()
    nodes[3].stop()
    try:
        with pytest.raises(ClusterError, match=r"^node 127.0.0.14 .* refused the connection; check that sshd runs there"):
            connection.run(["true"])
    finally:
        nodes[3].start()
    assert connection.run(["echo", "back"]).out == "back\n"


def test_several_open_at_once_each_with_its_own_answer(nodes, reach):
    refused = reach("127.0.0.16", timeout=2.0)
    unknown = reach(nodes[1], known_hosts="/dev/null")
    fine = [reach(f"{node.user}@{node.address}") for node in nodes]
    answers = open_all([refused, unknown, *fine])
    assert [answers[connection.target.name] for connection in fine] == [None] * 4
    assert "refused the connection" in str(answers["127.0.0.16"])
    assert isinstance(answers["127.0.0.12"], HostKeyError)
    assert open_all([]) == {}


# Ways to a node


def test_a_chain_of_jump_hosts_is_shared(nodes, reach):
    nodes[0].drop()
    nodes[1].drop()
    chain = f"127.0.0.11:{nodes.port},127.0.0.12:{nodes.port}"
    connections = [reach(f"{nodes.user}@{node.address}", jump=chain) for node in (nodes[2], nodes[3])]
    connections.append(reach(nodes[2], jump=chain))
    assert set(open_all(connections).values()) == {None}
    assert len(nodes[0].sessions()) == len(nodes[1].sessions()) == 1
    assert connections[0].run(["sh", "-c", "echo $SSH_CONNECTION"]).out.split()[2] == "127.0.0.13"
    connections[0].close()
    assert connections[1].run(["true"]).code == 0


def test_a_jump_host_that_drops_is_replaced(nodes, reach):
    connections = [reach(node, jump=f"127.0.0.11:{nodes.port}") for node in (nodes[1], nodes[2])]
    assert set(open_all(connections).values()) == {None}
    nodes[0].drop()
    wait_for(lambda: not any(connection.alive for connection in connections))
    assert [connection.run(["echo", "back"]).out for connection in connections] == ["back\n"] * 2
    assert len(nodes[0].sessions()) == 1


def test_a_jump_host_that_fails_is_named_beside_the_node(nodes, reach):
    text = problem(reach(nodes[1], jump=f"127.0.0.16:{nodes.port}"))
    assert (
        f"can't be reached: jump host 127.0.0.16:{nodes.port} ({nodes.user}@127.0.0.16:{nodes.port}) refused the connection"
        in text
    )
    text = problem(reach("127.0.0.16", jump=f"127.0.0.11:{nodes.port}"))
    assert f"can't be reached from jump host 127.0.0.11:{nodes.port}" in text and text.endswith(f"has port {nodes.port} open")
    # Of several that are refused at once each is told why.
    many = open_all(reach(f"{name}@127.0.0.16", jump=f"127.0.0.11:{nodes.port}") for name in "abcdefghijkl")
    assert [text for text in map(str, many.values()) if "Connect failed; check" not in text] == [] and len(many) == 12
    answers = open_all(reach(f"{name}@127.0.0.12", jump=f"127.0.0.16:{nodes.port}") for name in ("a", "b", "c"))
    assert [text for text in map(str, answers.values()) if "jump host 127.0.0.16" not in text] == [] and len(answers) == 3


def test_a_proxy_command(nodes, reach, home):
    way = shlex.join(
        ["ssh", "-F", "none", "-i", str(nodes.key_file), "-o", f"UserKnownHostsFile={nodes.known_hosts}", "-p", str(nodes.port)]
    )
    (home / ".ssh" / "config").write_text(
        f"Host gpu\n HostName 127.0.0.12\n Port {nodes.port}\n ProxyCommand {way} -W %h:%p {nodes.user}@127.0.0.11 2>/dev/null\n"
        "Host bad\n HostName 127.0.0.12\n ProxyCommand echo no way out >&2\n"
        "Host mute\n HostName 127.0.0.12\n ProxyCommand sleep 3\n"
    )
    connection = reach("gpu", port=None)
    assert connection.run(["sh", "-c", "echo $SSH_CONNECTION"]).out.split()[2] == "127.0.0.12"
    connection.close()
    text = problem(reach("bad", port=None))
    assert text.endswith("through its ProxyCommand (no way out); try that command by hand: echo no way out >&2")
    assert "try that command by hand: sleep 3" in problem(reach("mute", port=None, timeout=0.5))
    assert not psutil.Process().children() or all("sleep" not in child.name() for child in psutil.Process().children())


# Nobody there


@contextlib.contextmanager
def swallowing():
    """A port that swallows packets, as a firewall does: the queue of connections that nobody accepts is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(server.getsockname())
        time.sleep(0.1)
        yield server.getsockname()[1]


def test_nothing_answers(reach):
    with swallowing() as port, in_time():
        text = problem(reach("127.0.0.1", port=port, timeout=TIMEOUT))
    assert "did not answer within 1 s; check that the machine is up and port" in text and text.endswith("is open")


def test_addresses_that_swallow_packets_leave_time_for_one_that_answers(nodes, reach, monkeypatch):
    with swallowing() as port:
        addresses = [("127.0.0.1", port), ("127.0.0.1", port), (nodes[0].address, nodes.port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **named: found)
        assert reach(nodes[0], timeout=3.0).run(["pwd"]).out == f"{nodes[0].home}\n"


def test_a_node_behind_a_jump_host_does_not_answer(nodes, reach):
    jump = f"127.0.0.11:{nodes.port}"
    neighbour = reach(nodes[1], jump=jump, timeout=TIMEOUT)
    neighbour.open()
    with swallowing() as port, in_time():
        text = problem(reach("127.0.0.1", port=port, jump=jump, timeout=TIMEOUT))
    assert f"can't be reached from jump host {jump}" in text and "no answer within 1 s" in text
    # The others that go through it don't suffer.
    assert neighbour.alive and neighbour.run(["echo", "fine"]).out == "fine\n"


def test_a_jump_host_that_drops_while_a_node_behind_it_is_reached(nodes, reach):
    jump = f"127.0.0.11:{nodes.port}"
    reach(nodes[1], jump=jump, timeout=60.0).open()
    with swallowing() as port:
        behind = reach("127.0.0.1", port=port, jump=jump, timeout=60.0)
        # Each stands on the one connection to the jump host.
        second = in_background(lambda: problem(behind))
        wait_for(lambda: [kept.users for kept in transport._JUMPS.values()] == [2])
        nodes[0].drop()
        assert f"can't be reached from jump host {jump}" in (text := second.result(60)) and "the connection was lost" in text


def test_a_server_that_accepts_and_says_nothing(listener, reach):
    with in_time():
        text = problem(reach("127.0.0.1", port=listener.getsockname()[1], timeout=TIMEOUT))
    assert "takes connections but did not answer as an SSH server within 1 s" in text


def test_a_node_that_hangs(nodes, reach):
    connection = reach(nodes[3], timeout=TIMEOUT)
    connection.open()
    nodes[3].freeze()
    try:
        with in_time(), pytest.raises(ClusterError, match=r"takes connections but did not answer as an SSH server within 1 s"):
            connection.run(["true"])
    finally:
        nodes[3].thaw()
    assert connection.run(["echo", "back"]).out == "back\n"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_hangs_up(listener, reach, said):
    def serve():
        client, _ = listener.accept()
        with client:
            client.sendall(said)

    server = threading.Thread(target=serve)
    server.start()
    text = problem(reach("127.0.0.1", port=listener.getsockname()[1]))
    server.join()
    assert "closed the connection before the login" in text and "check that port" in text


def test_a_server_that_hangs_up_during_the_login(listener, nodes, reach, tmp_path):
    """A machine that goes down just then has refused nobody."""

    class Server(paramiko.ServerInterface):
        def check_auth_publickey(self, username, key):
            client.shutdown(socket.SHUT_RDWR)
            return paramiko.AUTH_FAILED

    def serve():
        nonlocal client
        client, _ = listener.accept()
        served = paramiko.Transport(client)
        served.add_server_key(key)
        served.start_server(threading.Event(), Server())
        served.join()

    client = None
    key = paramiko.PKey.from_path(nodes.key_file)
    port = listener.getsockname()[1]
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n")
    server = threading.Thread(target=serve)
    server.start()
    text = problem(reach("127.0.0.1", port=port, known_hosts=known))
    server.join()
    assert "closed the connection before the login; check that port" in text


# Host keys


def test_an_unknown_host_key(nodes, reach, tmp_path):
    known = tmp_path / "it's new" / "known_hosts"
    text = problem(reach(nodes[0], known_hosts=known), HostKeyError)
    shown = subprocess.run(["ssh-keygen", "-lf", nodes[0].host_keys["ed25519"]], capture_output=True, text=True).stdout.split()[
        1
    ]
    assert f"its host key ED25519 {shown} is not known; after comparing the fingerprint" in text
    # The very line that it tells helps.
    line = text.partition("add it: ")[2]
    assert f"ssh-keyscan -p {nodes.port} 127.0.0.11 >> " in line
    subprocess.run(["sh", "-c", line], check=True, stderr=subprocess.DEVNULL)
    reach(nodes[0], known_hosts=known).open()


def test_a_changed_host_key(nodes, reach, tmp_path):
    known = tmp_path / "known hosts"
    other = Path(f"{make_key(tmp_path / 'other')}.pub").read_text().split()[1]
    known.write_text(f"# old\n[127.0.0.11]:{nodes.port} ssh-ed25519 {other}\n")
    text = problem(reach(nodes[0], known_hosts=known), HostKeyError)
    prints = re.findall(r"SHA256:\S+", text)
    assert f"its host key has changed: {known}, line 2, holds ED25519 SHA256:" in text
    assert len(set(prints)) == 2
    forget = text.partition("forget the old key: ")[2].partition(" and, after")[0]
    assert forget == f"ssh-keygen -R '[127.0.0.11]:{nodes.port}' -f '{known}'"
    learn = text.partition("add the new one: ")[2].partition(" (if it was not")[0]
    subprocess.run(["sh", "-c", f"{forget} && {learn}"], check=True, capture_output=True)
    reach(nodes[0], known_hosts=known).open()


def test_a_revoked_host_key(nodes, reach, tmp_path):
    line = next(line for line in nodes.known_hosts.read_text().splitlines() if "127.0.0.11" in line)
    known = tmp_path / "known"
    known.write_text(f"{line}\n@revoked {line}\n")
    assert f"is revoked in {known}, line 2" in problem(reach(nodes[0], known_hosts=known), HostKeyError)


def test_one_known_type_of_key_is_enough(reach, special, tmp_path):
    node = special(kinds=("ed25519", "ecdsa", "rsa"))
    for kind, key in node.host_keys.items():
        name, blob = Path(f"{key}.pub").read_text().split()[:2]
        known = tmp_path / kind
        known.write_text(f"[127.0.0.15]:{node.port} {name} {blob}\n")
        reach(node, known_hosts=known).open()
        subprocess.run(["ssh-keygen", "-H", "-f", str(known)], check=True, capture_output=True)
        assert "127.0.0.15" not in known.read_text()
        reach(node, known_hosts=known).open()


def test_an_alias_and_the_name_without_a_port(nodes, reach, home, tmp_path):
    kind, blob = Path(f"{nodes[0].host_keys['ed25519']}.pub").read_text().split()[:2]
    known = tmp_path / "known"
    known.write_text(f"the-gpu {kind} {blob}\n127.0.0.11 {kind} {blob}\n")
    reach(nodes[0], known_hosts=known).open()
    (home / ".ssh" / "config").write_text(
        "Host gpu\n HostName 127.0.0.11\n HostKeyAlias the-gpu\nHost new\n HostName 127.0.0.11\n HostKeyAlias x\n"
    )
    reach("gpu", known_hosts=known).open()
    line = problem(reach("new", known_hosts=known), HostKeyError).partition("add it: ")[2]
    subprocess.run(["sh", "-c", line], check=True, stderr=subprocess.DEVNULL)
    reach("new", known_hosts=known).open()


# Logging in


@pytest.fixture
def locked(nodes, tmp_path):
    """A key with a passphrase that the first node lets in."""
    key = make_key(tmp_path / "locked", passphrase=SECRET)
    with nodes[0].authorized_keys.open("a") as file:
        file.write(Path(f"{key}.pub").read_text())
    return key


def test_a_key_with_a_passphrase(nodes, reach, locked, monkeypatch):
    text = problem(reach(nodes[0], key_file=locked), LoginError)
    assert (
        f"the key file {locked} has a passphrase; hand it to your agent: ssh-add {locked}, or set BATCHAI_SSH_PASSPHRASE"
        in text
    )
    monkeypatch.setenv("BATCHAI_SSH_PASSPHRASE", "wrong" + SECRET)
    text = problem(reach(nodes[0], key_file=locked), LoginError)
    assert (
        f"the passphrase in BATCHAI_SSH_PASSPHRASE doesn't open the key file {locked}; correct it" in text
        and SECRET not in text
    )
    monkeypatch.setenv("BATCHAI_SSH_PASSPHRASE", SECRET)
    reach(nodes[0], key_file=locked).open()


def test_the_agent_has_the_key(nodes, reach, agent, tmp_path):
    stranger = make_key(tmp_path / "stranger")
    agent(nodes.key_file, stranger)
    reach(nodes[0], key_file=None).open()
    text = problem(reach(nodes[0], user="nobody-here", key_file=stranger), LoginError)
    assert f"(tried the key file {stranger}, 1 of the agent's keys);" in text


def test_more_keys_than_the_server_lets_us_try(reach, special, agent, tmp_path):
    node = special(options={"MaxAuthTries": "2"})
    agent(*(make_key(tmp_path / f"key{number}") for number in range(4)))
    text = problem(reach(node, known_hosts=node.known_hosts, key_file=None), LoginError)
    assert "refused the login (tried 2 of the agent's keys" in text


def test_the_agent_opens_a_key_with_a_passphrase(nodes, reach, agent, locked, home, tmp_path):
    copy = tmp_path / "copy"
    shutil.copy(locked, copy)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", SECRET, "-N", "", "-f", str(copy)], check=True, stdout=subprocess.DEVNULL)
    agent(make_key(tmp_path / "other"), copy)
    reach(nodes[0], key_file=locked).open()
    (home / ".ssh" / "config").write_text(f"IdentitiesOnly yes\nIdentityFile {locked}\n")
    reach(nodes[0], key_file=None).open()
    (home / ".ssh" / "config").write_text(f"IdentitiesOnly yes\nIdentityFile {tmp_path}/other.pub\n")
    assert "1 of the agent's keys" in problem(reach(nodes[0], key_file=None), LoginError)


@pytest.mark.parametrize(
    ("cipher", "said"), [("chacha20-poly1305@openssh.com", "can't be used"), ("aes256-gcm@openssh.com", "doesn't open the key")]
)
def test_a_key_that_only_openssh_opens(nodes, reach, agent, home, tmp_path, monkeypatch, cipher, said):
    """It is said so of one that the user has named; of others the agent may have the key, or another file does."""
    key, copy = home / ".ssh" / "id_ed25519", tmp_path / "copy"
    shutil.copy(nodes.key_file, copy)
    shutil.copy(copy, key)
    shutil.copy(f"{nodes.key_file}.pub", f"{key}.pub")
    subprocess.run(["ssh-keygen", "-q", "-p", "-Z", cipher, "-N", SECRET, "-f", key], check=True, stdout=subprocess.DEVNULL)
    monkeypatch.setenv("BATCHAI_SSH_PASSPHRASE", SECRET)
    text = problem(reach(nodes[0], key_file=key), LoginError)
    assert f"the key file {key} holds no private key that can be used" in text
    monkeypatch.setenv("BATCHAI_SSH_PASSPHRASE", "wrong" + SECRET)
    assert said in problem(reach(nodes[0], key_file=None), LoginError)
    agent(copy)
    reach(nodes[0], key_file=None).open()


def test_a_password(nodes, reach, special, tmp_path, monkeypatch):
    if os.getuid() or not shutil.which("unshare") or not shutil.which("openssl"):
        pytest.skip("needs root, unshare and openssl")
    hashed = subprocess.run(
        ["openssl", "passwd", "-6", "-stdin"], input=SECRET, capture_output=True, text=True, check=True
    ).stdout.strip()
    shadow = tmp_path / "shadow"
    lines = Path("/etc/shadow").read_text().splitlines()
    shadow.write_text(
        "\n".join(f"root:{hashed}:20000:0:99999:7:::" if line.startswith("root:") else line for line in lines) + "\n"
    )
    node = special(
        options={"PasswordAuthentication": "yes", "PermitRootLogin": "yes"},
        # The server sees a root with that password; the machine doesn't.
        prefix=["unshare", "--mount", "sh", "-c", f'mount --bind {shlex.quote(str(shadow))} /etc/shadow && exec "$@"', "_"],
    )
    reach(node, known_hosts=node.known_hosts, key_file=None, password=SECRET).open()
    monkeypatch.setenv("BATCHAI_SSH_PASSWORD", SECRET)
    reach(node, known_hosts=node.known_hosts, key_file=None).open()
    monkeypatch.setenv("BATCHAI_SSH_PASSWORD", "wrong" + SECRET)
    connection = reach(node, known_hosts=node.known_hosts, key_file=None)
    text = problem(connection, LoginError)
    assert "(tried no key of an agent, the password); " in text
    try:
        connection.open()
    except LoginError as error:
        assert SECRET not in "".join(traceback.format_exception(error)) and SECRET not in repr(connection.target)


# Limits on the node


def test_no_more_sessions(reach, special):
    node = special(options={"MaxSessions": "1"})
    connection = reach(node, known_hosts=node.known_hosts)
    with connection.stream(["cat"]) as stream:
        stream.ask(b"x", 5)
        with pytest.raises(
            ClusterError, match=r"refused one more session on this connection .*; raise MaxSessions in its sshd_config"
        ):
            connection.run(["true"])


@pytest.mark.parametrize("path", ["plain/sub/file", "/proc/new/file"])
def test_a_file_that_the_node_refuses(nodes, reach, path):
    (nodes[0].home / "plain").touch()
    with pytest.raises(
        ClusterError, match=rf"^node 127.0.0.11 .*: {path} can't be written: .*; check that \w+ may write there"
    ):
        reach(nodes[0]).put(path, b"x")
