"""The shares of an account, Azure's and directories, and what a storage account means."""

from __future__ import annotations

import stat

import pytest

from mlflow_batchai.errors import ShareMissingError, StorageNotFoundError
from mlflow_batchai.storage import accounts, credentials
from mlflow_batchai.storage.accounts import DirectoryShares
from mlflow_batchai.storage.azure_files import AzureShares
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.directory import DirectoryShare


@pytest.fixture(params=["directory", "azure"])
def shares(request, tmp_path):
    """An account's shares, of which there are none."""
    if request.param == "directory":
        yield DirectoryShares(DirectoryShare(tmp_path), "shares/mine")
        return
    azure = request.getfixturevalue("azure")
    credentials.remember(azure.account, Credential(azure.key))
    made = AzureShares(azure.account, azure.endpoint)
    yield made
    for entry in made.list():
        made.delete(entry.name)


def test_shares_come_and_go(shares):
    assert shares.list() == []
    assert shares.create("two", 7)
    assert shares.create("one", None)
    assert not shares.create("one", None)
    assert [entry.name for entry in shares.list()] == ["one", "two"]
    shares.open("one").write("a/x", b"1")
    assert shares.open("one").read("a/x") == b"1"
    shares.delete("one")
    assert [entry.name for entry in shares.list()] == ["two"]


def test_a_share_that_isnt_there(shares):
    with pytest.raises(ShareMissingError, match="'none'"):
        shares.delete("none")
    for use in (lambda share: share.list(""), lambda share: share.write("x", b""), lambda share: share.claim("a/b")):
        with pytest.raises(ShareMissingError, match="'none'"):
            use(shares.open("none"))


def test_an_answer_that_is_lost_is_no_refusal(azure):
    credentials.remember(azure.account, Credential(azure.key))
    shares = AzureShares(azure.account, azure.endpoint)
    try:
        azure.fail(1.0, ["cut-after"], limit=1)
        assert shares.create("lost", None)
        azure.fail(1.0, ["cut-after"], limit=1)
        shares.delete("lost")
    finally:
        azure.fail(0)
    assert shares.list() == []


def test_a_share_that_is_a_link_is_deleted_and_not_what_it_leads_to(tmp_path):
    tmp_path.chmod(0o2775)
    (tmp_path / "precious").mkdir()
    (tmp_path / "shares" / "mine").mkdir(parents=True)
    (tmp_path / "shares" / "mine" / "data").symlink_to(tmp_path / "precious")
    (tmp_path / "shares" / "mine" / "a file").touch()
    shares = DirectoryShares(DirectoryShare(tmp_path), "shares/mine")
    assert shares.list() == []
    assert shares.create("one", None)
    assert stat.S_IMODE((tmp_path / "shares" / "mine" / "one").stat().st_mode) == 0o2775, "as open as what it lies in"
    shares.delete("data")
    assert (tmp_path / "precious").is_dir() and not (tmp_path / "shares" / "mine" / "data").is_symlink()


# What an account means.


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A client's folder, and no credentials."""
    for name in ("AZURE_BATCHAI_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path))
    return tmp_path


def test_with_credentials_it_is_azures_and_without_a_directory(home):
    account = accounts.open_account("Mine")
    assert (account.name, account.folder) == ("mine", home / "shares" / "mine")
    credentials.remember("mine", Credential("A" * 86 + "=="))
    assert accounts.open_account("Mine").folder is None
    assert accounts.open_account("other", login=True).folder is None


def test_what_is_found_at_a_path(home):
    share = DirectoryShare(home)
    share.write("a/b/x", b"123")
    assert accounts.find(share, "a/b/x")[:3] == ("x", 3, False)
    assert accounts.find(share, "a/b")[:3] == ("b", 0, True)
    for path, said in (
        ("a/c", "; 'a' has: b"),
        ("a/b/x/y", ": 'a/b/x' is a file"),
        ("n/o", "there is no 'n' on"),
        ("z", "its root"),
    ):
        with pytest.raises(StorageNotFoundError, match=said):
            accounts.find(share, path)
