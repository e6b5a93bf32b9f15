"""Names and settings that modules of ranks share."""

from __future__ import annotations

import os
from collections.abc import Sequence

# Where a rank's MLflow finds its job: the value of MLFLOW_TRACKING_URI.
TRACKING_URI = "batchai://job"
# What the agent tells of the run, in the folder that BATCHAI_SPOOL names.
FACTS = "run.json"

DEFAULT_TOLERANCE = 1e-5


class RanksDivergedError(RuntimeError):
    """The ranks hold different weights, so they train models of their own; the message has every checksum."""


def diverged(when: str, sums: Sequence[str], name: str, difference: float, advice: str) -> RanksDivergedError:
    """Return the error that ranks raise whose weights differ; ``difference``: how much, relative to the largest of them."""
    shown = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(sums[:16])) + (", ..." if len(sums) > 16 else "")
    return RanksDivergedError(
        f"The ranks hold different weights {when}: checksums {shown}; most in {name}, by {difference:.2g} of its largest"
        f" weight. {advice} (Ranks that are meant to differ: BATCHAI_WEIGHT_CHECK=0.)"
    )


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
