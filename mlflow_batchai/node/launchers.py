"""What a framework block starts: which ranks run where, and the variables that tell each who it is.

``horovod`` starts processCount ranks over the nodes; ``custom`` (customToolkit, and a project without a block) starts its
command once, on node 0, as Batch AI did.
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from mlflow_batchai.node.layout import node_id


class Slot(NamedTuple):
    """One rank's place: numbers as Horovod counts them."""

    rank: int
    size: int
    node: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def spread(process_count: int, node_count: int) -> List[int]:
    """Ranks per node: as even as can be, the first nodes take one more (8 on 2 nodes = 4 and 4, as in Batch AI)."""
    least, more = divmod(process_count, node_count)
    return [least + (1 if node < more else 0) for node in range(node_count)]


def assign(process_count: int, node_count: int) -> List[Slot]:
    """Every rank's slot, in rank order, node by node."""
    sizes = spread(process_count, node_count)
    slots: List[Slot] = []
    for node, local_size in enumerate(sizes):
        for local_rank in range(local_size):
            cross = [other for other, size in enumerate(sizes) if size > local_rank]
            slots.append(Slot(len(slots), process_count, node, local_rank, local_size, cross.index(node), len(cross)))
    return slots


def slots_of(plan: Mapping[str, Any]) -> List[Slot]:
    """The ranks that a plan starts."""
    if plan["framework"] == "horovod":
        return assign(plan["processCount"], plan["nodeCount"])
    return [Slot(0, 1, 0, 0, 1, 0, 1)]


def needs_rendezvous(plan: Mapping[str, Any]) -> bool:
    """Whether node 0 has to start Horovod's rendezvous server first."""
    return bool(plan["framework"] == "horovod")


def rank_variables(
    plan: Mapping[str, Any], slot: Slot, rendezvous: Optional[Mapping[str, Any]], interface: Optional[str]
) -> Dict[str, str]:
    """Variables of one rank; names that end in ``!`` may not be overridden by the document.

    The HOROVOD_* ones are those that horovodrun's gloo launcher sets (horovod 0.28.1, ``runner/gloo_run.py``).
    """
    found = {"BATCHAI_RANK!": str(slot.rank), "BATCHAI_SIZE!": str(slot.size)}
    if plan["framework"] != "horovod" or rendezvous is None:
        return found
    identity = {
        "HOROVOD_HOSTNAME": node_id(slot.node),
        "HOROVOD_RANK": slot.rank,
        "HOROVOD_SIZE": slot.size,
        "HOROVOD_LOCAL_RANK": slot.local_rank,
        "HOROVOD_LOCAL_SIZE": slot.local_size,
        "HOROVOD_CROSS_RANK": slot.cross_rank,
        "HOROVOD_CROSS_SIZE": slot.cross_size,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous["address"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": rendezvous["port"],
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    found.update({name + "!": str(value) for name, value in identity.items()})
    found["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "60"
    if interface:
        found["HOROVOD_GLOO_IFACE"] = interface
    return found


def hostfile(addresses: Sequence[str], sizes: Sequence[int]) -> str:
    """An OpenMPI hostfile (Batch AI's own format was never published)."""
    return "".join("%s slots=%d\n" % (address, max(1, size)) for address, size in zip(addresses, sizes))
