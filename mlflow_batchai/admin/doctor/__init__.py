"""Check whether a cluster can run a job: examine all nodes in parallel, one finding for each check."""

from mlflow_batchai.admin.doctor.examination import examine
from mlflow_batchai.admin.doctor.findings import CHECKS, Check, State

__all__ = ["CHECKS", "Check", "State", "examine"]
