"""What a running job asks of its share: how soon a rank's line is on the submitting terminal, and how many requests that takes.

    python benchmarks/share_job.py [--nodes 2] [--seconds 20] [--settle 40] [--idle 20] [--round-trip 20]

The same job on the local cluster, whose nodes use the control share as a directory, by an endpoint of this machine (REST from
agents and client), and by that endpoint with a round trip before every answer. Beside it stands the least that a reader
of the same share could do: a bare SDK client that lists one folder every second.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from azure_server import AzureServer

RANK = """
import os, sys, time
until = time.time() + SECONDS
while time.time() < until:
    print("line", repr(time.time()), flush=True)
    time.sleep(0.2)
print("idle", flush=True)
time.sleep(IDLE + 60)
"""
# Which client a request came from, by its User-Agent.
CLIENTS = (("rclone", "mounts"), ("azsdk", "client"), ("", "agents"))


class Job:
    """One ``mlflow run`` of ranks that print the time, and what its terminal shows."""

    def __init__(self, scratch: Path, name: str, cluster: dict[str, object], options: argparse.Namespace) -> None:
        home, project = scratch / name, scratch / f"project-{name}"
        (home / "clusters").mkdir(parents=True)
        (home / "clusters" / "bench.yaml").write_text(json.dumps({"nodes": options.nodes, "python": sys.executable, **cluster}))
        project.mkdir()
        (project / "MLproject").write_text("name: lines\nentry_points: {main: {command: python -u rank.py}}\n")
        text = RANK.replace("SECONDS", str(options.seconds)).replace("IDLE", str(options.idle + options.settle))
        (project / "rank.py").write_text(text)
        properties = {"nodeCount": options.nodes, "horovodSettings": {}}
        (project / "batchai.yaml").write_text(json.dumps({"cluster": "bench", "properties": properties}))
        self.delays: list[float] = []
        self.idle = threading.Event()
        self._said: list[str] = []
        self._left = options.nodes
        self._process = subprocess.Popen(
            [str(Path(sys.executable).parent / "mlflow"), "run", str(project), "--backend", "batchai"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=scratch,
            env={
                **os.environ,
                "BATCHAI_HOME": str(home),
                "MLFLOW_TRACKING_URI": f"sqlite:///{scratch}/mlflow.db",
                "PYTHONUNBUFFERED": "1",
            },
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            words = line.split()
            if "line" in words[:2]:
                self.delays.append(time.time() - float(words[-1]))
            elif "idle" in words[:2]:
                self._left -= 1
            else:
                self._said.append(line)
            if not self._left:
                self.idle.set()

    def wait_idle(self, seconds: float) -> None:
        """Until all ranks have said their last line."""
        until = time.monotonic() + seconds
        while not self.idle.wait(0.2):
            if self._process.poll() is not None or time.monotonic() > until:
                self.end()
                sys.exit("the job did not come to its end:\n" + "".join(self._said[-20:]))

    def end(self) -> None:
        """Ctrl-C."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(90)
        except subprocess.TimeoutExpired:
            self._process.kill()


def told(server: AzureServer, seconds: float) -> str:
    """Requests a second since the last reset, all and by who asks."""
    counts = collections.Counter(
        next(name for mark, name in CLIENTS if mark in request.agent.lower()) for request in server.requests()
    )
    each = ", ".join(f"{name} {count / seconds:.2f}" for name, count in sorted(counts.items()))
    return f"{sum(counts.values()) / seconds:.2f} ({each})"


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of them lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(
    scratch: Path, name: str, cluster: dict[str, object], server: AzureServer | None, options: argparse.Namespace
) -> None:
    """Run one job and print its rows."""
    if server:
        server.reset()
    begun = time.monotonic()
    job = Job(scratch, name, cluster, options)
    job.wait_idle(options.seconds + 90)
    busy = time.monotonic() - begun
    row = f"{name}: a rank's line on the terminal after (s), p50 and p95 of {len(job.delays)}"
    print(f"{row}: {statistics.median(job.delays):.2f} and {percentile(job.delays, 0.95):.2f}")
    if server:
        print(f"{name}: requests a second from Enter to the last line: {told(server, busy)}")
        time.sleep(options.settle)
        server.reset()
        time.sleep(options.idle)
        print(f"{name}: requests a second of the idle job: {told(server, options.idle)}")
    job.end()


def bare_reader(server: AzureServer, share: str, seconds: float) -> None:
    """What one bare SDK client asks for that lists a folder every second."""
    from azure.storage.fileshare import ShareClient

    client = ShareClient(server.endpoint, share, credential=server.key)
    server.reset()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        list(client.list_directories_and_files())
        time.sleep(1.0)
    print(f"bare SDK, one folder listed every second: requests a second: {told(server, seconds)}")


def main() -> None:
    """Measure each kind of share in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=40.0, help="seconds until a job counts as idle")
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--round-trip", type=float, default=20.0, help="milliseconds; 0: without that")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="share-job-") as place, AzureServer(Path(place)) as server:
        scratch = Path(place)
        os.environ.update(AZURE_BATCHAI_STORAGE_ACCOUNT=server.account, AZURE_BATCHAI_STORAGE_KEY=server.key)
        os.environ["AZURE_STORAGE_CONNECTION_STRING"] = f"AccountName={server.account};FileEndpoint={server.endpoint}"
        print(f"{options.nodes} nodes with a rank each on {os.cpu_count()} cores, a line every 0.2 s\n")
        measure(scratch, "directory", {}, None, options)
        away = [(f"REST, {options.round_trip:.0f} ms away", options.round_trip / 1000)] if options.round_trip else []
        for name, latency in (("REST", 0.0), *away):
            share = f"bench{int(latency * 1000)}"
            server.share(share)
            server.latency(latency)
            measure(scratch, name, {"share": server.url(share)}, server, options)
        server.latency(0.0)
        bare_reader(server, "bench0", min(10.0, options.idle))


if __name__ == "__main__":
    main()
