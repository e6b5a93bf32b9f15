"""Which tags a script may set: none that MLflow or this package uses for owner, source, parent or page."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from mlflow_batchai.tracking.script_calls.files import is_path

# The job's own, and MLflow's (``mlflow.utils.mlflow_tags``).
RESERVED = ("batchai.", "mlflow.")
# A run's description, which is Markdown; a script's goes into ours as text.
NOTE = "mlflow.note.content"
# Of a dataset: what it was used for.
CONTEXT = "mlflow.data.context"
# Of a run and of its models alike: whose they are, and what made them.
ORIGIN = ("mlflow.user", "mlflow.source.")
LONGEST_LABEL, LONGEST_NOTE = 250, 20_000


def is_label(value: str) -> bool:
    """Whether it is one line of text."""
    return value.isprintable() and 0 < len(value) <= LONGEST_LABEL


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _are_tables(value: str) -> bool:
    """Whether it names artifacts of the run that are tables, as ``mlflow.log_table`` says it."""
    tables = _json(value)
    return isinstance(tables, list) and all(
        isinstance(table, dict)
        and table.keys() == {"path", "type"}
        and table["type"] == "table"
        and isinstance(table["path"], str)
        and is_path(table["path"])
        for table in tables
    )


# MLflow's own that speak of nothing but the run's name and its own artifacts, with what each may say.
_ALLOWED: Mapping[str, Callable[[str], bool]] = {
    "mlflow.runName": is_label,
    "mlflow.autologging": is_label,
    "mlflow.loggedArtifacts": _are_tables,
    "mlflow.loggedImages": lambda value: value == "True",
    "mlflow.latest_checkpoint_artifact": is_path,
}


def is_source(text: str) -> bool:
    """Whether it is a dataset's source whose ``url``, which its page makes a link, leads to a web page, if it has any."""
    try:
        source = json.loads(text)
    except json.JSONDecodeError:
        return True  # a browser reads no more than we do
    except (ValueError, RecursionError):  # but longer numbers and deeper nesting
        return False
    url = source.get("url", "http://") if isinstance(source, dict) else "http://"
    return isinstance(url, str) and url.startswith(("http://", "https://"))


def is_reserved(key: str) -> bool:
    """Whether a tag is the job's or MLflow's: in any case and with any accents, since that is all one to some databases."""
    letters = (letter for letter in unicodedata.normalize("NFKD", key) if letter.isprintable())
    return "".join(letter for letter in letters if not unicodedata.combining(letter)).strip().casefold().startswith(RESERVED)


def may_be_set(key: str, value: str | None) -> bool:
    """Whether a script may give a tag of the run this value; None: remove it."""
    if not is_reserved(key):
        return True
    check = _ALLOWED.get(key)
    return check is not None and (value is None or check(value))
