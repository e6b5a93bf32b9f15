"""Copies of documents that are safe to store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, SecretStr

from mlflow_batchai.spec.base import SpecModel


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


def masked(document: SpecModel) -> dict[str, Any]:
    """The document as plain JSON data with Batch AI's keys: what was given, with asterisks for secrets.

    Secrets are secrets[].value, accountKey, the registry's password, adminUserPassword and
    instrumentationKey. What stands in a command line or an environment variable is not known to be secret,
    and stays. The copy parses again with the same model.
    """
    return document.model_dump(mode="json", by_alias=True, exclude_unset=True)
