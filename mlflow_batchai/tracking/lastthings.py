"""What is sent when an attempt is over: each thing once, however often a store that is away makes us begin anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mlflow_batchai.errors import BatchAIError, ShareError, ShareNotFoundError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseLostError
from mlflow_batchai.tracking import stores

# For how long a share over the network may be away (this machine slept), or a store refuse a thing though it answers (where it
# keeps artifacts is away), before that thing is given up. A store that doesn't answer at all is waited for: see ``trouble``.
AWAY_SECONDS = 300.0


class LastThings:
    """Sends the last things of an attempt, and knows what could not be sent of each.

    Args:
        job: the job, at that attempt.
        lease: the right to write its run.
        answers: whether the store can be reached now.
    """

    def __init__(self, job: Job, lease: Lease, answers: Callable[[], bool]) -> None:
        self._job = job
        self._lease = lease
        self._answers = answers
        self._done: dict[str, list[str]] = {}
        self._since: float | None = None

    def once(self, what: str, send: Callable[[], Sequence[str]]) -> list[str]:
        """Send a thing, if it hasn't been sent; sentences on what could not be sent of it.

        Args:
            send: returns such sentences; what it raises is one, too, unless it may pass.

        Raises:
            Exception: the thing may be taken if it is sent again: call again.
            LeaseLostError: another relay has taken over.
        """
        if what not in self._done:
            self._lease.check()
            self._since = self._since or time.monotonic()
            try:
                self._done[what] = list(send())
            except LeaseLostError:
                raise
            except Exception as error:  # MLflow raises whatever its store raises; the run must end all the same
                if self._may_pass(error, time.monotonic() - self._since < AWAY_SECONDS):
                    raise
                ours = isinstance(error, BatchAIError)
                self._done[what] = [str(error) if ours else f"{what}: {type(error).__name__}: {error}"]
            else:
                # What was given up once is not waited for again, thing by thing.
                self._since = None
        return list(self._done[what])

    def _may_pass(self, error: Exception, patient: bool) -> bool:
        if isinstance(error, ShareError):
            return patient and self._job.board is not None and not isinstance(error, ShareNotFoundError)
        # What is said of a model hides what the store has said.
        return (patient and stores.may_pass(error.__cause__ or error)) or not self._answers()
