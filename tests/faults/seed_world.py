"""One user's machine for one seed: real commands, a store, a share, and what is alive of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INJECTED = HERE / "injected"
sys.path[:0] = [str(INJECTED), str(HERE.parent)]

import strikes  # noqa: E402 (it lies where the victims find it)
from loop_disk import fill  # noqa: E402
from world import World, argv  # noqa: E402

# Goes on from its checkpoint, which is up to four steps old; what is reported again must not count. What it has reported it says
# in a file of a disk that nothing happens to.
TRAIN = """
import os, signal, time
from mlflow_batchai.training import report
rank, (job, attempt) = int(os.environ["HOROVOD_RANK"]), os.environ["BATCHAI_JOB"].split("/")
attempt = int(attempt)
checkpoint = os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/checkpoint"
first = int(open(checkpoint).read()) if os.path.exists(checkpoint) else 0
said = os.path.join({counts!r}, "%s-%d-%d" % (job, attempt, rank))
print("begun", flush=True)
for step in range(first, {steps}):
    print("step", step, flush=True)
    report.log(step=step, loss=1.0 / (step + 1) + 1000 * (attempt - 1))
    if {all_ranks}:
        report.log(step=step, all_ranks=True, speed=100.0 * rank + step)
    if {again} and step % 5 == 4:
        report.log(step=step - 1, loss=-1.0)
    with open(said, "a") as file:
        print(step, file=file)
    if rank == 0 and step % 5 == 0 and {retries}:
        with open(checkpoint + ".new", "w") as file:
            file.write(str(step))
        os.replace(checkpoint + ".new", checkpoint)
    if attempt == 1 and rank == 1 and step == {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep({pause})
print("done", flush=True)
"""


class SeedWorld(World):
    """The machine."""

    def __init__(self, root: Path, template: Path) -> None:
        super().__init__(root, template)
        self.share = self.home / "share"
        self.faults = root / "faults"
        self.counts = root / "counts"
        self.mounts: list[Path] = []
        for folder in (self.faults, self.counts, self.home / "clusters"):
            folder.mkdir(parents=True)
        (self.home / "clusters" / "local.yaml").write_text("nodes: 3\n", encoding="utf-8")
        self.environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), os.environ.get("PYTHONPATH", "")])),
            "BATCHAI_FOLLOWER_IDLE": "0.5",
            strikes.VARIABLE: str(self.faults / "faults.json"),
        }
        self.arm([])

    def arm(self, faults: list[dict[str, object]]) -> None:
        """Processes that are started from now on strike so."""
        (self.faults / "faults.json").write_text(json.dumps(faults), encoding="utf-8")

    def struck(self, number: int) -> bool:
        """Whether a fault has struck."""
        return (self.faults / f"struck-{number}").exists()

    def spared(self, number: int, victims: Sequence[str]) -> list[str]:
        """Those of a fault's victims that were not there when it struck."""
        killed = (self.faults / f"struck-{number}").read_text(encoding="utf-8").split("\n")
        return [victim for victim in victims if victim not in killed]

    def prepare(self, outage: str) -> None:
        """Have nodes and share lie where what is to be taken away can be."""
        if outage == "node disk full":
            self._mount(self.home / "nodes", "-t", "tmpfs", "-o", "size=64m", "none")
        if outage == "share unmounted":
            (self.root / "volume").mkdir()
            self._mount(self.share, "--bind", self.root / "volume")

    def _mount(self, point: Path, *what: str | Path) -> None:
        point.mkdir(exist_ok=True)
        subprocess.run(["mount", *what, point], check=True)
        self.mounts.append(point)

    def take_away(self, outage: str) -> None:
        """Begin an outage."""
        if outage == "spool removed":
            for spool in self.home.glob("nodes/local/*/jobs/*/spool"):
                shutil.rmtree(spool)
        elif outage == "logs removed":
            for folder in self.job_folders():
                shutil.rmtree(folder / "stdouterr", ignore_errors=True)  # files come while it goes
        elif outage == "node disk full":
            fill(self.home / "nodes")
        elif outage == "share unmounted":
            subprocess.run(["umount", "-l", self.mounts.pop()], check=True)
        elif outage == "run deleted":
            self._set_stage("deleted")

    def give_back(self, outage: str) -> None:
        """End it."""
        if outage == "node disk full":
            (self.home / "nodes" / "filler").unlink()
        elif outage == "share unmounted":
            self._mount(self.share, "--bind", self.root / "volume")
        elif outage == "run deleted":
            self._set_stage("active")

    def _set_stage(self, stage: str) -> None:
        """As MLflow's store does for its UI."""
        with contextlib.closing(sqlite3.connect(self.root / "mlflow.db", timeout=30)) as database, database:
            database.execute("UPDATE runs SET lifecycle_stage = ?", (stage,))

    def said(self, name: str, stream: str = "err") -> str:
        """What a command has said."""
        return (self.root / f"{name}.{stream}").read_text(encoding="utf-8")

    def said_steps(self, job: str, rank: int) -> set[int]:
        """The steps that a job's rank says it has reported, of all attempts."""
        texts = [path.read_text() for path in self.counts.glob(f"{job}-*-{rank}")]
        return {int(step) for text in texts for step in text.split()}

    def launch(self, name: str, *argv: str | Path) -> subprocess.Popen[str]:
        """Start a command; what it says goes to ``NAME.out`` and ``NAME.err``: nobody has to read a pipe."""
        with (self.root / f"{name}.out").open("w") as out, (self.root / f"{name}.err").open("w") as err:
            return self.start([str(word) for word in argv], stdout=out, stderr=err)

    def pids_of(self, role: str) -> list[int]:
        """Processes of a role (``strikes.role_of``)."""
        return list(strikes.pids_of(role, str(self.root)))

    def kill(self, roles: tuple[str, ...]) -> bool:
        """SIGKILL for every process of these roles; whether there was one of each."""
        pids = [self.pids_of(role) for role in roles]
        for pid in (pid for found in pids for pid in found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return all(pids)

    def job_folders(self) -> list[Path]:
        """Every job folder on the share that has anything in it."""
        return sorted(path.parent for path in self.share.glob("workspaces/*/experiments/*/jobs/*/*/batchai"))

    def tag(self, key: str) -> str | None:
        """A tag of the newest run, read past MLflow: importing that takes seconds."""
        query = "SELECT tags.value FROM tags JOIN runs USING (run_uuid) WHERE tags.key = ? ORDER BY start_time DESC LIMIT 1"
        with contextlib.closing(sqlite3.connect(self.root / "mlflow.db")) as database:
            found = database.execute(query, (key,)).fetchone()
        return found[0] if found else None

    def unended(self) -> list[str]:
        """The names of jobs whose runs have not ended."""
        query = (
            "SELECT value FROM runs JOIN tags USING (run_uuid) WHERE key = 'batchai.job' AND status IN ('RUNNING', 'SCHEDULED')"
        )
        while True:
            with contextlib.closing(sqlite3.connect(self.root / "mlflow.db", timeout=60)) as database:
                try:
                    return [name for (name,) in database.execute(query)]
                except sqlite3.OperationalError as error:  # the journal of a writer that was killed is just rolled back
                    if "disk I/O error" not in str(error):
                        raise
            time.sleep(0.1)

    def document(self, name: str, nodes: int) -> Path:
        """A job document for ``rank.py`` on the share."""
        settings = {"pythonScriptFilePath": "$AZ_BATCHAI_MOUNT_ROOT/share/rank.py", "processCount": nodes}
        properties = {"nodeCount": nodes, "horovodSettings": settings, "stdOutErrPathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share"}
        path = self.root / f"{name}.json"
        path.write_text(json.dumps({"properties": properties}), encoding="utf-8")
        return path

    def alive(self) -> dict[int, str]:
        """pid -> command of all that lives here."""
        return {process.pid: " ".join(argv(process))[:200] for process in self.processes()}

    def held_locks(self) -> Iterator[str]:
        """Files below the client's folder that somebody holds a lock on."""
        for path in (path for path in self.home.rglob("*") if path.is_file() and not path.is_relative_to(self.share)):
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield str(path.relative_to(self.home))

    def close(self) -> None:
        """End what is left."""
        super().close()
        while self.mounts:
            subprocess.run(["umount", "-l", self.mounts.pop()], check=True)
