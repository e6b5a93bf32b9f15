"""What an agent makes of a control share that fails: what passes is waited for, what doesn't ends the job with a sentence."""

import errno
import os
import time
from typing import Callable, Optional

from mlflow_batchai.agent.share.base import ControlError

# A server that is away comes back; for so long nobody else on the share knows that we are still there.
AWAY_SECONDS = 900.0

_FULL = "make room there, or raise its quota, and start the job again"
_AGAIN = "mount it again there, and start the job again"
_WORDS = {
    errno.ENOSPC: ("the share is full", _FULL),
    errno.EDQUOT: ("the share's quota is used up", _FULL),
    errno.EROFS: ("the share is read-only", "make it writable, and start the job again"),
    errno.EACCES: ("the share refuses this node's user", "give it the right to write there, and start the job again"),
    errno.EPERM: ("the share refuses this node's user", "give it the right to write there, and start the job again"),
    # Of a share that is there: one that isn't mounted is waited for (``MountedShare.gone``).
    errno.ENOENT: ("the job's folder is gone from the share", "was it deleted?"),
    errno.ENOTDIR: ("the job's folder is gone from the share", "was it deleted?"),
    errno.ESTALE: ("the share's mount is no longer valid", _AGAIN),
    errno.ENOTCONN: ("the share's mount has lost its file system", _AGAIN),
    # The call during which it did.
    errno.ECONNABORTED: ("the share's mount has lost its file system", _AGAIN),
}
# Of a share by REST: its sentence says all, and who isn't let in is waited for longer (``peers.REFUSED_SECONDS``).
_DEFINITE_BY_REST = (errno.ENOSPC, errno.ENOENT)


def sentence(error: OSError) -> Optional[str]:
    """What an error that doesn't pass by itself says of the share, and what to do; None: it may pass."""
    if isinstance(error, ControlError):
        return str(error) if error.errno in _DEFINITE_BY_REST else None
    if error.errno not in _WORDS:
        return None
    what, remedy = _WORDS[error.errno]
    return "%s (%s); %s" % (what, os.strerror(error.errno), remedy)


class ShareTrouble:
    """For how long the share has failed, and how.

    Args:
        patience: seconds for which an error that doesn't pass by itself is borne: somebody may be making room.
        clock: seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._good = clock()
        self._definite: Optional[float] = None
        self._seen = self._good
        self._sentence = ""
        self._error: Optional[OSError] = None

    def saw(self, error: Optional[OSError]) -> None:
        """What came of a round of writing and reading."""
        now = self._seen = self._clock()
        found = sentence(error) if error else None
        self._error = error
        if error is None:
            self._good = now
        if found is None:
            self._definite = None
        elif self._definite is None:
            self._definite = now
        self._sentence = found or ""

    def told(self) -> Optional[str]:
        """Why the job has to end, or None. A round that hangs is one that has not succeeded, and has not failed for good."""
        now, since = self._clock(), self._definite
        if since is not None and self._seen - since > self._patience:
            return self._sentence
        if now - self._good > AWAY_SECONDS:
            why = (self._error.strerror or str(self._error)) if self._error else "it doesn't answer"
            return "the share could not be used for %d s (%s)" % (now - self._good, why)
        return None
