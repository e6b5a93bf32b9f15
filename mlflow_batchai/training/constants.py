"""Names and settings that modules of ranks share."""

from __future__ import annotations

import os

# Where a rank's MLflow finds its job: the value of MLFLOW_TRACKING_URI.
TRACKING_URI = "batchai://job"
# What the agent tells of the run, in the folder that BATCHAI_SPOOL names.
FACTS = "run.json"

DEFAULT_TOLERANCE = 1e-5


def tolerance() -> float | None:
    """Return the difference of weights that is allowed, None if the check is switched off.

    Raises ValueError if BATCHAI_WEIGHT_CHECK is neither a number nor off.
    """
    text = os.environ.get("BATCHAI_WEIGHT_CHECK", "").strip().lower()
    if text in ("", "1", "on", "true"):
        return DEFAULT_TOLERANCE
    if text in ("0", "off", "false", "no"):
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"BATCHAI_WEIGHT_CHECK={text} is neither 0 nor a number: set it to 0 to switch the check off, "
            "or to the difference allowed, such as 1e-3."
        ) from None
