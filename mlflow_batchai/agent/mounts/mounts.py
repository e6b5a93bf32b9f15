"""All volumes of a job on one node: mount them at once, drain them before the node is done, always unmount them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.mounts import mountpoints, tools
from mlflow_batchai.agent.mounts.commands import CommandMount
from mlflow_batchai.agent.mounts.mount import LinkMount, Mount
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.share.base import ControlShare
from mlflow_batchai.agent.transport.shipper import Shipper

if TYPE_CHECKING:
    from mlflow_batchai.agent.mounts.rclone import Pending, RcloneMount

DRAIN_SECONDS = 120.0
# An empty queue says all only when it stays empty: a file that was just closed comes to it a moment later.
SETTLE_SECONDS = 0.3
# A wait for it is never shorter: an empty queue would be taken for a loss.
LEAST_DRAIN_SECONDS = 1.0
SAY_SECONDS = 5.0
NAMED_FILES = 5
# After so many attempts bytes that move are no sign of progress any more.
HOPEFUL_TRIES = 8


class Mounts:
    """The volumes of the plan on this node.

    Args:
        credentials: index of a volume, as text -> ``{"key": account key}`` or ``{"sas": text}``, with the ``endpoint`` that
            it is for.
    """

    def __init__(
        self,
        layout: NodeLayout,
        shipper: Shipper,
        runtime: Runtime,
        credentials: Mapping[str, Mapping[str, str]],
        check: Callable[[], None],
        control: ControlShare,
    ) -> None:
        self._layout = layout
        self._shipper = shipper
        self._runtime = runtime
        self._credentials = credentials
        self._check = check
        self._control = control
        self._rclone: str | None = None
        self._mounts: list[Mount] = []
        self._rclones: list[RcloneMount] = []
        self._there: set[int] = set()

    def mount_all(self) -> None:
        """Mount every volume, all at once; returns when all are there. What was mounted stays for ``unmount_all`` if one fails.

        Raises:
            Failure: a volume can't be mounted.
        """
        self._mounts = [self._make(index, volume) for index, volume in enumerate(self._layout.plan.volumes)]
        self._check_writable()
        begun, before = time.monotonic(), self._runtime.family()
        started = {}
        for mount in self._mounts:
            mount.start()
            # Only now: a tool may have had to be fetched first.
            started[mount.index] = time.monotonic()
            if isinstance(mount, LinkMount):
                self._there.add(mount.index)
        waiting = list(self._mounts)
        while waiting:
            waiting = [mount for mount in waiting if not mount.poll()]
            self._there = set(started) - {mount.index for mount in waiting}
            late = [mount for mount in waiting if time.monotonic() - started[mount.index] > mount.seconds]
            if late:
                raise late[0].late()
            if waiting:
                self._runtime.pump(0.05)
                self._check()
        # What mounting has left running, a file system's own process, lives as long as its mount.
        self._runtime.spare(self._runtime.family() - before)
        real = [mount for mount in self._mounts if mount.volume.mounted_by != "link"]
        for mount in real:
            mount.note(f"mounted at {mount.target}")
        if real:
            self._shipper.note(f"{len(real)} volume(s) mounted in {time.monotonic() - begun:.1f} s")

    def _make(self, index: int, volume: Volume) -> Mount:
        credentials = self._credentials.get(str(index), {})
        if credentials and credentials.get("endpoint") != volume.endpoint:
            why = f"what opens it is for {credentials.get('endpoint')}, and the plan has {volume.endpoint} by now"
            raise Mount(self._runtime, index, volume, credentials).failure(why)
        how = volume.mounted_by
        if how in ("link", "bind"):
            return LinkMount(self._runtime, index, volume, credentials)
        if how != "rclone":
            return CommandMount(self._runtime, index, volume, credentials)
        from mlflow_batchai.agent.mounts.rclone import RcloneMount  # HTTP, which few agents need

        rclone = RcloneMount(self._runtime, index, volume, credentials, self._find_rclone)
        self._rclones.append(rclone)
        return rclone

    def has(self, index: int) -> bool:
        """Whether a volume is mounted, and has taken what was written to it.

        What is written to the path of one that isn't mounted would stay on the node; one that doesn't answer would hold us up.
        """
        return index in self._there

    def _find_rclone(self) -> str:
        if self._rclone is None:
            plan = self._layout.plan
            self._rclone = tools.installed_rclone(plan.python)
            sent = tools.fitting_rclone(plan.tools)
            if self._rclone is None and sent:
                self._rclone = tools.sent_rclone(self._layout.root, sent, self._control.fetch)
            if self._rclone is None:
                raise tools.ToolError(tools.NO_RCLONE)
            self._shipper.note(f"mounting with {self._rclone}")
        return self._rclone

    def _check_writable(self) -> None:
        """A volume that results go to must let itself be written; seen now, not after hours of training."""
        prefix = self._layout.plan.log_copy_prefix
        for mount in self._rclones:
            if not mount.lacks("cwd"):
                continue
            users = [name for name, path in self._layout.directories().items() if _is_below(path, mount.target)]
            users = [name for name in users if not name.startswith("AZ_BATCHAI_INPUT_")]
            if prefix and prefix.volume == mount.index:
                users.append("stdOutErrPathPrefix")
            if users:
                raise mount.failure(
                    f"its SAS does not permit to create, write and delete, and {users[0]} lies there; make one that does"
                )

    def drain(self, seconds: float = DRAIN_SECONDS, rest: Callable[[], float] | None = None) -> None:
        """Wait until all that was written is on the shares.

        Args:
            seconds: for how long nothing may move.
            rest: seconds that it may still take (``LEAST_DRAIN_SECONDS`` in all at least), asked again and again. None: as long
                as something moves, unless the attempt ends.

        Raises:
            Failure: something could not be uploaded; its files are named.
        """
        waiting = {mount: _Progress() for mount in self._rclones}
        begun, said = time.monotonic(), False
        while waiting:
            if not said and time.monotonic() - begun > SAY_SECONDS:
                said = True
                for mount, progress in waiting.items():
                    what = f"{len(progress.names)} file(s)" if progress.names else "what was written"
                    mount.note(f"waiting until it holds {what}")
            for mount, progress in list(waiting.items()):
                try:
                    pending = mount.pending()
                except Exception as error:  # too slow, or just dying: asked again
                    pending = None
                    progress.error = str(error)
                if progress.settled(pending):
                    del waiting[mount]
                    continue
                why = mount.stuck(pending) if pending else ""
                passed = time.monotonic() - begun
                if rest and rest() <= 0 and passed > LEAST_DRAIN_SECONDS:
                    why = why or f"{passed:.0f} s were not enough"
                if why or progress.silent > seconds:
                    raise self._undrained(mount, progress, why or f"nothing has moved for {seconds:.0f} s")
            if waiting:
                self._runtime.pump(0.1)
                if not rest:
                    self._check()

    def _undrained(self, mount: RcloneMount, progress: _Progress, why: str) -> Failure:
        self._there.discard(mount.index)
        names = progress.names
        if names:
            more = f" and {len(names) - NAMED_FILES} more" if len(names) > NAMED_FILES else ""
            what = f"{len(names)} file(s) ({', '.join(names[:NAMED_FILES])}{more})"
        else:
            what = f"what rclone holds ({progress.error or 'it does not say what'})"
        failure = mount.failure(why, mount.tail())
        sentence = f"{mount.volume.title} on {self._layout.node_id}: {what} could not be written to it: {why}"
        return Failure(failure.code, mount.mask(sentence), self._layout.node, exit_code=failure.exit_code, tail=failure.tail)

    def unmount_all(self) -> list[str]:
        """Undo all mounts, the last one first, however far each had come. Returns a sentence for each that would not go."""
        left = []
        for mount in reversed(self._mounts):
            try:
                why = mount.undo()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why:
                left.append(f"{mount.volume.title} could not be unmounted: {mount.mask(why)}")
        self._mounts, self._rclones, self._there = [], [], set()
        self._runtime.end_spared()
        return left + [f"still mounted: {why}" for why in mountpoints.sweep(self._layout.root, ours=True)]


class _Progress:
    """Progress of the draining of one mount."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.error = ""
        self._moved = -1
        self._last = time.monotonic()
        self._empty_since: float | None = None

    @property
    def silent(self) -> float:
        return time.monotonic() - self._last

    def settled(self, pending: Pending | None) -> bool:
        """Take in how it stands; whether nothing is left, and was not a moment ago."""
        now = time.monotonic()
        if pending is None:
            self._empty_since = None
            return False
        moved = pending.moved != self._moved and pending.tries < HOPEFUL_TRIES
        if moved or set(pending.names) != set(self.names):
            self._last = now
        self._moved, self.names = pending.moved, pending.names
        if pending.names:
            self._empty_since = None
            return False
        self._empty_since = self._empty_since or now
        return now - self._empty_since >= SETTLE_SECONDS


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)
