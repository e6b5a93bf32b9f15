"""Keep secrets off the share: project files that hold one stay here, and a plan that would hold one is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow_batchai.documents.common import PUBLIC_URL
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.storage.objects import BLOCK, StagedFile

# Shorter ones can't be told from ordinary text; no secret worth its name is.
LEAST_LENGTH = 6
LARGEST_DOCUMENT = 1 << 20
STORAGE_KEYS = ("accountKey", "sasToken")
_PLACES = {
    "name": "the job's name",
    "environmentVariables": "properties.environmentVariables",
    "preparation": "properties.jobPreparation.commandLine",
    "parameters": "a parameter",
    "setupTask": "nodeSetup.setupTask of the cluster document",
}


def without_secrets(
    files: Sequence[StagedFile], secrets: Collection[str], documents: Collection[Path]
) -> tuple[list[StagedFile], list[str]]:
    """(files that may go to the share, paths of others that hold a secret).

    Where there are secrets, the files that they were read from stay here in any case: a secret may stand there in another
    spelling (an escape of YAML or JSON) than the one we look for. So do documents with secrets of other jobs.
    """
    values = [value.encode() for value in secrets if len(value) >= LEAST_LENGTH]
    own = {path.resolve() for path in documents} if secrets else set()
    kept: list[StagedFile] = []
    withheld: list[str] = []
    for file in files:
        if file.link is not None:
            kept.append(file)
        elif file.source.resolve() in own:
            continue
        elif _names_secrets(file.source) or (values and _holds(file.source, values)):
            withheld.append(file.path)
        else:
            kept.append(file)
    return kept, withheld


def _holds(path: Path, values: Sequence[bytes]) -> bool:
    overlap = max(map(len, values)) - 1
    content = b""
    with path.open("rb") as file:
        # Not all at once: someone's data may lie in the project.
        while block := file.read(BLOCK):
            content = content[-overlap:] + block
            if any(value in content for value in values):
                return True
    return False


def is_secret(name: str, content: bytes, secrets: Collection[str]) -> bool:
    """Whether a file's content holds a secret, or is a document that has some."""
    values = [value.encode() for value in secrets if len(value) >= LEAST_LENGTH]
    return any(value in content for value in values) or (_is_document(Path(name)) and _gives_secrets(name, content))


def _names_secrets(path: Path) -> bool:
    return _is_document(path) and path.stat().st_size <= LARGEST_DOCUMENT and _gives_secrets(str(path), path.read_bytes())


def _is_document(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml", ".json") or path.name == "MLproject"


def _gives_secrets(name: str, content: bytes) -> bool:
    """Whether it is a document (of a job, a cluster, a configuration) that gives secrets their values or opens storage."""
    if len(content) > LARGEST_DOCUMENT or not any(word.encode() in content for word in ("secrets", "notify", *STORAGE_KEYS)):
        return False
    try:
        found = load_text(content.decode("utf-8-sig"), name)
    except (DocumentError, UnicodeDecodeError):
        return False
    block = found.get("batchai") if isinstance(found.get("batchai"), Mapping) else found
    properties = block.get("properties") if isinstance(block, Mapping) else None
    tasks = [_setup_task(place) for place in (block, properties)]
    lists = [place.get("secrets") for place in (block, properties, *tasks) if isinstance(place, Mapping)]
    entries = [entry for entries in lists if isinstance(entries, list) for entry in entries]
    if any(isinstance(entry, Mapping) and entry.get("value") for entry in entries) or _opens_storage(found):
        return True
    notify = block.get("notify") if isinstance(block, Mapping) else None
    url = str(notify.get("url") or "") if isinstance(notify, Mapping) else ""
    return bool(url) and not PUBLIC_URL.fullmatch(url)


def _setup_task(properties: Any) -> Any:
    setup = properties.get("nodeSetup") if isinstance(properties, Mapping) else None
    return setup.get("setupTask") if isinstance(setup, Mapping) else None


def _opens_storage(value: Any) -> bool:
    """Whether plain data gives a storage account's key or SAS; Batch AI's placeholders are none."""
    if isinstance(value, Mapping):
        given = (value.get(key) for key in STORAGE_KEYS)
        if any(isinstance(text, str) and text and not text.startswith("<") for text in given):
            return True
        value = tuple(value.values())
    return isinstance(value, list | tuple) and any(_opens_storage(inner) for inner in value)


def refuse_secrets(record: Mapping[str, Any], secrets: Collection[str], source: str, command: str) -> None:
    """Refuse a plan, which lies on the share for all to read, that holds the text of a secret.

    Args:
        command: what messages call the plan's command.

    Raises:
        DocumentError: where it stands.
    """
    values = [value for value in secrets if len(value) >= LEAST_LENGTH]
    # An int parameter stands in the command, too.
    for key, text in _texts({"parameters": (), **record, "secretNames": (), "code": ()}):
        if any(value in text for value in values):
            place = {**_PLACES, "command": command}.get(key, key)
            raise DocumentError(
                f"{source}: {place} holds the text of a secret, and would be written to the share; refer to the secret's"
                " variable there"
            )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(top-level key, text) of every text in plain data."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, key or str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)
