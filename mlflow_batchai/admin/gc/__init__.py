"""Find, show and free what ended jobs have left on control shares, on nodes and on this machine.

Nothing is freed that a job may still need: of what can't be known to be over, the reason is said, and it stays.
"""

from mlflow_batchai.admin.gc.finding import find
from mlflow_batchai.admin.gc.items import Age, Item

__all__ = ["Age", "Item", "find"]
