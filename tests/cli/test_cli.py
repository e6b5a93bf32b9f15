"""The command ``batchai``: its nouns and verbs with their help, exit codes, errors of one sentence, streams, completion."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import Cli

from mlflow_batchai.cli.main import NOUNS, batchai
from mlflow_batchai.errors import BatchAIError, ClusterError, JobDetachedError, JobFailedError, JobNotFoundError, UsageError
from mlflow_batchai.tracking import index

BATCHAI = Path(sys.executable).parent / "batchai"
BATCH_AIS = """
workspace create, workspace show, workspace list, workspace delete
experiment create, experiment show, experiment list, experiment delete
cluster create, cluster show, cluster list, cluster delete, cluster resize, cluster auto-scale
cluster node list, cluster node exec, cluster file list
job create, job show, job list, job wait, job terminate, job delete
job file list, job file stream, job node list, job node exec
"""
# What these print is no data.
STREAMS = {"run", "key export", "key import", "horovod build"}


def verbs(group: Any = batchai, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from verbs(found, (*path, name))
        else:
            yield " ".join((*path, name)), found


VERBS = dict(verbs())


def test_help_names_every_noun(cli: Cli) -> None:
    shown = cli("--help")
    assert shown == cli("-h") and shown.code == 0
    assert all(f"{noun} {text}" in " ".join(shown.out.split()) for noun, text in NOUNS.items())
    assert {path.split()[0] for path in VERBS} == set(NOUNS)


def test_help_imports_nothing_heavy() -> None:
    """Neither that of all nouns, nor that of one; doctor and gc are verbs as well."""
    code = (
        "import sys, importlib; sys.argv = ['batchai', '--help']\n"
        "from mlflow_batchai.cli.main import NOUNS, main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'mlflow_batchai.cli.job' not in sys.modules\n"
        "for noun in NOUNS.keys() - {'doctor', 'gc'}: importlib.import_module('mlflow_batchai.cli.' + noun)\n"
        "heavy = {'mlflow', 'pydantic', 'paramiko', 'rich', 'yaml', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_command_of_batch_ai_is_there() -> None:
    assert set(re.split(r", |\n", BATCH_AIS.strip())) <= set(VERBS)


@pytest.mark.parametrize("path", VERBS)
def test_every_command_has_help_an_example_that_parses_and_all_forms_of_output(cli: Cli, path: str) -> None:
    code, out, err = cli(f"{path} -h")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: batchai {path} ")
    example = " ".join(out.partition("Example: ")[2].split())
    made = VERBS[path]
    assert made.help and len(made.help.splitlines()[0]) > 10
    assert example.startswith(f"batchai {path}")
    words = shlex.split(str(made.epilog).removeprefix("Example: ").partition("|")[0])
    made.make_context(path, words[1 + len(path.split()) :])
    options = [name for parameter in made.params for name in parameter.opts]
    assert len(set(options)) == len(options), "an option stands twice"
    assert {"-o", "--query"} <= set(options) or path in STREAMS
    assert {"-q", "--quiet", "--no-color"} <= set(options)
    if re.match("job (?!list|node exec)", path):  # where -n is a number, and a node
        assert {"-n", "-j", "--name", "--job"} <= set(options)


@pytest.mark.parametrize("noun", sorted({path.rpartition(" ")[0] for path in VERBS} - {""}))
def test_an_unknown_command_names_those_that_exist(cli: Cli, noun: str) -> None:
    assert cli(f"{noun} -h").out.startswith(f"Usage: batchai {noun} ")
    said = cli(f"{noun} nope")
    if noun == "sweep":  # what is no verb is a project there
        assert said == cli("sweep run nope")
        return
    known = [path.removeprefix(f"{noun} ").split()[0] for path in VERBS if path.startswith(f"{noun} ")]
    assert (said.code, said.out) == (2, "")
    assert f"the commands are: {', '.join(dict.fromkeys(known))}" in said.err
    assert f"(did you mean '{known[0]}'?)" in cli(f"{noun} {known[0][:-1]}").err


@pytest.mark.parametrize("line", ["-q cluster file list", "cluster -q file list", "cluster file list --quiet"])
def test_quiet_leaves_notices_out_and_no_error(cli: Cli, line: str) -> None:
    assert cli("cluster file list -c local").err.startswith("batchai: cluster 'local' has no setup task")
    assert cli(f"{line} -c local") == (0, "[]\n", "")
    assert cli(f"{line} -c nowhere").err.startswith("batchai: there is no cluster 'nowhere'")
    assert cli("-q jbo").err.endswith(
        "there is no command 'jbo' here (did you mean 'job'?); the commands are: " + ", ".join(NOUNS) + "\n"
    )
    assert "(did you mean 'job attach' or 'sweep attach'?)" in cli("attach digits-3f2a1c").err


def test_quiet_uses_no_notice_up(cli: Cli) -> None:
    """Nor does a command drop those that submitting a job has already noted."""
    (cli.world.home / "clusters").mkdir(parents=True)
    (cli.world.home / "clusters" / "c.yaml").write_text("vmSize: NC6\n", encoding="utf-8")
    line = "run -c c --no-color -- python nope.py"
    said = [cli(f"{word} {line}").err.count("vmSize plays no part with engine: local") for word in ("-q", "", "")]
    assert said == [0, 1, 0]


def test_flags_of_all_commands_before_the_verb_that_is_meant(cli: Cli) -> None:
    assert cli("sweep -q nope --no-color") == cli("sweep run nope")


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
        (KeyError("x"), 1),
        # What MLflow says of a page with which a proxy answered in its server's place.
        (ValueError("<html>\n<p>log in</p>\n" * 1000), 1),
    ],
)
def test_errors_are_one_sentence_and_an_exit_code(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(*given: Any) -> None:
        raise error

    monkeypatch.setattr(index, "find", fail)
    said = cli("job show x")
    assert (said.code, said.out, said.err.count("\n")) == (code, "", 1) and said.err.startswith("batchai: ")
    assert len(said.err) < 600
    with pytest.raises(type(error)):
        cli("job show x --debug")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_streams_that_are_closed(tmp_path: Path, closed: str) -> None:
    """Nothing is printed there, and no file takes their place."""
    line = f"{shlex.quote(str(BATCHAI))} workspace create vision {closed}"
    environment = {"PATH": os.environ["PATH"], "BATCHAI_HOME": str(tmp_path)}
    done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(json.loads((tmp_path / "workspaces" / "vision.json").read_text())) >= {"resourceGroup", "location"}


def test_a_reader_that_leaves_is_not_answered_with_a_traceback() -> None:
    with subprocess.Popen([BATCHAI, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1  # click's word for it


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_reads_to_complete_commands(cli: Cli, shell: str) -> None:
    done = subprocess.run(
        [str(BATCHAI)], env={"_BATCHAI_COMPLETE": f"{shell}_source", "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"") and b"_BATCHAI_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("batchai jo", {"job"}),
        ("batchai --ver", {"--version"}),
        ("batchai job fi", {"file"}),
        ("batchai cluster show -n f", {"four"}),
        ("batchai workspace delete v", {"vision"}),
        ("batchai cluster show --ou", {"--output"}),
        ("batchai cluster show -o j", {"json", "jsonc"}),
        ("batchai clstr show -o x", set()),
    ],
)
def test_what_a_shell_is_told(tmp_path: Path, words: str, found: set[str]) -> None:
    """As bash asks: a process whose environment has the words. Names of clusters and workspaces are completed, too."""
    for folder, name in (("clusters", "four.yaml"), ("workspaces", "vision.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    variables = {
        "BATCHAI_HOME": str(tmp_path),
        "_BATCHAI_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([str(BATCHAI)], env=variables, capture_output=True, text=True)
    assert {line.partition(",")[2] for line in done.stdout.splitlines() if line} == found
    assert done.stderr == ""
