"""Reservations of an agent: a place in the queue to wait for, or a node that a scheduler has granted."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Callable, Protocol

from mlflow_batchai.agent import boot
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import agents, locks
from mlflow_batchai.agent.reservation.waiter import Obstacle

# How often it is looked whether the node is ours, at first and after a while.
POLL_SECONDS, LONGEST_POLL_SECONDS, SLOWER = 0.2, 1.0, 1.05
# A wait that is longer may be spent otherwise.
AWAKE_SECONDS = 0.5


Sleep = Callable[[Obstacle, Sequence[int]], None]


def stay_awake(obstacle: Obstacle, keep: Sequence[int]) -> None:
    """Wait as the process that this is."""


class Reservation(Protocol):
    """One agent's right to a node.

    Promises:
        1. When ``acquire`` has returned the node is this agent's, and nothing of a job before runs there.
        2. The node is given back when this process has ended, and all that hold what ``acquire`` returned, however they ended.
    """

    def acquire(
        self, layout: NodeLayout, note: Callable[[str], None], check: Callable[[], None], sleep: Sleep = stay_awake
    ) -> Sequence[int]:
        """Wait for the node.

        Args:
            note: told what is waited for.
            check: called while waiting; raises what is to end it.
            sleep: called where the wait is long, with what stands in the way and the descriptors that hold our place; it may
                replace this process by one that waits (``waiter``), or return.

        Returns:
            File descriptors that ranks have to inherit: while one of them is open the node is not free.

        Raises:
            LateError: the reservation was given up.
            FolderError: the node's folder can't be used.
        """

    def report(self, state: str, failure: Failure | None = None) -> None:
        """Say for the engine's poll, which doesn't see the share, what the agent does.

        Args:
            state: ``waiting``, ``held`` or ``ended``.
            failure: why the share was given up: nobody will hear of it by the share.
        """


class GrantedReservation:
    """A node that a scheduler has given to this job: nobody is waited for, nothing is locked.

    The scheduler starts and ends the job's processes. The node's folder has to be this job's alone.
    """

    def acquire(
        self, layout: NodeLayout, note: Callable[[str], None], check: Callable[[], None], sleep: Sleep = stay_awake
    ) -> Sequence[int]:
        check()
        boot.own_folder(os.path.abspath(layout.root))
        return []

    def report(self, state: str, failure: Failure | None = None) -> None:
        """Write it to the agent's output, which the scheduler keeps."""
        sys.stdout.write(json.dumps(_said(state, failure)) + "\n")
        sys.stdout.flush()


class QueueReservation:
    """A place in the queue, and the locks of the node.

    Args:
        root: the node's own folder.
        place: ``number``, ``taken`` (when it was made, seconds since the epoch by this node's clock) and ``after``, the
            earlier numbers on this node, as ``queue.reserve`` gave them.
        held: descriptor of its file, locked, if this process has claimed it before it slept.

    Raises:
        TwinError: another agent has it, or had it.
    """

    def __init__(self, root: str, place: Mapping[str, Any], held: int | None = None) -> None:
        self._root = root
        self._number: int = place["number"]
        self._taken: float = place["taken"]
        self._after: Sequence[int] = place["after"]
        self._error: Exception | None = None
        if held is not None:
            os.set_inheritable(held, False)
            self._file: IO[str] = os.fdopen(held, "a")
            return
        try:
            # It stays open until this process ends.
            self._file = agents.claim(root, self._number, self._taken)
            agents.sign(root, self._number)
        except (OSError, agents.LateError) as error:
            self._error = error  # the job is to hear of it

    def report(self, state: str, failure: Failure | None = None) -> None:
        agents.report(self._root, self._number, _said(state, failure))

    def acquire(
        self, layout: NodeLayout, note: Callable[[str], None], check: Callable[[], None], sleep: Sleep = stay_awake
    ) -> Sequence[int]:
        if self._error is not None:
            raise self._error
        self.report(agents.WAITING)
        while True:
            self._await_turn(note, check, sleep)
            node_lock = locks.open_node_lock(self._root)
            agent_lock = locks.open_agent_lock(self._root)  # ours until this process ends
            self._lock(node_lock, agent_lock, note, check)
            # Told first, then looked: who drains nodes does it the other way round, so one of us sees the other.
            self.report(agents.HELD)
            if not agents.is_drained(self._root):
                break
            self.report(agents.WAITING)
            for descriptor in (node_lock, agent_lock):
                os.close(descriptor)
        for descriptor in (node_lock, agent_lock):
            # Nobody ever writes them, and systemd removes from /var/tmp what looks unused: the next one would lock other files.
            os.utime(descriptor)
        set_owner(self._root, layout.mark, layout.node)
        agents.forget_ended(self._root, time.time())
        return [node_lock]

    def _await_turn(self, note: Callable[[str], None], check: Callable[[], None], sleep: Sleep) -> None:
        """Wait until nobody is before us and the node takes jobs."""
        said, pause, since = "", POLL_SECONDS, time.monotonic()
        while True:
            self._after = agents.before(self._root, self._after, self._taken, time.time())
            if self._after:
                waits = f"waiting for {len(self._after)} job(s) before us on this node"
                last = agents.path_of(self._root, self._after[-1])
                obstacle = Obstacle(last, last)
            elif agents.is_drained(self._root):
                waits = "waiting: this node takes no jobs until its cluster grows again"
                # Our own lock, which nobody gets: only the file is waited for.
                obstacle = Obstacle(agents.drained_path(self._root), agents.path_of(self._root, self._number))
            else:
                return
            if waits != said:
                note(waits)
                said = waits
            check()
            if time.monotonic() - since > AWAKE_SECONDS:
                sleep(obstacle, [self._file.fileno()])
                since = time.monotonic()
            time.sleep(pause)
            pause = min(pause * SLOWER, LONGEST_POLL_SECONDS)

    def _lock(self, node_lock: int, agent_lock: int, note: Callable[[str], None], check: Callable[[], None]) -> None:
        """Take both locks, and end what the job before us left."""

        def wait(seconds: float) -> None:
            check()
            time.sleep(seconds)

        while not locks.try_lock(agent_lock):
            wait(POLL_SECONDS)
        while not locks.try_lock(node_lock):
            # The agent before us is gone, its processes are not.
            note("ending what the job before us left on this node")
            left = proc.sweep(self._left_behind, grace=5.0, sleep=wait)
            if left:
                note(f"still there: pids {sorted(left)}")
            wait(POLL_SECONDS)
        # Those that have closed the lock's descriptor (daemons do) carry the mark still.
        if proc.sweep(self._left_behind, grace=5.0, sleep=wait):
            note("processes of the job before us would not end")

    def _left_behind(self) -> set[int]:
        """Processes of the job that had this node before: those with its mark, and those that hold the node's lock."""
        found = proc.lock_holders(locks.lock_path(self._root))
        before = owner(self._root)
        return found | proc.marked(*before) if before else found


def owner(root: str) -> tuple[str, int] | None:
    """(mark, index of the node in that job) of the job that last had the node."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(root, "owner"), encoding="utf-8") as file:
        mark, _, node = file.read().strip().rpartition(" ")
        if mark and node.isdigit():
            return mark, int(node)
    return None


def set_owner(root: str, mark: str, node: int) -> None:
    """Write which job has the node now."""
    path = os.path.join(root, "owner")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(f"{mark} {node}\n")
    os.replace(path + ".new", path)


def _said(state: str, failure: Failure | None) -> dict[str, Any]:
    return {"state": state, **({"failure": failure.as_record()} if failure else {})}
