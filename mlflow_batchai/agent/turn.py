"""Waiting for the node: our turn in its queue, and the end of what a job before us left there."""

import os
import time
from typing import Any, Callable, Mapping, Sequence, Set

from mlflow_batchai.agent import gate, processes, tickets
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.shipper import Shipper
from mlflow_batchai.agent.tidy import tidy

TURN_POLL_SECONDS = 0.2


def take_node(
    layout: NodeLayout,
    ticket: Mapping[str, Any],
    shipper: Shipper,
    check: Callable[[], None],
    tell: Callable[[str], None],
) -> int:
    """Wait for our turn and take the node; what a dead job left there is ended first.

    Args:
        ticket: what ``tickets.take`` returned, for this node.
        shipper: where it is said what is waited for.
        check: called while waiting; raises what is to end it.
        tell: told ``waiting`` and ``held``, for whoever asks what the node does.

    Returns:
        The descriptor of the node's lock, held: the node is ours until the last process that has it open is gone.
    """
    root = layout.root
    node_lock = tickets.open_node_lock(root)
    agent_lock = tickets.open_agent_lock(root)  # ours until this process ends
    before = list(ticket["after"])
    tell("waiting")
    while True:
        _await_turn(root, before, ticket["taken"], shipper, check)
        _lock(root, node_lock, agent_lock, shipper, check)
        # Told first, then looked: who closes nodes does it the other way round, so one of us sees the other.
        tell("held")
        if not gate.is_closed(root):
            break
        tell("waiting")
        for descriptor in (node_lock, agent_lock):
            tickets.unlock(descriptor)
    for descriptor in (node_lock, agent_lock):
        # Nobody ever writes them, and systemd removes from /var/tmp what looks unused: the next agent would lock other files.
        os.utime(descriptor)
    tickets.set_owner(root, layout.mark, layout.node)
    tickets.forget_ended(root, time.time())
    tidy(root, time.time())
    return node_lock


def _await_turn(root: str, after: Sequence[int], taken: float, shipper: Shipper, check: Callable[[], None]) -> None:
    """Wait until nobody is before us and the node takes jobs."""
    said = ""
    while True:
        after = tickets.predecessors(root, after, taken, time.time())
        waits = _waits(root, after)
        if not waits:
            return
        if waits != said:
            shipper.note(waits)
            said = waits
        check()
        time.sleep(TURN_POLL_SECONDS)


def _lock(root: str, node_lock: int, agent_lock: int, shipper: Shipper, check: Callable[[], None]) -> None:
    """Take both locks, and end what the job before us left."""
    while not tickets.try_lock(agent_lock):
        check()
        time.sleep(TURN_POLL_SECONDS)
    while not tickets.try_lock(node_lock):
        check()
        # The agent before us is gone (its ticket is free), its processes are not.
        shipper.note("ending what the job before us left on this node")
        left = processes.sweep(lambda: _left_behind(root), grace=5.0)
        if left:
            shipper.note("still there: pids %s" % sorted(left))
        time.sleep(TURN_POLL_SECONDS)
    # Those that have closed the lock's descriptor (daemons do) carry the mark still.
    if processes.sweep(lambda: _left_behind(root), grace=5.0):
        shipper.note("processes of the job before us would not end")


def _waits(root: str, before: Sequence[int]) -> str:
    """What is waited for, or nothing."""
    if before:
        return "waiting for %d job(s) before us on this node" % len(before)
    return "waiting: this node takes no jobs until its cluster grows again" if gate.is_closed(root) else ""


def _left_behind(root: str) -> Set[int]:
    """Processes of the job that had this node before: those with its mark, and those that hold the node's lock."""
    found = processes.lock_holders(tickets.lock_path(root))
    owner = tickets.owner(root)
    if owner:
        found |= processes.marked(*owner)
    return found
