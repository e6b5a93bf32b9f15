"""Packages are installed by uv as pip would, and by pip where uv can't."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_wheels import make_wheel

from mlflow_batchai.agent.environments.installing import for_uv, settings

LISTED = """\
:env:.index-url='https://me:secret@pypi.example/simple'
global.extra-index-url='file:///a/simple\\nfile:///b/simple'
global.index-url='https://other.example/simple'
install.find-links='/wheels'
download.dest='/elsewhere'
"""


def test_what_is_set_for_pip() -> None:
    assert settings(LISTED) == {
        "extra-index-url": "file:///a/simple\nfile:///b/simple",
        "index-url": "https://me:secret@pypi.example/simple",
        "find-links": "/wheels",
    }


ALIKE = ["--index-strategy", "unsafe-best-match"]


@pytest.mark.parametrize(
    ("configured", "arguments", "variables"),
    [
        ({}, [], {}),
        ({"index-url": "https://me:secret@a"}, [], {"UV_INDEX_URL": "https://me:secret@a"}),
        ({"extra-index-url": "https://a\nhttps://b"}, [], {"UV_EXTRA_INDEX_URL": "https://a https://b"}),
        ({"find-links": "/a /b"}, ["--find-links", "/a", "--find-links", "/b"], {}),
        ({"constraint": "/a.txt"}, ["-c", "/a.txt"], {}),
        ({"trusted-host": "a.example"}, ["--allow-insecure-host", "a.example"], {}),
        ({"no-index": "true"}, ["--no-index"], {}),
        ({"no-index": "0", "timeout": "180"}, [], {"UV_HTTP_TIMEOUT": "180"}),
        ({"cert": "/ca.pem", "progress-bar": "off"}, [], {"SSL_CERT_FILE": "/ca.pem"}),
    ],
)
def test_what_uv_does_alike(configured: dict[str, str], arguments: list[str], variables: dict[str, str]) -> None:
    found = for_uv(configured, {"PATH": "/bin"})
    assert found and found[0] == ALIKE + arguments
    assert found[1] == {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "PATH": "/bin", **variables}


@pytest.mark.parametrize(
    "configured",
    [{"proxy": "http://a"}, {"no-binary": ":all:"}, {"client-cert": "/a"}, {"find-links": "https://me:secret@a"}, {"new": "1"}],
)
def test_what_is_left_to_pip(configured: dict[str, str]) -> None:
    assert for_uv(configured, {}) is None


class World:
    """A folder of wheels, an environment with pip, and a made-up uv, if it is wanted."""

    def __init__(self, root: Path, python: Path) -> None:
        self.root = root
        self.python = python
        for name, version in (("one", "1.0"), ("one", "1.1"), ("two", "2.0rc1"), ("two", "1.9")):
            make_wheel(root / "wheels", name, version, {f"{name}.py": ""})
        (root / "bin").mkdir()
        self.environment = {
            "PATH": f"{root}/bin:/usr/bin:/bin",
            "HOME": str(root),
            "PYTHONPATH": os.getcwd(),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(root / "wheels"),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def uv(self, text: str) -> None:
        program = self.root / "bin" / "uv"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def install(self, *wanted: str, **environment: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.python), "-m", "mlflow_batchai.agent", "install", str(self.python), *wanted]
        return subprocess.run(argv, env={**self.environment, **environment}, capture_output=True, text=True)

    def pip(self, *arguments: str) -> str:
        argv = [str(self.python), "-m", "pip", *arguments]
        return subprocess.run(argv, env=self.environment, check=True, capture_output=True, text=True).stdout

    def packages(self) -> list[str]:
        return self.pip("freeze").split()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


@pytest.fixture
def world(tmp_path: Path, python: Path) -> Iterator[World]:
    world = World(tmp_path, python)
    yield world
    world.pip("uninstall", "--yes", "one", "two")


def test_uv_is_asked_once_and_its_words_are_passed_on(world: World) -> None:
    world.uv(f'echo "$@" >{world.root}/asked; echo it was uv')
    done = world.install("one")
    assert (done.returncode, done.stdout, done.stderr) == (0, "it was uv\n", "")
    asked = (world.root / "asked").read_text().split()
    assert asked[:4] == ["pip", "install", "--python", str(world.python)]
    assert asked[4:] == [*ALIKE, "--find-links", f"{world.root}/wheels", "--no-index", "one"]


@pytest.mark.parametrize("uv", ["echo nonsense >&2; exit 2", "kill -KILL $$", None])
def test_where_uv_fails_or_is_not_there_pip_does_it(world: World, uv: str | None) -> None:
    if uv:
        world.uv(uv)
    done = world.install("one", "two")
    assert done.returncode == 0 and done.stderr == "" and "nonsense" not in done.stdout
    assert world.packages() == ["one==1.1", "two==1.9"]
    wrong = world.install("three")
    assert wrong.returncode == 1 and "No matching distribution found for three" in wrong.stderr


def test_hashes_are_left_to_pip(world: World, tmp_path: Path) -> None:
    world.uv(f"touch {world.root}/asked")
    (tmp_path / "requirements.txt").write_text(f"one==1.1 --hash=sha256:{'0' * 64}\n")
    done = world.install("-r", str(tmp_path / "requirements.txt"))
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr
    assert not (world.root / "asked").exists()


def test_uv_and_pip_install_the_same(world: World, tmp_path: Path) -> None:
    """With the true uv, which pip brings if it isn't on PATH."""
    program = shutil.which("uv")
    if program is None:
        fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "uv"), "uv"]
        if subprocess.run(fetch, capture_output=True).returncode:
            pytest.skip("pip can't get uv")
        program = str(tmp_path / "uv" / "bin" / "uv")
    (tmp_path / "constraints.txt").write_text("one<1.1\n")
    done = world.install("one", "two", PIP_CONSTRAINT=str(tmp_path / "constraints.txt"))
    assert done.returncode == 0 and "Successfully installed" in done.stdout, done.stderr
    by_pip = world.packages()
    world.pip("uninstall", "--yes", "one", "two")
    (world.root / "bin" / "uv").symlink_to(program)
    done = world.install("one", "two", PIP_CONSTRAINT=str(tmp_path / "constraints.txt"))
    assert done.returncode == 0 and "one==1.0" in done.stdout and "Successfully" not in done.stdout, done.stderr
    assert world.packages() == by_pip == ["one==1.0", "two==1.9"]
