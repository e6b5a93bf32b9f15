"""Params, tags and datasets that scripts have logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.terminal import printable
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.tracked import tags as reserved

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# MLflow takes no more params, or tags, in one call.
BATCH = 100
CROWD = 1_000
MOST_NOTES = 20


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


class Words:
    """Collects them, and sends what has come since the last time in one call.

    Args:
        gone: whether the run was deleted.
        memory: what ``remember`` returned in an earlier process.
    """

    def __init__(self, client: MlflowClient, run_id: str, gone: Callable[[], bool], memory: Mapping[str, Any]) -> None:
        self._client = client
        self._run_id = run_id
        self._gone = gone
        self._params: dict[str, str] = {}
        self._tags: dict[str, str | None] = {}
        self._datasets: list[Record] = []
        # The run's, as far as is known: a param can't be changed.
        self._known: dict[str, str] | None = None
        self._notes: list[str] = list(memory.get("notes", []))
        self._more = int(memory.get("more", 0))
        # What scripts have said of the run (``mlflow.note.content``).
        self.script_note = str(memory.get("scriptNote", ""))

    def remember(self) -> dict[str, Any]:
        """All that another process needs to go on, as JSON: what has come is sent before it is called."""
        return {"notes": list(self._notes), "more": self._more, "scriptNote": self.script_note}

    @property
    def crowded(self) -> bool:
        """Whether much waits."""
        return len(self._params) + len(self._tags) + len(self._datasets) >= CROWD

    def take(self, body: Record) -> bool:
        """Collect a record; False if it isn't one."""
        kind = body["type"]
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

    def _take_tag(self, key: str, value: str | None) -> None:
        if key == reserved.NOTE:
            self.script_note = (value or "")[: reserved.LONGEST_NOTE]
        elif reserved.may_be_set(key, value):
            self._tags[key] = value
        else:
            self._note(f"tag '{_short(key)}' is not a script's to set, and stays as it is")

    def send(self) -> None:
        """Store what has come.

        Raises:
            Exception: the store is away: call it again.
        """
        params = self._new_params() if self._params else []
        tags = [(key, value) for key, value in self._tags.items() if value is not None]
        for start in range(0, max(len(params), len(tags)), BATCH):
            self._log(params[start : start + BATCH], tags[start : start + BATCH])
        if removed := [key for key, value in self._tags.items() if value is None]:
            runs.forget(self._client, self._run_id, removed)
        self._tags = {}
        if self._known is not None:
            self._known.update(params)
        self._params = {}
        while self._datasets:
            self._log_dataset(self._datasets[0])
            del self._datasets[0]

    def _new_params(self) -> list[tuple[str, str]]:
        if self._known is None:
            self._known = dict(self._client.get_run(self._run_id).data.params)
        for key, value in self._params.items():
            if self._known.get(key, value) != value:
                self._differs(key, self._known[key], value)
        return [(key, value) for key, value in self._params.items() if key not in self._known]

    def _differs(self, key: str, first: str, value: str) -> None:
        self._note(f"param '{_short(key)}' is '{_short(first)}': a script's '{_short(value)}' came later, and is not kept")

    def _log(self, params: list[tuple[str, str]], tags: list[tuple[str, str]]) -> None:
        """Store some; one that MLflow will never take is told of, and holds up no other."""
        from mlflow.entities import Param, RunTag
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(
                self._run_id,
                params=[Param(*param) for param in params],
                tags=[RunTag(*tag) for tag in tags],
            )
        except MlflowException as error:
            if error.error_code not in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST") or self._gone():
                raise
            if len(params) + len(tags) == 1:
                what = f"param '{_short(params[0][0])}'" if params else f"tag '{_short(tags[0][0])}'"
                self._note(f"{what} was refused: {_short(str(error.message))}")
                return
            for some in (params[: len(params) // 2], params[len(params) // 2 :]):
                if some:
                    self._log(some, [])
            for few in (tags[: len(tags) // 2], tags[len(tags) // 2 :]):
                if few:
                    self._log([], few)

    def _log_dataset(self, body: Record) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.exceptions import MlflowException

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
        try:
            self._client.log_inputs(self._run_id, [dataset])
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE" or self._gone():
                raise
            self._note(f"dataset '{_short(body['name'])}' was refused: {_short(str(error.message))}")

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
