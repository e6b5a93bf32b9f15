"""A node whose agent is frozen and goes on later, and one whose clock is an hour wrong: the others end right, with the reason."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from node_world import Cluster
from waiting import freeze, wait_for

BEATS = "mounted.HEARTBEAT_SECONDS = 0.3; ending.CLAIM_SECONDS = 1.0"
# Stands for an allreduce that would wait for ever: nothing in the rank notices that a peer is gone.
HANGS = "trap 'echo ended; exit 0' TERM; echo up; while :; do sleep 0.05; done"


def clock(seconds: float, node: int = 1) -> str:
    """Let the clock of one node be wrong: for its agent, and for what its reservation says by that clock."""
    return f"""
import json, time
if "--node={node}" in sys.argv:
    right = time.time
    time.time = lambda: right() + {seconds}
    agents.claim.__defaults__ = (time.time,)
    at = next(index for index, word in enumerate(sys.argv) if word.startswith("--reservation="))
    own = json.loads(sys.argv[at][14:])
    sys.argv[at] = "--reservation=" + json.dumps(dict(own, taken=own["taken"] + {seconds}))
"""


@pytest.mark.parametrize("node", [0, 1])
def test_a_frozen_agent_that_goes_on(agents: Callable[..., Cluster], node: int) -> None:
    """The others end their ranks; it ends its own when it goes on, and one verdict stands."""
    job = agents().submit(HANGS, nodes=2, patch=BEATS, lossSeconds=2.0)
    wait_for(lambda: job.log("stdout.txt").count("up") == 2)
    freeze(job.agents[node].pid)
    begun = time.monotonic()
    job.agents[1 - node].wait(60)
    assert time.monotonic() - begun < 40  # of 60, after which a node is lost where the plan says nothing
    left = {pid for pid in job.processes() if f"BATCHAI_NODE={1 - node}" in _environment(pid)}
    assert not left, "the ranks of the other node are ended"
    before = job.verdict()
    assert (before is None) == (node == 0), "of a frozen node 0 its client tells"
    os.kill(job.agents[node].pid, signal.SIGCONT)
    verdict = job.wait()
    assert verdict["executionState"] == "failed"
    assert verdict["errors"][0]["code"] == "NodeLost"
    assert before in (None, verdict)
    reason = (
        r"node-1 has not been heard of for \d+ s" if node else r"node-1 ended its part: node-0 has not been heard of for \d+ s"
    )
    assert re.fullmatch(reason, verdict["reason"])
    assert not job.processes()


def _environment(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ") as file:
            return file.read()
    except OSError:
        return ""


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_wrong_loses_nobody(agents: Callable[..., Cluster], hours: int) -> None:
    job = agents().submit("echo up; sleep 1", nodes=2, patch=BEATS + clock(3600.0 * hours), lossSeconds=3.0)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt").count("up") == 2


# Rank FIRST fails; the other one notices half a second later, in words that nobody knows.
FAILS = """
gone="$AZ_BATCHAI_SHARED_JOB_TEMP/gone"
if [ $BATCHAI_RANK = %d ]; then touch "$gone"; echo boom >&2; exit 3; fi
trap '' TERM
until [ -e "$gone" ]; do sleep 0.02; done
sleep 0.5; echo "something is wrong" >&2; exit 4
"""


@pytest.mark.parametrize(("hours", "first"), [(-1, 0), (1, 1)])
def test_the_cause_is_told_from_what_follows_whatever_the_clocks_say(
    agents: Callable[..., Cluster], hours: int, first: int
) -> None:
    job = agents().submit(FAILS % first, nodes=2, patch=BEATS + clock(3600.0 * hours), terminateSeconds=2.0)
    verdict = job.wait()
    assert verdict["reason"] == f"rank {first} on node-{first} exited with code 3\nboom", job.said()
    assert verdict["exitCode"] == 3
