"""A store, a relay into it that can be made to fail, and what a toy job says."""

from __future__ import annotations

from job_folder import line, report

from mlflow_batchai.engines.base import Poll, PollState
from mlflow_batchai.errors import ClusterError


class Crash(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class StoreClient:
    """An MLflow client that fails before or after a call; after a Crash its process is dead, and no other call gets through."""

    def __init__(self, real):
        self._real = real
        self.calls = []
        self.before = {}
        self.after = {}
        self.dead = False

    def __getattr__(self, name):
        method = getattr(self._real, name)
        if not callable(method):
            return method

        def call(*arguments, **named):
            self.calls.append(name)
            self._fail(self.before, name)
            result = method(*arguments, **named)
            self._fail(self.after, name)
            return result

        return call

    def _fail(self, table, name):
        errors = table.get(name)
        error = Crash() if self.dead else errors.pop(0) if errors else None
        if error:
            self.dead = isinstance(error, Crash)
            raise error


class Time:
    now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Gone:
    """An engine whose agents have all left."""

    poll_seconds = 1.0

    def poll(self, handle):
        return Poll(PollState.GONE, "gone", (0,))

    def cancel(self, handle):
        raise ClusterError("can't be ended from here")

    def close(self):
        pass


def history(client, run_id):
    run = client.get_run(run_id)
    return {
        key: [(point.step, point.value, point.timestamp) for point in client.get_metric_history(run_id, key)]
        for key in run.data.metrics
    }


def fill(made):
    made.segment(0, report(0, loss=1.5), line("f1 0.5\nEpoch 1/2\n2/2 - 0s - acc: 0.25"))
    made.segment(1, report(1, loss=0.5), line("f1 0.75\nEpoch 2/2\n2/2 - 0s - acc: 0.5"))


EXPECTED = {
    "loss": [(0, 1.5, 5), (1, 0.5, 5)],
    "f1": [(0, 0.5, 7), (1, 0.75, 7)],
    "acc": [(0, 0.25, 7), (1, 0.5, 7)],
}
