"""Staged files are removed while others submit: whatever the order of their steps, no job loses what its plan names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlflow_batchai.agent.protocol import TREES, object_path
from mlflow_batchai.storage import Share
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.objects import StagedFile, scan, upload
from mlflow_batchai.storage.sweeps import SWEEPS, Sweep, settle, sweeping


@pytest.fixture
def files(tmp_path: Path) -> list[StagedFile]:
    root = tmp_path / "project"
    root.mkdir()
    for name in "ab":
        (root / name).write_text(name)
    return scan(root)


def lying(share: Share, files: list[StagedFile]) -> int:
    return sum(
        any(entry.name == file.sha256 for entry in share.list(object_path(file.sha256).rpartition("/")[0])) for file in files
    )


class Submitter:
    """One step at a time: files, plan, a look for sweeps."""

    def __init__(self, share: Share, files: list[StagedFile]) -> None:
        self.share, self.files = share, files
        self.waits = 0

    def steps(self) -> Iterator[None]:
        upload(self.share, self.files)
        yield
        self.share.write("plan", b"names them")
        yield
        settle(self.share, [self.files], sleep=self._wait)
        yield

    def _wait(self, seconds: float) -> None:
        self.waits += 1
        next(self.other, None)

    other: Iterator[None]


class Remover:
    """One step at a time: says so, reads plans, removes, says that it is over."""

    def __init__(self, share: Share, files: list[StagedFile]) -> None:
        self.share, self.files = share, files

    def steps(self) -> Iterator[None]:
        with sweeping(self.share) as sweep:
            self.share.delete(TREES)
            yield
            named = [entry for entry in self.share.list("") if entry.name == "plan"]
            yield
            if not named:
                sweep.remove([object_path(file.sha256) for file in self.files])
            yield
        yield


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("SSSRRRR"))))
def test_every_order_of_steps(tmp_path: Path, files: list[StagedFile], order: tuple[str, ...]) -> None:
    share = DirectoryShare(tmp_path / "share")
    upload(share, files)
    submitter, remover = Submitter(share, files), Remover(share, files)
    theirs = {"S": submitter.steps(), "R": remover.steps()}
    submitter.other = theirs["R"]
    for who in order:
        next(theirs[who], None)
    for steps in theirs.values():
        assert list(steps) == []
    assert lying(share, files) == 2
    # A sweep that nobody waits for any more is forgotten by the next one's end, but for the newest.
    with sweeping(share):
        pass
    assert [entry.name for entry in share.list(SWEEPS)] == ["2", "2.ended"]


def test_a_set_is_believed_in_only_while_it_lies_there(share: Share, files: list[StagedFile]) -> None:
    upload(share, files)
    settle(share, [files])
    with sweeping(share) as sweep:
        share.delete(TREES)
        assert sweep.remove([object_path(file.sha256) for file in files]) == 2
    assert lying(share, files) == 0
    assert upload(share, files) == 2
    # Another sweep, after the files were sent and before the plan was there.
    with sweeping(share) as sweep:
        sweep.remove([object_path(files[0].sha256)])
    assert settle(share, [files]) == 1
    assert lying(share, files) == 2
    assert upload(share, files) == 0


def test_a_share_that_was_never_swept_costs_one_look(azure, azure_share: Share, files: list[StagedFile]) -> None:
    upload(azure_share, files)
    settle(azure_share, [files])
    azure.reset()
    assert upload(azure_share, files) == 0 and settle(azure_share, [files, []]) == 0
    assert [(one.method, one.received) for one in azure.requests()] == [("GET", 0)] * 3


def test_one_that_was_killed_is_not_waited_for_twice(share: Share, files: list[StagedFile]) -> None:
    killed = Sweep(share)
    now = itertools.count(step=40)
    waits: list[float] = []
    settle(share, [files], clock=lambda: float(next(now)), sleep=waits.append)
    assert len(waits) == 2
    settle(share, [files], sleep=waits.append)
    assert len(waits) == 2
    # If it was only frozen, it removes nothing any more.
    upload(share, files)
    assert not killed.may_go_on()
    assert killed.remove([object_path(file.sha256) for file in files]) == 0
    assert lying(share, files) == 2
