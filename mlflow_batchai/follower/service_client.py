"""Find the follower process for a job among this user's on this machine, or start it, and tell it of the job.

A follower process listens on a Unix socket in ``$BATCHAI_HOME/followers``, which only this user can enter. The socket's name is
a keyed digest of all in which follower processes may differ: a job whose submitter has another store, other credentials or
another version of this package gets another process. Who starts a process makes its socket first, and need not wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlflow_batchai
from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.environment import for_agents
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.config import home
from mlflow_batchai.errors import ClusterError
from mlflow_batchai.follower import spawning
from mlflow_batchai.job import signing

# For how long a process that has no job waits for the next one; a variable says otherwise.
IDLE_SECONDS, IDLE_VARIABLE = 60.0, "BATCHAI_FOLLOWER_IDLE"
# For how long a process may take to start, and one that has started to answer: one that was stopped, or hangs, is replaced.
START_SECONDS, ANSWER_SECONDS = 60.0, 10.0
# The same where we only want to know whether it has a job.
ASK_SECONDS = 2.0
# For how long what processes have said of their jobs is good; where one of them is slow to answer, for longer.
KNOWN_SECONDS, KNOWN_TIMES = 1.0, 10
# Nobody holds the lock for longer, unless it was stopped.
LOCK_SECONDS = 90.0
LONGEST_MESSAGE = 16 << 20
BACKLOG = 512
# What a follower uses of its environment, besides what agents do that it starts on this machine.
_USED = re.compile(
    r"(?:MLFLOW|AZURE|AWS|BOTO|GOOGLE|GCLOUD|CLOUDSDK|DATABRICKS|IDENTITY|MSI|KRB5|PG|MYSQL|PYTHON|OTEL"
    r"|BATCHAI_(?:SSH|STORAGE|FOLLOWER))_?\w*|BATCHAI_HOME|(?:CURL|REQUESTS)_CA_BUNDLE|SSH_AUTH_SOCK|NETRC"
)
# What belongs to one job or one command.
_OF_A_CALL = re.compile(r"MLFLOW_(?:RUN_ID|EXPERIMENT_ID|EXPERIMENT_NAME)|BATCHAI_SECRET_.*|BATCHAI_REGISTRY_.*")
# What this package sets in its own processes: which of them starts a follower makes no difference.
_OURS = re.compile(
    r"MLFLOW_(?:SUPPRESS_PRINTING_URL_TO_STDOUT|LOGGING_LEVEL|SQLALCHEMYSTORE_MAX_OVERFLOW"
    r"|HTTP_(?:REQUEST_MAX_RETRIES|RESPECT_RETRY_AFTER_HEADER|POOL_MAXSIZE))"
)
Key = tuple[str, str]
"""A job: the address of its share, its folder there."""


class Told(NamedTuple):
    """The follower process that took a job.

    Attributes:
        pid: its process id.
        news: whether it didn't have the job yet.
    """

    pid: int
    news: bool


def folder() -> Path:
    """Where sockets and logs of follower processes lie; it is made if it isn't there."""
    found = home() / "followers"
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        found.chmod(0o700)
    except OSError as error:
        raise ClusterError(
            f"no follower can be started: {found}: {error.strerror}; set BATCHAI_HOME to another folder"
        ) from error
    return found


def follow(order: Mapping[str, Any], environment: Mapping[str, str]) -> Told:
    """Have a job followed by the process that has this environment; it is started if there is none that answers.

    Args:
        order: the job, as ``service`` takes it; it may hold secrets.
        environment: of the process.

    Raises:
        ClusterError: none can be started.
    """
    _known.clear()
    idle_seconds(environment)
    where = folder()
    environment = {name: value for name, value in environment.items() if not _OF_A_CALL.fullmatch(name)}
    path = where / _name(environment)
    try:
        with locked(path):
            with contextlib.suppress(OSError, ValueError, KeyError):
                age = time.time() - path.stat().st_ctime
                said = _ask(path, order, max(ANSWER_SECONDS, START_SECONDS - max(0.0, age)))
                return Told(int(said["pid"]), bool(said["news"]))
            _remove_dead(where)
            return Told(_start(path, order, environment), True)
    except OSError as error:
        raise ClusterError(f"no follower can be started: {path}: {error.strerror or error}") from error


def _start(path: Path, order: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        with _short(path) as address:
            listening.bind(address)
        listening.listen(BACKLOG)
        try:
            words = ["-m", "mlflow_batchai.follower", path.name, str(path.stat().st_ino)]
            pid = spawning.spawn(words, environment, path.with_suffix(".log"), listening)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        # It reads this when it has started; only an order that is longer than what the system keeps for it waits for that.
        with _connected(path, START_SECONDS) as connection:
            send(connection, order)
    return pid


def followers(key: Key) -> set[int]:
    """Process ids of this machine's follower processes that have a job."""
    # What they have said may be some seconds old.
    return {pid for pid, jobs in answers().items() if key in jobs and proc.start_time(pid) is not None}


def answers() -> dict[int, set[Key]]:
    """The jobs of each follower process of this user on this machine, as far as it answers."""
    where, now = home() / "followers", time.monotonic()
    if where in _known and now < _known[where][0]:
        return _known[where][1]
    found: dict[int, set[Key]] = {}
    for path in where.glob(_ours("*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = _ask(path, {}, ASK_SECONDS)
            found[int(said["pid"])] = {(share, name) for share, name in said["jobs"]}
    took = time.monotonic() - now
    _known[where] = (now + took + max(KNOWN_SECONDS, KNOWN_TIMES * took), found)
    return found


# Folder -> (until when that is good, what was said).
_known: dict[Path, tuple[float, dict[int, set[Key]]]] = {}


def _name(environment: Mapping[str, str]) -> str:
    """Name of the socket of the process that has this environment; it tells nothing of what stands there."""
    used = {**for_agents(environment), **{name: value for name, value in environment.items() if _USED.fullmatch(name)}}
    used = {name: value for name, value in used.items() if not _OURS.fullmatch(name)}
    content = {
        "environment": used,
        "python": sys.executable,
        "package": [mlflow_batchai.__version__, *mlflow_batchai.__path__],
        "mlflow": [_version(name) for name in ("mlflow", "mlflow-skinny")],
        "machine": proc.identity()["machine"],
    }
    return _ours(signing.mac("follower process", protocol.digest(content)).partition(":")[2][:32])


def _ours(name: str) -> str:
    """File name of a socket of this machine: a home may lie on a disk that machines share."""
    return f"{protocol.digest({'host': socket.gethostname()})[:8]}-{name}.sock"


def idle_seconds(environment: Mapping[str, str]) -> float:
    """For how long a process that has this environment waits for its next job.

    Raises:
        ClusterError: the variable is no such number.
    """
    with contextlib.suppress(ValueError):
        seconds = float(environment.get(IDLE_VARIABLE) or IDLE_SECONDS)
        if 0 <= seconds < math.inf:
            return seconds
    raise ClusterError(
        f"the environment variable {IDLE_VARIABLE} is '{environment[IDLE_VARIABLE]}'; set it to a number of seconds"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a socket: nobody else tells its process of a job, starts or ends it.

    One that was stopped while it held the lock is not waited for for ever; nor is a folder that can't be locked. What then may
    go wrong costs memory: of two processes that follow one job one lets go of it (``job.lease``).

    Yields:
        Whether it is held.
    """
    until = time.monotonic() + (LOCK_SECONDS if wait else 0)
    with path.with_suffix(".log").open("ab") as file:
        held = False
        while not held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
                time.sleep(0.02)
            except OSError:
                break
        yield held


def _remove_dead(where: Path) -> None:
    """Remove sockets of this machine that nobody listens on any more."""
    for path in where.glob(_ours("*")):
        with contextlib.suppress(OSError), locked(path, wait=False) as held:
            try:
                with _connected(path, ASK_SECONDS):
                    pass
            except ConnectionRefusedError:
                # Of one that isn't held another process may only just have made the socket.
                if held:
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The address of a socket: 108 bytes hold no long path."""
    if not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    opened = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{path.name}"
    finally:
        os.close(opened)


@contextlib.contextmanager
def _connected(path: Path, seconds: float) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        with _short(path) as address:
            connection.connect(address)
        if not is_own(connection):
            raise PermissionError(f"{path} is another user's")
        yield connection


def _ask(path: Path, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Send a message and return the answer; raises OSError or ValueError."""
    with _connected(path, seconds) as connection:
        send(connection, message)
        return receive(connection, seconds)


def is_own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message; nothing may be sent after it."""
    connection.sendall(json.dumps(message).encode())
    connection.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """The message from the other end.

    Raises:
        OSError: it doesn't come within so many seconds.
        ValueError: it is none.
    """
    until, text = time.monotonic() + seconds, b""
    while True:
        connection.settimeout(max(0.001, until - time.monotonic()))
        piece = connection.recv(1 << 16)
        if not piece:
            break
        text += piece
        if len(text) > LONGEST_MESSAGE:
            raise ValueError("the message is too long")
    message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("the message is no mapping")
    return message
