"""What a client asks of a node: answers may be lost and asked for again, and what can't be done is one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from mlflow_batchai.node import host, processes, tickets

SECRET = "hush-hush-hush"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def start(root: Path, number: int = 1, **changes: Any) -> dict[str, Any]:
    """Starts a stand-in agent, which writes down what it was given and waits."""
    code = (
        "import json, os, sys, time; text = sys.stdin.read(); place = sys.argv[-2].split('=', 1)[1];"
        " open(place + '/given', 'w').write(json.dumps([sys.argv[1:], text, dict(os.environ)])); time.sleep(600)"
    )
    ticket = {"number": number, "age": 12.5, "after": [3]}
    asked = {"command": [sys.executable, "-I", "-S", "-c", code], "arguments": ["--x=1"], "ticket": ticket, **changes}
    return host.answer("start", {"root": str(root), "log": "logs/a.log", "secrets": {"TOKEN": SECRET}, **asked})


def end(said: dict[str, Any]) -> None:
    os.kill(said["pid"], 9)
    wait_for(lambda: processes.start_time(said["pid"]) is None)


def poll(said: dict[str, Any], number: int = 1) -> dict[str, Any]:
    return host.answer("poll", {"number": number, **said})


def test_start_and_poll(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "of-the-submitter")
    said = start(root)
    try:
        argv, text, environment = json.loads(wait_for(lambda: (root / "given").exists() and (root / "given").read_text()))
        assert json.loads(text) == {"TOKEN": SECRET}
        assert SECRET not in " ".join(argv)
        assert "CANARY" not in environment
        assert argv[:2] == ["agent", "--x=1"]
        ticket = json.loads(argv[-1].removeprefix("--ticket="))
        assert ticket["after"] == [3]
        assert abs(time.time() - 12.5 - ticket["taken"]) < 5.0  # by this machine's clock
        assert poll(said) == {"alive": True, "state": "waiting", "last": ""}
        tickets.set_state(str(root), 1, json.dumps({"state": "held"}))
        assert poll(said)["state"] == "held"
        assert start(root) == said  # asked again: the agent that is there
        assert os.getsid(said["pid"]) == said["pid"]
        (root / "logs" / "a.log").write_text("one\n\nlast words\n")
    finally:
        end(said)
    assert poll(said) == {"alive": False, "state": "ended", "last": "last words"}
    again = start(root)
    assert again["pid"] != said["pid"]
    end(again)


def test_an_agent_of_another_boot_is_gone(root: Path) -> None:
    said = start(root)
    try:
        assert poll({**said, "boot": "before"})["alive"] is False
        assert poll({**said, "started": 1})["alive"] is False
        assert host.answer("end", {"mark": "x/1", "agents": [[said["pid"], said["started"], "before"]], "give_up": 1.0}) == {
            "left": []
        }
        assert poll(said)["alive"] is True
        host.answer("end", {"mark": "x/1", "agents": [[said["pid"], said["started"], said["boot"]]], "give_up": 5.0})
        assert poll(said)["alive"] is False
    finally:
        if processes.start_time(said["pid"]):
            end(said)


def test_hello(root: Path, tmp_path: Path) -> None:
    share = tmp_path / "share"
    (share / ".batchai" / "identity" / "one").mkdir(parents=True)
    said = host.answer("hello", {"root": str(root), "share": str(share), "identity": "one"})
    assert (said["root"], said["share"]) == (str(root), None)
    assert said["free"] > 0
    assert said["filesystem"] == host.filesystem(str(tmp_path)) != ""
    (tmp_path / "link").symlink_to(root)
    assert host.answer("hello", {"root": str(tmp_path / "link"), "share": "/nope", "identity": "one"})["place"] == said["place"]
    for path, identity, trouble in ((share, "two", "another"), (tmp_path / "none", "one", "missing")):
        assert host.share_trouble(str(path), identity) == trouble


def test_a_root_of_someone_else_is_refused(tmp_path: Path) -> None:
    """In a folder that all may write, someone could have put a folder or a link of that name there before us."""
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    for name in ("theirs", "link"):
        with pytest.raises(host.HostError, match=f"/{name} is not a folder of this user; remove it, or name another"):
            host.answer("hello", {"root": str(tmp_path / name), "share": "/", "identity": "x"})


def test_what_the_system_refuses_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(host.HostError, match=f"^(Not a directory|File exists): {tmp_path}/file"):
        host.answer("hello", {"root": str(tmp_path / "file" / "root"), "share": "/", "identity": "x"})


def test_served_line_by_line(agent_pyz: Path, root: Path) -> None:
    """One process answers all questions of a connection, and ends with it; what goes wrong with one spoils no other."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(agent_pyz), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    word, _, facts = process.stdout.readline().partition(" ")
    assert (word, json.loads(facts)) == (host.READY, {"python": "%d.%d.%d" % sys.version_info[:3]})

    def ask(verb: str, **arguments: Any) -> dict[str, Any]:
        process.stdin.write(json.dumps({"verb": verb, "arguments": arguments}) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    book = str(root / "book")
    assert ask("take", book=book, nodes=["a", "b"], job="j/1", count=1, ended={})["ok"]["nodes"] == ["a"]
    assert ask("listing", book=book)["ok"]["tickets"][0]["number"] == 1
    assert ask("ended", root=str(root), asked=[[1, 0.0], [2, 1000.0]]) == {"ok": {"ended": [2]}}
    assert ask("listing", wrong=1)["error"].startswith("TypeError: ")
    assert ask("nonsense")["error"].startswith("KeyError: ")
    assert "File exists" in ask("drop", book=str(agent_pyz), number=1)["error"]
    assert ask("drop", book=book, number=1) == {"ok": {}}
    assert ask("listing", book=book) == {"ok": {"tickets": []}}
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()
