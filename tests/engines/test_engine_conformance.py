"""The promises of Engine (engines/base.py), held against every implementation with real processes: a new one adds a fixture."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest
from plans import toy_plan
from slurm_daemons import slurm_daemons
from sshd import SshNodes, ssh_nodes
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.documents.cluster import parse_cluster
from mlflow_batchai.engines import archive
from mlflow_batchai.engines.base import CheckResult, Needs, NodeAccess, Poll, PollState, Scalable, StartRequest
from mlflow_batchai.engines.local_hosts import LocalHosts
from mlflow_batchai.engines.shell.connection import Connection
from mlflow_batchai.engines.shell.target import resolve
from mlflow_batchai.engines.slurm import Here, Slurm
from mlflow_batchai.engines.ssh_hosts import SshHosts, SshNode
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.storage.base import identify
from mlflow_batchai.storage.directory import DirectoryShare

SECRET = "hush-hush-hush"


class Site:
    """A cluster of two nodes of this machine, with its control share."""

    kind = "local"
    # What is said of a job that waits for its nodes, and of one that is gone.
    waits, gone = "2 of 2 nodes", "is gone"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.share = DirectoryShare(root / "share")
        self.number = 0
        self.engine = self.another_process()

    def another_process(self, nodes: int = 2):
        """The same cluster, as one who only has its name knows it."""
        return LocalHosts(self.root / "home", "c", nodes, str(self.root / "share"))

    def node_root(self, index: int, handle: dict | None = None) -> Path:
        return self.root / "home" / "nodes" / "c" / str(index)

    def agents(self, request: StartRequest) -> list[psutil.Process]:
        """A job's agents that live, by node."""
        mine = [process for process in self.left() if f"--folder={request.folder}" in process.cmdline()]
        nodes = {word: process for process in mine for word in process.cmdline() if word.startswith("--node=")}
        return [nodes[word] for word in sorted(nodes)]

    def job(self, command: str, nodes: int = 1) -> StartRequest:
        self.number += 1
        name = f"{os.getpid():x}{self.number}"
        folder = f"jobs/{name}"
        names = {"job": name, "name": name, "folder": folder, "segment": folder}
        plan = toy_plan(self.share.root, nodeCount=nodes, command=command, secretNames=["TOKEN"], coresPerNode=1, **names)
        self.share.write(protocol.JobPaths(folder).plan, protocol.encode([plan]))
        return StartRequest(
            name, protocol.job_mark(name, 1), folder, 1, nodes, {"variables": {"TOKEN": SECRET}, "plan": protocol.digest(plan)}
        )

    def state(self, request: StartRequest):
        return Job(self.share, request.folder).state()

    def left(self) -> list[psutil.Process]:
        """Live processes that know this place: agents by their arguments, ranks by their environment.

        What answers an open connection is none.
        """
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
                texts = [] if line[-1:] == ["serve"] else [*line, *process.environ().values()]
                if process.pid != os.getpid() and process.status() != "zombie" and str(self.root) in " ".join(texts):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        self.engine.close()


class SshSite(Site):
    """The same over SSH, with two real servers."""

    kind = "ssh"

    def __init__(self, root: Path, servers: SshNodes) -> None:
        self.servers = servers
        self.engines: list[SshHosts] = []
        super().__init__(root)

    def another_process(self, nodes: int = 2, named: str = "{address}", backwards: bool = False):
        made = []
        for index in range(nodes):
            server = self.servers[index]
            keys = {"key_file": server.key_file, "known_hosts": server.known_hosts}
            target = resolve(f"{server.user}@{server.address}:{server.port}", **keys)
            name = named.format(user=server.user, address=server.address, port=server.port)
            made.append(SshNode(name, target, str(self.node_root(index))))
        if backwards:
            made.reverse()
        self.engines.append(SshHosts(made, str(self.share.root), "python3", sys.executable, lambda: identify(self.share)))
        return self.engines[-1]

    def node_root(self, index: int, handle: dict | None = None) -> Path:
        return self.root / "node-roots" / str(index)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


class SlurmSite(Site):
    """Two nodes of a real Slurm, whose commands run here, or on a login node."""

    kind = "slurm"
    waits, gone = "PENDING (Resources)", "has ended"

    def __init__(self, root: Path, login: SshNodes | None = None) -> None:
        self.runners = []
        self.login = login
        super().__init__(root)

    def another_process(self, nodes: int = 2):
        keys = {"engine": "slurm", "share": str(self.share.root), "agentPython": sys.executable, "exclusive": True}
        keys["root"] = str(self.root / "node roots")
        self.runners.append(Here())
        if self.login:
            node = self.login[0]
            address = f"{node.user}@{node.address}:{node.port}"
            self.runners[-1] = Connection(resolve(address, key_file=node.key_file, known_hosts=node.known_hosts))
        document = parse_cluster(keys, "c.yaml")[0]
        share, runner = str(self.share.root), self.runners[-1]
        return Slurm("c", document, nodes, share, "me", runner, lambda: identify(self.share), archive.build)

    def node_root(self, index: int, handle: dict | None = None) -> Path:
        return self.root / "node roots" / str(handle["ticket"]) / str(index)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


@pytest.fixture(scope="module")
def slurm():
    with slurm_daemons(2) as made:
        yield made


@pytest.fixture(scope="module")
def slurm_login(slurm, tmp_path_factory):
    with ssh_nodes(tmp_path_factory.mktemp("login"), 1, {"SLURM_CONF": str(slurm.config)}) as made:
        yield made


def made_site(kind: str, root: Path, request):
    if kind == "local":
        return Site(root)
    if kind == "ssh":
        return SshSite(root, request.getfixturevalue("ssh_servers"))
    request.getfixturevalue("slurm")
    return SlurmSite(root, request.getfixturevalue("slurm_login") if kind == "slurm-login" else None)


@contextlib.contextmanager
def opened_site(kind: str, root: Path, request):
    """At the end nothing of it is left; what a test that has failed leaves is only ended."""
    made, failures = made_site(kind, root, request), request.session.testsfailed
    yield made
    made.close()
    has_failed = request.session.testsfailed > failures
    with contextlib.suppress(AssertionError):
        wait_for(lambda: has_failed or not made.left())
    left = made.left()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert has_failed or not left, "left running"


@pytest.fixture(autouse=True)
def _canary(monkeypatch):
    monkeypatch.setenv("CANARY", "of-the-submitter")


@pytest.fixture(params=["local", "ssh", "slurm", "slurm-login"])
def site(request, tmp_path):
    with opened_site(request.param, tmp_path, request) as made:
        yield made


@pytest.fixture(params=["local", "ssh"])
def queued_site(request, tmp_path):
    """A cluster whose queue is ours: its agents are there from the submit, and wait."""
    with opened_site(request.param, tmp_path, request) as made:
        yield made


def over(site, request, handle):
    wait_for(lambda: site.state(request).ended)
    wait_for(lambda: len(site.engine.poll(handle).gone) == len(handle["nodes"]))
    return site.state(request)


def test_1_a_handle_is_json_without_secrets_and_enough_for_another_process(site):
    request = site.job('echo "$TOKEN" | wc -c; env | grep -c CANARY; sleep 600', nodes=2)
    handle = json.loads(json.dumps(site.engine.submit(request)))
    assert SECRET not in json.dumps(handle)
    wait_for(lambda: site.state(request).execution_state == "running")
    other = site.another_process()
    wait_for(lambda: other.poll(handle).state is PollState.ALIVE)  # over SSH it connects first
    other.cancel(handle)
    poll = site.engine.poll(handle)
    assert (poll.state, poll.gone, poll.unknown) == (PollState.GONE, (0, 1), ())
    assert all(site.gone in poll.of(node) for node in (0, 1))


def test_1_secrets_reach_the_ranks_and_nothing_else(site):
    request = site.job('printf %s "$TOKEN" > "$AZ_BATCHAI_STDOUTERR_DIR/../len-${#TOKEN}"; env | grep -c CANARY; sleep 0.5')
    handle = site.engine.submit(request)
    agents = wait_for(lambda: site.agents(request))
    seen = [" ".join([*process.cmdline(), *process.environ().values()]) for process in agents]
    assert SECRET not in " ".join(seen)
    over(site, request, handle)
    folder = site.share.root / request.folder
    assert (folder / f"len-{len(SECRET)}").read_text(encoding="utf-8") == SECRET
    (folder / f"len-{len(SECRET)}").unlink()
    assert "0" in (folder / "stdouterr" / "stdout.txt").read_text(encoding="utf-8").split()  # no CANARY
    for path in site.root.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_check_says_how_many_nodes_can_be_used(site):
    assert site.engine.check(1) == site.engine.check(2, Needs((), None, sys.executable)) == CheckResult(2)
    with pytest.raises(ClusterError, match="wants 3 nodes and the cluster has 2"):
        site.engine.check(3)


def test_what_an_engine_can_do_besides_is_asked_of_it(site):
    if isinstance(site.engine, Scalable):
        assert len(site.engine.census().nodes) == site.engine.node_limit
    if isinstance(site.engine, NodeAccess):
        places = [node.machine.ask("place", root=node.root) for node in site.engine.nodes]
        assert list(site.engine.folder_problems(places)) == [""] * len(places)
        site.engine.close()


def test_1_render_shows_what_would_run_and_starts_nothing(site):
    request = site.job("true", nodes=2)
    commands = site.engine.render(request)
    assert [command.node for command in commands] == [0, 1]
    for command in commands:
        assert f"--folder={request.folder}" in " ".join(command.argv)
        assert SECRET not in json.dumps(command.argv)
        assert (f"--part={command.node}/2/2" in " ".join(command.argv)) == (site.kind == "local"), "GPUs and cores are divided"
    assert site.left() == []


def test_2_all_nodes_or_none(site):
    with pytest.raises(ClusterError, match="wants 3 nodes and the cluster has 2"):
        site.engine.submit(site.job("true", nodes=3))
    if site.kind == "slurm":
        return
    # The second node can't start its agent: a file is in the way of its log.
    site.node_root(1).mkdir(parents=True, exist_ok=True, mode=0o700)
    (site.node_root(1) / "logs").write_text("in the way", encoding="utf-8")
    with pytest.raises(
        ClusterError, match="File exists: .*/1/logs" if site.kind == "local" else "node 127.0.0.12: File exists"
    ):
        site.engine.submit(site.job("sleep 600", nodes=2))
    assert site.left() == []
    # Its reservation is dropped: the next job does not wait for it.
    (site.node_root(1) / "logs").unlink()
    request = site.job("true", nodes=2)
    assert over(site, request, site.engine.submit(request)).execution_state == "succeeded"


def test_3_queued_alive_and_gone(site):
    first, second = site.job("sleep 600", nodes=2), site.job("true", nodes=2)
    one = site.engine.submit(first)
    wait_for(lambda: site.state(first).execution_state == "running")
    two = site.engine.submit(second)
    assert wait_for(lambda: site.engine.poll(two)).state is PollState.QUEUED
    assert wait_for(lambda: site.waits in site.engine.poll(two).detail)
    assert site.engine.poll(one) == Poll(PollState.ALIVE)
    site.engine.cancel(one)
    assert site.engine.poll(one).state is PollState.GONE
    assert over(site, second, two).execution_state == "succeeded"


def test_3_agents_that_wait_for_long_are_polled_and_ended_like_others(queued_site):
    """Each is a small program by then (``agent/reservation/waiter.py``)."""
    first, second, third = (
        queued_site.job("sleep 600", nodes=2),
        queued_site.job("true", nodes=2),
        queued_site.job("true", nodes=2),
    )
    handles = [queued_site.engine.submit(request) for request in (first, second, third)]
    waiting = [psutil.Process(entry["pid"]) for handle in handles[1:] for entry in handle["nodes"]]
    wait_for(lambda: all(process.name() == "bash" for process in waiting))
    polls = queued_site.engine.poll_all([*handles, {**handles[0], "engine": "other"}])
    assert [poll.state for poll in polls] == [PollState.ALIVE, PollState.QUEUED, PollState.QUEUED, PollState.UNKNOWN]
    queued_site.engine.cancel(handles[1])
    assert queued_site.engine.poll(handles[1]).gone == (0, 1)
    waiting[2].kill()
    assert wait_for(lambda: queued_site.engine.poll(handles[2]).gone) == (0,)
    queued_site.engine.cancel(handles[2])
    queued_site.engine.cancel(handles[0])
    assert queued_site.left() == []


def test_3_a_lost_node_is_named_with_what_it_said_last(queued_site):
    request = queued_site.job("sleep 600", nodes=2)
    handle = queued_site.engine.submit(request)
    wait_for(lambda: queued_site.state(request).execution_state == "running")
    psutil.Process(handle["nodes"][1]["pid"]).kill()
    poll = wait_for(lambda: (poll := queued_site.engine.poll(handle)).gone and poll)
    assert (poll.state, poll.gone) == (PollState.GONE, (1,))
    assert poll.detail.startswith(
        "the agent of node-1 is gone" if queued_site.kind == "local" else "the agent of node-1 (127.0.0.12) is gone"
    )
    queued_site.engine.cancel(handle)


def test_3_an_agent_that_fails_before_it_has_the_share_says_why(site):
    request = site.job("true")
    site.share.delete(protocol.JobPaths(request.folder).plan)
    handle = site.engine.submit(request)
    poll = wait_for(lambda: (poll := site.engine.poll(handle)).gone and poll)
    assert "there is no plan at" in poll.detail


def test_3_a_reused_pid_is_not_the_agent(queued_site):
    request = queued_site.job("true")
    handle = queued_site.engine.submit(request)
    over(queued_site, request, handle)
    entry = handle["nodes"][0]
    record = queued_site.node_root(0) / "tickets" / f"{handle['ticket']}.agent"
    record.write_text(json.dumps({**entry, "pid": os.getpid()}), encoding="utf-8")
    ours = {**handle, "nodes": [{**entry, "pid": os.getpid()}]}
    assert queued_site.engine.poll(ours).state is PollState.GONE
    queued_site.engine.cancel(ours)  # and we still live


def test_3_a_machine_that_knows_nothing_of_the_agent_may_be_another(queued_site):
    request = queued_site.job("sleep 600")
    handle = queued_site.engine.submit(request)
    (queued_site.node_root(0) / "tickets" / f"{handle['ticket']}.agent").rename(queued_site.root / "aside")
    poll = queued_site.engine.poll(handle)
    assert (poll.state, poll.gone, poll.unknown) == (PollState.UNKNOWN, (), (0,))
    assert "knows nothing of the job's agent; is it another machine by now, or was its folder" in poll.detail
    (queued_site.root / "aside").rename(queued_site.node_root(0) / "tickets" / f"{handle['ticket']}.agent")
    assert queued_site.engine.poll({**handle, "engine": "other"}).state is PollState.UNKNOWN
    queued_site.engine.cancel(handle)


def test_2_an_agent_whose_answer_was_lost_is_ended_too(queued_site):
    request = queued_site.job("sleep 600", nodes=2)
    handle = queued_site.engine.submit(request)
    wait_for(lambda: queued_site.state(request).execution_state == "running")
    without = {**handle, "nodes": [{key: entry[key] for key in ("name", "id", "root")} for entry in handle["nodes"]]}
    queued_site.engine.cancel(without)
    assert queued_site.left() == []


def test_3_on_another_machine_nothing_is_certain(site):
    request = site.job("sleep 600")
    handle = site.engine.submit(request)
    elsewhere = {**handle, "host": "another"}
    if site.kind != "local":
        other = site.another_process()
        wait_for(lambda: other.poll(elsewhere).state in (PollState.QUEUED, PollState.ALIVE))
        site.engine.cancel(elsewhere)
        return
    assert site.engine.poll(elsewhere).state is PollState.UNKNOWN
    with pytest.raises(ClusterError, match="runs on another; end it there"):
        site.engine.cancel(elsewhere)
    site.engine.cancel(handle)


def test_3_fewer_nodes_in_the_document_by_now(site):
    request = site.job("sleep 600", nodes=2)
    handle = site.engine.submit(request)
    wait_for(lambda: site.state(request).execution_state == "running")
    smaller = site.another_process(nodes=1)
    if site.kind == "ssh":
        assert smaller.poll(handle).state is PollState.UNKNOWN
        with pytest.raises(ClusterError, match="no longer in the cluster document"):
            smaller.cancel(handle)
        site.engine.cancel(handle)
        return
    assert smaller.poll(handle).state is PollState.ALIVE
    smaller.cancel(handle)


def test_3_another_engine_in_the_document_by_now(site):
    handle = {
        "engine": "other",
        "host": socket.gethostname(),
        "ticket": 1,
        "mark": "j/1",
        "nodes": [{"name": "0", "root": "/n"}],
    }
    poll = site.engine.poll(handle)
    assert (poll.state, poll.unknown) == (PollState.UNKNOWN, (0,)) and "runs on engine other" in poll.detail
    with pytest.raises(ClusterError, match=r"runs on engine other, .* may go on: end it by hand"):
        site.engine.cancel(handle)


def test_4_cancel_leaves_nothing_and_may_be_called_again(site):
    escape = "setsid sleep 61 & env -i setsid sleep 62 & trap '' TERM; (trap '' TERM; sleep 63) & touch started; sleep 64"
    request = site.job(escape, nodes=2)
    handle = site.engine.submit(request)
    folder = site.node_root(0, handle) / "jobs" / request.job / "temp" / "code"
    wait_for(lambda: (folder / "started").exists())

    def sleepers():
        return [child for agent in site.agents(request) for child in agent.children(recursive=True) if child.name() == "sleep"]

    wait_for(lambda: len(sleepers()) == 4)
    pids = [process.pid for process in sleepers()]
    site.engine.cancel(handle)
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert site.left() == []
    site.engine.cancel(handle)
    # The nodes are free again.
    again = site.job("true", nodes=2)
    assert over(site, again, site.engine.submit(again)).execution_state == "succeeded"


def test_4_after_the_end_cancel_is_no_error(site):
    request = site.job("exit 3")
    handle = site.engine.submit(request)
    state = over(site, request, handle)
    assert (state.execution_state, state.exit_code) == ("failed", 3)
    site.engine.cancel(handle)
    site.another_process().cancel(handle)
