"""The follower process: follows many jobs, each in threads of its own, until it has had none for a while.

``python -m mlflow_batchai.follower SOCKET INODE``, with the listening socket as its standard input and the tracking store in
MLFLOW_TRACKING_URI; ``service_client`` starts it. What goes wrong with one job is said in that job's log and touches no other.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mlflow_batchai.errors import BatchAIError, JobChangedError, JobNotTrustedError
from mlflow_batchai.follower import detached, service_client
from mlflow_batchai.follower.follower import follow
from mlflow_batchai.follower.service_client import Key
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.storage import open_share
from mlflow_batchai.tracking import runs, stores
from mlflow_batchai.tracking.retrying import LogThrottle

LOOK_SECONDS = 0.5
# For how long a client may take to say what it wants.
READ_SECONDS = 5.0
# Open files of a hundred jobs; processes that we start inherit it, and some close all that they might have.
MOST_FILES = 16384


@dataclass
class Followed:
    """A job that this process follows.

    Attributes:
        told: what agents of another attempt have to be told (``retries.Retries``); who tells us of the job again may add to it.
        lease: its lease, as soon as there is one.
        again: whether we were told of it since its thread began to follow it: one that leaves it just then has not seen that.
    """

    told: dict[str, Any]
    lease: Lease | None = field(default=None, init=False)
    again: bool = field(default=True, init=False)

    def add(self, told: dict[str, Any]) -> None:
        """Take what its starter has now."""
        kept = {
            key: {**self.told.get(key, {}), **told.get(key, {})} for key in {"environment", *told} & {"environment", "notify"}
        }
        self.told.update({**told, **kept})

    @property
    def hangs(self) -> bool:
        """Whether its thread makes no progress, on a share that is away, say: others may take over."""
        return self.lease is not None and self.lease.is_stale()


class Service:
    """Listens for jobs and follows them.

    Args:
        listening: the socket, bound and listening.
        path: its file.
        inode: of that file: another one means that another process was started in our place.
        idle_seconds: how long it waits for a job while it has none.
    """

    def __init__(self, listening: socket.socket, path: Path, inode: int, idle_seconds: float) -> None:
        self._listening = listening
        self._path = path
        self._inode = inode
        self._idle_seconds = idle_seconds
        self._tracking = runs.absolute(os.environ["MLFLOW_TRACKING_URI"], Path("/"))
        self._changing = threading.Lock()
        self._loaded = threading.Event()
        self._jobs: dict[Key, Followed] = {}

    def run(self) -> None:
        """Serve until there is nothing to do any more."""
        threading.Thread(target=self._load, name="load", daemon=True).start()
        busy = time.monotonic()
        while True:
            self._serve(min(LOOK_SECONDS, self._idle_seconds))
            if self._jobs:
                busy = time.monotonic()
            elif (time.monotonic() - busy >= self._idle_seconds or not self._is_ours()) and self._end():
                return

    def _load(self) -> None:
        """Import MLflow, which takes seconds, while jobs come already."""
        try:
            stores.load(self._tracking)
        finally:
            self._loaded.set()

    def _serve(self, seconds: float) -> bool:
        """Answer one client, if one comes within so many seconds; whether one came."""
        self._listening.settimeout(seconds)
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:  # no descriptor is left, say: the jobs go on
            print(f"no client can be answered: {error}", file=sys.stderr, flush=True)
            time.sleep(LOOK_SECONDS)
            return False
        # One that says nothing, goes away or asks for what can't be done gets no answer.
        with connection, contextlib.suppress(Exception):
            if service_client.is_own(connection):
                connection.settimeout(READ_SECONDS)
                message = service_client.receive(connection, READ_SECONDS)
                service_client.send(connection, self._answer(message))
        return True

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if not message:
            return {"pid": os.getpid(), "jobs": [key for key, followed in list(self._jobs.items()) if not followed.hangs]}
        return {"pid": os.getpid(), "news": self._take(message)}

    def _take(self, order: dict[str, Any]) -> bool:
        """Follow a job, unless that is done already; whether it is news."""
        key = (str(order["share"]), str(order["folder"]))
        with self._changing:
            known = self._jobs.get(key)
            if known and not known.hangs:
                known.add(order["told"])
                known.again = True
                return False
            # A thread that hangs finds that another has taken over when it goes on.
            followed = Followed(dict(known.told) if known else {})
            followed.add(order["told"])
            thread = threading.Thread(target=self._follow, args=(key, order, followed), name=f"job {order['job']}", daemon=True)
            # The system may have no more threads for us: the client gets no answer then, and starts another process.
            thread.start()
            self._jobs[key] = followed
        return True

    def _follow(self, key: Key, order: dict[str, Any], followed: Followed) -> None:
        try:
            with detached.open_log(str(order["job"])) as file:
                log = LogThrottle(file=file)
                self._loaded.wait()
                while self._is_wanted(key, followed):
                    try:
                        self._follow_job(*key, str(order["run"]), followed, file, log)
                    except BatchAIError as error:
                        log.say(str(error))
                    except Exception as error:
                        log.failed(error)
        finally:
            followed.again = False
            self._is_wanted(key, followed)

    def _is_wanted(self, key: Key, followed: Followed) -> bool:
        """Whether to follow a job, or to follow it once more; if not, it is ours no longer."""
        with self._changing:
            again, followed.again = followed.again, False
            ours = self._jobs.get(key) is followed
            if ours and not again:
                del self._jobs[key]
            return ours and again

    def _follow_job(self, share: str, folder: str, run_id: str, followed: Followed, file: TextIO, log: LogThrottle) -> None:
        try:
            job = Job(open_share(share), folder)
            job.check_trusted()
            if job.plan.run_id != run_id:
                raise JobChangedError(f"the plan of job {job.name} is another run's; nothing was read from it")
            followed.lease = Lease(job)
            follow(job, self._tracking, followed.told, followed.lease, file)
        except (JobChangedError, JobNotTrustedError) as error:
            # Who told us of it had trusted the plan: it is another one by now.
            log.say(f"{error}; the job is ended")
            detached.end_changed(self._tracking, run_id, str(error))

    def _is_ours(self) -> bool:
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def _end(self) -> bool:
        """Stop listening, unless a client has come meanwhile: who tells us of a job holds the lock."""
        with service_client.locked(self._path, wait=False) as held:
            while held and self._serve(0):
                pass
            if not held or self._jobs:
                return False
            if self._is_ours():
                self._path.unlink()
            return True


def main() -> int:
    """Entry point of the process."""
    try:
        listening = socket.socket(fileno=os.dup(0))
        name, inode = sys.argv[1:]
        path, number = service_client.folder() / name, int(inode)
    except (OSError, ValueError):
        print("this process is started by mlflow run and batchai, with a socket as its standard input", file=sys.stderr)
        return 2
    # No child may inherit the socket in place of its standard input.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Each job has files and connections of its own.
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], MOST_FILES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    stores.bound_calls()
    with listening:
        Service(listening, path, number, service_client.idle_seconds(os.environ)).run()
    return 0
