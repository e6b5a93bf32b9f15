"""Resolve the placeholders for storage accounts in job documents, and the keys beside them."""

from __future__ import annotations

import os

from mlflow_batchai.documents.common import StorageCredentials
from mlflow_batchai.errors import DocumentError, NotSupportedError, ShareError
from mlflow_batchai.storage import credentials
from mlflow_batchai.storage.credentials import Credential

ACCOUNT_VARIABLE, KEY_VARIABLE = "AZURE_BATCHAI_STORAGE_ACCOUNT", "AZURE_BATCHAI_STORAGE_KEY"
ACCOUNT, KEY = f"<{ACCOUNT_VARIABLE}>", f"<{KEY_VARIABLE}>"


def filled(text: str, account: str, at: str, key: str) -> str:
    """A document's text with the placeholder for the account filled.

    Args:
        account: what it stands for; empty: nobody said.

    Raises:
        DocumentError: it has the placeholder, and nobody said.
    """
    if ACCOUNT in text and not account:
        raise DocumentError(f"{at}: {key} has the placeholder {ACCOUNT}; set {ACCOUNT_VARIABLE} to the storage account's name")
    return text.replace(ACCOUNT, account)


def has_key(given: StorageCredentials | None) -> bool:
    """Whether a document gives a key, or a placeholder for one that the environment has.

    Documents are shown to others with some other word in its place.
    """
    text = given.account_key.get_secret_value() if given and given.account_key else ""
    return bool(os.environ.get(KEY_VARIABLE)) if text == KEY else credentials.is_key(text)


def remember(account: str, given: StorageCredentials | None, at: str) -> None:
    """Use a document's key for its account from now on; a placeholder means the environment's.

    Raises:
        DocumentError: it is no key, or nobody said which.
        NotSupportedError: it lies in a Key Vault.
    """
    if given is None:
        return
    if given.account_key is None:
        raise NotSupportedError(f"{at}: accountKeySecretReference (Azure Key Vault) is not supported yet; give accountKey")
    key = given.account_key.get_secret_value()
    if key == KEY:
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise DocumentError(f"{at}: accountKey has the placeholder {KEY}; set {KEY_VARIABLE} to the account's key")
    try:
        credentials.remember(account, Credential(key, None))
    except ShareError as error:
        raise DocumentError(f"{at}: {error}") from error
