"""What a rank is started with: its command and its environment, pure functions of the plan and of what its node knows by then.

An agent starts ranks with it; a client's dry run shows it.
"""

import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from mlflow_batchai.agent import gpus
from mlflow_batchai.agent.attempt import launchers
from mlflow_batchai.agent.attempt.launchers import Slot
from mlflow_batchai.agent.environment import job_environment, thread_variables
from mlflow_batchai.agent.gpus import Gpus
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.plan import Plan


class Known(NamedTuple):
    """What a node knows of itself and its job.

    Attributes:
        environment: the node's own.
        addresses: of all nodes, by index.
        gpus: its own.
        secrets: variable -> value.
        python: the training interpreter.
        image: in a container, the environment that it gives every process.
    """

    environment: Mapping[str, str]
    addresses: Sequence[str]
    gpus: Gpus
    secrets: Mapping[str, str]
    python: str
    image: Optional[Mapping[str, str]] = None


def argv(plan: Plan) -> List[str]:
    """What starts a rank."""
    return ["bash", "-c", plan.command]


def job_variables(layout: NodeLayout, known: Known, extra: Optional[Mapping[str, str]] = None) -> Dict[str, str]:
    """The environment of job preparation and helpers.

    Args:
        extra: as ``job_environment`` takes it.
    """
    return job_environment(
        layout,
        known.environment,
        known.addresses,
        len(known.gpus.ids),
        known.secrets,
        known.python,
        dict(gpus.variables(known.gpus), **(extra or {})),
        known.image,
    )


def rank_environment(
    layout: NodeLayout,
    known: Known,
    slot: Slot,
    rendezvous: Mapping[str, Any],
    interface: Optional[str],
    cores: int,
    archive: str,
) -> Dict[str, str]:
    """The environment of one rank.

    Args:
        rendezvous: ``address`` and ``port`` of Horovod's server, as this node reaches it.
        interface: the node's network interface that its peers reach.
        cores: of the node.
        archive: where scripts import our helpers from.
    """
    extra = launchers.rank_variables(layout.plan, slot, rendezvous, interface)
    extra.update(gpus.variables(known.gpus, slot.local_rank if layout.plan.is_horovod else None))
    extra.update(thread_variables(cores // slot.local_size))
    extra["PYTHONPATH"] = layout.site + os.pathsep + archive
    return job_variables(layout, known, extra)
