"""Copies of documents that are safe to store."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

from pydantic import BaseModel, SecretStr

from mlflow_batchai.documents.base import SpecModel, keys_of


def secret_values(document: object) -> Iterator[str]:
    """Every secret's text in a document: of ``secrets``, credentials, passwords and keys alike."""
    if isinstance(document, SecretStr):
        yield document.get_secret_value()
    elif isinstance(document, BaseModel):
        for name in type(document).model_fields:
            yield from secret_values(getattr(document, name))
    elif isinstance(document, (tuple, list)):
        for entry in document:
            yield from secret_values(entry)


def as_shown(document: object) -> Any:
    """A document as the service showed it: plain data with all of its keys, null for secrets and for what wasn't given."""
    if isinstance(document, SpecModel):
        return {key: as_shown(getattr(document, name)) for key, name in keys_of(type(document)).items()}
    if isinstance(document, (tuple, list)):
        return [as_shown(entry) for entry in document]
    if isinstance(document, SecretStr):
        return None
    return document.value if isinstance(document, Enum) else document


def masked(document: SpecModel) -> dict[str, Any]:
    """The document as plain JSON data with Batch AI's keys: what was given, with asterisks for secrets.

    Secrets are secrets[].value, accountKey, the registry's password, adminUserPassword and
    instrumentationKey. What stands in a command line or an environment variable is not known to be secret,
    and stays. The copy parses again with the same model.
    """
    return document.model_dump(mode="json", by_alias=True, exclude_unset=True)
