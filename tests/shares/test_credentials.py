"""Where a storage account's key or SAS is found, what nodes get of it, and what is wrong with it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
from azure.storage.fileshare import ShareClient

from mlflow_batchai.errors import ShareError
from mlflow_batchai.shares import credentials
from mlflow_batchai.shares.credentials import Credential, exported, find, for_nodes, remember
from mlflow_batchai.shares.location import parse

KEY, OTHER = (base64.b64encode(text * 32).decode() for text in (b"ab", b"cd"))
SAS = "sv=2026-10-06&se=2999-01-01T00%3A00%3A00Z&sr=s&sp=rcwdl&sig=abc%3D"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """No credential but the test's own."""
    monkeypatch.setattr(credentials, "_remembered", {})
    for name in ("AZURE_STORAGE", "AZURE_BATCHAI_STORAGE"):
        for end in ("ACCOUNT", "KEY", "SAS_TOKEN", "CONNECTION_STRING"):
            monkeypatch.delenv(f"{name}_{end}", raising=False)
    monkeypatch.delenv(credentials.VARIABLE, raising=False)


def test_the_first_that_names_the_account(monkeypatch):
    assert find("acct") == Credential()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?" + SAS)
    assert find("acct") == Credential(sas=SAS)
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    assert find("Acct") == Credential(KEY)
    assert find("other") == Credential()
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=https;AccountName=acct;AccountKey={OTHER}")
    assert find("acct") == Credential(OTHER)
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", KEY)
    assert find("acct") == Credential(KEY)
    monkeypatch.setenv(credentials.VARIABLE, json.dumps({"acct": [OTHER, None]}))
    assert find("acct") == Credential(OTHER)
    remember("ACCT", Credential(KEY))
    assert find("acct") == Credential(KEY)


def test_a_connection_string_with_a_sas(monkeypatch):
    text = f"FileEndpoint=https://acct.file.core.windows.net/;SharedAccessSignature={SAS}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert find("acct") == Credential(sas=SAS)
    assert find("other") == Credential()


@pytest.mark.parametrize("text", ["nonsense", "a=b", "", ";;", "AccountName=acct"])
def test_a_connection_string_of_something_else(monkeypatch, text):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert find("acct") == Credential()


def test_what_was_remembered_goes_to_processes_that_we_start_and_on_from_there(monkeypatch):
    assert exported() == {}
    remember("one", Credential(KEY))
    remember("two", Credential(sas="?" + SAS))
    monkeypatch.setenv(credentials.VARIABLE, exported()[credentials.VARIABLE])
    code = (
        "from mlflow_batchai.shares.credentials import *;"
        "print(find('one').key, find('two').sas, list(exported()) == ['BATCHAI_STORAGE_CREDENTIALS'], find('one'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [KEY, SAS, "True", "Credential()"]


def test_no_text_of_it_shows_it():
    assert KEY not in repr(Credential(KEY, SAS)) and "sig" not in str([Credential(KEY, SAS)])


@pytest.mark.parametrize(
    ("credential", "said"),
    [
        (Credential("no key!"), "the key of storage account 'acct' is not base64 text; copy it again"),
        (Credential(KEY[:-3]), "is not base64 text"),
        (Credential(sas="sv=1&se=2"), "has no signature"),
    ],
)
def test_what_is_no_credential_is_refused_at_once(credential, said):
    with pytest.raises(ShareError, match=said) as error:
        remember("acct", credential)
    assert "no key!" not in str(error.value)


def test_a_bad_key_in_the_environment_is_named_by_its_variable(monkeypatch):
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", "hush!")
    with pytest.raises(ShareError, match="AZURE_BATCHAI_STORAGE_KEY") as error:
        find("acct")
    assert "hush" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": [1, 2, 3]}'])
def test_a_spoilt_variable_is_a_sentence(monkeypatch, text):
    monkeypatch.setenv(credentials.VARIABLE, text)
    with pytest.raises(ShareError, match=credentials.VARIABLE):
        find("acct")


def test_nodes_get_a_sas_of_the_share_and_no_more(azure):
    azure.share("mine")
    azure.share("other")
    location = parse(azure.url("mine", "folder"))
    remember(azure.account, Credential(azure.key))
    sas = for_nodes(location, 600)["sas"]
    assert not sas.startswith("?") and azure.key not in sas
    ShareClient(azure.endpoint, "mine", credential=sas).get_file_client("x").create_file(1, data=b"1")
    from azure.core.exceptions import HttpResponseError

    with pytest.raises(HttpResponseError):
        ShareClient(azure.endpoint, "other", credential=sas).get_file_client("x").create_file(1, data=b"1")


def test_a_sas_of_the_users_is_passed_on(azure):
    azure.share("mine")
    sas = azure.sas("mine")
    remember(azure.account, Credential(sas="?" + sas))
    assert for_nodes(parse(azure.url("mine")), 600) == {"sas": sas}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seconds": -60, "starts": -3600}, r"the SAS of storage account 'devaccount' expired at 2\d"),
        ({"permissions": "rl"}, "does not permit to create, write, delete on http"),
        ({"permissions": "rcwd"}, "does not permit to list"),
    ],
)
def test_a_sas_that_nodes_can_do_nothing_with(azure, changes, said):
    azure.share("mine")
    sas = azure.sas("mine", **changes)
    remember(azure.account, Credential(sas=sas))
    with pytest.raises(ShareError, match=said) as error:
        for_nodes(parse(azure.url("mine")), 600)
    assert sas[-20:] not in str(error.value)


def test_an_account_sas_for_blobs(azure):
    remember(azure.account, Credential(sas=azure.sas(None, "rcwdl", ss="b", srt="sco")))
    with pytest.raises(ShareError, match="is not for files"):
        for_nodes(parse(azure.url("mine")), 600)


def test_a_login_can_sign_nothing_over_http(azure):
    with pytest.raises(ShareError, match="there is no key, SAS or Azure login for the storage account 'devaccount'; give"):
        for_nodes(parse(azure.url("mine")), 600)
