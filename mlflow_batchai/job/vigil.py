"""Whether anybody relays a job, as one who looks again and again comes to know it.

One look tells nothing of a holder on another machine (``Lease.glance``): it lives if its counter moves, and is dead when that
has stood still for the grace time, by our own clock.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection

from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import BOARD_PACE, PACE, Glance, Hold, Lease


class Vigil:
    """Looks at the lease of a job, at the pace at which its holder can be seen to live.

    Args:
        job: the job; at another attempt it needs another vigil.
        on_their_way: pids of the job's followers on this machine, which may not have its lease yet: they have only begun, wait
            to see whether another lives, or can't write to the share just now.
        clock: seconds.

    Attributes:
        look_seconds: no more than one look in this time costs a request.
        grace_seconds: how long it may take until it is known whether a holder lives.
    """

    def __init__(
        self, job: Job, on_their_way: Callable[[], Collection[int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.job = job
        self._on_their_way = on_their_way
        self._lease = Lease(job)
        self._clock = clock
        _, self.grace_seconds, self.look_seconds = PACE if job.board is None else BOARD_PACE
        self._next = 0.0
        self._seen: Glance | None = None
        self._moves: tuple[int, int | None] | None = None
        self._lives = False
        self._since = 0.0

    def look(self) -> Glance:
        """Who relays the job: as ``Lease.glance`` has it, but HELD or FREE instead of UNKNOWN once time has told, and HELD if
        one is on its way.

        Raises:
            ShareError: the share can't be read now.
        """
        now = self._clock()
        if self._seen is None or now >= self._next:
            glance = self._lease.glance()
            if self._seen is None or glance.moves != self._moves:
                self._moves, self._lives, self._since = glance.moves, self._seen is not None, now
            self._seen, self._next = self._judged(glance, now), now + self.look_seconds
        return self._seen

    def _judged(self, glance: Glance, now: float) -> Glance:
        if glance.hold is Hold.FINISHED:
            return glance
        lives = glance.hold is Hold.HELD or (glance.hold is Hold.UNKNOWN and self._lives)
        # Of a process that was stopped, or hangs, it is known that it is there, and it is no help.
        still = glance.hold is not Hold.FREE and now - self._since > self.grace_seconds
        if lives and not still and not glance.trouble:
            return glance._replace(hold=Hold.HELD)
        if others := set(self._on_their_way()) - {glance.holder.get("pid") if glance.hold is Hold.HELD else None}:
            return glance._replace(hold=Hold.HELD, holder={"pid": min(others), "host": socket.gethostname()}, trouble="")
        if still:
            return glance._replace(hold=Hold.FREE)
        return glance._replace(hold=Hold.HELD) if lives else glance
