"""The examination itself: each node by itself first, then what they see of each other."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mlflow_batchai.cluster.clusters import Cluster, share_secret
from mlflow_batchai.doctor import findings
from mlflow_batchai.doctor.findings import Check, Complete, Finding
from mlflow_batchai.doctor.patients import ASK_SECONDS, Patient, Say, together
from mlflow_batchai.engines.hosts import Hosts
from mlflow_batchai.engines.machines import Answer, SshMachine
from mlflow_batchai.engines.ssh_hosts import copy_sentence, keeper_sentence, root_sentence, twin_sentence
from mlflow_batchai.errors import ClusterError, NotSupportedError, ShareError
from mlflow_batchai.node import protocol
from mlflow_batchai.plan.volumes import Volume, choose_volumes
from mlflow_batchai.shares import Share
from mlflow_batchai.shares.identity import identify
from mlflow_batchai.shell.errors import HostKeyError
from mlflow_batchai.spec.job import JobProperties

# A first import of TensorFlow from a slow disk takes a minute.
TRAINING_SECONDS = 90.0
# Two engines may each take a while to say that they don't work (``engines.LOOK_SECONDS``).
CONTAINERS_SECONDS = 40.0
# As long as a share's caches may take; a job would wait longer.
VISIBLE_SECONDS = 10.0
LISTEN_SECONDS = 60.0
PROBE_SECONDS = 5.0

# What a doctor that was killed has left: none takes that long.
LEFT_SECONDS = 86400.0

FOLDER = ".batchai/doctor"
CLIENT = "client"


class _Case(NamedTuple):
    """What is the same for all nodes of one examination, worked out once.

    Attributes:
        identity: the control share's.
        folder: where nodes put files for each other to see.
        secret: what opens the control share for them, None: a directory.
        volumes: those that every job of the cluster mounts.
    """

    cluster: Cluster
    identity: str
    folder: str
    secret: str | None
    volumes: Sequence[Volume]


def _mounted(cluster: Cluster) -> list[Volume]:
    """The volumes of every job, but for directories."""
    chosen = choose_volumes(JobProperties(), cluster, "doctor", ASK_SECONDS)
    return [volume for volume in chosen.volumes if volume["kind"] != "link"]


def examine(cluster: Cluster) -> Iterator[Check | Complete]:
    """Examine all nodes; checks come as they are made, in no order of nodes, and every wait is bounded.

    After a node's last check comes ``Complete``: of one that is lost at once, of the others when all have been asked.

    A node that can't be reached, or whose agent can't be run, has no further checks. The local cluster has no checks of what
    lies between machines (host key, network, clock).

    Raises:
        ShareError: this machine can't use the control share.
        NotSupportedError: the cluster's engine has no nodes to look into.
    """
    patients = _patients(cluster)
    folder = f"{FOLDER}/{time.time():.0f}-{uuid.uuid4().hex}"
    identity = identify(cluster.share)
    _tidy(cluster.share)
    cluster.share.claim(folder)
    try:
        cluster.share.write(f"{folder}/{CLIENT}", protocol.encode([{"host": CLIENT}]))
        case = _Case(cluster, identity, folder, share_secret(cluster.location), _mounted(cluster))
        yield from _by_themselves(case, patients)
        present = [patient for patient in patients if not patient.lost]
        yield from _of_all(present, patients[0].answers.get("place"))
        yield from _visible(case, present)
        if present and present[0].is_remote:
            yield from _network(present, cluster.document.network_interface)
        yield from (Complete(patient.name) for patient in present)
    finally:
        # A share that fails now has failed in a check, too.
        with contextlib.suppress(ShareError):
            cluster.share.delete(folder)


def _tidy(share: Share) -> None:
    """Remove folders of doctors that were killed, as far as we may."""
    for entry in share.list(FOLDER):
        made, _, _ = entry.name.partition("-")
        if made.isdigit() and time.time() - int(made) > LEFT_SECONDS:
            with contextlib.suppress(ShareError):
                share.delete(f"{FOLDER}/{entry.name}")


def names(cluster: Cluster) -> list[str]:
    """What ``Check.node`` calls its nodes, in the order of the cluster document."""
    return [patient.name for patient in _patients(cluster)]


def _patients(cluster: Cluster) -> list[Patient]:
    engine = cluster.engine
    if not isinstance(engine, Hosts):
        raise NotSupportedError(f"cluster '{cluster.name}': engine {cluster.document.engine.value} has no nodes to look into")
    return [Patient(index, node) for index, node in enumerate(engine.nodes)]


def _by_themselves(case: _Case, patients: Sequence[Patient]) -> Iterator[Check | Complete]:
    """What can be said of each node without the others; the nodes of one machine in turn, what they have in common once."""
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


def _equipment(case: _Case, patient: Patient, say: Say) -> None:
    """Clock, GPUs, share, mounts, space: what fails leaves no answer behind."""
    cluster = case.cluster
    if patient.is_remote:
        try:
            say(patient.check("clock", findings.clock(*_clock(patient))))
        except ClusterError as error:
            say(patient.failed("clock", error))
    try:
        patient.ask("accelerators", part=patient.node.part, wanted=cluster.document.gpus_per_node)
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


def _mounts(case: _Case, patient: Patient, say: Say) -> None:
    """Whether a node has what it takes to mount the volumes of every job."""
    if not case.volumes:
        return
    try:
        said = patient.ask("needs", volumes=case.volumes, container=None, python=case.cluster.python)
        say(patient.check("mounts", findings.mounts(said, [volume["name"] for volume in case.volumes])))
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


def _of_all(present: Sequence[Patient], first: Answer | None) -> Iterator[Check]:
    """What can only be judged when all have answered, though each was asked alone.

    Args:
        first: what the first node of the document, which keeps the ticket book, says of its folder, if it does.
    """
    gpus = {patient: patient.answers["accelerators"] for patient in present if "accelerators" in patient.answers}
    counts = [said["count"] for said in gpus.values() if not said["trouble"]]
    places: dict[str, str] = {}
    ids: dict[str, str] = {}
    for patient in present:
        if patient in gpus:
            yield patient.check("GPUs", findings.accelerators(gpus[patient], counts))
        if place := patient.answers.get("place"):
            if trouble := _trouble(patient, place, first, places, ids):
                yield patient.failed("space", trouble)
            else:
                share_free = patient.answers.get("offer", {}).get("free")
                yield patient.check("space", findings.space(place["root"], place["free"], share_free))


def _trouble(patient: Patient, place: Answer, first: Answer | None, places: dict[str, str], ids: dict[str, str]) -> str:
    """Why a job would be refused a node for its own folder, in the engine's words, or nothing.

    Args:
        places, ids: what is known of the nodes before it; kept up to date.
    """
    twin = places.setdefault(place["place"], patient.name)
    if twin != patient.name:
        return twin_sentence(patient.title, twin, place["root"])
    if not patient.is_remote:
        return ""
    return (
        (first and keeper_sentence(patient.title, place, first["id"]))
        or root_sentence(patient.title, place)
        or copy_sentence(patient.title, ids.setdefault(place["id"], patient.name), patient.name, place["root"])
    )


def _visible(case: _Case, present: Sequence[Patient]) -> Iterator[Check | Complete]:
    """Whether what one writes on the share is there for the others; of the nodes that could write."""
    writers = [patient for patient in present if patient.answers.get("offer", {"trouble": "lost"})["trouble"] is None]

    def work(patient: Patient) -> Callable[[Say], None]:
        others = {other.token: other.name for other in writers if other is not patient}
        names = {CLIENT: "this machine", **others}

        def look() -> tuple[dict[str, str], str]:
            share, secret = case.cluster.share_on_nodes, case.secret
            there = patient.ask("unseen", share=share, folder=case.folder, names=list(names), sas=secret)["unseen"]
            return {names[name]: why for name, why in there.items()}, _unseen_here(
                case.cluster, f"{case.folder}/{patient.token}"
            )

        def run(say: Say) -> None:
            started = time.monotonic()
            try:
                missed, here = look()
                while (missed or here) and time.monotonic() - started < VISIBLE_SECONDS:
                    time.sleep(0.5)
                    missed, here = look()
            except ClusterError as error:
                say(patient.failed("visible", error))
                return
            say(patient.check("visible", findings.visible(missed, here, len(others), time.monotonic() - started)))

        return run

    yield from together([work(patient) for patient in writers])


def _unseen_here(cluster: Cluster, path: str) -> str:
    try:
        protocol.decode_one(cluster.share.read(path))
    except (ShareError, protocol.TornFileError) as error:
        return str(error)
    return ""


def _network(present: Sequence[Patient], interface: str | None) -> Iterator[Check | Complete]:
    """Whether the nodes reach each other: all listen, then all try all addresses of all others."""
    mark = uuid.uuid4().hex

    def listen(patient: Patient) -> Callable[[Say], None]:
        def run(say: Say) -> None:
            try:
                patient.ask("listen", token=f"{mark} {patient.token}", interface=interface, seconds=LISTEN_SECONDS)
            except ClusterError as error:
                say(patient.failed("network", error))

        return run

    yield from together([listen(patient) for patient in present])
    listening = [patient for patient in present if "listen" in patient.answers]
    reached: dict[str, dict[str, list[str]]] = {}

    def probe(patient: Patient) -> Callable[[Say], None]:
        others = [
            (other.name, each["address"], other.answers["listen"]["port"], f"{mark} {other.token}")
            for other in listening
            if other is not patient
            for each in other.answers["listen"]["interfaces"]
        ]

        def run(say: Say) -> None:
            targets = [other[1:] for other in others]
            try:
                said = patient.ask("probe", PROBE_SECONDS + ASK_SECONDS, targets=targets, seconds=PROBE_SECONDS)["results"]
            except ClusterError as error:
                say(patient.failed("network", error))
                return
            found: dict[str, list[str]] = {other.name: [] for other in listening if other is not patient}
            for (name, *_), result in zip(others, said, strict=True):
                found[name].append(result)
            reached[patient.name] = found

        return run

    yield from together([probe(patient) for patient in listening])
    tried = [patient for patient in listening if patient.name in reached]
    judged = findings.network({patient.name: patient.answers["listen"] for patient in tried}, reached)
    for patient in tried:
        yield patient.check("network", judged[patient.name])
