"""Whether a mount that was started works, found out beside the agent's one main thread."""

import os
import socket
import threading
import time

from mlflow_batchai.agent.mounts import azure, rc, table

CONNECT_SECONDS = 5.0
# A name service that is asked by all nodes at once says now and then that it has no time.
AGAIN_SECONDS = 2.0


class Probe(threading.Thread):
    """Finds out whether a mount that was started works: its server answers, the kernel shows it, and a listing comes.

    A thread, since any of it may hang. It ends when the mount is there or can't be.

    Args:
        folder: the mount's own, in which rclone listens.
        remote: what is mounted, as rclone names it.
        host: name and port of its server.
        by_proxy: whether it is reached by a proxy only.
        seconds: for how long it looks.

    Attributes:
        done: the mount is there.
        error: it will not be, and this was said; empty: not yet known.
        last: what was said last.
    """

    def __init__(self, folder: str, remote: str, target: str, host: str, by_proxy: bool, seconds: float) -> None:
        super().__init__(name="probe of " + target, daemon=True)
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
        """Nobody wants to know any more."""
        self._until = 0.0

    def run(self) -> None:
        if not self._by_proxy and not self._reaches():
            self.error = self.last
            return
        while time.monotonic() < self._until:
            if self._listed() and table.at(self._target) is not None and self._seen():
                self.done = True
                return
            if azure.is_refused(self.last) or azure.is_missing(self.last):
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
                self.last = "dial tcp %s: %s" % (self._host, error)
            if time.monotonic() > min(until, self._until):
                return False
            time.sleep(0.3)

    def _listed(self) -> bool:
        # Not a listing of the mount: it shows a folder or container that isn't there as an empty one.
        arguments = {"fs": self._remote, "remote": "", "opt": {"dirsOnly": True, "noModTime": True, "noMimeType": True}}
        try:
            rc.ask(self._folder, "operations/list", arguments, timeout=max(0.1, self._until - time.monotonic()))
        except rc.ControlError as error:
            self.last = str(error)
            return False
        except OSError:
            return False  # it doesn't listen yet
        return True

    def _seen(self) -> bool:
        try:
            os.listdir(self._target)
        except OSError as error:
            self.last = "listing %s: %s" % (self._target, error.strerror)
            return False
        return True
