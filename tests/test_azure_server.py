"""What the tests' storage endpoint refuses, as Azure does by Microsoft's description; the tests that use it show the rest."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError
from azure.storage.fileshare import ShareClient
from azure_server import AzureServer


@pytest.fixture(autouse=True)
def calm(azure: AzureServer) -> Iterator[None]:
    """Every test leaves a service of today behind."""
    yield
    azure.newest()


def client(azure: AzureServer, share: str, credential: Any = None, **options: Any) -> ShareClient:
    """A client that doesn't try again."""
    azure.share(share)
    return ShareClient(azure.endpoint, share, credential=credential or azure.key, retry_total=0, **options)


def code(call: Callable[[], Any]) -> tuple[int | None, str]:
    """The status and the error code that a call fails with."""
    with pytest.raises(HttpResponseError) as caught:
        call()
    return caught.value.status_code, str(getattr(caught.value.error_code, "value", caught.value.error_code))


def raw(azure: AzureServer, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, str | None]:
    """Status and error code of one request as it is typed here; ``_`` in a header's name stands for a hyphen."""
    connection = http.client.HTTPConnection(azure.endpoint.split("/")[2])
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, "/devaccount" + target, body=body, headers={"x-ms-version": "2026-10-06", **names})
        answer = connection.getresponse()
        return answer.status, answer.headers["x-ms-error-code"]
    finally:
        connection.close()


def test_wrong_key_and_no_key(azure: AzureServer) -> None:
    assert code(client(azure, "keys", "d3Jvbmc=").get_share_properties) == (403, "AuthenticationFailed")
    assert raw(azure, "GET", "/keys?restype=share")[0] == 401
    said = raw(azure, "GET", "/keys?restype=share", authorization="SharedKey devaccount:AAAA")
    assert said == (403, "AuthenticationFailed"), "it has no date"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"permissions": "rl"}, "AuthorizationPermissionMismatch"),
        ({"seconds": -1}, "AuthenticationFailed"),
        ({"starts": 60}, "AuthenticationFailed"),
        ({"share": "other"}, "AuthenticationFailed"),
        ({"share": "rights/g"}, "AuthenticationFailed"),
        ({"spr": "https"}, "AuthorizationProtocolMismatch"),
        ({"sip": "10.1.1.1-10.1.1.9"}, "AuthorizationSourceIPMismatch"),
        ({"share": None, "ss": "b"}, "AuthorizationServiceMismatch"),
        ({"share": None, "srt": "sc"}, "AuthorizationResourceTypeMismatch"),
        ({"share": None, "permissions": "rl"}, "AuthorizationPermissionMismatch"),
    ],
)
def test_a_sas_that_does_not_allow_a_new_file(azure: AzureServer, options: dict[str, Any], expected: str) -> None:
    share = client(azure, "rights", azure.sas(**{"share": "rights", **options}))
    assert code(lambda: share.get_file_client("f").create_file(3)) == (403, expected)
    assert not list(azure.share("rights").iterdir())


def test_a_sas_that_may_create_and_not_write_makes_new_files_only(azure: AzureServer) -> None:
    share = client(azure, "create", azure.sas("create", "c"))
    share.get_file_client("f").create_file(3)
    assert code(lambda: share.get_file_client("f").create_file(4)) == (403, "AuthorizationPermissionMismatch")
    assert code(share.get_share_properties) == (403, "AuthorizationFailure")


def test_content_is_taken_in_create_file_by_a_new_service_only_and_never_where_its_md5_is_another(azure: AzureServer) -> None:
    file = client(azure, "once").get_file_client("f")
    file.create_file(7, data=b"abc")
    assert file.download_file().readall() == b"abc\0\0\0\0"
    headers = {"x_ms_type": "file", "x_ms_content_length": "3", "content_length": "3"}
    target = "/once/g?" + azure.sas("once")
    assert raw(azure, "PUT", target, b"abc", content_md5="AAAAAAAAAAAAAAAAAAAAAA==", **headers) == (400, "Md5Mismatch")
    azure.newest("2025-11-05")
    assert code(lambda: file.create_file(1)) == (400, "InvalidHeaderValue")
    older = client(azure, "once", api_version="2025-11-05")
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
    share.create_directory("a").get_file_client("f").upload_file(b"1")
    assert code(lambda: share.create_directory("a")) == (409, "ResourceAlreadyExists")
    assert code(lambda: share.delete_directory("a")) == (409, "DirectoryNotEmpty")
    assert code(lambda: share.get_file_client("a").create_file(1)) == (409, "ResourceTypeMismatch")
    assert code(lambda: share.get_file_client("x:y").create_file(1)) == (400, "InvalidResourceName")
    assert code(share.create_share) == (409, "ShareAlreadyExists")
