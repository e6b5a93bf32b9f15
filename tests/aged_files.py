"""Files that look as if they were written long ago, for what removes old ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

DAY = 86400.0
HASH = "0123456789abcdef"


def put(path: Path, days: float, content: bytes = b"12345") -> Path:
    """A file that was written and last read so many days ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path
