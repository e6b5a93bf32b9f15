"""Copies of documents that are safe to store."""

from __future__ import annotations

from typing import Any

from mlflow_batchai.spec.base import SpecModel


def masked(document: SpecModel) -> dict[str, Any]:
    """The document as plain JSON data with Batch AI's keys: what was given, with asterisks for secrets.

    Secrets are secrets[].value, accountKey, the registry's password, adminUserPassword and
    instrumentationKey. What stands in a command line or an environment variable is not known to be secret,
    and stays. The copy parses again with the same model.
    """
    return document.model_dump(mode="json", by_alias=True, exclude_unset=True)
