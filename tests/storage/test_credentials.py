"""Where a storage account's key or SAS is found, what nodes get of it, and what is wrong with it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from urllib.error import HTTPError
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

import pytest
from azure.storage.fileshare import ShareClient

from mlflow_batchai.errors import ShareError
from mlflow_batchai.storage import credentials, open_share
from mlflow_batchai.storage.credentials import Credential, connection, exported, file_endpoint, find, remember
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.location import parse
from mlflow_batchai.storage.opening import download_url, for_nodes

KEY, OTHER = (base64.b64encode(text * 32).decode() for text in (b"ab", b"cd"))
SAS = "sv=2026-10-06&se=2999-01-01T00%3A00%3A00Z&sr=s&sp=rcwdl&sig=abc%3D"

pytestmark = pytest.mark.usefixtures("no_storage_credentials")


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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"FileEndpoint=https://acct.file.core.windows.net/;SharedAccessSignature={SAS}", Credential(sas=SAS)),
        *((text, Credential()) for text in ("nonsense", "a=b", "", ";;", "AccountName=acct")),
    ],
)
def test_a_connection_string(monkeypatch, text, found):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert (find("acct"), find("other")) == (found, Credential())


def test_what_was_remembered_goes_to_processes_that_we_start_and_on_from_there(monkeypatch):
    assert exported() == {}
    remember("one", Credential(KEY))
    remember("two", Credential(sas="?" + SAS))
    monkeypatch.setenv(credentials.VARIABLE, exported()[credentials.VARIABLE])
    code = (
        "from mlflow_batchai.storage.credentials import *;"
        "print(find('one').key, find('two').sas, list(exported()) == ['BATCHAI_STORAGE_CREDENTIALS'], find('one'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [KEY, SAS, "True", "Credential()"]


def test_shares_of_one_account_may_each_have_a_credential(monkeypatch):
    """As clusters' documents give them: whichever was read last, each opens its own share, also in processes that we start."""
    one, two = Credential(sas=SAS + "1"), Credential(sas=SAS + "2")
    remember("acct", one, "one")
    remember("acct", two, "two")

    def found():
        location = parse("https://acct.file.core.windows.net/one")
        return [find("ACCT", share) for share in ("one", "two", "three")] + [for_nodes(location, 60.0)]

    assert found() == [one, two, two, {"sas": one.sas}]
    monkeypatch.setenv(credentials.VARIABLE, exported()[credentials.VARIABLE])
    credentials._remembered.clear()
    assert found() == [one, two, two, {"sas": one.sas}]
    remember("acct", Credential(KEY), "two")
    assert find("acct", "one") == one


def test_no_text_of_it_shows_it():
    assert KEY not in repr(Credential(KEY, SAS)) and "sig" not in str([Credential(KEY, SAS)])


@pytest.mark.parametrize(
    ("credential", "said"),
    [
        (Credential("hush!"), "the key of storage account 'acct' is not base64 text"),
        (Credential(KEY[:-3]), "is not base64 text"),
        (Credential(sas="sv=1&se=2"), "has no signature"),
    ],
)
def test_what_is_no_credential_is_refused_at_once(credential, said):
    with pytest.raises(ShareError, match=said) as error:
        remember("acct", credential)
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("AZURE_BATCHAI_STORAGE_KEY", "hush!"),
        *((credentials.VARIABLE, text) for text in ("{", "[]", '{"a": 1}', '{"acct": ["hush", 2, 3]}')),
    ],
)
def test_what_is_wrong_in_the_environment_is_named_by_its_variable(monkeypatch, variable, text):
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv(variable, text)
    with pytest.raises(ShareError, match=variable) as error:
        find("acct")
    assert "hush" not in str(error.value)


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


@pytest.mark.parametrize(
    ("share", "changes", "said"),
    [
        ("mine", {}, None),  # it is passed on
        ("mine", {"seconds": -60, "starts": -3600}, r"expired at 2\d"),
        ("mine", {"permissions": "rl"}, "does not permit to create, write, delete"),
        ("mine", {"permissions": "rcwd"}, "does not permit to list"),
        (None, {"ss": "b", "srt": "sco"}, "is not for files"),
    ],
)
def test_a_sas_of_the_users_is_passed_on_if_nodes_can_use_it(azure, share, changes, said):
    azure.share("mine")
    sas = azure.sas(share, **changes)
    remember(azure.account, Credential(sas=sas))
    if said is None:
        assert for_nodes(parse(azure.url("mine")), 600) == {"sas": sas}
        return
    with pytest.raises(ShareError, match=said) as error:
        for_nodes(parse(azure.url("mine")), 600)
    assert sas[-20:] not in str(error.value)


def test_a_login_can_sign_nothing_over_http(azure):
    with pytest.raises(ShareError, match="no key, SAS or Azure login"):
        for_nodes(parse(azure.url("mine")), 600)


CONFIG = """
shares:
  Acct: {accountKey: KEY, fileEndpoint: "http://127.0.0.1:10004/ACCOUNT/"}
  other: {sasToken: "?SAS"}
  third: {connectionString: "AccountName=third;AccountKey=KEY;EndpointSuffix=core.chinacloudapi.cn"}
  wrong: {connectionString: "AccountName=third;AccountKey=KEY"}
  spoilt: {accountKey: hush!}
"""


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """A user with a config.yaml."""
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text(CONFIG.replace("KEY", KEY).replace("SAS", SAS), encoding="utf-8")


def test_config_yaml_is_asked_last(configured, monkeypatch):
    assert (find("ACCT"), find("other"), find("third")) == (Credential(KEY), Credential(sas=SAS), Credential(KEY))
    assert find("nobody") == Credential()
    assert file_endpoint("acct") == "http://127.0.0.1:10004/acct"
    assert file_endpoint("third") == "https://third.file.core.chinacloudapi.cn"
    assert file_endpoint("other") is file_endpoint("nobody") is None
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv("AZURE_STORAGE_KEY", OTHER)
    assert find("acct") == Credential(OTHER)
    assert file_endpoint("acct") == "http://127.0.0.1:10004/acct"
    text = f"AccountName=acct;AccountKey={OTHER};FileEndpoint=http://10.0.0.1:1/acct/"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    assert file_endpoint("acct") == "http://10.0.0.1:1/acct"


@pytest.mark.parametrize(
    ("account", "said"),
    [
        ("wrong", r"the connectionString of storage account 'wrong' \(config.yaml: shares\)"),
        ("spoilt", r"the key of storage account 'spoilt' \(config.yaml: shares\)"),
    ],
)
def test_what_config_yaml_has_wrong(configured, account, said):
    with pytest.raises(ShareError, match=said) as error:
        find(account)
    assert "hush" not in str(error.value) and KEY not in str(error.value)


def test_a_connection_string_names_its_account_by_an_emulators_endpoint():
    found = connection(f"FileEndpoint=http://127.0.0.1:10004/devaccount/;SharedAccessSignature={SAS}")
    assert found == ("devaccount", Credential(sas=SAS), "http://127.0.0.1:10004/devaccount")
    assert connection(f"SharedAccessSignature={SAS}") is None


# Addresses of files.


def fetched(url):
    with urlopen(url) as answer:
        return answer.read()


def test_an_address_reads_one_file_and_no_other(azure):
    (azure.share("mine") / "in it").mkdir()
    for name in ("a b#%20é.h5", "other"):
        (azure.share("mine") / "in it" / name).write_bytes(name.encode())
    remember(azure.account, Credential(azure.key))
    azure.reset()
    url = download_url(open_share(azure.url("mine", "in it")), "a b#%20é.h5", 5)
    assert azure.requests() == []
    assert fetched(url) == "a b#%20é.h5".encode()
    assert azure.key not in url
    _, _, sas = url.partition("?")
    with pytest.raises(HTTPError, match="403"):
        fetched(f"{azure.url('mine', 'in%20it/other')}?{sas}")
    with pytest.raises(HTTPError, match="403"):
        urlopen(Request(url, method="DELETE", headers={"x-ms-version": "2026-10-06"}))
    ends = datetime.fromisoformat(parse_qs(sas)["se"][0].replace("Z", "+00:00")) - datetime.now(timezone.utc)
    assert timedelta(minutes=5) <= ends <= timedelta(minutes=6)


def test_the_address_of_a_directorys_file(tmp_path):
    share = DirectoryShare(tmp_path)
    share.write("a/b c", b"1")
    assert fetched(download_url(share, "a/b c", 5)) == b"1"
    with pytest.raises(ShareError, match=r"'../x': that is no path"):
        download_url(share, "../x", 5)
