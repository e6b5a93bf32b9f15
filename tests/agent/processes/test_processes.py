"""Processes of a job are found whatever they did to hide, and ended; each test ends what it has started."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.protocol import MARK_VARIABLE, NODE_VARIABLE


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A mark of this test alone; what carries it is ended."""
    value = f"{tmp_path.name}-{os.getpid()}/1"
    yield value
    wait_for(lambda: not proc.sweep(lambda: proc.marked(value), grace=0.0, give_up=5.0))


@pytest.fixture
def run(mark: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str, node: int = 0, **environment: str) -> subprocess.Popen[str]:
        variables = {"PATH": os.environ["PATH"], MARK_VARIABLE: mark, NODE_VARIABLE: str(node), **environment}
        started.append(subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def lines(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout
    return [int(process.stdout.readline()) for _ in range(count)]


# A child in a session of its own, a double-forked daemon whose parent is gone, and one with everything closed.
HIDERS = """
(setsid bash -c 'echo $$; exec sleep 600' &)
( ( (bash -c 'echo $$; exec sleep 600' 0<&- 2>&-) & ) & )
echo $$
exec sleep 600
"""


def test_marked_finds_all_that_hide(run: Callable[..., subprocess.Popen[str]], mark: str) -> None:
    process = run("bash", "-c", HIDERS)
    pids = set(lines(process, 3))
    wait_for(lambda: proc.marked(mark) == pids)
    assert process.pid in pids
    other = run("sleep", "600", node=11).pid
    wait_for(lambda: other in proc.marked(mark))
    assert (proc.marked(mark, 0), proc.marked(mark, 1), proc.marked(mark, 11)) == (pids, set(), {other})
    assert proc.marked(mark[:-2]) == proc.marked(mark + "0") == set()


def test_a_zombie_is_gone(run: Callable[..., subprocess.Popen[str]], mark: str) -> None:
    process = run("true")
    started = wait_for(lambda: proc.start_time(process.pid) is None)
    assert started
    assert os.path.exists(f"/proc/{process.pid}")
    assert process.pid not in proc.marked(mark) | proc.descendants(os.getpid())
    process.wait()
    assert proc.start_time(process.pid) is None


def test_names_with_brackets_don_t_confuse_us(tmp_path: Path) -> None:
    program = tmp_path / "a) Z (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "600"])
    try:
        wait_for(lambda: process.pid in proc.descendants(os.getpid()))
        assert proc.start_time(process.pid)
    finally:
        process.kill()
        process.wait()


SUBREAPER = """
import os, subprocess, sys, time
from mlflow_batchai.agent.processes import proc
assert proc.become_subreaper()
subprocess.Popen(["bash", "-c", "(setsid env -i sleep 600 &) ; exit 3"])
time.sleep(0.3)
status = proc.reap()
print([os.WEXITSTATUS(value) for value in status.values()], proc.reap())
found = proc.descendants(os.getpid())
print(len(found))
print(proc.sweep(lambda: proc.descendants(os.getpid()), grace=1.0))
print([os.WTERMSIG(value) for value in proc.reap().values()], os.path.exists("/proc/%d" % found.pop()))
"""


def test_orphans_come_back_to_the_subreaper() -> None:
    """Even one with an empty environment, in a session of its own, whose parent is gone."""
    done = subprocess.run([sys.executable, "-c", SUBREAPER], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[3] {}", "1", "set()", f"[{int(signal.SIGTERM)}] False"]


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from mlflow_batchai.agent.processes.proc import as_child\n"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=as_child(0o077), start_new_session=True)\n"
        "print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    assert proc.start_time(child)
    parent.kill()
    parent.communicate()
    wait_for(lambda: proc.start_time(child) is None)


def test_sweep_kills_what_ignores_it(run: Callable[..., subprocess.Popen[str]], mark: str) -> None:
    stubborn = run("bash", "-c", "trap '' TERM; echo 1; while true; do sleep 0.05; done")
    stopped = run("bash", "-c", "echo 1; kill -STOP $$")
    lines(stubborn, 1)
    wait_for(lambda: b") T " in Path(f"/proc/{stopped.pid}/stat").read_bytes())
    assert proc.sweep(lambda: proc.marked(mark), grace=0.3) == set()
    assert (stubborn.wait(), stopped.wait()) == (-signal.SIGKILL, -signal.SIGKILL)


def test_sweep_ends_what_forks_without_end(run: Callable[..., subprocess.Popen[str]], mark: str) -> None:
    process = run("bash", "-c", "trap '' TERM; echo 1; while true; do (sleep 600 &); sleep 0.005; done")
    lines(process, 1)
    assert proc.sweep(lambda: proc.marked(mark), grace=0.2, give_up=60.0) == set()


@pytest.mark.parametrize(
    ("seconds", "terminated", "over"),
    [
        (math.inf, 20.0, 50.0),
        (12.0, 10.0, 12.0),  # some are left for SIGKILL
        (1.0, 0.0, 1.0),
        (0.0, 0.0, 0.0),  # one SIGKILL all the same
    ],
)
def test_sweep_takes_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, seconds: float, terminated: float, over: float
) -> None:
    """Even if that is known only when it has begun."""
    moment, sent = [0.0], dict[int, float]()
    monkeypatch.setattr(proc, "send", lambda pids, number: sent.setdefault(number, moment[0]))

    def sleep(pause: float) -> None:
        moment[0] += pause

    def rest() -> float:
        return seconds - moment[0] if moment[0] >= min(5.0, seconds / 2) else math.inf

    assert proc.sweep(lambda: {1}, 20.0, sleep, lambda: moment[0], rest=rest) == {1}
    assert sent[signal.SIGKILL] == pytest.approx(terminated, abs=0.6)
    assert moment[0] == pytest.approx(over, abs=0.2)


def test_the_command_sweeps_one_node(
    run: Callable[..., subprocess.Popen[str]], mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run("sleep", "600", node=0), run("sleep", "600", node=1)
    wait_for(lambda: len(proc.marked(mark)) == 2)
    assert proc.main([mark, "1"]) == 0
    assert second.wait() == -signal.SIGTERM
    assert proc.marked(mark) == {first.pid}
    assert proc.main([mark]) == 0
    assert capsys.readouterr().out == "\n\n"


def test_what_starts_another_program_all_the_time_is_found(run, mark, tmp_path):
    """Between an exec and its end a process shows no environment."""
    again = tmp_path / "again.sh"
    again.write_text('#!/bin/sh\nexec /bin/sh "$0"\n')
    process = run("/bin/sh", str(again))
    wait_for(lambda: process.pid in proc.marked(mark))
    assert [process.pid in proc.marked(mark) for _ in range(150)] == [True] * 150


# Its main thread has ended, another has not.
HEADLESS = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print(os.getpid(), flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_alone_has_ended_still_runs(run: Callable[..., subprocess.Popen[str]]) -> None:
    process = run(sys.executable, "-c", HEADLESS)
    (pid,) = lines(process, 1)
    stat = Path(f"/proc/{pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    started = proc.start_time(pid)
    assert started is not None and proc.is_alive(pid, started)
    assert pid in proc.descendants(os.getpid())

    assert not proc.sweep(lambda: {pid} & proc.descendants(os.getpid()), grace=0.0, give_up=10.0)
    assert proc.start_time(pid) is None  # a zombie, which nobody has waited for yet
    assert process.wait(60) == -signal.SIGKILL
