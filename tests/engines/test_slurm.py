"""What Slurm is told, and what is made of its answers; whole jobs of a real one: ``e2e/test_slurm_job.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent.attempt.slurm_end import state_in
from mlflow_batchai.documents.cluster import parse_cluster
from mlflow_batchai.engines import archive
from mlflow_batchai.engines.base import Needs, Poll, PollState, StartRequest, Terms
from mlflow_batchai.engines.census import NodeState
from mlflow_batchai.engines.shell.connection import Result
from mlflow_batchai.engines.slurm import Slurm, last_words, node_report
from mlflow_batchai.engines.slurm_script import options_of, script_of
from mlflow_batchai.errors import ClusterError, DocumentError

DOCUMENT = {
    "engine": "slurm",
    "share": "/share",
    "partition": "gpu",
    "account": "vision",
    "gpusPerNode": 4,
    "exclusive": True,
    "options": ["--constraint=ib"],
    "root": "~/it's here",
}
REQUEST = StartRequest(
    "a1b2", "a1b2/1", "jobs/a1b2", 1, 2, {"variables": {"TOKEN": "hush"}}, Terms(3600.0, ("--partition=big",))
)
HANDLE = {
    "engine": "slurm",
    "host": "here",
    "ticket": 14,
    "slurm": "prod",
    "name": "batchai-a1b2-1",
    "nodes": [{"name": "node-0", "id": "14"}, {"name": "node-1", "id": "14"}],
}


class Answers:
    """Slurm's commands: their answers by name, and what was run."""

    def __init__(self, **answers: Result | str) -> None:
        self.answers: dict[str, Result | str] = {"scontrol": "ClusterName             = prod\n", **answers}
        self.ran: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Result:
        self.ran.append(tuple(argv))
        found = self.answers.get(argv[0], "")
        return found if isinstance(found, Result) else Result(0, found, "")

    def close(self) -> None: ...


def engine(runner: Answers, **keys: Any) -> Slurm:
    document = parse_cluster({**DOCUMENT, **keys}, "c.yaml")[0]
    return Slurm("c", document, 4, "/share", "me", runner, lambda: "id", archive.build)


def poll(squeue: Result | str, **answers: Result | str) -> Poll:
    return engine(Answers(squeue=squeue, **answers)).poll(HANDLE)


def line(state: str, reason: str = "None", start: str = "N/A", name: str = "batchai-a1b2-1", count: int = 2) -> str:
    return f"14|{state}|{reason}|{start}|n[0-1]|{count}|{name}|jobs/a1b2\n"


def test_what_sbatch_is_told() -> None:
    """A job's options come after the cluster's and win; what it can't do without comes last; the time limit has its margin."""
    document = parse_cluster(DOCUMENT, "c.yaml")[0]
    assert options_of(document, 2, REQUEST.terms) == [
        *("--exclusive", "--gres=gpu:4", "--time=70", "--partition=gpu", "--account=vision", "--constraint=ib"),
        *("--partition=big", "--nodes=2", "--ntasks-per-node=1", "--no-requeue", "--no-kill"),
        *("--export=ALL", "--export-file=/dev/null"),
    ]
    # Without a limit of its own a job has the partition's.
    assert not [word for word in options_of(document, 1, Terms(7 * 86400.0)) if "--time" in word]


def test_the_script(tmp_path: Path) -> None:
    """It is shell text that a shell understands, without a secret, whatever the root is called."""
    shown = engine(Answers()).render(REQUEST)
    text = shown[0].argv[0]
    assert text.startswith("sbatch --parsable --exclusive") and "hush" not in text
    script = text.partition("<<'END'\n")[2].removesuffix("END")
    secrets = "/share/.batchai/slurm-me/batchai-a1b2-1"
    opened, _, rest = script.partition(f"exec < {secrets} || exit 1\n[ -O /dev/stdin ] ||")[2].partition("\n")
    assert opened.endswith("exit 1; }") and rest.startswith(f"told=$(cat)\nexec < /dev/null\nrm -f {secrets}\n")
    assert 'printf %s "$told" | srun ' in rest
    assert "--kill-on-bad-exit=0" in script and "--no-kill" in script
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert [command.node for command in shown] == [0, 1]


TOLD = '{"a": "\\n%s $x"}'


def run_script(home: Path, profile: str, told: str | None = TOLD) -> tuple[int, str]:
    """The exit code of the script of a user with this profile, and what it has printed."""
    (home / "srun").write_text(f"#!/bin/sh\ncat\nls {home}/told 2>&1\nls -l /proc/$PPID/fd\nenv\necho ran $*\nexit 3\n")
    (home / "srun").chmod(0o755)
    if told is not None:
        (home / "told").write_text(told)
    output = home / "told.out"
    (home / "script").write_text(script_of(["agent"], "/root", "python3", str(home / "told"), str(output)))
    (home / ".bash_profile").write_text(f"export PATH={home}:$PATH\n{profile}\n")
    done = subprocess.run(["bash", str(home / "script")], env={"HOME": str(home)}, stdin=subprocess.DEVNULL)
    return done.returncode, output.read_text()


def test_the_script_runs(tmp_path: Path) -> None:
    """Agents read what they are told; its file is closed and gone by then. The job's exit code is that of its step.

    What is printed goes where no link leads. Programs are found as in a login shell of the user.
    """
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "told.out").symlink_to(tmp_path / "mine")
    code, printed = run_script(tmp_path, "")
    assert code == 3 and f"\n{TOLD}ls: " in printed and "(deleted)" not in printed
    assert (tmp_path / "mine").read_text() == "mine"
    # As of a job whose first node is lost.
    assert last_words(printed.partition(TOLD)[0])[1] == "its agents have said nothing"


def test_shell_options_of_a_profile_change_nothing(tmp_path: Path) -> None:
    """Nobody has the secrets in his environment; after a step that failed the nodes are tidied, and its exit code stays."""
    (tmp_path / ".bash_logout").write_text("exit 9\n")
    code, printed = run_script(tmp_path, "set -aeux")
    assert code == 3 and printed.count(TOLD) == 1 and "told=" not in printed
    assert [line.split()[-1] == "agent" for line in printed.splitlines() if line.startswith("ran ")] == [True, False]


@pytest.mark.parametrize(("profile", "last"), [("exit 0", "does ~/.bash_profile end it?"), ("mkdir /; exit 0", "File exists")])
def test_a_profile_that_ends_the_shell_is_seen(tmp_path: Path, profile: str, last: str) -> None:
    assert last_words(run_script(tmp_path, profile)[1])[1].endswith(last)


def test_no_step_runs_without_what_agents_are_told(tmp_path: Path) -> None:
    code, printed = run_script(tmp_path, "", told=None)
    assert code == 1 and "told: No such file" in printed and "ran " not in printed


@pytest.mark.parametrize(
    ("squeue", "state", "words"),
    [
        (
            line("PENDING", "Resources", "2026-11-30T12:00:00"),
            "queued",
            "is PENDING (Resources), to start at 2026-11-30T12:00:00",
        ),
        (line("RUNNING"), "alive", ""),
        (line("RUNNING", count=1), "unknown", "Slurm job 14 has lost a node: of 2 it has 1 (n[0-1])"),
        (line("COMPLETING", count=1), "alive", ""),
        (line("TIMEOUT", "TimeLimit"), "gone", "Slurm job 14 has ended: TIMEOUT (TimeLimit)"),
        (line("NEW_IN_30"), "unknown", "NEW_IN_30"),
        # Of another job: numbers began again.
        (line("RUNNING", name="theirs"), "gone", "has ended, and Slurm remembers no more of it"),
        ("", "gone", "has ended, and Slurm remembers no more of it"),
        (Result(1, "", "slurm_load_jobs error: Invalid job id specified"), "gone", "remembers no more of it"),
        (Result(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"), "unknown", "try again"),
        (Result(1, "", "slurm_load_jobs error: Transport endpoint is not connected"), "unknown", "try again"),
        (Result(-13, "", ""), "unknown", "squeue failed on this machine: a signal ended it; is munge up there? Try again"),
        (Result(127, "", "squeue: not found"), "unknown", "there is no squeue on this machine"),
    ],
)
def test_states(squeue: Result | str, state: str, words: str) -> None:
    found = poll(squeue)
    assert found.state is PollState(state) and words in found.detail
    assert found.gone == ((0, 1) if state == "gone" else ()) and found.unknown == ((0, 1) if state == "unknown" else ())
    assert found.started is (state != "queued")


@pytest.mark.parametrize(("state", "code"), [("CANCELLED", "JobTerminated"), ("TIMEOUT", "JobTimeout"), ("PREEMPTED", "")])
def test_ends_after_which_a_job_does_not_start_again(state: str, code: str) -> None:
    """No agent has said so: it had not come, or was killed before. Slurm may have forgotten the job."""
    for found in (poll(line(state)), poll("", sacct=f"{state} by 1000|n[0-1]|batchai-a1b2-1\n")):
        assert [failure["code"] for failure in found.failures.values()] == [code] * bool(code) and found.started


def test_a_job_that_was_cancelled_while_it_waited() -> None:
    """It was a person: no prolog can have failed."""
    for found in (poll(line("CANCELLED").replace("n[0-1]", "")), poll("", sacct="CANCELLED|None assigned|batchai-a1b2-1\n")):
        assert found.state is PollState.GONE and found.failures and not found.started


@pytest.mark.parametrize(
    ("state", "preempted", "found"),
    [
        ("COMPLETING Reason=None", "", "CANCELLED"),
        ("COMPLETING Reason=None", "None", "CANCELLED"),
        ("COMPLETING Reason=None", "2026-11-30T14:54:28", ""),
        ("COMPLETING Reason=TimeLimit", "", "TIMEOUT"),
        ("COMPLETING Reason=NodeDown", "", ""),
        # Somebody has sent the agent a SIGTERM.
        ("RUNNING Reason=None", "", ""),
    ],
)
def test_what_slurm_shows_while_it_ends_a_job(state: str, preempted: str, found: str) -> None:
    """As Slurm 22.05 does in the time that its SIGTERM leaves."""
    preemption = f"   PreemptEligibleTime=2026-11-30T14:54:27 PreemptTime={preempted}\n" if preempted else ""
    shown = f"JobId=14 JobName=batchai-a1b2-1\n   JobState={state} Dependency=(null)\n{preemption}   Comment=JobState=x\n"
    assert state_in(shown) == found


def test_a_job_that_is_suspended_is_frozen() -> None:
    assert poll(line("SUSPENDED")) == Poll(PollState.ALIVE, frozen=(0, 1))


def test_a_handle_names_no_file_of_others() -> None:
    """One that somebody else has made could otherwise have any file of ours removed."""
    runner = Answers(squeue=line("RUNNING", name="../../mine"))
    engine(runner).cancel({**HANDLE, "name": "../../mine"})
    assert [argv for argv in runner.ran if "mine" in " ".join(argv) or argv[0] == "scancel"] == []


def test_nodes_that_are_down_are_not_counted() -> None:
    """An attempt after the first takes as many as there are (minNodes)."""
    runner = Answers(sinfo="n0|gpu|idle|none\nn1|gpu|down*|Not responding\nfor days\nn2|gpu|mixed|none\nn2|debug|mixed|none\n")
    assert engine(runner).check(1).usable == 2


def test_another_slurm_knows_nothing_of_it() -> None:
    found = poll("", scontrol="ClusterName = test\n")
    assert found.state is PollState.UNKNOWN and "is one of Slurm's cluster prod, and test was asked" in found.detail


def test_accounting_is_asked_last() -> None:
    found = poll("", sacct="TIMEOUT|n0|batchai-a1b2-1\n")
    assert "remembers no more of it but TIMEOUT" in found.detail
    assert "but" not in poll("", sacct="COMPLETED|n0|theirs\n").detail
    assert "but" not in poll("", sacct=Result(1, "", "Slurm accounting storage is disabled")).detail


def test_one_question_for_all_jobs() -> None:
    runner = Answers(squeue=line("RUNNING"))
    polls = engine(runner).poll_all([HANDLE, {**HANDLE, "ticket": 15}, {**HANDLE, "engine": "ssh"}])
    assert [found.state for found in polls] == [PollState.ALIVE, PollState.GONE, PollState.UNKNOWN]
    assert [argv[-1] for argv in runner.ran if argv[0] == "squeue"] == ["14,15"]


def test_what_agents_say_last() -> None:
    failure = {"code": "ShareFailed", "message": "full"}
    text = f'srun: error\n0: {{"state": "held"}}\n1: {json.dumps({"failure": failure})}\n 0: no plan\nsrun: error: x\n'
    assert last_words(text) == ({1: failure}, "no plan")
    # What a rank has printed, or somebody has put there.
    assert last_words('0: {"failure": "x"}\n1: {"failure": {"code": 1}}\n0: ' + "[" * 19000)[0] == {}
    assert last_words("srun: error: Unable to create step\n") == ({}, "Unable to create step")


def test_a_submit_whose_answer_is_lost_ends_what_slurm_may_have() -> None:
    class Lost(Answers):
        def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Result:
            if argv[:2] == ["sbatch", "--parsable"]:
                return Result(1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
            if argv[0] == "scancel":
                self.answers["squeue"] = ""
            return super().run(argv, stdin, timeout)

    runner = Lost(squeue=line("PENDING") + "15|PENDING|None|N/A||2|mine|\n")
    with pytest.raises(ClusterError, match="Slurm's controller doesn't answer"):
        engine(runner).submit(REQUEST)
    assert ("scancel", "14") in runner.ran and ("scancel", "15") not in runner.ran
    assert ("rm", "-f", "--", "/share/.batchai/slurm-me/batchai-a1b2-1") in runner.ran


def test_a_share_that_a_node_does_not_see(tmp_path: Path) -> None:
    """Doctor asks a node that it takes, and gives it back; what the node can't read is said in one sentence."""

    class Node(Answers):
        def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Result:
            if "-I" in argv:
                boot = [sys.executable, *argv[argv.index("-I") :]]
                done = subprocess.run(boot, input=stdin, capture_output=True)
                return Result(done.returncode, done.stdout.decode(), done.stderr.decode() + "srun: error: n1: task 0: Exited\n")
            return super().run(argv, stdin, timeout)

    runner = Node(salloc=Result(0, "", "salloc: Pending\nsalloc: Granted job allocation 77\n"))
    slurm = engine(runner, share=str(tmp_path / "none"))
    (node,) = slurm.nodes
    with pytest.raises(ClusterError, match=r"/share/\S+ can't be read: No such file or directory; is share"):
        node.machine.ask("facts")
    slurm.close()
    assert runner.ran[-1] == ("scancel", "77") and "--gres=gpu:4" in next(argv for argv in runner.ran if argv[0] == "salloc")


def test_a_munge_that_ends_is_no_refusal() -> None:
    """SIGPIPE kills sbatch then; over SSH such a command has no exit code."""
    for code in (-13, -1):
        with pytest.raises(ClusterError, match=r"^cluster 'c': sbatch failed on this machine: a signal ended it; is munge up"):
            engine(Answers(sbatch=Result(code, "", ""))).check(2)


def test_a_node_whose_daemon_is_away() -> None:
    """Its words are those of a controller that is."""
    words = "srun: error: Task launch for StepId=1.2 failed on node n1: Communication connection failure\n"
    ends = "srun: error: Application launch failed: Communication connection failure\nsrun: Job step aborted\n"
    node = engine(Answers(srun=Result(1, "", words + ends))).find("n1", HANDLE)
    with pytest.raises(ClusterError, match=r"^cluster 'c': node n1: Communication connection failure; is its slurmd up\?$"):
        node.machine.ask("facts")
    words = "srun: error: Task launch for StepId=1.2 failed on node n1: User not found on host\n"
    node = engine(Answers(srun=Result(1, "", words))).find("n1", HANDLE)
    with pytest.raises(ClusterError, match=r"^cluster 'c': node n1: User not found on host$"):
        node.machine.ask("facts")


def test_a_controller_that_is_away_when_a_job_is_checked() -> None:
    """``--test-only`` says it without the command's name."""
    for words in ("Unable to contact slurm controller (connect failure)", "Connection reset by peer"):
        with pytest.raises(ClusterError, match="controller doesn't answer"):
            engine(Answers(sbatch=Result(1, "", f"allocation failure: {words}"))).check(2)


def test_words_of_a_login_shell_are_not_slurms() -> None:
    """Through a login node they stand before those of its commands."""
    refused = "curl: (7) Failed to connect: Connection refused\nsbatch: error: invalid partition specified: gpu\n"
    with pytest.raises(ClusterError, match="Slurm refuses the job: invalid partition specified"):
        engine(Answers(sbatch=Result(1, "", refused))).check(2)


@pytest.mark.parametrize("last", ["Connection timed out", "Invalid job id specified"])
def test_doctor_finds_no_node_free(last: str) -> None:
    """The first is what salloc says of nodes that are taken all the time; its controller is there."""
    words = f"salloc: Pending job allocation 77\nsalloc: job 77 queued and waiting for resources\nsalloc: error: {last}\n"
    (node,) = engine(Answers(salloc=Result(1, "", words))).nodes
    with pytest.raises(ClusterError, match=r"^cluster 'c': Slurm gave no node within 30 s; try"):
        node.machine.ask("facts")


@pytest.mark.parametrize(
    ("sinfo", "remedy"),
    [
        (
            "n0|gpu|idle|none\nn1|gpu|down*|Not responding\n",
            r"wait for its nodes \(1 away, as n1: .* down\*: Not r.*\), or correct",
        ),
        (
            "n0|gpu|unknown|none\nn1|gpu|unknown|none\n",
            r"wait for its nodes \(2 away, as n0: Slurm has it unknown\), or correct",
        ),
        ("n0|gpu|idle|none\nn1|gpu|mixed|none\n", "correct the cluster document, the job.s slurm block or its nodeCount"),
    ],
)
def test_nodes_that_are_away_are_told(sinfo: str, remedy: str) -> None:
    """Slurm refuses a job for them in the words for one that never can run, so in the seconds after its controller's start."""
    refused = Result(1, "", "allocation failure: Requested node configuration is not available")
    with pytest.raises(ClusterError, match=f"Slurm refuses the job: .* is not available; {remedy} "):
        engine(Answers(sbatch=refused, sinfo=sinfo)).check(2)


@pytest.mark.parametrize(
    ("state", "found"),
    [("idle", "idle"), ("mixed", "running"), ("allocated", "running"), ("idle*", "unusable"), ("down", "unusable")],
)
def test_nodes(state: str, found: str) -> None:
    report = node_report("n1", state, "broken fan")
    assert report.state is NodeState(found)
    assert report.why == (f"Slurm has it {state}: broken fan" if found == "unusable" else "")


class Shell(Answers):
    """Runs shell text for real, in a folder that stands for that of the share."""

    def __init__(self, folder: Path, **answers: Result | str) -> None:
        super().__init__(**answers)
        self.folder = folder

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Result:
        if argv[0] != "sh":
            return super().run(argv, stdin, timeout)
        self.ran.append(tuple(argv))
        done = subprocess.run([*argv[:4], str(self.folder), *argv[5:]], input=stdin, capture_output=True)
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_old_files_go(tmp_path: Path) -> None:
    """What jobs have printed, secrets that no job came for, and agents that no job uses any more."""
    agent = archive.name_of(archive.build())
    (tmp_path / agent).write_bytes(archive.build())
    for name, days in {"batchai-a1-1": 92, "batchai-b2-1": 60, "batchai-a1-1.out": 32, "agent-1.pyz": 92, agent: 92}.items():
        subprocess.run(["touch", "-d", f"{days} days ago", str(tmp_path / name)], check=True)
    runner = Shell(tmp_path, squeue="", sbatch="14\n")
    engine(runner).submit(REQUEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == [agent, "batchai-a1b2-1", "batchai-b2-1"]
    # The agent that jobs use was not sent again.
    assert [argv[0] for argv in runner.ran].count("sh") == 1


def test_what_a_job_has_printed_is_read_from_no_link(tmp_path: Path) -> None:
    """What somebody else has put there would have a line of any file of ours shown."""
    printed, mine = tmp_path / "batchai-a1b2-1.out", tmp_path / "mine"
    printed.write_text("0: no plan\n")
    assert engine(Shell(tmp_path, squeue=line("FAILED"))).poll(HANDLE).detail.endswith("FAILED: no plan")
    printed.rename(mine)
    printed.symlink_to(mine)
    assert "no plan" not in engine(Shell(tmp_path, squeue=line("FAILED"))).poll(HANDLE).detail


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    """Somebody else may have made it on a share that all can write."""
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(ClusterError, match=f"batchai-a1b2-1 can't be written: {tmp_path} belongs to another user; does share"):
        engine(Shell(tmp_path)).submit(REQUEST)


def test_few_questions(tmp_path: Path) -> None:
    """Each is a round trip to a login node, and work for a controller that all users share."""
    runner = Shell(tmp_path, sbatch="14\n")
    slurm = engine(runner)
    for asked in (["sbatch", "sinfo", "scontrol", "sh", "sh", "sbatch"], ["sbatch", "sinfo", "sh", "sbatch"]):
        slurm.check(REQUEST.node_count, Needs((), None, "python3", REQUEST.terms))
        slurm.submit(REQUEST)
        assert [argv[0] for argv in runner.ran] == asked
        runner.ran.clear()
    # One that nobody has checked before, as a retry, is tested: Slurm would let it wait for ever.
    slurm.submit(REQUEST)
    assert "--test-only" in runner.ran[0]


def test_a_job_that_went_to_another_slurm_is_ended_there() -> None:
    runner = Answers(sbatch="14;west\n")
    with pytest.raises(ClusterError, match="sent the job to Slurm's cluster west"):
        engine(runner).submit(REQUEST)
    assert ("scancel", "--clusters=west", "14") in runner.ran
    assert ("rm", "-f", "--", "/share/.batchai/slurm-me/batchai-a1b2-1") in runner.ran


@pytest.mark.parametrize(
    "option",
    [
        *("--array=1-9", "--arr=1-9", "-a1-9", "-Ha1-9", "--wait", "-W", "--wra=x", "--test-only", "--parsable", "--par"),
        *("-Mwest", "--clusters=west", "--ntasks=8", "--ntask=8", "-n8", "-Hn8", "-Q", "--", "-", "gpu", "--hold\n--array=2"),
    ],
)
def test_options_that_are_not_for_one_job(option: str) -> None:
    with pytest.raises(DocumentError, match="must be an option of sbatch for one job"):
        engine(Answers(), options=[option])


def test_options_that_are() -> None:
    options = [
        "--wait-all-nodes=1",
        "--time=1",
        "--cluster-constraint=x",
        "-pgpu",
        "-C",
        "-H",
        "--mem=4G",
        "--account=a",
        "-N1",
    ]
    options += ["--ntasks-per-core=1", "--nice=5"]
    engine(Answers(), options=options)


def test_only_apptainer_runs_images() -> None:
    from mlflow_batchai.agent.plan import Container

    needs = Needs((), Container("img"), "python3")
    with pytest.raises(ClusterError, match="wants the image img, and on Slurm only Apptainer runs images; set containers"):
        engine(Answers()).check(1, needs)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"share": None}, "needs share"),
        ({"hosts": ["a"]}, "has hosts, which needs engine: ssh"),
        ({"engine": "local"}, "has root, which needs engine: ssh or slurm"),
    ],
)
def test_documents_that_are_wrong(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DocumentError, match=sentence):
        parse_cluster({**DOCUMENT, **keys}, "c.yaml")
