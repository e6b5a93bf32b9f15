"""Staged files: what no job names goes, once it is old enough that nobody can be just about to name it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.admin.gc import staged
from mlflow_batchai.admin.gc.items import Age, Item
from mlflow_batchai.agent.protocol import OBJECTS, TREES, object_path
from mlflow_batchai.errors import ShareError
from mlflow_batchai.job import places
from mlflow_batchai.storage.objects import StagedFile, upload

DAY = 86400.0


def look(control: Any, going: tuple[str, ...] = (), days: float = 30) -> list[Item]:
    return staged.find(control.share, places.find(control.share), going, Age(days * DAY))


def test_what_no_job_names(control: Any) -> None:
    old, young, code = control.staged("aa1", 31), control.staged("aa2", 29), control.staged("bb1", 90)
    data, tool = control.staged("cc1", 90), control.staged("cc2", 90)
    control.job(
        "lives",
        code=(code,),
        inputs=[{"variable": "DATA", "files": [{"path": "x", "sha256": data, "size": 10}]}],
        tools={"rclone": {"machine": "x86_64", "sha256": tool, "size": 10}},
    )
    control.share.write(f"{TREES}/0123", b"all there")
    control.aged(f"{TREES}/0123", 31)
    (item,) = look(control)
    assert (item.path, item.size, item.reason) == (f"{control.share.url}/{OBJECTS}", 10, "1 file that no job names")
    assert item.modified == pytest.approx(time.time() - 31 * DAY, abs=60)
    assert item.remove()
    there = [sha256 for sha256 in (old, young, code, data, tool) if control.there(object_path(sha256))]
    assert there == [young, code, data, tool]
    # A whole set may not be there any more: each of its files is looked for.
    assert control.share.list(TREES) == []
    assert look(control) == []


def test_what_only_jobs_name_that_go(control: Any) -> None:
    shared, own = control.staged("aa1", 31), control.staged("bb1", 31)
    control.job("stays", code=(shared,))
    goes = control.job("goes", ended=40, code=(shared, own))
    assert look(control) == []
    (item,) = look(control, going=(goes,))
    assert item.size == 10
    control.share.delete(goes)
    assert item.remove()
    assert control.there(object_path(shared)) and not control.there(object_path(own))


def test_a_job_that_comes_after_the_search_keeps_its_files(control: Any) -> None:
    sha256 = control.staged("aa1", 31)
    (item,) = look(control)
    control.job("new", code=(sha256,))
    assert item.remove()
    assert control.there(object_path(sha256))


def test_a_submit_beside_it_keeps_its_files(control: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is still to come, and what it needs has lain there for long."""
    first, second = control.staged("aa1", 31), control.staged("bb1", 31)
    (item,) = look(control)
    delete = control.share.delete

    def submit_meanwhile(path: str) -> None:
        if path == object_path(first):
            assert upload(control.share, [StagedFile("x", Path("/unused"), second, 0o644, size=10)]) == 0
        delete(path)

    monkeypatch.setattr(control.share, "delete", submit_meanwhile)
    assert item.remove()
    assert control.there(object_path(second)) and not control.there(object_path(first))
    assert control.share.list(TREES) == []


def test_a_plan_that_cant_be_read_keeps_all(control: Any) -> None:
    sha256 = control.staged("aa1", 31)
    (item,) = look(control)
    folder = control.job("odd")
    control.share.write(f"{folder}/batchai/plan.json", b"half of it")
    with pytest.raises(ShareError, match="odd0123 can't be read"):
        look(control)
    with pytest.raises(ShareError, match="odd0123 can't be read"):
        item.remove()
    assert control.there(object_path(sha256))
