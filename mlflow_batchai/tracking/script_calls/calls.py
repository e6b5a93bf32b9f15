"""Write params, tags, datasets, files and models that scripts have logged into the job's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.terminal import printable
from mlflow_batchai.tracking import runs, stores
from mlflow_batchai.tracking.script_calls import files
from mlflow_batchai.tracking.script_calls import tags as reserved
from mlflow_batchai.tracking.script_calls.files import RunFiles
from mlflow_batchai.tracking.script_calls.models import ScriptModels

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# MLflow takes no more params, or tags, in one call.
BATCH = 100
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
CROWD = 1_000
MOST_NOTES = 20
# So long files are sent at a time while the job runs: metrics wait for them.
SECONDS = 5.0


def _is_text_of(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


SHAPES: Mapping[str, records.Shape] = {
    "param": {"values": _is_text_of},
    "tag": {"values": lambda value: isinstance(value, dict) and all(map(records.or_none(records.is_text), value.values()))},
    "dataset": {
        **dict.fromkeys(("name", "digest", "source_type", "source"), records.is_text),
        **dict.fromkeys(("schema", "profile"), records.or_none(records.is_text)),
        "tags": _is_text_of,
    },
}
KINDS = frozenset((*SHAPES, "artifact", "logged_model"))


class ScriptCalls:
    """Collects what scripts have logged; params, tags and datasets that have come since the last time are sent in one call.

    Args:
        gone: whether the run was deleted.
        memory: what ``remember`` returned in an earlier process, of whichever attempt.

    Attributes:
        script_note: what scripts have said of the run (``mlflow.note.content``), for its description.
    """

    def __init__(self, client: MlflowClient, job: Job, gone: Callable[[], bool], memory: Mapping[str, Any] | None) -> None:
        memory = memory or {}
        self._client = client
        self._run_id = job.plan.run_id
        self._gone = gone
        self._files = RunFiles(client, job, memory.get("files", {}))
        self._models = ScriptModels(client, job, memory.get("models", {}))
        said = memory.get("words", {})
        self._params: dict[str, str] = {}
        self._tags: dict[str, str | None] = {}
        self._datasets: list[Record] = []
        # The run's, as far as is known: a param can't be changed.
        self._known: dict[str, str] | None = None
        self._notes: list[str] = list(said.get("notes", []))
        self._more = int(said.get("more", 0))
        self.script_note = str(said.get("scriptNote", ""))

    def remember(self) -> dict[str, Any]:
        """The memory for a later process, as JSON: params, tags and datasets are sent before it is called."""
        said = {"notes": list(self._notes), "more": self._more, "scriptNote": self.script_note}
        return {"words": said, "files": self._files.remember(), "models": self._models.remember()}

    @property
    def crowded(self) -> bool:
        """Whether so much waits that it is to be sent before more is read."""
        return len(self._params) + len(self._tags) + len(self._datasets) >= CROWD or self._files.crowded

    def take(self, body: Record) -> bool:
        """Take the body of a ``report`` record of one of ``KINDS``; False if it can't be read."""
        kind = body["type"]
        if kind == "artifact":
            return records.has(body, files.SHAPE) and self._take_file(body)
        if kind == "logged_model":
            return self._models.take(body)
        if not records.has(body, SHAPES[kind]):
            return False
        if kind == "dataset":
            self._datasets.append(body)
        elif kind == "tag":
            for key, value in body["values"].items():
                self._take_tag(runs.plain(key), value if value is None else runs.plain(value))
        else:
            for key, value in ((runs.plain(key), runs.plain(value)) for key, value in body["values"].items()):
                first = self._params.setdefault(key, value)
                if first != value:
                    self._differs(key, first, value)
        return True

    def _take_file(self, body: Record) -> bool:
        whose, _, path = body["path"].partition("/")
        model_id, _, inside = path.partition("/")
        if not files.is_path(body["path"]) or whose not in ("run", "models") or not (inside if whose == "models" else path):
            return False
        if whose == "run":
            self._files.take(path, body)
        else:
            self._models.take_file(model_id, inside, body["size"])
        return True

    def _take_tag(self, key: str, value: str | None) -> None:
        if key == reserved.NOTE:
            self.script_note = (value or "")[: reserved.LONGEST_NOTE]
        elif reserved.may_be_set(key, value):
            self._tags[key] = value
        else:
            self._note(f"tag '{_short(key)}' is not a script's to set, and stays as it is")

    def send(self) -> None:
        """Store what has come of params, tags and datasets; files, if many wait.

        Raises:
            Exception: the store is away: call it again.
        """
        from mlflow.entities import Param, RunTag

        params = self._new_params() if self._params else []
        self._log("params", [Param(key, value) for key, value in params])
        self._log("tags", [RunTag(key, value) for key, value in self._tags.items() if value is not None])
        if removed := [key for key, value in self._tags.items() if value is None]:
            runs.forget(self._client, self._run_id, removed)
        self._tags = {}
        if self._known is not None:
            self._known.update(params)
        self._params = {}
        while self._datasets:
            self._log_dataset(self._datasets[0])
            del self._datasets[0]
        if self._files.crowded:
            self.send_files()

    def send_files(self) -> None:
        """Send some files, while the job runs."""
        self._files.send(SECONDS)

    def send_rest(self) -> list[str]:
        """Send all files: nothing more will be written. Sentences on what was left out."""
        return self._files.send()

    def make_models(self) -> list[str]:
        """Make the logged models. Sentences on those that can't be made."""
        return self._models.make()

    def _new_params(self) -> list[tuple[str, str]]:
        if self._known is None:
            self._known = dict(self._client.get_run(self._run_id).data.params)
        for key, value in self._params.items():
            if self._known.get(key, value) != value:
                self._differs(key, self._known[key], value)
        return [(key, value) for key, value in self._params.items() if key not in self._known]

    def _differs(self, key: str, first: str, value: str) -> None:
        self._note(f"param '{_short(key)}' is '{_short(first)}': a script's '{_short(value)}' came later, and is not kept")

    def _log(self, kind: str, entities: Sequence[Any]) -> None:
        def log(some: Sequence[Any]) -> None:
            self._client.log_batch(self._run_id, **{kind: some})  # type: ignore[arg-type]

        def refused(one: Any, why: str) -> None:
            self._note(f"{kind[:-1]} '{_short(str(one.key))}' was refused: {_short(why)}")

        for start in range(0, len(entities), BATCH):
            stores.log_what_is_taken(entities[start : start + BATCH], log, refused, self._gone, REFUSALS)

    def _log_dataset(self, body: Record) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        names = ("name", "digest", "source_type", "source", "schema", "profile")
        facts = {name: runs.plain(body[name]) for name in names if body[name] is not None}
        if not reserved.is_source(facts["source"]):
            facts["source"] = "{}"
            self._note(f"dataset '{_short(body['name'])}': its source leads to no web page, and is left out")
        given = {runs.plain(key): runs.plain(value) for key, value in body["tags"].items()}
        for key in [key for key in given if key != reserved.CONTEXT and reserved.is_reserved(key)]:
            del given[key]
            self._note(f"tag '{_short(key)}' of dataset '{_short(body['name'])}' is not a script's to set, and is left out")
        tags = [InputTag(key, value) for key, value in given.items()]
        dataset = DatasetInput(Dataset(**facts), tags)
        stores.log_what_is_taken(
            [dataset],
            lambda datasets: self._client.log_inputs(self._run_id, list(datasets)),
            lambda _, why: self._note(f"dataset '{_short(body['name'])}' was refused: {_short(why)}"),
            self._gone,
        )

    def _note(self, sentence: str) -> None:
        if sentence in self._notes:
            return
        if len(self._notes) < MOST_NOTES:
            self._notes.append(sentence)
        else:
            self._more += 1

    def notes(self) -> list[str]:
        """Sentences on what is not stored as it came."""
        return [*self._notes, *([f"{self._more} more params and tags were not kept"] if self._more else [])]


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= 200 else line[:200] + "..."
