"""The errors that this package raises on purpose.

A message is one sentence (or a sentence and the last lines of a log): what was wrong, where, and what to do.

    BatchAIError
    ├── UsageError               the command line or a backend option can't be used as given
    ├── DocumentError            a job, cluster or batchai.yaml document is wrong (file and key path in the message)
    ├── ProjectError             the MLproject or its entry point is wrong
    │   └── ParameterError       a parameter is unknown, missing, or not of its declared type
    ├── NotSupportedError        understood, but not built yet or not possible on this cluster
    ├── ClusterError             too few nodes, engine can't be reached
    │   ├── ConnectionLostError  a node's open connection, or a command on it, ended before it answered
    │   ├── HostKeyError         a node's host key is unknown, has changed, or is revoked
    │   └── LoginError           a node was reached and is the right one, but doesn't let us in
    ├── NotFoundError            there is nothing of that name; the message has the names that exist
    │   ├── ClusterNotFoundError     (a ClusterError, too)
    │   ├── WorkspaceNotFoundError
    │   ├── ExperimentNotFoundError
    │   └── StorageNotFoundError     no such share, folder or file in a storage account
    ├── ShareError               the control share can't be read or written
    │   ├── ShareNotFoundError   no such file on the share
    │   └── ShareMissingError    there is no such share
    ├── TrackingError            the tracking store can't be asked
    ├── HorovodBuildError        the Horovod wheel could not be built
    ├── ModelError               a saved model can't become an MLflow model
    └── JobError                 something about one job
        ├── JobNotFoundError     no job of that name or run id (a NotFoundError, too)
        ├── JobUnreadableError   its plan is damaged, or of another version of this package
        ├── JobChangedError      what directs its clients was changed on the share; they obey nothing of it
        ├── JobNotTrustedError   it was submitted with another key than this user's
        ├── JobFailedError       the job has ended and did not succeed
        ├── StillRunningError    it has not ended in the time that was given (a TimeoutError, too); the job goes on
        └── JobDetachedError     we stopped watching; the job goes on
"""

from __future__ import annotations

from collections.abc import Sequence


class BatchAIError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is fit to show to a person."""


class UsageError(BatchAIError):
    """The command line or a backend option can't be used as given."""


class DocumentError(BatchAIError):
    """A job, cluster or batchai.yaml document is wrong."""


class ProjectError(BatchAIError):
    """The MLproject or its entry point is wrong."""


class ParameterError(ProjectError):
    """A parameter is unknown, missing, or not of its declared type."""


class NotSupportedError(BatchAIError):
    """Understood, but not built yet or not possible on this cluster."""


class ClusterError(BatchAIError):
    """Too few nodes, or an engine that can't be reached."""


class ConnectionLostError(ClusterError):
    """An open connection or a remote command has ended before it answered; what was sent may or may not have been done."""


class HostKeyError(ClusterError):
    """A node's host key is unknown, has changed, or is revoked."""


class LoginError(ClusterError):
    """A node was reached and is the right one, but doesn't let us in."""


class NotFoundError(BatchAIError):
    """There is nothing of that name; the message has the names that exist."""


SOME = 20


def some_of(names: Sequence[str]) -> str:
    """The names that exist, for a NotFoundError; of many the first ones."""
    return ", ".join(names[:SOME]) + (" ..." if len(names) > SOME else "")


class ClusterNotFoundError(ClusterError, NotFoundError):
    """No cluster of that name."""


class WorkspaceNotFoundError(NotFoundError):
    """No workspace of that name."""


class ExperimentNotFoundError(NotFoundError):
    """No experiment of that name in the tracking store."""


class StorageNotFoundError(NotFoundError):
    """No such share, folder or file in a storage account."""


class ShareError(BatchAIError):
    """The control share can't be read or written."""


class ShareNotFoundError(ShareError):
    """No such file on the share."""


class ShareMissingError(ShareError):
    """There is no such share."""


class TrackingError(BatchAIError):
    """The tracking store can't be asked."""


class HorovodBuildError(BatchAIError):
    """The Horovod wheel could not be built."""


class ModelError(BatchAIError):
    """A saved model can't become an MLflow model."""


class JobError(BatchAIError):
    """Something about one job."""


class JobNotFoundError(JobError, NotFoundError):
    """No job of that name or run id."""


class JobUnreadableError(JobError):
    """The job is there, and its plan is damaged or of another version of this package."""


class JobChangedError(JobError):
    """A record that directs a job's clients was changed on the share; they obey nothing of it."""


class JobNotTrustedError(JobError):
    """A job was submitted with another key than this user's, and what was asked would obey its plan."""


class JobFailedError(JobError):
    """The job has ended and did not succeed.

    Attributes:
        exit_code: the job's own exit code, or None if it has none (terminated, node lost).
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StillRunningError(JobError, TimeoutError):
    """The job has not ended in the time that was given; it goes on."""


class JobDetachedError(JobError):
    """We stopped watching; the job goes on."""
