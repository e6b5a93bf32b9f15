"""A share that loses parts of what was written: agents go on from what others say again, or end the job with a sentence."""

from __future__ import annotations

import pytest
from node_world import Cluster

# The agent of one node writes one file as a server would leave it that crashed; everybody looks at such files for a moment only.
PATCH = """
from mlflow_batchai.agent import records
records.SETTLE_SECONDS, sharefiles.QUIET_SECONDS, shipper.AGAIN_SECONDS = 0.3, 0.5, 1.0
mounted.HEARTBEAT_SECONDS, peers.DAMAGED_SECONDS = 0.2, 1.0
damaged, real = [], mountfiles.write_closed
def write(root, path, found, within):
    if damaged or {node!r} not in sys.argv or not any(record.get("k") == {what!r} for record in found) and not path.endswith({what!r}):
        return real(root, path, found, within)
    damaged.append(path)
    whole = protocol.encode(found)
    data = {left}(whole)
    if data is not None:
        real(root, path, [])
        open(root + "/" + path, "wb").write(data)
    return len(whole)
mountfiles.write_closed = write
"""
LEFT = {
    "missing": "(lambda data: None)",
    "empty": "(lambda data: b'')",
    "NULs": "(lambda data: bytes(len(data)))",
    "overwritten": "(lambda data: data[:9] + bytes(20) + data[29:])",
}


def patch(node: int, what: str, left: str) -> str:
    return PATCH.replace("{node!r}", repr(f"--node={node}")).replace("{what!r}", repr(what)).replace("{left}", LEFT[left])


@pytest.mark.parametrize(
    ("command", "node", "what", "left", "reason"),
    [
        ("echo hello", 1, "ready", "missing", ""),
        ("echo hello", 1, "log", "overwritten", ""),
        ("[ $BATCHAI_RANK = 0 ] && sleep 600; exit 7", 1, "failed", "empty", "rank 1 on node-1 exited with code 7"),
        ("[ $BATCHAI_RANK = 1 ] && sleep 600; sleep 1; exit 5", 0, "stop", "missing", "rank 0 on node-0 exited with code 5"),
        ("sleep 1", 0, "rendezvous.json", "NULs", "rendezvous.json is damaged: the share has lost a part of it"),
    ],
    ids=["ready", "log", "failed", "stop", "rendezvous"],
)
def test_a_file_that_was_lost_hangs_no_job(
    cluster: Cluster, command: str, node: int, what: str, left: str, reason: str
) -> None:
    changes = {"lossSeconds": 3.0} if what in ("failed", "stop") else {}
    job = cluster.submit(command, nodes=2, patch=patch(node, what, left), **changes)
    verdict = job.wait()
    assert verdict["executionState"] == ("failed" if reason else "succeeded"), job.said()
    assert reason in verdict["reason"] and not job.processes()
    assert job.log("stdout-1.txt") == ("" if reason else "hello\n")
