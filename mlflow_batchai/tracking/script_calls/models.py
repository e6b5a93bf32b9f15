"""Create the logged models of scripts in MLflow, each once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.metrics import metric_key
from mlflow_batchai.tracking import runs, stores
from mlflow_batchai.tracking.models.logged import TAG_SCRIPT, being_made, find_logged
from mlflow_batchai.tracking.script_calls.files import NotThereError, local
from mlflow_batchai.tracking.script_calls.tags import ORIGIN, is_reserved

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient

MOST_MODELS, MOST_FILES, MOST_LINKS = 100, 10_000, 10_000
MOST_TAGS_SHOWN = 5
MLMODEL = "MLmodel"
LONGEST_MLMODEL = 4 << 20


def _is_pairs(value: object) -> bool:
    return isinstance(value, dict) and all(map(records.or_none(records.is_text), value.values()))


def _is_metrics(value: object) -> bool:
    each: records.Shape = {"key": records.is_text, "step": records.is_number}
    return isinstance(value, list) and all(records.has(one, each) for one in value)


# What may stand in a record besides the model's id; each holds for the model from then on.
FIELDS: Mapping[str, records.Check] = {
    "name": records.is_text,
    "model_type": records.or_none(records.is_text),
    "tags": _is_pairs,
    "params": _is_pairs,
    "metrics": _is_metrics,
    "status": records.is_text,
    "step": records.is_number,
}


class ScriptModels:
    """The models of a job's scripts."""

    def __init__(self, client: MlflowClient, job: Job, memory: Mapping[str, Any]) -> None:
        self._client = client
        self._job = job
        self._run_id = job.plan.run_id
        self._described: dict[str, dict[str, Any]] = copy.deepcopy(dict(memory))

    def remember(self) -> dict[str, Any]:
        """The memory for a later process, as JSON; a copy: heartbeats write it again in a thread of their own."""
        return copy.deepcopy(self._described)

    def take(self, body: Record) -> bool:
        """Note a record of a model; False if it is none."""
        model_id = body.get("id")
        known = {name: check for name, check in FIELDS.items() if name in body}
        if not isinstance(model_id, str) or not model_id.isprintable() or not records.has(body, known):
            return False
        if model_id not in self._described and len(self._described) >= MOST_MODELS:
            return True
        entry = self._described.setdefault(model_id, {"name": "model", "tags": {}, "params": {}, "links": {}, "files": {}})
        entry.update({name: body[name] for name in ("name", "model_type", "status", "step") if name in body})
        for name in ("tags", "params"):
            entry[name] = {**entry[name], **body.get(name, {})}
        for metric in body.get("metrics", []):
            steps = entry["links"].setdefault(metric_key(metric["key"]), [])
            if len(steps) < MOST_LINKS:
                steps.append(int(metric["step"]))
        return True

    def take_file(self, model_id: str, path: str, size: int) -> None:
        """One of a model's files was closed."""
        files = self._described.get(model_id, {}).get("files")
        if files is not None and len(files) < MOST_FILES:
            files[path] = size

    def make(self) -> list[str]:
        """Make those that were finished, unless that was done; sentences on what could not be made.

        Raises:
            Exception: the store or the share is away: call it again.
        """
        notes = []
        for model_id, entry in self._described.items():
            if entry.get("status") == "READY":
                notes += self._make(model_id, entry)
            elif entry.get("status") != "FAILED":
                notes.append(f"model '{entry['name']}' was begun by a script and never finished: it is left out")
        if len(self._described) >= MOST_MODELS:
            notes.append(f"only the first {MOST_MODELS} logged models of scripts are kept")
        return notes

    def _make(self, model_id: str, entry: Record) -> list[str]:
        from mlflow.exceptions import MlflowException

        try:
            model = find_logged(self._client, self._run_id, TAG_SCRIPT, self._tag(model_id)) or self._create(model_id, entry)
            if "step" in entry:
                self._put_out(model.model_id, int(entry["step"]))
            if refused := [key for key in entry["tags"] if is_reserved(key) and not key.startswith(ORIGIN)]:
                names = ", ".join(refused[:MOST_TAGS_SHOWN])
                return [f"model '{entry['name']}': tags that are not a script's to set are left out: {names}"]
        except NotThereError as error:
            return [f"model '{entry['name']}': {error}"]
        except MlflowException as error:
            if stores.may_pass(error):
                raise
            return [f"model '{entry['name']}' was refused: {stores.sentence(error)}"]
        return []

    def _create(self, model_id: str, entry: Record) -> LoggedModel:
        run = self._client.get_run(self._run_id)
        # MLflow gives each model its user and source: those that a rank sees are a node's.
        origin = {key: value for key, value in run.data.tags.items() if key.startswith(ORIGIN)}
        tags = {key: value for key, value in _plain_pairs(entry["tags"]).items() if not is_reserved(key)}
        tags |= {**origin, TAG_SCRIPT: self._tag(model_id)}
        kind = entry.get("model_type") and runs.plain(entry["model_type"])
        with being_made(self._client, run, runs.plain(entry["name"]), tags, _plain_pairs(entry["params"]), kind) as model:
            self._send(model_id, model.model_id, entry["files"])
            self._link(model.model_id, entry["links"])
        return model

    def _tag(self, model_id: str) -> str:
        return f"{self._job.plan.job}/{model_id}"

    def _send(self, script_id: str, model_id: str, files: Mapping[str, int]) -> None:
        for path in sorted(files, key=lambda path: path == MLMODEL):
            try:
                with local(self._job, f"models/{script_id}/{path}", None) as file:
                    if path == MLMODEL:
                        self._send_description(file, script_id, model_id)
                    else:
                        self._client.log_model_artifact(model_id, str(file), path.rpartition("/")[0] or None)
            except NotThereError as error:
                raise NotThereError(f"{path} is not on the share: {error}") from None

    def _send_description(self, file: Path, script_id: str, model_id: str) -> None:
        """Its ``MLmodel``, in which it is called by its real id."""
        with file.open("rb") as stream:
            text = stream.read(LONGEST_MLMODEL + 1)
        if len(text) > LONGEST_MLMODEL:
            raise NotThereError("that is no MLmodel")
        with TemporaryDirectory(prefix="batchai-model-") as scratch:
            target = Path(scratch, MLMODEL)
            target.write_bytes(text.replace(script_id.encode(), model_id.encode()))
            self._client.log_model_artifact(model_id, str(target))

    def _link(self, model_id: str, links: Mapping[str, list[int]]) -> None:
        """Link the run's own points of these steps, as they are stored, so that no new one comes of it."""
        from mlflow.entities import Metric

        for key, steps in links.items():
            wanted = set(steps)
            history = self._client.get_metric_history(self._run_id, key)
            # The run may have several values of one moment; of a model no store takes but one.
            points = list({(point.timestamp, point.step): point for point in history if point.step in wanted}.values())
            for start in range(0, len(points), 1000):
                some = points[start : start + 1000]
                metrics = [Metric(key, point.value, point.timestamp, point.step, model_id=model_id) for point in some]
                self._client.log_batch(self._run_id, metrics=metrics)

    def _put_out(self, model_id: str, step: int) -> None:
        from mlflow.entities import LoggedModelOutput

        outputs = self._client.get_run(self._run_id).outputs
        if not any(output.model_id == model_id for output in (outputs.model_outputs if outputs else ())):
            self._client.log_outputs(self._run_id, [LoggedModelOutput(model_id, step=step)])


def _plain_pairs(pairs: Mapping[str, str | None]) -> dict[str, str]:
    """Pairs with a value, as every store takes them."""
    return {runs.plain(key): runs.plain(value) for key, value in pairs.items() if value is not None}
