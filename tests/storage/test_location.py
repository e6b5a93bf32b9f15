"""Addresses of Azure file shares: what they name, what is refused in a sentence, and no secret in any of it."""

from __future__ import annotations

import pytest

from mlflow_batchai.errors import ShareError
from mlflow_batchai.storage.location import AzureLocation, is_web_address, parse

AZURE = "https://acct.file.core.windows.net"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"{AZURE}/data", AzureLocation(AZURE, "acct", "data")),
        (f"{AZURE}/data/", AzureLocation(AZURE, "acct", "data")),
        (f"{AZURE}/data/a/b%20c/%E4%B8%96", AzureLocation(AZURE, "acct", "data", "a/b c/世")),
        ("HTTPS://Acct.File.Core.Windows.Net/data", AzureLocation(AZURE, "acct", "data")),
        (
            "https://acct.file.core.chinacloudapi.cn/d-1",
            AzureLocation("https://acct.file.core.chinacloudapi.cn", "acct", "d-1"),
        ),
        ("http://127.0.0.1:10004/dev/data/x", AzureLocation("http://127.0.0.1:10004/dev", "dev", "data", "x")),
        ("http://localhost:1/dev/data", AzureLocation("http://localhost:1/dev", "dev", "data")),
        ("http://[::1]:1/dev/data", AzureLocation("http://[::1]:1/dev", "dev", "data")),
        ("https://10.77.0.1/dev/data", AzureLocation("https://10.77.0.1/dev", "dev", "data")),
    ],
)
def test_an_address_names_a_location_and_the_other_way_round(url, expected):
    assert parse(url) == expected
    assert parse(expected.url) == expected
    assert is_web_address(url)
    assert parse(url, expected.account.upper()) == expected


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"{AZURE}/data?sv=1&sig=hush", "goes on with"),
        (f"{AZURE}/data#hush", "goes on with"),
        ("https://me:hush@acct.file.core.windows.net/data", "holds a user or password"),
        ("http://acct.file.core.windows.net/data", "is not an https address"),
        ("https://acct.blob.core.windows.net/data", "is not of the form"),
        ("https://host/data", "is not of the form"),
        ("https://.file.core.windows.net/data", "names no storage account"),
        ("http://127.0.0.1:1", "names no storage account"),
        (AZURE, "names no file share"),
        (f"{AZURE}/Data", "names no file share"),
        (f"{AZURE}/-data", "names no file share"),
        (f"{AZURE}/{'d' * 64}", "names no file share"),
        ("http://127.0.0.1:1/dev", "names no file share"),
        (f"{AZURE}/data/a/../b", "'..'"),
        (f"{AZURE}/data/%2E%2E/b", "'..'"),
        (f"{AZURE}/data/a%2F..%2Fb", "'..'"),
        (f"{AZURE}/data/%00", "NUL"),
        ("https://acct.file.core.windows.net:port/data", "can't be read"),
        ("https://[half/data", "can't be read"),
        (f"{AZURE}/data", "of the storage account 'acct', not of 'other'"),
    ],
)
def test_others_are_refused_without_their_secrets(url, said):
    with pytest.raises(ShareError, match=said) as error:
        parse(url, "other" if "other" in said else None)
    assert "hush" not in str(error.value)
    assert "\n" not in str(error.value)


def test_below():
    location = parse(f"{AZURE}/data")
    assert location.below("a b/c/").url == f"{AZURE}/data/a%20b/c"
    assert location.below("a").below("b").folder == "a/b"
    assert location.below("") == location
    with pytest.raises(ShareError):
        location.below("a/../../b")
    assert not is_web_address("file:///x") and not is_web_address("/x")
