"""Rules of ``metrics`` and our own patterns: whatever a rank writes, a line costs time that grows with its length only."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from plans import bare_plan

from mlflow_batchai import terminal
from mlflow_batchai.agent import azure_errors
from mlflow_batchai.agent.plan import MetricRule
from mlflow_batchai.client import streaming
from mlflow_batchai.documents.batchai import parse_batchai
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.job import metrics
from mlflow_batchai.job.metrics import LONGEST_LINE, KerasLines, MetricFold
from mlflow_batchai.job.states import JobState
from mlflow_batchai.tracking import stores
from mlflow_batchai.tracking.description import Facts, markdown
from mlflow_batchai.tracking.script_calls import tags
from mlflow_batchai.training import model_trial

SLOW = r"^(?:\s*\w+\s*)+=(\d+)$"


def line(text: str) -> dict[str, Any]:
    return {"k": "log", "r": 0, "s": "out", "t": 1, "x": text + "\n"}


# A rule, and what a line repeats that Python's ``re`` is slow on.
BAD = [
    (SLOW, "a"),
    (r"(a+)+$", "a"),
    (r"(?:a|aa)+(\d)$", "a"),
    (r"([\w.]+)*=", "a."),
    (r"(.*)*x(\d)", "ab"),
    (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a"),
    (r"(\s*\d+\s*,?)+;", "1 "),
    (r"(?:(?:a?){20})(?:a){20}(\d)", "a"),
    (r"((a*)*)*b", "a"),
    (r"loss[^x]*[^y]*[^z]*[^w]*=(\d+)!", "loss"),
    (r"(?:\w+\s?)*: (\d+)$", "word "),
    (r"((?:[\w ]{1,300}z?)+)!", "az b"),
]


@pytest.mark.parametrize(("regex", "piece"), BAD)
def test_no_rule_is_slow(regex: str, piece: str) -> None:
    """The longest line that is looked at, and one 256 times as long, whose rest is not."""
    fold = MetricFold([MetricRule("m", regex)])
    assert fold.refused == []
    for length in (LONGEST_LINE, 256 * LONGEST_LINE):
        begun = time.process_time()
        fold.feed([line((piece * length)[:length])])
        assert time.process_time() - begun < 5, "fractions of a second; of such rules Python's own takes years"


REFUSED = [
    (r"(?=speed)(\d+)", "look-ahead"),
    (r"(?!speed)(\d+)", "look-ahead"),
    (r"(?<=speed=)(\d+)", "look-behind"),
    (r"(?<!speed=)(\d+)", "look-behind"),
    (r"(\d)=\1", "back-references"),
    (r"(?P<value>\d)=(?P=value)", "does not take"),
    (r"(?>\d+)(x)", "atomic"),
    (r"(\d++)", "possessive"),
    (r"(x)?(?(1)\d|\w)", "conditions"),
    (r"(\d+)\Z", r"\\z"),
    (r"(\d{1001})", "repetition"),
    (r"((\w{1,900}){900})", "repetition"),
    (r"(" + "|".join(rf"[\pL]{{{count}}}" for count in range(900, 1000)) + ")", "1 MiB"),
    ("(\\d+", r"missing \)"),
]


@pytest.mark.parametrize(("regex", "why"), REFUSED)
def test_rules_that_are_refused(regex: str, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In a document with a sentence; in a plan, which may have been changed since, with a note."""
    with pytest.raises(DocumentError, match=rf"batchai.yaml: metrics\[1\] \('odd'\) .*{why}"):
        parse_batchai({"metrics": [{"name": "ok", "regex": "(a)"}, {"name": "odd", "regex": regex}]}, "batchai.yaml")
    fold = MetricFold([MetricRule("odd", regex), MetricRule("ok", r"(\d+)")])
    assert re.search(rf"metrics\[0\] \('odd'\) .*{why}.*: it plays no part$", *fold.refused)
    assert [(point.key, point.value) for point in fold.feed([line("7")])] == [("ok", 7.0)]
    assert capfd.readouterr() == ("", ""), "RE2 itself says nothing"


@pytest.mark.parametrize("rule", [MetricRule("a", "(a)", "none"), MetricRule("a", "a"), MetricRule("a", "(\udc80)")], ids=str)
def test_a_plans_rule_that_is_none_is_a_note(rule: MetricRule) -> None:
    fold = MetricFold([rule, MetricRule("ok", r"(\d+)")])
    assert len(fold.refused) == 1 and "metrics[0]" in fold.refused[0]
    assert [(point.key, point.value) for point in fold.feed([line("7")])] == [("ok", 7.0)]


@pytest.mark.parametrize(
    ("regex", "text", "value"),
    [
        (r"größe (?P<value>\d+)", "größe 3", 3.0),
        (r"loss=(\S+)$", "loss=0.5", 0.5),
        (r"(?P<value>\d+)\z", "a 7", 7.0),
        (r"(?i)LOSS (\d+)", "loss 4", 4.0),
        (r"\bloss\b.*?([\d.]+)", "\x1b[31mloss\x1b[0m 0.25", 0.25),
        (r"([\d.]+)$", "\udcff 5", 5.0),
    ],
)
def test_what_rules_find(regex: str, text: str, value: float) -> None:
    fold = MetricFold([MetricRule("m", regex)])
    assert [point.value for point in fold.feed([line(text)])] == [value]


def test_re2_is_imported_for_rules_only() -> None:
    code = "import sys; from mlflow_batchai.job.metrics import MetricFold; MetricFold([]); print('re2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# --- our own patterns ------------------------------------------------------------------------------------------------


def _keras(text: str) -> None:
    lines = KerasLines()
    lines.feed("Epoch 1/5", 1)
    lines.feed(text, 2)
    lines.feed("1/1 - " + text, 3)


def _fold(text: str) -> None:
    MetricFold([MetricRule("m", r"loss=(\d+)")]).feed([line("Epoch 1/5"), line(text)])


def _described(text: str) -> None:
    plan = bare_plan(name="toy", cluster="local")
    markdown(Facts(plan, 1, JobState("failed", 1, (), text), [text], notes=[text], script_note=text[:20_000]))


def _error(text: str) -> None:
    stores.sentence(ValueError(text))
    azure_errors.explain(text, "share", "host", "sig")
    model_trial.why_not(ValueError(text))


def _read(name: str) -> Callable[[str], object]:
    def read(text: str) -> object:
        readers: dict[str, Callable[[str], object]] = {
            "safe": terminal.safe,
            "safe pieces": lambda text: list(terminal.safe_pieces(text[at : at + 65536] for at in range(0, len(text), 65536))),
            "printable": terminal.printable,
            "as_shown": metrics.as_shown,
            "metric_key": metrics.metric_key,
            "lines": lambda text: list(streaming.lines(iter([text]))),
            "tag": lambda text: tags.may_be_set(text, text),
            "table": lambda text: tags.may_be_set("mlflow.loggedArtifacts", text),
        }
        return readers[name](text)

    return read


READERS: dict[str, Callable[[str], object]] = {
    "keras": _keras,
    "fold": _fold,
    "description": _described,
    "error": _error,
    **{name: _read(name) for name in ("safe", "safe pieces", "printable", "as_shown", "metric_key", "lines")},
    **{name: _read(name) for name in ("tag", "table")},
}
PIECES = [
    " ", "1", "a", "\x1b", "\x1b[", "\x1b[1;", "\x1b]", "\x1b]0;", "\x08", "\r", "\t", "`", "\n", ": ", " - ", " - a: 1", "1/1 ", "0.", "e-",
    "Unknown a ", "[Errno 1] ", "0x1f", "<!--", "[", "a=1,", "!=", "\u202e", "ö", "\\",
]  # fmt: skip
SMALL, LARGE = 1 << 12, 1 << 18


def _cost(read: Callable[[str], object], text: str) -> float:
    begun = time.process_time()
    read(text)
    return time.process_time() - begun


@pytest.mark.parametrize("reader", READERS)
def test_our_own_patterns_are_linear(reader: str) -> None:
    """A line 64 times as long costs 64 times as much; what is quadratic costs 4096 times, or more than a second already."""
    read = READERS[reader]
    slow = {}
    for piece in PIECES:
        small, large = ((piece * length)[:length] for length in (SMALL, LARGE))
        # What costs less than the clock shows counts as a millisecond.
        before = max(_cost(read, small), 1e-3)
        if (after := _cost(read, large)) > 400 * before:
            slow[piece] = (before, after)
    assert slow == {}
