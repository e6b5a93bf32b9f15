"""Missing data of an attempt by its agents' totals, which others may have written."""

from __future__ import annotations

from job_folder import NO_TOTALS

from mlflow_batchai.agent.transport import totals
from mlflow_batchai.job.completeness import MOST_TOLD, log_totals, missing, totals_of

TOTALS = {
    "segments": 9,
    "logs": {"stdout.txt": [30, 3]},
    "reports": {"0": [5, 8], "1": [2, 0], "10": [1, 1]},
    "uncounted": [7],
    "unsent": 4,
}


def test_what_has_come_is_not_missing_and_the_rest_is_told_to_the_number() -> None:
    received = {"0": [5, 8], "1": [2, 0], "10": [1, 1]}
    assert missing({0: {**TOTALS, "uncounted": [], "unsent": 0}}, {"agent-0": 9}, received) == []
    assert missing({0: TOTALS, 1: None}, {"agent-0": 7}, {"0": [4, 6], "1": [1, 0]}) == [
        "missing: the last 2 of 9 event files of node-0",
        "missing: 4 lines of node-0 that the share did not take before it was given up",
        "missing: what rank 7 reported on node-0, whose disk took nothing: how much it was is not known",
        "missing: 2 of 8 points that rank 0 reported",
        "missing: 1 of 2 records (params, tags, files) that rank 1 reported",
        "missing: 1 of 1 points that rank 10 reported",
        "missing: the totals of node-1, whose agent has left none: what it had not sent is not known",
    ]
    # A share cannot make it say much.
    known = {0: {**TOTALS, "reports": {str(rank): [1, 1] for rank in range(5000)}}}
    told = missing(known, {}, {})
    assert len(told) == MOST_TOLD + 1 and "4983 more" in told[-1]


def test_totals_that_can_be_none() -> None:
    odd = [
        {**TOTALS, "reports": {"9" * 5000: [1, 1]}},
        {**TOTALS, "reports": {"-1": [1, 1]}},
        {**TOTALS, "reports": {"0": [1]}},
        {**TOTALS, "segments": -1},
        {**TOTALS, "logs": {"stdout.txt": [1, 2**70]}},
        {**TOTALS, "unsent": None},
    ]
    assert [totals.of(record) for record in odd] == [None] * len(odd)


def test_only_log_files_are_written_anew() -> None:
    logs = {"stdout-3.txt": (5, 1), "execution-node-1.log": (7, 2), "stderr-job_prep-node-0.txt": (1, 1)}
    names = {name: list(told) for name, told in {**logs, "../../x": (9, 9), "a.txt": (1, 1)}.items()}
    assert log_totals({0: {**TOTALS, "logs": names}, 1: None}) == logs


def test_the_verdict_has_what_an_exit_that_is_damaged_had(folder) -> None:
    made = folder()
    made.announce(0)
    made.share.write(made.paths.exit(0), b"damaged")
    made.verdict(totals={"0": TOTALS})
    assert totals_of(made.job) == {0: TOTALS}
    made.exit(0, segments=3)
    assert totals_of(made.job) == {0: {**NO_TOTALS, "segments": 3}}
