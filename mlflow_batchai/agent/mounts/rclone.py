"""A file share or a blob container over HTTPS: rclone's FUSE mount, as a helper process that dies with the agent.

Why these flags: appending and renaming have to work for user code, a file that was closed has to be on the share soon, and one
that another node closed has to be seen soon (measured; docs/azure_files.md).
"""

import contextlib
import json
import os
import signal
import time
from typing import Any, Dict, List, Mapping, Optional
from urllib.parse import parse_qs, urlsplit

from mlflow_batchai.agent import processes
from mlflow_batchai.agent.mounts import azure, rc, tools
from mlflow_batchai.agent.mounts.mount import COMMAND_SECONDS, Mount, Place
from mlflow_batchai.agent.mounts.probe import Probe
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.agent.tasks import Task

REMOTE = "batchai"
STOP_SECONDS = 3.0
# One that waits for a disk can't be killed.
KILL_SECONDS = 5.0
RETRY_SECONDS = 2.0
LAST_ERRORS = 6
NOTED_LINES = 20


class RcloneMount(Mount):
    """rclone mount; nothing of its configuration is written anywhere, and no user's is read.

    Args:
        rclone: finds the program; raises ``tools.ToolError``.
    """

    # What is wrong is told at once; a share that a hundred nodes mount at a time has them wait (503) for a while.
    seconds = COMMAND_SECONDS

    def __init__(self, place: Place, index: int, volume: Volume, credentials: Mapping[str, str], rclone: Any) -> None:
        super().__init__(place, index, volume, credentials)
        self._find = rclone
        self.task: Optional[Task] = None
        self.argv: List[str] = []
        self._probe: Optional[Probe] = None
        self._noted = 0

    def lacks(self, permissions: str) -> bool:
        """Whether a SAS is used that does not have all of these permissions (``cwd``: create, write, delete)."""
        permits = parse_qs(self.credentials.get("sas", "")).get("sp", [""])[0]
        return bool(permits) and not set(permissions) <= set(permits)

    def command(self, rclone: str) -> List[str]:
        """The argv, a pure function of plan and node."""
        argv = [
            rclone,
            "mount",
            self._remote(),
            self.target,
            "--config=",
            "--cache-dir=" + os.path.join(self.folder, "cache"),
            "--vfs-cache-mode=writes",
            "--vfs-write-back=1s",
            "--dir-cache-time=1s",
            "--contimeout=10s",
            "--exclude=/\uff0e/**",  # a folder that rclone makes at the root of a share when it writes there (seen with 1.75)
            "--rc",
            "--rc-addr=unix://" + rc.SOCKET,  # in its working directory, which nobody else may enter
            "--rc-no-auth",
            "--devname=" + (self.volume.name or REMOTE),
        ]
        for mode, flag in ((self.volume.file_mode, "--file-perms"), (self.volume.directory_mode, "--dir-perms")):
            if mode:
                argv.append("%s=%s" % (flag, mode))
        if self.volume.file_mode or self.volume.directory_mode:
            argv.append("--umask=0")
        if self.lacks("w"):
            argv.append("--read-only")  # a write fails at once, not when it is uploaded
        return argv + tools.allow_other()

    def _remote(self) -> str:
        return "%s:%s" % (REMOTE, self._remote_path())

    def _remote_path(self) -> str:
        folder = self.volume.folder.strip("/")
        if self.volume.kind == "azureFiles":
            return folder
        return "/".join(part for part in (self.volume.container, folder) if part)

    def variables(self) -> Dict[str, str]:
        """rclone's configuration of the remote, secrets included, as environment variables."""
        endpoint = self.volume.endpoint.rstrip("/")
        found = {"TYPE": "azurefiles" if self.volume.kind == "azureFiles" else "azureblob"}
        if found["TYPE"] == "azurefiles":
            found["SHARE_NAME"] = self.volume.container
        else:
            found["NO_CHECK_CONTAINER"] = "true"
        if "key" in self.credentials:
            found.update(ACCOUNT=self.volume.account, KEY=self.credentials["key"], ENDPOINT=endpoint)
        else:
            address = endpoint if found["TYPE"] == "azurefiles" else "%s/%s" % (endpoint, self.volume.container)
            found["SAS_URL"] = "%s?%s" % (address, self.credentials.get("sas", "").lstrip("?"))
        return {"RCLONE_CONFIG_%s_%s" % (REMOTE.upper(), name): value for name, value in found.items()}

    def start(self) -> None:
        trouble = tools.fuse_trouble()
        if trouble:
            raise self.failure(trouble)
        if not self.credentials:
            raise self.failure("no key or SAS was given for it")
        try:
            rclone = self._find()
        except tools.ToolError as error:
            raise self.failure(str(error)) from None
        if self.volume.options:
            self.note("its mountOptions are blobfuse's; rclone, which mounts it, knows none of them")
        self.make_target()
        folder = self.make_folder()
        self.argv = self.command(rclone)
        task = Task("rclone %s" % self.volume.path, None, self._hear)
        try:
            self.place.runtime.start(task, self.argv, self.environment(self.variables()), cwd=folder, helper=True, inside=False)
        except OSError as error:
            raise self.failure("%s can't be started: %s" % (rclone, error.strerror or error)) from None
        self.task = task
        by_proxy = "https_proxy" in os.environ or "HTTPS_PROXY" in os.environ
        self._probe = Probe(folder, self._remote(), self.target, self._host(), by_proxy, self.seconds)
        self._probe.start()

    def poll(self) -> bool:
        assert self.task and self._probe
        if self._probe.error:
            raise self._explained(self._probe.error)
        if self.task.status is not None:
            self.place.runtime.drain([self.task], 0.5)
            raise self._explained("")
        return self._probe.done

    def late(self) -> Failure:
        return self._explained(self._probe.last if self._probe else "")

    def _explained(self, error: str) -> Failure:
        assert self.task
        log = list(self.task.tail)
        why = self._why("\n".join([error, *log]))
        if not why and self.task.status is not None:
            why = "rclone %s" % self.task.verdict
        return self.failure(
            why or "%s gave no answer of use within %d s" % (self._host(), self.seconds), [error] if error else log, self.argv
        )

    def _why(self, said: str) -> str:
        if "fusermount" in said:
            return "the agent's user may not mount by FUSE there (is it in a container that may not?)"
        what = "share" if self.volume.kind == "azureFiles" else "container"
        return azure.explain(said, what, self._host(), self.credentials.get("sas", ""), self.volume.folder)

    def _host(self) -> str:
        parts = urlsplit(self.volume.endpoint)
        return "%s:%d" % (parts.hostname, parts.port or (80 if parts.scheme == "http" else 443))

    def _hear(self, task: Task, stream: str, lines: bytes) -> None:
        """What rclone complains of while ranks run is worth a line in the log, but not thousands."""
        if self._probe is None or not self._probe.done:
            return
        for line in lines.decode("utf-8", "replace").splitlines():
            if ("ERROR" in line or "CRITICAL" in line) and self._noted < NOTED_LINES:
                self._noted += 1
                self.note("rclone: %s" % line)

    # What was written and isn't on the share yet.

    def pending(self) -> "Pending":
        """What still has to be uploaded; of an rclone that is gone, what it had not."""
        if self.task is None:
            return Pending([], 0, 0)
        if self.task.status is not None:
            return Pending(self._orphans(), 0, 0)
        queue = rc.ask(self.folder, "vfs/queue")["queue"]
        for entry in queue:
            # Its turn is now: the second after a write has no use any more, nor have the minutes after failed attempts.
            soon = RETRY_SECONDS if entry["tries"] else 0.0
            if not entry["uploading"] and entry["expiry"] > soon:
                with contextlib.suppress(rc.ControlError):  # it has been uploaded since
                    rc.ask(self.folder, "vfs/queue-set-expiry", {"id": entry["id"], "expiry": soon})
        moved = int(rc.ask(self.folder, "core/stats")["bytes"])
        return Pending([entry["name"] for entry in queue], moved, min([entry["tries"] for entry in queue], default=0))

    def _orphans(self) -> List[str]:
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
                    remote = self._remote_path()
                    found.append(path[len(remote) + 1 :] if remote and path.startswith(remote + "/") else path)
        return sorted(found)

    def stuck(self, pending: "Pending") -> str:
        """Why asking again for what is pending is of no use; empty: it may still come."""
        if not pending.names:
            return ""
        said = "\n".join(list(self.task.tail)[-LAST_ERRORS:]) if self.task else ""
        if self.task and self.task.status is not None:
            return "rclone %s" % self.task.verdict
        if pending.tries >= 2 and azure.is_refused(said):
            return self._why(said)
        return ""

    def tail(self) -> List[str]:
        """rclone's last lines, secrets masked."""
        return [self.mask(line) for line in self.task.tail] if self.task else []

    def undo(self) -> str:
        there = self._probe is not None and self._probe.done
        if self._probe:
            self._probe.stop()
        if self.task is not None and not there:
            self._stop(0.0)  # it might still mount
        why = super().undo()
        if self.task is not None and self.task.status is None:
            self._stop(STOP_SECONDS)  # it ends by itself when it is unmounted
            why = super().undo()
        if self.task is not None and self.task.status is None and not why:
            why = "rclone (pid %d) does not end" % self.task.pid
        return why

    def _stop(self, patience: float) -> None:
        assert self.task
        begun = time.monotonic()
        while self.task.status is None and time.monotonic() - begun < patience + KILL_SECONDS:
            if time.monotonic() - begun >= patience:
                processes.send({self.task.pid}, signal.SIGKILL)
            self.place.runtime.pump(0.02)


class Pending:
    """What of a mount is not on the share yet.

    Attributes:
        names: paths in the volume.
        moved: bytes that have been sent in all.
        tries: how often each of them has been tried at least.
    """

    def __init__(self, names: List[str], moved: int, tries: int) -> None:
        self.names = names
        self.moved = moved
        self.tries = tries
