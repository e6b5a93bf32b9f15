"""A word when a job has ended: to whom, how often, and what it must not give away."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from job_folder import JobFolder
from notify_channel import Channel

from mlflow_batchai.errors import UsageError
from mlflow_batchai.follower import notify
from mlflow_batchai.job.states import JobState

PAGE = "https://mlflow/#/runs/r"
TOKEN = "T0ken-of-a-channel"
DUMP = "import os, sys, json; json.dump([sys.stdin.read(), dict(os.environ), sys.argv], open(sys.argv[1], 'w'))"


@pytest.fixture
def channel():
    made = Channel()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("BATCHAI_HOME", str(path))
    return path


def tell(
    root: Path, plan: dict[str, Any] | None, state: str = "failed", reason: str = "", attempt: int = 1, **known: str
) -> str:
    """What the follower's log says then."""
    made = JobFolder(root / "share", name="digits-1", **({"notify": plan} if plan else {}))
    said: list[str] = []
    end = JobState("failed" if state == "terminated" else state, reason=reason, terminated=state == "terminated")
    notify.tell(made.job, attempt, end, PAGE, known, said.append)
    return "\n".join(said)


def test_a_channel_is_told_once_for_each_end(tmp_path, channel) -> None:
    plan = {"url": channel.url + "/services/${KEY}", "on": ["failed"]}
    reason = "rank 1 failed\n```<!channel> [click](https://evil) & `x`"
    # A second follower has taken over from one that was killed after it had begun.
    assert [tell(tmp_path, plan, reason=reason, KEY=TOKEN) for _ in range(2)] == ["", ""]
    (post,) = channel.posts
    shown = "rank 1 failed\n'''&lt;!channel&gt; [click](https://evil) &amp; 'x'"
    assert post == (
        f"/services/{TOKEN}",
        "application/json",
        {"text": f"job digits-1 failed {PAGE}\n```\n{shown}\n```"},
    )
    # A person has started it again.
    tell(tmp_path, plan, attempt=2, KEY=TOKEN)
    assert [post[2]["text"] for post in channel.posts[1:]] == [f"job digits-1 failed {PAGE}"]


@pytest.mark.parametrize("state", ["failed", "succeeded", "terminated"])
def test_it_tells_of_the_ends_that_are_asked_for(tmp_path, channel, state) -> None:
    for on in (["failed", "succeeded"], ["terminated"], []):
        tell(tmp_path / "-".join(["on", *on]), {"url": channel.url, "on": on}, state)
    assert len(channel.posts) == 1


def test_a_command_is_told_without_a_shell(tmp_path) -> None:
    file = tmp_path / "told.json"
    words = [sys.executable, "-c", DUMP, str(file), "$HOME; `x`"]
    plan = {"url": "", "on": ["succeeded"], "command": words}
    assert tell(tmp_path, plan, "succeeded", "a\0b", KEY=TOKEN) == ""
    text, environment, argv = json.loads(file.read_text())
    event = {"job": "digits-1", "runId": "r" * 32, "state": "succeeded", "reason": "a\\x00b", "runUrl": PAGE}
    assert (json.loads(text), argv[2:]) == (event, ["$HOME; `x`"])
    names = {"JOB": "job", "RUN_ID": "runId", "STATE": "state", "REASON": "reason", "RUN_URL": "runUrl"}
    assert {key: environment[f"BATCHAI_{name}"] for name, key in names.items()} == event


@pytest.mark.parametrize(
    ("plan", "status", "said"),
    [
        ({"url": "CHANNEL/${KEY}"}, 500, "notify.url of job digits-1: HTTP 500"),
        ({"url": "CHANNEL/${KEY}"}, 307, "notify.url of job digits-1: HTTP 307"),
        ({"url": "http://127.0.0.1:1/${KEY}"}, 0, "notify.url of job digits-1: ConnectionError"),
        ({"url": "http://[${KEY}"}, 0, "notify.url of job digits-1: InvalidURL"),
        ({"url": "file:///${KEY}"}, 0, "notify.url of job digits-1: InvalidSchema"),
        ({"url": "${OTHER}"}, 0, "notify.url of job digits-1: this process was not told OTHER (BATCHAI_SECRET_OTHER)"),
        ({"command": ["/no/such"]}, 0, "notify.command of job digits-1: No such file or directory"),
        (
            {"command": ["sh", "-c", "echo first; echo no $KEY >&2; exit 3"]},
            0,
            "notify.command of job digits-1: exit code 3: no ***",
        ),
        ({"command": ["sh", "-c", "sleep 60 & cat /dev/zero"]}, 0, "notify.command of job digits-1: it took longer than 1 s and was ended"),
    ],
)  # fmt: skip
def test_what_fails_is_one_line_without_a_secret(tmp_path, channel, monkeypatch, plan, status, said) -> None:
    if "longer than 1 s" in said:
        monkeypatch.setattr(notify, "SECONDS", 1.0)
    channel.status = status
    plan = {"on": ["failed"], **plan, "url": plan.get("url", "").replace("CHANNEL", channel.url)}
    begun = time.monotonic()
    assert tell(tmp_path, plan, KEY=TOKEN) == said
    assert len(channel.posts) == bool(status) and time.monotonic() - begun < 30


def test_a_users_own_settings_count_where_a_project_has_none(tmp_path, channel, home, monkeypatch) -> None:
    (home / "config.yaml").write_text(f"notify: {{url: '{channel.url}/own'}}\n")
    assert tell(tmp_path / "a", None) == tell(tmp_path / "b", {"url": "", "on": []}) == ""
    (home / "config.yaml").write_text(f"notify: {{url: '{channel.url}/${{KEY}}'}}\n")
    os.utime(home / "config.yaml", (1, 1))  # however coarse the disk's clock is
    with pytest.raises(UsageError, match="set BATCHAI_SECRET_KEY"):
        notify.check(None, {})
    # What a document names is taken from nothing else of the environment.
    monkeypatch.setenv("KEY", "another")
    monkeypatch.setenv("BATCHAI_SECRET_KEY", TOKEN)
    notify.check(None, {})
    told = notify.secrets(None, {"OTHER": "x"})
    assert told == {"KEY": TOKEN}
    assert tell(tmp_path / "c", None, **told) == ""
    assert [path for path, *_ in channel.posts] == ["/own", f"/{TOKEN}"]
