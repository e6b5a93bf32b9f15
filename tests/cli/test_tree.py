"""The tree of nouns and verbs: all that Batch AI's command had, each with help, an example, and its own options."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command_line import Cli

from mlflow_batchai.cli.nouns import Noun, Verb, load
from mlflow_batchai.cli.tree import TREE

BATCH_AIS = """
workspace create, workspace show, workspace list, workspace delete
experiment create, experiment show, experiment list, experiment delete
cluster create, cluster show, cluster list, cluster delete, cluster resize, cluster auto-scale
cluster node list, cluster node exec, cluster file list
job create, job show, job list, job wait, job terminate, job delete
job file list, job file stream, job node list, job node exec
"""


def verbs(noun: Noun = TREE, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Verb]]:
    for name, entry in noun.entries.items():
        if isinstance(entry, Noun):
            yield from verbs(entry, (*path, name))
        else:
            yield (*path, name), entry


VERBS = dict(verbs())


def test_every_command_of_batch_ai_is_there() -> None:
    wanted = {tuple(words.split()) for words in re.split(r"[,\n]", BATCH_AIS.strip())}
    assert wanted <= set(VERBS)


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_command_has_help_and_an_example(cli: Cli, path: tuple[str, ...]) -> None:
    code, out, err = cli(*path, "-h")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: batchai {' '.join(path)} ")
    example = " ".join(out.partition("Example: ")[2].split())
    assert example.startswith(("batchai " + " ".join(path), f'eval "$(batchai {" ".join(path)}')), out
    made = load(VERBS[path])
    assert made.help and len(made.help.splitlines()[0]) > 10


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_an_example_is_a_command_line_that_parses(path: tuple[str, ...]) -> None:
    made = load(VERBS[path])
    import shlex

    words = shlex.split(made.epilog.removeprefix("Example: ").partition("|")[0]) if made.epilog else []
    if words[0] != "batchai":
        pytest.skip("a shell's own line around the command")
    context = made.make_context(" ".join(path), words[1 + len(path) :], resilient_parsing=False)
    assert isinstance(context, click.Context)


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_results_can_be_had_in_every_form(path: tuple[str, ...]) -> None:
    """-o and --query are everywhere but where a command prints what isn't data."""
    options = {name for parameter in load(VERBS[path]).params for name in parameter.opts}
    streams = {
        ("completion",),
        ("key", "export"),
        ("key", "import"),
        ("horovod", "build"),
        ("job", "attach"),
        ("job", "logs"),
        ("job", "file", "stream"),
    }
    assert ({"-o", "--query"} <= options) or path in streams or path[-1] == "exec"
    assert len([name for parameter in load(VERBS[path]).params for name in parameter.opts]) == len(options), (
        "an option stands twice"
    )


@pytest.mark.parametrize("noun", [path for path in sorted({path[:-1] for path in VERBS}) if path], ids=" ".join)
def test_an_unknown_command_names_those_that_exist(cli: Cli, noun: tuple[str, ...]) -> None:
    code, out, err = cli(*noun, "nope")
    if noun == ("sweep",):  # what is no verb is a project there
        assert (code, out, err) == cli("sweep", "run", "nope")
        return
    assert (code, out) == (2, "")
    known = [path[len(noun)] for path in VERBS if path[: len(noun)] == noun]
    assert f"there is no command 'nope' here; the commands are: {', '.join(dict.fromkeys(known))}" in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(cli: Cli, shell: str) -> None:
    code, out, err = cli("completion", shell)
    assert (code, err) == (0, "")
    assert "_BATCHAI_COMPLETE" in out


@pytest.mark.parametrize(
    ("words", "found"),
    [
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
    batchai = Path(sys.executable).parent / "batchai"
    done = subprocess.run([str(batchai)], env=variables, capture_output=True, text=True)
    assert {line.partition(",")[2] for line in done.stdout.splitlines() if line} == found
    assert done.stderr == ""
