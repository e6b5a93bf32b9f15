"""The GPUs of a node: find the machine's, take the node's part, and hide the others from its processes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple, Optional

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.staging import SetupError

# Where no driver is kept loaded, the first nvidia-smi loads it and looks at every GPU: 20 s with eight of them.
LISTING_SECONDS = 40.0

# One GPU of ``nvidia-smi -L``; its MIG instances stand on indented lines below it.
_LINE = re.compile(r"(?:GPU (?P<index>\d+):|\s+MIG ).*\(UUID: (?P<uuid>(?:GPU|MIG)-[^)\s]+)\)")

# (exit code or None for a program that did not end in time, its output)
Run = Callable[[list[str], Mapping[str, str]], tuple[Optional[int], str]]
Part = tuple[int, int]


class Gpus(NamedTuple):
    """The GPUs of a node or a machine.

    Attributes:
        ids: as CUDA_VISIBLE_DEVICES takes them: UUIDs of GPUs or of MIG instances; indexes where there is no nvidia-smi.
        trouble: what the job's user has to be told of GPUs that are missing, or nothing.
        hidden: whether processes must be kept from GPUs that the machine may have and that are not this node's.
    """

    ids: list[str]
    note: str
    trouble: str = ""
    hidden: bool = False


def ask(argv: list[str], environment: Mapping[str, str], seconds: float = LISTING_SECONDS) -> tuple[int | None, str]:
    """See ``proc.ask``."""
    return proc.ask(argv, environment, seconds)


def list_gpus(environment: Mapping[str, str], run: Run = ask) -> Gpus:
    """The GPUs that a process with this environment could use, or why there are none.

    They are those of ``nvidia-smi -L``, in its order; a GPU that is cut up counts as its MIG instances. CUDA_VISIBLE_DEVICES,
    where it is set, chooses among them as CUDA does: by index or UUID, in its own order, up to the first that isn't there. A
    GPU that nvidia-smi can't reach any more is left out.
    """
    program = nvidia_smi(environment)
    if program is None:
        return Gpus([], "no nvidia-smi on PATH")
    code, text = run([program, "-L"], environment)
    last = ([line.strip() for line in text.splitlines() if line.strip() and not _LINE.match(line)] or [""])[-1]
    if code is None:
        return Gpus([], last, f"no GPU is used: {last}")
    # The exit code says nothing: with one GPU of eight lost it is not 0.
    listed = _listed(text)
    if not listed:
        return Gpus([], last or "nvidia-smi -L failed")
    reason = f"nvidia-smi -L says: {last}" if last else ""
    chosen = _chosen(environment)
    if chosen is None:
        return Gpus([name for names in listed.values() for name in names], "nvidia-smi -L", reason)
    ids, note = _choose(chosen, listed)
    return Gpus(ids, note, reason)


def _listed(text: str) -> dict[str, list[str]]:
    """Index of a GPU -> what CUDA has of it: its UUID, or those of its MIG instances."""
    listed: dict[str, list[str]] = {}
    index = uuid = ""
    for match in filter(None, map(_LINE.match, text.splitlines())):
        if match.group("index"):
            index, uuid = match.group("index"), match.group("uuid")
            listed[index] = [uuid]
        elif listed:
            listed[index] = [*(name for name in listed[index] if name != uuid), match.group("uuid")]
    return listed


def _choose(chosen: Sequence[str], listed: Mapping[str, Sequence[str]]) -> tuple[list[str], str]:
    known = [name for names in listed.values() for name in names]
    note = f"CUDA_VISIBLE_DEVICES={','.join(chosen)}"
    ids: list[str] = []
    for name in chosen:
        # A UUID may be cut short after ``GPU-`` or ``MIG-``.
        cut = [uuid for uuid in known if len(name) > len("GPU-") and uuid.startswith(name)]
        found = listed[name][0] if name in listed else next(iter(cut), None)
        if found is None:
            return ids, f"{note}, of which {name} is no GPU of nvidia-smi -L"
        if name.isdigit() != chosen[0].isdigit():
            return ids, f"{note}, which CUDA reads only as far as it is indexes, or UUIDs"
        if found not in ids:
            ids.append(found)
    return ids, note


def of_node(environment: Mapping[str, str], part: Part, wanted: int | None, node: str, run: Run = ask) -> Gpus:
    """The GPUs of one node: nodes of one machine have different ones, by index.

    Args:
        part: (i, n): the node is the i-th of the n that divide the machine's GPUs; one beyond them (the cluster was resized
            since) has none, unless ``wanted`` says how many.
        wanted: ``gpusPerNode`` of the cluster document: the node has the i-th so many GPUs; a machine without nvidia-smi is
            taken to have them. None: it has the i-th n-th of what the machine has, and none where there are fewer GPUs than
            nodes: a job over all nodes could not train on them. 0: it trains on CPUs.

    Raises:
        SetupError: the machine has fewer than are wanted.
    """
    index, parts = part
    if wanted == 0:
        return Gpus([], "gpusPerNode is 0", hidden=True)
    if wanted and nvidia_smi(environment) is None:
        chosen = _chosen(environment)
        numbers = [str(number) for number in range(wanted * max(parts, index + 1))]
        found = Gpus(numbers if chosen is None else chosen, "gpusPerNode")
    else:
        found = list_gpus(environment, run)
    count = len(found.ids)
    if wanted:
        ids = found.ids[index * wanted : (index + 1) * wanted]
        if len(ids) < wanted:
            shared = f" for the {parts} nodes of this machine" if parts > 1 else ""
            raise SetupError(
                f"gpusPerNode is {wanted} and {node} has {count} GPU(s){shared} ({found.trouble or found.note}):"
                " mend its driver, or lower gpusPerNode in the cluster document"
            )
        return found._replace(ids=ids)
    if count and index >= parts:
        return Gpus([], f"the machine's GPUs are divided among its first {parts} node(s)", hidden=True)
    if 0 < count < parts:
        few = f"{count} GPU(s) for the {parts} nodes of this machine, so none is used"
        few += f"; set nodes: {count} in the cluster document to use them"
        return Gpus([], few, "; ".join(filter(None, [few, found.trouble])), hidden=True)
    least, more = divmod(count, parts)
    first = index * least + min(index, more)
    ids = found.ids[first : first + least + (1 if index < more else 0)]
    return found._replace(ids=ids, hidden=bool(count) and not ids)


def visibility_variables(gpus: Gpus, local_rank: int | None = None) -> dict[str, str]:
    """Variables that show a process its GPUs: one for a Horovod rank, in turn where ranks share them; else all.

    ``BATCHAI_NODE_GPUS`` has all of the node's, for ranks that choose their own by their local rank.
    """
    if not gpus.ids:
        return {"CUDA_VISIBLE_DEVICES": ""} if gpus.hidden else {}
    ids = gpus.ids if local_rank is None else [gpus.ids[local_rank % len(gpus.ids)]]
    # JAX takes most of a GPU's memory at once; Horovod, and the framework whose binding exchanges JAX's gradients, need some.
    jax = {} if local_rank is None else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {
        **jax,
        "CUDA_VISIBLE_DEVICES": ",".join(ids),
        # nvidia-smi counts in this order, CUDA otherwise by speed.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "BATCHAI_NODE_GPUS": ",".join(gpus.ids),
    }


def nvidia_smi(environment: Mapping[str, str]) -> str | None:
    return shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))


def _chosen(environment: Mapping[str, str]) -> list[str] | None:
    text = environment.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
