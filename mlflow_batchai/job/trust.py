"""Jobs of other keys that this user has decided to trust on this machine (``batchai job attach --trust``), each pinned to the
plan that was shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mlflow_batchai.config import home
from mlflow_batchai.errors import UsageError

_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def pin(run_id: str, plan: str, share: str) -> None:
    """Trust a job from now on.

    Args:
        plan: the digest of its plan.
        share: the address at which the plan was found.

    Raises:
        UsageError: that can't be kept.
    """
    try:
        path = _path(run_id)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps({"plan": plan, "share": share}), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{home()} can't be written ({error.strerror}), so nobody would know that the job is trusted"
        ) from error


def is_pinned(run_id: object, plan: str) -> bool:
    """Whether a plan is that of a trusted job, unchanged."""
    return isinstance(run_id, str) and _read(run_id).get("plan") == plan


def share_of(run_id: str) -> str | None:
    """Where the plan of a trusted job was found; None for any other job."""
    return _read(run_id).get("share")


def _path(run_id: str) -> Path:
    return home() / "trusted" / f"{run_id}.json"


def _read(run_id: str) -> dict[str, str]:
    if not _RUN_ID.fullmatch(run_id):
        return {}
    try:
        found = json.loads(_path(run_id).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
