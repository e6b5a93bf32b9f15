"""Collect which files of a job's code differ from its git commit, by reading ``git`` only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlflow_batchai.storage.objects import StagedFile

GIT_SECONDS = 10.0
MOST_NAMES = 1000


def since_commit(folder: Path, code: Sequence[StagedFile]) -> dict[str, Any] | None:
    """The commit that a project's folder is at, and the names of files that differ; None: it isn't in git.

    Args:
        code: what is sent to the nodes; files that are not sent count only when they are deleted.

    Returns:
        ``commit``, ``differs``; ``changed``, ``deleted``, ``untracked`` (paths, of each ``MOST_NAMES`` at most), ``note`` (what
        could not be found out, or None).
    """
    try:
        commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD").decode("ascii", "replace").strip()
        if not commit:
            return None
        tracked = _names(folder, "ls-files", "-z")
        # The user's own programs for diffs are not run.
        words = ("--name-only", "-z", "--relative", "--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all")
        differing = _names(folder, "diff", "HEAD", *words, "--", ".")
    except FileNotFoundError:
        return None  # there is no git here
    except subprocess.TimeoutExpired:
        return {"commit": None, "note": f"git took more than {GIT_SECONDS:.0f} s to say what has changed"}
    sent = {file.path for file in code}
    found = {
        "changed": sorted(differing & sent),
        "deleted": sorted(path for path in differing if not os.path.lexists(folder / path)),
        "untracked": sorted(sent - tracked),
    }
    names = {key: paths[:MOST_NAMES] for key, paths in found.items()}
    return {"commit": commit, "differs": any(found.values()), **names, "note": None}


def _names(folder: Path, *words: str) -> set[str]:
    return {os.fsdecode(name) for name in _git(folder, *words).split(b"\0") if name}


def _git(folder: Path, *words: str) -> bytes:
    """Output of a git command; nothing if it fails.

    Raises:
        FileNotFoundError: there is no git.
        TimeoutExpired: it takes too long.
    """
    # What has the content that it had is no change; no program of the repository's configuration is run; nothing is written.
    argv = ["git", "-C", str(folder), "-c", "diff.autoRefreshIndex=true", "-c", "core.fsmonitor=false", *words]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=GIT_SECONDS, env=environment
    )
    return done.stdout if done.returncode == 0 else b""
