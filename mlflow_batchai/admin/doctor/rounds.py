"""The examination itself: each node by itself first, then what can only be said of all, then what they see of each other."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence

from mlflow_batchai.admin.doctor import findings
from mlflow_batchai.admin.doctor.alone import by_themselves
from mlflow_batchai.admin.doctor.findings import Check, Complete
from mlflow_batchai.admin.doctor.mutual import network, visible
from mlflow_batchai.admin.doctor.patients import ASK_SECONDS, CLIENT, Case, Patient
from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.cluster.clusters import Cluster, share_secret
from mlflow_batchai.documents.job import JobProperties
from mlflow_batchai.engines.hosts import Hosts
from mlflow_batchai.engines.machines import Answer
from mlflow_batchai.engines.ssh_hosts import copy_sentence, keeper_sentence, root_sentence, twin_sentence
from mlflow_batchai.errors import NotSupportedError, ShareError
from mlflow_batchai.plan.volumes import choose_volumes
from mlflow_batchai.storage import Share
from mlflow_batchai.storage.base import identify

# What a doctor that was killed has left: none takes that long.
LEFT_SECONDS = 86400.0

FOLDER = ".batchai/doctor"


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
        case = Case(cluster, identity, folder, share_secret(cluster.location), _mounted(cluster))
        yield from by_themselves(case, patients)
        present = [patient for patient in patients if not patient.lost]
        yield from _of_all(present, patients[0].answers.get("place"))
        yield from visible(case, present)
        if present and present[0].is_remote:
            yield from network(present, cluster.document.network_interface)
        yield from (Complete(patient.name) for patient in present)
    finally:
        # A share that fails now has failed in a check, too.
        with contextlib.suppress(ShareError):
            cluster.share.delete(folder)


def _mounted(cluster: Cluster) -> list[Volume]:
    """The volumes of every job, but for directories."""
    chosen = choose_volumes(JobProperties(), cluster, "doctor", ASK_SECONDS)
    return [volume for volume in chosen.volumes if volume.kind != "link"]


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
            yield patient.check("GPUs", findings.accelerators(gpus[patient], counts, patient.answers.get("training")))
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
        (first and keeper_sentence(patient.title, place, first))
        or root_sentence(patient.title, place)
        or copy_sentence(patient.title, ids.setdefault(place["id"], patient.name), patient.name, place["root"])
    )
