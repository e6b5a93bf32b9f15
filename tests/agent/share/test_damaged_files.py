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


@pytest.mark.parametrize(("what", "left"), [("ready", "missing"), ("log", "overwritten")])
def test_a_damaged_segment_of_a_peer_hangs_no_job(cluster: Cluster, what: str, left: str) -> None:
    job = cluster.submit("echo hello", nodes=2, patch=patch(1, what, left))
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout-1.txt") == "hello\n"


def test_a_failure_that_was_lost_ends_the_job(cluster: Cluster) -> None:
    job = cluster.submit(
        "[ $BATCHAI_RANK = 0 ] && sleep 600; exit 7", nodes=2, patch=patch(1, "failed", "empty"), lossSeconds=3.0
    )
    verdict = job.wait()
    assert verdict["reason"].splitlines()[0] == "rank 1 on node-1 exited with code 7", job.said()


def test_a_stop_that_was_lost_ends_the_job(cluster: Cluster) -> None:
    command = "[ $BATCHAI_RANK = 1 ] && sleep 600; sleep 1; exit 5"
    job = cluster.submit(command, nodes=2, patch=patch(0, "stop", "missing"), lossSeconds=3.0)
    verdict = job.wait()
    assert verdict["reason"].splitlines()[0] == "rank 0 on node-0 exited with code 5", job.said()
    assert not job.processes()


def test_a_file_that_others_wait_for_and_can_t_read_ends_the_job(cluster: Cluster) -> None:
    job = cluster.submit("sleep 1", nodes=2, patch=patch(0, "rendezvous.json", "NULs"))
    verdict = job.wait()
    assert (verdict["executionState"], verdict["errors"][0]["code"]) == ("failed", "NodeSetupFailed"), job.said()
    assert "rendezvous.json is damaged: the share has lost a part of it; submit the job again" in verdict["reason"]
