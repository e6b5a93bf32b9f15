"""The agent: one per node and attempt; from waiting for its turn to the verdict.

It runs in its own session, is told its secrets on standard input, and talks to its peers only through the job folder. Node
0's agent joins the logs and claims the verdict; every other agent follows node 0, and gives the verdict if that never came.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from typing import IO, Any, Dict, List, Mapping, Optional, Tuple

from mlflow_batchai.agent import containers, permissions, processes, protocol, register, staging, terms, tickets
from mlflow_batchai.agent.control import open_control
from mlflow_batchai.agent.control.base import ControlError, ControlShare
from mlflow_batchai.agent.ending import Ending, tell
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.outcome import Failure, Stop
from mlflow_batchai.agent.peers import Peers
from mlflow_batchai.agent.phases import Phases
from mlflow_batchai.agent.plan import Plan, PlanError, read_plan
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.shipper import Shipper
from mlflow_batchai.agent.turn import take_node

# Room on the share for the verdict, and for what is relayed after it.
RESERVE_BYTES = 256 << 10
# A mount with a cache shows the submitter's file a while after it was written.
PLAN_SECONDS = 10.0


class Agent:
    """One node's part in one attempt of a job.

    Args:
        share: the control share: its path on this node, or its address.
        folder: the job folder on the share.
        attempt: its number, from 1.
        node: index of this node in the job.
        root: the node's own folder.
        ticket: what ``tickets.take`` returned, for this node.
        given: what is never written anywhere (see ``main``).
        part: (i, n, m): this node is the i-th of n on its machine, from 0, and of m among which its GPUs are divided.
        name: what the cluster calls this node; empty: its id in the job.
    """

    def __init__(
        self,
        share: str,
        folder: str,
        attempt: int,
        node: int,
        root: str,
        ticket: Mapping[str, Any],
        given: Mapping[str, Any],
        part: Tuple[int, int, int] = (0, 1, 1),
        name: str = "",
    ) -> None:
        plan = _plan(open_control(share, given.get("share")), protocol.JobPaths(folder, attempt), given)
        if plan.protocol != protocol.PROTOCOL_VERSION:
            raise staging.SetupError(
                "the plan is of protocol %s, this agent of %d" % (plan.protocol, protocol.PROTOCOL_VERSION)
            )
        self.root = root
        self.ticket = ticket
        self.layout = NodeLayout(root, plan, node, share, given.get("share"))
        self.node = node
        self.shipper = Shipper(self.layout, list(range(1, plan.node_count)) if node == 0 else [0])
        self.runtime = Runtime(self.layout, self.shipper, given.get("variables") or {})
        self.runtime.registry = given.get("registry")
        self.peers = Peers(self.layout, self.shipper)
        self.phases = Phases(self.layout, self.shipper, self.runtime, self.peers, part, given, name)
        self._ticket_file: Optional[IO[str]] = None

    def run(self) -> int:
        """Take part in the attempt until its end; 0 unless this node could not do its part."""
        processes.become_subreaper()
        failure: Optional[Failure] = None
        stop: Optional[Stop] = None
        late: Optional[Exception] = None
        try:
            # It stays open until this process ends. Before the shipper says the first word.
            self._ticket_file = tickets.claim(self.root, self.ticket["number"], self.ticket["taken"])
            register.sign(self.root, self.ticket["number"])
        except tickets.TwinError as error:
            sys.stderr.write("%s\n" % error)
            return 1
        except (OSError, tickets.LateError) as error:
            late = error
        self.shipper.start()
        try:
            if late is not None:
                raise late
            self.runtime.node_lock = take_node(
                self.layout, self.ticket, self.shipper, lambda: self.peers.check(starting=True), self.local_state
            )
            if self.node == 0:
                with contextlib.suppress(OSError):  # what comes next meets it too
                    self.layout.control.reserve(self.layout.paths.reserve, RESERVE_BYTES)
            # Of a job whose agent was killed, for the node is ours.
            left = containers.sweep(self.root)
            if left:
                self.shipper.note(left)
            self.phases.run()
        except Stop as reason:
            stop = reason
        except Failure as reason:
            failure = reason
        except staging.SetupError as error:
            failure = Failure(protocol.NODE_SETUP_FAILED, str(error), node=self.node)
        except (tickets.LateError, ControlError) as error:
            failure = Failure(protocol.NODE_SETUP_FAILED, "%s: %s" % (self.layout.node_id, error), node=self.node)
        except OSError as error:
            # A disk that is full, an account that may not: nobody wants to see our code for that.
            if error is self.shipper.broken:
                tell(error, self.shipper)
            failure = Failure(protocol.NODE_SETUP_FAILED, staging.disk_trouble(self.layout, error), node=self.node)
        except Exception as error:
            # A bug in the agent must still end the job with its words, not leave it running for ever.
            tell(error, self.shipper)
            failure = Failure(
                protocol.NODE_SETUP_FAILED,
                "the agent of %s failed: %s: %s" % (self.layout.node_id, type(error).__name__, error),
                node=self.node,
            )
        ending = Ending(self.layout, self.shipper, self.runtime, self.peers, self.phases, self.local_state)
        return 1 if ending.run(failure, stop) or failure else 0

    def local_state(self, state: str, lost_share: Optional[Failure] = None) -> None:
        """What the engine's poll can say of this node without the share.

        Args:
            lost_share: why it was given up: nobody will hear of it by the share.
        """
        said: Dict[str, Any] = {"state": state, "job": self.layout.plan.job}
        if lost_share:
            said["failure"] = lost_share.as_record()
        tickets.set_state(self.root, self.ticket["number"], json.dumps(said))


def _plan(control: ControlShare, paths: protocol.JobPaths, given: Mapping[str, Any]) -> Plan:
    """The plan as it holds for the attempt."""
    plan = _awaited(control, paths.plan, "plan", given.get("plan"))
    own = _awaited(control, paths.terms, "record of the attempt", given.get("attempt")) if paths.attempt > 1 else None
    control.close()
    try:
        return terms.plan_of(read_plan(plan), paths.attempt, own)
    except PlanError as error:
        raise staging.SetupError("the plan can't be read: %s" % error) from None


def _awaited(control: ControlShare, path: str, what: str, digest: Optional[str]) -> Dict[str, Any]:
    """A file that was written before we were started, by who started us: it has that digest."""
    until = time.monotonic() + PLAN_SECONDS
    while True:
        try:
            found = control.read_closed(path)
        except ControlError as error:
            raise staging.SetupError("the %s can't be read: %s" % (what, error)) from None
        except OSError as error:  # a denial: on the share we are another user than the submitter
            sentence = "the %s at %s can't be read by the node's user (uid %d): %s"
            raise staging.SetupError(sentence % (what, control.where(path), os.geteuid(), error.strerror or error)) from None
        if found is not None and protocol.digest(found) == digest:
            return found
        if found is not None:
            sentence = "the %s at %s is not what its submitter wrote; nothing of it was run"
            raise staging.SetupError(sentence % (what, control.where(path)))
        if time.monotonic() > until:
            raise staging.SetupError("there is no %s at %s" % (what, control.where(path)))
        time.sleep(0.2)


def _part(text: str) -> Tuple[int, int, int]:
    index, parts, divided = map(int, text.split("/"))
    if not 0 <= index < parts or divided < 1:
        raise ValueError("no such part")
    return index, parts, divided


def main(arguments: List[str]) -> int:
    """``agent --share S --folder F --attempt A --node K --root R --ticket JSON``, and one JSON object on standard input.

    ``--share`` is a directory or an address. ``--part I/N/M`` says that this node is part I (from 0) of the N that its machine
    is cut into, and of the M among which its GPUs are divided; ``--name TEXT`` is what the cluster calls it.

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
    parser.add_argument("--ticket", required=True)
    parser.add_argument("--part", type=_part, default=(0, 1, 1))
    parser.add_argument("--name", default="")
    options = parser.parse_args(arguments)
    os.umask(permissions.PRIVATE)
    given = json.loads(sys.stdin.read() or "{}")
    try:
        agent = Agent(
            options.share,
            options.folder,
            options.attempt,
            options.node,
            options.root,
            json.loads(options.ticket),
            given,
            options.part,
            options.name,
        )
        return agent.run()
    except (staging.SetupError, ControlError) as error:
        sys.stderr.write("%s\n" % error)
        return 1
