"""What the nodes of one machine do just now, as a verb of ``host.py``: who has them, who waits for them, GPUs in use."""

import os
from typing import Any, Dict, Sequence

from mlflow_batchai.agent import gate, gpus, place, register, tickets
from mlflow_batchai.agent.environment import for_agents

Answer = Dict[str, Any]


def census(roots: Sequence[str]) -> Answer:
    """What some nodes of this machine do.

    Returns:
        ``nodes``, one a root: ``id`` (None: it has had no job yet), ``closed``, and ``agents``: number of the ticket, as text,
        -> ``waiting``, ``held`` or ``ended``. ``gpus``: ``total`` and ``inUse`` of the machine, those that some process
        computes on; None if it has none.
    """
    return {"nodes": [_node(os.path.expanduser(root)) for root in roots], "gpus": _gpus()}


def _node(root: str) -> Answer:
    return {"id": place.identity(root), "closed": gate.is_closed(root), "agents": _agents(root)}


def _agents(root: str) -> Dict[str, str]:
    found = {}
    for number in register.known(root):
        agent = register.read(root, number)
        if agent is not None:
            alive = register.is_alive(agent)
            found[str(number)] = (tickets.said(root, number) or "waiting") if alive else "ended"
    return found


def _gpus() -> Any:
    environment = for_agents(os.environ)
    ids = gpus.visible(environment).ids
    return {"total": len(ids), "inUse": len(gpus.busy(ids, environment))} if ids else None
