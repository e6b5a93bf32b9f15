"""What ranks meet at is there before they start: Horovod's server, whatever else its interpreter says; rank 0 of PyTorch."""

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

SHORT_LIVED = """#!/bin/bash
if [ "$2" = rendezvous ]; then echo '{"port": 7}'; sleep 0.5; echo 'no memory is left' >&2; exit 3; fi
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


def test_a_server_that_ends_while_another_node_prepares(cluster: Cluster, interpreter: Path) -> None:
    """That is told at once: ranks would look for it in vain."""
    interpreter.write_text(SHORT_LIVED)
    slow = '[ "$BATCHAI_NODE" = 0 ] || sleep 600'
    job = cluster.submit("echo never", nodes=2, trainer=str(interpreter), preparation=slow)
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "RendezvousFailed", job.said()
    assert verdict["reason"].startswith("Horovod's rendezvous server has ended on node-0: no memory is left")
    assert "never" not in job.log("stdout.txt")


# What torch.distributed does with torchrun's variables: rank 0 listens, the others find it, and all hear of all.
MEETS = """cat > meets.py <<'END'
import json, os, socket, time
told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
place, size = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(told["WORLD_SIZE"])
assert os.environ["AZ_BATCHAI_PYTORCH_INIT_METHOD"] == "tcp://%s:%d" % place
if told["RANK"] == "0":
    server = socket.create_server(("", place[1]))
    peers = [server.accept()[0] for _ in range(size - 1)]
    all_told = sorted([told, *(json.loads(peer.makefile().readline()) for peer in peers)], key=lambda one: one["RANK"])
    print(json.dumps([list(one.values()) for one in all_told]))
else:
    for _ in range(200):
        try:
            peer = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(json.dumps(told).encode() + b"\\n")
END
"""


def test_ranks_of_pytorch_meet_at_rank_zero(cluster: Cluster) -> None:
    job = cluster.submit(MEETS + "python3 meets.py", nodes=2, ranks=3, framework="pytorch")
    verdict = job.wait()
    assert verdict["executionState"] == "succeeded", job.said()
    (said,) = job.log("stdout.txt").splitlines()
    assert said == '[0] [["0", "0", "0", "3", "2"], ["1", "1", "0", "3", "2"], ["2", "0", "1", "3", "1"]]'
