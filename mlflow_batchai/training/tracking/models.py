"""Logged models of a script: give each an id here; the relay creates the real ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from mlflow.entities import LoggedModel, LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

from mlflow_batchai.training.tracking.job import JobRun


class ScriptModels:
    """The logged models that this process has made, newest last."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._models: dict[str, Any] = {}

    def create(
        self,
        name: str | None,
        source_run_id: str | None,
        tags: Mapping[str, str],
        params: Mapping[str, str],
        model_type: str | None,
    ) -> Any:
        """A PENDING one."""
        model_id, now = f"m-{uuid.uuid4().hex}", int(time.time() * 1000)
        model = LoggedModel(
            experiment_id=self._run.experiment_id,
            model_id=model_id,
            name=name or f"model-{model_id[2:10]}",
            artifact_location=self._run.model_uri(model_id),
            creation_timestamp=now,
            last_updated_timestamp=now,
            model_type=model_type,
            source_run_id=source_run_id,
            status=LoggedModelStatus.PENDING,
            tags=dict(tags),
            params=dict(params),
        )
        self._models[model_id] = model
        self._say(model_id, name=model.name, model_type=model_type, tags=dict(tags), params=dict(params))
        return model

    def get(self, model_id: str) -> Any:
        """One by its id. Raises MlflowException: this process has made none of that id."""
        if model_id not in self._models:
            raise MlflowException(f"Logged model with ID '{model_id}' not found.", RESOURCE_DOES_NOT_EXIST)
        return self._models[model_id]

    def all(self) -> list[Any]:
        return list(reversed(self._models.values()))

    def finalize(self, model_id: str, status: Any) -> Any:
        """READY or FAILED: from then on it counts."""
        model = self.get(model_id)
        model.status = status if isinstance(status, LoggedModelStatus) else LoggedModelStatus(str(status))
        self._say(model_id, status=str(model.status))
        return model

    def tag(self, model_id: str, tags: Mapping[str, str | None]) -> None:
        """Set tags, or remove those that are None."""
        model = self.get(model_id)
        for key, value in tags.items():
            model.tags.pop(key, None)
            if value is not None:
                model.tags[key] = value
        self._say(model_id, tags=dict(tags))

    def add_params(self, model_id: str, params: Mapping[str, str]) -> None:
        self.get(model_id).params.update(params)
        self._say(model_id, params=dict(params))

    def add_metrics(self, model_id: str, metrics: Iterable[Mapping[str, Any]]) -> None:
        """Link metrics of the run to a model. One that isn't ours has none here."""
        if model_id in self._models:
            self._say(model_id, metrics=list(metrics))

    def output(self, model_id: str, step: int) -> None:
        """Make it an output of the run."""
        self.get(model_id)
        self._say(model_id, step=step)

    def _say(self, model_id: str, **body: Any) -> None:
        if self._run.rank == 0:
            self._run.say("logged_model", id=model_id, ts=int(time.time() * 1000), **body)
