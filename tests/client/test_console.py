"""Terminal output: ranks' output on the right stream, one plain line an epoch where there is no terminal."""

from __future__ import annotations

import io

import pytest
from job_folder import line, report

from mlflow_batchai.client.console import JobConsole


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(ranks, *records, out=None, err=None):
    out, err = out or io.StringIO(), err or io.StringIO()
    console = JobConsole(ranks, out, err)
    console.records(records)
    console.close()
    return out.getvalue(), err.getvalue()


def test_ranks_and_epochs_are_told_apart():
    assert shown(1, line("a\n b\n"), line("bad\n", stream="err")) == ("a\n b\n", "bad\n")
    out, _ = shown(2, line("a\n\nb\n", rank=1), line("c\n"), line("setup\n", rank=None))
    assert out == "[1] a\n[1] \n[1] b\n[0] c\n[prep] setup\n"
    out, err = shown(1, report(0, loss=1.25), report(0, val_loss="nan"), report(1, loss=1e-9), report(1, rank=1, loss=7))
    assert (out, err) == ("", "batchai: step 0: loss 1.25  val_loss nan\nbatchai: step 1: loss 1e-09\n")


def test_an_epoch_names_all_of_its_metrics():
    values = {f"m{number}": number for number in range(8)} | {"test_loss": 0.5}
    assert shown(1, report(0, **values))[1].endswith("m7 7  test_loss 0.5\n")


def test_a_step_is_told_when_it_has_come():
    """Without a terminal: at each look, not when the next step comes."""
    err, terminal = io.StringIO(), Terminal()
    for stream in (err, terminal):
        console = JobConsole(1, io.StringIO(), stream)
        console.records([report(0, loss=1.25), report(0, val_loss=2)])
        console.tell_step()
    assert err.getvalue() == "batchai: step 0: loss 1.25  val_loss 2\n"
    assert "batchai: step 0" not in terminal.getvalue()
    console.close()


@pytest.mark.parametrize("body", [{"values": 3}, {"values": {"a": []}}, {"values": {"a": 10**400}, "step": "x"}, {}])
def test_a_report_that_is_none_stops_nothing(body):
    out, _ = shown(1, {"k": "report", "body": {"type": "metric", **body}}, line("after\n"))
    assert out == "after\n"


def test_what_the_stream_cant_say_is_escaped():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    JobConsole(1, out, io.StringIO()).records([line("h\xe9 \udcff\n")])
    assert raw.getvalue() == b"h\\xe9 \\udcff\n"


def test_on_a_terminal_progress_stays_below_and_output_goes_through():
    out, err = shown(1, report(0, loss=1), line("hello\n"), report(1, loss=2), err=Terminal())
    assert out == "hello\n"
    # Each epoch stays as a line of its own; the running one is the line at the bottom.
    assert err.count("batchai: step 0: loss 1") == 1
    assert err.count("batchai: step 1: loss 2") == 1


def test_without_colors_and_quiet(monkeypatch):
    coloured = line("\x1b[31mred\x1b[0m\n")
    assert shown(1, coloured, out=Terminal())[0] == "\x1b[31mred\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(1, coloured, out=Terminal())[0] == "red\n"
    monkeypatch.setenv("BATCHAI_QUIET", "1")
    assert shown(1, line("a\n"), report(0, loss=1), err=Terminal()) == ("a\n", "")


def test_markup_of_a_user_is_text():
    err = Terminal()
    console = JobConsole(1, io.StringIO(), err)
    console.state("[bold]not markup[/bold] [/]")
    console.close()
    assert "[bold]not markup[/bold] [/]" in err.getvalue()
