"""What the doctor asks of one node gets the time that the node itself gives it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlflow_batchai.admin.doctor.alone import _equipment
from mlflow_batchai.admin.doctor.patients import Case, Patient
from mlflow_batchai.agent import gpus
from mlflow_batchai.engines.machines import Node
from mlflow_batchai.errors import ClusterError


class Machine:
    """Notes for how long answers are waited for, and has none."""

    title = "node a"

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def ask(self, verb: str, timeout: float, **arguments: Any) -> Any:
        self.seconds[verb] = timeout
        raise ClusterError("node a: it says nothing")


def test_a_driver_that_has_to_be_loaded_is_waited_for() -> None:
    machine: Any = Machine()
    document = SimpleNamespace(gpus_per_node=None)
    cluster: Any = SimpleNamespace(document=document, share_on_nodes="/share", location=None)
    said: list[Any] = []
    _equipment(Case(cluster, "", "folder", None, []), Patient(0, Node("a", machine, "/node")), said.append)
    assert machine.seconds["accelerators"] > gpus.LISTING_SECONDS > machine.seconds["place"]
    assert said[0].name == "GPUs" and said[0].text == "it says nothing"
