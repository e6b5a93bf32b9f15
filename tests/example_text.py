"""What an example's README has its reader type."""

from __future__ import annotations

import re
from pathlib import Path


def commands(example: Path) -> list[str]:
    """Every line of the shell blocks of ``example/README.md``."""
    text = (example / "README.md").read_text(encoding="utf-8")
    return [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M) for line in block.splitlines() if line]
