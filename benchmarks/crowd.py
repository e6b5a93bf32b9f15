"""What a hundred jobs at once cost beside their ranks: memory and CPU time of followers and agents.

    python benchmarks/crowd.py [--jobs 100] [--bare 25] [--seconds 20]

Toy jobs of two nodes are submitted from eight processes to a local cluster of four nodes, whose first ranks wait until all are
there; then they train a second each. Every run is looked at: its own points, once. Beside it, bare MLflow client processes log
the same points each and wait; and a sweep of as many jobs runs four at a time. Memory is PSS: what processes share counts once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests")]

from crowd import NODES, STEPS, Crowd, memory_of  # noqa: E402
from seed_world import SeedWorld  # noqa: E402
from world import BIN, make_store  # noqa: E402

PROCESSES = 8
SUBMITTERS = ("crowd_submitter.py", "/batchai sweep run")
TICKS = os.sysconf("SC_CLK_TCK")
BARE = f"""
import sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
run = client.create_run("0").info.run_id
for step in range({STEPS}):
    client.log_metric(run, "loss", step, step=step)
print(flush=True)
sys.stdin.read()
client.set_terminated(run)
"""
SWEPT = f"""
import sys, time
from mlflow_batchai.training import report
for step in range({STEPS}):
    report.log(step=step, loss=float(sys.argv[1]))
    time.sleep(1 / {STEPS})
"""


class Watcher(threading.Thread):
    """Watches all processes of a world but ranks and submitting clients.

    Attributes:
        memory: megabytes at the peak.
        follower: of that the follower's.
        cpu: pid -> CPU seconds, as far as seen.
    """

    def __init__(self, world: SeedWorld) -> None:
        super().__init__(daemon=True)
        self._world = world
        self._done = threading.Event()
        self.memory = self.follower = 0.0
        self.cpu: dict[int, float] = {}

    def run(self) -> None:
        while not self._done.wait(1.0):
            self.look()

    def look(self) -> float:
        """Look once; the CPU seconds of all, from their start."""
        own = {pid: command for pid, command in self._world.alive().items() if not _is_other(pid, command)}
        used = {pid: memory_of(pid) for pid in own}
        if sum(used.values()) > self.memory:
            self.memory = sum(used.values())
            self.follower = sum(used[pid] for pid, command in own.items() if "mlflow_batchai.follower" in command)
        for pid in own:
            self.cpu[pid] = cpu_of(pid) or self.cpu.get(pid, 0.0)
        return sum(self.cpu.values())

    def stop(self) -> None:
        """End it."""
        self._done.set()
        self.join()


def _is_other(pid: int, command: str) -> bool:
    """Whether a process is a rank or a submitting client."""
    if any(word in command for word in SUBMITTERS):
        return True
    try:
        return b"\0HOROVOD_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True


def cpu_of(pid: int) -> float:
    """CPU seconds of a process; 0 of one that has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def crowd(folder: Path, store: Path, jobs: int, seconds: float) -> None:
    """Jobs from eight processes; prints its rows."""
    world = SeedWorld(folder, store)
    try:
        made = Crowd(world, min(PROCESSES, jobs), jobs, nodes=2, seconds=1.0)
        watcher = Watcher(world)
        watcher.start()
        made.submit()
        time.sleep(seconds)  # what came last settles
        before, begun = watcher.look(), time.monotonic()  # a look takes a second or two
        time.sleep(seconds)
        waiting = 100 * (watcher.look() - before) / (time.monotonic() - begun)
        begun = time.monotonic()
        made.release()
        made.wait()
        took = time.monotonic() - begun
        watcher.stop()
        _refuse(list(made.wrong()))
    finally:
        world.close()
    print(f"peak memory of all but ranks and submitting clients (MB; at most 600): {watcher.memory:.0f}")
    print(f"  of that the follower (MB): {watcher.follower:.0f}")
    print(f"their CPU time while all jobs wait (% of a core; at most 5): {waiting:.1f}")
    print(f"their CPU time from start to end, a job (s): {sum(watcher.cpu.values()) / jobs:.2f}")
    print(f"from the first rank's start to the last run's end, a job (s): {took / jobs:.2f}")


def bare(folder: Path, store: Path, count: int) -> None:
    """Bare clients beside it; prints their rows."""
    world = SeedWorld(folder, store)
    clients: list[subprocess.Popen[str]] = []
    try:
        words = [sys.executable, "-c", BARE, f"{world.uri}?timeout=120"]
        before = os.times()
        clients += [
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder) for _ in range(count)
        ]
        for client in clients:
            assert client.stdout and client.stdout.readline(), "a bare client has failed"
        memory = sum(memory_of(client.pid) for client in clients)
        for client in clients:
            client.communicate()
        cpu = sum(os.times()[2:4]) - sum(before[2:4])
    finally:
        for client in clients:
            client.kill()
            client.wait()
        world.close()
    print(f"a bare MLflow client process, of {count} (MB): {memory / count:.0f}")
    print(f"its CPU time from start to end (s): {cpu / count:.2f}")


def sweep(folder: Path, store: Path, jobs: int) -> None:
    """A sweep of as many jobs; prints its rows."""
    world = SeedWorld(folder, store)
    try:
        (world.home / "clusters" / "local.yaml").write_text(f"nodes: {NODES}\n", encoding="utf-8")
        project = world.project(SWEPT, batchai="properties: {nodeCount: 2, horovodSettings: {}}")
        (project / "MLproject").write_text(
            "name: toy\nentry_points: {main: {parameters: {value: float}, command: 'python train.py {value}'}}\n",
            encoding="utf-8",
        )
        watcher = Watcher(world)
        watcher.start()
        begun = time.monotonic()
        values = ",".join(map(str, range(jobs)))
        command = [BIN / "batchai", "sweep", "run", project, "-P", f"value={values}", "--parallel", "4"]
        process = world.launch("sweep", *command)
        world.wait(lambda: process.poll() is not None, 1800, "the sweep's end")
        took = time.monotonic() - begun
        watcher.stop()
        with contextlib.closing(sqlite3.connect(world.root / "mlflow.db")) as database:
            query = (
                "SELECT p.value, m.value, m.step FROM runs r JOIN params p USING (run_uuid) JOIN metrics m USING (run_uuid)"
                " WHERE r.status = 'FINISHED' AND p.key = 'value' AND m.key = 'loss' AND m.step >= 0"
            )
            found = sorted((float(value), loss, step) for value, loss, step in database.execute(query))
        wrong = [] if not process.returncode else [world.said("sweep")]
        if found != [(float(value), float(value), step) for value in range(jobs) for step in range(STEPS)]:
            wrong.append(f"the runs of the sweep have not the points of their jobs: {found}")
        _refuse(wrong)
    finally:
        world.close()
    print(
        f"a sweep of {jobs}, four at once: peak memory of all but ranks and the command (MB; at most 600): {watcher.memory:.0f}"
    )
    print(f"a sweep of {jobs}, four at once: from Enter to the end, a job (s): {took / jobs:.2f}")


def _refuse(wrong: Sequence[str]) -> None:
    if wrong:
        sys.exit("\n".join(wrong))


def main() -> None:
    """Run all three and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--bare", type=int, default=25, help="bare clients; each takes 150 MB")
    parser.add_argument("--seconds", type=float, default=20.0, help="for how long it is watched how all jobs wait")
    options = parser.parse_args()
    count = min(PROCESSES, options.jobs)
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{options.jobs} jobs of 2 nodes from {count} processes on {NODES} nodes; {load}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="crowd-") as scratch:
        store = make_store(Path(scratch) / "mlflow.db")
        crowd(Path(scratch) / "crowd", store, options.jobs, options.seconds)
        bare(Path(scratch) / "bare", store, options.bare)
        sweep(Path(scratch) / "sweep", store, options.jobs)


if __name__ == "__main__":
    main()
