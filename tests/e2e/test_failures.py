"""Jobs that fail, are cancelled or lose a process: the run ends right, with the reason, and nothing is left running."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
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


def test_rank_is_killed(world: Any) -> None:
    """The sentence names the rank, its signal and its last lines; one that merely noticed is not blamed, and ends."""
    project = world.project(
        """
        import os, signal, sys, time
        other = os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/rank-1"
        if os.environ["HOROVOD_RANK"] == "1":
            print("ValueError: bad number on line 7", file=sys.stderr, flush=True)
            os.symlink(str(os.getpid()), other)
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.islink(other) or os.path.exists("/proc/" + os.readlink(other)):
            time.sleep(0.05)
        sys.exit("HorovodInternalError: Connection closed by peer")
        """,
        batchai=TWO,
    )
    err = world.refused(project)
    tags = world.last.data.tags
    assert world.last.info.status == "FAILED"
    assert (tags["batchai.errorCode"], tags["batchai.exitCode"]) == ("JobFailed", "137")
    for said in (err, tags["batchai.reason"]):
        assert "rank 1 on node-1 was killed by SIGKILL (exit code 137)" in said and "memory" not in said
        assert "ValueError: bad number on line 7" in said
    world.wait_gone()


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
    """SIGTERM leaves the job running and prints how to attach; a queued one is terminated; the tag of MLflow's UI ends the first (mlflow#4391)."""
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
    assert world.batchai("job", "terminate", waiting, "-y").returncode == 0
    assert world.last.info.status == "KILLED" and world.last.data.tags["batchai.errorCode"] == "JobTerminated"
    attached = world.start([str(Path(sys.executable).parent / "batchai"), "job", "attach", name])
    world.client.set_tag(run.info.run_id, "batchai.cancel", "true")
    assert attached.wait(120) == 1
    assert world.client.get_run(run.info.run_id).info.status == "KILLED"
    world.wait_gone()


def test_kill_9_of_follower_and_submitter(world: Any) -> None:
    """``mlflow run`` starts another follower; that outlives ``kill -9`` of ``mlflow run`` and its group, and ends the run right."""
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
    assert world.lose_followers() == 1
    world.wait(world.followers, what="another follower")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (world.home / "share" / "go").touch()
    world.wait(lambda: world.last.info.status == "FINISHED")
    assert world.last.data.metrics == {"loss": 0.5}
    assert world.artifact("logs/stdout.txt").count("done") == 2
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
