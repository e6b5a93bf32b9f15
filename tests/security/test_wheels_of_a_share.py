"""Horovod wheels of a share: nodes install those whose content the submitter has vouched for, whoever can write the share."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer
from node_world import Cluster
from other_user import STRANGER, needs_root
from plans import toy_plan

from mlflow_batchai.agent.environments.wheels import publish
from mlflow_batchai.agent.plan import PythonEnvironment, plain
from mlflow_batchai.client import submitting
from mlflow_batchai.engines import archive
from mlflow_batchai.plan.environments import choose_wheels
from mlflow_batchai.storage import credentials, open_share
from mlflow_batchai.storage.directory import DirectoryShare

NAME = "horovod-0.28.1-py3-none-any.whl"
ENVIRONMENT = PythonEnvironment("virtualenv", "abc", dependencies=("horovod==0.28.1",))
PRINTS = "python -c 'import horovod; print(horovod.WHEEL)'"


def make_wheel(path: Path, says: str) -> Path:
    """A wheel that any interpreter can install: a stand-in for Horovod that says whose it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = "horovod-0.28.1.dist-info"
    files = {
        "horovod/__init__.py": f"WHEEL = {says!r}\n",
        "horovod/tensorflow/__init__.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text)
    path.chmod(0o644)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A share's root that everybody can write, and a cache of built wheels ``cache`` beside it."""
    monkeypatch.setenv("BATCHAI_HOROVOD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "share").mkdir()
    (tmp_path / "share").chmod(0o777)
    return tmp_path / "share"


def named(share: Path) -> dict[str, str]:
    return choose_wheels(ENVIRONMENT, share, DirectoryShare(share))[0]


def as_one_in_the_cache(wheel: Path, owner: int, change: bool) -> None:
    """Another's wheel, while one of its name and size lies in the cache."""
    cached = wheel.parents[3] / "cache" / "key" / NAME
    cached.parent.mkdir(parents=True)
    data = bytearray(wheel.read_bytes())
    data[60] ^= change
    cached.write_bytes(data)
    os.chown(cached, owner, owner)
    os.chown(wheel, STRANGER, STRANGER)


# What somebody else has put at the place.
ATTACKS: dict[str, Callable[[Path], object]] = {
    "a stranger's": lambda wheel: os.chown(wheel, STRANGER, STRANGER),
    "open to all": lambda wheel: wheel.chmod(0o666),
    "open to a group": lambda wheel: (os.chown(wheel, 0, STRANGER), wheel.chmod(0o664)),
    "link to a good one": lambda wheel: wheel.symlink_to(wheel.rename(wheel.parents[2] / "elsewhere.whl")),
    "hard link to a file of ours": lambda wheel: (wheel.parents[2] / "of-ours").hardlink_to(wheel),
    "linked folder": lambda wheel: wheel.parent.symlink_to(wheel.parent.rename(wheel.parents[2] / "away")),
    "directory": lambda wheel: (wheel.unlink(), wheel.mkdir()),
    "pipe": lambda wheel: (wheel.unlink(), os.mkfifo(wheel)),
    "device": lambda wheel: (wheel.unlink(), os.mknod(wheel, stat.S_IFCHR | 0o644, os.makedev(1, 5))),
    "sparse": lambda wheel: os.truncate(wheel, 6 << 30),
    "other name": lambda wheel: wheel.rename(wheel.with_name("keras-3.0-py3-none-any.whl")),
    "another of that name and size is ours": lambda wheel: as_one_in_the_cache(wheel, os.geteuid(), change=True),
    "cached by a stranger": lambda wheel: as_one_in_the_cache(wheel, STRANGER, change=False),
}


@needs_root
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_wheel_that_others_could_have_written_is_not_named(share: Path, attack: str) -> None:
    good = make_wheel(share / "wheels" / "good" / NAME, "good")
    ATTACKS[attack](make_wheel(share / "wheels" / "bad" / NAME, "bad"))
    assert named(share) == {f"wheels/good/{NAME}": sha256(good)}


@needs_root
def test_the_submitter_is_told_which_are_not_used(share: Path) -> None:
    os.chown(make_wheel(share / "wheels" / NAME, "bad"), STRANGER, STRANGER)
    _, (sentence,) = choose_wheels(ENVIRONMENT, share, DirectoryShare(share))
    assert f"wheels/{NAME}" in sentence and "BATCHAI_HOROVOD_CACHE" in sentence
    assert choose_wheels(replace(ENVIRONMENT, dependencies=("keras",)), share, DirectoryShare(share)) == ({}, [])
    assert choose_wheels(None, share, DirectoryShare(share)) == ({}, [])


@needs_root
def test_a_stranger_s_copy_of_a_wheel_of_ours_is_as_good(share: Path) -> None:
    wheel = make_wheel(share / "wheels" / NAME, "ours")
    cached = share.parent / "cache" / "key" / NAME
    cached.parent.mkdir(parents=True)
    shutil.copy(wheel, cached)
    os.chown(wheel, STRANGER, STRANGER)
    assert named(share) == {f"wheels/{NAME}": sha256(wheel)}


def test_of_an_azure_share_those_that_were_built_here_are_named(
    azure: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow_batchai.plan.environments import choose_wheels

    monkeypatch.setenv("BATCHAI_HOROVOD_CACHE", str(tmp_path / "cache"))
    made = make_wheel(tmp_path / "cache" / "key" / NAME, "ours")
    other = make_wheel(tmp_path / "other" / NAME, "0thr")
    assert made.stat().st_size == other.stat().st_size
    azure.share("wheels")
    credentials.remember(azure.account, credentials.Credential(azure.key))
    share = open_share(azure.url("wheels"))
    share.write(f"wheels/key/{NAME}", made.read_bytes())
    share.write(f"wheels/bad/{NAME}", other.read_bytes())
    found, (sentence,) = choose_wheels(ENVIRONMENT, tmp_path, share)
    assert found == {f"wheels/key/{NAME}": sha256(made)}
    assert f"wheels/bad/{NAME}" in sentence and "key" not in sentence.replace("BATCHAI", "")


@pytest.fixture
def cluster(share: Path) -> Iterator[Cluster]:
    (share.parent / "nodes").mkdir()
    made = Cluster(share.parent / "nodes", toy_plan, archive.stored(share.parent / "agents"), 1, share=share)
    yield made
    made.close()


def test_a_node_installs_what_was_vouched_for(cluster: Cluster) -> None:
    """Wheels that were exchanged, added or turned into something else since the job was submitted are passed over."""
    wheels = cluster.share / "wheels"
    swaps: dict[str, Callable[[Path], object]] = {
        "0-added": lambda wheel: None,
        "1-changed": lambda wheel: make_wheel(wheel, "changed"),
        "2-linked": lambda wheel: (wheel.unlink(), wheel.symlink_to(make_wheel(wheels / "far" / "off.whl", "linked"))),
        "3-pipe": lambda wheel: (wheel.unlink(), os.mkfifo(wheel)),
        "4-cut": lambda wheel: os.truncate(wheel, 100),
        "5-folder": lambda wheel: (wheel.unlink(), wheel.mkdir()),
        "6-sparse": lambda wheel: os.truncate(wheel, 6 << 30),
        "7-renamed": lambda wheel: make_wheel(wheel.parent / "new", "renamed").rename(wheel),
        "8-good": lambda wheel: None,
    }
    plan = {}
    for name, swap in swaps.items():
        wheel = make_wheel(wheels / name / NAME, name)
        if name != "0-added":
            plan[f"wheels/{name}/{NAME}"] = sha256(wheel)
        swap(wheel)
    job = cluster.submit(PRINTS, python_env=plain(ENVIRONMENT), environment={"PIP_NO_INDEX": "1"}, wheels=plan)
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "8-good\n"
    log = job.log("execution.log")
    passed = [name for name in swaps if f"passing over the Horovod wheel wheels/{name}/{NAME} of the share" in log]
    assert passed == [name for name in swaps if name not in ("5-folder", "8-good")]


def test_what_a_node_publishes_is_writable_for_nobody_else(share: Path) -> None:
    publish(str(share), "key", str(make_wheel(share.parent / NAME, "built")), lambda text: None)
    (published,) = (share / "wheels").rglob("*.whl")
    assert stat.S_IMODE(published.stat().st_mode) == 0o644
    assert stat.S_IMODE(published.parent.stat().st_mode) == 0o777
    assert named(share) == {f"wheels/key/{NAME}": sha256(published)}


@needs_root
def test_a_stranger_s_wheel_is_in_no_plan(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = make_wheel(world.home / "share" / "wheels" / "mine" / NAME, "mine")
    os.chown(make_wheel(world.home / "share" / "wheels" / NAME, "theirs"), STRANGER, STRANGER)
    (world.home / "share").chmod(0o777)
    mlproject = "name: toy\npython_env: env.yaml\nentry_points: {main: {command: python train.py}}\n"
    project = world.project(mlproject=mlproject, **{"env.yaml": "dependencies: [-r more.txt]\n", "more.txt": "horovod\n"})
    monkeypatch.setenv("BATCHAI_HOME", str(world.home))
    monkeypatch.setenv("BATCHAI_HOROVOD_CACHE", str(world.root / "cache"))
    said: list[str] = []
    source = submitting.read(str(project), "main", None, {}, said.append)
    for manager, found in (("virtualenv", {f"wheels/mine/{NAME}": sha256(good)}), ("local", {})):
        first = submitting.prepare(source, {}, manager, said.append)
        again = submitting.prepare(source, {}, manager, said.append, like=first)
        assert first.prepared.plan.wheels == again.prepared.plan.wheels == found
    assert [sentence for sentence in said if f"(wheels/{NAME})" in sentence]
