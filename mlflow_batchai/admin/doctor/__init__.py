"""Whether a cluster could run a job: every node examined, in parallel, one finding a check."""

from mlflow_batchai.admin.doctor.findings import CHECKS, Check, Complete, State
from mlflow_batchai.admin.doctor.rounds import examine, names

__all__ = ["CHECKS", "Check", "Complete", "State", "examine", "names"]
