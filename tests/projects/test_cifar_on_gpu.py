"""The example's batches, by NumPy, torch and JAX, and that the latter have the distribution of those by NumPy. No GPU is needed."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch_python import run_tests

PROJECT = Path(__file__).parents[2] / "projects" / "cifar_horovod"
SETTINGS = {"batch_size": 8, "augment": True, "seed": 3, "rank": 1}
MODULES = {"numpy": "images", "torch": "on_gpu", "jax": "on_jax"}


# Torch has a process of its own (the last test).
@pytest.fixture(scope="module", params=[name for name in MODULES if name != "torch" or importlib.util.find_spec(name)])
def project(request):
    """The modules that make batches, imported by their bare names as in the job's folder, and what differs between frameworks."""
    framework = pytest.importorskip(request.param)
    names = tuple({"images", MODULES[request.param]})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROJECT))
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        images, ours = map(importlib.import_module, ("images", MODULES[request.param]))
        if request.param == "numpy":
            yield SimpleNamespace(
                images=images, batches=ours.batches, augmented=lambda x: ours.augmented(x, np.random.default_rng(2))
            )
        elif request.param == "torch":
            yield SimpleNamespace(
                images=images,
                batches=lambda *arrays, **settings: ours.batches(*arrays, **settings, device="cpu"),
                augmented=lambda x: ours.augmented(
                    framework.from_numpy(x), framework.arange(len(x)), framework.Generator().manual_seed(0)
                ),
            )
        else:
            numbers = framework.numpy
            yield SimpleNamespace(
                images=images,
                batches=ours.batches,
                augmented=lambda x: ours.augmented(numbers.asarray(x), numbers.arange(len(x)), framework.random.key(0)),
            )
        for name in names:
            del sys.modules[name]


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)


def taken(project, x, count, **given):
    batches = project.batches(x, np.arange(len(x), dtype=np.uint8), **(SETTINGS | given))
    return [tuple(map(np.asarray, batch)) for batch in itertools.islice(batches, count)]


def test_without_augmentation_batches_hold_what_numpys_do(project, x):
    batches = taken(project, x, 2, augment=False)
    assert [len(numbers) for _, numbers in batches] == [8, 8]
    assert len(set(np.concatenate([numbers for _, numbers in batches]).tolist())) == 16
    for images, numbers in batches:
        assert images.dtype == np.float32
        assert np.allclose(images, project.images.scaled(x[numbers]), rtol=0, atol=1e-7)


def test_order_depends_on_seed_rank_and_epoch_only(project, x):
    def order(**given):
        return tuple(np.concatenate([numbers for _, numbers in taken(project, x, 2, **given)]).tolist())

    assert order() == order()
    assert len({order(), order(seed=2), order(rank=0), order(epoch=1)}) == 4


def test_a_resumed_run_sees_what_an_unbroken_one_would(project, x):
    unbroken, resumed = taken(project, x, 6)[4:], taken(project, x, 2, epoch=2)
    for (images, numbers), (again, same) in zip(unbroken, resumed, strict=True):
        assert np.array_equal(images, again) and np.array_equal(numbers, same)


def moves(moved):
    """(down, across, mirrored) of each of many copies of one picture, whose pixels tell their place."""
    moved = moved.astype(int)
    mirrored = moved[:, 16, 16, 1] > moved[:, 16, 17, 1]
    across = np.where(mirrored, moved[:, 16, 15, 1], moved[:, 16, 16, 1]) - 16
    return moved[:, 16, 16, 0] - 16, across, mirrored


def test_augmentation_is_distributed_as_numpys(project):
    rows, columns = np.mgrid[0:32, 0:32]
    marked = np.stack([rows, columns, np.zeros_like(rows)], axis=-1).astype(np.uint8)
    pictures = np.repeat(marked[None], 5600, axis=0)
    ours = np.asarray(project.augmented(pictures))
    found = [moves(ours), moves(project.images.augmented(pictures, np.random.default_rng(0)))]
    for down, across, mirrored in found:
        for one in (down, across):  # 800 expected of each; 4 standard deviations are 105
            assert np.abs(np.bincount(one + 3, minlength=7) - 800).max() < 105
        assert abs(mirrored.mean() - 0.5) < 0.027
        assert np.abs(np.corrcoef([down, across, mirrored]) - np.eye(3)).max() < 0.054
    images = {tuple(move): image for image, *move in zip(ours, *found[0], strict=True)}
    for image, *move in zip(project.images.augmented(pictures[:200], np.random.default_rng(1)), strict=False):
        assert np.array_equal(images[tuple(int(part[0]) for part in moves(image[None]))], image), move


def test_torch_in_an_interpreter_that_has_it(torch_python, tmp_path):
    run_tests(torch_python, tmp_path, __file__, "-k", "[torch]")
