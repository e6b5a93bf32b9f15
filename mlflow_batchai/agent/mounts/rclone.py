"""Mount a file share or blob container over HTTPS by rclone and FUSE, as a helper process of the agent.

Why these flags: appending and renaming have to work for user code, a file that was closed has to be on the share soon, and one
that another node closed has to be seen soon (measured; docs/azure_files.md).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from mlflow_batchai.agent import azure_errors
from mlflow_batchai.agent.mounts import mountpoints, tools
from mlflow_batchai.agent.mounts.mount import Mount
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.processes.tasks import Task
from mlflow_batchai.agent.runtime import Runtime

REMOTE = "batchai"
SOCKET = "rc"
CONNECT_SECONDS = 5.0
# A name service that is asked by all nodes at once says now and then that it has no time.
AGAIN_SECONDS = 2.0
STOP_SECONDS = 3.0
# One that waits for a disk can't be killed.
KILL_SECONDS = 5.0
RETRY_SECONDS = 2.0
LAST_ERRORS = 6
NOTED_LINES = 20


class Pending(NamedTuple):
    """Files of a mount that are not on the share yet.

    Attributes:
        moved: bytes that have been sent in all.
        tries: how often each of them has been tried at least.
    """

    names: list[str]
    moved: int = 0
    tries: int = 0


class RcloneMount(Mount):
    """rclone mount; nothing of its configuration is written anywhere, and no user's is read.

    Args:
        find: finds the program; raises ``tools.ToolError``.
    """

    # What is wrong is told at once; a share that a hundred nodes mount at a time has them wait (503) for a while.
    seconds = 60.0

    def __init__(
        self, runtime: Runtime, index: int, volume: Volume, credentials: Mapping[str, str], find: Callable[[], str]
    ) -> None:
        super().__init__(runtime, index, volume, credentials)
        self._find = find
        self._is_file_share = volume.kind == "azureFiles"
        # Of the remote: a file share is named by the configuration, a container by the path.
        self._path = "/".join(filter(None, ("" if self._is_file_share else volume.container, volume.folder.strip("/"))))
        parts = urlsplit(volume.endpoint)
        self._host = f"{parts.hostname}:{parts.port or (80 if parts.scheme == 'http' else 443)}"
        self._probe: Probe | None = None
        self._noted = 0

    def lacks(self, permissions: str) -> bool:
        """Whether a SAS is used that does not have all of these permissions (``cwd``: create, write, delete)."""
        permits = parse_qs(self.credentials.get("sas", "")).get("sp", [""])[0]
        return bool(permits) and not set(permissions) <= set(permits)

    def command(self, rclone: str) -> list[str]:
        argv = [
            rclone,
            "mount",
            f"{REMOTE}:{self._path}",
            self.target,
            "--config=",
            f"--cache-dir={os.path.join(self.folder, 'cache')}",
            "--vfs-cache-mode=writes",
            "--vfs-write-back=1s",
            "--dir-cache-time=1s",
            "--contimeout=10s",
            "--exclude=/\uff0e/**",  # a folder that rclone makes at the root of a share when it writes there (seen with 1.75)
            "--rc",
            f"--rc-addr=unix://{SOCKET}",  # in its working directory, which nobody else may enter
            "--rc-no-auth",
            f"--devname={self.volume.name or REMOTE}",
        ]
        for mode, flag in ((self.volume.file_mode, "--file-perms"), (self.volume.directory_mode, "--dir-perms")):
            if mode:
                argv.append(f"{flag}={mode}")
        if self.volume.file_mode or self.volume.directory_mode:
            argv.append("--umask=0")
        if self.lacks("w"):
            argv.append("--read-only")  # a write fails at once, not when it is uploaded
        return argv + tools.allow_other()

    def variables(self) -> dict[str, str]:
        """rclone's configuration of the remote, secrets included, as environment variables."""
        endpoint, container = self.volume.endpoint.rstrip("/"), self.volume.container
        if self._is_file_share:
            found, address = {"TYPE": "azurefiles", "SHARE_NAME": container}, endpoint
        else:
            found, address = {"TYPE": "azureblob", "NO_CHECK_CONTAINER": "true"}, f"{endpoint}/{container}"
        if "key" in self.credentials:
            found.update(ACCOUNT=self.volume.account, KEY=self.credentials["key"], ENDPOINT=endpoint)
        else:
            found["SAS_URL"] = f"{address}?{self.credentials.get('sas', '').lstrip('?')}"
        return {f"RCLONE_CONFIG_{REMOTE.upper()}_{name}": value for name, value in found.items()}

    def start(self) -> None:
        wrong = tools.without_fuse()
        if wrong:
            raise self.failure(wrong)
        if not self.credentials:
            raise self.failure("no key or SAS was given for it")
        try:
            rclone = self._find()
        except tools.ToolError as error:
            raise self.failure(str(error)) from None
        if self.volume.options:
            self.note("its mountOptions are blobfuse's; rclone, which mounts it, knows none of them")
        self.make_target()
        self.make_folder()
        self.run(self.command(rclone), self.variables(), self._hear)
        by_proxy = "https_proxy" in os.environ or "HTTPS_PROXY" in os.environ
        self._probe = Probe(self.folder, f"{REMOTE}:{self._path}", self.target, self._host, by_proxy, self.seconds)
        self._probe.start()

    def poll(self) -> bool:
        assert self.task and self._probe
        if self._probe.error:
            raise self._explained(self._probe.error)
        if self.task.status is not None:
            self.runtime.drain([self.task], 0.5)
            raise self._explained("")
        return self._probe.done

    def late(self) -> Failure:
        return self._explained(self._probe.last if self._probe else "")

    def _explained(self, error: str) -> Failure:
        assert self.task
        log = self.tail()
        why = self._why("\n".join([error, *log]))
        if not why and self.task.status is not None:
            why = f"rclone {self.task.verdict}"
        why = why or f"{self._host} gave no answer of use within {self.seconds:.0f} s"
        return self.failure(why, [error] if error else log, self.argv)

    def _why(self, said: str) -> str:
        if "fusermount" in said:
            return "the agent's user may not mount by FUSE there (is it in a container that may not?)"
        what = "share" if self._is_file_share else "container"
        return azure_errors.explain(said, what, self._host, self.credentials.get("sas", ""), self.volume.folder)

    def _hear(self, task: Task, stream: str, lines: bytes) -> None:
        """Log rclone's complaints while ranks run, but not thousands of them."""
        if self._probe is None or not self._probe.done:
            return
        for line in lines.decode("utf-8", "replace").splitlines():
            if ("ERROR" in line or "CRITICAL" in line) and self._noted < NOTED_LINES:
                self._noted += 1
                self.note(f"rclone: {line}")

    # What was written and isn't on the share yet.

    def pending(self) -> Pending:
        """Files that still have to be uploaded; of an rclone that is gone, those that it had left.

        Raises:
            OSError, ControlError: rclone does not say it now.
        """
        if self.task is None:
            return Pending([])
        if self.task.status is not None:
            return Pending(self._orphans())
        queue = ask(self.folder, "vfs/queue")["queue"]
        for entry in queue:
            # Its turn is now: the second after a write has no use any more, nor have the minutes after failed attempts.
            soon = RETRY_SECONDS if entry["tries"] else 0.0
            if not entry["uploading"] and entry["expiry"] > soon:
                with contextlib.suppress(ControlError):  # it has been uploaded since
                    ask(self.folder, "vfs/queue-set-expiry", {"id": entry["id"], "expiry": soon})
        moved = int(ask(self.folder, "core/stats")["bytes"])
        return Pending([entry["name"] for entry in queue], moved, min([entry["tries"] for entry in queue], default=0))

    def _orphans(self) -> list[str]:
        """Files whose upload rclone had not finished when it died, as its cache's own notes say."""
        found = []
        top = os.path.join(self.folder, "cache", "vfsMeta")
        for parent, _, names in os.walk(top):
            for name in names:
                try:
                    with open(os.path.join(parent, name), encoding="utf-8") as file:
                        dirty = json.load(file).get("Dirty")
                except (OSError, ValueError):
                    continue
                if dirty:
                    # Below a folder that is called after the remote and a hash of its configuration.
                    path = os.path.relpath(os.path.join(parent, name), top).partition("/")[2]
                    found.append(path[len(self._path) :].lstrip("/") if path.startswith(f"{self._path}/") else path)
        return sorted(found)

    def stuck(self, pending: Pending) -> str:
        """Why asking again for what is pending is of no use; empty: it may still come."""
        if not pending.names or self.task is None:
            return ""
        if self.task.status is not None:
            return f"rclone {self.task.verdict}"
        said = "\n".join(self.tail()[-LAST_ERRORS:])
        return self._why(said) if pending.tries >= 2 and azure_errors.is_refused(said) else ""

    def undo(self) -> str:
        there = self._probe is not None and self._probe.done
        if self._probe:
            self._probe.stop()
        if not there:
            self._stop(0.0)  # it might still mount
        why = super().undo()
        if self.task is not None and self.task.status is None:
            self._stop(STOP_SECONDS)  # it ends by itself when it is unmounted
            why = super().undo()
            if self.task.status is None and not why:
                why = f"rclone (pid {self.task.pid}) does not end"
        return why

    def _stop(self, patience: float) -> None:
        begun = time.monotonic()
        while self.task and self.task.status is None and time.monotonic() - begun < patience + KILL_SECONDS:
            if time.monotonic() - begun >= patience:
                proc.send({self.task.pid}, signal.SIGKILL)
            self.runtime.pump(0.02)


class Probe(threading.Thread):
    """Finds out whether a mount that was started works: its server answers, the kernel shows it, and a listing comes.

    A thread, since any of it may hang. It ends when the mount is there or can't be.

    Args:
        by_proxy: whether it is reached by a proxy only.

    Attributes:
        error: it will not be, and this was said; empty: not yet known.
    """

    def __init__(self, folder: str, remote: str, target: str, host: str, by_proxy: bool, seconds: float) -> None:
        super().__init__(name=f"probe of {target}", daemon=True)
        self._folder = folder
        self._remote = remote
        self._target = target
        self._host = host
        self._by_proxy = by_proxy
        self._until = time.monotonic() + seconds
        self.done = False
        self.error = ""
        self.last = ""

    def stop(self) -> None:
        self._until = 0.0

    def run(self) -> None:
        if not self._by_proxy and not self._reaches():
            self.error = self.last
            return
        while time.monotonic() < self._until:
            if self._listed() and mountpoints.at(self._target) is not None and self._seen():
                self.done = True
                return
            if azure_errors.is_refused(self.last) or azure_errors.is_missing(self.last):
                self.error = self.last
                return
            time.sleep(0.05)

    def _reaches(self) -> bool:
        host, _, port = self._host.rpartition(":")
        until = time.monotonic() + AGAIN_SECONDS
        while True:
            try:
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
                return True
            except OSError as error:
                self.last = f"dial tcp {self._host}: {error}"
            if time.monotonic() > min(until, self._until):
                return False
            time.sleep(0.3)

    def _listed(self) -> bool:
        # Not a listing of the mount: it shows a folder or container that isn't there as an empty one.
        arguments = {"fs": self._remote, "remote": "", "opt": {"dirsOnly": True, "noModTime": True, "noMimeType": True}}
        try:
            ask(self._folder, "operations/list", arguments, timeout=max(0.1, self._until - time.monotonic()))
        except ControlError as error:
            self.last = str(error)
            return False
        except OSError:
            return False  # it doesn't listen yet
        return True

    def _seen(self) -> bool:
        try:
            os.listdir(self._target)
        except OSError as error:
            self.last = f"listing {self._target}: {error.strerror}"
            return False
        return True


# rclone's remote control: a socket in the mount's own folder.


class ControlError(Exception):
    """rclone refused a request; the message is rclone's."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket, found by its open folder: an address holds 108 bytes, a job folder's path may have more."""

    def __init__(self, folder: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._folder = folder

    def connect(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        finally:
            os.close(folder)


def ask(folder: str, command: str, arguments: dict[str, Any] | None = None, timeout: float = 5.0) -> dict[str, Any]:
    """One command of a mounted rclone's remote control.

    Raises:
        ControlError: rclone says why not.
        OSError: it doesn't listen (yet, or any more), or is too slow.
    """
    connection = _Connection(folder, timeout)
    try:
        body = json.dumps(arguments or {})
        connection.request("POST", f"/{command}", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read().decode("utf-8", "replace"))
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"rclone's remote control: {error}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise ControlError(str(answer.get("error", answer)))
    return answer
