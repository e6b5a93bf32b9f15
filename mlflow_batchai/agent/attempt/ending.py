"""End an attempt on one node: stop its processes, send the last records, write the exit and the verdict.

Whatever goes wrong on the way, the last word is still written: each step is done for itself.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, Callable

from mlflow_batchai.agent import outcome, protocol, staging
from mlflow_batchai.agent.attempt import overrides, slurm_end
from mlflow_batchai.agent.attempt.phases import Phases
from mlflow_batchai.agent.layout import node_id
from mlflow_batchai.agent.outcome import Failure, Stop
from mlflow_batchai.agent.peers import DRAIN_REST, LOGS_REST, PEERS_REST, RECORDS_REST
from mlflow_batchai.agent.share import sharefiles
from mlflow_batchai.agent.share.base import ENDING, ControlError
from mlflow_batchai.agent.transport import totals
from mlflow_batchai.agent.transport.shipper import Shipper

DRAIN_SECONDS = 60.0
# For how long nothing may move of what a mount still has to send when the job has failed.
LAST_DRAIN_SECONDS = 20.0
# Who has claimed the verdict writes it at once, or tries for as long as that.
CLAIM_SECONDS = sharefiles.PATIENCE_SECONDS + 10.0
# Of a share that was given up: its engine tells the client.
LOST_SHARE_SECONDS = 2.0


class Ending:
    """The end of an attempt on one node; on node 0 with the verdict, from the exits of all nodes.

    Args:
        report: told (state, why the share was given up) for whoever asks the node itself (``Reservation.report``).
    """

    def __init__(self, phases: Phases, report: Callable[[str, Failure | None], None]) -> None:
        self._phases = phases
        self._layout, self._node = phases.layout, phases.layout.node
        self._shipper, self._runtime, self._peers = phases.shipper, phases.runtime, phases.peers
        self._report = report
        self._failed = False
        self._lost_share: Failure | None = None

    def run(self, failure: Failure | None, stop: Stop | None) -> bool:
        """End what is ours and say how it ended. Returns whether something went wrong."""
        self._layout.attempt.pace(ENDING)
        if failure and failure.code == protocol.SHARE_FAILED:
            with self._guarded():
                self._give_up_share(failure)
        if failure:
            self._shipper.record("failed", urgent=True, **failure.as_record())
            self._shipper.note(f"failed: {failure}")
        elif stop:
            self._shipper.note(f"stopping: {stop}")
        if stop or (failure and self._node == 0):
            # Node 0 tells the others; those only say why they leave.
            self._shipper.keep_saying("stop", why=str(failure or stop))
        left: set[int] = set()
        with self._guarded():
            self._phases.sampler.stop()
        with self._guarded():
            left = self._runtime.end_everything(cut_short=bool(failure or stop), rest=self._peers.processes_rest)
        if left:
            self._shipper.note(f"could not end pids {sorted(left)}")
        with self._guarded():
            # It may take as long as ranks have left files.
            if self._runtime.held is not None and not self._lost_share and self._peers.processes_rest() > 0:
                for error in staging.open_up(self._layout):
                    self._shipper.note(error)
        with self._guarded():
            self._drain(DRAIN_REST)
        exit_record: dict[str, Any] = {
            "node": self._node,
            "failure": failure.as_record() if failure else None,
            "stopped": (str(stop) or stop.kind) if stop else None,
            "ranks": self._runtime.rank_results(),
            "left": sorted(left),
        }
        with self._guarded():
            if self._node == 0:
                self._end_as_node_zero(failure, stop, exit_record)
            else:
                self._remove_container()
                self._shipper.note("done")
                self._finish_shipping()
                exit_record.update(self._totals())
                self._write_exit(exit_record)
        with self._guarded():
            if failure and self._peers.leaderless:
                # Of several that come to this the first gives it; nobody may be left who could.
                self._claim_verdict(self._with_retry(outcome.verdict(failure, None, self._node)))
        with self._guarded():
            self._runtime.remove_container()
        with self._guarded():
            if self._runtime.held is not None:
                for error in self._phases.mounts.unmount_all():
                    sys.stderr.write(f"{error}\n")
                stays = staging.remove_job_folder(self._layout.job)
                if stays:
                    sys.stderr.write(f"{stays}\n")
        with self._guarded():
            self._report("ended", self._lost_share)
        return self._failed

    def _give_up_share(self, failure: Failure) -> None:
        """Nobody hears us by the share: the engine's poll tells the client at once, before ranks have saved what they can."""
        self._lost_share = failure
        self._shipper.abandon()
        self._layout.attempt.hasty()
        sys.stderr.write(f"{failure}\n")
        self._report("held", failure)

    def _patiently(self, step: Callable[[], None]) -> None:
        if self._lost_share:
            sharefiles.patiently(step, LOST_SHARE_SECONDS, LOST_SHARE_SECONDS)
        else:
            sharefiles.patiently(step, sharefiles.PATIENCE_SECONDS)

    def _drain(self, rest: float) -> None:
        """What was written on mounts since the ranks' good end, or before a bad one, is worth a while, and not the verdict."""
        until = time.monotonic() + 3 * LAST_DRAIN_SECONDS
        try:
            self._phases.mounts.drain(LAST_DRAIN_SECONDS, lambda: self._peers.within(until - time.monotonic(), rest))
        except Failure as failure:
            self._shipper.note(str(failure))

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error in this step of the end must not keep the next ones from being done."""
        try:
            yield
        except Exception as error:
            self._failed = True
            tell(error, self._shipper)

    def _remove_container(self) -> None:
        """Its engine may take a minute for it, so after a SIGTERM this comes last; it goes with this agent anyway."""
        if not self._peers.termination:
            with self._guarded():
                self._runtime.remove_container()

    def _finish_shipping(self) -> None:
        until = time.monotonic() + (LOST_SHARE_SECONDS if self._lost_share else DRAIN_SECONDS)
        rest = RECORDS_REST if self._node == 0 else PEERS_REST
        while not self._shipper.finish(min(1.0, max(0.1, self._peers.within(until - time.monotonic(), rest)))):
            if not self._shipper.is_alive() or self._shipper.trouble:
                break
            # A share that hangs would take no last word either: it is waited for, as while ranks run.
            hurried = self._lost_share or self._peers.termination
            if not self._peers.within(until - time.monotonic(), rest) and (hurried or not self._shipper.hangs):
                break
        if not self._shipper.finish(0.0):
            self._failed = True
            # It must not take the room that is kept for the last word.
            self._shipper.abandon()
            why = self._shipper.broken or self._shipper.error
            sys.stderr.write(f"records could not all be written to the share: {why!r}\n")

    def _totals(self) -> dict[str, Any]:
        shipper, reports = self._shipper, self._runtime.reports
        return totals.record(shipper.sequence, shipper.log_totals, shipper.unsent_lines, reports.counts(), reports.uncounted())

    def _write_exit(self, record: dict[str, Any]) -> None:
        path = self._layout.paths.exit(self._node)
        self._patiently(lambda: self._layout.attempt.write(f"exit-{self._node}", path, [record]))

    def _end_as_node_zero(self, failure: Failure | None, stop: Stop | None, exit_record: dict[str, Any]) -> None:
        failures = [failure] if failure else []
        with self._guarded():
            heard = not self._layout.control.refused(0.0) and not self._lost_share and self._is_begun()
            if heard and (failure or stop) and not (stop and (stop.queued or stop.kind == "verdict")):
                self._peers.await_exits(lambda: self._runtime.pump(0.05))
            for node, record in sorted(self._peers.exits.items()):
                if record.get("left"):
                    self._shipper.note(f"{node_id(node)} could not end pids {record['left']}")
            failures += self._peers.failures()
            if not failures and (stop is None or stop.kind == "peer"):
                failures += self._peers.early_leavers()
        if stop and stop.kind == protocol.REQUEUE:
            # Who wants the job's end has come while we made room: there will be no next attempt.
            stop = self._peers.wish(stop.queued) or stop
        cause = outcome.first_cause(failures)
        if self._peers.termination and cause and cause.code == protocol.NODE_LOST and not (stop and stop.asked):
            cause = slurm_end.cause(cause, self._peers.within(math.inf, RECORDS_REST))
        verdict = outcome.verdict(cause, stop, attempt=self._layout.paths.attempt)
        wish = self._peers.wish(False)
        if wish is None or wish.kind != protocol.CANCEL:
            verdict = self._with_retry(verdict)
        with self._guarded():
            if verdict["executionState"] == protocol.SUCCEEDED and (cut := self._phases.check_model()):
                verdict = outcome.verdict(None, cut, attempt=self._layout.paths.attempt)
        with self._guarded():
            self._runtime.stop_helpers()
        self._remove_container()
        self._shipper.note(f"verdict: {verdict['executionState']} {verdict['reason'] or ''}")
        self._finish_shipping()
        with self._guarded():
            if self._runtime.held is not None and self._copy_logs():
                self._drain(LOGS_REST)
        exit_record.update(self._totals())
        verdict["segments"] = exit_record["segments"]
        verdict["totals"] = {str(node): totals.of(record) for node, record in self._peers.exits.items()}
        verdict["totals"]["0"] = totals.of(exit_record)
        with self._guarded():
            self._layout.control.release(self._layout.paths.reserve)
        with self._guarded():
            self._write_exit(exit_record)
        self._claim_verdict(verdict)

    def _is_begun(self) -> bool:
        """Whether a node of the job is taken: before that peers may sleep (``reservation.waiter``), and hear of the verdict."""
        if self._runtime.held is None:
            with contextlib.suppress(OSError, Failure):
                self._peers.all_announced()
        return self._runtime.held is not None or bool(self._peers.announces)

    def _with_retry(self, verdict: dict[str, Any]) -> dict[str, Any]:
        return overrides.goes_on(verdict, self._layout.plan, self._layout.paths.attempt)

    def _copy_logs(self) -> bool:
        """Copy the logs where stdOutErrPathPrefix wants them; whether something was written."""
        prefix = self._layout.plan.log_copy_prefix
        if prefix and prefix.volume is not None and not self._phases.mounts.has(prefix.volume):
            return False  # they would stay on the node's disk, in the way of the next mount
        try:
            staging.copy_logs(self._layout)
        except OSError as error:
            self._failed = True
            sys.stderr.write(f"the logs could not all be copied to stdOutErrPathPrefix: {error}\n")
        return bool(prefix)

    def _claim_verdict(self, verdict: dict[str, Any]) -> None:
        control, paths = self._layout.control, self._layout.paths
        claimed: list[bool] = []
        self._patiently(lambda: claimed.append(control.claim(paths.verdict)))
        # If not, someone else was first, and the one verdict stands; or they died before they wrote it; or it was us: over
        # NFSv3 a mkdir whose answer was lost is asked again, and told that the folder is there.
        others = LOST_SHARE_SECONDS if self._lost_share else CLAIM_SECONDS
        if claimed[-1] or not sharefiles.comes(lambda: control.read_closed(paths.verdict_file), others):
            self._patiently(lambda: self._write_verdict(verdict))

    def _write_verdict(self, verdict: dict[str, Any]) -> None:
        # Were we frozen since the claim, someone else has given us up and finished it.
        path = self._layout.paths.verdict_file
        if self._layout.control.read_closed(path) is None:
            self._layout.attempt.write("verdict", path, [verdict])


def tell(error: BaseException, shipper: Shipper) -> None:
    """Everything of an error that should not have happened: to the node's log, and to the agent's own."""
    # A share that fails is no bug, and the last line of the agent's log is what its client can tell of it.
    said = isinstance(error, ControlError)
    text = str(error) + "\n" if said else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    sys.stderr.write(text)
    shipper.note(text.rstrip())
