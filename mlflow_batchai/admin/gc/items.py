"""An item that can be freed, and the rule for how old it must be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

# In the order in which they are shown, and freed: what a job folder names is free only when that is gone.
KINDS = ("job", "staged files", "environment", "preparation", "tool", "agent", "log", "wheel")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Age:
    """The age from which things are freed: ended or last used ``seconds`` before ``now``."""

    seconds: float
    now: float = field(default_factory=time.time)

    def is_past(self, when: float | None, least: float = 0.0) -> bool:
        """Whether a time (seconds since the epoch) is longer ago than that, and than the least that a thing stays."""
        return when is not None and self.now - when > max(self.seconds, least)


@dataclass(frozen=True)
class Item:
    """One thing that can be freed.

    Attributes:
        kind: one of ``KINDS``.
        path: where it lies: a share's address with the path on it, ``node:path``, or a path of this machine.
        size: bytes that come free.
        modified: when it was last written or used, seconds since the epoch; None where that isn't known.
        remove: frees it, and says whether it is gone; what is in use by now stays. It may be interrupted, and asked twice; it
            raises BatchAIError.
    """

    kind: str
    path: str
    size: int
    modified: float | None
    reason: str
    remove: Callable[[], bool] = field(repr=False, compare=False)

    def row(self) -> dict[str, Any]:
        when = None
        if self.modified is not None:
            when = datetime.fromtimestamp(self.modified, timezone.utc).isoformat(timespec="seconds")
        return {"kind": self.kind, "path": self.path, "bytes": self.size, "modified": when, "reason": self.reason}
