"""What a storage account means: Azure Files if there are credentials for it, else a directory of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from mlflow_batchai.config import home
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.credentials import Credential

# The account of documents that have only a placeholder for its name, where nobody says what that stands for.
UNNAMED = "local"
FOLDER = "shares"


def default() -> str:
    """The storage account that the environment names; empty if it names none."""
    connected = credentials.connection(os.environ.get(credentials.CONNECTION_VARIABLE, ""))
    named = os.environ.get("AZURE_BATCHAI_STORAGE_ACCOUNT") or os.environ.get("AZURE_STORAGE_ACCOUNT")
    return named or (connected.account if connected else "")


def is_azure(account: str) -> bool:
    """Whether something that we know of opens an account: then it is Azure Files.

    Raises:
        ShareError: it is no key or no SAS.
        DocumentError: config.yaml is wrong.
    """
    return credentials.find(account) != Credential()


def folder(account: str) -> Path:
    """Folder that stands for an account without credentials: each folder in it is a file share."""
    return home() / FOLDER / account.lower()


def stand_in(account: str) -> str:
    """The sentence that says so."""
    where = folder(account)
    if account == UNNAMED:
        found = f"file shares of no named storage account are directories of {where}; if they are Azure's"
    else:
        found = f"there is no key or SAS for the storage account '{account}', so it is the directory {where}; if it is Azure's"
    return f"{found}, set AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY, or name it under shares: in config.yaml"
