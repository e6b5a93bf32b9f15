"""The way in: job, cluster and batchai.yaml documents from files or from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow_batchai.documents.base import keys_of
from mlflow_batchai.documents.batchai import BatchaiFile
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.documents.job import JobDocument, JobProperties, shared_outputs
from mlflow_batchai.documents.problems import parse
from mlflow_batchai.documents.text import kind, load_text
from mlflow_batchai.errors import DocumentError

__all__ = [
    "load_batchai",
    "load_cluster",
    "load_job",
    "load_text",
    "parse",
    "parse_batchai",
    "parse_cluster",
    "parse_job",
    "read",
    "read_batchai",
]


def load_job(path: str | Path) -> tuple[JobDocument, list[str]]:
    """A job document from a JSON or YAML file, and warnings.

    Does not ask for completeness: `job.require_complete` and `job.forbid_program` do. Raises DocumentError.
    """
    return parse_job(read(path), str(path))


def load_cluster(path: str | Path) -> tuple[ClusterDocument, list[str]]:
    """A cluster document from a JSON or YAML file, and warnings. Raises DocumentError."""
    return parse_cluster(read(path), str(path))


def load_batchai(path: str | Path) -> tuple[BatchaiFile, list[str]]:
    """A batchai.yaml, or the ``batchai:`` block of a file named MLproject, and warnings.

    Raises DocumentError.
    """
    return parse_batchai(read_batchai(path), _batchai_source(path))


def parse_job(data: object, source: str) -> tuple[JobDocument, list[str]]:
    """A job document from plain data; the warnings also tell of output directories that are one folder.

    Job properties outside ``properties`` are refused: Batch AI ignored such a document without a word.
    """
    if isinstance(data, Mapping) and "properties" not in data and keys_of(JobProperties).keys() & data.keys():
        raise DocumentError(f"{source}: the job's keys must stand under 'properties': {{\"properties\": {{...}}}}")
    document, warnings = parse(JobDocument, data, source)
    return document, warnings + [f"{source}: {note}" for note in shared_outputs(document.properties)]


def parse_cluster(data: object, source: str) -> tuple[ClusterDocument, list[str]]:
    """A cluster document from plain data, with Batch AI's keys under ``properties`` or at the top."""
    if not isinstance(data, Mapping) or "properties" not in data:
        return parse(ClusterDocument, data, source)
    inner = {} if data["properties"] is None else data["properties"]
    if not isinstance(inner, Mapping):
        raise DocumentError(f"{source}: properties must be a mapping, not {kind(inner)}")
    outer = {key: value for key, value in data.items() if key != "properties"}
    known = keys_of(ClusterDocument).keys()
    twice = [key for key in inner if key in outer and key in known]
    if twice:
        raise DocumentError(f"{source}: {twice[0]} is given both under properties and beside it; keep one")
    under = {str(key): "properties" for key in inner}
    return parse(ClusterDocument, {**inner, **outer}, source, under)


def parse_batchai(data: object, source: str) -> tuple[BatchaiFile, list[str]]:
    """A batchai.yaml from plain data, such as what `batchai.merge` returns."""
    document, warnings = parse(BatchaiFile, data, source)
    return document, warnings + [f"{source}: {note}" for note in shared_outputs(document.properties)]


def read(path: str | Path) -> dict[str, Any]:
    """The plain data of a JSON or YAML file. Raises DocumentError if it can't be read or parsed."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise DocumentError(f"{path}: can't be read: {error.strerror}") from error
    return load_text(text, str(path))


def read_batchai(path: str | Path) -> dict[str, Any]:
    """The plain data of a batchai.yaml, or of the ``batchai:`` block of a file named MLproject.

    An MLproject without the block gives {}. Raises DocumentError.
    """
    data = read(path)
    if Path(path).name != "MLproject":
        return data
    block = data.get("batchai")
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise DocumentError(f"{path}: batchai must be a mapping, not {kind(block)}")
    return block


def _batchai_source(path: str | Path) -> str:
    return f"{path} (batchai)" if Path(path).name == "MLproject" else str(path)
