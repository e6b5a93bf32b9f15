"""The command ``batchai``: what it prints, its exit codes, and that errors are one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlflow_batchai import detached, lookup, runner, runs
from mlflow_batchai.cli import main as front_door
from mlflow_batchai.cli.main import NOUNS, _code
from mlflow_batchai.errors import (
    BatchAIError,
    ClusterError,
    JobDetachedError,
    JobFailedError,
    JobNotFoundError,
    UsageError,
)
from mlflow_batchai.jobs import JobState, Snapshot

BATCHAI = Path(sys.executable).parent / "batchai"


@pytest.fixture
def batchai(monkeypatch, capsys):
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["batchai", *arguments])
        with pytest.raises(SystemExit) as ended:
            front_door()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def job(monkeypatch):
    """A job that can be found by its name, as far as the command line looks into it."""
    plan = {
        "name": "toy-1",
        "job": "0123456789",
        "cluster": "local",
        "workspace": "default",
        "experiment": "Default",
        "nodeCount": 1,
        "ranks": 1,
        "command": "python train.py",
        "segment": "seg",
    }
    made = SimpleNamespace(
        name="toy-1",
        plan=plan,
        folder="logs/seg",
        share=SimpleNamespace(url="file:///share"),
        current=JobState("running"),
        snapshot=lambda: Snapshot(1, {0: {"host": "h", "address": "127.0.0.1"}}, {}),
    )
    made.state = lambda: made.current
    made.ended = JobState("succeeded", 0)
    made.calls = []
    found = SimpleNamespace(job=made, run_id="r" * 32, tracking=None, follower=None)

    def find(name, tracking):
        if name != "toy-1":
            raise JobNotFoundError(f"there is no job '{name}'; the newest are: toy-1")
        return found

    monkeypatch.setattr(lookup, "find", find)
    monkeypatch.setattr(detached, "ensure_follower", lambda job: made.calls.append("follower"))
    monkeypatch.setattr(runner, "cancel", lambda job, why: made.calls.append(f"cancel: {why}"))
    monkeypatch.setattr(runner, "wait", lambda job: made.ended)

    def watch(job, console, signals, **options):
        made.calls.append(options)
        if isinstance(made.ended, Exception):
            raise made.ended
        return made.ended

    monkeypatch.setattr(runner, "watch", watch)
    return made


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_names_every_noun(batchai, argument):
    code, out, _ = batchai(argument)
    assert code == 0
    for noun, (_, sentence) in NOUNS.items():
        assert noun in out
        assert sentence in out


@pytest.mark.parametrize("noun", NOUNS)
def test_every_noun_has_help(batchai, noun):
    code, out, _ = batchai(noun, "--help")
    assert (code, "Usage: batchai " + noun in out) == (0, True)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['batchai', '--help']\n"
        "from mlflow_batchai.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'mlflow', 'pydantic', 'paramiko', 'rich', 'yaml', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_installed_command():
    done = subprocess.run([str(BATCHAI), "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split(", ")[0]) == (0, "batchai")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["jbo"], 2), (["job", "nope"], 2), (["job", "show"], 2), (["job", "list", "-n", "0"], 2), (["--nope"], 2)],
)
def test_misuse(batchai, arguments, code):
    found, out, err = batchai(*arguments)
    assert (found, out) == (code, "")
    assert "Error: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobFailedError("x", 3), 3),
        (JobFailedError("x", None), 1),
        (JobFailedError("x", 0), 1),
        (JobNotFoundError("x"), 3),
        (UsageError("x"), 2),
        (ClusterError("x"), 1),
        (JobDetachedError("x"), 1),
        (BatchAIError("x"), 1),
    ],
)
def test_exit_codes(error, code):
    assert _code(error) == code


def test_an_error_is_one_sentence(batchai, job):
    assert batchai("job", "show", "nope") == (3, "", "batchai: there is no job 'nope'; the newest are: toy-1\n")


def test_a_bug_is_one_sentence_too_and_debug_shows_where(batchai, job, monkeypatch):
    monkeypatch.setattr(lookup, "find", lambda name, tracking: {}["nope"])
    code, _, err = batchai("job", "show", "x")
    assert (code, err) == (1, "batchai: KeyError: 'nope' (with --debug: where)\n")
    monkeypatch.setattr(sys, "argv", ["batchai", "--debug", "job", "show", "x"])
    with pytest.raises(KeyError):
        front_door()


def test_show(batchai, job):
    code, out, _ = batchai("job", "show", "toy-1")
    shown = json.loads(out)
    assert code == 0
    assert (shown["name"], shown["executionState"], shown["executionInfo"]["exitCode"]) == ("toy-1", "running", None)
    assert shown["nodes"] == [{"id": "node-0", "host": "h", "address": "127.0.0.1", "exit": None}]


@pytest.mark.parametrize(
    ("ended", "code", "words"),
    [
        (JobState("succeeded", 0), 0, "batchai: job toy-1 succeeded\n"),
        (JobState("failed", 7, reason="rank 0 died"), 7, "batchai: job toy-1 failed: rank 0 died\n"),
        (JobState("failed", None, terminated=True), 1, "is KILLED)\n"),
        (JobDetachedError("left; job toy-1 goes on"), 1, "batchai: left; job toy-1 goes on\n"),
    ],
)
def test_attach(batchai, job, ended, code, words):
    job.ended = ended
    found, out, err = batchai("job", "attach", "toy-1")
    assert (found, out) == (code, "")
    assert err.endswith(words)
    assert job.calls == ["follower", {"from_start": True}]


def test_terminate(batchai, job, monkeypatch):
    job.ended = JobState("failed", reason="terminated by me", terminated=True)
    code, _, err = batchai("job", "terminate", "toy-1", "-y")
    assert (code, err) == (0, "job toy-1: failed (terminated by me)\n")
    assert job.calls == ["cancel: batchai job terminate", "follower"]
    job.calls.clear()
    assert batchai("job", "terminate", "toy-1", "-y", "--no-wait") == (0, "", "")
    assert job.calls == ["cancel: batchai job terminate"]


def test_terminate_asks_only_on_a_terminal(batchai, job, monkeypatch):
    monkeypatch.setattr("os.isatty", lambda descriptor: False)
    code, _, err = batchai("job", "terminate", "toy-1")
    assert (code, err) == (2, "batchai: ending job toy-1 needs -y where there is no terminal to ask on\n")
    assert job.calls == []


def test_terminate_what_has_ended(batchai, job):
    job.current = JobState("succeeded", 0)
    assert batchai("job", "terminate", "toy-1", "-y") == (0, "", "job toy-1 has ended already\n")
    assert job.calls == ["follower"]  # its run may not have ended


@pytest.mark.parametrize(
    ("status", "code", "words", "ended"),
    [
        ("SCHEDULED", 0, "job toy-1: nothing of it had been started; its run is KILLED\n", True),
        ("KILLED", 0, "job toy-1 has ended already\n", False),
        ("RUNNING", 1, "batchai: job toy-1 has no job folder: ", False),
    ],
)
def test_terminate_what_never_began(batchai, monkeypatch, status, code, words, ended):
    run = SimpleNamespace(data=SimpleNamespace(tags={runs.TAG_JOB: "toy-1"}), info=SimpleNamespace(run_id="r", status=status))
    calls = []

    def find(name, tracking):
        raise lookup.NoFolderError(run, "file:///share")

    monkeypatch.setattr(lookup, "find", find)
    monkeypatch.setattr(runs, "client", lambda tracking: "client")
    monkeypatch.setattr(runs, "fail", lambda *arguments: calls.append(arguments))
    found, out, err = batchai("job", "terminate", "toy-1", "-y")
    assert (found, out) == (code, "")
    assert err.startswith(words)
    assert calls == [("client", "r", "terminated; nothing of it had been started", "KILLED")] * ended


def test_terminate_what_never_began_asks_too(batchai, monkeypatch):
    run = SimpleNamespace(
        data=SimpleNamespace(tags={runs.TAG_JOB: "toy-1"}), info=SimpleNamespace(run_id="r", status="SCHEDULED")
    )

    def find(name, tracking):
        raise lookup.NoFolderError(run, "file:///share")

    monkeypatch.setattr(lookup, "find", find)
    monkeypatch.setattr("os.isatty", lambda descriptor: False)
    code, _, err = batchai("job", "terminate", "toy-1")
    assert (code, err) == (2, "batchai: ending job toy-1 needs -y where there is no terminal to ask on\n")


def test_list(batchai, store_template, tmp_path, monkeypatch):
    shutil.copy(store_template, tmp_path / "m.db")
    tracking = runs.absolute("sqlite:///m.db", tmp_path)
    monkeypatch.setattr("mlflow_batchai.cli.job._tracking", lambda: tracking)
    assert batchai("job", "list")[1].splitlines()[0].split() == ["Name", "Cluster", "Nodes", "State", "Exit", "code", "Run"]
    mlflow = runs.client(tracking)
    tags = {
        runs.TAG_JOB: "toy-1",
        runs.TAG_CLUSTER: "local",
        runs.TAG_STATE: "failed",
        "batchai.nodes": "2",
        "batchai.exitCode": "3",
    }
    run = runs.create(mlflow, "0", tags, {}, None, None)
    runs.create(mlflow, "0", {runs.TAG_JOB: "toy-2"}, {}, None, None)
    mlflow.create_run("0")  # another's run
    code, out, _ = batchai("job", "list")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["toy-2", "toy-1"]
    assert lines[3].split() == ["toy-1", "local", "2", "failed", "3", run.info.run_id]
    rows = json.loads(batchai("job", "list", "-o", "json", "-n", "1")[1])
    assert [row["name"] for row in rows] == ["toy-2"]


def test_a_reader_that_leaves_is_not_answered_with_a_traceback():
    code = "import sys; sys.argv = ['batchai', '--help']; from mlflow_batchai.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1  # click's word for it
