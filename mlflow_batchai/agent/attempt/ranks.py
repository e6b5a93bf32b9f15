"""Compute which rank runs on which node, and each rank's command and environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlflow_batchai.agent import gpus
from mlflow_batchai.agent.attempt import frameworks
from mlflow_batchai.agent.attempt.frameworks import Slot
from mlflow_batchai.agent.environment import allocator_variables, job_environment, thread_variables
from mlflow_batchai.agent.gpus import Gpus
from mlflow_batchai.agent.layout import NodeLayout, node_id
from mlflow_batchai.agent.plan import Plan


def spread(process_count: int, gpus: Sequence[int]) -> list[int]:
    """Ranks per node, as even as can be; the first nodes take one more (8 on 2 nodes = 4 and 4, as in Batch AI).

    Args:
        gpus: GPUs of each node. A node has as many slots as GPUs; where no node has any, ranks share the cores and there is no
            limit. More ranks than slots fill every slot once, then again: GPUs are shared evenly.
    """
    slots = list(gpus) if any(gpus) else [process_count] * len(gpus)
    rounds, rest = divmod(process_count, sum(slots))
    filled = [0] * len(slots)
    for _ in range(rest):
        filled[min((node for node in range(len(slots)) if filled[node] < slots[node]), key=filled.__getitem__)] += 1
    return [rounds * slot + more for slot, more in zip(slots, filled)]


def assign(sizes: Sequence[int]) -> list[Slot]:
    slots: list[Slot] = []
    for node, local_size in enumerate(sizes):
        for local_rank in range(local_size):
            cross = [other for other, size in enumerate(sizes) if size > local_rank]
            slots.append(Slot(len(slots), sum(sizes), node, local_rank, local_size, cross.index(node), len(cross)))
    return slots


def slots_of(plan: Plan, gpus: Sequence[int]) -> list[Slot]:
    if plan.is_distributed:
        return assign(spread(plan.process_count, gpus))
    return [Slot(0, 1, 0, 0, 1, 0, 1)]


def slots_per_node(plan: Plan, gpus: Sequence[int]) -> list[int]:
    """Slots of each node in the hostfile: its ranks; for a command that starts ranks itself its GPUs."""
    return spread(plan.process_count, gpus) if plan.is_distributed else list(gpus)


def refusal(plan: Plan, gpus: Sequence[int], hosts: Sequence[str]) -> str | None:
    """Why these nodes can't run the plan, as a sentence, or None: more ranks than GPUs, and no leave to share them."""
    total = sum(gpus)
    if not plan.is_distributed or plan.oversubscribe or not total or plan.process_count <= total:
        return None
    counts = ", ".join(f"{node_id(node)}: {count}" for node, count in enumerate(gpus))
    sentence = (
        f"processCount is {plan.process_count} and the nodes have {total} GPU{'' if total == 1 else 's'} ({counts}): lower"
        " processCount, or set oversubscribe: true in the cluster document"
    )
    idle = without_gpus(plan, gpus, hosts)
    return f"{sentence}; {idle}" if idle else sentence


def without_gpus(plan: Plan, gpus: Sequence[int], hosts: Sequence[str]) -> str | None:
    """A sentence on nodes that get no rank since they have no GPU and others have, or None: likely a broken driver."""
    names = [f"{node_id(node)} ({hosts[node]})" for node, count in enumerate(gpus) if not count]
    if not plan.is_distributed or not names or not any(gpus):
        return None
    return (
        f"{', '.join(names)}: no GPU, and so no rank, where other nodes have GPUs; mend the driver there (nvidia-smi -L), or"
        " train on CPUs with gpusPerNode: 0 in the cluster document"
    )


def idle_gpus(plan: Plan, gpus: Sequence[int]) -> str | None:
    ranks, total = plan.process_count, sum(gpus)
    if not plan.is_distributed or ranks >= total:
        return None
    block = frameworks.of(plan.framework).block
    return f"{ranks} rank(s) use {ranks} of {total} GPUs: set {block}.processCount to {total} to use all"


def hostfile(addresses: Sequence[str], sizes: Sequence[int]) -> str:
    """An OpenMPI hostfile (Batch AI's own format was never published)."""
    return "".join(f"{address} slots={max(1, size)}\n" for address, size in zip(addresses, sizes))


class Known(NamedTuple):
    """Facts about a node and its job from which the variables of its ranks are made.

    Attributes:
        image: in a container, the environment that it gives every process.
        below: the folder of the interpreter that the training one is made over; empty: it is no job's own.
    """

    environment: Mapping[str, str]
    addresses: Sequence[str]
    gpus: Gpus
    secrets: Mapping[str, str]
    python: str
    image: Mapping[str, str] | None = None
    below: str = ""


def argv(plan: Plan) -> list[str]:
    return ["bash", "-c", plan.command]


def job_variables(layout: NodeLayout, known: Known, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    return job_environment(
        layout,
        known.environment,
        known.addresses,
        len(known.gpus.ids),
        known.secrets,
        known.python,
        dict(gpus.visibility_variables(known.gpus), **(extra or {})),
        known.image,
        known.below,
    )


def rank_environment(
    layout: NodeLayout,
    known: Known,
    slot: Slot,
    rendezvous: Mapping[str, Any],
    interface: str | None,
    cores: int,
    archive: str,
) -> dict[str, str]:
    """The environment of one rank; ``archive``: where scripts import our helpers from."""
    framework = frameworks.of(layout.plan.framework)
    extra = {"BATCHAI_RANK!": str(slot.rank), "BATCHAI_SIZE!": str(slot.size)}
    told = framework.variables(layout.plan, slot, rendezvous, interface, len(known.gpus.ids))
    extra.update({name: str(value) for name, value in told.items()})
    extra.update(gpus.visibility_variables(known.gpus, slot.local_rank if framework.own_gpu else None))
    extra.update(thread_variables(cores // slot.local_size))
    if not known.gpus.ids:
        extra.update(allocator_variables(layout.plan, known.secrets, known.image or {}))
    extra["PYTHONPATH"] = layout.site + os.pathsep + archive
    return job_variables(layout, known, extra)
