"""A process that drives a sweep when nobody stays for it: ``batchai sweep attach``, detached."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mlflow_batchai import shell
from mlflow_batchai.config import home
from mlflow_batchai.shares import credentials
from mlflow_batchai.sweep.sweeps import Sweep

_PROGRAM = "from mlflow_batchai.cli import main; main()"


def start(sweep: Sweep) -> Path:
    """Start it; where it says what it does.

    Raises:
        ClusterError: it can't be started.
    """
    # -P: what lies in the user's folder must not be imported in place of a library.
    argv = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-c", _PROGRAM]
    environment = {**os.environ, **sweep.tracking.environment, **credentials.exported(), "BATCHAI_HOME": str(home())}
    log = home() / "sweeps" / f"{sweep.run_id}.log"
    shell.spawn([*argv, "sweep", "attach", sweep.run_id, "--output", "table"], environment, log)
    return log
