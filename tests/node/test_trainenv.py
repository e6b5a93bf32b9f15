"""The training environment is built once per hash, never used half-built, and a horovod requirement becomes our wheel."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.node import trainenv
from mlflow_batchai.node.layout import NodeLayout
from mlflow_batchai.node.outcome import Failure, Stop


class Builder:
    """Stands for the commands: keeps them, and fails where it is told to."""

    def __init__(self, fail: str = "") -> None:
        self.steps: list[tuple[str, list[str]]] = []
        self.exit_code = 0
        self.tail = ["ERROR: no such package"]
        self.verdict = "exited with code 1"
        self._fail = fail

    def __call__(self, argv: list[str], environment: Mapping[str, str], name: str) -> Any:
        self.steps.append((name, argv))
        self.exit_code = int(name == self._fail)
        if "horovod-build" in argv:
            Path(argv[-1], "horovod-0.28.1-py3-none-any.whl").touch()
        if name == "making the environment":
            os.makedirs(os.path.join(argv[-1], "bin"))
        return self

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.steps]


def never() -> None:
    raise AssertionError("nobody else builds")


@pytest.fixture
def layout(make_layout: Callable[..., NodeLayout]) -> NodeLayout:
    made = make_layout()
    os.makedirs(made.code)
    return made


def wanted(**changes: Any) -> dict[str, Any]:
    return {
        "manager": "virtualenv",
        "python": None,
        "buildDependencies": [],
        "dependencies": ["numpy"],
        "hash": "abc",
        **changes,
    }


def test_it_is_built_once(layout: NodeLayout) -> None:
    run = Builder()
    environment = wanted(dependencies=["tensorflow-cpu", "horovod[tensorflow]==0.28.1"])
    python = trainenv.build(layout, environment, run, never)
    assert python == f"{layout.root}/envs/abc/bin/python"
    assert run.names == [
        "making the environment",
        "installing the packages",
        "building the Horovod wheel",
        "installing Horovod",
    ]
    assert run.steps[0][1] == [sys.executable, "-m", "venv", f"{layout.root}/envs/abc"]
    assert Path(layout.temp, "requirements.txt").read_text() == "tensorflow-cpu\n"
    assert run.steps[3][1][-1].endswith("horovod-0.28.1-py3-none-any.whl")
    assert trainenv.build(layout, environment, run, never) == python
    assert len(run.steps) == 4


def test_a_broken_build_is_never_used(layout: NodeLayout) -> None:
    with pytest.raises(Failure, match=r"installing the packages for python_env.yaml on node-0 exited with code 1") as caught:
        trainenv.build(layout, wanted(), Builder("installing the packages"), never)
    assert (caught.value.code, caught.value.exit_code, caught.value.tail) == (
        "EnvironmentFailed",
        1,
        ["ERROR: no such package"],
    )
    run = Builder()
    trainenv.build(layout, wanted(), run, never)
    assert run.names == ["making the environment", "installing the packages"]


def test_agents_on_one_disk_build_it_once(layout: NodeLayout, tmp_path: Path) -> None:
    folder = tmp_path / "envs"
    folder.mkdir()
    run = Builder()
    with open(folder / "abc.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def cancelled() -> None:
            raise Stop("cancel", "enough")

        # Whoever waits still hears of a cancel.
        with pytest.raises(Stop, match="enough"):
            trainenv.build(layout, wanted(folder=str(folder)), run, cancelled)

        def built_by_the_other() -> None:
            (folder / "abc").mkdir()
            (folder / "abc" / ".complete").touch()
            fcntl.flock(lock, fcntl.LOCK_UN)

        assert trainenv.build(layout, wanted(folder=str(folder)), run, built_by_the_other) == f"{folder}/abc/bin/python"
    assert run.steps == []


def test_requirement_files_are_put_in_place(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# horovod\nnumpy==1\n\nHorovod >= 0.28 ; python_version > '3'\n-r more.txt\n")
    (tmp_path / "more.txt").write_text("keras\n")
    lines = ["-r requirements.txt", "horovod-helpers", "pandas"]
    assert trainenv.split_horovod(lines, str(tmp_path)) == (
        ["numpy==1", "keras", "horovod-helpers", "pandas"],
        ["Horovod >= 0.28 ; python_version > '3'"],
    )


@pytest.mark.parametrize(
    "requirement", ["horovod", "horovod==0.28.1", "horovod[keras]==0.28.*", "horovod>=0.19", "horovod == 0.28.1"]
)
def test_versions_that_we_can_build(layout: NodeLayout, requirement: str) -> None:
    trainenv._check_version([requirement], layout)


def test_a_version_that_we_can_t_build(layout: NodeLayout) -> None:
    with pytest.raises(Failure, match=r"asks for 'horovod==0.19.0'; only horovod==0.28.1"):
        trainenv._check_version(["horovod==0.19.0"], layout)


def test_which_python(layout: NodeLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert trainenv.find_python(None, layout) == trainenv.find_python(here, layout) == sys.executable
    assert trainenv.find_python(here + ".99", layout) == sys.executable
    other = tmp_path / "python2.4"
    other.write_text("")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trainenv.find_python("2.4.6", layout) == str(other)
    with pytest.raises(Failure, match=r"asks for Python 2.5 and there is no python2.5 on node-0; install it"):
        trainenv.find_python("2.5", layout)
    with pytest.raises(Failure, match="there is no uv on node-0"):
        trainenv.build(layout, wanted(manager="uv"), Builder(), never)
