"""The engine of a cluster that this machine does not know: it can neither poll nor end such a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from mlflow_batchai.engines.base import CheckResult, Handle, Needs, NodeCommand, Poll, StartRequest, unknown_poll
from mlflow_batchai.errors import ClusterError


class AbsentEngine:
    """See ``Engine`` for the promises; ``why``: one sentence."""

    poll_seconds: ClassVar[float] = 5.0
    node_limit = 0

    def __init__(self, why: str) -> None:
        self._why = why

    def check(self, node_count: int, needs: Needs | None = None) -> CheckResult:
        self._refuse()

    def render(self, request: StartRequest) -> Sequence[NodeCommand]:
        self._refuse()

    def submit(self, request: StartRequest) -> Handle:
        self._refuse()

    def poll(self, handle: Handle) -> Poll:
        return unknown_poll(handle, self._why)

    def poll_all(self, handles: Sequence[Handle]) -> Sequence[Poll]:
        return [self.poll(handle) for handle in handles]

    def cancel(self, handle: Handle) -> None:
        self._refuse()

    def end_job(self, job: str) -> None:
        self._refuse()

    def close(self) -> None:
        pass

    def _refuse(self) -> NoReturn:
        raise ClusterError(self._why)
