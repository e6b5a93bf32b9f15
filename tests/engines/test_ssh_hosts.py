"""The engine over SSH when nodes hang, vanish, or can't be used, with real servers."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sshd import SshNodes
from test_engine_conformance import SshSite, opened_site
from waiting import wait_for

from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.engines import archive, hosts
from mlflow_batchai.engines.base import CheckResult, Needs, PollState, Scalable
from mlflow_batchai.engines.machines import SshMachine
from mlflow_batchai.errors import ClusterError


@pytest.fixture
def site(tmp_path: Path, ssh_servers: SshNodes, request: pytest.FixtureRequest) -> Iterator[SshSite]:
    with opened_site("ssh", tmp_path, request) as made:
        yield made
        for server in ssh_servers:
            server.thaw()


def test_a_frozen_node_holds_up_no_poll(site: SshSite, ssh_servers: SshNodes) -> None:
    """It is unknown, by its name; its answer counts when it comes."""
    request = site.job("sleep 600", nodes=2)
    handle = site.engine.submit(request)
    wait_for(lambda: site.engine.poll(handle).state is PollState.ALIVE)
    ssh_servers[1].freeze()
    for _ in range(3):
        began = time.monotonic()
        poll = site.engine.poll(handle)
        assert time.monotonic() - began < hosts.ANSWER_SECONDS - 1.0
        assert (poll.state, poll.gone, poll.unknown) == (PollState.UNKNOWN, (), (1,))
        assert "127.0.0.12" in poll.detail and "not answer" in poll.detail
    ssh_servers[1].thaw()
    wait_for(lambda: site.engine.poll(handle).state is PollState.ALIVE)
    site.engine.cancel(handle)


def test_a_dropped_connection_is_opened_again(site: SshSite, ssh_servers: SshNodes) -> None:
    request = site.job("sleep 600", nodes=2)
    handle = site.engine.submit(request)
    wait_for(lambda: site.engine.poll(handle).state is PollState.ALIVE)
    for server in list(ssh_servers)[:2]:
        server.drop()
    wait_for(lambda: site.engine.poll(handle).state is PollState.ALIVE)
    for server in list(ssh_servers)[:2]:
        server.drop()
    site.engine.cancel(handle)
    assert site.engine.poll(handle).gone == (0, 1)


def test_a_node_that_is_down_is_unknown_and_cancel_says_so(site: SshSite, ssh_servers: SshNodes) -> None:
    """What can't be asked may still run: it is never called gone, and who cancels is told."""
    request = site.job("sleep 600", nodes=2)
    handle = site.engine.submit(request)
    wait_for(lambda: site.engine.poll(handle).state is PollState.ALIVE)
    ssh_servers[1].stop()
    try:
        assert site.engine.poll(handle).unknown == (1,)
        with pytest.raises(ClusterError, match=r"node \S*127\.0\.0\.12\S* .*refused the connection.*may go on: end it by hand"):
            site.engine.cancel(handle)
        assert site.engine.poll(handle).gone == (0,)
    finally:
        ssh_servers[1].start()
    site.engine.cancel(handle)
    assert site.engine.poll(handle).gone == (0, 1)


def test_nodes_that_cant_be_used_are_left_out(site: SshSite, ssh_servers: SshNodes) -> None:
    """Enough others remain: a warning each; too few: the first reason, and how many more there are."""
    engine = site.another_process(nodes=4)
    (site.root / "node-roots").mkdir()
    site.node_root(3).write_text("in the way")
    ssh_servers[1].stop()
    try:
        warnings = engine.check(2).warnings
        assert len(warnings) == 2 and all(text.endswith("; going on without it") for text in warnings)
        assert "127.0.0.12" in warnings[0] and "refused the connection" in warnings[0]
        assert "127.0.0.14" in warnings[1] and "node-roots/3 is not a folder" in warnings[1]
        request = site.job("true", nodes=2)
        handle = engine.submit(request)
        assert [entry["name"] for entry in handle["nodes"]] == ["127.0.0.11", "127.0.0.13"]
        wait_for(lambda: engine.poll(handle).gone == (0, 1))
        assert site.state(request).execution_state == "succeeded"
        with pytest.raises(ClusterError, match=r"127\.0\.0\.12.*\(and 1 more of the 4 nodes can't be used\)"):
            engine.check(3)
    finally:
        ssh_servers[1].start()
    # Asked again, it looks again.
    assert len(engine.check(3).warnings) == 1


def test_what_a_check_finds_missing_is_not_what_a_census_finds(site: SshSite, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, lacking = SshMachine.ask, ["rclone"]

    def lacks(self: SshMachine, verb: str, *rest: Any, **arguments: Any) -> Any:
        return {**ask(self, verb, *rest, **arguments), **({"lacking": lacking, "machine": "x"} if verb == "needs" else {})}

    monkeypatch.setattr(SshMachine, "ask", lacks)
    needs = Needs((Volume("job", "ram", "command", command="true"),), None, sys.executable)
    assert site.engine.check(2, needs) == CheckResult(2, {"rclone": {"x"}})
    lacking.append("another")
    assert isinstance(site.engine, Scalable)
    site.engine.census()
    assert site.engine.check(2, needs) == CheckResult(2, {"rclone": {"x"}})
    assert site.engine.check(2) == CheckResult(2)
    assert site.engine.check(2, needs) == CheckResult(2, {"rclone": {"x"}, "another": {"x"}})


def test_without_the_node_that_keeps_the_queue_there_is_no_job(site: SshSite, ssh_servers: SshNodes) -> None:
    engine = site.another_process(nodes=3)
    ssh_servers[0].stop()
    try:
        with pytest.raises(
            ClusterError, match=r"node \S*127\.0\.0\.11\S* .*refused the connection.*; it keeps the cluster's queue"
        ):
            engine.check(2)
    finally:
        ssh_servers[0].start()
    assert engine.check(2) == CheckResult(3)


def test_a_folder_that_someone_else_made_is_not_run_from(site: SshSite) -> None:
    """Where all can write, whoever comes first could put his own program where our archive should be."""
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    theirs, proof = site.node_root(0) / "agents", site.root / "proof"
    theirs.mkdir(parents=True)
    trap = f"import pathlib; pathlib.Path({str(proof)!r}).touch()"
    (theirs / archive.name_of(archive.build())).write_text(trap, encoding="utf-8")
    for owner, folder in ((12345, site.node_root(0)), (0, None)):
        if folder:
            os.chown(folder, owner, owner)
            with pytest.raises(
                ClusterError, match=r"node 127\.0\.0\.11: .*belongs to another user; mend that, or name another"
            ):
                site.engine.check(2)
            os.chown(folder, 0, 0)
        else:
            # In a folder of ours: what isn't our archive is replaced, not run.
            site.engine.check(2)
    assert not proof.exists()
    assert (theirs / archive.name_of(archive.build())).read_bytes() == archive.build()


def test_a_login_that_prints_without_ending_its_line(site: SshSite, ssh_servers: SshNodes) -> None:
    file = ssh_servers[0].home / ".bashrc"
    before = file.read_text(encoding="utf-8")
    file.write_text(before + "echo Welcome; printf '\\033]0;gpu1\\007'\n", encoding="utf-8")
    try:
        assert site.engine.check(2) == CheckResult(2)
    finally:
        file.write_text(before, encoding="utf-8")


def test_who_a_node_is_does_not_depend_on_what_it_is_called(site: SshSite) -> None:
    """Two clients with other words for the same machines stand in one queue."""
    first = site.job("sleep 600", nodes=2)
    handle = site.engine.submit(first)
    wait_for(lambda: site.state(first).execution_state == "running")
    other = site.another_process(named="{user}@{address}:{port}")
    assert {node.name for node in other.nodes}.isdisjoint(node.name for node in site.engine.nodes)
    second = site.job("true", nodes=2)
    waiting = other.submit(second)
    assert other.poll(waiting).state is PollState.QUEUED
    assert "2 of 2" in other.poll(waiting).detail
    # The other client can see and end the first one's job, too.
    assert other.poll(handle).state is PollState.ALIVE
    other.cancel(handle)
    wait_for(lambda: site.state(second).ended)


def test_another_first_host_while_jobs_are_there_is_refused(site: SshSite) -> None:
    handle = site.engine.submit(site.job("sleep 600", nodes=2))
    backwards = site.another_process(backwards=True)
    with pytest.raises(ClusterError, match="it has jobs of a cluster document whose first host is another"):
        backwards.check(2)
    site.engine.cancel(handle)
    wait_for(lambda: site.engine.poll(handle).gone == (0, 1))
    assert backwards.check(2) == CheckResult(2)


def test_the_first_nodes_folder_that_was_removed_while_a_job_runs(site: SshSite) -> None:
    """The book was in it: what goes on elsewhere is not said to be another document's."""
    request = site.job("sleep 600", nodes=2)
    site.engine.submit(request)
    shutil.rmtree(site.node_root(0))
    other = site.another_process()
    with pytest.raises(ClusterError) as refused:
        other.check(2)
    other.end_job(request.job)
    assert f"is not in the first host's folder {site.node_root(0)}, which is new: if that was removed" in str(refused.value)
    assert "whose first host is another" not in str(refused.value)


def test_a_program_that_is_interrupted_waits_for_no_node(tmp_path: Path) -> None:
    code = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes begin with it ignored
from mlflow_batchai.engines.ssh_hosts import SshHosts, SshNode
from mlflow_batchai.engines.shell.target import resolve
target = resolve("127.0.0.1", user="me", port=int(sys.argv[1]), timeout=120)
engine = SshHosts([SshNode("a", target, {str(tmp_path)!r})], "/", "python3", "python3", lambda: "x")
engine.check(1)
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        argv = [sys.executable, "-c", code, str(silent.getsockname()[1])]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        client, _ = silent.accept()
        with client:
            assert client.recv(4) == b"SSH-", "it waits for the server's first word"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said


def test_a_node_whose_disk_was_copied(site: SshSite) -> None:
    for index in range(2):
        site.node_root(index).mkdir(parents=True, mode=0o700)
        (site.node_root(index) / "id").write_text("one")
    with pytest.raises(ClusterError, match=r"node 127\.0\.0\.12 has the id of node 127\.0\.0\.11: .*; remove .*/1/id there"):
        site.engine.check(2)
    (site.node_root(1) / "id").unlink()
    assert site.engine.check(2) == CheckResult(2)


def test_a_machine_that_took_anothers_name(site: SshSite) -> None:
    """Nothing of the job is ended there, and nobody is told that it was."""
    request = site.job("sleep 600", nodes=2)
    handle = site.engine.submit(request)
    other = {**handle, "nodes": [handle["nodes"][0], {**handle["nodes"][1], "id": "of another machine"}]}
    poll = site.engine.poll(other)
    assert (poll.state, poll.unknown) == (PollState.UNKNOWN, (1,))
    with pytest.raises(ClusterError, match=r"node 127\.0\.0\.12: it is not the node that the job was sent to"):
        site.engine.cancel(other)
    assert site.engine.poll(handle).gone == (0,)
    site.engine.cancel(handle)
    assert site.engine.poll(handle).gone == (0, 1)


def test_a_login_with_another_shell(site: SshSite) -> None:
    """csh ends a quoted word where a line ends."""
    assert "\n" not in archive.boot()
    tcsh = shutil.which("tcsh")
    if not tcsh:
        pytest.skip("no tcsh (apt-get install tcsh)")
    command = shlex.join([sys.executable, "-I", "-S", "-c", archive.boot(), str(site.root / "r"), "name", "hash", "serve"])
    said = subprocess.run([tcsh, "-c", command], capture_output=True, text=True).stderr
    assert said == f"the archive is to be sent to {site.root}/r/agents/name\n"
