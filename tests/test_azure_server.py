"""Refusals of the tests' storage endpoint, as Azure's; the tests that use it show the rest."""

from __future__ import annotations

import gc
import http.client
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ServiceResponseError,
)
from azure.storage.fileshare import ShareClient
from azure_server import AzureServer, self_signed

# Microsoft's client leaves connections that fail to the garbage collector.
LEFT_SOCKETS = pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def calm(azure: AzureServer) -> Iterator[None]:
    """Every test starts without a record and leaves no fault behind."""
    azure.reset()
    yield
    azure.fail(0)
    azure.latency(0)
    azure.newest()


@pytest.fixture
def collected() -> Iterator[None]:
    """What a test leaves to the garbage collector is collected in it, not in a later test."""
    yield
    gc.collect()


def client(azure: AzureServer, share: str, credential: Any = None, **options: Any) -> ShareClient:
    """A client that doesn't try again."""
    azure.share(share)
    options.setdefault("retry_total", 0)
    return ShareClient(azure.endpoint, share, credential=credential or azure.key, **options)


def code(call: Callable[[], Any]) -> tuple[int | None, str]:
    """The status and the error code that a call fails with."""
    with pytest.raises(HttpResponseError) as caught:
        call()
    return caught.value.status_code, str(getattr(caught.value.error_code, "value", caught.value.error_code))


def raw(azure: AzureServer, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """One request as it is typed here; ``_`` in a header's name stands for a hyphen."""
    connection = http.client.HTTPConnection(azure.endpoint.split("/")[2])
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, "/devaccount" + target, body=body, headers={"x-ms-version": "2026-10-06", **names})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.headers)
    finally:
        connection.close()


def test_wrong_key_and_no_key(azure: AzureServer) -> None:
    share = client(azure, "keys", credential="d3Jvbmc=")
    with pytest.raises(ClientAuthenticationError) as caught:
        share.get_share_properties()
    assert caught.value.status_code == 403 and caught.value.error_code == "AuthenticationFailed"
    assert raw(azure, "GET", "/keys?restype=share")[0] == 401
    status, body, headers = raw(azure, "GET", "/keys?restype=share", authorization="SharedKey devaccount:AAAA")
    assert (status, headers["x-ms-error-code"]) == (403, "AuthenticationFailed") and b"date" in body


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"permissions": "rl"}, (403, "AuthorizationPermissionMismatch")),
        ({"seconds": -1}, (403, "AuthenticationFailed")),
        ({"starts": 60}, (403, "AuthenticationFailed")),
        ({"share": "other"}, (403, "AuthenticationFailed")),
        ({"spr": "https"}, (403, "AuthorizationProtocolMismatch")),
        ({"sip": "10.1.1.1-10.1.1.9"}, (403, "AuthorizationSourceIPMismatch")),
        ({"share": None, "ss": "b"}, (403, "AuthorizationServiceMismatch")),
        ({"share": None, "srt": "sc"}, (403, "AuthorizationResourceTypeMismatch")),
        ({"share": None, "permissions": "rl"}, (403, "AuthorizationPermissionMismatch")),
    ],
)
def test_sas_that_does_not_allow_a_new_file(azure: AzureServer, options: dict[str, Any], expected: tuple[int, str]) -> None:
    share = client(azure, "rights", azure.sas(**{"share": "rights", **options}))
    assert code(lambda: share.get_file_client("f").create_file(3)) == expected
    assert not list(azure.share("rights").iterdir())


@pytest.mark.parametrize("options", [{"share": "good"}, {"share": None}, {"share": "good", "spr": "https,http"}])
def test_sas_that_allows_all(azure: AzureServer, options: dict[str, Any]) -> None:
    share = client(azure, "good", azure.sas(**options))
    file = share.get_file_client("a file")
    file.upload_file(b"text")
    assert file.download_file().readall() == b"text"
    assert [item.name for item in share.list_directories_and_files()] == ["a file"]
    file.delete_file()


def test_sas_create_without_write_makes_new_files_only(azure: AzureServer) -> None:
    share = client(azure, "create", azure.sas("create", "c"))
    share.get_file_client("f").create_file(3)
    assert code(lambda: share.get_file_client("f").create_file(4)) == (403, "AuthorizationPermissionMismatch")
    assert code(share.get_share_properties) == (403, "AuthorizationFailure")


def test_sas_of_one_file(azure: AzureServer) -> None:
    (azure.share("single") / "a").write_bytes(b"1")
    sas = azure.sas("single/a", "r")
    assert client(azure, "single", sas).get_file_client("a").download_file().readall() == b"1"
    assert code(client(azure, "single", sas).get_file_client("b").get_file_properties) == (403, "AuthenticationFailed")


def test_tls_and_token(tmp_path: Path) -> None:
    class Credential:
        def get_token(self, *scopes: str, **options: Any) -> AccessToken:
            return AccessToken(server.token, int(time.time()) + 3600)

    certificate, key = self_signed(tmp_path)
    with AzureServer(tmp_path, certificate=certificate, private_key=key) as server:
        options = {"connection_verify": str(certificate), "retry_total": 0}
        server.share("data")
        share = ShareClient(server.endpoint, "data", credential=server.key, **options)
        share.get_file_client("f").upload_file(bytes(5 << 20))
        share = ShareClient(server.endpoint, "data", credential=Credential(), token_intent="backup", **options)
        assert share.get_file_client("f").download_file().readall() == bytes(5 << 20)


def test_data_in_create_file_is_one_request(azure: AzureServer) -> None:
    share = client(azure, "once")
    file = share.get_file_client("f")
    file.create_file(4, data=b"abcd", metadata={"who": "me"})
    assert [(item.method, item.comp, item.received, item.status) for item in azure.requests()] == [("PUT", "", 4, 201)]
    assert (azure.share("once") / "f").read_bytes() == b"abcd"
    file.create_file(7, data=b"abc")  # the rest is zeros; what was there is replaced
    assert file.download_file().readall() == b"abc\0\0\0\0" and file.get_file_properties().metadata == {}
    status, _, headers = raw(
        azure,
        "PUT",
        f"/once/f?{azure.sas('once')}",
        b"abc",
        x_ms_type="file",
        x_ms_content_length="3",
        content_md5="AAAAAAAAAAAAAAAAAAAAAA==",
    )
    assert (status, headers["x-ms-error-code"]) == (400, "Md5Mismatch")


def test_an_older_service(azure: AzureServer) -> None:
    azure.newest("2025-11-05")
    assert code(lambda: client(azure, "old").get_file_client("f").create_file(1)) == (400, "InvalidHeaderValue")
    older = client(azure, "old", api_version="2025-11-05")
    older.get_file_client("f").upload_file(b"x")
    assert code(lambda: older.get_file_client("f").create_file(1, data=b"y")) == (400, "InvalidHeaderValue")


def test_what_is_not_there_or_in_the_way(azure: AzureServer) -> None:
    share = client(azure, "errors")
    nowhere = ShareClient(azure.endpoint, "nowhere", credential=azure.key, retry_total=0)
    assert code(lambda: nowhere.get_file_client("f").upload_file(b"")) == (404, "ShareNotFound")
    assert code(lambda: list(nowhere.list_directories_and_files())) == (404, "ShareNotFound")
    assert code(lambda: share.create_directory("a/b")) == (404, "ParentNotFound")
    assert code(lambda: share.get_file_client("a/b").create_file(1, data=b"x")) == (404, "ParentNotFound")
    assert code(share.get_file_client("a").get_file_properties) == (404, "ResourceNotFound")
    assert code(share.get_file_client("a").delete_file) == (404, "ResourceNotFound")
    assert code(lambda: share.get_file_client("a").upload_range(b"x", 0, 1)) == (404, "ResourceNotFound")
    share.create_directory("a").get_file_client("f").upload_file(b"1")
    assert code(lambda: share.create_directory("a")) == (409, "ResourceAlreadyExists")
    assert code(lambda: share.delete_directory("a")) == (409, "DirectoryNotEmpty")
    assert code(lambda: share.get_file_client("a").create_file(1)) == (409, "ResourceTypeMismatch")
    assert code(lambda: share.get_file_client("x:y").create_file(1)) == (400, "InvalidResourceName")
    assert code(share.create_share) == (409, "ShareAlreadyExists")


@LEFT_SOCKETS
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(("kind", "done"), [("cut-before", False), ("cut-after", True), ("cut-middle", True), ("503", False)])
def test_each_fault(azure: AzureServer, kind: str, done: bool) -> None:
    share = client(azure, "fault")
    azure.fail(1, kinds=[kind], path="/fault/it", methods=["PUT"], limit=1)
    share.create_directory(f"other-{kind}")
    with pytest.raises((HttpResponseError, ServiceResponseError)):
        share.create_directory(f"it-{kind}")
    assert share.get_directory_client(f"it-{kind}").exists() == done
    share.create_directory(f"it-{kind}-again")
