"""Checkpoints in a folder, without a framework: the newest whole one is found, a torn one costs one, two are kept."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlflow_batchai.training.checkpoints import CheckpointError, Checkpoints


def write_text(text):
    return lambda path: Path(path).write_text(text)


@pytest.fixture
def said():
    return []


@pytest.fixture
def made(tmp_path, said):
    """Returns Checkpoints on one folder, as each new process makes its own."""
    return lambda settings=None, **more: Checkpoints(tmp_path / "check points é", settings, say=said.append, **more)


def names(checkpoints):
    return sorted(path.name for path in Path(checkpoints.folder).iterdir())


def text(found):
    return Path(found.path).read_text()


def test_no_folder_is_no_checkpoint(made, said):
    assert made().newest() is None and said == []
    made().clear()


def test_the_newest_is_found_with_its_state_and_two_are_kept(made, said):
    first = made()
    for done in (8, 9, 10, 11):
        first.save(done, write_text(f"weights {done}"), state={"ranks": done})
    found = made().newest()
    assert (found.epochs_done, found.batches, text(found), found.state) == (11, 0, "weights 11", {"ranks": 11})
    assert names(first) == [
        "epoch-0010.json",
        "epoch-0010.weights.h5",
        "epoch-0011.json",
        "epoch-0011.weights.h5",
    ]
    assert said == []


def test_one_from_within_an_epoch_is_newer_than_its_beginning_only(made):
    checkpoints = made(suffix=".pt")
    checkpoints.save(2, write_text("2"))
    checkpoints.save(2, write_text("2 and 7"), batches=7)
    assert made(suffix=".pt").newest()[1:3] == (2, 7)
    checkpoints.save(3, write_text("3"))
    assert made(suffix=".pt").newest()[1:3] == (3, 0)
    assert names(checkpoints)[0] == "epoch-0002-batch-000007.json" and len(names(checkpoints)) == 4


@pytest.mark.parametrize(
    "tear",
    [
        lambda folder: (folder / "epoch-0002.weights.h5").write_text("weig"),
        lambda folder: (folder / "epoch-0002.weights.h5").write_text("WEIGHTS 2"),
        lambda folder: (folder / "epoch-0002.weights.h5").unlink(),
        lambda folder: (folder / "epoch-0002.json").write_text('{"epochs_done": 2, "sha'),
        lambda folder: (folder / "epoch-0002.json").write_text("[]"),
        lambda folder: (folder / "epoch-0002.json").write_bytes(b"\xff\0"),
        lambda folder: (folder / "epoch-0002.json").unlink(),
        lambda folder: (folder / "epoch-0002.json").write_bytes((folder / "epoch-0001.json").read_bytes()),
    ],
)
def test_a_torn_checkpoint_costs_one_and_a_sentence(made, said, tear):
    before = made()
    before.save(1, write_text("weights 1"))
    before.save(2, write_text("weights 2"))
    tear(Path(before.folder))
    after = made()
    assert after.newest().epochs_done == 1
    assert said == [f"checkpoint epoch-0002 in {before.folder} is not whole; the one before it is taken."]
    after.save(2, write_text("weights 2 again"))
    assert text(made().newest()) == "weights 2 again"
    after.save(3, write_text("weights 3"))
    assert len(names(after)) == 4


def test_damage_on_top_of_damage_is_removed_and_the_good_one_is_not(made):
    before = made()
    before.save(1, write_text("1"))
    before.save(1, write_text("1 and 9"), batches=9)
    Path(before.folder, "epoch-0001-batch-000009.weights.h5").write_text("torn")
    Path(before.folder, "epoch-0007.weights.h5").write_text("never got its digest")
    after = made()
    assert after.newest()[1:3] == (1, 0)
    after.save(1, write_text("1 and 4"), batches=4)
    assert [name for name in names(after) if name.endswith("json")] == ["epoch-0001-batch-000004.json", "epoch-0001.json"]
    assert len(names(after)) == 4


def test_none_that_is_whole_begins_anew(made, said):
    before = made()
    for done in (1, 2):
        path = before.save(done, write_text("weights"))
        Path(path).write_text("torn")
    assert made().newest() is None and len(said) == 2


def test_one_that_can_not_be_read_is_not_taken_for_none(made, said):
    before = made()
    path = before.save(1, write_text("weights"))
    os.unlink(path)
    os.mkdir(path)  # reading it fails, also for root
    with pytest.raises(CheckpointError, match=r"one could not be read .*: try again when the share answers"):
        made().newest()


def test_a_failed_write_leaves_the_one_before(made):
    checkpoints = made()
    checkpoints.save(1, write_text("weights 1"))

    def fail(path):
        Path(path).write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        checkpoints.save(2, fail)
    assert made().newest().epochs_done == 1
    assert names(checkpoints) == ["epoch-0001.json", "epoch-0001.weights.h5"]


def test_a_process_that_is_killed_while_it_writes_leaves_the_one_before(made):
    """Cut off at each system call that changes the folder, in turn."""
    code = """
import os, sys
from mlflow_batchai.training import checkpoints as module
left = int(sys.argv[2])
def counting(original):
    def call(*arguments, **options):
        global left
        if arguments and (sys.argv[1] in str(arguments[0]) or isinstance(arguments[0], int)):
            left -= 1
            if left < 0:
                os._exit(9)
        return original(*arguments, **options)
    return call
open_ = open
os.unlink, os.fsync, module.open = counting(os.unlink), counting(os.fsync), counting(open)
made = module.Checkpoints(sys.argv[1])
made.newest()
made.save(3, lambda path: open_(path, "w").write("weights 3"))
"""
    ended = []
    for calls in range(2, 30):
        checkpoints = made()
        for number in (1, 2):
            checkpoints.save(number, write_text(f"weights {number}"))
        done = subprocess.run([sys.executable, "-c", code, checkpoints.folder, str(calls)], cwd=Path(__file__).parents[2])
        found = made().newest()
        assert text(found) == f"weights {found.epochs_done}" and found.epochs_done in (2, 3)
        ended.append(done.returncode)
        if done.returncode == 0:
            break
        checkpoints.clear()
    assert ended[-1] == 0 and len(ended) > 6 and set(ended[:-1]) == {9}
    assert found.epochs_done == 3 and len(names(checkpoints)) == 4


def test_other_settings_are_not_gone_on_from(made, said):
    made({"seed": (1, 2)}).save(1, write_text("weights"))
    assert made({"seed": [1, 2]}).newest().epochs_done == 1
    other = made({"seed": 2})
    assert other.newest() is None and said == []
    other.save(1, write_text("others"))
    assert made({"seed": (1, 2)}).newest() is None and text(made({"seed": 2}).newest()) == "others"
    other.clear()
    assert names(other) == []


def test_the_documented_loop_goes_on(tmp_path, monkeypatch):
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"^```python\n(.*?)^```", reference, re.S | re.M) if "Checkpoints(" in block]
    monkeypatch.setenv("AZ_BATCHAI_OUTPUT_MODEL", str(tmp_path))
    trained = []

    def train(epoch):
        trained.append(epoch)
        if len(trained) == 3:
            raise KeyboardInterrupt

    names = {
        "hvd": SimpleNamespace(rank=lambda: 0, broadcast_object=lambda value, root: value),
        "os": os,
        "epochs": 5,
        "train": train,
        "load": lambda path: trained.append(Path(path).read_text()),
        "save": lambda path: Path(path).write_text(f"{len(trained)} epochs"),
    }
    with pytest.raises(KeyboardInterrupt):
        exec(example, names)
    exec(example, names)
    assert trained == [0, 1, 2, "2 epochs", 2, 3, 4]
