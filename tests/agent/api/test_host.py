"""Verbs of a node: answers may be lost and asked for again, and what can't be done is one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from mlflow_batchai.agent import place
from mlflow_batchai.agent.api import host
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import agents

SECRET = "hush-hush-hush"
SIGNS = """
from mlflow_batchai.agent.reservation import agents
import sys, time
agents.sign(sys.argv[1], 1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def start(root: Path, number: int = 1) -> dict[str, Any]:
    """Starts a stand-in agent, which writes down what it was given and waits."""
    code = (
        "import json, os, sys, time; text = sys.stdin.read(); place = sys.argv[-2].split('=', 1)[1];"
        " open(place + '/given', 'w').write(json.dumps([sys.argv[1:], text, dict(os.environ)])); time.sleep(600)"
    )
    reservation = {"number": number, "age": 12.5, "after": [3]}
    asked = {"command": [sys.executable, "-I", "-S", "-c", code], "arguments": ["--x=1"], "reservation": reservation}
    return host.answer(
        "start", {"root": str(root), "log": "logs/a.log", "mark": "x/1", "secrets": {"TOKEN": SECRET}, "keeper": "k", **asked}
    )


def end(said: dict[str, Any]) -> None:
    os.kill(said["pid"], 9)
    wait_for(lambda: proc.start_time(said["pid"]) is None)


def poll(said: dict[str, Any], number: int = 1, identity: str = "") -> dict[str, Any]:
    return host.answer("poll", {"number": number, "root": said["root"], "identity": identity})


def test_start_and_poll(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "of-the-submitter")
    before = time.time()
    said = start(root)
    try:
        argv, text, environment = json.loads(wait_for(lambda: (root / "given").exists() and (root / "given").read_text()))
        assert json.loads(text) == {"TOKEN": SECRET}
        assert SECRET not in " ".join(argv)
        assert "CANARY" not in environment
        assert argv[:2] == ["agent", "--x=1"]
        reservation = json.loads(argv[-1].removeprefix("--reservation="))
        assert reservation["after"] == [3]
        assert before <= reservation["taken"] + 12.5 <= time.time()  # by this machine's clock
        assert poll(said) == {"alive": True, "state": "waiting", "last": "", "failure": None, "frozen": False}
        agents.report(str(root), 1, {"state": "held"})
        assert poll(said)["state"] == "held"
        os.kill(said["pid"], signal.SIGSTOP)
        assert wait_for(lambda: poll(said)["frozen"])
        os.kill(said["pid"], signal.SIGCONT)
        assert wait_for(lambda: not poll(said)["frozen"])
        agents.report(str(root), 1, {"state": "held", "failure": {"code": "ShareFailed"}})
        assert poll(said)["failure"] == {"code": "ShareFailed"}
        assert start(root) == said  # asked again: the agent that is there
        assert os.getsid(said["pid"]) == said["pid"]
        (root / "logs" / "a.log").write_text("one\n\nlast words\n")
    finally:
        end(said)
    failure = {"code": "ShareFailed"}
    assert poll(said) == {"alive": False, "state": "ended", "last": "last words", "failure": failure, "frozen": False}
    again = start(root)
    assert again["pid"] != said["pid"]
    end(again)


def test_who_the_agent_is_stands_on_the_node(root: Path) -> None:
    """Another boot, or another start time: gone. Another id, or nothing written: of that nothing is known."""
    said = start(root)
    record = root / "tickets" / "1.agent"
    end_it: dict[str, Any] = {"mark": "x/1", "nodes": [[str(root), ""]], "give_up": 5.0}
    try:
        for change in ({"boot": "before"}, {"started": 1}):
            record.write_text(json.dumps({**said, **change}))
            assert poll(said)["alive"] is False
        for other in ("x/2", "x/11", "y/", "x"):
            assert host.answer("end", {**end_it, "mark": other}) == {"left": []}
        assert host.answer("end", {**end_it, "nodes": [[str(root) + "1", ""]]}) == {"left": []}
        assert proc.start_time(said["pid"]) is not None, "another job's agent, or another node's, was ended"
        record.write_text(json.dumps(said))
        mine = place.place(str(root))["id"]
        assert poll(said, identity=mine)["alive"] is True
        assert poll(said, identity="another")["alive"] is None
        with pytest.raises(host.HostError, match="it is not the node that the job was sent to"):
            host.answer("end", {**end_it, "nodes": [[str(root), "another"]]})
        assert poll(said)["alive"] is True
        assert poll(said, number=2)["alive"] is None
        assert poll(said)["alive"] is True
        record.write_text(json.dumps({**said, "pid": os.getpid(), "started": proc.start_time(os.getpid())}))
        host.answer("end", end_it)
        record.write_text(json.dumps(said))
        assert poll(said)["alive"] is False
    finally:
        if proc.start_time(said["pid"]):
            end(said)


def hello(root: Path, share: Path | str = "/", identity: str = "one") -> dict[str, Any]:
    return host.answer("hello", {"root": str(root), "share": str(share), "identity": identity, "python": "python3"})


@pytest.fixture
def spawn(root: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts what claims the reservation as an agent does."""
    started = []

    def start() -> subprocess.Popen[str]:
        with open(root / "its.log", "w") as log:
            argv = [sys.executable, "-c", SIGNS, str(root)]
            started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True))
        assert started[-1].stdout and started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_whoever_claims_the_reservation_signs(root: Path, spawn: Callable[[], subprocess.Popen[str]]) -> None:
    """An answer was lost before it was written who was started; a second one was, and only one of them is the agent."""
    twin = start(root)
    first = spawn()
    end(twin)
    assert poll(twin)["alive"] is True
    (root / "its.log").write_text("said last\n")
    first.kill()
    first.wait()
    assert poll(twin) == {"alive": False, "state": "ended", "last": "said last", "failure": None, "frozen": False}


def test_hello(root: Path, tmp_path: Path, spawn: Callable[[], subprocess.Popen[str]]) -> None:
    share = tmp_path / "share"
    (share / ".batchai" / "identity" / "one").mkdir(parents=True)
    root.mkdir()
    root.chmod(0o777)
    said = hello(root, share)
    assert root.stat().st_mode & 0o777 == 0o755, "a folder that others can write is closed"
    assert (said["root"], said["share"]) == (str(root), None)
    assert said["free"] > 0
    assert said["filesystem"] == place.filesystem(str(tmp_path)) != ""
    assert {**hello(root, share), "free": 0} == {**said, "free": 0}, "others write to this disk"
    assert (said["keeper"], said["busy"], len(said["id"])) == (None, False, 32)
    place.set_queue_node(str(root), "k")
    agent = spawn()
    place.set_queue_node(str(root), "k")
    with pytest.raises(place.OtherQueueError, match="first host is another"):
        place.set_queue_node(str(root), "other")
    again = place.place(str(root))
    assert (again["keeper"], again["busy"]) == ("k", True)
    agent.kill()
    agent.wait()
    place.set_queue_node(str(root), "other")
    (tmp_path / "link").symlink_to(root)
    assert hello(tmp_path / "link", "/nope")["place"] == said["place"]
    for path, identity, trouble in ((share, "two", "another"), (tmp_path / "none", "one", "missing")):
        assert place.share_problem(str(path), identity) == trouble


def test_a_root_of_someone_else_is_refused(tmp_path: Path) -> None:
    """In a folder that all may write, someone could have put a folder or a link of that name there before us."""
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    for name in ("theirs", "link"):
        with pytest.raises(host.HostError, match=f"/{name} belongs to another user; mend that, or name another"):
            hello(tmp_path / name)


def test_served_line_by_line(agent_pyz: Path, root: Path) -> None:
    """One process answers all questions of a connection, and ends with it; what goes wrong with one spoils no other."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(agent_pyz), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    word, _, facts = process.stdout.readline().partition(" ")
    assert (word, json.loads(facts)) == (host.READY, {"python": ".".join(map(str, sys.version_info[:3]))})

    def ask(verb: str, **arguments: Any) -> dict[str, Any]:
        process.stdin.write(json.dumps({"verb": verb, "arguments": arguments}) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    book = str(root / "book")
    os.makedirs(book)
    Path(book, "book.json").write_text('{"next": 1, "tickets": []}')
    assert ask("reserve", book=book, nodes=["a", "b"], job="j/1", count=1, ended={})["ok"]["nodes"] == ["a"]
    assert ask("listing", book=book)["ok"]["reservations"][0]["number"] == 1
    assert ask("ended", root=str(root), asked=[[1, 0.0], [2, 1000.0]]) == {"ok": {"ended": [2], "drained": False}}
    assert ask("listing", wrong=1)["error"].startswith("TypeError: ")
    assert ask("nonsense")["error"].startswith("KeyError: ")
    assert "File exists" in ask("drop", book=str(agent_pyz), number=1, job="j")["error"]
    assert ask("drop", book=book, number=1, job="j/1") == {"ok": {}}
    assert ask("listing", book=book) == {"ok": {"reservations": []}}
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()


def test_served_until_nobody_asks(agent_pyz: Path) -> None:
    """A client that has lost its power doesn't say so."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from mlflow_batchai.agent.api import host; host.IDLE_SECONDS = 1; host.serve()"
    argv = [sys.executable, "-I", "-S", "-c", code, str(agent_pyz)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.wait(60) == -signal.SIGALRM
