"""Many jobs at once on one cluster of four nodes; ``make faults`` runs fifty, and once more with processes killed."""

from __future__ import annotations

from pathlib import Path

from crowd import run_crowd


def test_sixteen_jobs_from_four_processes(tmp_path: Path, store_template: Path) -> None:
    """All end right, in the order of submission, and no node ever has two."""
    troubles, line = run_crowd(tmp_path / "world", store_template, processes=4, jobs=16)
    assert not troubles, line
