"""A stand-in for nvidia-smi on PATH, which answers what is asked of the real one (580) in its words."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

SCRIPT = """#!/bin/sh
sleep {slow}
cd '{folder}'
lost() {{ [ -e "lost-$1" ] && echo "Unable to determine the device handle for GPU$1: 0000:0$1:00.0: Unknown Error"; }}
i=0
case $1 in
  -L) while read -r id; do lost $i || echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: $id)"; i=$((i+1)); done < ids;;
  --query-gpu=index,uuid,*) while read -r id; do
    lost $i || echo "$i, $id, $((10 * i)), 1000, 81559, 350.00, 700.00, $((40 + i))"; i=$((i+1)); done < ids;;
  *) echo "Unknown option: $1" >&2; exit 2;;
esac
ls lost-* > /dev/null 2>&1 && exit 15
exit 0
"""


class NvidiaSmi:
    """The GPUs of a machine.

    GPU k is 40 + k degrees warm and used by 10 k per cent.

    Attributes:
        path: the PATH that has it.
    """

    def __init__(self, folder: Path, count: int, slow: float = 0.0) -> None:
        folder.mkdir()
        self.ids = [f"GPU-{uuid.uuid4()}" for _ in range(count)]
        self.path = f"{folder}:{os.environ['PATH']}"
        self._folder = folder
        (folder / "ids").write_text("".join(f"{identity}\n" for identity in self.ids))
        (folder / "nvidia-smi").write_text(SCRIPT.format(folder=folder, slow=slow))
        (folder / "nvidia-smi").chmod(0o755)

    def lose(self, index: int) -> None:
        """Have a GPU fall off the bus."""
        (self._folder / f"lost-{index}").touch()
