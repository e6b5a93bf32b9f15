"""What a storage account means: Azure's, or a directory."""

from __future__ import annotations

import pytest

from mlflow_batchai.storage import accounts, credentials
from mlflow_batchai.storage.credentials import Credential


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A client's folder, and no credentials."""
    for name in ("AZURE_BATCHAI_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path))
    return tmp_path


def test_with_credentials_it_is_azures_and_without_a_directory(home):
    assert not accounts.is_azure("Mine") and accounts.folder("Mine") == home / "shares" / "mine"
    credentials.remember("mine", Credential("A" * 86 + "=="))
    assert accounts.is_azure("Mine")


def test_the_account_that_the_environment_names(home, monkeypatch):
    assert accounts.default() == ""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=Third;AccountKey=x")
    assert accounts.default() == "third"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "second")
    assert accounts.default() == "second"
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "first")
    assert accounts.default() == "first"
