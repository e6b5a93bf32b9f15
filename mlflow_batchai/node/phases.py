"""The steps of an attempt on one node that has been taken: announce, set up, prepare, meet, run the ranks."""

import contextlib
import json
import os
import socket
import sys
import time
from typing import Any, Dict, List, Mapping, Optional

from mlflow_batchai.node import launchers, network, protocol, staging, trainenv
from mlflow_batchai.node.environment import job_environment, thread_variables
from mlflow_batchai.node.layout import NodeLayout, archive_path, node_id
from mlflow_batchai.node.outcome import Failure, Stop
from mlflow_batchai.node.runtime import PUMP_SECONDS, Runtime
from mlflow_batchai.node.shipper import Shipper
from mlflow_batchai.node.tasks import Task

RENDEZVOUS_SECONDS = 60.0
DESCRIBE_SECONDS = 20.0


class Phases:
    """Runs the steps in order; ``run`` returns when all ranks of this node have ended well.

    Raises (from ``run``):
        Failure: a step or a rank of this node failed.
        Stop: someone else ended the attempt.
    """

    def __init__(self, layout: NodeLayout, shipper: Shipper, runtime: Runtime) -> None:
        self.layout = layout
        self.plan: Dict[str, Any] = layout.plan
        self.shipper = shipper
        self.runtime = runtime
        self.announces: Dict[int, Dict[str, Any]] = {}
        self.python: str = self.plan["python"] or sys.executable
        self.exits: Dict[int, Dict[str, Any]] = {}
        self._ready: Dict[int, bool] = {}
        self._done = False
        self._peer_failures: List[Failure] = []
        self._deadline: Optional[float] = None

    def run(self) -> None:
        """All steps, in the order of a Batch AI job: mounts, code, environment, preparation, then the command."""
        staging.prepare_folders(self.layout)
        self._announce()
        self._await_announces()
        self._begin_clock()
        self._set_up()
        self._prepare()
        self._meet()
        self._run_ranks()
        self._await_the_others()

    # Steps.

    def _announce(self) -> None:
        record = {
            "node": self.layout.node,
            "host": socket.gethostname(),
            "address": self.plan.get("address") or network.own_address(),
            "gpus": self.plan["gpusPerNode"],
            "cores": self.plan["coresPerNode"] or len(os.sched_getaffinity(0)),
            "time": protocol.now_ms(),
        }
        protocol.write_closed(self.layout.on_share(self.layout.paths.announce(self.layout.node)), [record])
        self.announces[self.layout.node] = record
        self.shipper.note("node taken: %s (%s)" % (record["host"], record["address"]))

    def _await_announces(self) -> None:
        while True:
            for node in range(self.plan["nodeCount"]):
                if node not in self.announces:
                    found = protocol.read_closed(self.layout.on_share(self.layout.paths.announce(node)))
                    if found:
                        self.announces[node] = found
                        self.shipper.saw(node)
            if len(self.announces) == self.plan["nodeCount"]:
                return
            self._wait_a_little(starting=True)

    def _begin_clock(self) -> None:
        self.shipper.record("phase", urgent=True, phase="running", node=self.layout.node)
        if self.plan["maxWallClockSeconds"]:
            self._deadline = time.monotonic() + self.plan["maxWallClockSeconds"]

    def _set_up(self) -> None:
        staging.mount(self.layout)
        staging.make_directories(self.layout)
        staging.fetch_code(self.layout)
        staging.link_inputs(self.layout)
        staging.write_site(self.layout, _sitecustomize())
        sizes = launchers.spread(self.plan["ranks"], self.plan["nodeCount"])
        with open(self.layout.hostfile, "w", encoding="utf-8") as file:
            file.write(launchers.hostfile(self._addresses(), sizes))
        if self.plan["environment"]:
            self._phase("building the training environment")
            self.python = trainenv.build(self.layout, self.plan["environment"], self._run_setup, self._wait_a_little)
        self.shipper.note("training interpreter: %s" % self.python)

    def _prepare(self) -> None:
        if not self.plan["preparation"]:
            return
        self._phase("job preparation")
        task = Task("job preparation", None, lambda task, stream, lines: self.shipper.log(None, stream, lines))
        environment = self._environment({})
        self.runtime.start(task, ["bash", "-c", self.plan["preparation"]], environment)
        self.runtime.run_to_end(task, self._check)
        if task.exit_code != 0:
            raise Failure(
                protocol.JOB_PREPARATION_FAILED,
                "job preparation on %s %s" % (self.layout.node_id, task.verdict),
                node=self.layout.node,
                exit_code=task.exit_code,
                tail=list(task.tail),
            )

    def _run_setup(self, argv: List[str], environment: Mapping[str, str], name: str) -> Task:
        """For trainenv: one command of the environment's build, its output in the preparation's log."""
        task = Task(name, None, lambda task, stream, lines: self.shipper.log(None, stream, lines))
        variables = self._environment({})
        variables.update(environment)
        self.runtime.start(task, argv, variables, cwd=self.layout.temp)
        self.runtime.run_to_end(task, self._check)
        return task

    def _meet(self) -> None:
        """All nodes are ready before any rank starts: Horovod's own waiting is short."""
        self.shipper.record("ready", urgent=True, node=self.layout.node)
        if self.layout.node == 0:
            while len(self._ready) < self.plan["nodeCount"] - 1:
                self._wait_a_little()
            if launchers.needs_rendezvous(self.plan):
                address = {"address": self._addresses()[0], "port": self._start_rendezvous()}
            else:
                address = {"address": self._addresses()[0], "port": 0}
            protocol.write_closed(self.layout.on_share(self.layout.paths.rendezvous), [address])

    def _start_rendezvous(self) -> int:
        said: List[bytes] = []
        task = Task(
            "rendezvous server",
            None,
            lambda task, stream, lines: said.append(lines) if stream == "out" else None,
        )
        sizes = launchers.spread(self.plan["processCount"], self.plan["nodeCount"])
        hosts = ",".join("%s:%d" % (node_id(node), size) for node, size in enumerate(sizes) if size)
        argv = [
            self.python,
            archive_path(),
            "rendezvous",
            self._addresses()[0],
            hosts,
            str(self.plan["processCount"]),
        ]
        self.runtime.start(task, argv, self._environment({}), stdin=True, helper=True)
        until = time.monotonic() + RENDEZVOUS_SECONDS
        while not said:
            self.runtime.pump(0.02)
            self._check()
            if task.status is not None or time.monotonic() > until:
                self.runtime.drain([task])
                sentence = task.tail[-1] if task.tail else "it said nothing"
                raise Failure(
                    protocol.RENDEZVOUS_FAILED,
                    "Horovod's rendezvous server did not start on node-0: %s" % sentence,
                    node=0,
                    tail=list(task.tail),
                )
        return int(json.loads(said[0].decode())["port"])

    def _run_ranks(self) -> None:
        slots = [slot for slot in launchers.slots_of(self.plan) if slot.node == self.layout.node]
        rendezvous: Optional[Dict[str, Any]] = None
        path = self.layout.on_share(self.layout.paths.rendezvous)
        while rendezvous is None:
            rendezvous = protocol.read_closed(path)
            if rendezvous is None:
                self._wait_a_little()
        for slot in slots:
            task = Task(
                "rank %d" % slot.rank,
                slot.rank,
                lambda task, stream, lines: self.shipper.log(task.rank, stream, lines),
            )
            extra = launchers.rank_variables(self.plan, slot, rendezvous, self.plan.get("networkInterface"))
            extra.update(thread_variables(self.announces[self.layout.node]["cores"] // slot.local_size))
            extra["PYTHONPATH"] = self.layout.site + os.pathsep + archive_path()
            self.runtime.start(task, ["bash", "-c", self.plan["command"]], self._environment(extra))
        self.shipper.record("started", urgent=True, node=self.layout.node, ranks=[slot.rank for slot in slots])
        self.shipper.note("started %d rank(s): %s" % (len(slots), self.plan["command"]))
        running = len(slots)
        # A node without ranks (customToolkit on several nodes) stays taken until node 0's command has ended.
        while running or (not slots and not self._done):
            running -= self._look_at_ranks(PUMP_SECONDS)
            try:
                self._check()
            except Stop as stop:
                # A peer's failure is often the consequence of one here that we have not seen yet.
                if stop.kind != "cancel":
                    self._look_at_ranks(0.0)
                raise

    def _look_at_ranks(self, timeout: float) -> int:
        """Pump once; the number of ranks that have ended well, and a Failure if one has not."""
        ended = [task for task in self.runtime.pump(timeout) if task.rank is not None]
        failed = [task for task in ended if task.exit_code != 0]
        if failed:
            raise self._rank_failure(failed)
        return len(ended)

    def _await_the_others(self) -> None:
        """Node 0: its own ranks have ended well; the job ends when all have."""
        if self.layout.node != 0:
            return
        self.shipper.record("done", urgent=True, node=0)
        while not self._all_exits_read():
            self._wait_a_little()

    def _rank_failure(self, failed: List[Task]) -> Failure:
        self.runtime.drain(failed, 1.0)
        failures = [
            Failure(
                protocol.JOB_FAILED,
                "%s on %s %s" % (task.name, self.layout.node_id, task.verdict),
                node=self.layout.node,
                rank=task.rank,
                exit_code=task.exit_code,
                tail=list(task.tail),
                signalled=bool(task.signal or (task.exit_code or 0) > 128),
            )
            for task in failed
        ]
        return min(failures, key=lambda failure: failure.is_consequence and not failure.signalled)

    # What happens meanwhile elsewhere.

    def _wait_a_little(self, starting: bool = False) -> None:
        self.runtime.pump(0.05)
        self._check(starting)

    def _check(self, starting: bool = False) -> None:
        """Raise if the attempt is to end here."""
        if self.shipper.broken is not None:
            raise self.shipper.broken
        if self.shipper.verdict is not None:
            raise Stop("verdict", "the attempt has its verdict already")
        for request in self.shipper.requests():
            # Until every node is taken the job is queued, even if ours is taken already.
            raise Stop("cancel", request.get("why", ""), queued=starting, by=request.get("who"))
        self.check_peers(starting)
        if self._deadline and self.layout.node == 0 and time.monotonic() > self._deadline:
            raise Failure(
                protocol.WALL_CLOCK_EXCEEDED,
                "the job ran longer than constraints.maxWallClockTime (%d s)" % self.plan["maxWallClockSeconds"],
                node=0,
            )

    def check_peers(self, starting: bool = False) -> None:
        """Take in what peers have sent; raise if one failed, stopped, or fell silent."""
        for node, record in self.shipper.received():
            if record["k"] == "ready":
                self._ready[node] = True
            elif record["k"] == "done":
                self._done = True
            elif record["k"] == "failed" and self.layout.node == 0:
                self._peer_failures.append(Failure.from_record(record))
            elif record["k"] == "stop" and self.layout.node != 0:
                raise Stop("node0", record["why"])
        if self._peer_failures:
            raise Stop("peer", str(self._peer_failures[0]))
        for node in range(1, self.plan["nodeCount"]) if self.layout.node == 0 else [0]:
            silent = self.shipper.silent_seconds(node)
            # A peer that waits for its node may not have begun to speak yet; one that has written its exit is done.
            if silent <= self.plan["lossSeconds"] or (starting and not self.shipper.heard(node)):
                continue
            if self.layout.node == 0 and self._exit_of(node):
                continue
            sentence = "%s has not been heard of for %d s" % (node_id(node), silent)
            if self.layout.node != 0:
                raise Stop("node0", sentence)
            self._peer_failures.append(Failure(protocol.NODE_LOST, sentence, node=node))
            raise Stop("peer", sentence)

    def peer_failures(self) -> List[Failure]:
        """Failures that peers told of, with those that have come since."""
        with contextlib.suppress(Stop):
            self.check_peers()
        told = [record["failure"] for record in self.exits.values() if record.get("failure")]
        return self._peer_failures + [Failure.from_record(failure) for failure in told]

    def _all_exits_read(self) -> bool:
        """Whether each peer that still lives has written its exit, and all that it sent before was read."""
        lost = {failure.node for failure in self._peer_failures if failure.code == protocol.NODE_LOST}
        for node in range(1, self.plan["nodeCount"]):
            if node in lost:
                continue
            record = self._exit_of(node)
            if record is None or self.shipper.heard(node) < record["segments"]:
                return False
        return True

    def _exit_of(self, node: int) -> Optional[Dict[str, Any]]:
        """A peer's exit.json once it is there; a share that can't be read just now has none."""
        if node not in self.exits:
            with contextlib.suppress(OSError):
                record = protocol.read_closed(self.layout.on_share(self.layout.paths.exit(node)))
                if record:
                    self.exits[node] = record
        return self.exits.get(node)

    def early_leavers(self) -> List[Failure]:
        """Peers that ended their ranks although nothing had failed and node 0 had not stopped: they had lost sight of it."""
        return [
            Failure(protocol.NODE_LOST, "%s ended its part: %s" % (node_id(node), record["stopped"]), node=node)
            for node, record in sorted(self.exits.items())
            if record.get("stopped")
        ]

    def await_exits(self, seconds: float) -> None:
        """Node 0, after a stop: give the peers that long to end what they have and to say how it ended."""
        until = time.monotonic() + seconds
        while not self._all_exits_read() and self.shipper.verdict is None and time.monotonic() < until:
            self.peer_failures()
            self.runtime.pump(0.05)

    def describe_models(self) -> None:
        """What the training interpreter can say of saved models that no rank described (no TensorFlow is imported)."""
        files = staging.model_files(self.layout, self.runtime.reported_models)
        if not files:
            return
        said: List[bytes] = []
        task = Task(
            "model description",
            None,
            lambda task, stream, lines: said.append(lines) if stream == "out" else None,
        )
        self.runtime.start(
            task,
            [self.python, archive_path(), "describe", *files],
            self._environment({}),
            cwd=self.layout.temp,
            helper=True,
        )
        until = time.monotonic() + DESCRIBE_SECONDS
        while task.status is None and time.monotonic() < until:
            self.runtime.pump(0.02)
        self.runtime.drain([task], 0.5)
        for path, line in zip(files, b"".join(said).decode("utf-8", "replace").splitlines()):
            try:
                meta = json.loads(line)
            except ValueError:
                continue
            self.shipper.record(
                "report",
                body={"type": "model", "path": path, "ts": protocol.now_ms(), "meta": meta, "found": True},
            )

    # Small things.

    def _phase(self, name: str) -> None:
        self.shipper.record("phase", urgent=True, phase=name, node=self.layout.node)
        self.shipper.note(name)

    def _addresses(self) -> List[str]:
        return [self.announces[node]["address"] for node in sorted(self.announces)]

    def _environment(self, extra: Mapping[str, str]) -> Dict[str, str]:
        return job_environment(
            self.layout,
            os.environ,
            self._addresses(),
            self.plan["gpusPerNode"],
            self.runtime.secrets,
            self.python,
            extra,
        )


def _sitecustomize() -> str:
    from mlflow_batchai.training.guard import SITECUSTOMIZE

    return SITECUSTOMIZE
