"""An engine that starts nothing, for clients that submit and retry."""

from __future__ import annotations

from mlflow_batchai.engines.base import CheckResult, Poll, PollState


class Engine:
    """Takes a job, or fails; remembers what it was told."""

    node_limit = usable = 1
    poll_seconds = 1.0

    def __init__(self):
        self.started, self.cancelled, self.missing = [], [], {}
        self.closed = 0
        self.error = self.trouble = None

    def check(self, count, needs=None):
        if self.trouble:
            raise self.trouble
        return CheckResult(self.usable, self.missing)

    def submit(self, request):
        if self.error:
            raise self.error
        self.started.append(request)
        return {"engine": "fake", "nodes": [0]}

    def poll(self, handle):
        return Poll(PollState.ALIVE)

    def poll_all(self, handles):
        return [self.poll(handle) for handle in handles]

    def cancel(self, handle):
        self.cancelled.append(handle)

    def close(self):
        self.closed += 1
