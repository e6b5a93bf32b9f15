"""Search: what Optuna tries next, which jobs fall behind, which parameters matter; all of it from the runs of a sweep's jobs.

Optuna's study is made anew from the runs whenever it is asked, so nothing else is kept, and any process can go on.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlflow_batchai.errors import UsageError
from mlflow_batchai.sweep.parameters import Combination, Range
from mlflow_batchai.sweep.results import is_less_better
from mlflow_batchai.sweep.sweeps import TAG_STOPPED, SweepPlan

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

# How many jobs must have come to an epoch (or have succeeded) before they are a measure of others (or of parameters).
ENOUGH = 5


def require() -> None:
    """Raise UsageError unless Optuna is there."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UsageError("--sampler tpe needs Optuna: pip install 'mlflow-batchai[optuna]'") from None


def ask(plan: SweepPlan, jobs: Mapping[int, Run], number: int) -> Combination:
    """What Optuna has the job of a number try; the same for the same seed and results.

    Raises:
        UsageError: Optuna is not there.
    """
    require()
    trial = _study(plan, jobs, number).ask({name: _distribution(name, plan.space[name]) for name in plan.space})
    return {name: _written(name, plan.space[name], value) for name, value in trial.params.items()}


def _study(plan: SweepPlan, jobs: Mapping[int, Run], number: int = 0) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    assert plan.metric is not None
    # Each job has a seed of its own: what a process has drawn before is not known to the next one.
    seed = random.Random(f"{plan.seed}/{number}").getrandbits(32)
    study = optuna.create_study(
        direction="minimize" if is_less_better(plan.metric, plan.mode) else "maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
    )
    study.add_trials([trial for run in jobs.values() if (trial := _trial(plan, plan.metric, run))])
    return study


def _trial(plan: SweepPlan, metric: str, run: Run) -> FrozenTrial | None:
    """A job as a trial; None for one that has failed, or whose run was changed so that it can't be one."""
    from optuna.trial import TrialState, create_trial

    distributions = {name: _distribution(name, texts) for name, texts in plan.space.items()}
    value, status = run.data.metrics.get(metric, math.nan), run.info.status
    how: dict[str, Any]
    if run.info.lifecycle_stage != "active":
        return None
    if status in ("RUNNING", "SCHEDULED"):
        how = {"state": TrialState.RUNNING}
    elif status == "FINISHED" and math.isfinite(value):
        how = {"state": TrialState.COMPLETE, "value": value}
    elif status == "KILLED" and TAG_STOPPED in run.data.tags and math.isfinite(value):
        how = {"state": TrialState.PRUNED, "intermediate_values": {0: value}}
    else:
        return None
    try:
        params = {name: _read(name, texts, run.data.params[name]) for name, texts in plan.space.items()}
        return create_trial(params=params, distributions=distributions, **how)
    except (KeyError, ValueError):
        return None


def _distribution(name: str, texts: Any) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found = Range.of(name, texts)
    if found is None:
        return CategoricalDistribution(tuple(dict.fromkeys(texts)))
    if found.is_whole:
        return IntDistribution(int(found.low), round(found.high), log=found.is_log, step=int(found.step or 1))
    return FloatDistribution(found.low, found.high, log=found.is_log, step=found.step)


def _written(name: str, texts: Any, value: Any) -> str:
    found = Range.of(name, texts)
    return found.written(value) if found else str(value)


def _read(name: str, texts: Any, text: str) -> Any:
    found = Range.of(name, texts)
    if found is None:
        return text
    # Written with fewer digits, the ends of a range may lie a little outside.
    value = min(max(float(text), found.low), found.high)
    return round(value) if found.is_whole else value


class Medians:
    """Tells which jobs fall behind the median that succeeded jobs had at the same step of the sweep's metric."""

    def __init__(self, mlflow: MlflowClient, plan: SweepPlan) -> None:
        self._mlflow, self._metric = mlflow, plan.metric or ""
        self._less = is_less_better(plan.metric, plan.mode) if plan.metric else False
        self._ended: dict[int, dict[int, float]] = {}
        self._looked: dict[int, float] = {}

    def behind(self, jobs: Mapping[int, Run], number: int) -> str:
        """Why a job is to be ended: even its best value so far is worse than that median; empty: it is not."""
        for other, run in jobs.items():
            if run.info.status == "FINISHED" and other not in self._ended:
                self._ended[other] = self._history(run)
        newest = jobs[number].data.metrics.get(self._metric)
        if len(self._ended) < ENOUGH or newest is None or newest == self._looked.get(number):
            return ""  # histories are long, and this is asked each second
        self._looked[number] = newest
        if not (own := self._history(jobs[number])):
            return ""
        step = max(own)
        others = [values[step] for values in self._ended.values() if step in values]
        if len(others) < ENOUGH:
            return ""
        median, best = statistics.median(others), (min if self._less else max)(own.values())
        return f"stopped early at epoch {step + 1}" if (best > median if self._less else best < median) else ""

    def _history(self, run: Run) -> dict[int, float]:
        points = self._mlflow.get_metric_history(run.info.run_id, self._metric)
        return {point.step: point.value for point in points if not math.isnan(point.value)}


def importances(plan: SweepPlan, jobs: Mapping[int, Run], say: Callable[[str], None]) -> Any:
    """Optuna's picture of how much each parameter matters; None where too few jobs have succeeded, or it can't be drawn.

    Args:
        say: told why it can't be drawn.
    """
    if not plan.space or plan.metric is None:
        return None
    try:
        import matplotlib
        import optuna

        matplotlib.use("Agg")
        study = _study(plan, jobs)
        if len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])) < ENOUGH:
            return None
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=plan.seed % 2**32)
        with matplotlib.rc_context({"figure.autolayout": True}), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls its pictures experimental
            plot = optuna.visualization.matplotlib.plot_param_importances
            return plot(study, evaluator=evaluator, target_name=plan.metric).figure
    except ImportError as error:
        say(f"no picture of the parameters' importances: {error}; pip install 'mlflow-batchai[optuna]'")
    except Exception as error:  # Optuna raises what its libraries do, and a sweep ends without a picture
        say(f"no picture of the parameters' importances: {type(error).__name__}: {error}")
    return None
