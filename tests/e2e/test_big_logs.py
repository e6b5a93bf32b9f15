"""A rank that prints a million lines and a line without end: all of it arrives, in bounded memory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

# Of what is not shared with others. MLflow with a database takes 150 MB of it, and 220 MB in all, before it has done a thing.
MOST_ANON, MOST_OF_AGENT = 200 << 10, 100 << 10

TRAIN = r"""
import os, pathlib, sys
out = sys.stdout.buffer
out.write(b"latin \xff, NUL \0, half a \xf0\x9f letter\n" + b"y" * 20_000_000 + b"\n")
for number in range(1_000_000):
    if number % 100:
        out.write(b"line %d %s\n" % (number, b"x" * 45))
    else:
        out.write(b"step %d loss 0.5\n" % number)
out.write(b"the last, without an end")
out.flush()
pid = os.getpid()
while "--node=0" not in pathlib.Path("/proc/%d/cmdline" % pid).read_text().split("\0"):
    pid = int(pathlib.Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[1])
print(pathlib.Path("/proc/%d/status" % pid).read_text(), file=sys.stderr)
"""
BATCHAI = r"""
wait: false
metrics: [{name: loss, regex: 'step (?P<step>\d+) loss (\S+)'}]
"""


def kilobytes(status: str, key: str) -> int:
    """A line of the kernel's account of a process."""
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(key + ":"))


def test_a_million_lines_and_one_without_end(world: Any) -> None:
    submitted = world.run(world.project(TRAIN, batchai=BATCHAI))
    assert submitted.returncode == 0, submitted.stderr
    follower = world.wait(world.followers)[0]
    peak, until = 0, time.monotonic() + 120
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration):  # it has gone
        while time.monotonic() < until:
            peak = max(peak, kilobytes(Path(f"/proc/{follower.pid}/status").read_text(), "RssAnon"))
            time.sleep(0.1)
    run = world.last
    assert run.info.status == "FINISHED", run.data.tags
    log = world.artifact_file("logs/stdout.txt").read_bytes()
    lines = log.split(b"\n")
    assert lines[0] == b"latin \xff, NUL \0, half a \xf0\x9f letter"
    cut = next(index for index, line in enumerate(lines) if line.startswith(b"step 0 "))
    assert b"".join(lines[1:cut]) == b"y" * 20_000_000, "a line without end comes in pieces"
    assert len(lines) - cut == 1_000_002 and lines[-2] == b"the last, without an end"
    points = world.client.get_metric_history(run.info.run_id, "loss")
    assert sorted(point.step for point in points) == list(range(0, 1_000_000, 100))
    assert "batchai.notes" not in run.data.tags
    assert kilobytes(world.artifact("logs/stderr.txt"), "VmHWM") < MOST_OF_AGENT
    assert 0 < peak < MOST_ANON
