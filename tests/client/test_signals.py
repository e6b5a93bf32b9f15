"""Signals while a job is being submitted, and while it is watched."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys

import pytest

from mlflow_batchai.client.signals import Signals
from mlflow_batchai.errors import JobDetachedError


def test_ctrl_c_during_the_submit_waits_for_it_and_then_cancels(capfd):
    signals, cancelled = Signals(), []
    with signals.installed():
        os.kill(os.getpid(), signal.SIGINT)
        signals.watching()
        signals.check(lambda: cancelled.append(1))
        signals.check(lambda: cancelled.append(2))
    assert cancelled == [1]
    assert capfd.readouterr().err == "\nbatchai: the job ends as soon as it is submitted; press Ctrl-C again to undo that\n"


def test_a_second_one_undoes_the_submit():
    signals = Signals()
    with signals.installed(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_closing_terminal_during_the_submit_leaves_afterwards():
    signals = Signals()
    with signals.installed():
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(JobDetachedError, match="SIGHUP"):
            signals.check(lambda: None)


@pytest.mark.parametrize("cancels", [True, False])
def test_ctrl_c_while_watching(cancels):
    """The submitter's cancels, a second one leaves; that of ``attach`` leaves."""
    signals = Signals(cancels)
    with signals.installed():
        signals.watching()
        if cancels:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.cancelled
        with pytest.raises(JobDetachedError):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_was_told_to_leave_leaves_though_a_library_hides_it(number):
    signals = Signals(cancels=False)
    with signals.installed():
        signals.watching()
        with contextlib.suppress(Exception):  # as MLflow's stores do
            os.kill(os.getpid(), number)
        assert signals.left
        with pytest.raises(JobDetachedError, match=r"left|SIGTERM received"):
            signals.check(lambda: None)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Signals().installed():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


WATCHES = """
import time
from mlflow_batchai.client.signals import Signals
signals = Signals(asks=True)
with signals.installed():
    signals.watching()
    print("ready", flush=True)
    while not signals.cancelled:
        signals.check(lambda: None)
        time.sleep(0.02)
    print("cancelled")
"""


@pytest.mark.parametrize(("answer", "outcome"), [(b"\x03", b"cancelled"), (b"\n", b"JobDetachedError: left")])
def test_ctrl_c_at_a_terminal_asks(answer, outcome):
    """A second one ends the job; Enter leaves it, but not a line that was typed before."""
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, "-c", WATCHES])
    seen = b""
    for wanted, typed in ((b"ready", b"\n\x03"), (b"again to end the job, Enter to leave it running", answer), (outcome, b"")):
        while wanted not in seen:
            seen += os.read(terminal, 1000)
        os.write(terminal, typed)
    os.waitpid(process, 0)
    os.close(terminal)


def test_ctrl_c_without_a_terminal_does_not_ask():
    signals = Signals(asks=True)
    with signals.installed():
        signals.watching()
        os.kill(os.getpid(), signal.SIGINT)
    assert signals.cancelled
