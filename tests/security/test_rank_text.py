"""Text of ranks stays text: on the submitter's terminal, in the run's tags, and on MLflow's pages."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from markdown_it import MarkdownIt
from plans import bare_plan

from mlflow_batchai.cli.output import render
from mlflow_batchai.cli.sweep import table
from mlflow_batchai.job.states import JobState
from mlflow_batchai.sweep.results import Results, Row
from mlflow_batchai.terminal import safe, safe_pieces
from mlflow_batchai.tracking.description import Facts, markdown, merged
from mlflow_batchai.tracking.script_calls.tags import is_source, may_be_set

BEACON = "![x](http://beacon.example/a.png)"
ESCAPES = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;b3duZWQ=\x1b\\",
    "device query": "\x1b[6n\x1b[c",
    "device control": "\x1bP$qm\x1b\\",
    "C1 control": "\x9b6n\x9d0;owned\x9c",
    "bell": "\x07",
    "full reset": "\x1bc",
    "alternate screen": "\x1b[?1049h",
    "up, and over what stands there": "\x1b[3A\x1b[2Jbatchai: job succeeded",
    "turned around": "\u202egnp.exe\u2066",
    "separators": "\u2028\u2029",
    "link": "\x1b]8;;http://beacon.example\x07here\x1b]8;;\x07",
}
SCRIPT = f"""
import os, sys
import mlflow
from mlflow_batchai.training import report

BEACON, ESCAPES = {BEACON!r}, {ESCAPES!r}
with mlflow.start_run(run_name="mine"):
    mlflow.set_tags({{
        "mlflow.note.content": "# big\\n```\\n" + BEACON + "\\n<img src=http://beacon.example/b.png>\\n",
        "mlflow.user": "victim",
        "mlflow.parentRunId": "0" * 32,
        "mlflow.source.name": "http://beacon.example",
        "mlflow.loggedArtifacts": '[{{"path": "t.json", "type": "table"}}]',
        "mlflow.loggedImages": "True",
        "kind": "toy",
    }})
# By its own hand: nothing on the node looks at these.
report.append({{"type": "tag", "rank": 0, "values": {{
    "batchai.share": "file:///", "Batchai.cluster": "other", "MLFLOW.user": "victim", "mlflow.user": None, "mlflow.runColor": "red",
}}}})
report.append({{"type": "dataset", "rank": 0, "tags": {{"mlflow.data.context": "train", "mlflow.user": "victim"}}, "name": "d",
    "digest": "1", "source_type": "http", "source": '{{"url": "javascript:alert(1)"}}', "schema": None, "profile": None}})
for name, text in ESCAPES.items():
    sys.stdout.write(f"{{name}} <{{text}}>\\n")
sys.stdout.write("\\x1b[1;31mred\\nplain\\n")
sys.stdout.write("\\r 10%" + "\\x08" * 4 + "\\r 99%\\n")
sys.stdout.flush()
sys.stderr.write("why " + BEACON + " <b>x</b> " + "".join(ESCAPES.values()) + "\\n")
sys.exit(3)
"""
BIN = Path(sys.executable).parent
# What we and rich tell a terminal ourselves: colours, the cursor, the line at the bottom.
OURS = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|[\r\n\t]")
UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def on_terminal(world: Any, argv: list[str]) -> str:
    """All that a command writes to its terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        cwd=world.cwd,
        env={**world.environment, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(slave)
    said = b""
    try:
        while piece := os.read(master, 1 << 16):
            said += piece
    except OSError:  # the other side is closed
        pass
    os.close(master)
    process.wait(120)
    return said.decode("utf-8")


def obeyed(said: str) -> list[str]:
    """What of it a terminal would obey, besides what is ours."""
    return UNFIT.findall(OURS.sub("", said))


class Attacked:
    """A failed job whose rank tried it all, and what its submitter's terminal was sent."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.said = on_terminal(world, world.command(world.project(SCRIPT)))
        self.run = world.last
        self.name = self.run.data.tags["batchai.job"]


@pytest.fixture(scope="module")
def attacked(shared_cli: Cli) -> Attacked:
    return Attacked(shared_cli.world)


def test_a_terminal_is_told_nothing_by_a_rank(attacked: Attacked) -> None:
    assert obeyed(attacked.said) == []
    assert r"title <\x1b]0;owned\x07>" in attacked.said and r"device query <\x1b[6n\x1b[c>" in attacked.said
    assert r"turned around <\u202egnp.exe\u2066>" in attacked.said
    # Also where the job's reason is told, by MLflow's own command.
    assert "failed: rank 0 on node-0 exited with code 3" in attacked.said
    assert attacked.said.rpartition("failed: rank 0 on node-0")[2].count(r"\x1b]0;owned\x07") >= 1


def test_colours_go_through_and_end_with_their_line(attacked: Attacked) -> None:
    assert "\x1b[1;31mred\x1b[0m\r\nplain\r\n" in attacked.said
    assert "\r\n 99%\r\n" in attacked.said, "of a bar its last state"


COMMANDS = ["logs JOB", "file stream -j JOB -f stderr.txt", "show JOB", "wait JOB", "list -o table", "attach JOB"]
COMMANDS += [f"show JOB -o {output}" for output in ("jsonc", "yaml", "tsv", "table")]
# One process for all of them: each would import MLflow anew.
EACH = """
import contextlib, sys
from mlflow_batchai.cli import main
for words in sys.argv[2:]:
    print("#", words, flush=True)
    sys.argv[1:] = ["job", *words.replace("JOB", sys.argv[1]).split()]
    with contextlib.suppress(SystemExit):
        main()
"""


def test_no_command_passes_them_on(attacked: Attacked) -> None:
    script = EACH.replace("sys.argv[1]", repr(attacked.name))
    said = on_terminal(attacked.world, [sys.executable, "-c", script, attacked.name, *COMMANDS])
    parts = dict(zip(COMMANDS, re.split("^# .*\r\n", said, flags=re.M)[1:], strict=True))
    assert {words: obeyed(part) for words, part in parts.items() if obeyed(part)} == {}
    for words in ("logs JOB", "file stream -j JOB -f stderr.txt", "wait JOB"):
        assert r"\x1b]0;owned\x07" in parts[words]


def test_a_pipe_gets_the_bytes(attacked: Attacked) -> None:
    argv = [str(BIN / "batchai"), "job", "logs", attacked.name]
    done = subprocess.run(argv, cwd=attacked.world.cwd, env=attacked.world.environment, capture_output=True, check=True)
    assert done.stdout == (attacked.world.folder(attacked.run) / "stdouterr" / "stdout.txt").read_bytes()
    assert b"\x1b]0;owned\x07" in done.stdout


def test_tags_that_mlflow_reads_are_no_scripts(attacked: Attacked) -> None:
    tags = attacked.run.data.tags
    assert "victim" not in tags.values() and "mlflow.user" in tags and "MLFLOW.user" not in tags
    assert "mlflow.parentRunId" not in tags and "mlflow.runColor" not in tags and "Batchai.cluster" not in tags
    assert "batchai.share" not in tags and tags["mlflow.source.name"] != "http://beacon.example"
    # What speaks of the run's name and its own artifacts may stay.
    assert (tags["kind"], tags["mlflow.loggedImages"], attacked.run.info.run_name) == ("toy", "True", "mine")
    assert tags["mlflow.loggedArtifacts"] == '[{"path": "t.json", "type": "table"}]'
    notes = tags["batchai.notes"]
    for key in ("mlflow.user", "mlflow.parentRunId", "mlflow.source.name", "MLFLOW.user", "Batchai.cluster", "mlflow.runColor"):
        assert notes.count(f"tag '{key}' is not a script's to set") == 1, notes
    (given,) = attacked.run.inputs.dataset_inputs
    assert (given.dataset.source, [tag.key for tag in given.tags]) == ("{}", ["mlflow.data.context"])
    assert "dataset 'd': its source leads to no web page" in notes


def test_the_page_of_the_run_shows_a_scripts_note_as_text(attacked: Attacked) -> None:
    note = attacked.run.data.tags["mlflow.note.content"]
    assert active(note.replace("<!--", "").replace("-->", "")) == []
    assert "note from the script:\n\n````\n# big\n```\n" + BEACON in note and "\x1b" not in note


PAGES = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
PASSIVE = {
    *("paragraph_open", "paragraph_close", "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"),
    *("inline", "fence", "text", "code_inline", "strong_open", "strong_close", "softbreak"),
}


def active(markdown: str) -> list[str]:
    """What a page makes of Markdown besides paragraphs, lists and code; addresses outside of code count, since some link them."""
    tokens = [one for token in PAGES.parse(markdown) for one in (token, *(token.children or ()))]
    links = [token.content for token in tokens if token.type == "text" and re.search("://|www[.]|@", token.content)]
    return [token.type for token in tokens if token.type not in PASSIVE] + links


EVIL = [
    BEACON,
    "[click](http://beacon.example)",
    "http://beacon.example www.beacon.example a@beacon.example <http://beacon.example>",
    "<img src=http://beacon.example/b.png><script>alert(1)</script>",
    "x\n\n# heading\n\nheading\n===",
    "| a | b |\n|---|---|\n| c | d |",
    "```\n" + BEACON,
    "`" * 7 + BEACON + "`" * 3,
    "\\`" + BEACON + "\\`",
    "` " + BEACON + " ``",
    "~~~\n" + BEACON + "\n~~~",
    "[x]: http://beacon.example\n[x]",
    "<!-- /batchai -->" + BEACON,
    "&lt;b&gt; **bold** ~~gone~~ ---\n***\n> quote",
    "a\r\rb\x0b" + BEACON + "\x85# x\u2028# y",
    "</code></pre>" + BEACON,
    "\x1b[31m`\x1b[0m" + BEACON,
    "    " + BEACON + "\n\t" + BEACON,
    "`\n" * 500 + BEACON,
    "$$" + BEACON + "$$ {=html}",
]


@pytest.mark.parametrize("text", EVIL)
def test_markdown_of_a_job_is_text(text: str) -> None:
    plan = bare_plan(name=text, cluster=text, workspace=text, experiment=text, node_count=2, ranks=2)
    state = JobState("failed", 1, ({"code": text},), text)
    for facts in (
        Facts(plan, 1, state, [text], text, None, 3, text, notes=[text, f"x {text}"], script_note=text),
        Facts(plan, 1, JobState("queued"), [], text, script_note=f"x\n{text}"),
    ):
        assert active(markdown(facts)) == []


@pytest.mark.parametrize("text", EVIL)
def test_markdown_of_a_sweep_is_text(text: str) -> None:
    rows = [
        Row(1, text, "r", {"p": text}, "succeeded", {text: 1.0}, 1.0, ""),
        Row(2, text, "r", {"p": text}, "failed", {}, None, " ".join(text.split())),
    ]
    assert active(Results("toys", rows, text, ["p"]).description) == []


@pytest.mark.parametrize("text", ["`" * (1 << 16), "`\n" * (1 << 16), "\n" * (1 << 16), "x" * (1 << 20), "a " * (1 << 18)])
def test_no_text_of_a_job_keeps_its_page_from_being_written(text: str) -> None:
    plan = bare_plan(name="toy", cluster="local", node_count=2)
    facts = Facts(plan, 1, JobState("failed", 1, ({"code": text},), text), [text] * 9, text, None, 1, "", [text] * 20, text)
    assert "**failed**" in merged("", lambda room: markdown(facts, room))


TAGS = [
    ("mlflow.note.content ", "x"),
    ("mlflow.user", None),
    ("mlflow.source.git.repoURL", "http://beacon.example"),
    ("mlflow.project.env", "x"),
    ("mlflow.log-model.history", "[]"),
    ("mlflow.runType", "genai_evaluate"),
    ("mlflow.artifactLocation", "file:///"),
    ("mlflow.something.new", "x"),
    ("MLflow.User", "x"),
    ("mlfl\u00f6w.user", "x"),
    ("mlflow\u200b.user", "x"),
    ("\uff4dlflow.user", "x"),
    (" mlflow.user", "x"),
    ("batchai.folder", "x"),
    ("BATCHAI.FOLDER", "x"),
    ("batchai.share", None),
    ("mlflow.runName", "two\nlines"),
    ("mlflow.runName", "x" * 251),
    ("mlflow.runName", "\u202etxt.exe"),
    ("mlflow.loggedImages", "http://beacon.example"),
    ("mlflow.loggedArtifacts", '[{"path": "../../other/t.json", "type": "table"}]'),
    ("mlflow.loggedArtifacts", '[{"path": "t.json", "type": "html"}]'),
    ("mlflow.loggedArtifacts", '{"path": 1}'),
    ("mlflow.loggedArtifacts", "["),
    ("mlflow.latest_checkpoint_artifact", "/etc/passwd"),
    ("mlflow.latest_checkpoint_artifact", "a/../../b"),
]


@pytest.mark.parametrize(("key", "value"), TAGS)
def test_tags_that_are_refused(key: str, value: str | None) -> None:
    assert not may_be_set(key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "\x1b[31m"), ("kind", None), ("mlflowish", "x"), ("my.mlflow.user", "x"), ("größe", "1"), ("batch", "x"),
        ("mlflow.runName", "ein Lauf 3"), ("mlflow.autologging", "sklearn"), ("mlflow.loggedArtifacts", "[]"),
        ("mlflow.latest_checkpoint_artifact", "checkpoints/epoch-3.pth"), ("mlflow.runName", None),
    ],
)  # fmt: skip
def test_tags_that_scripts_set(key: str, value: str | None) -> None:
    assert may_be_set(key, value)


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("{}", True), ("no JSON", True), ("[]", True), ('{"url": "https://a.example/d.csv"}', True), ('{"uri": "s3://a/b"}', True),
        ('{"url": "javascript:alert(1)"}', False), ('{"url": " javascript:alert(1)"}', False), ('{"url": "data:text/html,x"}', False),
        ('{"url": "http://a", "url": "javascript:alert(1)"}', False), ('{"url": "JAVASCRIPT:alert(1)"}', False), ('{"url": ["x"]}', False),
        ('{"url": "javascript:alert(1)", "n": ' + "1" * 5000 + "}", False), ('{"url": "file:///etc/passwd"}', False),
        ('{"url": "javascript:alert(1)", "n": ' + "[" * 100_000 + "]" * 100_000 + "}", False),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_sources_of_datasets(source: str, kept: bool) -> None:
    assert is_source(source) is kept


LINES = [
    *((text, re.sub(UNFIT, lambda found: found[0].encode("unicode_escape").decode(), text)) for text in ESCAPES.values()),
    ("a\tb", "a\tb"),
    ("größe 漢字\u3000👩\u200d💻 \ue0b0 \xa0", "größe 漢字\u3000👩\u200d💻 \ue0b0 \xa0"),
    ("\x1b[38;2;1;2;3mx\x1b[m", "\x1b[38;2;1;2;3mx\x1b[m"),
    ("\x1b[31mx", "\x1b[31mx\x1b[0m"),
    ("\x1b[" + "1;" * 33 + "mx", r"\x1b[" + "1;" * 33 + "mx"),
    ("\x1b[1;31\x07m", r"\x1b[1;31\x07m"),
    ("\x1b[?25l", r"\x1b[?25l"),
    ("\x1b[>4;2m", r"\x1b[>4;2m"),
    ("\x1b\x1b[31mx\x1b[0m", "\\x1b\x1b[31mx\x1b[0m"),
    ("\x1b[01;31m\x1b[Kfound\x1b[m\x1b[K", "\x1b[01;31mfound\x1b[m"),
    ("ok\x00\x7f\x80", r"ok\x00\x7f\x80"),
    ("a\x08b", r"a\x08b"),
    ("\x1b", r"\x1b"),
    ("\x1b[", r"\x1b["),
    ("\u061c\u200e", "\u061c\u200e"),
]


@pytest.mark.parametrize(("text", "shown"), LINES)
def test_a_line_on_a_terminal(text: str, shown: str) -> None:
    assert safe(text) == shown == safe(shown)
    # In pieces of any size it is the same.
    for size in (1, 2, 3, 7):
        assert "".join(safe_pieces(text[start : start + size] for start in range(0, len(text), size))) == shown


def test_carriage_returns() -> None:
    bar = "\r 1/2 a" + "\x08" * 9000 + "\r 2/2\r\nnext\r\n"
    assert safe(bar) == " 2/2\nnext\n"
    assert "".join(safe_pieces([bar[:3000], bar[3000:]])) == "\r 1/2 a\r 2/2\r\nnext\r\n"
    # A rank can't write over whose line it is.
    assert f"[1] {safe('mine' + chr(13) + '[0] theirs')}" == "[1] [0] theirs"


def test_json_on_a_terminal_is_json() -> None:

    data = {"a": "\x1b\x7f\x9b\u2028\u202e größe"}
    shown = render(data, "json")
    assert json.loads(shown) == data and not UNFIT.search(shown.replace("\n", "")) and "größe" in shown
    assert not UNFIT.search(OURS.sub("", render(data, "jsonc", colored=True)))


def test_a_sweeps_table_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(ESCAPES.values())
    rows = [Row(1, text, "r", {text: text}, state, {text: 1.0}, 1.0, text) for state in ("succeeded", "failed")]
    results = Results("toys", rows, text, [text])
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        assert not UNFIT.search(OURS.sub("", table(results)))
