"""Lack of memory, from the kernel's counters: contents of its files as machines have them, and the sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflow_batchai.agent.processes import memory, proc
from mlflow_batchai.agent.processes.memory import Counters, Group

VMSTAT = "nr_free_pages 123456\npgfault 9876543\noom_kill {}\ndrop_pagecache 0\n"
EVENTS = "low 0\nhigh 0\nmax 712\noom {0}\noom_kill {0}\noom_group_kill 0\n"  # version 2, Linux 6.1
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"  # version 1
GIB = 1 << 30


def machine(root: Path, kills: int, version: int = 2, limit: str = "67108864\n") -> None:
    """Write the kernel's files below a folder; the process is in the group /user/job."""
    (root / "proc" / "7").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "vmstat").write_text(VMSTAT.format(kills))
    line = "0::/user/job\n" if version == 2 else "5:devices:/x\n4:cpu,memory:/user/job\n0::/\n"
    (root / "proc" / "7" / "cgroup").write_text(line)
    group = root / "groups" / ("" if version == 2 else "memory") / "user" / "job"
    group.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (group / "memory.events").write_text(EVENTS.format(kills))
        (group / "memory.max").write_text(limit)
    else:
        (group / "memory.oom_control").write_text(CONTROL.format(kills))
        (group / "memory.failcnt").write_text(f"{40 * kills}\n")
        (group / "memory.limit_in_bytes").write_text(limit)


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = proc.kernel_text
    monkeypatch.setattr(memory, "GROUPS", str(tmp_path / "groups"))
    monkeypatch.setattr(proc, "kernel_text", lambda path: real(path.replace("/proc/", f"{tmp_path}/proc/", 1)))
    return lambda: memory.counters(7)


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_that_was_reached_is_named(look, tmp_path, version):
    machine(tmp_path, 2, version)
    before = look()
    assert memory.ran_out(before, look()) is None
    machine(tmp_path, 3, version)
    assert memory.ran_out(before, look(), 8 * GIB).startswith(
        "the memory limit of its control group was reached (64 MiB); raise it"
    )


@pytest.mark.parametrize(("version", "none"), [(1, "9223372036854771712\n"), (2, "max\n")])
def test_without_a_limit_it_is_the_machine(look, tmp_path, version, none):
    machine(tmp_path, 0, version, none)
    before = look()
    machine(tmp_path, 1, version, none)
    assert memory.ran_out(before, look(), 8 * GIB).startswith("the machine ran out of memory (it has 8.0 GiB); lower the")


def test_a_limit_that_others_met_before_is_not_blamed():
    """The machine ran out of memory, in a group whose limit was never the trouble since we looked."""
    before = Counters(1, {"/g": Group(1, 5, 1 << 40)})
    now = Counters(2, {"/g": Group(2, 5, 1 << 40)})
    assert memory.ran_out(before, now).startswith("the machine ran out of memory")
