"""Many jobs at once on one cluster of four nodes: submitted from several processes, some of which (and agents) are killed.

    python tests/faults/crowd.py [--processes 10] [--jobs 50] [--kills 6] [--seed 1]

``benchmarks/crowd.py`` measures what as many cost. Ranks say by themselves on which node they are and from when to when: that no node ever had two jobs is measured from inside.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

from seed_checks import LOST, closed, left_behind
from seed_world import HERE, SeedWorld
from world import BIN, make_store

NODES = 4
PATIENCE_SECONDS = 900.0
STEPS = 5
RANK = """
import os, re, time, zlib
from mlflow_batchai.training import report
share = os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share"
while not os.path.exists(share + "/go"):
    time.sleep(0.02)
node = re.search(r"/nodes/[^/]+/(\\d+)/", os.environ["AZ_BATCHAI_MOUNT_ROOT"])[1]
folder = share + "/seen"
os.makedirs(folder, exist_ok=True)
begun = time.monotonic()
with open(os.path.join(folder, "%s %s" % (os.environ["BATCHAI_JOB"].replace("/", "-"), node)), "w", buffering=1) as file:
    file.write("%r\\n" % begun)
    for step in range({steps}):
        report.log(step=step, loss=zlib.crc32(os.environ["BATCHAI_JOB"].encode()) + step)
        while time.monotonic() < begun + (step + 1) * {seconds} / {steps}:
            time.sleep(0.02)
            file.write("%r\\n" % time.monotonic())
"""


class Stay(NamedTuple):
    """A job's time on a node, by that machine's one clock."""

    begun: float
    seen: float
    reservation: int
    job: str


class Crowd:
    """One run.

    Args:
        processes: that submit at once, each a part of the jobs, one after the other.
        jobs: of all of them.
        kills: how many processes are killed while jobs are submitted and run: submitters and agents in turn.
        nodes: of each job; None: by chance.
        seconds: for how long each trains.
    """

    def __init__(
        self,
        world: SeedWorld,
        processes: int,
        jobs: int,
        kills: int = 0,
        seed: int = 1,
        nodes: int | None = None,
        seconds: float = 0.3,
    ) -> None:
        self.world = world
        self.kills = kills
        self.nodes = nodes
        self.chance = random.Random(seed)
        self.names = [[f"job-{number}" for number in range(process, jobs, processes)] for process in range(processes)]
        self.killed: list[str] = []
        # How many follower processes there were at once, and their memory (megabytes), at most.
        self.followers, self.memory = 0, 0.0
        (world.home / "clusters" / "local.yaml").write_text(f"nodes: {NODES}\n", encoding="utf-8")
        # Fifty jobs and one file: each waits for the others instead of failing.
        world.environment["MLFLOW_TRACKING_URI"] = world.uri = f"{world.uri}?timeout=120"
        # One that ends and the next one would count as two.
        world.environment["BATCHAI_FOLLOWER_IDLE"] = "10"
        world.share.mkdir()
        (world.share / "rank.py").write_text(RANK.format(steps=STEPS, seconds=seconds), encoding="utf-8")

    def run(self) -> None:
        """Submit, kill, and wait until every run has ended and nothing lives."""
        self.release()
        self.submit()
        if self.killed:
            self._attach()
        self.wait()

    def release(self) -> None:
        """Let ranks train."""
        (self.world.share / "go").touch()

    def submit(self) -> None:
        """Submit all jobs, and kill."""
        world, start = self.world, self.world.root / "start"
        processes = []
        for number, names in enumerate(self.names):
            jobs = [f"{name}={world.document(name, self.nodes or self.chance.randint(1, NODES))}" for name in names]
            words = [sys.executable, HERE / "crowd_submitter.py", world.root / f"report-{number}", start, *jobs]
            processes.append(world.launch(f"submitter-{number}", *words))
        world.wait(lambda: len(list(world.root.glob("report-*"))) == len(processes), 120, "the submitters")
        start.touch()
        self._kill(processes)
        world.wait(lambda: all(process.poll() is not None for process in processes), PATIENCE_SECONDS, "the submitters' end")

    def wait(self) -> None:
        """Wait until every run has ended and nothing lives."""
        world = self.world
        world.wait(lambda: not self._unfinished(), PATIENCE_SECONDS, "the end of all runs")
        with contextlib.suppress(AssertionError):  # told by the checks
            world.wait(lambda: not world.processes(), what="the end of all processes")

    def _kill(self, processes: list[subprocess.Popen[str]]) -> None:
        for number in range(self.kills):
            time.sleep(self.chance.uniform(0.2, 2.0))
            if number % 2:
                # No job may be left that has any, or the last one has just ended.
                with contextlib.suppress(AssertionError, IndexError, ProcessLookupError):
                    self.world.wait(self._agents, what="agents")
                    os.kill(self.chance.choice(self._agents()), signal.SIGKILL)
                    self.killed.append("agent")
            elif alive := [process for process in processes if process.poll() is None]:
                self.chance.choice(alive).kill()
                self.killed.append("submitter")

    def _agents(self) -> list[int]:
        return [pid for node in range(NODES) for pid in self.world.pids_of(f"agent-{node}")]

    def _unfinished(self) -> list[str]:
        followers = self.world.pids_of("follower")
        self.followers = max(self.followers, len(followers))
        self.memory = max(self.memory, sum(map(memory_of, followers)))
        return self.world.unended()

    def _attach(self) -> None:
        """What a person does for jobs whose submitter is gone: attach, and end those of which nothing had been started."""
        for name in self._unfinished():
            attached = self.world.launch(f"attach-{name}", BIN / "batchai", "job", "attach", name)
            self.world.wait(lambda process=attached: process.poll() is not None, PATIENCE_SECONDS, f"attach {name}")  # type: ignore[misc]
            if "has no job folder" in self.world.said(f"attach-{name}"):
                ended = self.world.launch(f"end-{name}", BIN / "batchai", "job", "terminate", name, "-y")
                self.world.wait(lambda process=ended: process.poll() is not None, what=f"terminate {name}")  # type: ignore[misc]

    def wrong(self) -> Iterator[str]:
        """Sentences on what is not as it has to be."""
        world = self.world
        yield from left_behind(world)
        if self.followers > 1:
            yield f"{self.followers} follower processes at once"
        verdicts: dict[str, Any] = {}
        reservations: dict[str, int] = {}
        marks: dict[str, str] = {}
        for folder in world.job_folders():
            plan = (closed(folder / "batchai" / "plan.json") or [{}])[0]
            attempt = folder / "batchai" / "attempts" / "1"
            verdicts[plan["name"]] = (closed(attempt / "verdict" / "verdict.json") or [None])[0]
            if handle := closed(attempt / "submitted.json"):
                reservations[plan["name"]] = handle[0]["ticket"]
            marks[f"{plan['job']}-1"] = plan["name"]
            if verdicts[plan["name"]] and verdicts[plan["name"]]["executionState"] == "succeeded":
                yield from self._wrong_metrics(plan)
        for name, verdict in verdicts.items():
            if verdict is None:
                yield f"{name} has no verdict"
            elif verdict["executionState"] != "succeeded" and not (self.killed and verdict["errors"][0]["code"] in LOST):
                yield f"{name} has {verdict['executionState']}: {verdict['reason']}"
        if not self.killed and len(verdicts) != sum(map(len, self.names)):
            yield f"{len(verdicts)} jobs of {sum(map(len, self.names))}"
        lost = sum(verdict is not None and verdict["executionState"] != "succeeded" for verdict in verdicts.values())
        if lost > len(self.killed):
            yield f"{lost} jobs have failed, and {len(self.killed)} processes were killed"
        yield from self._wrong_order(reservations)
        yield from self._wrong_stays(reservations, marks, verdicts)

    def _wrong_metrics(self, plan: dict[str, Any]) -> Iterator[str]:
        """A run has the points of its own job, once."""
        first = zlib.crc32(f"{plan['job']}/1".encode())
        with contextlib.closing(sqlite3.connect(self.world.root / "mlflow.db", timeout=60)) as store:
            query = "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = 'loss' ORDER BY step"
            found = list(store.execute(query, (plan["runId"],)))
        if found != [(step, first + step) for step in range(STEPS)]:
            yield f"the run of {plan['name']} has the points {found}, the first of which is {first}"

    def _wrong_order(self, reservations: dict[str, int]) -> Iterator[str]:
        """Reservations are in the order of the submits, as far as one was done before the other began."""
        submits = []
        for report in self.world.root.glob("report-*"):
            for line in report.read_text().splitlines():
                before, after, code, name = line.split()
                if int(code):
                    yield f"submitting {name} ended with {code}: {self.world.said(report.name.replace('report', 'submitter'))[-300:]}"
                else:
                    submits.append((float(before), float(after), name))
        for before, _, name in submits:
            for _, after, other in submits:
                if after < before and reservations[other] > reservations[name]:
                    yield f"{name} has a reservation before {other}, which had been submitted before it"

    def _wrong_stays(self, reservations: dict[str, int], marks: dict[str, str], verdicts: dict[str, Any]) -> Iterator[str]:
        stays: dict[str, list[Stay]] = defaultdict(list)
        for path in (self.world.share / "seen").glob("*"):
            mark, _, node = path.name.partition(" ")
            times = [float(line) for line in re.findall(r"(.+)\n", path.read_text())]
            # Of one whose submitter died first the reservation is known to the book only, which has forgotten it.
            if times:
                stays[node].append(Stay(times[0], times[-1], reservations.get(marks[mark], 0), marks[mark]))
        for node, found in sorted(stays.items()):
            found.sort()
            for earlier, later in zip(found, found[1:], strict=False):
                if later.begun < earlier.seen:
                    yield f"node {node} had {earlier.job} and {later.job} at once, for {earlier.seen - later.begun:.3f} s"
                if 0 < later.reservation < earlier.reservation:
                    yield f"node {node}: {later.job} ran after {earlier.job}, which came later"
        succeeded = [name for name, verdict in verdicts.items() if verdict and verdict["executionState"] == "succeeded"]
        seen = {stay.job for found in stays.values() for stay in found}
        if lacking := sorted(set(succeeded) - seen):
            yield f"nobody has seen {lacking}"


def memory_of(pid: int) -> float:
    """Megabytes of a process, its part of what it shares with others included (PSS); 0 of one that has gone."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    except OSError:
        return 0.0
    return int(found[1]) * 1024 / 1e6 if found else 0.0


def run_crowd(folder: Path, store: Path, processes: int, jobs: int, kills: int = 0, seed: int = 1) -> tuple[list[str], str]:
    """What was wrong, and a line on the run."""
    begun = time.monotonic()
    world = SeedWorld(folder, store)
    try:
        crowd = Crowd(world, processes, jobs, kills, seed)
        try:
            crowd.run()
            troubles = list(crowd.wrong())
        except AssertionError as error:
            troubles = [str(error), *(f"alive: {command}" for command in world.alive().values())]
        killed = f"{crowd.killed.count('submitter')} submitters and {crowd.killed.count('agent')} agents killed"
        how = "failed" if troubles else "passed"
        seconds = time.monotonic() - begun
        return (
            troubles,
            f"{jobs} jobs from {processes} processes on {NODES} nodes, {killed}: {how}, {seconds:.0f} s;"
            f" {crowd.followers} follower process(es) of {crowd.memory:.0f} MB",
        )
    finally:
        world.close()


def main() -> int:
    """The command; exit code 1 if something was wrong."""
    parser = argparse.ArgumentParser(description="Many jobs at once on one cluster of four nodes.")
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--kills", type=int, default=0, help="submitters and agents that are killed, in turn")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = Path(mkdtemp(prefix="batchai-crowd-"))
    store = make_store(folder / "mlflow.db")
    troubles, line = run_crowd(folder / "world", store, options.processes, options.jobs, options.kills, options.seed)
    print(line)
    for trouble in troubles:
        print(f"    {trouble}")
    if troubles:
        print(f"    kept: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
