"""Unused files of a node are found, and removed when a person asks; used and young ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aged_files import DAY, HASH, put

from mlflow_batchai.agent import leftovers
from mlflow_batchai.agent.api import host
from mlflow_batchai.agent.environments import kept


def made(folder: Path, days: float) -> Path:
    """A folder that a job has made and used last so many days ago."""
    put(folder / "lib" / "big.so", 400, b"x" * 1000)
    os.link(folder / "lib" / "big.so", folder / "lib" / "same.so")
    put(folder / "bin" / "python", 400, b"x" * 7)
    put(folder / kept.MARKER, days, b"stamp\nword\n")
    return folder


def found(root: Path, days: float = 30, **more: Any) -> dict[str, dict[str, Any]]:
    items = host.answer("leftovers", {"root": str(root), "seconds": days * DAY, **more})["items"]
    return {os.path.relpath(item["path"], root): item for item in items}


def removed(root: Path, *paths: Path, days: float = 30, **more: Any) -> list[str]:
    asked = {"root": str(root), "seconds": days * DAY, "remove": [str(path) for path in paths], **more}
    return list(host.answer("leftovers", asked)["gone"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"envs/{HASH}", "environment"),
        (f"prepared/{HASH}", "preparation"),
        ("logs/abc-1.log", "log"),
        ("tools/rclone-0123456789abcdef", "tool"),
        ("agents/agent-0123456789abcdef.pyz", "agent"),
        ("agents/agent-0123456789abcdef.1f2e.new", "agent"),
    ],
)
def test_by_age(tmp_path: Path, name: str, kind: str) -> None:
    own = put(tmp_path / "agents" / "agent-aaaaaaaaaaaaaaaa.pyz", 400)
    path = made(tmp_path / name, 31) if kind in ("environment", "preparation") else put(tmp_path / name, 31)
    more = {"archive": str(own)}
    item = found(tmp_path, **more)[name]
    # A file with two names is free when both are gone: its bytes are not promised.
    assert (item["kind"], item["bytes"]) == (kind, 5 if path.is_file() else 18)
    assert item["age"] == pytest.approx(31 * DAY, abs=60)
    assert found(tmp_path, days=32, **more) == {}
    assert removed(tmp_path, path, days=32, **more) == [] and path.exists()
    other = put(tmp_path / "else", 400)
    assert removed(tmp_path, other, **more) == [] and path.exists() and other.exists()
    assert removed(tmp_path, path, **more) == [str(path)]
    assert not path.exists() and own.exists()
    # An answer may be lost, and the question asked again.
    assert removed(tmp_path, path, **more) == [str(path)]
    assert found(tmp_path, **more) == {}


@pytest.mark.parametrize(
    "name", ["envs/mine", "envs/lib", "logs/notes.txt", "logs/.hidden.log", "tools/mine", "id", "agents/mine.pyz"]
)
def test_what_is_not_ours_stays(tmp_path: Path, name: str) -> None:
    path = put(tmp_path / name, 400)
    assert found(tmp_path, days=0) == {}
    assert removed(tmp_path, path, days=0) == [] and path.exists()


def test_environments_may_lie_elsewhere(tmp_path: Path) -> None:
    folder = made(tmp_path / "common" / HASH, 31)
    root = tmp_path / "root"
    assert found(root) == {}
    assert list(found(root, environments=str(tmp_path / "common"))) == [f"../common/{HASH}"]
    assert removed(root, folder, environments=str(tmp_path / "common")) == [str(folder)]


def test_what_was_never_finished(tmp_path: Path) -> None:
    folder = tmp_path / "envs" / HASH
    put(folder / "half", 40)
    os.utime(folder, (time.time() - 31 * DAY,) * 2)
    assert found(tmp_path)[f"envs/{HASH}"]["reason"] == "never finished"
    assert removed(tmp_path, folder) == [str(folder)]


class Agent:
    """A process that uses a kept folder, as an agent does until it ends."""

    def __init__(self, folder: Path, stamp: str = "stamp") -> None:
        code = f"""
import sys, time
from mlflow_batchai.agent.environments import kept
def wait():
    print("waits", flush=True)
    time.sleep(0.05)
with kept.once({str(folder)!r}, wait, print, "it", lambda: {stamp!r}) as needed:
    if needed:
        import os
        os.mkdir({str(folder)!r})
print("made" if needed else "there", flush=True)
sys.stdin.read()
"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(kept.__file__).parents[2],
        )

    def says(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate()


def test_what_a_job_uses_stays_until_it_ends(tmp_path: Path) -> None:
    folder = made(tmp_path / "envs" / HASH, 0.5)
    agent = Agent(folder)
    try:
        assert agent.says() == "there"
        assert found(tmp_path, days=0.1) == {}
        assert removed(tmp_path, folder, days=0.1) == [] and (folder / kept.MARKER).exists()
    finally:
        agent.end()
    assert list(found(tmp_path, days=0.1)) == [f"envs/{HASH}"]
    assert removed(tmp_path, folder, days=0.1) == [str(folder)]


def test_an_agent_that_comes_while_it_is_removed_makes_it_anew(tmp_path: Path) -> None:
    folder = made(tmp_path / "envs" / HASH, 31)
    agents: list[Agent] = []

    def come() -> bool:
        agents.append(Agent(folder))
        assert agents[0].says() == "waits"
        return True

    try:
        assert kept.remove(str(folder), come)
        said = agents[0].says()
        while said == "waits":
            said = agents[0].says()
        assert said == "made" and (folder / kept.MARKER).exists()
    finally:
        agents[0].end()


def test_one_that_was_used_since_it_was_listed_stays(tmp_path: Path) -> None:
    folder = made(tmp_path / "envs" / HASH, 31)
    assert found(tmp_path)
    os.utime(folder / kept.MARKER)
    assert removed(tmp_path, folder) == [] and (folder / kept.MARKER).exists()


def test_an_archive_that_runs_stays(tmp_path: Path) -> None:
    own = put(tmp_path / "agents" / "agent-aaaaaaaaaaaaaaaa.pyz", 400)
    runs = put(tmp_path / "agents" / "agent-bbbbbbbbbbbbbbbb.pyz", 400, b"import sys; print(flush=True); sys.stdin.read()")
    process = subprocess.Popen([sys.executable, str(runs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        process.stdout.readline()  # in the middle of its start a process shows no arguments
        os.utime(runs, (time.time() - 400 * DAY,) * 2)
        assert found(tmp_path, archive=str(own)) == {}
    finally:
        process.communicate()
    os.utime(runs, (time.time() - 31 * DAY,) * 2)
    assert list(found(tmp_path, archive=str(own))) == ["agents/agent-bbbbbbbbbbbbbbbb.pyz"]


def test_the_log_of_an_agent_that_lives_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = put(tmp_path / "logs" / "abc-1.log", 31)
    monkeypatch.setattr("mlflow_batchai.agent.leftovers.living", lambda root: [{"log": str(log)}])
    assert found(tmp_path) == {}


def test_an_agent_that_has_the_node_tidies_up(tmp_path: Path) -> None:
    """Logs after 30 days, what clients have sent after 90; environments are a person's to remove."""
    own = put(tmp_path / "agents" / "agent-aaaaaaaaaaaaaaaa.pyz", 400)
    ages = {
        "logs/abc-1.log": 31,
        "logs/abc-2.log": 29,
        "tools/rclone-0123456789abcdef": 91,
        "tools/rclone-1123456789abcdef": 89,
        "agents/agent-0123456789abcdef.pyz": 91,
        "agents/agent-0123456789abcdef.1f2e.new": 91,
        "agents/agent-1123456789abcdef.pyz": 89,
        "envs/abc/.complete": 400,
        "agents/mine.txt": 400,
        "tools/mine": 400,
    }
    for name, days in ages.items():
        put(tmp_path / name, days)
    kept = put(tmp_path / "elsewhere" / "kept.log", 400)
    (tmp_path / "logs" / "link.log").symlink_to(kept)
    leftovers.tidy(str(tmp_path), time.time(), str(own))
    stays = {name for name in ages if (tmp_path / name).exists()}
    assert stays == {name for name, days in ages.items() if days in (29, 89, 400)}
    assert own.exists() and kept.exists() and (tmp_path / "logs" / "link.log").is_symlink()
    # By now another version's agent runs, and finds that ours was in use.
    other = tmp_path / "agents" / "agent-1123456789abcdef.pyz"
    for days, there in ((89, True), (91, False)):
        leftovers.tidy(str(tmp_path), time.time() + days * DAY, str(other))
        assert own.exists() is there
    leftovers.tidy(str(tmp_path / "none"), time.time(), str(tmp_path / "source"))
