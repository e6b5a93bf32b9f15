"""The phases of an attempt on a reserved node: announce, set up, prepare, rendezvous, run the ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from mlflow_batchai.agent import containers, protocol, staging
from mlflow_batchai.agent.attempt import ranks
from mlflow_batchai.agent.attempt.gpu_allocation import GpuAllocation
from mlflow_batchai.agent.attempt.interface_choice import InterfaceChoice
from mlflow_batchai.agent.attempt.launch import Launch
from mlflow_batchai.agent.attempt.preparation import Preparation
from mlflow_batchai.agent.environments.inventory import Inventory
from mlflow_batchai.agent.metrics.sampler import Sampler
from mlflow_batchai.agent.mounts.mounts import Mounts
from mlflow_batchai.agent.outcome import Failure, Stop
from mlflow_batchai.agent.peers import Peers
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.runtime import Runtime
from mlflow_batchai.agent.share.base import ENDING, GATHERING, RUNNING, STARTING

# For how long node 0 looks all the time whether the others are ready.
HASTE_SECONDS = 2.0


class Phases:
    """Runs the steps in order; ``run`` returns when all ranks of this node have ended well.

    Args:
        part: (i, n, m): this node is the i-th of n on its machine, which share its cores, and of m, which share its GPUs.
        credentials: what the agent was told on its standard input (see ``agent.agent.main``).

    Raises (from ``run``):
        Failure: a step or a rank of this node failed.
        Stop: someone else ended the attempt.
    """

    def __init__(
        self,
        runtime: Runtime,
        peers: Peers,
        part: tuple[int, int, int],
        credentials: Mapping[str, Any],
        name: str,
    ) -> None:
        self.layout, self.shipper = layout, shipper = runtime.layout, runtime.shipper
        self.plan: Plan = layout.plan
        self.runtime = runtime
        self.peers = peers
        self.meeting = InterfaceChoice(peers)
        self.part = part
        self.name = name or layout.node_id
        self.gpus = GpuAllocation(peers, (part[0], part[2]), self._wait_a_little)
        self.sampler = Sampler(layout, shipper, self._in_container)
        self.preparation = Preparation(runtime, self._check, self._environment)
        self.inventory = Inventory(runtime)
        self.python = sys.executable
        self.credentials = credentials
        volumes = credentials.get("volumes") or {}
        self.mounts = Mounts(layout, shipper, runtime, volumes, self._check, layout.control)
        self._deadline: float | None = None

    def run(self) -> None:
        """All steps, in the order of a Batch AI job: mounts, setup task, code, environment, preparation, command."""
        for trouble in staging.prepare_folders(self.layout):
            self.shipper.note(trouble)
        self.layout.attempt.pace(GATHERING)
        self._announce()
        self._await_announces()
        self.layout.attempt.pace(STARTING)
        self.gpus.check()
        self._begin_clock()
        self.sampler.start(self.gpus.own.ids)
        self.meeting.settle(self._wait_a_little)
        self._set_up()
        self._enter_container()
        self.python = self.preparation.interpreter()
        if not (self.runtime.container or self.preparation.below):  # an environment of the job's own has that name
            staging.write_python(self.layout, self.python)
        self.preparation.job_preparation()
        launch = Launch(self.runtime, self.peers, self._known(), self.gpus.counts(), self._check)
        self._meet(launch)
        self._run_ranks(launch)
        self.inventory.wait()
        self.mounts.drain()
        self._await_the_others()

    def _announce(self) -> None:
        record = {
            "node": self.layout.node,
            "name": self.name,
            **self.meeting.open(),
            "gpus": self.gpus.find(),
            "cores": max(1, len(os.sched_getaffinity(0)) // self.part[1]),
            "time": protocol.now_ms(),
        }
        self.layout.attempt.write(f"announce-{self.layout.node}", self.layout.paths.announce(self.layout.node), [record])
        self.peers.announces[self.layout.node] = record
        self.shipper.note(f"node taken: {record['host']}")
        found = self.gpus.own
        self.shipper.note(f"GPUs: {', '.join(found.ids) or 'none'} ({found.note}); cores: {record['cores']}")

    def _await_announces(self) -> None:
        while not self.peers.all_announced():
            self._wait_a_little(starting=True)

    def _begin_clock(self) -> None:
        self.shipper.record("phase", urgent=True, phase="running", node=self.layout.node)
        if self.plan.max_wall_clock_seconds:
            self._deadline = time.monotonic() + self.plan.max_wall_clock_seconds

    def _set_up(self) -> None:
        self.mounts.mount_all()
        self._run_setup_task()
        staging.make_directories(self.layout)
        staging.fetch_code(self.layout)
        staging.link_inputs(self.layout)
        staging.write_run(self.layout, *_plugins())
        sizes = ranks.slots_per_node(self.plan, self.gpus.counts())
        with open(self.layout.hostfile, "w", encoding="utf-8") as file:
            file.write(ranks.hostfile(self.peers.addresses(), sizes))

    def _run_setup_task(self) -> None:
        """The cluster's, where it hasn't run on this node yet. Its time is not the job's: the job's clock stands still."""
        task = self.plan.setup_task
        if task is None:
            return
        from mlflow_batchai.agent.attempt.setup import SetupTaskRun  # few clusters have one

        begun = time.monotonic()
        secrets = self.credentials.get("setup") or {}
        gpus_here = len(self.gpus.own.ids)
        SetupTaskRun(self.runtime, task, self.peers.check, secrets, self.name, gpus_here).run()
        if self._deadline:
            self._deadline += time.monotonic() - begun

    def _enter_container(self) -> None:
        """Where the plan names an image: all that is started from here on runs in its container."""
        wanted = self.plan.container
        if not wanted:
            return
        engine = containers.engine(wanted)
        if engine is None:
            sentence = f"{self.layout.node_id}: {containers.missing(wanted)}"
            image = [("imageName", wanted.image)]
            raise Failure(protocol.CONTAINER_FAILED, sentence, node=self.layout.node, details=image)
        # Few jobs have one.
        from mlflow_batchai.agent.containers.apptainer import Apptainer
        from mlflow_batchai.agent.containers.container import Container

        container = (Apptainer if wanted.engine else Container)(
            self.layout, self.shipper, self.runtime, wanted, self.runtime.registry, engine, self.gpus.own.ids, self._check
        )
        container.start()
        self.runtime.container = container

    def _meet(self, launch: Launch) -> None:
        """All nodes are ready before any rank starts: Horovod's own waiting is short."""
        self.shipper.keep_saying("ready", node=self.layout.node)
        if self.layout.node == 0:
            address, port = launch.serve()
            # Nodes that do the same are ready at nearly the same moment.
            until = time.monotonic() + HASTE_SECONDS
            while not self.peers.all_ready():
                if time.monotonic() < until:
                    self.shipper.look()
                self._wait_a_little()
                launch.check_server()
            self.layout.attempt.write("rendezvous", self.layout.paths.rendezvous, [{"address": address, "port": port}])

    def _run_ranks(self, launch: Launch) -> None:
        rendezvous: dict[str, Any] | None = None
        while rendezvous is None:
            rendezvous = self.peers.awaited("rendezvous", self.layout.paths.rendezvous)
            if rendezvous is None:
                self._wait_a_little()
        self.shipper.stop_saying()
        launch.start(rendezvous)
        if self.layout.node == 0 and self.python:
            self.inventory.ask(self.python, self._environment(), self.layout.temp)
        self.layout.attempt.pace(RUNNING)
        launch.watch()

    def _await_the_others(self) -> None:
        if self.layout.node != 0:
            return
        self.layout.attempt.pace(ENDING)
        self.shipper.keep_saying("done", node=0)
        while not self.peers.all_ended():
            self._wait_a_little()

    def _wait_a_little(self, starting: bool = False) -> None:
        self.runtime.pump(0.05)
        self._check(starting)

    def _check(self, starting: bool = False) -> None:
        self.peers.check(starting)
        if self._deadline and self.layout.node == 0 and time.monotonic() > self._deadline:
            raise Failure(
                protocol.JOB_TIMEOUT,
                f"the job ran longer than constraints.maxWallClockTime ({self.plan.max_wall_clock_seconds:.0f} s)",
                node=0,
            )

    def check_model(self) -> Stop | None:
        """Node 0: have the job's model loaded and tried; what has ended that before its time, if something did."""
        # Node 0 alone needs it, at the end: until then it would cost memory.
        from mlflow_batchai.agent.attempt.model_check import ModelCheck

        return ModelCheck(self.runtime, self.peers, self.python, self._environment()).run()

    def _in_container(self) -> set[int]:
        container = self.runtime.container
        return container.members() if container else set()

    def _environment(self) -> dict[str, str]:
        return ranks.job_variables(self.layout, self._known())

    def _known(self) -> ranks.Known:
        return ranks.Known(
            os.environ,
            self.peers.addresses(),
            self.gpus.own,
            self.runtime.secrets,
            self.python,
            self.runtime.container.base if self.runtime.container else None,
            self.preparation.below,
        )


def _plugins() -> tuple[str, dict[str, str]]:
    """The file that tells MLflow in a rank of the run; what else ranks start with: our hook, MLflow's plugins."""
    from mlflow_batchai import __version__
    from mlflow_batchai.training import constants, guard, store

    folder = store.DISTRIBUTION.format(version=__version__)
    metadata = store.METADATA.format(version=__version__)
    plugins = {folder + "/METADATA": metadata, folder + "/entry_points.txt": store.ENTRY_POINTS}
    return constants.FACTS, {"sitecustomize.py": guard.SITECUSTOMIZE, **plugins}
