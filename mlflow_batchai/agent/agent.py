"""The agent: one process per node and attempt, from waiting for its node to the verdict.

It runs in its own session, is told its secrets on standard input, and talks to its peers only through the job folder. Node
0's agent joins the logs and claims the verdict; every other agent follows node 0, and gives the verdict if that never came.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow_batchai.agent import boot, containers, leftovers, permissions, protocol, staging
from mlflow_batchai.agent.attempt import overrides
from mlflow_batchai.agent.attempt.ending import Ending, tell
from mlflow_batchai.agent.attempt.phases import Phases
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.outcome import Failure, Stop
from mlflow_batchai.agent.peers import Peers
from mlflow_batchai.agent.plan import Plan, PlanError, read_plan
from mlflow_batchai.agent.processes import proc, tasks
from mlflow_batchai.agent.reservation import waiter
from mlflow_batchai.agent.reservation.agents import LateError, TwinError
from mlflow_batchai.agent.reservation.reservations import GrantedReservation, QueueReservation, Reservation
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.share import open_control, sharefiles
from mlflow_batchai.agent.share.base import ControlError, ControlShare
from mlflow_batchai.agent.share.mounted import MountedShare
from mlflow_batchai.agent.transport.shipper import Shipper

# Room on the share for the verdict, and for what is relayed after it.
RESERVE_BYTES = 256 << 10
# A mount with a cache shows the submitter's file a while after it was written.
PLAN_SECONDS = 10.0


class Agent:
    """One node's part in one attempt of a job.

    Args:
        given: what is never written anywhere (see ``main``).
        resumed: what this agent had come to before it slept (``_sleep``); None: it begins.
    """

    def __init__(
        self,
        share: str,
        folder: str,
        attempt: int,
        node: int,
        root: str,
        reservation: Reservation,
        given: Mapping[str, Any],
        part: tuple[int, int, int] = (0, 1, 1),
        name: str = "",
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        # A share that is away when a job's turn comes, comes back; a job's folder that was removed does not.
        patience = PLAN_SECONDS if resumed is None else sharefiles.AWAY_SECONDS
        plan = _plan(open_control(share, given.get("share")), protocol.JobPaths(folder, attempt), given, patience)
        if plan.protocol != protocol.PROTOCOL_VERSION:
            raise staging.SetupError(f"the plan is of protocol {plan.protocol}, this agent of {protocol.PROTOCOL_VERSION}")
        self.reservation = reservation
        self.layout = NodeLayout(root, plan, node, share, given.get("share"))
        self.node = node
        self.given = given
        self.heard = list(range(1, plan.node_count)) if node == 0 else [0]
        self.shipper = Shipper(self.layout, self.heard, (resumed or {}).get("sent"))
        self.runtime = Runtime(self.layout, self.shipper, given.get("variables") or {})
        self.runtime.registry = given.get("registry")
        self.peers = Peers(self.layout, self.shipper)
        self.phases = Phases(self.runtime, self.peers, part, given, name)

    def run(self) -> int:
        """Take part in the attempt until its end; 0 unless this node could not do its part."""
        proc.become_subreaper()
        signal.signal(signal.SIGTERM, lambda *_: self.peers.on_sigterm())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        failure: Failure | None = None
        stop: Stop | None = None
        self.shipper.start()
        try:
            self.runtime.held = self.reservation.acquire(
                self.layout, self.shipper.note, lambda: self.peers.check(starting=True), self._sleep
            )
            if self.node == 0:
                with contextlib.suppress(OSError):  # what comes next meets it too
                    self.layout.control.reserve(self.layout.paths.reserve, RESERVE_BYTES)
            # Of jobs before, for the node is ours.
            leftovers.tidy(self.layout.root, time.time())
            left = containers.sweep(self.layout.root)
            if left:
                self.shipper.note(left)
            self.phases.run()
        except Stop as reason:
            stop = reason
        except Failure as reason:
            failure = reason
        except staging.SetupError as error:
            failure = Failure(protocol.NODE_SETUP_FAILED, str(error), node=self.node)
        except (LateError, boot.FolderError, ControlError) as error:
            failure = Failure(protocol.NODE_SETUP_FAILED, f"{self.layout.node_id}: {error}", node=self.node)
        except OSError as error:
            # A disk that is full, an account that may not: nobody wants to see our code for that.
            if error is self.shipper.broken:
                tell(error, self.shipper)
            failure = Failure(protocol.NODE_SETUP_FAILED, staging.disk_error(self.layout, error), node=self.node)
        except Exception as error:
            # A bug in the agent must still end the job with its words, not leave it running for ever.
            tell(error, self.shipper)
            failure = Failure(
                protocol.NODE_SETUP_FAILED,
                f"the agent of {self.layout.node_id} failed: {type(error).__name__}: {error}",
                node=self.node,
            )
        if failure and failure.exit_code == tasks.TERMINATED:
            self.peers.await_termination()
        if self.peers.termination and _may_follow(failure, stop):
            failure, stop = self.peers.termination, None
        ending = Ending(self.phases, self.reservation.report)
        return 1 if ending.run(failure, stop) or failure else 0

    def _sleep(self, obstacle: waiter.Obstacle, keep: Sequence[int]) -> None:
        """Become a program that waits (``waiter``), unless something may need an agent that is awake.

        That is so as long as a peer has not come, and from when a node of the job is taken: its peers watch each other then.
        """
        layout, control, inbox = self.layout, self.layout.control, self.shipper.inbox
        if not isinstance(control, MountedShare) or not all(map(inbox.has_spoken, self.heard)):
            return
        paths, asked = layout.paths, inbox.requests()
        folder = os.path.dirname(paths.nodes)
        try:
            unread = layout.node == 0 and len(layout.attempt.requests()) > len(asked)
            if unread or self.peers.wish(starting=True) or {"nodes", "verdict"}.intersection(control.names(folder)):
                return
        except OSError:
            return

        def leave() -> Mapping[str, Any]:
            while not self.shipper.finish(1.0):  # the share hangs
                try:
                    self.peers.check(starting=True)
                except Exception:
                    if self.shipper.go_on():
                        raise
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            if self.peers.termination:
                os.kill(os.getpid(), signal.SIGTERM)  # once more, for the next agent
            return {"held": keep[0], "sent": self.shipper.sent()}

        waiter.become(
            obstacle,
            control.where(folder),
            control.where(paths.requests) if layout.node == 0 else "",
            len(asked),
            self.given,
            keep,
            lambda: control.open_to_write(paths.heartbeats(protocol.agent_writer(layout.node)), append=True),
            leave,
        )


def _may_follow(failure: Failure | None, stop: Stop | None) -> bool:
    """Whether an attempt may have ended here because our ranks, or our peers, got a SIGTERM at the same moment as we."""
    if failure:
        return failure.code != protocol.SHARE_FAILED
    return stop is not None and not stop.asked


def _plan(control: ControlShare, paths: protocol.JobPaths, given: Mapping[str, Any], patience: float) -> Plan:
    plan = _awaited(control, paths.plan, "plan", given.get("plan"), patience)
    what = "record of the attempt"
    own = _awaited(control, paths.overrides, what, given.get("attempt"), patience) if paths.attempt > 1 else None
    control.close()
    try:
        return overrides.plan_of(read_plan(plan), paths.attempt, own)
    except PlanError as error:
        raise staging.SetupError(f"the plan can't be read: {error}") from None


def _awaited(control: ControlShare, path: str, what: str, digest: str | None, patience: float) -> dict[str, Any]:
    """Wait for a file that the starter of this agent wrote before, and check its digest.

    Args:
        patience: seconds; from when the share is there but not the file at most ``PLAN_SECONDS``.
    """
    until = time.monotonic() + patience
    while True:
        try:
            found = control.read_closed(path)
            if found is None and control.names(protocol.IDENTITIES):
                until = min(until, time.monotonic() + PLAN_SECONDS)
        except ControlError as error:
            raise staging.SetupError(f"the {what} can't be read: {error}") from None
        except OSError as error:
            # A denial: on the share we are another user than the submitter. All else may pass.
            if time.monotonic() < until and not isinstance(error, PermissionError):
                time.sleep(0.2)
                continue
            sentence = f"the {what} at {control.where(path)} can't be read by the node's user (uid {os.geteuid()})"
            raise staging.SetupError(f"{sentence}: {error.strerror or error}") from None
        if found is not None and protocol.digest(found) == digest:
            return found
        if found is not None:
            sentence = f"the {what} at {control.where(path)} is not what its submitter wrote; nothing of it was run"
            raise staging.SetupError(sentence)
        if time.monotonic() > until:
            raise staging.SetupError(
                f"there is no {what} at {control.where(path)}: is that the submitting machine's share, or was the job removed?"
            )
        time.sleep(0.2)


def _part(text: str) -> tuple[int, int, int]:
    index, parts, divided = map(int, text.split("/"))
    if not 0 <= index < parts or divided < 1:
        raise ValueError("no such part")
    return index, parts, divided


def main(arguments: list[str]) -> int:
    """``agent --share S --folder F --attempt A --node K --root R --reservation JSON``, and one JSON object on standard input.

    ``--share`` is a directory or an address. ``--granted`` instead of ``--reservation`` says that a scheduler has given the
    node to this job, and nobody is to be waited for. ``--part I/N/M`` says that this node is part I (from 0) of the N that its
    machine is cut into, and of the M among which its GPUs are divided; ``--name TEXT`` is what the cluster calls it. An agent
    that goes on after it has slept has ``--resumed JSON`` besides (``Agent._sleep``).

    The object: ``variables`` (name -> value, for the ranks), ``setup`` (the same for the setup task), ``share`` (the SAS for an
    address, or null), ``volumes`` (index -> ``{"key": ...}`` or ``{"sas": ...}``), ``registry`` (``username`` and ``password``,
    or null), ``plan`` and ``attempt`` (the digests of the two records that it obeys, the second null for the first attempt).
    """
    parser = argparse.ArgumentParser(prog="agent")
    parser.add_argument("--share", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--root", required=True)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--reservation", type=json.loads)
    how.add_argument("--granted", action="store_true")
    parser.add_argument("--part", type=_part, default=(0, 1, 1))
    parser.add_argument("--name", default="")
    parser.add_argument(waiter.OPTION.rstrip("="), type=json.loads)
    options = parser.parse_args(arguments)
    os.umask(permissions.PRIVATE)
    given = json.loads(sys.stdin.read() or "{}")
    try:
        # Before the first word to others.
        queued, held = options.reservation, (options.resumed or {}).get("held")
        reservation: Reservation = GrantedReservation() if queued is None else QueueReservation(options.root, queued, held)
        agent = Agent(
            options.share,
            options.folder,
            options.attempt,
            options.node,
            options.root,
            reservation,
            given,
            options.part,
            options.name,
            options.resumed,
        )
        code = agent.run()
        if queued is None and agent.peers.termination:
            # Slurm has ended the step that would do it, too.
            staging.main([options.root])
        return code
    except (staging.SetupError, ControlError, TwinError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
