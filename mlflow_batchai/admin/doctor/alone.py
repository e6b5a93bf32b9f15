"""What can be said of each node without the others: whether it can be spoken to, what it has, what trains there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from mlflow_batchai.admin.doctor import findings
from mlflow_batchai.admin.doctor.findings import Check, Complete, Finding
from mlflow_batchai.admin.doctor.patients import ASK_SECONDS, Case, Patient, Say, together
from mlflow_batchai.agent.gpus import LISTING_SECONDS
from mlflow_batchai.agent.plan import plain
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.engines.machines import SshMachine
from mlflow_batchai.errors import ClusterError, HostKeyError

# A first import of TensorFlow from a slow disk takes a minute.
TRAINING_SECONDS = 90.0
# Two engines may each take a while to say that they don't work (``engines.LOOK_SECONDS``).
CONTAINERS_SECONDS = 40.0


def by_themselves(case: Case, patients: Sequence[Patient]) -> Iterator[Check | Complete]:
    """Examine all nodes: those of one machine in turn, what they have in common once."""
    machines: dict[int, list[Patient]] = {}
    for patient in patients:
        machines.setdefault(id(patient.node.machine), []).append(patient)

    def work(group: Sequence[Patient]) -> Callable[[Say], None]:
        def run(say: Say) -> None:
            trained: Finding | None = None
            boxed: Finding | None = None
            for patient in group:
                if not _present(patient, say):
                    say(Complete(patient.name))
                    continue
                _equipment(case, patient, say)
                trained = trained or _training(case.cluster, patient)
                say(patient.check("training", trained))
                boxed = boxed or _containers(case.cluster, patient)
                say(patient.check("containers", boxed))

        return run

    yield from together([work(group) for group in machines.values()])


def _present(patient: Patient, say: Say) -> bool:
    """Whether a node can be spoken to."""
    started = time.monotonic()
    machine = patient.node.machine
    if not isinstance(machine, SshMachine):
        say(patient.check("reachable", findings.ok("this machine")))
    else:
        try:
            key = machine.connect()
        except ClusterError as error:
            patient.lost = True
            say(patient.failed("host key" if isinstance(error, HostKeyError) else "reachable", error))
            return False
        took = time.monotonic() - started
        say(patient.check("reachable", findings.ok(f"{machine.address} in {took * 1000:.0f} ms")))
        say(patient.check("host key", findings.ok(key)))
    try:
        said = patient.ask("facts", 2 * ASK_SECONDS)
    except ClusterError as error:
        patient.lost = True
        say(patient.failed("python", error))
        return False
    say(patient.check("python", findings.ok(f"Python {said['python']} ({said['executable']}) runs the agent")))
    return True


def _equipment(case: Case, patient: Patient, say: Say) -> None:
    """Clock, GPUs, share, mounts, space: what fails leaves no answer behind."""
    cluster = case.cluster
    if patient.is_remote:
        try:
            say(patient.check("clock", findings.clock(*_clock(patient))))
        except ClusterError as error:
            say(patient.failed("clock", error))
    try:
        wanted = cluster.document.gpus_per_node
        patient.ask("accelerators", LISTING_SECONDS + ASK_SECONDS, part=patient.node.part, wanted=wanted)
    except ClusterError as error:
        say(patient.failed("GPUs", error))
    path = cluster.share_on_nodes
    try:
        file = f"{case.folder}/{patient.token}"
        said = patient.ask("offer", share=path, identity=case.identity, path=file, sas=case.secret)
        say(patient.check("share", findings.share(said, path, patient.title)))
    except ClusterError as error:
        mend = "" if cluster.location else "; if the machine is fine, mount the share anew"
        say(patient.failed("share", f"{path}: {patient.without_name(error)}{mend}"))
    _mounts(case, patient, say)
    try:
        patient.ask("place", root=patient.node.root)
    except ClusterError as error:
        say(patient.failed("space", error))


def _mounts(case: Case, patient: Patient, say: Say) -> None:
    """Whether a node has what it takes to mount the volumes of every job."""
    if not case.volumes:
        return
    try:
        said = patient.ask("needs", volumes=plain(tuple(case.volumes)), container=None, python=case.cluster.python)
        say(patient.check("mounts", findings.mounts(said, [volume.name for volume in case.volumes])))
    except ClusterError as error:
        say(patient.failed("mounts", error))


def _clock(patient: Patient) -> tuple[float, float]:
    """(seconds that its clock is ahead, plus or minus), by the quickest of three answers."""
    found = []
    for _ in range(3):
        before = time.time()
        said = patient.ask("clock")["time"]
        after = time.time()
        found.append(((after - before) / 2, said - (before + after) / 2))
    accuracy, offset = min(found)
    return offset, accuracy


def _training(cluster: Cluster, patient: Patient) -> Finding:
    try:
        said = patient.ask("training", TRAINING_SECONDS + ASK_SECONDS, python=cluster.python, seconds=TRAINING_SECONDS)
    except ClusterError as error:
        return findings.failed(patient.without_name(error))
    return findings.training(said, cluster.python)


def _containers(cluster: Cluster, patient: Patient) -> Finding:
    try:
        said = patient.ask("containers", CONTAINERS_SECONDS)
    except ClusterError as error:
        return findings.warning(patient.without_name(error))
    return findings.containers(said, ignored=cluster.document.containers == "ignore")
