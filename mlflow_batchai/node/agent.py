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
import traceback
from typing import IO, Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from mlflow_batchai.node import containers, outcome, processes, protocol, register, sharefiles, staging, terms, tickets
from mlflow_batchai.node.control import open_control
from mlflow_batchai.node.control.base import ENDING, ControlError, ControlShare
from mlflow_batchai.node.layout import NodeLayout, node_id
from mlflow_batchai.node.outcome import Failure, Stop
from mlflow_batchai.node.peers import Peers
from mlflow_batchai.node.phases import Phases
from mlflow_batchai.node.runtime import Runtime
from mlflow_batchai.node.shipper import Shipper
from mlflow_batchai.node.turn import take_node

DRAIN_SECONDS = 60.0
# For how long nothing may move of what a mount still has to send when the job has failed.
LAST_DRAIN_SECONDS = 20.0
# Who has claimed the verdict writes it at once, or tries for as long as that.
CLAIM_SECONDS = sharefiles.PATIENCE_SECONDS + 10.0
# Of a share that was given up: its engine tells the client.
LOST_SHARE_SECONDS = 2.0
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
        part: (i, n): this node is the i-th of n on its machine, from 0.
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
        part: Tuple[int, int] = (0, 1),
        name: str = "",
    ) -> None:
        plan = _plan(open_control(share, given.get("share")), protocol.JobPaths(folder, attempt))
        if plan["protocol"] != protocol.PROTOCOL_VERSION:
            raise staging.SetupError(
                "the plan is of protocol %s, this agent of %d" % (plan["protocol"], protocol.PROTOCOL_VERSION)
            )
        plan["attempt"] = attempt
        self.root = root
        self.ticket = ticket
        self.layout = NodeLayout(root, plan, node, share, given.get("share"))
        self.node = node
        self.shipper = Shipper(self.layout, list(range(1, plan["nodeCount"])) if node == 0 else [0])
        self.runtime = Runtime(self.layout, self.shipper, given.get("variables") or {})
        self.runtime.registry = given.get("registry")
        self.peers = Peers(self.layout, self.shipper)
        self.phases = Phases(self.layout, self.shipper, self.runtime, self.peers, part, given, name)
        self._ticket_file: Optional[IO[str]] = None
        self._trouble = False
        self._lost_share: Optional[Failure] = None

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
        except tickets.LateError as error:
            failure = Failure(protocol.NODE_SETUP_FAILED, "%s: %s" % (self.layout.node_id, error), node=self.node)
        except ControlError as error:
            failure = Failure(protocol.NODE_SETUP_FAILED, "%s: %s" % (self.layout.node_id, error), node=self.node)
        except OSError as error:
            # A disk that is full, an account that may not: nobody wants to see our code for that.
            if error is self.shipper.broken:
                self._tell(error)
            failure = Failure(protocol.NODE_SETUP_FAILED, staging.disk_trouble(self.layout, error), node=self.node)
        except Exception as error:
            # A bug in the agent must still end the job with its words, not leave it running for ever.
            self._tell(error)
            failure = Failure(
                protocol.NODE_SETUP_FAILED,
                "the agent of %s failed: %s: %s" % (self.layout.node_id, type(error).__name__, error),
                node=self.node,
            )
        return 1 if self._end(failure, stop) or failure else 0

    def local_state(self, state: str) -> None:
        """What the engine's poll can say of this node without the share."""
        said = {"state": state, "job": self.layout.plan["job"]}
        if self._lost_share:
            said["failure"] = self._lost_share.as_record()
        tickets.set_state(self.root, self.ticket["number"], json.dumps(said))

    def _tell(self, error: BaseException) -> None:
        """Everything of an error that should not have happened: to the node's log, and to the agent's own."""
        # A share that fails is no bug, and the last line of the agent's log is what its client can tell of it.
        said = isinstance(error, ControlError)
        text = str(error) + "\n" if said else "".join(traceback.format_exception(type(error), error, error.__traceback__))
        sys.stderr.write(text)
        self.shipper.note(text.rstrip())

    # The end.

    def _end(self, failure: Optional[Failure], stop: Optional[Stop]) -> bool:
        """End what is ours and say how it ended; whatever goes wrong on the way, the last word is still written.

        Returns:
            Whether something went wrong.
        """
        self.layout.attempt.pace(ENDING)
        if failure and failure.code == protocol.SHARE_FAILED:
            with self._going_on():
                self._give_up_share(failure)
        if failure:
            self.shipper.record("failed", urgent=True, **failure.as_record())
            self.shipper.note("failed: %s" % failure)
        elif stop:
            self.shipper.note("stopping: %s" % stop)
        if stop or (failure and self.node == 0):
            # Node 0 tells the others; those only say why they leave.
            self.shipper.keep_saying("stop", why=str(failure or stop))
        left: Set[int] = set()
        with self._going_on():
            self.phases.sampler.stop()
        with self._going_on():
            left = self.runtime.end_everything(kill_first=bool(failure or stop))
        if left:
            self.shipper.note("could not end pids %s" % sorted(left))
        with self._going_on():
            self._drain()
        exit_record: Dict[str, Any] = {
            "node": self.node,
            "failure": failure.as_record() if failure else None,
            "stopped": (str(stop) or stop.kind) if stop else None,
            "ranks": self.runtime.rank_results(),
            "left": sorted(left),
        }
        with self._going_on():
            if self.node == 0:
                self._end_as_node_zero(failure, stop, exit_record)
            else:
                with self._going_on():
                    self.runtime.remove_container()
                self.shipper.note("done")
                self._finish_shipping()
                exit_record["segments"] = self.shipper.sequence
                self._write_exit(exit_record)
        with self._going_on():
            if failure and self.peers.leaderless:
                # Of several that come to this the first gives it; nobody may be left who could.
                self._claim_verdict(self._going_on_after(outcome.verdict(failure, None, self.node)))
        with self._going_on():
            if self.runtime.node_lock is not None:
                for trouble in self.phases.mounts.unmount_all():
                    sys.stderr.write("%s\n" % trouble)
                staging.remove_job_folder(self.layout.job)
        with self._going_on():
            self.local_state("ended")
        return self._trouble

    def _give_up_share(self, failure: Failure) -> None:
        """Nobody hears us by the share: the engine's poll tells the client at once, before ranks have saved what they can."""
        self._lost_share = failure
        self.shipper.abandon()
        self.layout.attempt.hasty()
        sys.stderr.write("%s\n" % failure)
        self.local_state("held")

    @property
    def _patience(self) -> float:
        return LOST_SHARE_SECONDS if self._lost_share else sharefiles.PATIENCE_SECONDS

    def _drain(self) -> None:
        """What was written on mounts since the ranks' good end, or before a bad one, is worth a while, and not the verdict."""
        try:
            self.phases.mounts.drain(LAST_DRAIN_SECONDS, most=3 * LAST_DRAIN_SECONDS)
        except Failure as failure:
            self.shipper.note(str(failure))

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """An error in this step of the end must not keep the next ones from being done."""
        try:
            yield
        except Exception as error:
            self._trouble = True
            self._tell(error)

    def _finish_shipping(self) -> None:
        until = time.monotonic() + (LOST_SHARE_SECONDS if self._lost_share else DRAIN_SECONDS)
        while not self.shipper.finish(min(1.0, max(0.1, until - time.monotonic()))):
            if not self.shipper.is_alive() or self.shipper.trouble:
                break
            # A share that hangs would take no last word either: it is waited for, as while ranks run.
            if time.monotonic() >= until and (self._lost_share or not self.shipper.hangs):
                break
        if not self.shipper.finish(0.0):
            self._trouble = True
            # It must not take the room that is kept for the last word.
            self.shipper.abandon()
            why = self.shipper.broken or self.shipper.error
            sys.stderr.write("records could not all be written to the share: %r\n" % why)

    def _write_exit(self, record: Dict[str, Any]) -> None:
        path = self.layout.paths.exit(self.node)
        sharefiles.patiently(lambda: self.layout.attempt.write("exit-%d" % self.node, path, [record]), self._patience)

    def _end_as_node_zero(self, failure: Optional[Failure], stop: Optional[Stop], exit_record: Dict[str, Any]) -> None:
        failures = [failure] if failure else []
        with self._going_on():
            heard = not self.layout.control.refused(0.0) and not self._lost_share
            if heard and (failure or stop) and not (stop and (stop.queued or stop.kind == "verdict")):
                self.peers.await_exits(lambda: self.runtime.pump(0.05))
            for node, record in sorted(self.peers.exits.items()):
                if record.get("left"):
                    self.shipper.note("%s could not end pids %s" % (node_id(node), record["left"]))
            failures += self.peers.failures()
            if not failures and (stop is None or stop.kind == "peer"):
                failures += self.peers.early_leavers()
        if stop and stop.kind == protocol.REQUEUE:
            # Who wants the job's end has come while we made room: there will be no next attempt.
            stop = self.peers.wish(stop.queued) or stop
        verdict = outcome.verdict(outcome.first_cause(failures), stop, attempt=self.layout.paths.attempt)
        wish = self.peers.wish(False)
        if wish is None or wish.kind != protocol.CANCEL:
            verdict = self._going_on_after(verdict)
        with self._going_on():
            if verdict["executionState"] == protocol.SUCCEEDED and (cut := self.phases.check_model()):
                verdict = outcome.verdict(None, cut, attempt=self.layout.paths.attempt)
        with self._going_on():
            self.runtime.stop_helpers()
        with self._going_on():
            self.runtime.remove_container()
        self.shipper.note("verdict: %s %s" % (verdict["executionState"], verdict["reason"] or ""))
        self._finish_shipping()
        with self._going_on():
            if self.runtime.node_lock is not None and self._copy_logs():
                self._drain()
        exit_record["segments"] = verdict["segments"] = self.shipper.sequence
        with self._going_on():
            self.layout.control.release(self.layout.paths.reserve)
        with self._going_on():
            self._write_exit(exit_record)
        self._claim_verdict(verdict)

    def _going_on_after(self, verdict: Dict[str, Any]) -> Dict[str, Any]:
        return terms.goes_on(verdict, self.layout.plan, self.layout.paths.attempt)

    def _copy_logs(self) -> bool:
        """Copy the logs where stdOutErrPathPrefix wants them; whether something was written."""
        prefix = self.layout.plan.get("logCopyPrefix")
        if prefix and not self.phases.mounts.has(prefix["volume"]):
            return False  # they would stay on the node's disk, in the way of the next mount
        try:
            staging.copy_logs(self.layout)
        except OSError as error:
            self._trouble = True
            sys.stderr.write("the logs could not all be copied to stdOutErrPathPrefix: %s\n" % error)
        return bool(prefix)

    def _claim_verdict(self, verdict: Dict[str, Any]) -> None:
        control, paths = self.layout.control, self.layout.paths
        claimed: List[bool] = []
        sharefiles.patiently(lambda: claimed.append(control.claim(paths.verdict)), self._patience)
        # If not, someone else was first, and the one verdict stands; or they died before they wrote it; or it was us: over
        # NFSv3 a mkdir whose answer was lost is asked again, and told that the folder is there.
        others = LOST_SHARE_SECONDS if self._lost_share else CLAIM_SECONDS
        if claimed[-1] or not sharefiles.comes(lambda: control.read_closed(paths.verdict_file), others):
            sharefiles.patiently(lambda: self._write_verdict(verdict), self._patience)

    def _write_verdict(self, verdict: Dict[str, Any]) -> None:
        # Were we frozen since the claim, someone else has given us up and finished it.
        path = self.layout.paths.verdict_file
        if self.layout.control.read_closed(path) is None:
            self.layout.attempt.write("verdict", path, [verdict])


def _plan(control: ControlShare, paths: protocol.JobPaths) -> Dict[str, Any]:
    """The plan as it holds for the attempt."""
    plan = _awaited(control, paths.plan)
    own = _awaited(control, paths.terms, "record of the attempt") if paths.attempt > 1 else None
    control.close()
    return terms.plan_of(plan, own)


def _awaited(control: ControlShare, path: str, what: str = "plan") -> Dict[str, Any]:
    """A file that was written before we were started."""
    until = time.monotonic() + PLAN_SECONDS
    while True:
        try:
            found = control.read_closed(path)
        except ControlError as error:
            raise staging.SetupError("the %s can't be read: %s" % (what, error)) from None
        except OSError as error:  # a denial: on the share we are another user than the submitter
            sentence = "the %s at %s can't be read by the node's user (uid %d): %s"
            raise staging.SetupError(sentence % (what, control.where(path), os.geteuid(), error.strerror or error)) from None
        if found is not None:
            return found
        if time.monotonic() > until:
            raise staging.SetupError("there is no %s at %s" % (what, control.where(path)))
        time.sleep(0.2)


def _part(text: str) -> Tuple[int, int]:
    index, parts = map(int, text.split("/"))
    if not 0 <= index < parts:
        raise ValueError("no such part")
    return index, parts


def main(arguments: List[str]) -> int:
    """``agent --share S --folder F --attempt A --node K --root R --ticket JSON``, and one JSON object on standard input.

    ``--share`` is a directory or an address. ``--part I/N`` says that this node is part I (from 0) of the N that its machine is
    cut into; ``--name TEXT`` is what the cluster calls it. The object: ``variables`` (name -> value, for the ranks), ``setup``
    (the same for the setup task), ``share`` (the SAS for an address, or null), ``volumes`` (index -> ``{"key": ...}`` or
    ``{"sas": ...}``), ``registry`` (``username`` and ``password``, or null).
    """
    parser = argparse.ArgumentParser(prog="agent")
    parser.add_argument("--share", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--ticket", required=True)
    parser.add_argument("--part", type=_part, default=(0, 1))
    parser.add_argument("--name", default="")
    options = parser.parse_args(arguments)
    given = json.loads(sys.stdin.read() or "{}")
    try:
        with open_control(options.share, given.get("share")).as_open_as_root():
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
