"""What a job costs over bare ``horovodrun``: the same script both ways, in turn, in one sitting.

    python benchmarks/overhead.py [--pairs 3] [--epochs 20] [--probe FOLDER]

Each round runs bare, ours, bare. Ratios ours/bare stand beside bare/bare: whole runs vary by a fifth on a small machine, and a
ratio inside that noise says nothing. CPU seconds and memory are read from /proc, from the start of each process to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PROBE = Path(__file__).parent / "probe"
BIN = Path(sys.executable).parent
CLIENT = "from mlflow.tracking import MlflowClient; MlflowClient({uri!r}).search_experiments()"


RANKS = 2


class Sampler(threading.Thread):
    """Watches the processes of one run: agents, follower, ranks, and the copy of rank 0 that tries the model.

    Attributes:
        cpu: role -> pid -> CPU seconds while the ranks trained.
        whole: role -> pid -> CPU seconds from its start to its end, or to ours.
        begun: CPU seconds of the follower until the ranks trained and it had relayed a first value.
        rss: role -> highest resident bytes.
        last_rank: when the last rank was seen alive, seconds since the epoch.
    """

    def __init__(self, root: Path, training: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self._root = str(root)
        self._training = training
        self._known: dict[int, tuple[str, psutil.Process]] = {}
        self._before: dict[int, float] = {}
        self.cpu: dict[str, dict[int, float]] = {"agent": {}, "follower": {}, "rank": {}, "trial": {}}
        self.whole: dict[str, dict[int, float]] = {role: {} for role in self.cpu}
        self.begun = 0.0
        self.rss = dict.fromkeys(self.cpu, 0)
        self.last_rank = 0.0
        self.stop = threading.Event()

    def _role(self, process: psutil.Process) -> str | None:
        line = process.cmdline()
        if "mlflow_batchai.follower" in line:
            # One follower may be for many jobs, which its command line doesn't name.
            known = [*line, *process.environ().values()]
            return "follower" if any(self._root in part for part in known) else None
        if not any(self._root in part for part in line):
            return None
        if "agent" in line and any(part.startswith("--node=") for part in line):
            return "agent"
        if not any(part.endswith("train.py") for part in line) or "bash" in line[0]:
            return None
        ranks = sum(role == "rank" for role, _ in self._known.values())
        return "rank" if ranks < RANKS else "trial"

    def run(self) -> None:
        scan = 0.0
        while not self.stop.wait(0.02):
            if time.monotonic() >= scan:
                scan = time.monotonic() + 0.5
                for process in psutil.process_iter():
                    if process.pid not in self._known:
                        try:
                            role = self._role(process)
                        except psutil.Error:
                            continue
                        if role:
                            self._known[process.pid] = (role, process)
                self._measure()
            if any(role == "rank" and process.is_running() and process.status() != "zombie" for role, process in self._alive()):
                self.last_rank = time.time()

    def _alive(self) -> list[tuple[str, psutil.Process]]:
        found = []
        for pid, (role, process) in list(self._known.items()):
            try:
                process.status()
                found.append((role, process))
            except psutil.NoSuchProcess:
                del self._known[pid]
        return found

    def _measure(self) -> None:
        training = self._training()
        for role, process in self._alive():
            try:
                times = process.cpu_times()
                self.rss[role] = max(self.rss[role], process.memory_info().rss)
            except psutil.Error:
                continue
            used = times.user + times.system
            self.whole[role][process.pid] = used
            if training and role == "follower":
                self.begun = self.begun or used
            if training:
                self.cpu[role][process.pid] = used - self._before.setdefault(process.pid, used)


def moments(marks: Path) -> list[dict[str, float]]:
    """What the ranks noted."""
    return [json.loads(Path(f"{marks}.{rank}").read_text()) for rank in range(RANKS)]


def bare(folder: Path, probe: Path, epochs: int, megabytes: float) -> dict[str, float]:
    """One run by horovodrun."""
    marks = folder / "marks"
    begun = time.time()
    command = [str(BIN / "horovodrun"), "-np", str(RANKS), "--gloo", sys.executable, str(probe / "train.py")]
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "2"}
    cores = str(max(1, (os.cpu_count() or 2) // 2))
    # The same threads a rank as a job gives: the launchers are compared, not thread counts.
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), cores)
    subprocess.run([*command, str(marks), str(epochs), str(megabytes)], env=environment, check=True, capture_output=True)
    ended = time.time()
    return _times(moments(marks), begun, ended)


def ours(folder: Path, probe: Path, epochs: int, megabytes: float, uri: str) -> tuple[dict[str, float], Sampler]:
    """One run by ``mlflow run`` on the local cluster."""
    marks = folder / "marks"
    sampler = Sampler(folder, lambda: _relaying(folder) and not Path(f"{marks}.0").exists())
    sampler.start()
    begun = time.time()
    command = [str(BIN / "mlflow"), "run", str(probe), "--backend", "batchai", "-P", f"marks={marks}"]
    environment = {**os.environ, "BATCHAI_HOME": str(folder / "home"), "MLFLOW_TRACKING_URI": uri}
    done = subprocess.run(
        [*command, "-P", f"epochs={epochs}", "-P", f"megabytes={megabytes}"], env=environment, capture_output=True, text=True
    )
    ended = time.time()
    sampler.stop.set()
    sampler.join()
    if done.returncode:
        sys.exit(done.stderr)
    found = _times(moments(marks), begun, ended)
    found["after_last_rank"] = ended - sampler.last_rank
    return found, sampler


def _relaying(folder: Path) -> bool:
    """Whether the follower has started (its start is one MLflow client's, told apart) and has relayed a first epoch."""
    return any('"loss"' in cursor.read_text() for cursor in folder.rglob("cursor.json"))


def _times(marks: list[dict[str, float]], begun: float, ended: float) -> dict[str, float]:
    return {
        "whole": ended - begun,
        "training": max(mark["trained"] for mark in marks) - min(mark["first_step"] for mark in marks),
        "to_first_step": min(mark["first_step"] for mark in marks) - begun,
    }


def measured(command: list[str]) -> tuple[float, float, int]:
    """(seconds, CPU seconds, peak resident bytes) of a process of its own."""
    begun = time.time()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return time.time() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--probe", type=Path, default=PROBE, help="a project whose train.py notes the same moments")
    options = parser.parse_args()
    bares: list[tuple[dict[str, float], dict[str, float]]] = []
    jobs: list[tuple[dict[str, float], Sampler]] = []
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        uri = f"sqlite:///{scratch}/mlflow.db"
        measured([sys.executable, "-c", CLIENT.format(uri=uri)])
        client = measured([sys.executable, "-c", CLIENT.format(uri=uri)])
        command_line = measured([sys.executable, "-c", "import mlflow.cli"])
        for number in range(options.pairs):
            folders = [Path(scratch) / f"{number}{name}" for name in ("first", "job", "second")]
            for folder in folders:
                folder.mkdir()
            trained = (options.probe, options.epochs, options.megabytes)
            first = bare(folders[0], *trained)
            jobs.append(ours(folders[1], *trained, uri))
            bares.append((first, bare(folders[2], *trained)))
            print(f"round {number + 1} of {options.pairs} done", file=sys.stderr)
    rounds = f"{options.pairs} rounds of bare, job, bare"
    print(f"{rounds}; {options.epochs} epochs, 2 ranks, {os.cpu_count()} cores; medians (min to max)\n")
    for key, title in (("whole", "whole run"), ("training", "training only")):
        ratios = [job[key] / statistics.mean((one[key], two[key])) for (job, _), (one, two) in zip(jobs, bares, strict=True)]
        noise = [two[key] / one[key] for one, two in bares]
        _row(f"{title}: job / bare (at most 1.1)", ratios)
        _row(f"{title}: bare / bare", noise)
    _row(
        "from Enter to the first step, job - bare (s; at most 3)",
        [
            job["to_first_step"] - statistics.mean((one["to_first_step"], two["to_first_step"]))
            for (job, _), (one, two) in zip(jobs, bares, strict=True)
        ],
    )
    print(f"  beside it: importing MLflow's own command line takes {command_line[0]:.2f} s")
    _row("from the last rank's exit to mlflow run's exit (s; at most 2)", [job["after_last_rank"] for job, _ in jobs])
    samplers = [sampler for _, sampler in jobs]
    if not all(sum(sampler.cpu["rank"].values()) for sampler in samplers):
        sys.exit("the ranks trained for less than a second or two: too short to read CPU seconds; give more --epochs")
    title = "CPU seconds of agents and follower over those of the ranks"
    _row(f"{title}, while they train (%; at most 1)", [_share(sampler.cpu) for sampler in samplers])
    _row(f"{title}, from start to end (%)", [_share(sampler.whole) for sampler in samplers])
    _row("CPU seconds of agents and follower, from start to end", [_ours(sampler.whole) for sampler in samplers])
    _row("CPU seconds of the follower's start", [sampler.begun for sampler in samplers])
    print(f"  beside it: a bare MLflow client process takes {client[1]:.2f} CPU s from start to end")
    _row("CPU seconds of the model's trial in rank 0", [sum(sampler.whole["trial"].values()) for sampler in samplers])
    _row("agent's memory (MB; at most 40)", [sampler.rss["agent"] / 1e6 for sampler in samplers])
    _row(
        "follower's memory over a bare MLflow client's (MB; at most 25)",
        [(sampler.rss["follower"] - client[2]) / 1e6 for sampler in samplers],
    )


def _ours(cpu: dict[str, dict[int, float]]) -> float:
    return sum(sum(cpu[role].values()) for role in ("agent", "follower"))


def _share(cpu: dict[str, dict[int, float]]) -> float:
    return 100 * _ours(cpu) / sum(cpu["rank"].values())


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
