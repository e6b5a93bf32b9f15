"""Of several failures the first cause is reported, in Batch AI's words."""

from __future__ import annotations

import pytest

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.outcome import Failure, Stop, first_cause, verdict

GONE = "[1,1]<stderr>: horovod.common.exceptions.HorovodInternalError: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]"

# As in horovod#534: all ranks say that one has failed, and none says which.
SHUT_DOWN = (
    "UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce"
)

# PyTorch's ranks: of gloo, of NCCL, and of the store on rank 0.
READ_ERROR = (
    "[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:950: Connection reset by peer. This"
)
NCCL = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
STORE = (
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shut"
)


def failed(name: str, time: int, tail: str = "", **more: object) -> Failure:
    return Failure(protocol.JOB_FAILED, name, node=0, rank=0, exit_code=1, tail=[tail], time=time, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([], None),
        ([failed("late", 2), failed("early", 1)], "early"),
        ([failed("noticed", 1, GONE), failed("bug", 2, "ValueError")], "bug"),
        ([failed("noticed", 1, SHUT_DOWN), failed("bug", 2, "ValueError")], "bug"),
        ([failed("noticed", 1, READ_ERROR), failed("noticed too", 1, NCCL), failed("bug", 2, "ValueError")], "bug"),
        ([failed("noticed", 1, STORE), failed("bug", 2, "ValueError")], "bug"),
        ([failed("noticed", 1, GONE), failed("killed", 2, GONE, signalled=True)], "killed"),
        ([failed("second", 2, GONE), failed("first", 1, GONE)], "first"),
        ([failed("noticed", 1, GONE), Failure(protocol.NODE_LOST, "lost", node=1, time=60_000)], "lost"),
    ],
)
def test_first_cause(failures: list[Failure], cause: str | None) -> None:
    for order in (failures, failures[::-1]):
        found = first_cause(order)
        assert (None if found is None else str(found)) == cause


def test_a_failure_travels() -> None:
    failure = Failure(protocol.JOB_FAILED, "für \udc80", 3, rank=2, exit_code=9, tail=["a", "b"], signalled=True, time=5)
    [record] = protocol.decode(protocol.encode([dict(failure.as_record(), k="failed", t=1)]))
    assert Failure.from_record(record).as_record() == failure.as_record()


def test_batch_ai_s_error_and_the_reason() -> None:
    failure = Failure(protocol.JOB_FAILED, "rank 2 failed", 1, rank=2, exit_code=9, tail=[str(i) for i in range(30)])
    assert failure.as_error() == {
        "code": "JobFailed",
        "message": "Job failed with non-zero exit code",
        "details": [
            {"name": "node", "value": "1"},
            {"name": "rank", "value": "2"},
            {"name": "message", "value": "rank 2 failed"},
        ],
    }
    assert failure.reason(2) == "rank 2 failed\n28\n29"
    assert Failure(protocol.NODE_LOST, "gone", 1).reason() == "gone"
    assert len(Failure(protocol.NODE_LOST, "gone", 1).as_error()["details"]) == 2


def test_a_requeued_attempt_is_no_end() -> None:
    failure = Failure(protocol.JOB_FAILED, "rank 0 was killed by SIGTERM", 0, rank=0, exit_code=143)
    found = verdict(failure, Stop("requeue", "the cluster gets smaller", by="ann"), attempt=3)
    assert (found["executionState"], found["next"], found["reason"]) == ("queued", 4, "the cluster gets smaller")
    assert (found["exitCode"], found["errors"], found["terminated"]) == (None, [], False)
    assert "next" not in verdict(failure, None, attempt=3)


LOST = Failure(protocol.NODE_LOST, "node-1 has not been heard of for 60 s", node=1, tail=["a"])


@pytest.mark.parametrize(
    ("cause", "stop", "state", "code", "reason", "terminated"),
    [
        (None, None, "succeeded", None, "", False),
        (LOST, None, "failed", "NodeLost", "node-1 has not been heard of for 60 s\na", False),
        (LOST, Stop("cancel", "", by="ann"), "failed", "JobTerminate", "terminated by ann", True),
        (None, Stop("cancel", "typo", queued=True), "failed", "JobTerminated", "terminated: typo", True),
        (None, Stop("verdict", "it has one"), "failed", None, "it has one", False),
    ],
)
def test_verdict(cause, stop, state, code, reason, terminated) -> None:
    found = verdict(cause, stop)
    assert (found["executionState"], found["reason"], found["terminated"]) == (state, reason, terminated)
    assert [error["code"] for error in found["errors"]] == ([code] if code else [])
    assert found["exitCode"] == (0 if state == "succeeded" else None)
    assert (found["by"], type(found["endTime"])) == ("agent-0", int)
