"""An empty share of each kind."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from azure_server import AzureServer

from mlflow_batchai.storage import Share, credentials, open_share
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.directory import DirectoryShare


@pytest.fixture(params=["directory", "azure"])
def share(request: pytest.FixtureRequest, tmp_path: Path) -> Share:
    return DirectoryShare(tmp_path / "share") if request.param == "directory" else request.getfixturevalue("azure_share")


@pytest.fixture
def azure_share(azure: AzureServer) -> Share:
    credentials.remember(azure.account, Credential(azure.key))
    name = f"share-{uuid.uuid4().hex}"
    azure.share(name)
    return open_share(azure.url(name))
