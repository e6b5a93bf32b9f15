"""A plan as ``projects.prepare`` and ``creating.create`` write it, in one place for all tests that start agents by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.protocol import PROTOCOL_VERSION

BARE = Plan(PROTOCOL_VERSION, "0123456789", "custom", 1, 1, 1, "true")


def toy_plan(share: Path, **changes: Any) -> dict[str, Any]:
    """The plan of a job that runs ``true`` once on one node of a directory share, with changes (``ranks``: Horovod's)."""
    ranks = changes.pop("ranks", 1)
    segment = f"workspaces/default/experiments/exp/jobs/toy/{changes.get('job', 'abc1234567')}"
    plan = bare_plan(
        job="abc1234567",
        name="toy",
        framework="horovod" if ranks > 1 else "custom",
        process_count=ranks,
        ranks=ranks,
        gpus_per_node=0,
        run_id="0" * 32,
        segment=segment,
        folder=segment,
    )
    volume = {"scope": "cluster", "path": "share", "source": str(share), "share": share.as_uri(), "kind": "link"}
    return {**plan.record(), "volumes": [volume], **changes}


def bare_plan(**changes: Any) -> Plan:
    """The plan of a job of one node and one process, for functions that look at little of it."""
    return replace(BARE, **changes)
