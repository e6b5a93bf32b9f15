"""What nodes see of each other: files that each writes on the share, and the network between them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from mlflow_batchai.admin.doctor import findings, reachability
from mlflow_batchai.admin.doctor.findings import Check, Complete
from mlflow_batchai.admin.doctor.patients import ASK_SECONDS, CLIENT, Case, Patient, Say, together
from mlflow_batchai.agent import protocol
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.errors import ClusterError, ShareError

# As long as a share's caches may take; a job would wait longer.
VISIBLE_SECONDS = 10.0
LISTEN_SECONDS = 60.0
PROBE_SECONDS = 5.0


def visible(case: Case, present: Sequence[Patient]) -> Iterator[Check | Complete]:
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
        protocol.decode_one(cluster.share.read(path, 0, protocol.LONGEST_RECORD))
    except (ShareError, protocol.TornFileError) as error:
        return str(error)
    return ""


def network(present: Sequence[Patient], interface: str | None) -> Iterator[Check | Complete]:
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
    judged = reachability.judge({patient.name: patient.answers["listen"] for patient in tried}, reached)
    for patient in tried:
        yield patient.check("network", judged[patient.name])
