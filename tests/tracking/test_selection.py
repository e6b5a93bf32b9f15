"""Which output files go into a run: checkpoints are pairs that say what they are, patterns are those of a .gitignore."""

from __future__ import annotations

import json

import pytest

from mlflow_batchai.job.sent import Stamp
from mlflow_batchai.tracking.outputs import select
from mlflow_batchai.training.checkpoints import Checkpoints

NOTE = {"epochs_done": 7, "batches": 0, "sha256": "0" * 64, "settings": None, "state": {}}


def chosen(files, **settings):
    """(names that go, checkpoints that stay, files that a pattern keeps) of name -> content."""

    def read(name):
        return files[name]

    stamps = {name: Stamp(len(data) if isinstance(data, bytes) else 9, 1.0) for name, data in files.items()}
    wanted, checkpoints, excluded = select(stamps, read, **settings)
    assert all(wanted[name] is stamps[name] for name in wanted)
    return sorted(wanted), checkpoints, excluded


def test_what_our_own_class_writes_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path / "deep" / "checkpoints", suffix=".tar.pt")
    for epoch, batches in ((1, 0), (2, 31)):
        checkpoints.save(epoch, lambda path: open(path, "w").close(), batches)
    (tmp_path / "model.pt").touch()
    files = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) == 5
    assert chosen(files) == (["model.pt"], 2, 0)
    assert chosen(files, checkpoints=True) == (sorted(files), 0, 0)


@pytest.mark.parametrize(
    "files",
    [
        {"epoch-0007.h5": b"x"},
        {"epoch-0007.json": NOTE},
        {"epoch-0007.h5": b"x", "epoch-0008.json": NOTE},
        {"a/epoch-0007.h5": b"x", "b/epoch-0007.json": NOTE},
        *({f"{stem}.h5": b"x", f"{stem}.json": NOTE} for stem in ("epoch-7", "epoch-0007-best", "my-epoch-0007")),
        *(
            {"epoch-0007.h5": b"x", "epoch-0007.json": note}
            for note in (b"", b"not JSON", b"[" * 100_000, b"[1]", b" " * (2 << 20) + json.dumps(NOTE).encode())
        ),
        *({"epoch-0007.h5": b"x", "epoch-0007.json": {k: v for k, v in NOTE.items() if k != key}} for key in NOTE),
        # A picture of it, say: which of the two is meant nobody can tell.
        {"epoch-0007.h5": b"x", "epoch-0007.png": b"x", "epoch-0007.json": NOTE},
    ],
)
def test_what_only_looks_like_a_checkpoint_goes(files):
    files = {name: json.dumps(data).encode() if isinstance(data, dict) else data for name, data in files.items()}
    assert chosen(files) == (sorted(files), 0, 0)


@pytest.mark.parametrize(
    ("patterns", "stay"),
    [
        (["*.tmp"], {"a.tmp", "deep/b.tmp"}),
        (["/*.tmp"], {"a.tmp"}),
        (["deep/"], {"deep/b.tmp", "deep/er/c.h5"}),
        (["a.tmp/"], set()),
        (["deep/*"], {"deep/b.tmp", "deep/er/c.h5"}),
        (["deep/**/*.h5"], {"deep/er/c.h5"}),
        (["*", "!c.h5", "!model.h5"], {"a.tmp", "deep/b.tmp", "deep/er/c.h5"}),
        (["*.h5", "!model.h5"], {"deep/er/c.h5"}),
        (["MODEL.h5", "er"], {"deep/er/c.h5"}),
    ],
)
def test_patterns_are_those_of_a_gitignore(patterns, stay):
    files = dict.fromkeys(["a.tmp", "deep/b.tmp", "deep/er/c.h5", "model.h5"], b"x")
    assert chosen(files, exclude=patterns) == (sorted(set(files) - stay), 0, len(stay))


def test_a_checkpoint_that_a_pattern_names_counts_there():
    files = {"epoch-0007.h5": b"x", "epoch-0007.json": json.dumps(NOTE).encode()}
    assert chosen(files, exclude=["epoch-*"]) == ([], 0, 2)
