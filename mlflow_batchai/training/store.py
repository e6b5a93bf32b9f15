"""What MLflow in a rank is told when it looks for a tracking server: one sentence.

Nodes have no route to a tracking server and no credentials for one; the relay brings what ranks report. Registered for the
scheme ``batchai`` of the address that ranks find in MLFLOW_TRACKING_URI.
"""

from typing import Any, NoReturn

SENTENCE = (
    "a rank has no tracking server: report metrics with 'from mlflow_batchai.training import report;"
    " report.log(step=..., loss=...)', save files under $AZ_BATCHAI_OUTPUT_<ID>, and leave start_run(), log_metric() and"
    " autolog() out, or behind 'if \"BATCHAI_RANK\" not in os.environ'"
)


def refuse(*arguments: Any, **options: Any) -> NoReturn:
    """MLflow's constructor of a store.

    Raises:
        MlflowException: always.
    """
    from mlflow.exceptions import MlflowException

    raise MlflowException(SENTENCE)
