"""Ask a server or a sqlite database for experiments and runs without importing MLflow, which takes seconds of CPU.

What is unusual, and what fails, is left to MLflow's own client: it knows more ways, and its errors are those that are shown.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlencode

from mlflow_batchai.config import database_file
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.runs import Tracking

if TYPE_CHECKING:
    import requests
    from mlflow.tracking import MlflowClient

SECONDS = 30.0
# MLflow's variables for what only MLflow does: plugins for authentication, its own workspaces.
_MLFLOWS_OWN = (
    *("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_WORKSPACE", "MLFLOW_ENABLE_WORKSPACES"),
    "MLFLOW_TRACKING_INSECURE_TLS",
)
_CONDITION = re.compile(
    r"(?:tags\.`(?P<tag>[^`]+)`|attributes\.(?P<attribute>\w+)) (?P<comparator>=|!=|LIKE) '(?P<value>[^']*)'"
)
_COLUMNS = {"status": "status", "run_id": "run_uuid"}


class Page(list[Any]):
    """Part of a search's results; ``token`` asks for the next part, None where there is none."""

    def __init__(self, found: Iterable[Any] = (), token: str | None = None) -> None:
        super().__init__(found)
        self.token = token


def client(tracking: Tracking) -> MlflowClient:
    """A client for looking things up: a call that can be answered without MLflow is, every other one is MLflow's.

    Runs and experiments that it finds itself have no more than the index of jobs needs: of a run its tags and what
    ``_run`` lists.
    """
    return cast("MlflowClient", _Client(tracking))


def default_uri() -> str | None:
    """The tracking address of this process, where it is known without MLflow.

    Without MLFLOW_TRACKING_URI MLflow takes the database of the current folder, unless that has a file store in ``mlruns``.
    """
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    path, has_files = Path("mlflow.db").absolute(), any(Path("mlruns").glob("*/meta.yaml"))
    # MLflow writes a path with blanks, say, in a way of its own.
    return f"sqlite:///{path}" if path.is_file() and not has_files and quote(str(path)) == str(path) else None


class _Client:
    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._store = _store(tracking)
        self._mlflow: MlflowClient | None = None

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._store is not None and (direct := getattr(self._store, name, None)):
                with contextlib.suppress(Exception):
                    return direct(*arguments, **options)
            self._mlflow = self._mlflow or runs.client(self._tracking)
            return getattr(self._mlflow, name)(*arguments, **options)

        return call


def _store(tracking: Tracking) -> _Server | _Database | None:
    """What answers without MLflow; None: only MLflow's client does."""
    uri = tracking.address
    if "?" in uri or any(os.environ.get(name) for name in _MLFLOWS_OWN):
        return None
    if file := database_file(uri):
        return _Database(file)
    if not uri.startswith(("http://", "https://")):
        return None
    # Its client finds a user and a password there; a user without a home has none.
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 (Path's own raises then)
    return None if (home / ".mlflow" / "credentials").exists() else _Server(tracking)


class _Server:
    """A tracking server, by MLflow's REST API 2.0, with MLflow's variables for its user and its certificates."""

    def __init__(self, tracking: Tracking) -> None:
        self._url = f"{tracking.address.rstrip('/')}/api/2.0/mlflow"
        self._known = {**os.environ, **tracking.environment}
        self._session: requests.Session | None = None  # its connection stays for the next question

    def search_experiments(self, max_results: int, page_token: str | None = None) -> Page:
        answer = self._ask("experiments/search", {"max_results": max_results, "page_token": page_token})
        return Page(map(_experiment, answer.get("experiments", ())), answer.get("next_page_token"))

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return _experiment(self._ask(f"experiments/get-by-name?{urlencode({'experiment_name': name})}")["experiment"])

    def search_runs(
        self, experiment_ids: Sequence[str], filter_string: str, max_results: int, page_token: str | None = None
    ) -> Page:
        wanted = {"experiment_ids": experiment_ids, "filter": filter_string, "max_results": max_results}
        answer = self._ask("runs/search", {**wanted, "page_token": page_token})
        return Page((_answered(found) for found in answer.get("runs", ())), answer.get("next_page_token"))

    def get_run(self, run_id: str) -> SimpleNamespace:
        return _answered(self._ask(f"runs/get?{urlencode({'run_id': run_id})}")["run"])

    def _ask(self, what: str, body: Mapping[str, Any] | None = None) -> Any:
        import requests
        from requests.auth import HTTPBasicAuth

        known = self._known
        self._session = self._session or requests.Session()
        user, password, token = (
            known.get(f"MLFLOW_TRACKING_{part}", "").encode() for part in ("USERNAME", "PASSWORD", "TOKEN")
        )
        is_basic = bool(user and password)
        answer = self._session.request(
            "GET" if body is None else "POST",
            f"{self._url}/{what}",
            json=body and {key: value for key, value in body.items() if value is not None},
            auth=HTTPBasicAuth(user, password) if is_basic else None,
            headers={"Authorization": b"Bearer " + token} if token and not is_basic else None,
            verify=known.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or True,
            cert=known.get("MLFLOW_TRACKING_CLIENT_CERT_PATH"),
            allow_redirects=False,  # the user's password would go where the answer says
            timeout=SECONDS,
        )
        if answer.status_code != requests.codes.ok:
            raise ValueError(answer.status_code)
        return answer.json()


class _Database:
    """A sqlite database of MLflow's, opened for reading."""

    def __init__(self, path: str) -> None:
        self._path = path

    def search_experiments(self, max_results: int, page_token: str | None = None) -> Page:
        order = "lifecycle_stage = 'active' ORDER BY creation_time DESC, experiment_id LIMIT ? OFFSET ?"
        offset = _offset(page_token)
        return _page(self._experiments(order, (max_results + 1, offset)), max_results, offset)

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return self._experiments("name = ?", (name,))[0]

    def _experiments(self, where: str, values: Sequence[Any]) -> list[SimpleNamespace]:
        columns = "experiment_id, name, lifecycle_stage, creation_time"
        rows = self._rows(f"SELECT {columns} FROM experiments WHERE {where}", values)
        tags = self._tags("experiment_tags", "experiment_id", [row["experiment_id"] for row in rows])
        return [_experiment({**row, "tags": tags[row["experiment_id"]]}) for row in rows]

    def search_runs(
        self, experiment_ids: Sequence[str], filter_string: str, max_results: int, page_token: str | None = None
    ) -> Page:
        where = [f"experiment_id IN ({_marks(experiment_ids)})", "lifecycle_stage = 'active'"]
        values: list[Any] = [int(number) for number in experiment_ids]
        for condition in _conditions(filter_string):
            tag, comparator, value = condition["tag"], condition["comparator"], condition["value"]
            if tag is None:
                where.append(f"{_COLUMNS[condition['attribute']]} {comparator} ?")
                values.append(value)
            elif comparator == "=" or (comparator, value) == ("LIKE", "%"):
                which = "AND t.value = ?" if comparator == "=" else ""
                where.append(f"EXISTS (SELECT 1 FROM tags t WHERE t.run_uuid = runs.run_uuid AND t.key = ? {which})")
                values += [tag, value] if which else [tag]
            else:
                raise ValueError(filter_string)
        offset = _offset(page_token)
        order = "ORDER BY start_time DESC, run_uuid LIMIT ? OFFSET ?"
        return _page(self._runs(f"{' AND '.join(where)} {order}", [*values, max_results + 1, offset]), max_results, offset)

    def get_run(self, run_id: str) -> SimpleNamespace:
        return self._runs("run_uuid = ?", [run_id])[0]

    def _runs(self, where: str, values: Sequence[Any]) -> list[SimpleNamespace]:
        columns = "run_uuid AS run_id, experiment_id, status, start_time, end_time, lifecycle_stage"
        rows = self._rows(f"SELECT {columns} FROM runs WHERE {where}", values)
        tags = self._tags("tags", "run_uuid", [row["run_id"] for row in rows])
        return [_run(row, tags[row["run_id"]]) for row in rows]

    def _tags(self, table: str, column: str, ids: Sequence[Any]) -> dict[Any, list[Mapping[str, str]]]:
        found: dict[Any, list[Mapping[str, str]]] = {identity: [] for identity in ids}
        query = f"SELECT {column} AS id, key, value FROM {table} WHERE {column} IN ({_marks(ids)})"
        for row in self._rows(query, ids):
            found[row["id"]].append(row)
        return found

    def _rows(self, query: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        with contextlib.closing(sqlite3.connect(f"file:{quote(self._path)}?mode=ro", uri=True)) as opened:
            opened.row_factory = sqlite3.Row
            return [dict(row) for row in opened.execute(query, values)]


def _conditions(text: str) -> list[re.Match[str]]:
    """The conditions of a search of ours, which ``AND`` joins; raises ValueError if it is none."""
    found = list(_CONDITION.finditer(text))
    if " AND ".join(condition[0] for condition in found) != text:
        raise ValueError(text)
    return found


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _page(found: list[SimpleNamespace], limit: int, offset: int) -> Page:
    """A page of a database, of which one row more than its limit was read; its token is MLflow's own."""
    more = base64.b64encode(json.dumps({"offset": offset + limit}).encode()).decode() if len(found) > limit else None
    return Page(found[:limit], more)


def _offset(token: str | None) -> int:
    return int(json.loads(base64.b64decode(token))["offset"]) if token else 0


def _experiment(given: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        experiment_id=str(given["experiment_id"]),
        name=given["name"],
        lifecycle_stage=given["lifecycle_stage"],
        creation_time=_number(given.get("creation_time")),
        tags=_dictionary(given.get("tags", ())),
    )


def _answered(given: Mapping[str, Any]) -> SimpleNamespace:
    return _run(given["info"], given.get("data", {}).get("tags", ()))


def _run(info: Mapping[str, Any], tags: Iterable[Mapping[str, str]]) -> SimpleNamespace:
    shown = SimpleNamespace(
        run_id=info["run_id"],
        experiment_id=str(info["experiment_id"]),
        status=info["status"],
        start_time=_number(info.get("start_time")),
        end_time=_number(info.get("end_time")),
        lifecycle_stage=info["lifecycle_stage"],
    )
    return SimpleNamespace(info=shown, data=SimpleNamespace(tags=_dictionary(tags)))


def _dictionary(tags: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in tags}


def _number(value: Any) -> int | None:
    return int(value) if value else None
