"""The pictures of MLflow's pages: each is shown in the documentation, and none is heavy."""

from __future__ import annotations

import re
from pathlib import Path

from browser import LARGEST_PICTURE

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images"


def test_each_is_taken_and_shown() -> None:
    """Those that there are, those that the tests of the pages take, and those that the page about them shows."""
    there = {path.name for path in PICTURES.iterdir()}
    taken = re.findall(r'\.picture\("([\w-]+)"', (ROOT / "tests" / "e2e" / "test_ui.py").read_text(encoding="utf-8"))
    shown = re.findall(r"\]\(images/([\w.-]+)\)", (ROOT / "docs" / "mlflow.md").read_text(encoding="utf-8"))
    assert there == {f"{name}.png" for name in taken} == set(shown)
    assert not [path for path in PICTURES.iterdir() if path.stat().st_size >= LARGEST_PICTURE]
