"""Whether a cluster could run a job: every node examined, in parallel, one finding a check."""

from mlflow_batchai.admin.doctor.examination import examine
from mlflow_batchai.admin.doctor.findings import CHECKS, Check, State

__all__ = ["CHECKS", "Check", "State", "examine"]
