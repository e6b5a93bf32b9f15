"""Framework blocks that run: the processes that each starts, where they meet, and the variables that name them to each other.

Another one is a class here and an entry of ``_FRAMEWORKS``; its settings are parsed in ``documents/job.py``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from mlflow_batchai.agent.layout import node_id
from mlflow_batchai.agent.plan import CUSTOM, HOROVOD, PYTORCH, Plan


class Slot(NamedTuple):
    """One rank's place: numbers as Horovod counts them."""

    rank: int
    size: int
    node: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Framework:
    """One command on node 0, which starts whatever else it needs: ``customToolkitSettings``, or no block at all.

    Attributes:
        block: its key in documents.
        own_gpu: whether a rank is shown one GPU, and not all of its node.
        service_names: variables of Batch AI that it sets besides those of every job, without ``AZ_BATCHAI_``.
    """

    block = "customToolkitSettings"
    own_gpu = False
    service_names: tuple[str, ...] = ()

    def serve(self, addresses: Sequence[str], sizes: Sequence[int], start: Callable[[Sequence[str]], int]) -> tuple[str, int]:
        """Prepare, on node 0, the (address, port) at which ranks meet, for as long as this object lives; port 0: they don't.

        Args:
            start: starts our archive with these arguments by the training interpreter, and returns the port that it says.
        """
        return addresses[0], 0

    def variables(
        self, plan: Plan, slot: Slot, rendezvous: Mapping[str, Any], interface: str | None, gpus: int
    ) -> Mapping[str, object]:
        """Variables of one rank besides those of every job; names that end in ``!`` may not be overridden by the document.

        Args:
            interface: the network interface that the node's peers reach.
        """
        return {}


class Horovod(Framework):
    """Ranks meet at Horovod's rendezvous server.

    The HOROVOD_* variables are those that horovodrun's gloo launcher sets (horovod 0.28.1, ``runner/gloo_run.py``).
    """

    block = "horovodSettings"
    own_gpu = True

    def serve(self, addresses: Sequence[str], sizes: Sequence[int], start: Callable[[Sequence[str]], int]) -> tuple[str, int]:
        hosts = ",".join(f"{node_id(node)}:{size}" for node, size in enumerate(sizes) if size)
        return addresses[0], start(["rendezvous", addresses[0], hosts, str(sum(sizes))])

    def variables(
        self, plan: Plan, slot: Slot, rendezvous: Mapping[str, Any], interface: str | None, gpus: int
    ) -> Mapping[str, object]:
        return {
            "HOROVOD_HOSTNAME!": node_id(slot.node),
            "HOROVOD_RANK!": slot.rank,
            "HOROVOD_SIZE!": slot.size,
            "HOROVOD_LOCAL_RANK!": slot.local_rank,
            "HOROVOD_LOCAL_SIZE!": slot.local_size,
            "HOROVOD_CROSS_RANK!": slot.cross_rank,
            "HOROVOD_CROSS_SIZE!": slot.cross_size,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR!": rendezvous["address"],
            "HOROVOD_GLOO_RENDEZVOUS_PORT!": rendezvous["port"],
            "HOROVOD_CONTROLLER!": "gloo",
            "HOROVOD_CPU_OPERATIONS!": "gloo",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": 60,
            **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
        }


class PyTorch(Framework):
    """Ranks meet where rank 0 listens, as ``torch.distributed`` has it.

    A script finds torchrun's variables (torch 2.13, ``elastic/agent/server/local_elastic_agent.py``), and Batch AI's.
    """

    block = "pyTorchSettings"
    service_names = ("PYTORCH_INIT_METHOD", "PYTORCH_BACKEND", "TASK_INDEX")

    def serve(self, addresses: Sequence[str], sizes: Sequence[int], start: Callable[[Sequence[str]], int]) -> tuple[str, int]:
        # Bound here, a port is given to nobody who asks for any; rank 0 gets it, as it asks for this one with SO_REUSEADDR.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.held.bind(("", 0))
        # Where node 0 has no GPU, and so no rank, rank 0 is elsewhere.
        return next(address for address, size in zip(addresses, sizes) if size), int(self.held.getsockname()[1])

    def variables(
        self, plan: Plan, slot: Slot, rendezvous: Mapping[str, Any], interface: str | None, gpus: int
    ) -> Mapping[str, object]:
        return {
            "MASTER_ADDR!": rendezvous["address"],
            "MASTER_PORT!": rendezvous["port"],
            "RANK!": slot.rank,
            "WORLD_SIZE!": slot.size,
            "LOCAL_RANK!": slot.local_rank,
            "LOCAL_WORLD_SIZE!": slot.local_size,
            "GROUP_RANK!": slot.node,
            "GROUP_WORLD_SIZE!": plan.node_count,
            "ROLE_NAME!": "default",
            "ROLE_RANK!": slot.rank,
            "ROLE_WORLD_SIZE!": slot.size,
            # Lightning and others ask by these whether somebody else starts the ranks.
            "TORCHELASTIC_RUN_ID!": plan.job,
            "TORCHELASTIC_RESTART_COUNT!": plan.attempt - 1,
            "TORCHELASTIC_MAX_RESTARTS!": plan.retries,
            "AZ_BATCHAI_PYTORCH_INIT_METHOD": f"tcp://{rendezvous['address']}:{rendezvous['port']}",
            "AZ_BATCHAI_PYTORCH_BACKEND": plan.communication_backend or ("nccl" if gpus else "gloo"),
            "AZ_BATCHAI_TASK_INDEX": slot.rank,
            # NCCL takes a name for the beginning of one, unless it is told otherwise.
            **({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}),
        }


_FRAMEWORKS: Mapping[str, type[Framework]] = {CUSTOM: Framework, HOROVOD: Horovod, PYTORCH: PyTorch}
BLOCKS = {framework.block: name for name, framework in _FRAMEWORKS.items()}
"""Key of each framework block that runs -> its name in plans."""


def of(name: str) -> Framework:
    return _FRAMEWORKS[name]()
