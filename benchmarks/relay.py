"""How fast the relay moves points into MLflow, beside bare `log_batch`, and how soon a point that a rank reports is there.

    python benchmarks/relay.py [--points 100000] [--slices 10] [--seconds 60]

Both against one real `mlflow server` (uvicorn, one worker, sqlite). The rate: a backlog in a job folder as an agent leaves it,
read, folded and sent; beside it the same points by `MlflowClient.log_batch`, 1,000 a call. They take turns: bare, ours, bare,
slice by slice; the ratio bare/bare says how much of ours/bare is noise. The delay: a real job whose rank reports the time ten
times a second, while the store's own file is asked what it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from job_folder import JobFolder
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from mlflow_batchai.agent.transport.shipper import MAX_REPORT_BYTES
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.job.metrics import Point
from mlflow_batchai.tracking import runs, stores
from mlflow_batchai.tracking.relay import Relay

BATCH = 1000
NAMES = ("loss", "accuracy", "val_loss", "val_accuracy")
# Bytes of a record, about.
RECORD_BYTES = 130
RANK = """
import sys, time
from mlflow_batchai.training import report
until, step = time.time() + float(sys.argv[1]), 0
while time.time() < until:
    report.log(step=step, written=time.time())
    step += 1
    time.sleep(0.1)
"""


@contextlib.contextmanager
def server(scratch: Path) -> Iterator[str]:
    """The address of a real server, which is ended with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    store = ["--backend-store-uri", f"sqlite:///{scratch}/mlflow.db", "--artifacts-destination", str(scratch / "artifacts")]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *store],
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=scratch,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 180
        while not _healthy(address):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit("MLflow's server has not started")
            time.sleep(0.2)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def points(count: int) -> list[Point]:
    """So many points, four a step."""
    return [Point(name, step / count, 1_700_000_000_000 + step, step) for step in range(count // len(NAMES)) for name in NAMES]


class Bare:
    """A program that has the points and sends them."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client
        self._run_id = client.create_run("0").info.run_id

    def send(self, waiting: list[Point]) -> float:
        """Seconds that it takes."""
        begun = time.perf_counter()
        for start in range(0, len(waiting), BATCH):
            self._client.log_batch(self._run_id, metrics=[Metric(*point) for point in waiting[start : start + BATCH]])
        return time.perf_counter() - begun


class Ours:
    """A relay that finds them in a job folder."""

    def __init__(self, tracking: runs.Tracking, scratch: Path) -> None:
        self._client = stores.client_when_used(tracking)
        self._run_id = self._client.create_run("0").info.run_id
        self._made = JobFolder(scratch / self._run_id, runId=self._run_id)
        self._sequence = 0
        lease = Lease(self._made.job)
        if not lease.acquire():
            sys.exit("the lease is taken")
        self._relay = Relay(self._made.job, self._client, lease)

    def send(self, waiting: list[Point]) -> float:
        """Seconds that it takes, once an agent has written them."""
        records = []
        for step, values in itertools.groupby(waiting, lambda point: point.step):
            named = {point.key: point.value for point in values}
            body = {"type": "metric", "ts": 1_700_000_000_000 + step, "rank": 0, "step": step, "values": named}
            records.append({"k": "report", "t": body["ts"], "body": body})
        size = MAX_REPORT_BYTES // RECORD_BYTES
        for start in range(0, len(records), size):
            self._made.segment(self._sequence, *records[start : start + size])
            self._sequence += 1
        begun = time.perf_counter()
        self._relay.step()
        return time.perf_counter() - begun

    def stored(self) -> int:
        """How many points have come."""
        return sum(len(self._client.get_metric_history(self._run_id, name)) for name in NAMES)


def delays(scratch: Path, address: str, seconds: float) -> list[float]:
    """Of each point that a job's rank reports: how long until it is in the store, in seconds."""
    project = scratch / "project"
    project.mkdir()
    (project / "MLproject").write_text(f"name: points\nentry_points: {{main: {{command: python rank.py {seconds}}}}}\n")
    (project / "rank.py").write_text(RANK)
    (project / "batchai.yaml").write_text("{properties: {nodeCount: 1, horovodSettings: {}}}\n")
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "mlflow"), "run", str(project), "--backend", "batchai"],
        env={**os.environ, "MLFLOW_TRACKING_URI": address, "BATCHAI_HOME": str(scratch / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=scratch,
    )
    found: list[float] = []
    with contextlib.closing(sqlite3.connect(f"file:{scratch}/mlflow.db?mode=ro", uri=True, timeout=20)) as store:
        seen = -1
        while process.poll() is None:
            rows = store.execute("SELECT step, value FROM metrics WHERE key = 'written' AND step > ? ORDER BY step", (seen,))
            for step, written in rows.fetchall():
                found.append(time.time() - written)
                seen = step
            time.sleep(0.02)
    said, _ = process.communicate()
    if process.returncode or not found:
        sys.exit(f"the job did not come to its end:\n{said}")
    return found


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Run the pairs and the job, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    rounds: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="relay-") as place, server(Path(place)) as address:
        scratch = Path(place)
        client = MlflowClient(address)
        before, relay, after = Bare(client), Ours(runs.absolute(address, scratch), scratch), Bare(client)
        waiting = points(options.points)
        Bare(client).send(waiting[: 2 * BATCH])
        size = len(waiting) // options.slices
        for start in range(0, len(waiting), size):
            part = waiting[start : start + size]
            rounds.append((before.send(part), relay.send(part), after.send(part)))
        if (stored := relay.stored()) != len(waiting):
            sys.exit(f"of {len(waiting)} points {stored} came")
        load = os.getloadavg()[0]
        waited = delays(scratch, address, options.seconds)
    print(
        f"{len(waiting)} points in {len(rounds)} turns of bare, ours, bare; {os.cpu_count()} cores, load {load:.1f}; medians "
        "(min to max)\n"
    )
    bare, own = [(one + two) / 2 for one, _, two in rounds], [taken for _, taken, _ in rounds]
    print(f"rate: relay / bare log_batch, all points (at least 0.90): {sum(bare) / sum(own):.2f}")
    _row("rate: relay / bare log_batch, each turn", [one / two for one, two in zip(bare, own, strict=True)])
    _row("rate: bare / bare, each turn", [two / one for one, _, two in rounds])
    print(f"relay: points a second: {len(waiting) / sum(own):.0f}")
    row = f"a reported point is in the store after (s), p50 and p95 of {len(waited)} (at most 2 at p95)"
    print(f"{row}: {statistics.median(waited):.2f} and {percentile(waited, 0.95):.2f}")


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
