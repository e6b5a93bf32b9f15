"""Agents as real processes on a directory share, with toy ranks: however an attempt ends, it has its verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from node_world import SAVES, Cluster, Job, python39
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import agents, locks
from mlflow_batchai.agent.share import mountfiles

STAYS = "trap '' TERM; echo started; while true; do sleep 0.1; done"
# Runs until ``release``.
HOLD = 'echo go; until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/end" ]; do sleep 0.05; done'


def assert_clean(cluster: Cluster, job: Job) -> None:
    """Nothing of the job runs or lies on the nodes any more, and the nodes are free."""
    assert job.processes() == set()
    for index in job.reservation["nodes"]:
        root = str(cluster.roots[int(index)])
        assert agents.state(root, job.reservation["number"], 0, time.time()) == "ended"
        assert proc.lock_holders(locks.lock_path(root)) == set()
        assert os.listdir(os.path.join(root, "jobs")) == []
        assert agents.last_report(root, job.reservation["number"]) == {"state": "ended"}


def release(job: Job) -> None:
    """End a job that waits for a file."""
    (job.share / job.plan.folder / "shared" / "end").touch()
    assert job.wait()["executionState"] == "succeeded", job.said()


@pytest.mark.parametrize("version", ["this", "3.9"])
def test_one_node_runs_a_command(any_cluster: Cluster, version: str) -> None:
    python = sys.executable if version == "this" else python39()
    if python is None:
        pytest.skip("there is no Python 3.9 on this machine")
    report = json.dumps({"type": "metric", "ts": 1, "rank": 0, "step": 0, "values": {"loss": 0.5}})
    job = any_cluster.submit(
        f'echo "I am $BATCHAI_RANK of $BATCHAI_SIZE, $NAME, $SECRET, [$CANARY]"; echo \'{report}\' > "$BATCHAI_SPOOL/report-0-1.jsonl";'
        " echo für >&2; pwd; printf 'no newline'",
        python=python,
        preparation="echo prepared; echo well >&2",
        environmentVariables=[{"name": "NAME", "value": "job at $AZ_BATCHAI_JOB_TEMP"}],
        secrets={"SECRET": "s3cret"},
        environment={"CANARY": "leaked"},
    )
    verdict = job.wait()
    assert verdict["executionState"] == "succeeded", job.said()
    assert (verdict["exitCode"], verdict["errors"], verdict["reason"], verdict["terminated"]) == (0, [], "", False)
    temp = any_cluster.roots[0] / "jobs" / job.plan.job / "temp"
    assert job.log("stdout.txt") == f"I am 0 of 1, job at {temp}, s3cret, []\n{temp}/code\nno newline\n"
    assert job.log("stderr.txt") == "für\n"
    assert (job.log("stdout-job_prep.txt"), job.log("stderr-job_prep.txt")) == ("prepared\n", "well\n")
    assert "verdict: succeeded" in job.log("execution.log")
    assert [record["body"]["values"] for record in job.records("report")] == [{"loss": 0.5}]
    (told,) = job.records("environment")
    assert told["python"].startswith("3.9." if version == "3.9" else f"3.{sys.version_info.minor}.")
    assert any(package.startswith("pip==") for package in told["packages"])
    assert job.agents[0].returncode == 0
    exit_record = job.exit(0)
    assert exit_record is not None
    assert exit_record["segments"] == verdict["segments"] == len(list((job.share / job.paths.events).glob("*/*.jsonl")))
    assert [(rank["rank"], rank["exitCode"], rank["signal"]) for rank in exit_record["ranks"]] == [(0, 0, None)]
    assert_clean(any_cluster, job)
    for file in any_cluster.folder.rglob("*"):
        if file.is_file() and file.name not in ("stdout.txt",) and file.suffix != ".jsonl":
            assert b"s3cret" not in file.read_bytes(), file


WAITS = 'until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/up" ]; do sleep 0.02; done'
UP = 'touch "$AZ_BATCHAI_SHARED_JOB_TEMP/up"'
NODE_0_IS_LOST = """
if "--node=1" in sys.argv:
    def check(self, starting=False):
        if len(self.runtime.ranks):
            raise phases.Stop("node0", "node-0 has not been heard of for 60 s")
    phases.Phases._check = check
"""
FAILURES = {
    # Rank 0 ends because rank 1 did, and its own agent sees that first.
    "first cause": (
        f"if [ $BATCHAI_RANK = 0 ]; then {WAITS}; echo 'HorovodInternalError: Connection closed by peer' >&2; exit 1; fi;"
        f" echo boom >&2; {UP}; exit 3",
        {},
        (protocol.JOB_FAILED, 3, "rank 1 on node-1 exited with code 3\nboom"),
    ),
    "signal": (
        f"if [ $BATCHAI_RANK = 1 ]; then {WAITS}; kill -SEGV $$; fi; (setsid sleep 600 &) ; {UP}; sleep 600",
        {},
        (protocol.JOB_FAILED, 139, "rank 1 on node-1 was killed by SIGSEGV (exit code 139)"),
    ),
    "SIGTERM": ("kill -TERM $$", {}, (protocol.JOB_FAILED, 143, "rank 0 on node-0 was killed by SIGTERM (exit code 143)")),
    "preparation": (
        "echo never",
        {"preparation": "[ $BATCHAI_NODE = 0 ] && exec sleep 600; echo no disk; exit 5"},
        (protocol.JOB_PREPARATION_FAILED, 5, "job preparation on node-1 exited with code 5\nno disk"),
    ),
    "wall clock": ("sleep 600", {"maxWallClockSeconds": 0.5}, (protocol.JOB_TIMEOUT, None, "")),
    "node 0 is lost": (
        "[ $BATCHAI_RANK = 1 ] && sleep 600; true",
        {"patch": NODE_0_IS_LOST},
        (protocol.NODE_LOST, None, "node-1 ended its part: node-0 has not been heard of for 60 s"),
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_ends_all_nodes(cluster: Cluster, case: str) -> None:
    command, changes, (code, exit_code, reason) = FAILURES[case]
    job = cluster.submit(command, nodes=1 if case in ("SIGTERM", "wall clock") else 2, **changes)
    verdict = job.wait()
    [error] = verdict["errors"]
    assert (verdict["executionState"], error["code"], verdict["exitCode"]) == ("failed", code, exit_code), job.said()
    assert verdict["reason"].startswith(reason) and "never" not in job.log("stdout.txt")
    if case == "signal":
        assert job.exit(0)["ranks"][0]["signal"] == signal.SIGTERM
    assert_clean(cluster, job)


def test_cancel_while_running(cluster: Cluster) -> None:
    job = cluster.submit(STAYS, nodes=2, terminateSeconds=0.5)
    wait_for(lambda: job.log("stdout.txt").count("started") == 2)
    job.cancel("ann", "wrong data")
    verdict = job.wait()
    assert (verdict["executionState"], verdict["terminated"], verdict["exitCode"]) == ("failed", True, None)
    assert (verdict["reason"], verdict["errors"][0]["code"]) == ("terminated by ann: wrong data", "JobTerminate")
    # Whoever looks meanwhile sees it ending, not running again: each agent says so before it writes its exit.
    segments = (job.share / job.paths.events).glob("*/*.jsonl")
    stops = [file.name for file in segments if any(record["k"] == "stop" for record in protocol.decode(file.read_bytes()))]
    assert {name.rsplit("-", 1)[0] for name in stops} == {"agent-0", "agent-1"}
    assert all(record and record["stopped"] and record["failure"] is None for record in map(job.exit, range(2)))
    assert_clean(cluster, job)


def test_who_saves_has_the_time_that_its_plan_gives(cluster: Cluster) -> None:
    """A second wish changes nothing; it takes no longer than the saving."""
    job = cluster.submit(SAVES, nodes=2, terminateSeconds=300.0)
    wait_for(lambda: job.log("stdout.txt").count("started") == 2)
    job.cancel("ann", "enough")
    wait_for(lambda: "saving" in job.log("stdout.txt"))
    job.cancel("bob", "me too")
    verdict = job.wait()
    assert (verdict["reason"], verdict["terminated"]) == ("terminated by ann: enough", True)
    for rank in (0, 1):
        assert job.log(f"stdout-{rank}.txt") == "started\nsaving\nsaved\n"
    assert_clean(cluster, job)


@pytest.mark.parametrize("kind", [protocol.CANCEL, protocol.REQUEUE])
def test_a_request_while_queued_leaves_the_job_before_alone(cluster: Cluster, kind: str) -> None:
    first = cluster.submit(HOLD)
    first.ask(protocol.CANCEL, "ann", "of another attempt", attempt=3)
    wait_for(lambda: first.log("stdout.txt"))
    second = cluster.submit("echo never", nodes=2)
    wait_for(lambda: "node taken" in second.log("execution-node-1.log") and "waiting" in second.log("execution-node-0.log"))
    second.ask(kind, "bob", "")
    verdict = second.wait()
    if kind == protocol.CANCEL:
        assert (verdict["errors"][0]["code"], verdict["terminated"]) == ("JobTerminated", True)
        assert verdict["reason"] == "terminated by bob"
    else:
        assert verdict["next"] == 2
    assert second.log("stdout.txt") == ""
    release(first)


def test_a_cancel_when_only_a_peer_is_queued(any_cluster: Cluster) -> None:
    first, second = any_cluster.submit(HOLD), any_cluster.submit(HOLD)
    wait_for(lambda: first.log("stdout.txt") and second.log("stdout.txt"))
    release(first)
    third = any_cluster.submit("echo never", nodes=2)
    wait_for(lambda: "node taken" in third.log("execution-node-0.log") and "waiting" in third.log("execution-node-1.log"))
    third.cancel("bob", "")
    assert third.wait()["errors"][0]["code"] == "JobTerminated"
    release(second)


def test_requeue_while_running(cluster: Cluster) -> None:
    """Its ranks have their time to save; that they end so is no failure."""
    saves = "trap 'echo saved > \"$AZ_BATCHAI_SHARED_JOB_TEMP/$BATCHAI_RANK\"; exit 5' TERM; echo started; while true; do sleep 0.05; done"
    job = cluster.submit(saves, nodes=2)
    wait_for(lambda: job.log("stdout.txt").count("started") == 2)
    job.ask(protocol.REQUEUE, "ann", "the cluster gets smaller")
    verdict = job.wait()
    assert (verdict["executionState"], verdict["next"], verdict["reason"]) == ("queued", 2, "the cluster gets smaller")
    assert (verdict["errors"], verdict["exitCode"], verdict["terminated"]) == ([], None, False)
    shared = job.share / job.plan.folder / "shared"
    assert [(shared / str(rank)).read_text() for rank in (0, 1)] == ["saved\n", "saved\n"]
    assert_clean(cluster, job)


def test_who_wants_the_end_comes_before_who_wants_room(cluster: Cluster) -> None:
    """Even if he comes while the ranks are being ended for the other."""
    job = cluster.submit(STAYS, terminateSeconds=1.5)
    wait_for(lambda: job.log("stdout.txt"))
    job.ask(protocol.REQUEUE, "bob", "")
    wait_for(lambda: "stopping" in job.log("execution.log"))
    job.cancel("ann", "enough")
    verdict = job.wait()
    assert (verdict["executionState"], verdict["reason"]) == ("failed", "terminated by ann: enough")
    assert "next" not in verdict
    assert_clean(cluster, job)


def test_a_lost_node_fails_the_job_and_the_next_job_sweeps_it(cluster: Cluster) -> None:
    patch = "mounted.HEARTBEAT_SECONDS = 0.2"
    job = cluster.submit(
        "(setsid bash -c 'trap \"\" HUP; while true; do sleep 0.05; done' &); echo started; sleep 600",
        nodes=2,
        patch=patch,
        lossSeconds=1.5,
    )
    wait_for(lambda: job.log("stdout.txt").count("started") == 2)
    job.agents[1].kill()
    job.agents[1].wait()
    root = str(cluster.roots[int(job.reservation["nodes"][1])])
    assert agents.state(root, job.reservation["number"], 0, time.time()) == "ended"
    stray = proc.lock_holders(locks.lock_path(root))
    assert stray, "the stray process holds the node"
    # The next job takes the node from the stray process while the first is still ending on the other.
    after = cluster.submit("echo mine", nodes=2)
    verdict = job.wait()
    assert (verdict["errors"][0]["code"], verdict["executionState"]) == ("NodeLost", "failed"), job.said()
    assert re.fullmatch(r"node-1 has not been heard of for \d+ s", verdict["reason"])
    assert after.wait()["executionState"] == "succeeded", after.said()
    assert not any(proc.start_time(pid) for pid in stray)
    assert job.processes() == set()


def test_a_daemon_that_closed_the_lock_is_swept_too(cluster: Cluster) -> None:
    daemon = "import os, time; os.closerange(0, 256); time.sleep(600)"
    job = cluster.submit(f"(setsid {sys.executable} -S -c '{daemon}' &); sleep 0.3; echo started; sleep 600")
    wait_for(lambda: job.log("stdout.txt"))
    job.agents[0].kill()
    job.agents[0].wait()
    wait_for(lambda: not proc.lock_holders(locks.lock_path(str(cluster.roots[0]))))
    assert len(job.processes()) == 1
    assert cluster.submit("true").wait()["executionState"] == "succeeded"
    assert job.processes() == set()


def test_a_peer_that_is_done_is_not_lost(cluster: Cluster) -> None:
    """Rank 0 often saves and evaluates for minutes after the others have left."""
    job = cluster.submit(
        "[ $BATCHAI_RANK = 0 ] && sleep 5; true",
        nodes=2,
        patch="mounted.HEARTBEAT_SECONDS = 0.2",
        lossSeconds=3.0,
    )
    assert job.wait()["executionState"] == "succeeded", job.said()


def test_a_verdict_by_a_client_ends_the_agents(any_cluster: Cluster) -> None:
    job = any_cluster.submit("echo started; sleep 600", nodes=2)
    wait_for(lambda: job.log("stdout.txt").count("started") == 2)
    client = {"executionState": "failed", "exitCode": None, "errors": [], "reason": "mine", "terminated": False, "endTime": 1}
    (job.share / job.paths.verdict).mkdir()
    mountfiles.write_closed(str(job.share), job.paths.verdict_file, [client])
    job.add_marker("verdict")
    assert job.wait() == client
    assert_clean(any_cluster, job)


# Nobody is waited for for minutes.
HASTY = "peers.COMING_SECONDS = 0.5; mounted.HEARTBEAT_SECONDS = 0.1; ending.CLAIM_SECONDS = 0.5"


@pytest.mark.parametrize(("absent", "held"), [(0, False), (1, False), (0, True)])
def test_an_agent_that_never_came_is_given_up(cluster: Cluster, absent: int, held: bool) -> None:
    """The submitter was killed between two starts, and nobody follows: the other one ends the job and frees its node."""
    first = cluster.submit(HOLD, nodes=2) if held else None
    if first:
        wait_for(lambda: first.log("stdout.txt").count("go") == 2)
    job = cluster.submit("echo never", nodes=2, patch=HASTY, absent=[absent], lossSeconds=0.7)
    verdict = job.wait()
    assert verdict["reason"].startswith(f"the agent of node-{absent} never came (its submitter may have died")
    assert [error["code"] for error in verdict["errors"]] == ["NodeSetupFailed"]
    assert verdict["by"] == f"agent-{1 - absent}"
    root = str(cluster.roots[int(job.reservation["nodes"][1 - absent])])
    assert agents.state(root, job.reservation["number"], 0, time.time()) == "ended"
    if first:
        release(first)
    assert cluster.submit("true").wait()["executionState"] == "succeeded"


def test_a_peer_that_waits_for_its_node_has_come(cluster: Cluster) -> None:
    first = cluster.submit(HOLD)
    wait_for(lambda: first.log("stdout.txt"))
    job = cluster.submit("echo mine", nodes=2, patch=HASTY, lossSeconds=3.0)
    time.sleep(5.0)
    assert job.verdict() is None
    release(first)
    assert job.wait()["executionState"] == "succeeded", job.said()


# As an NFSv3 client that asks again, since the first answer was lost.
LOST_ANSWER = """
make = agent.os.mkdir
def mkdir(path, mode=0o777, *, dir_fd=None):
    make(path, mode, dir_fd=dir_fd)
    if path == "verdict":
        raise FileExistsError(17, "File exists")
agent.os.mkdir = mkdir
ending.CLAIM_SECONDS = 0.5
"""


def test_a_lost_answer_to_the_claim_costs_no_verdict(cluster: Cluster) -> None:
    job = cluster.submit("true", patch=LOST_ANSWER)
    assert job.wait()["executionState"] == "succeeded", job.said()


def test_a_claimer_that_died_costs_no_verdict(any_cluster: Cluster) -> None:
    job = any_cluster.submit(HOLD, patch="ending.CLAIM_SECONDS = 0.5")
    wait_for(lambda: job.log("stdout.txt"))
    (job.share / job.paths.verdict).mkdir()
    release(job)


# Frozen between its claim and the verdict, for so long that a client has finished the claim.
FROZEN = """
make = agent.os.mkdir
def mkdir(path, mode=0o777, *, dir_fd=None):
    make(path, mode, dir_fd=dir_fd)
    if path == "verdict":
        given = protocol.verdict_record(protocol.FAILED, "follower", reason="frozen")
        mountfiles.write_closed("/proc/self/fd/%d" % dir_fd, "verdict/verdict.json", [given])
agent.os.mkdir = mkdir
"""


def test_a_claimer_that_was_frozen_keeps_the_verdict_that_is_there(cluster: Cluster) -> None:
    job = cluster.submit("true", patch=FROZEN)
    job.agents[0].wait(60)
    verdict = job.verdict()
    assert verdict is not None and (verdict["by"], verdict["reason"]) == ("follower", "frozen"), job.said()
    assert job.agents[0].returncode == 0


# The share thread breaks after a second.
BROKEN = """
def broken(self):
    raise ZeroDivisionError("a bug")
import time
read = inbox.Inbox.read
inbox.Inbox.read = lambda self, heeds: broken(self) if time.monotonic() > begun + 1 else read(self, heeds)
begun = time.monotonic()
"""


@pytest.mark.parametrize("waits", [False, True])
def test_a_broken_share_thread_fails_the_job(cluster: Cluster, waits: bool) -> None:
    """A bug there must not leave the main thread waiting for a cancel or a verdict that it can never see."""
    first = cluster.submit(HOLD, nodes=2) if waits else None
    if first:
        wait_for(lambda: first.log("stdout.txt").count("go") == 2)
    # One that waits sleeps after half a second, without that thread.
    job = cluster.submit("echo started; sleep 600", patch=BROKEN.replace("begun + 1", "begun") if waits else BROKEN)
    assert job.wait()["reason"] == "the agent of node-0 failed: ZeroDivisionError: a bug"
    assert "ZeroDivisionError" in job.logs[0].read_text()
    if first:
        release(first)
    assert_clean(cluster, job)


@pytest.mark.parametrize(
    "patch",
    [
        "phases.Phases.check_model = boom",
        "runtime.Runtime.end_everything = boom",
        "ending.Ending._write_exit = boom",
    ],
)
def test_an_error_on_the_way_out_does_not_cost_the_verdict(cluster: Cluster, patch: str) -> None:
    define = "def boom(*args, **kwargs):\n    raise ZeroDivisionError('a bug')\n"
    job = cluster.submit("echo hello", patch=define + patch)
    assert job.wait()["executionState"] == "succeeded"
    assert job.log("stdout.txt") == "hello\n"
    assert job.agents[0].returncode == 1
    assert "ZeroDivisionError: a bug" in job.logs[0].read_text()


def test_a_share_that_fails_at_the_end_is_waited_for(cluster: Cluster) -> None:
    job = cluster.submit(HOLD)
    wait_for(lambda: job.log("stdout.txt"))
    base = job.share / job.paths.nodes
    base.rename(base.with_name("aside"))
    base.write_text("not a folder")
    (job.share / job.plan.folder / "shared" / "end").touch()
    wait_for(lambda: "verdict" in job.log("execution.log"))
    time.sleep(0.3)
    assert job.verdict() is None
    base.unlink()
    base.with_name("aside").rename(base)
    assert job.wait()["executionState"] == "succeeded"
    assert job.exit(0) is not None


def test_a_share_that_hangs_at_the_end_loses_nothing(cluster: Cluster) -> None:
    patch = """
import time
ending.DRAIN_SECONDS, shipper.HANGING_SECONDS = 0.3, 0.1
send = mounted.NamedFiles.send
def late(self, writer, sequence, records):
    if any("the last line\\n" == record.get("x") for record in records):
        time.sleep(3)
    return send(self, writer, sequence, records)
mounted.NamedFiles.send = late
"""
    job = cluster.submit("echo the last line", patch=patch)
    assert job.wait()["executionState"] == "succeeded"
    assert [record["x"] for record in job.records("log") if record["r"] == 0] == ["the last line\n"]
    assert job.log("stdout.txt") == "the last line\n"
    assert job.agents[0].returncode == 0


def test_an_agent_that_comes_too_late_gives_up(cluster: Cluster) -> None:
    job = cluster.submit("echo never", patch="agents.ARRIVAL_SECONDS = 0.0001")
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "NodeSetupFailed"
    assert "after the node was reserved; submit again" in verdict["reason"]


def ask_for_a_plan(agent_pyz: Path, tmp_path: Path, seconds: float, patch: str = "") -> subprocess.CompletedProcess[str]:
    argv = [f"--share={tmp_path}", "--folder=x", "--attempt=1", "--node=0", f"--root={tmp_path}/r", "--granted"]
    lines = [
        f"import sys; sys.path.insert(0, {str(agent_pyz)!r})",
        "from mlflow_batchai.agent import agent",
        f"agent.PLAN_SECONDS = {seconds}",
        textwrap.dedent(patch),
        "sys.exit(agent.main(sys.argv[1:]))",
    ]
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", "\n".join(lines), *argv],
        input=json.dumps({"plan": protocol.digest({"protocol": 0})}),
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_agent_without_a_plan_says_so(agent_pyz: Path, tmp_path: Path) -> None:
    done = ask_for_a_plan(agent_pyz, tmp_path, 0.3)
    assert done.returncode == 1
    why = "is that the submitting machine's share, or was the job removed?"
    assert done.stderr == f"there is no plan at {tmp_path}/x/batchai/plan.json: {why}\n"


def test_an_agent_waits_for_a_plan_that_is_seen_late(agent_pyz: Path, tmp_path: Path) -> None:
    plan = tmp_path / "x" / "batchai" / "plan.json"
    plan.parent.mkdir(parents=True)
    timer = threading.Timer(1.0, mountfiles.write_closed, (str(plan.parent), plan.name, [{"protocol": 0}]))
    timer.start()
    done = ask_for_a_plan(agent_pyz, tmp_path, 60)
    timer.join()
    assert "is of protocol 0, and this version reads" in done.stderr
