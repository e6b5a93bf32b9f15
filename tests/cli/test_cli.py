"""The command ``batchai``: what it prints, its exit codes, and that errors are one sentence."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mlflow_batchai.cli import main as front_door
from mlflow_batchai.cli.main import _code
from mlflow_batchai.cli.tree import TREE
from mlflow_batchai.errors import (
    BatchAIError,
    ClusterError,
    JobDetachedError,
    JobFailedError,
    JobNotFoundError,
    UsageError,
)

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


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_names_every_noun(batchai, argument):
    code, out, _ = batchai(argument)
    assert code == 0
    for noun, entry in TREE.entries.items():
        assert noun in out
        assert entry.help in " ".join(out.split())


@pytest.mark.parametrize("noun", TREE.entries)
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


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_streams_that_are_closed(tmp_path, closed):
    """Nothing is printed there, and no file takes their place."""
    line = f"{shlex.quote(str(BATCHAI))} workspace create vision {closed}"
    environment = {"PATH": os.environ["PATH"], "BATCHAI_HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(json.loads((tmp_path / "workspaces" / "vision.json").read_text())) >= {"resourceGroup", "location"}


def test_a_reader_that_leaves_is_not_answered_with_a_traceback():
    code = "import sys; sys.argv = ['batchai', '--help']; from mlflow_batchai.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1  # click's word for it
