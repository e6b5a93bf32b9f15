"""The training interpreter of a node: found there, or built once per hash and never used half-built, with a Horovod wheel in it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent.environments import trainenv
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.outcome import Failure, Stop
from mlflow_batchai.agent.plan import PythonEnvironment


class Builder:
    """Stands for the commands: keeps them, and fails where it is told to."""

    def __init__(self, fail: str = "") -> None:
        self.steps: list[tuple[str, list[str]]] = []
        self.said: list[str] = []
        self.interpreter = sys.executable
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
            Path(argv[-1], "bin", "python").symlink_to(self.interpreter)
        return self

    def build(self, layout: NodeLayout, environment: dict[str, Any], wait: Callable[[], None] | None = None) -> str:
        return trainenv.build(layout, environment, self, wait or never, self.said.append, {})

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


def wanted(**changes: Any) -> PythonEnvironment:
    return PythonEnvironment(**{"manager": "virtualenv", "dependencies": ("numpy",), "hash": "abc", **changes})


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
            run.build(layout, wanted(folder=str(folder)), cancelled)

        def built_by_the_other() -> None:
            (folder / "abc" / "bin").mkdir(parents=True)
            (folder / "abc" / "bin" / "python").symlink_to(sys.executable)
            (folder / "abc" / ".complete").write_text(trainenv.described(layout, sys.executable) + "\n")
            fcntl.flock(lock, fcntl.LOCK_UN)

        assert run.build(layout, wanted(folder=str(folder)), built_by_the_other) == f"{folder}/abc/bin/python"
    assert run.steps == []
    assert set(run.said) == {"waiting for another job's agent that makes the training environment"}


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("change", ["gone", "no program", "another version", "another path", "same"])
def test_an_interpreter_that_has_changed(layout: NodeLayout, tmp_path: Path, change: str) -> None:
    """A node's Python was upgraded under the environment."""
    run = Builder()
    run.interpreter = str(program(tmp_path / "python2.5", "#!/bin/sh\necho 2.5\n"))
    python = Path(run.build(layout, wanted()))
    if change == "gone":
        Path(run.interpreter).unlink()
    elif change == "no program":
        program(Path(run.interpreter), "")
        Path(run.interpreter).chmod(0o644)
    elif change == "another version":
        program(Path(run.interpreter), "#!/bin/sh\necho 2.6\n")
    elif change == "another path":
        python.unlink()
        python.symlink_to(program(tmp_path / "python", "#!/bin/sh\necho 2.5\n"))
    again = Builder()
    assert again.build(layout, wanted()) == str(python)
    assert again.names == ([] if change == "same" else ["making the environment", "installing the packages"])
    assert Builder().build(layout, wanted()) == str(python)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo warning >&2; echo no encodings >&2; exit 1", "it exits with 1 and says: no encodings"),
        ("kill -KILL $$", "it is killed by signal 9 and says: nothing"),
        ("exit 0", "it exits with 0 and says: nothing"),
        ("exec sleep 600", "it says nothing for 0 s"),
    ],
)
def test_an_interpreter_that_only_fails_is_left_alone(
    layout: NodeLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    """A node without memory is no reason to remove an environment that another job may be using."""
    run = Builder()
    run.interpreter = str(program(tmp_path / "python2.5", "#!/bin/sh\necho 2.5\n"))
    python = Path(run.build(layout, wanted()))
    program(Path(run.interpreter), f"#!/bin/sh\n{script}\n")
    if "sleep" in script:
        monkeypatch.setattr(trainenv, "VERSION_SECONDS", 0.3)
    with pytest.raises(
        Failure, match=re.escape(f"{python} on node-0 ({socket.gethostname()}) can't be asked its version: {words}")
    ):
        Builder().build(layout, wanted())
    assert python.is_symlink()
    # It isn't chosen to make an environment of either, and is no obstacle.
    monkeypatch.setattr(layout, "plan", replace(layout.plan, python=run.interpreter))
    assert trainenv.find_python(f"{sys.version_info[0]}.{sys.version_info[1]}", layout) == sys.executable
    program(Path(run.interpreter), "#!/bin/sh\necho 2.5\n")
    assert Builder().build(layout, wanted()) == str(python)


def test_what_is_used_looks_used(layout: NodeLayout, tmp_path: Path) -> None:
    """Else systemd removes files of it from /var/tmp; a module's own time stays, or Python would compile it again."""
    run = Builder()
    folder = Path(run.build(layout, wanted())).parents[1]
    outside = tmp_path / "outside"
    outside.touch()
    (folder / "module.py").touch()
    (folder / "link").symlink_to(outside)
    inside = [folder, folder / "bin", folder / "module.py", folder / "link"]

    def age(days: float) -> float:
        past = time.time() - days * 86400
        for path in [outside, folder / ".complete", *inside]:
            os.utime(path, (past, past), follow_symlinks=False)
        return past

    age(0.9)
    run.build(layout, wanted())
    assert all(time.time() - path.lstat().st_atime > 10000 for path in inside)
    past = age(1.1)
    run.build(layout, wanted())
    assert all(time.time() - path.lstat().st_atime < 60 for path in inside)
    assert [path.lstat().st_mtime for path in [outside, *inside]] == [pytest.approx(past, abs=1e-3)] * 5
    assert outside.stat().st_atime == pytest.approx(past, abs=1e-3)
    assert time.time() - (folder / ".complete").stat().st_mtime < 60
    assert run.names == ["making the environment", "installing the packages"]


@pytest.mark.parametrize("python", ["python9", "~/bin/python9", "{home}/bin/python9"])
def test_the_cluster_s_python(
    make_layout: Callable[..., NodeLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    layout = make_layout(python=python.format(home=tmp_path))
    environment = {"PATH": f"/nowhere:{tmp_path}/bin"}
    program = tmp_path / "bin" / "python9"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    words = (
        f"there is no program {layout.plan.python} on node-0 ({socket.gethostname()}): install it there, or set python: in the"
        " cluster document to the interpreter that trains"
    )
    with pytest.raises(Failure, match=re.escape(words)):
        trainenv.interpreter(layout, environment)
    program.chmod(0o755)
    assert trainenv.interpreter(layout, environment) == str(program)
    assert trainenv.interpreter(make_layout(), environment) == sys.executable


def test_requirement_files_are_put_in_place(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# horovod\nnumpy==1\n\nHorovod >= 0.28 ; python_version > '3'\n-r more.txt\n")
    (tmp_path / "more.txt").write_text("keras\n")
    lines = ["-r requirements.txt", "horovod-helpers", "pandas"]
    assert trainenv.split_horovod(lines, str(tmp_path)) == (
        ["numpy==1", "keras", "horovod-helpers", "pandas"],
        ["Horovod >= 0.28 ; python_version > '3'"],
    )


def test_which_python(layout: NodeLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert trainenv.find_python(None, layout) == trainenv.find_python(here, layout) == sys.executable
    assert trainenv.find_python(here + ".99", layout) == sys.executable
    other = tmp_path / "python2.4"
    other.write_text("#!/bin/sh\necho 2.4\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trainenv.find_python("2.4.6", layout) == str(other)
    with pytest.raises(Failure, match=r"asks for Python 2.5 and there is no python2.5 on node-0; install it"):
        trainenv.find_python("2.5", layout)
    with pytest.raises(Failure, match="there is no uv on node-0"):
        Builder().build(layout, wanted(manager="uv"))


def test_a_shim_of_pyenv_is_no_python(layout: NodeLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It fails with code 127 until a version is chosen: what pyenv itself, or uv, has installed is taken."""
    shims = tmp_path / "shims"
    program(shims / "python2.4", "#!/bin/sh\necho 'pyenv: python2.4: command not found' >&2\nexit 127\n")
    monkeypatch.setenv("PATH", f"{shims}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    uv = program(tmp_path / "uv" / "cpython-2.4.1-linux" / "bin" / "python2.4", "#!/bin/sh\necho 2.4\n")
    assert trainenv.find_python("2.4", layout) == str(uv)
    old, _, other = (
        program(tmp_path / "pyenv" / "versions" / name / "bin" / "python", f"#!/bin/sh\necho {name[:-2]}\n")
        for name in ("2.4.9", "2.4.8", "2.40.1")
    )
    assert trainenv.find_python("2.40", layout) == str(other)
    assert trainenv.find_python("2.4.9", layout) == str(old)
    with pytest.raises(Failure, match=f"there is no python2.5 on node-0; install it, or use --env-manager uv .*{other}"):
        trainenv.find_python("2.5", layout)
