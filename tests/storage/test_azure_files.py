"""An Azure file share over REST, against a server: how many requests things cost, what failures are survived, and the sentences."""

from __future__ import annotations

import base64
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from azure.core.exceptions import HttpResponseError
from azure.storage.fileshare import ShareFileClient

from mlflow_batchai.errors import ShareError, ShareNotFoundError
from mlflow_batchai.storage import azure_client, azure_errors, azure_files, credentials, open_share
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.location import parse

KINDS = ("503", "429", "cut")


@pytest.fixture
def opened(azure, monkeypatch):
    """Makes shares, opened with a credential of ours; faults end with the test."""

    def make(credential=None, name=None, folder=""):
        if name is None:
            name = f"share-{uuid.uuid4().hex}"
            azure.share(name)
        credentials.remember(azure.account, credential or Credential(azure.key))
        azure_files._proven.add(azure.endpoint)
        share = open_share(azure.url(name, folder))
        azure.reset()
        return share

    yield make
    azure.fail(0)
    azure.latency(0)
    azure.newest()


def sent(azure):
    """What was asked since the last look: (method, last part of the path, what for)."""
    found = [(one.method, one.path.rpartition("/")[2], one.comp or one.restype) for one in azure.requests()]
    azure.reset()
    return found


def test_what_things_cost(azure, opened):
    share = opened(folder="deep/er")
    share.write("x", b"1")
    assert sent(azure) == [
        ("PUT", "x", ""),
        ("PUT", "er", "directory"),
        ("PUT", "deep", "directory"),
        ("PUT", "er", "directory"),
        ("PUT", "x", ""),
    ]
    share.write("x", bytes(4 << 20))
    assert sent(azure) == [("PUT", "x", "")]
    share.write("y", os.urandom(4 << 20))
    assert sent(azure) == [("PUT", "y", "")]
    share.claim("c")
    assert sent(azure) == [("PUT", "c", "directory")]
    share.claim("a/b")
    assert sent(azure) == [("PUT", "b", "directory"), ("PUT", "a", "directory"), ("PUT", "b", "directory")]
    share.read("y")
    share.read("y", 100)
    share.read("y", 100, 5)
    assert sent(azure) == [("GET", "y", "")] * 3
    share.list("")
    assert sent(azure) == [("GET", "er", "list")]
    share.delete("y")
    assert sent(azure) == [("DELETE", "y", "")]


def test_a_service_that_passes_over_the_content(azure, opened, monkeypatch):
    """It makes a file of NULs."""
    create = ShareFileClient.create_file
    monkeypatch.setattr(
        ShareFileClient, "create_file", lambda client, size, data=None, **options: create(client, size, **options)
    )
    share = opened()
    monkeypatch.setattr(azure_files, "_proven", set())
    for name in ("x", "y"):
        share.write(name, b"content")
        assert share.read(name) == b"content"


def test_a_large_file_is_ranges_under_another_name(azure, opened):
    share = opened()
    data = os.urandom(9 << 20)
    share.write("big", data)
    found = azure.requests()
    assert sum(one.received for one in found) == len(data)
    assert len([one for one in found if one.comp == "range"]) == 3
    assert found[-1].comp == "rename"
    assert share.read("big") == data
    assert [entry.name for entry in share.list("")] == ["big"]


@pytest.mark.parametrize("size", [1, 4 << 20])
def test_a_service_that_takes_no_content_in_the_first_request(azure, opened, monkeypatch, size):
    create = ShareFileClient.create_file

    def refuses(client, length, **options):
        if "data" in options:
            answer = SimpleNamespace(status_code=400, reason="no", headers={"x-ms-error-code": "ContentLengthMustBeZero"})
            raise HttpResponseError(response=answer)
        return create(client, length, **options)

    monkeypatch.setattr(ShareFileClient, "create_file", refuses)
    share = opened()
    for data in (b"old", os.urandom(size)):
        share.write("a/x", data)
        assert share.read("a/x") == data
    assert {one.comp for one in azure.requests() if one.method == "PUT"} == {"", "range", "rename"}
    assert [entry.name for entry in share.list("a")] == ["x"]


def test_a_tenth_of_the_requests_fails(azure, opened, tmp_path):
    share = opened()
    big = os.urandom(20 << 20)
    azure.fail(0.1, KINDS, retry_after=0.1)

    def work(number):
        data = os.urandom(number * 100)
        share.write(f"small/{number}", data)
        assert share.read(f"small/{number}") == data
        return share.claim(f"claims/{number}"), share.claim(f"claims/{number}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(40))) == [(True, False)] * 40
    assert [entry.size for entry in share.list("small")] == [int(entry.name) * 100 for entry in share.list("small")]
    for _ in range(3):
        share.write("big", big)
        share.download("big", tmp_path / "big")
        assert (tmp_path / "big").read_bytes() == big
    share.delete("small")
    share.delete("claims")
    assert [entry.name for entry in share.list("")] == ["big"]
    assert any(one.error for one in azure.requests())


@pytest.mark.parametrize("kind", ["cut-before", "cut-after", "cut-middle"])
def test_an_answer_that_is_lost_costs_nobody_a_claim(azure, opened, kind):
    """The first request may have done it: then "it is there already" is said of our own directory."""
    share = opened()
    share.claim("claims")
    for number in range(2):
        azure.fail(1, (kind,), methods=("PUT",), limit=1)
        assert share.claim(f"claims/{number}")
        azure.fail(1, (kind,), methods=("PUT",), limit=1)
        assert not share.claim(f"claims/{number}")


def test_a_rename_whose_answer_is_lost(azure, opened):
    share = opened()
    data = os.urandom(5 << 20)
    azure.fail(1, ("cut-after",), path="/big", limit=1)
    share.write("big", data)
    assert share.read("big") == data


def test_a_download_that_broke_goes_on_where_it_was(azure, opened, tmp_path):
    share = opened()
    data = os.urandom(40 << 20)
    share.write("big", data)
    told = []

    def stop(count):
        told.append(count)
        if sum(told) == 24 << 20:
            raise ShareError("the network is gone")

    with pytest.raises(ShareError, match="gone"):
        share.download("big", tmp_path / "x", stop)
    assert not (tmp_path / "x").exists()
    azure.reset()
    told = []
    share.download("big", tmp_path / "x", told.append)
    assert (tmp_path / "x").read_bytes() == data
    assert sum(told) == len(data)
    assert len(sent(azure)) == 1 + 4
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_that_is_replaced_while_it_is_downloaded_comes_of_one_time(opened, tmp_path):
    share = opened()
    ones, twos = b"1" * (13 << 20), b"2" * (13 << 20)
    share.write("x", ones)
    told = []

    def replace(count):
        if not told:
            share.write("x", twos)
        told.append(count)

    share.download("x", tmp_path / "x", replace)
    assert (tmp_path / "x").read_bytes() == twos


def test_names_that_azure_does_not_take_are_not_even_sent(azure, opened):
    share = opened()
    for name in ('a"b', "a\\b", "a:b", "a|b", "a<b", "a*b", "what?", "line\nbreak", "\udcff", "..", "."):
        with pytest.raises(ShareError, match=r"rename it|no path"):
            share.write(f"a/{name}", b"1")
    assert azure.requests() == []


# Sentences.


def refused(act):
    with pytest.raises(ShareError) as error:
        act()
    text = str(error.value)
    assert "\n" not in text and "sig=" not in text
    assert error.value.__cause__ is None and not isinstance(error.value, ShareNotFoundError)
    return text


def test_a_share_that_isnt_there_is_never_made(azure, opened):
    share = opened(Credential(azure.key), f"none-{uuid.uuid4().hex}")
    name = parse(share.url).share
    for act in (
        lambda: share.read("x"),
        lambda: share.write("x", b"1"),
        lambda: share.list(""),
        lambda: share.claim("a/b"),
        lambda: share.delete("x"),
        lambda: list(share.read_many(["x"])),
    ):
        assert f"there is no file share '{name}' in the storage account 'devaccount'" in refused(act)
    assert not (azure.root / "file" / name).exists()


@pytest.mark.parametrize(
    ("credential", "words"),
    [
        (
            lambda azure, name: Credential(base64.b64encode(b"x" * 64).decode()),
            "refused the account key (AuthenticationFailed)",
        ),
        (lambda azure, name: Credential(sas=azure.sas(name, "rl")), "the SAS lacks the permission for this"),
        (lambda azure, name: Credential(sas=azure.sas(name, seconds=-60, starts=-600)), "has expired (it ended at 2"),
        (lambda azure, name: Credential(sas=azure.sas(name, starts=600)), "is not valid before 2"),
    ],
    ids=["wrong key", "may not write", "expired", "not begun"],
)
def test_what_opens_it_is_refused(azure, opened, credential, words):
    name = f"share-{uuid.uuid4().hex}"
    azure.share(name)
    share = opened(credential(azure, name), name)
    text = refused(lambda: share.write("x", b"1"))
    assert "'x'" in text and words in text
    assert len(azure.requests()) == 1, "it is not tried again"


def test_a_sas_by_a_stored_access_policy_does_not_say_its_times():
    answer = SimpleNamespace(status_code=403, reason="Forbidden", headers={"x-ms-error-code": "AuthenticationFailed"})
    error = HttpResponseError(response=answer)
    error.additional_info = {"authenticationerrordetail": "Signature not valid in the specified time frame: hush"}

    def ask():
        with azure_errors.translated(parse("https://acct.file.core.windows.net/data"), Credential(sas="si=week&sig=hush"), "x"):
            raise error

    assert "the SAS of storage account 'acct' is not valid now; make a new one" in refused(ask)


def test_a_full_share(azure, opened):
    share = opened()
    name = parse(share.url).share
    azure.quota(name, 1 << 20)
    try:
        for size in (2 << 20, 6 << 20):
            assert "the share is full" in refused(lambda size=size: share.write("x", os.urandom(size)))
        assert share.list("") == []
    finally:
        azure.quota(name, None)


def test_a_host_that_nobody_knows_or_that_does_not_answer_is_said_at_once(monkeypatch):
    monkeypatch.setattr(credentials, "_remembered", {"acct": Credential(sas="sv=1&sp=r&sig=hush")})
    monkeypatch.setattr(azure_client, "FIRST_PAUSE_SECONDS", 0.01)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for host, words in (
            ("https://acct.file.core.windows.invalid", "there is no host acct.file.core.windows.invalid"),
            (f"http://127.0.0.1:{taken.getsockname()[1]}/acct", "nothing answers at 127.0.0.1:"),
        ):
            monkeypatch.setattr(credentials, "_named", {host.replace("acct", "ACCOUNT")})
            share = open_share(f"{host}/data")
            began = time.monotonic()
            text = refused(lambda share=share: share.read("x"))
            assert words in text and "hush" not in text and time.monotonic() - began < 10
    silent = azure_errors.of_network(parse("http://10.0.0.5/acct/share"), "x", type("ReadTimeout", (Exception,), {})())
    assert re.search(r"10\.0\.0\.5 does not answer in time; .*HTTP, port 80\)", str(silent))


@pytest.mark.parametrize("proxy", ["http://me:secret@proxy:port", "http://"])
def test_a_proxy_that_is_none_is_said_at_once(monkeypatch, proxy):
    azure_client._service_client.cache_clear()
    monkeypatch.setattr(credentials, "_remembered", {"acct": Credential(sas="sv=1&sp=r&sig=hush")})
    monkeypatch.setenv("https_proxy", proxy)
    began = time.monotonic()
    text = refused(lambda: open_share("https://acct.file.core.windows.net/data").read("x"))
    assert "the proxy that HTTPS_PROXY names can't be used" in text and "secret" not in text
    assert time.monotonic() - began < 10


def test_a_service_that_stays_busy(azure, opened, monkeypatch):
    share = opened()
    monkeypatch.setattr(azure_client, "LONGEST_SECONDS", 0.3)
    for kind, words in (
        ("503", "too busy (ServerBusy)"),
        ("429", "too busy (status 429)"),
        ("cut-before", "cut again and again"),
    ):
        azure.fail(1, (kind,))
        assert words in refused(lambda: share.read("x"))


def test_without_the_sdk_there_is_a_hint_and_nothing_else_needs_it():
    code = (
        "import sys\n"
        "from mlflow_batchai.storage import open_share\n"
        "from mlflow_batchai.storage.objects import upload\n"
        "import mlflow_batchai.tracking.relay\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('azure', 'msal', 'requests')]\n"
        "sys.modules['azure.storage.fileshare'] = None\n"
        "try: open_share('https://acct.file.core.windows.net/data')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("ShareError ") and "pip install 'mlflow-batchai[azure]'" in result.stdout


def test_the_sdk_says_nothing_of_its_own(azure, opened, capfd):
    share = opened()
    azure.fail(0.5, ("cut-middle",))
    for number in range(5):
        share.write("x", b"1" * number)
        share.read("x")
    assert capfd.readouterr() == ("", "")
