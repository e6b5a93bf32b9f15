"""Node 0's agent has the job's model tried before its verdict, whatever that comes to."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_world import Cluster, Job
from waiting import wait_for

MODEL = {"path": None, "register": None, "name": "model", "checkSeconds": 30.0}
# Stands for the training interpreter: what it does with ``try-model ... FILE``.
PYTHON = """#!/bin/bash
[ "$2" = try-model ] || exit 0
echo "$CUDA_VISIBLE_DEVICES|$*" >&2
{}
"""
PASSED = {"meta": {"format": "keras", "keras": "3.1"}, "check": {"outcome": "passed", "why": None, "seconds": 1, "output": []}}


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Callable[..., Job]:
    """Starts a job that saves a model, whose interpreter does so with it."""

    def start(
        does: str,
        command: str = 'touch "$AZ_BATCHAI_OUTPUT_M"/net.keras',
        patch: str = "",
        terminateSeconds: float = 5.0,
        **model: Any,
    ) -> Job:
        python = tmp_path / "python"
        python.write_text(PYTHON.format(does))
        python.chmod(0o755)
        outputs = [{"id": "M", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": "m"}]
        return cluster.submit(
            command,
            trainer=str(python),
            model={**MODEL, **model},
            outputDirectories=outputs,
            patch=patch,
            terminateSeconds=terminateSeconds,
        )

    return start


def told(job: Job) -> dict[str, Any]:
    (record,) = [record["body"] for record in job.records("report") if record["body"].get("chosen")]
    return dict(record)


def test_its_answer_is_the_record(submit: Callable[..., Job]) -> None:
    job = submit("echo noise >&2; echo " + shlex.quote(json.dumps(PASSED)))
    assert job.wait()["executionState"] == "succeeded"
    body = told(job)
    assert body["path"].endswith("/m/net.keras") and {key: body[key] for key in PASSED} == PASSED
    lines = job.log("model-check.txt").splitlines()
    assert lines[0].endswith("/m/net.keras") and lines[1].startswith("|") and "try-model --load" in lines[1]
    assert lines[2:] == ["noise", "passed: loaded and tried"]
    assert "noise" not in job.log("stdout.txt") + job.log("stderr.txt")


@pytest.mark.parametrize(
    ("does", "seconds", "why"),
    [
        ("sleep 600 & sleep 600", 1.0, "it could not be loaded and tried in 1 s (model.checkTimeout)"),
        ("echo no memory >&2; exit 3", 30.0, "the check exited with code 3: no memory"),
        ("kill -9 $$", 30.0, "the check was killed by SIGKILL (exit code 137)"),
    ],
)
def test_a_check_of_which_nothing_comes_has_failed(submit: Callable[..., Job], does: str, seconds: float, why: str) -> None:
    job = submit(does, checkSeconds=seconds)
    assert job.wait()["executionState"] == "succeeded"
    check = told(job)["check"]
    assert check["outcome"] == "failed" and check["why"].startswith(why)
    assert not job.processes()


def test_a_job_that_is_terminated_meanwhile_ends_at_once(submit: Callable[..., Job]) -> None:
    job = submit("sleep 600", checkSeconds=600.0)
    wait_for(lambda: [record for record in job.records("phase") if record["phase"] == "checking the model"])
    job.cancel("me", "enough")
    verdict = job.wait()
    assert (verdict["executionState"], verdict["terminated"]) == ("failed", True)
    assert not job.processes() and not [record for record in job.records("report") if record["body"].get("chosen")]


# A SIGTERM to the agent, and to the check itself: before it or after.
@pytest.mark.parametrize(
    "does",
    [
        "kill -TERM $PPID; sleep 600",
        "(sleep 0.1; kill -TERM $PPID) & kill -TERM $$",
        "trap '' TERM; kill -TERM $PPID; sleep 600",
    ],
)
def test_an_agent_that_is_told_to_end_says_nothing_of_the_model(submit: Callable[..., Job], does: str) -> None:
    job = submit(does, patch="peers.SAME_MOMENT_SECONDS = 5.0; peers.TERMINATION_SECONDS = 17.0", terminateSeconds=600)
    assert job.wait(17)["executionState"] == "succeeded"
    check = told(job)["check"]
    assert (check["outcome"], check["why"]) == ("unchecked", "the agent was told to end (SIGTERM) before it was tried")
    assert not job.processes()


def test_without_a_check_only_facts_are_asked_for(submit: Callable[..., Job]) -> None:
    job = submit("[ $# = 3 ] && echo " + shlex.quote(json.dumps({"meta": PASSED["meta"]})), checkSeconds=None)
    job.wait()
    body = told(job)
    assert body["meta"] == PASSED["meta"] and "check" not in body and not job.log("model-check.txt")


def test_the_example_of_a_script_comes_once_and_to_the_check(submit: Callable[..., Job]) -> None:
    report = {"type": "model", "path": "/x/net.keras", "meta": {"backend": "torch", "example": [[1, 2]]}}
    command = f'echo {shlex.quote(json.dumps(report))} >> "$BATCHAI_SPOOL"/report-0-1.jsonl'
    job = submit('cat "$5" >&2; echo " $KERAS_BACKEND" >&2; echo ' + shlex.quote(json.dumps(PASSED)), command)
    job.wait()
    bodies = [record["body"] for record in job.records("report")]
    assert [("example" in body["meta"], body["meta"]["backend"]) for body in bodies] == [(False, "torch"), (True, "torch")]
    assert "[[1, 2]] torch" in job.log("model-check.txt")


def test_a_file_of_pytorch_is_not_tried(submit: Callable[..., Job]) -> None:
    job = submit("echo never >&2", 'touch "$AZ_BATCHAI_OUTPUT_M"/net.pt')
    job.wait()
    assert told(job)["meta"] == {"format": "torch"} and not job.log("model-check.txt")


# What rank 0 says before its end.
TRIAL = """
import json, os, pathlib
from mlflow_batchai.training import saved_models
file = pathlib.Path(os.environ["AZ_BATCHAI_OUTPUT_M"], "net.keras")
file.write_bytes(b"model")
found = {"meta": {"format": "keras", "keras": "3.2"}, "check": {"outcome": "passed", "why": None, "seconds": 0.5}}
record = {"type": "trial", "path": str(file), "stamp": saved_models.stamp(str(file)), **found}
{change}
pathlib.Path(os.environ["BATCHAI_SPOOL"], "report-0-1.jsonl").write_text(json.dumps(record) + "\\n")
"""


@pytest.mark.parametrize(
    ("change", "keras"),
    [
        ("", "3.2"),
        ("file.write_bytes(b'another')", "3.1"),
        ("record['check'] = {'outcome': 'passed'}", "3.1"),
    ],
)
def test_a_model_that_rank_0_has_tried_is_not_tried_again(submit: Callable[..., Job], change: str, keras: str) -> None:
    """Unless the file is another one by now, or what the rank says is odd."""
    code = TRIAL.replace("{change}", change)
    job = submit("echo " + shlex.quote(json.dumps(PASSED)), f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}")
    assert job.wait()["executionState"] == "succeeded", job.said()
    body = told(job)
    assert body["meta"] == {"format": "keras", "keras": keras} and body["check"]["outcome"] == "passed"
    assert ("try-model" not in job.log("model-check.txt")) == (keras == "3.2")
    assert (not [one for one in job.records("phase") if one["phase"] == "checking the model"]) == (keras == "3.2")
    assert job.log("model-check.txt").endswith("passed: loaded and tried\n")
