"""Plans, layouts, and a small cluster of real agents on a directory share, for the tests of agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer
from node_world import QUICK, Cluster, PlanMaker
from plans import toy_plan

from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.plan import read_plan


@pytest.fixture
def make_plan() -> PlanMaker:
    """A plan as ``projects.prepare`` and ``creating.create`` write it, with changes."""

    return toy_plan


@pytest.fixture
def make_layout(tmp_path: Path, make_plan: PlanMaker) -> Callable[..., NodeLayout]:
    """A node's layout on a directory share, for a plan with changes."""

    def make(node: int = 0, **changes: Any) -> NodeLayout:
        share = tmp_path / "share"
        plan = make_plan(share, **changes)
        (share / plan["folder"]).mkdir(parents=True, exist_ok=True)  # as its submitter did
        return NodeLayout(str(tmp_path / f"root-{node}"), read_plan(plan), node, str(share))

    return make


@pytest.fixture
def cluster(tmp_path: Path, make_plan: PlanMaker, agent_pyz: Path) -> Iterator[Cluster]:
    """Two nodes; whatever is still running at the end of the test is ended."""
    folder = tmp_path / "it's an é place"
    folder.mkdir()
    made = Cluster(folder, make_plan, agent_pyz)
    yield made
    made.close()


@pytest.fixture
def rest_cluster(tmp_path: Path, make_plan: PlanMaker, agent_pyz: Path, azure: AzureServer) -> Iterator[Cluster]:
    """Two nodes whose agents reach the share by REST."""
    folder = tmp_path / "it's an é place"
    folder.mkdir()
    made = Cluster(folder, make_plan, agent_pyz, server=azure)
    azure.reset()
    yield made
    azure.fail(0)
    azure.newest()
    azure.latency(0)
    made.close()


@pytest.fixture(params=["directory", "rest"])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """Both kinds in turn."""
    made: Cluster = request.getfixturevalue("cluster" if request.param == "directory" else "rest_cluster")
    made.patch = QUICK if request.param == "rest" else ""
    return made
