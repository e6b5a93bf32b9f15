"""MLflow's tracking store in a rank: answer from memory, and append calls to the job's records."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlflow.entities import (
    Experiment,
    LifecycleStage,
    LoggedModelOutput,
    Metric,
    Param,
    Run,
    RunData,
    RunInfo,
    RunOutputs,
    RunStatus,
    RunTag,
)
from mlflow.store.entities import PagedList
from mlflow.utils import validation
from mlflow.utils.mlflow_tags import MLFLOW_AUTOLOGGING, MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NAME, MLFLOW_RUN_NOTE
from mlflow.utils.search_utils import SearchUtils

from mlflow_batchai.training import report
from mlflow_batchai.training.constants import TRACKING_URI
from mlflow_batchai.training.tracking import job
from mlflow_batchai.training.tracking.job import RefusedError, Refusing
from mlflow_batchai.training.tracking.models import ScriptModels

_log = logging.getLogger(__name__)

# How many points get_metric_history can look back on.
MOST_POINTS = 10_000
# Datasets' schemas and profiles are a help to the eye; a table of thousands of columns has none.
LONGEST_FACT = 60_000
OURS = ("batchai.",)


class JobStore(Refusing):  # type: ignore[misc]
    """One run, the job's, in one experiment. What isn't answered here is refused, whatever a newer MLflow may call."""

    def __init__(self) -> None:
        super().__init__()
        self._run = job.opened()
        self._models = ScriptModels(self._run)
        self._lock = threading.RLock()
        self._params: dict[str, str] = {} if self._run.prefix else dict(self._run.params)
        self._tags: dict[str, str] = {MLFLOW_RUN_NAME: self._run.name}
        self._latest: dict[str, Any] = {}
        # The newest points, in the order in which they came; what a model is linked to has been logged before.
        self._points: dict[tuple[str, int, int, str], Any] = {}
        self._outputs: list[Any] = []
        self._status = RunStatus.to_string(RunStatus.RUNNING)
        self._end_time: int | None = None
        self._warned: set[str] = set()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """In a child process: another thread may have held it when it was made."""
        self._lock = threading.RLock()

    def get_experiment(self, experiment_id: str) -> Any:
        """The job's, which is MLflow's default here, too; whatever number a script has for it."""
        if str(experiment_id) not in (self._run.experiment_id, "0"):
            self._warn_of_experiment(str(experiment_id))
        return self._experiment()

    def get_experiment_by_name(self, experiment_name: str) -> Any:
        """The job's, whatever it is called: ``set_experiment`` in a script can't move a run that there is already."""
        if experiment_name != self._run.experiment:
            self._warn_of_experiment(experiment_name)
        return self._experiment()

    def _warn_of_experiment(self, wanted: str) -> None:
        self._warn(
            f"experiment '{wanted}' is not used: the job's run lies in '{self._run.experiment}'"
            " (experiment in batchai.yaml, or --experiment-name)"
        )

    def search_experiments(self, *arguments: Any, **options: Any) -> Any:
        return PagedList([self._experiment()], None)

    def _experiment(self) -> Any:
        where = f"{TRACKING_URI}/run"
        return Experiment(self._run.experiment_id, self._run.experiment, where, LifecycleStage.ACTIVE)

    def get_run(self, run_id: str) -> Any:
        """The job's, with what was given to it when it was made, and by this process."""
        self._check(run_id)
        with self._lock:
            data = RunData(
                metrics=list(self._latest.values()),
                params=[Param(*item) for item in self._params.items()],
                tags=[RunTag(*item) for item in self._tags.items()],
            )
            outputs = RunOutputs(list(self._outputs))
        return Run(self._info(), data, run_outputs=outputs)

    def create_run(self, experiment_id: str, user_id: str, start_time: int, tags: Sequence[Any], run_name: str | None) -> Any:
        """The job's again: ``start_run`` finds it by MLFLOW_RUN_ID the first time only."""
        told = {tag.key: tag.value for tag in tags or ()}
        if MLFLOW_PARENT_RUN_ID in told:
            raise RefusedError(
                "a nested run can't be made on a node: log to the job's run (with names of its own for each part), or start"
                " each part as a job of its own"
            )
        if self._end_time is not None and MLFLOW_AUTOLOGGING not in told:  # which starts runs by itself
            self._warn("a job has one run: start_run() goes on with it, though it was ended before")
        own = [tag for tag in tags or () if not tag.key.startswith("mlflow.") or tag.key == MLFLOW_RUN_NOTE]
        self.log_batch(self._run.run_id, [], [], own)
        if run_name:
            self.update_run_info(self._run.run_id, None, None, run_name)
        return self.get_run(self._run.run_id)

    def update_run_info(self, run_id: str, run_status: Any, end_time: int | None, run_name: str | None) -> Any:
        """A new name reaches the run; its end comes with the job's, so a status is known to this process only."""
        self._check(run_id)
        if run_status is not None:
            self._status = RunStatus.to_string(run_status)
        self._end_time = end_time
        if run_name and run_name != self._tags.get(MLFLOW_RUN_NAME):
            self._set_tags({MLFLOW_RUN_NAME: run_name})
        return self._info()

    def _search_runs(
        self,
        experiment_ids: Sequence[str],
        filter_string: str | None,
        run_view_type: Any,
        max_results: int,
        order_by: Any,
        page_token: Any,
    ) -> tuple[list[Any], None]:
        ours = {str(one) for one in experiment_ids} & {self._run.experiment_id, "0"}
        return (SearchUtils.filter([self.get_run(self._run.run_id)], filter_string) if ours else []), None

    def get_metric_history(self, run_id: str, metric_key: str, max_results: Any = None, page_token: Any = None) -> Any:
        """Values of a metric that this process has logged, as far back as it remembers."""
        self._check(run_id)
        with self._lock:
            return PagedList([point for point in self._points.values() if point.key == metric_key], None)

    def _info(self) -> Any:
        return RunInfo(
            run_id=self._run.run_id,
            experiment_id=self._run.experiment_id,
            user_id="",
            status=self._status,
            start_time=self._run.started,
            end_time=self._end_time,
            lifecycle_stage=LifecycleStage.ACTIVE,
            artifact_uri=self._run.uri,
            run_name=self._tags[MLFLOW_RUN_NAME],
        )

    def _check(self, run_id: str) -> None:
        if run_id != self._run.run_id:
            raise RefusedError(f"run {run_id} can't be reached from a node: the job's own is {self._run.run_id}")

    def log_batch(self, run_id: str, metrics: Sequence[Any], params: Sequence[Any], tags: Sequence[Any]) -> None:
        """Metrics, params and tags, which have to be as any of MLflow's stores wants them."""
        self._check(run_id)
        for metric in metrics:
            validation._validate_metric(metric.key, metric.value, metric.timestamp, metric.step)
        given = [validation._validate_param(param.key, str(param.value)) for param in params]
        told = [validation._validate_tag(tag.key, str(tag.value)) for tag in tags]
        with self._lock:
            self._log_metrics(metrics)
            self._log_params(given)
            self._set_tags({tag.key: tag.value for tag in told})

    def _log_metrics(self, metrics: Sequence[Any]) -> None:
        news: dict[tuple[int, int], dict[str, Any]] = {}
        linked: dict[str, list[dict[str, Any]]] = {}
        for metric in metrics:
            key, step, ts = metric.key, int(metric.step or 0), int(metric.timestamp)
            value = report.spelled(float(metric.value))
            if metric.model_id:
                linked.setdefault(metric.model_id, []).append({"key": key, "value": value, "ts": ts, "step": step})
            if self._is_new(metric, (key, step, ts, str(value))):
                news.setdefault((step, ts), {})[key] = value
        for (step, ts), values in news.items():
            named = {self._run.prefix + key: value for key, value in values.items()}
            self._run.say("metric", ts=ts, step=step, every=True, values=named)
        for model_id, points in linked.items():
            self._models.add_metrics(model_id, points)

    def _is_new(self, metric: Any, point: tuple[str, int, int, str]) -> bool:
        """Note a point; False if this process has logged it before, as log_model does to link it to the model."""
        if point in self._points:
            return False
        self._points[point] = Metric(metric.key, float(metric.value), point[2], point[1])
        if len(self._points) > MOST_POINTS:
            del self._points[next(iter(self._points))]
        latest = self._latest.get(metric.key)
        if latest is None or (latest.step, latest.timestamp) <= (point[1], point[2]):
            self._latest[metric.key] = self._points[point]
        return True

    def _log_params(self, params: Sequence[Any]) -> None:
        news = {}
        for param in params:
            known = self._params.setdefault(param.key, param.value)
            if known != param.value:
                self._warn(f"param '{param.key}' is '{known}' in the run already: '{param.value}' is not kept")
            news[self._run.prefix + param.key] = param.value
        if news:
            self._run.say("param", values=news)

    def _set_tags(self, tags: Mapping[str, str | None]) -> None:
        for key in [key for key in tags if key.startswith(OURS)]:
            self._warn(f"tag '{key}' is not set: those that begin with 'batchai.' are the job's own")
        mine = {key: value for key, value in tags.items() if not key.startswith(OURS)}
        self._tags.update({key: value for key, value in mine.items() if value is not None})
        if self._run.prefix:
            # MLflow's own tags say what the one run is: they are rank 0's to set.
            mine = {self._run.prefix + key: value for key, value in mine.items() if not key.startswith("mlflow.")}
        if mine:
            self._run.say("tag", values=mine)

    def delete_tag(self, run_id: str, key: str) -> None:
        self._check(run_id)
        with self._lock:
            if key != MLFLOW_RUN_NAME and self._tags.pop(key, None) is not None:
                self._set_tags({key: None})

    def log_inputs(self, run_id: str, datasets: Sequence[Any] | None = None, models: Any = None) -> None:
        """Datasets become the run's inputs; models do not, as only the server knows them."""
        self._check(run_id)
        for given in datasets or () if self._run.rank == 0 else ():
            dataset = given.dataset
            facts = {name: getattr(dataset, name) for name in ("name", "digest", "source_type", "source", "schema", "profile")}
            for name in ("schema", "profile"):
                if len(facts[name] or "") > LONGEST_FACT:
                    facts[name] = None
            self._run.say("dataset", tags={tag.key: tag.value for tag in given.tags}, **facts)

    def create_logged_model(
        self,
        experiment_id: str,
        name: str | None = None,
        source_run_id: str | None = None,
        tags: Sequence[Any] | None = None,
        params: Sequence[Any] | None = None,
        model_type: str | None = None,
    ) -> Any:
        """A model with an id that holds in this job; the run has the same one under another id in the end."""
        validation._validate_logged_model_name(name)
        return self._models.create(name, source_run_id, _pairs(tags), _pairs(params), model_type)

    def get_logged_model(self, model_id: str, *arguments: Any, **options: Any) -> Any:
        return self._models.get(model_id)

    def search_logged_models(self, *arguments: Any, **options: Any) -> Any:
        """Return the models that this process has made, newest first."""
        return PagedList(self._models.all(), None)

    def finalize_logged_model(self, model_id: str, status: Any) -> Any:
        return self._models.finalize(model_id, status)

    def set_logged_model_tags(self, model_id: str, tags: Sequence[Any]) -> None:
        self._models.tag(model_id, _pairs(tags))

    def delete_logged_model_tag(self, model_id: str, key: str) -> None:
        self._models.tag(model_id, {key: None})

    def log_logged_model_params(self, model_id: str, params: Sequence[Any]) -> None:
        self._models.add_params(model_id, _pairs(params))

    def log_outputs(self, run_id: str, models: Sequence[Any]) -> None:
        self._check(run_id)
        for model in models:
            self._models.output(model.model_id, model.step)
            self._outputs.append(LoggedModelOutput(model.model_id, model.step))

    def record_logged_model(self, run_id: str, mlflow_model: Any) -> None:
        """Nothing: what MLflow 2 kept in a tag are the run's outputs now."""

    def _warn(self, sentence: str) -> None:
        """Say something once, on rank 0: the others would say the same."""
        if sentence not in self._warned and self._run.rank == 0:
            self._warned.add(sentence)
            _log.warning("mlflow: %s", sentence)


def _pairs(entities: Iterable[Any] | None) -> dict[str, str]:
    return {entity.key: str(entity.value) for entity in entities or ()}
