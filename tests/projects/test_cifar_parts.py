"""The example's parts without TensorFlow: images and their order, epochs, arguments."""

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import yaml

PROJECT = Path(__file__).parents[2] / "projects" / "cifar_horovod"
MODULES = ("images", "train")


@pytest.fixture(scope="module")
def project():
    """The project's modules, which import each other by their bare names as in the job's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROJECT))
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        for name in MODULES:
            del sys.modules[name]


@pytest.fixture
def images(project) -> ModuleType:
    return project.images


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8),
        "y_train": np.arange(20, dtype=np.uint8)[:, None] % 10,
        "x_test": rng.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8),
        "y_test": np.arange(7, dtype=np.uint8)[:, None],
    }


def test_digits_are_1500_and_297_images_with_each_digit_in_both(images):
    data = images.load("digits")
    assert data.x_train.shape == (1500, 32, 32, 3) and data.x_test.shape == (297, 32, 32, 3)
    assert {array.dtype for array in data} == {np.dtype(np.uint8)}
    shares = np.bincount(data.y_train) / 1500, np.bincount(data.y_test) / 297
    assert np.abs(shares[0] - shares[1]).max() < 0.005
    assert data.x_train.min() == 0 and data.x_train.max() == 255
    again = images.load("digits")
    assert all(np.array_equal(a, b) for a, b in zip(data, again, strict=True))


def test_npz_of_keras_layout_is_read(images, arrays, tmp_path):
    path = tmp_path / "a file.npz"
    np.savez(path, **arrays)
    data = images.load(str(path))
    assert np.array_equal(data.x_test, arrays["x_test"])
    assert data.y_train.shape == (20,) and data.y_train.dtype == np.uint8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y_test": None}, "has no array y_test: it needs x_train, y_train, x_test, y_test"),
        ({"x_train": np.zeros((20, 3, 32, 32), np.uint8)}, "x_train in .* is uint8 of shape (20, 3, 32, 32)"),
        ({"x_test": np.zeros((7, 32, 32, 3), np.float32)}, "x_test in .* is float32"),
        ({"x_train": np.uint8(3)}, "x_train in .* is uint8 of shape ()"),
        ({"y_train": np.zeros((19, 1), np.uint8)}, "y_train in .* must be integers, (20, 1)"),
        ({"y_train": np.zeros((20, 10), np.uint8)}, "y_train in .* must be integers, (20, 1)"),
        ({"y_train": np.zeros((20, 1))}, "y_train in .* is float64"),
        ({"y_test": np.full((7, 1), 10)}, "test in .* of classes 0 to 9"),
        ({"y_test": np.full((7, 1), -1)}, "test in .* of classes 0 to 9"),
        ({"x_test": np.zeros((0, 32, 32, 3), np.uint8), "y_test": np.zeros((0, 1), np.uint8)}, "at least one"),
        ({"y_test": np.array([object()] * 7)}, "not a whole .npz file of plain arrays"),
    ],
)
def test_npz_of_another_layout_is_one_sentence(images, arrays, tmp_path, change, said):
    path = tmp_path / "a.npz"
    np.savez(path, **{name: array for name, array in (arrays | change).items() if array is not None})
    with pytest.raises(images.DataError) as error:
        images.load(str(path))
    first, _, last = said.partition(" in .* ")
    assert first in str(error.value) and last in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_npz_is_one_sentence(images, arrays, tmp_path):
    path, single = tmp_path / "a.npz", tmp_path / "a.npy"
    np.savez(path, **arrays)
    np.save(single, np.zeros(3))
    for content in (b"", b"no zip", b"PK\x03\x04 half a zip", path.read_bytes()[:-1000], single.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(images.DataError, match="not a whole"):
            images.load(str(path))


class FakeKeras(ModuleType):
    """Keras' datasets with a download that works or doesn't, and a count of its calls."""

    def __init__(self, arrays, error=None):
        super().__init__("keras.datasets")
        self.calls = 0

        def load_data():
            self.calls += 1
            if error:
                raise error
            return (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])

        self.cifar10 = SimpleNamespace(load_data=load_data)


def pretend(monkeypatch, fake) -> None:
    monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))
    monkeypatch.setitem(sys.modules, "keras.datasets", fake)


def test_cifar10_is_downloaded_once_and_kept(images, arrays, tmp_path, monkeypatch):
    fake = FakeKeras(arrays)
    pretend(monkeypatch, fake)
    cache = tmp_path / "share" / "cache"
    first, second = images.load("cifar10", cache), images.load("cifar10", cache)
    assert fake.calls == 1
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert [path.name for path in cache.iterdir()] == ["cifar10.npz"]


def test_no_network_is_one_sentence_that_names_the_other_sources(images, arrays, monkeypatch):
    pretend(monkeypatch, FakeKeras(arrays, Exception("URL fetch failure on https://x:\nNone -- Name unknown")))
    with pytest.raises(images.DataError) as error:
        images.load("cifar10")
    said = str(error.value)
    assert "Name unknown" in said and "--data digits" in said and ".npz" in said and "\n" not in said


def epoch_of(images, count, **given) -> list[np.ndarray]:
    """The numbers of the images in one epoch's batches; image k is all of value k."""
    x = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 32, 32, 3))
    settings = {"batch_size": 8, "augment": False, "seed": 1, "rank": 0} | given
    endless = images.batches(x, np.arange(count), **settings)
    taken = list(itertools.islice(endless, count // settings["batch_size"]))
    for pictures, numbers in taken:
        assert pictures.dtype == np.float32
        assert np.allclose(pictures[:, 0, 0, 0] * 255, numbers)
    return [numbers for _, numbers in taken]


def test_an_epoch_passes_over_images_once_and_leaves_out_what_fills_no_batch(images):
    batches = epoch_of(images, 21)
    assert [len(batch) for batch in batches] == [8, 8]
    assert len(set(np.concatenate(batches))) == 16


def test_augmentation_shifts_by_at_most_3_pixels_and_mirrors_half(images):
    rows, columns = np.mgrid[0:32, 0:32]
    marked = np.stack([rows, columns, np.zeros_like(rows)], axis=-1).astype(np.uint8)
    moved = images.augmented(np.repeat(marked[None], 500, axis=0), np.random.default_rng(0)).astype(int)
    assert moved.shape == (500, 32, 32, 3)
    down = moved[:, 16, 16, 0] - 16
    mirrored = moved[:, 16, 16, 1] > moved[:, 16, 17, 1]
    across = np.where(mirrored, moved[:, 16, 15, 1], moved[:, 16, 16, 1]) - 16
    assert set(down) == set(across) == set(range(-3, 4))
    assert 200 < mirrored.sum() < 300
    assert moved[:, :, :, 0].min() == 0 and moved[:, :, :, 0].max() == 31
    lowest = moved[down == -3][0, :, 0, 0]
    assert lowest[:5].tolist() == [0, 0, 0, 0, 1]  # the border is repeated


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epochs", "0"], "--epochs: it must be 1 or more"),
        (["--epochs", "-1"], "--epochs: it must not be negative"),
        (["--epochs", "2.5"], "--epochs: '2.5' is not a whole number"),
        (["--batch-size", "0"], "--batch-size: it must be 1 or more"),
        (["--learning-rate", "0"], "--learning-rate: it must be a number above 0"),
        (["--learning-rate", "nan"], "--learning-rate: it must be a number above 0"),
        (["--learning-rate", "inf"], "--learning-rate: it must be a number above 0"),
        (["--learning-rate", "fast"], "--learning-rate: 'fast' is not a number"),
        (["--augment", "maybe"], "--augment: it must be true or false"),
        (["--precision", "half"], "--precision: invalid choice: 'half' (choose from "),
        (["--seed", "-1"], "--seed: it must not be negative"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_arguments_are_one_line_on_rank_0_and_status_2(project, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(project.train, "QUIET_EXIT_SECONDS", 0)
    for rank in ("0", "1"):
        monkeypatch.setenv("HOROVOD_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            project.train.parse_arguments(arguments)
        assert ended.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (1 if rank == "0" else 0)
        assert all(line.startswith("train.py: ") and said in line for line in lines)


class TwoRanks:
    """Two ranks in turn: rank 0's broadcasts are what rank 1 receives."""

    def __init__(self):
        self.sent = []

    def of(self, rank):
        def broadcast(value, root_rank):
            assert root_rank == 0
            if rank == 0:
                self.sent.append(value)
                return value
            value_0 = self.sent.pop(0)
            assert value.shape == value_0.shape and value.dtype == value_0.dtype
            return value_0

        return SimpleNamespace(rank=lambda: rank, size=lambda: 2, broadcast=broadcast)


def both_load(project, monkeypatch, arguments):
    monkeypatch.setattr(project.train, "QUIET_EXIT_SECONDS", 0)
    ranks = TwoRanks()
    parsed = project.train.parse_arguments(arguments)
    results = [project.train.load_on_rank_0(parsed, ranks.of(rank)) for rank in (0, 1)]
    assert ranks.sent == []
    return results


def test_rank_1_gets_rank_0s_images(project, monkeypatch):
    (status_0, data_0), (status_1, data_1) = both_load(project, monkeypatch, ["--data", "digits"])
    assert status_0 == status_1 == 0
    assert all(np.array_equal(a, b) for a, b in zip(data_0, data_1, strict=True))


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--data", "/no/such.npz"], 1, "--data /no/such.npz is not a file"),
        (["--data", "digits", "--batch-size", "1501"], 2, "--batch-size 1501 is more than the 1500 training images"),
    ],
)
def test_both_ranks_end_when_rank_0_can_not_load(project, monkeypatch, capsys, arguments, status, said):
    results = both_load(project, monkeypatch, arguments)
    assert results == [(status, None), (status, None)]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: ") and said in line


@pytest.mark.parametrize(
    ("epochs", "done", "ranks", "left"),
    [
        (12, [], 2, 6),
        (12, [2, 2], 2, 4),  # worker epochs of the epochs before, one number of ranks each
        (12, [2, 2], 1, 8),
        (12, [2, 2, 4], 3, 2),
        (7, [2], 4, 2),
        (3, [2, 2], 2, 0),
    ],
)
def test_the_epochs_that_are_left_are_divided_by_the_ranks_of_now(project, epochs, done, ranks, left):
    assert project.train.epochs_of_each(epochs - sum(done), ranks) == left


def test_the_entry_points_parameters_are_the_scripts_with_equal_defaults(project, monkeypatch):
    monkeypatch.delenv("AZ_BATCHAI_OUTPUT_MODEL", raising=False)
    main = yaml.safe_load((PROJECT / "MLproject").read_text())["entry_points"]["main"]
    command = main["command"]
    for name, parameter in main["parameters"].items():
        command = command.replace("{" + name + "}", str(parameter["default"]))
    words = command.split()
    assert words[:2] == ["python", "train.py"] and "{" not in command
    assert project.train.parse_arguments(words[2:]) == project.train.parse_arguments([])
