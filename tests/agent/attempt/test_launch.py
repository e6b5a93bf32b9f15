"""Horovod's rendezvous server starts before the ranks, whatever else its interpreter says."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_world import Cluster

# A usercustomize.py, a .pth file or an image's entry script may print what they like.
CHATTY = """#!/bin/bash
if [ "$2" = rendezvous ]; then
    echo 'Welcome to the image'; echo '{"port": "none yet"}'; printf '\\xff\\n'; sleep 0.3; echo '{"port": 7}'; exec cat
fi
exit 0
"""
MUTE = """#!/bin/bash
if [ "$2" = rendezvous ]; then echo 'Welcome to the image'; exit 3; fi
exit 0
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.touch(0o755)
    return path


def test_an_interpreter_that_prints_at_its_start(cluster: Cluster, interpreter: Path) -> None:
    interpreter.write_text(CHATTY)
    job = cluster.submit('echo "port $HOROVOD_GLOO_RENDEZVOUS_PORT"', nodes=2, trainer=str(interpreter))
    verdict = job.wait()
    assert verdict["executionState"] == "succeeded", verdict["reason"]
    assert sorted(job.log("stdout.txt").splitlines()) == ["[0] port 7", "[1] port 7"]


def test_a_server_that_does_not_start(cluster: Cluster, interpreter: Path) -> None:
    interpreter.write_text(MUTE)
    verdict = cluster.submit("echo never", nodes=2, trainer=str(interpreter)).wait()
    assert verdict["errors"][0]["code"] == "RendezvousFailed"
    assert verdict["reason"].startswith("Horovod's rendezvous server did not start on node-0: Welcome to the image")
