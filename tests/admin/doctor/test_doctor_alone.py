"""Checks of one node get as much time as the node itself allows for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlflow_batchai.admin.doctor.examination import JobCheck, NodeCheck, _machine
from mlflow_batchai.agent import gpus
from mlflow_batchai.engines.machines import Node
from mlflow_batchai.errors import ClusterError


class Machine:
    """Notes for how long answers are waited for, and has none."""

    title, address = "node a", "gpu1:22"

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def connect(self) -> Any:
        return {}

    def ask(self, verb: str, timeout: float, **arguments: Any) -> Any:
        self.seconds[verb] = timeout
        if verb == "facts":
            return {"python": "3.11.2", "executable": "/usr/bin/python3"}
        raise ClusterError("node a: it says nothing")


def test_a_driver_that_has_to_be_loaded_is_waited_for() -> None:
    machine: Any = Machine()
    document = SimpleNamespace(gpus_per_node=None)
    cluster: Any = SimpleNamespace(document=document, share_on_nodes="/share", python="python3")
    node = NodeCheck(0, Node("a", machine, "/node"), lambda: None)
    assert _machine(JobCheck(cluster, "", "folder", None), [node]) == [node]
    assert machine.seconds["accelerators"] > gpus.LISTING_SECONDS > machine.seconds["place"]
    assert node.found["GPUs"].text == "it says nothing"
