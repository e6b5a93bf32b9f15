"""Commands in an example's README."""

from __future__ import annotations

import re
from pathlib import Path


def commands(example: Path) -> list[str]:
    """Every line of the shell blocks of ``example/README.md``, those inside of lists, too."""
    text = (example / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.S | re.M)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
