"""The control share for agents: one suite for both ways to reach it, a directory and the Azure Files REST API."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer, self_signed
from waiting import freeze

from mlflow_batchai.agent import place
from mlflow_batchai.agent.api import examine
from mlflow_batchai.agent.protocol import JobPaths
from mlflow_batchai.agent.share import base, open_control, rest, sharefiles, wire
from mlflow_batchai.agent.share.base import Attempt, ControlError, ControlShare, Entry
from mlflow_batchai.agent.share.index import IndexedFiles

PATHS = JobPaths("job folder/é 100%#&+")


class Site:
    """A control share with a way to look behind it."""

    def __init__(self, kind: str, address: str, sas: str | None, folder: Path) -> None:
        self.kind = kind
        self.address = address
        self.sas = sas
        self.folder = folder
        self._opened: list[ControlShare] = []

    def open(self, patience: float = 20.0) -> ControlShare:
        """The share as another agent has it."""
        self._opened.append(open_control(self.address, self.sas, patience))
        return self._opened[-1]

    def submit(self) -> None:
        """Only who submits makes the job's folder."""
        (self.folder / PATHS.folder).mkdir(parents=True)

    def close(self) -> None:
        for share in self._opened:
            share.close()


@pytest.fixture(params=["mounted", "rest"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    made = Site("mounted", str(tmp_path), None, tmp_path) if request.param == "mounted" else rest_site(request)
    made.submit()
    yield made
    made.close()


def rest_site(request: pytest.FixtureRequest, **sas: Any) -> Site:
    server: AzureServer = request.getfixturevalue("azure")
    name = f"c{abs(hash(request.node.name)) % 10**8}"
    folder = server.share(name) / "a folder"
    folder.mkdir(exist_ok=True)
    server.reset()
    return Site("rest", server.url(name, "a folder"), server.sas(name, **sas), folder)


@pytest.fixture
def azure_site(azure: AzureServer, request: pytest.FixtureRequest) -> Iterator[Site]:
    made = rest_site(request)
    yield made
    azure.fail(0)
    azure.newest()
    azure.latency(0)
    made.close()


@pytest.fixture
def share(site: Site) -> ControlShare:
    return site.open()


# Of both.


def test_a_closed_file_is_what_was_written(site: Site, share: ControlShare) -> None:
    path = PATHS.announce(3)
    assert share.read_closed(path) is None
    for content in ({"a": "\udc80 é\n"}, {"b": 2}):
        share.write_closed(path, [content])
        assert share.read_closed(path) == site.open().read_closed(path) == content
    (site.folder / path).write_bytes(b"half a fi")
    assert share.read_closed(path) is None
    (site.folder / path).write_bytes(bytes(100))
    assert share.read_closed(path) is None


def written_by_agents(attempt: Attempt, share: ControlShare) -> list[Callable[[], Any]]:
    """All that an agent writes into a job's folder."""
    log = share.log_file(PATHS.stdouterr + "/stdout.txt")
    log.append(b"line\n")
    return [
        lambda: attempt.send("agent-0", 0, [{"n": 0}]),
        lambda: attempt.write("announce-0", PATHS.announce(0), [{"n": 0}]),
        lambda: attempt.write("verdict", PATHS.verdict_file, [{"n": 0}]),
        lambda: share.claim(PATHS.verdict),
        lambda: log.flush(last=True),
    ]


def test_the_folder_of_a_job_is_not_made_by_agents(site: Site, share: ControlShare) -> None:
    attempt = share.attempt(PATHS, 0, 1)
    (site.folder / "job folder").rename(site.folder / "moved")
    for write in written_by_agents(attempt, share):
        with pytest.raises(OSError, match=r"no folder|No such file") as caught:
            write()
        assert caught.value.errno == errno.ENOENT
        told = sharefiles.sentence(caught.value)
        assert told and told.startswith("there is no folder http" if site.kind == "rest" else "the job's folder is gone")
    assert os.listdir(site.folder) == ["moved"]
    (site.folder / "moved").rename(site.folder / "job folder")
    for write in written_by_agents(attempt, share):
        write()
    # What nodes write elsewhere has nothing to do with a job.
    share.write_closed("wheels/x/file", [{"n": 1}])
    assert share.claim("x/y")


def test_an_empty_mount_point_is_no_share(tmp_path: Path) -> None:
    root = tmp_path / "share"
    (root / PATHS.folder).mkdir(parents=True)
    share = open_control(str(root))
    attempt = share.attempt(PATHS, 0, 1)
    root.rename(tmp_path / "elsewhere")
    for change in (lambda: None, root.mkdir):
        change()
        for write in [*written_by_agents(attempt, share), lambda: share.reserve(PATHS.reserve, 10)]:
            with pytest.raises(ControlError, match=f"^the control share is not mounted at {root}$") as caught:
                write()
            assert sharefiles.sentence(caught.value) is None, "it is waited for"
    assert os.listdir(root) == []
    root.rmdir()
    assert attempt.segment("agent-1", 0) is None and attempt.requests() == []
    # Mounted again it may be another folder to the system, and is the share all the same.
    subprocess.run(["cp", "-a", tmp_path / "elsewhere", root], check=True)
    attempt.send("agent-0", 0, [{"n": 0}])
    assert attempt.segment("agent-0", 0) == [{"n": 0}]
    subprocess.run(["rm", "-r", root / PATHS.folder], check=True)
    with pytest.raises(FileNotFoundError):
        attempt.send("agent-0", 1, [{"n": 1}])


def test_a_writer_that_went_on_far_behind_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / PATHS.folder).mkdir(parents=True)
    attempt = open_control(str(tmp_path)).attempt(PATHS, 0, 12)
    for writer, number in (("agent-1", 5), ("agent-1", 2004), ("agent-11", 3000), ("agent-2", 7)):
        attempt.send(writer, number, [{"n": number}])
    assert [attempt.went_on("agent-1", number) for number in (0, 4, 5, 990, 2003, 2004, 2999)] == [True] * 5 + [False] * 2
    assert attempt.went_on("agent-11", 999) and not attempt.went_on("agent-11", 3000) and not attempt.went_on("agent-3", 0)


def test_a_directory_is_claimed_by_one(site: Site) -> None:
    shares = [site.open() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for number in range(5):
            won = list(pool.map(lambda share: share.claim(f"x/y/claim-{number}"), shares))  # noqa: B023
            assert sorted(won) == [False] * 7 + [True]


def test_entries(site: Site, share: ControlShare) -> None:
    assert share.entries("no/where") == [] and share.names("no/where") == []
    for name in ("a b", "é%20", "x&y", "plus+"):
        (site.folder / "in").mkdir(exist_ok=True)
        (site.folder / "in" / name).write_bytes(b"abc")
    (site.folder / "in" / "sub").mkdir()
    found = sorted(share.entries("in"))
    assert found == sorted([*(Entry(name, 3, False) for name in ("a b", "é%20", "x&y", "plus+")), Entry("sub", 0, True)])
    assert sorted(share.names("in")) == sorted(entry.name for entry in found)


@pytest.mark.parametrize("size", [0, 1000, (4 << 20) - 1, 4 << 20, (9 << 20) + 7])
def test_a_fetched_file_is_whole(site: Site, share: ControlShare, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    if isinstance(share, rest.RestShare):
        share.write("object", data)
        assert (site.folder / "object").read_bytes() == data, "it goes in ranges"
    (site.folder / "object").write_bytes(data)
    target = tmp_path / "target"
    assert share.fetch("object", str(target)) == hashlib.sha256(data).hexdigest()
    assert target.read_bytes() == data
    with pytest.raises(FileNotFoundError):
        share.fetch("none", str(target))


def test_a_log_file_grows_and_goes_on(site: Site, share: ControlShare) -> None:
    path, whole = PATHS.stdouterr + "/stdout.txt", b""
    for part in (b"one\n", os.urandom(5 << 20), b"", b"two\n"):
        file = share.log_file(path)  # a second agent's goes on where the first ended
        file.append(part)
        whole += part
        file.flush(last=True)
        file.flush(last=True)
        file.close()
        assert (site.folder / path).read_bytes() == whole
    file = share.log_file(PATHS.stdouterr + "/none.txt")
    file.flush()
    assert share.names(PATHS.stdouterr) == ["stdout.txt"]
    # At the end there is one, though nothing was written; and it can still grow.
    file.flush(last=True)
    assert (site.folder / PATHS.stdouterr / "none.txt").read_bytes() == b""
    file.append(b"late\n")
    file.flush(last=True)
    assert (site.folder / PATHS.stdouterr / "none.txt").read_bytes() == b"late\n"


def test_segments_are_read_in_order_by_others(site: Site, share: ControlShare) -> None:
    writer, reader = share.attempt(PATHS, 1, 2), site.open().attempt(PATHS, 0, 2)
    assert reader.segment("agent-1", 0) is None
    for sequence in range(3):
        writer.send("agent-1", sequence, [{"k": "log", "n": sequence}, {"k": "x"}])
    look(reader)
    found = [reader.segment("agent-1", sequence) for sequence in range(4)]
    assert found == [*([{"k": "log", "n": sequence}, {"k": "x"}] for sequence in range(3)), None]


def test_what_the_index_names_is_read(site: Site, share: ControlShare) -> None:
    writer, reader = share.attempt(PATHS, 1, 2), site.open().attempt(PATHS, 0, 2)
    assert reader.read("exit-1", PATHS.exit(1)) is None and reader.requests() == []
    for _ in range(2):
        writer.write("exit-1", PATHS.exit(1), [{"node": 1}])
        writer.write("request-5f", PATHS.request("5f"), [{"who": "ann"}])
    look(reader)
    assert reader.read("exit-1", PATHS.exit(1)) == {"node": 1}
    assert reader.requests() == ["5f"]
    assert reader.read("exit-2", PATHS.exit(2)) is None


def look(attempt: base.Attempt) -> None:
    """Look now, whatever the pace."""
    if isinstance(attempt, IndexedFiles):
        attempt._index._asked -= 100
    attempt.look()


def test_trouble(site: Site, share: ControlShare) -> None:
    assert share.trouble("one") == "another"
    (site.folder / ".batchai" / "identity" / "one").mkdir(parents=True)
    assert share.trouble("one") is None
    assert place.share_problem(site.address, "one", site.sas) is None
    there = place.share_problem(site.address + "/none", "one", site.sas)
    assert there == "missing"
    said = examine.offer(site.address, "one", "made/file", site.sas)
    assert (said["trouble"], said["why"]) == (None, "")


# Of REST alone.


@pytest.mark.parametrize(
    ("address", "sas", "sentence"),
    [
        ("https://", None, "is no address"),
        ("https://acct.file.core.windows.net", "sig=x", "is no address"),
        ("https://acct.file.core.windows.net:x/share", None, "is no address"),
        ("https://acct.file.core.windows.net/share?sig=hidden", None, "is no address"),
        ("https://user:hidden@acct.file.core.windows.net/share", None, "is no address"),
        ("http://acct.file.core.windows.net/share", "sig=x", "without encryption: write https"),
        ("https://acct.file.core.windows.net/share", "sig=hid\nden", "characters that no SAS has"),
        ("https://acct.file.core.windows.net/share", "sig=hiddené", "characters that no SAS has"),
    ],
)
def test_no_address(address: str, sas: str | None, sentence: str) -> None:
    with pytest.raises(ControlError, match=sentence) as caught:
        open_control(address, sas)
    assert "hid" not in str(caught.value)


@pytest.mark.parametrize(
    ("sas", "trouble", "sentence"),
    [
        ({"permissions": "rl"}, "read-only", r"it has to permit reading, listing, .* \(it has sp=rl; rcwdl is needed\)"),
        ({"seconds": -60}, "unreachable: ", r"the SAS has expired \(it ended at 20.*Z\); make a new one"),
        ({"starts": 600}, "unreachable: ", r"the SAS is not valid before 20.*Z; make a new one"),
        ("wrong", "unreachable: ", r"127\.0\.0\.1.*refused the SAS"),
        (None, "unreachable: ", "asks for a SAS"),
    ],
    ids=["read-only", "expired", "not-yet", "wrong", "none"],
)
def test_who_may_not(azure: AzureServer, azure_site: Site, sas: Any, trouble: str, sentence: str) -> None:
    name = azure_site.address.split("/")[4]
    (azure_site.folder / ".batchai" / "identity" / "one").mkdir(parents=True)
    text = azure.sas(name).replace("sig=", "sig=AAAA") if sas == "wrong" else azure.sas(name, **sas) if sas else None
    assert (place.share_problem(azure_site.address, "one", text) or "").startswith(trouble)
    share = open_control(azure_site.address, text, 5.0)
    with pytest.raises(ControlError, match=sentence) as caught:
        share.write_closed("x", [{}])
    share.close()
    assert caught.value.errno == errno.EACCES and "sig" not in str(caught.value)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    said = place.share_problem("http://127.0.0.1:9/devaccount/share", "one", "sig=hidden")
    assert said == "unreachable: the file share http://127.0.0.1:9/devaccount/share can't be reached: Connection refused"
    monkeypatch.setattr(place, "SHARE_SECONDS", 0.2)
    said = place.share_problem("https://acct.nowhere.invalid/share", "one", "sig=hidden")
    assert said and said.startswith("unreachable: the file share https://acct.nowhere.invalid/share can't be reached: ")
    assert "hidden" not in said


def test_an_answer_that_was_cut_in_its_headers_is_asked_for_again() -> None:
    """By the end of a gateway, say: it is no empty file."""
    whole = b"HTTP/1.1 200 OK\r\nx-ms-type: File\r\nContent-Length: 4\r\n\r\nfour"
    with socket.create_server(("127.0.0.1", 0)) as service, ThreadPoolExecutor(1) as pool:
        service.settimeout(20.0)

        def serve() -> None:
            for answer in (whole[:25], whole):
                with service.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        served = pool.submit(serve)
        share = open_control(f"http://127.0.0.1:{service.getsockname()[1]}/account/share", None, 20.0)
        assert share.content("x") == b"four"
        served.result(60)
        share.close()


def test_a_service_that_hangs_is_not_waited_for_long(azure: AzureServer, azure_site: Site) -> None:
    share = azure_site.open(1.0)
    share.entries("")
    freeze(azure.pid)
    try:
        begun = time.monotonic()
        with pytest.raises(ControlError, match="can't be reached: no answer within 1 s"):
            share.entries("")
        assert time.monotonic() - begun < 5
    finally:
        os.kill(azure.pid, signal.SIGCONT)
    assert share.entries("") == []


def test_a_full_share(azure: AzureServer, azure_site: Site) -> None:
    name = azure_site.address.split("/")[4]
    azure.quota(name, 1000)
    share = azure_site.open()
    with pytest.raises(ControlError, match="is full: delete files there, or raise its quota") as caught:
        share.write_closed("x", [{"x": "y" * 2000}])
    assert caught.value.errno == errno.ENOSPC
    azure.quota(name, None)
    share.write_closed("x", [{"x": "y" * 2000}])


def test_a_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    with AzureServer(tmp_path, certificate=certificate, private_key=key) as server:
        folder = server.share("data")
        (folder / ".batchai" / "identity" / "one").mkdir(parents=True)
        said = place.share_problem(server.url("data"), "one", server.sas("data"))
        assert said and "its certificate is not trusted here" in said
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert place.share_problem(server.url("data"), "one", server.sas("data")) is None


@pytest.mark.parametrize("kinds", [("503",), ("429",), ("cut",), ("503", "429", "cut")])
def test_failing_requests_change_nothing(
    azure: AzureServer, azure_site: Site, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "FIRST_PAUSE_SECONDS", 0.01)
    monkey = azure_site.open(60)
    azure.fail(rate=0.3, kinds=kinds, seed=3, retry_after=0)
    won = [monkey.claim(f"claims/{number}") for number in range(20)]
    assert won == [True] * 20, "an answer that was lost is no other's claim"
    assert [monkey.claim(f"claims/{number}") for number in range(20)] == [False] * 20
    file = monkey.log_file("log.txt")
    whole = b"".join(b"line %d\n" % number for number in range(30))
    for line in whole.splitlines(keepends=True):
        file.append(line)
        file.flush(last=True)
    for number in range(20):
        monkey.write_closed("closed", [{"n": number}])
        assert monkey.read_closed("closed") == {"n": number}
    azure.fail(0)
    assert (azure_site.folder / "log.txt").read_bytes() == whole


def test_a_share_that_stays_away_is_given_up_in_time(azure: AzureServer, azure_site: Site) -> None:
    share = azure_site.open(2.0)  # of 45 s
    azure.fail(rate=1.0, kinds=("503",))
    begun = time.monotonic()
    with pytest.raises(ControlError, match=r"takes no requests now \(503 ServerBusy\)"):
        share.entries("")
    assert time.monotonic() - begun < 20
    assert 2 <= len(azure.requests()) <= 8
    azure.fail(rate=1.0, kinds=("cut",))
    with pytest.raises(ControlError, match="can't be reached: "):
        share.write_closed("x", [{}])


@pytest.mark.parametrize("version", ["2026-12-06", "2026-02-06"])
def test_a_service_that_takes_no_data_with_create(azure: AzureServer, azure_site: Site, version: str) -> None:
    azure.newest(version)
    share = azure_site.open()
    for number in range(5):
        share.write_closed(f"file {number}", [{"n": number}])
        assert share.read_closed(f"file {number}") == {"n": number}
    puts = [request for request in azure.requests() if request.method == "PUT"]
    if version == "2026-12-06":
        assert len(puts) == 5
    else:
        assert len(puts) == 1 + 2 * 5, "it is tried once"


def test_a_service_that_drops_the_data_is_noticed(azure_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old service might not look at the body: the version that we name is one in which it doesn't."""
    real = wire.Wire.ask

    def ask(self: wire.Wire, method: str, path: str, query: str = "", headers: Any = None, body: bytes = b"") -> wire.Answer:
        if (headers or {}).get("x-ms-version"):
            headers, body = {name: value for name, value in headers.items() if name != "x-ms-version"}, b""
        return real(self, method, path, query, headers, body)

    monkeypatch.setattr(wire.Wire, "ask", ask)
    share = azure_site.open()
    share.write_closed("file", [{"n": 1}])
    assert share.read_closed("file") == {"n": 1}


def test_a_listing_of_many_pages(azure_site: Site) -> None:
    (azure_site.folder / "many").mkdir()
    for number in range(5003):
        (azure_site.folder / "many" / f"{number:05d}").touch()
    assert len(set(azure_site.open().names("many"))) == 5003


def test_a_removed_log_file_begins_anew(azure_site: Site) -> None:
    file = azure_site.open().log_file("log.txt")
    for text in (b"one\n", b"two\n"):
        file.append(text)
        file.flush(last=True)
    (azure_site.folder / "log.txt").unlink()
    file.append(b"three\n")
    file.flush(last=True)
    assert (azure_site.folder / "log.txt").read_bytes() == b"three\n"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy:3128"}, ("proxy", 3128)),
        ({"HTTPS_PROXY": "proxy:3128"}, ("proxy", 3128)),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "x, .core.windows.net"}, None),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "windows.net.example"}, ("proxy", 3128)),
    ],
)
def test_a_proxy_is_heeded(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: tuple[str, int] | None) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    proxy = wire.proxy_for("https", "acct.file.core.windows.net")
    assert (proxy and (proxy.hostname, proxy.port)) == found


@pytest.mark.parametrize("address", ["http://secret@proxy:port", "http://[proxy", "http://proxy:65536", "http://"])
def test_a_proxy_that_is_none_is_one_sentence(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    for name in ("HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", address)
    with pytest.raises(ControlError, match=r"^https_proxy of this node names no proxy; write it as http://HOST:PORT$"):
        open_control("https://acct.file.core.windows.net/share", "sv=1")
