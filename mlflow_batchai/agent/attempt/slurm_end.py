"""Why Slurm ends the job that this agent is a task of: it was cancelled, or reached its time limit."""

from __future__ import annotations

import os
import re
import subprocess
import time

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.outcome import Failure

# For Slurm's answer, which takes longer while its controller is away.
ASK_SECONDS = 4.0
# Slurm's SIGTERM may hit what asks it: then it is asked again.
AGAIN_SECONDS = 0.5
# State in Slurm of a job that must not start again -> error code, sentence. One that was preempted, or has lost a node, may.
ENDS = {
    "CANCELLED": (protocol.JOB_TERMINATED, "Slurm job {} was cancelled (scancel)"),
    "TIMEOUT": (
        protocol.JOB_TIMEOUT,
        "Slurm job {} has reached Slurm's time limit: raise constraints.maxWallClockTime, or the cluster's timeMargin if it was"
        " setup that took so long",
    ),
}


def cause(failure: Failure, seconds: float) -> Failure:
    """The end by Slurm that has made an agent fail by a SIGTERM; the same failure where it is none, or Slurm doesn't answer.

    Args:
        seconds: for Slurm's answer.
    """
    number = os.environ.get("SLURM_JOB_ID", "")
    state = state_in(_shown(number, seconds)) if number.isdecimal() else ""
    if not state:
        return failure
    code, sentence = ENDS[state]
    return Failure(code, sentence.format(number), failure.node)


def state_in(shown: str) -> str:
    """The key of ``ENDS`` that a job comes to, by ``scontrol show job`` while Slurm ends it; empty: none of them."""
    state = re.search(r"^ *JobState=(\S+) Reason=(\S+)", shown, re.MULTILINE)
    preempted = re.search(r"^ *PreemptEligibleTime=\S+ PreemptTime=(\S+)", shown, re.MULTILINE)
    # In another state its agents have a SIGTERM that is no end of the job by Slurm.
    if not state or state[1] != "COMPLETING" or (preempted and preempted[1] != "None"):
        return ""
    return {"TimeLimit": "TIMEOUT", "None": "CANCELLED"}.get(state[2], "")


def _shown(number: str, seconds: float) -> str:
    until = time.monotonic() + min(seconds, ASK_SECONDS)
    while (left := until - time.monotonic()) > 0:
        try:
            done = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True, timeout=left)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            break
        if done.returncode == 0:
            return done.stdout
        time.sleep(AGAIN_SECONDS)
    return ""
