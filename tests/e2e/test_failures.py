"""Jobs that fail, are cancelled or lose a process: the run ends right, with the reason, and nothing is left running."""

from __future__ import annotations

import os
import signal
from typing import Any

from ssh_world import running

# Nobody waits long for processes that ignore SIGTERM.
TWO = "terminateGrace: 2\nproperties: {nodeCount: 2, horovodSettings: {}}"
SLEEPER = "import time, os; print('up', os.getpid(), flush=True); time.sleep(300)"
# A rank whose children try to get away: a new session, a second fork, an empty environment.
RUNAWAYS = """
    import os, subprocess, sys, time
    code = "import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(300)
        os._exit(0)
    print("up", flush=True)
    time.sleep(300)
"""


def test_rank_raises(world: Any) -> None:
    """The sentence names the rank and shows its last lines; the other rank is ended."""
    project = world.project(
        """
        import os, time
        if os.environ["HOROVOD_RANK"] == "1":
            raise ValueError("bad number on line 7")
        time.sleep(300)
        """,
        batchai=TWO,
    )
    err = world.refused(project)
    assert "rank 1 on node-1 exited with code 1" in err and "ValueError: bad number on line 7" in err
    tags = world.last.data.tags
    assert world.last.info.status == "FAILED"
    assert tags["batchai.errorCode"] == "JobFailed" and tags["batchai.exitCode"] == "1"
    assert "rank 1 on node-1" in tags["batchai.reason"] and "ValueError" in tags["batchai.reason"]
    world.wait_gone()


def test_rank_is_killed(world: Any) -> None:
    """A rank killed by a signal is named with the signal; one that merely noticed is not blamed."""
    project = world.project(
        """
        import os, signal, sys, time
        if os.environ["HOROVOD_RANK"] == "1":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.6)
        sys.exit("HorovodInternalError: Connection closed by peer")
        """,
        batchai=TWO,
    )
    err = world.refused(project)
    assert "rank 1 on node-1 was killed by SIGKILL (exit code 137)" in err and "memory" not in err
    assert world.last.info.status == "FAILED" and world.last.data.tags["batchai.exitCode"] == "137"


def test_preparation_fails(world: Any) -> None:
    """No rank starts; Batch AI's code; the preparation's own words."""
    project = world.project(
        "print('never')",
        batchai="""
            properties:
              nodeCount: 2
              horovodSettings: {}
              jobPreparation: {commandLine: "echo cannot find libfoo >&2; exit $((3 + BATCHAI_NODE))"}
        """,
    )
    err = world.refused(project)
    assert "job preparation on node-" in err and "cannot find libfoo" in err
    assert world.last.info.status == "FAILED"
    assert world.last.data.tags["batchai.errorCode"] == "JobPreparationFailed" and world.last.data.tags["batchai.exitCode"] in (
        "3",
        "4",
    )
    assert world.log() == "", "no rank has run"


def test_wall_clock(world: Any) -> None:
    project = world.project(SLEEPER, batchai="properties: {constraints: {maxWallClockTime: PT2S}}")
    err = world.refused(project)
    assert "longer than constraints.maxWallClockTime (2 s)" in err
    assert world.last.data.tags["batchai.errorCode"] == "JobTimeout"


def test_interpreter_without_horovod(world: Any) -> None:
    """The rendezvous can't start: the sentence says what to build."""
    import sys

    base = os.path.realpath(sys.executable)
    (world.home / "clusters").mkdir(parents=True)
    (world.home / "clusters" / "bare.yaml").write_text(f"python: {base}\n", encoding="utf-8")
    err = world.refused(world.project(batchai="cluster: bare\n" + TWO))
    assert "Horovod can't be imported" in err and "batchai horovod build" in err
    assert world.last.data.tags["batchai.errorCode"] == "RendezvousFailed"


def test_ctrl_c_kills_everything(world: Any) -> None:
    """SIGINT: ranks gone, even those that called setsid and ignore SIGTERM; run KILLED; exit code 1."""
    process = world.start(world.command(world.project(RUNAWAYS, batchai=TWO)))
    running(world)
    assert len(world.job_processes()) >= 6
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in err, err
    assert world.last.info.status == "KILLED"
    assert world.last.data.tags["batchai.errorCode"] == "JobTerminate" and "Ctrl-C" in world.last.data.tags["batchai.reason"]
    world.wait_gone()


def test_sigterm_detaches(world: Any) -> None:
    """SIGTERM leaves the job running and prints how to attach; ``job terminate`` ends it; a queued one behind it goes too."""
    process = world.start(world.command(world.project(SLEEPER, batchai=TWO)))
    run = running(world)
    name = run.data.tags["batchai.job"]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and f"batchai job attach {name}" in err, err
    assert len(world.job_processes()) >= 2
    queued = world.run(world.project(name="next", batchai="wait: false\n" + TWO))
    assert queued.returncode == 0
    waiting = world.last.data.tags["batchai.job"]
    assert world.batchai("job", "terminate", waiting).returncode == 2  # no terminal to ask on
    assert world.batchai("job", "terminate", waiting, "-y").returncode == 0
    assert world.last.info.status == "KILLED" and world.last.data.tags["batchai.errorCode"] == "JobTerminated"
    assert world.batchai("job", "terminate", name, "-y").returncode == 0
    assert world.client.get_run(run.info.run_id).info.status == "KILLED"
    world.wait_gone()


def test_kill_9_of_the_submitter(world: Any) -> None:
    """``kill -9`` of ``mlflow run`` (and of its whole group) leaves the job and its run to end right."""
    project = world.project(
        """
        import os, time
        from mlflow_batchai.training import report
        print("up", flush=True)
        while not os.path.exists(os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/go"):
            time.sleep(0.05)
        report.log(step=0, loss=0.5)
        print("done")
        """,
        batchai=TWO,
    )
    process = world.start(world.command(project))
    running(world)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (world.home / "share" / "go").touch()
    world.wait(lambda: world.last.info.status == "FINISHED")
    assert {key: value for key, value in world.last.data.metrics.items() if not key.startswith("system/")} == {"loss": 0.5}
    assert world.artifact("logs/stdout.txt").count("done") == 2
    world.wait_gone()


def test_follower_killed(world: Any) -> None:
    """The follower is killed: ``mlflow run`` starts another, and the run ends as if nothing had happened."""
    project = world.project(
        "import os, time; print('up', flush=True)\n"
        "while not os.path.exists(os.environ['AZ_BATCHAI_MOUNT_ROOT'] + '/share/go'): time.sleep(0.05)",
        batchai=TWO,
    )
    process = world.start(world.command(project))
    running(world)
    assert world.lose_followers() == 1
    (world.home / "share" / "go").touch()
    assert process.wait(120) == 0
    assert world.last.info.status == "FINISHED"


def test_agent_killed(world: Any) -> None:
    """An agent is SIGKILLed while its rank has called setsid: the job fails with NodeLost, and the next job gets the node only
    when those processes are gone."""
    process = world.start(world.command(world.project(RUNAWAYS, batchai=TWO)))
    running(world)
    runaways = {p.pid for p in world.job_processes()}
    # The next job's ranks themselves look for processes of the job before them.
    look = """
        import os
        marks = set()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = open(f"/proc/{pid}/environ", "rb").read().split(b"\\0")
            except OSError:
                continue
            if any(os.environ["AZ_BATCHAI_MOUNT_ROOT"].rsplit("/", 2)[0].encode() in entry for entry in environ):
                marks |= {entry for entry in environ if entry.startswith(b"BATCHAI_JOB=")}
        print("marks:", len(marks))
    """
    queued = world.run(world.project(look, name="next", batchai="wait: false\n" + TWO))
    assert queued.returncode == 0
    world.wait(lambda: len(world.agents()) == 4)
    [agent] = [p for p in world.agents() if "--node=1" in p.cmdline() and any("/jobs/toy-" in part for part in p.cmdline())]
    agent.kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "node-1 was lost" in err, err
    lost = next(run for run in world.runs() if run.data.tags["batchai.job"].startswith("toy"))
    assert lost.info.status == "FAILED" and lost.data.tags["batchai.errorCode"] == "NodeLost"
    following = next(run for run in world.runs() if run.data.tags["batchai.job"].startswith("next"))
    world.wait(lambda: world.client.get_run(following.info.run_id).info.status == "FINISHED")
    assert not runaways & {process.pid for process in world.job_processes()}
    assert world.log(run=following).count("marks: 1") == 2
    world.wait_gone()


def test_every_agent_killed(world: Any) -> None:
    """All agents and the submitter die at once: the follower gives the verdict and sweeps what they left."""
    process = world.start(world.command(world.project(RUNAWAYS, batchai=TWO)))
    running(world)
    for agent in world.agents():
        agent.kill()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    world.wait(lambda: world.last.info.status == "FAILED")
    assert world.last.data.tags["batchai.errorCode"] == "NodeLost"
    world.wait_gone()


def test_cancel_from_the_ui(world: Any) -> None:
    """The tag ``batchai.cancel`` on the run, which anyone can set in MLflow's UI, ends the job."""
    process = world.start(world.command(world.project(SLEEPER)))
    run = running(world, ranks=1)
    world.client.set_tag(run.info.run_id, "batchai.cancel", "true")
    assert process.wait(120) == 1
    assert world.last.info.status == "KILLED"


def test_stragglers_after_success(world: Any) -> None:
    """A job that succeeds but leaves a daemon behind: the daemon doesn't outlive the job, and the job doesn't wait for it."""
    project = world.project(
        """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        print("done")
        """
    )
    result = world.run(project, timeout=120)
    assert result.returncode == 0 and result.stdout == "done\n"
    world.wait_gone()


def test_a_script_that_wants_another_run(world: Any) -> None:
    """A nested run can't be made in a rank: that is told in one sentence, and what was logged before is there."""
    script = "import mlflow\nmlflow.log_metric('outer', 1.5)\nwith mlflow.start_run(nested=True):\n    pass"
    assert world.run(world.project(script)).returncode == 1
    reason = world.last.data.tags["batchai.reason"]
    assert "train.py:3: mlflow: a nested run can't be made on a node" in reason and "Traceback" not in reason
    assert world.last.data.metrics["outer"] == 1.5


def test_output_that_nobody_reads(world: Any) -> None:
    """``mlflow run ... | head -1``: no traceback, the way to attach, and the job goes on to its end."""
    says = "import os, time\nn = 0\nwhile not os.path.exists(os.environ['AZ_BATCHAI_MOUNT_ROOT'] + '/share/go'):\n"
    project = world.project(says + "    print('line', n, flush=True); n += 1; time.sleep(0.5)\nprint('the end')")
    line = " ".join(f"'{part}'" for part in world.command(project))
    result = world.call(["bash", "-c", f"{line} | head -1; exit ${{PIPESTATUS[0]}}"])
    assert result.stdout == "line 0\n" and result.returncode == 1
    assert "goes on: batchai job attach" in result.stderr and "File " not in result.stderr, result.stderr
    (world.home / "share" / "go").touch()
    world.wait(lambda: world.last.info.status == "FINISHED")
    assert world.log().endswith("the end\n")
