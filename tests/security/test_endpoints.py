"""Storage credentials go only to Azure's own clouds and to services that the user has named."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from mount_world import Node, blob_volume, files_volume

from mlflow_batchai.agent.plan import Volume
from mlflow_batchai.agent.share import open_control
from mlflow_batchai.agent.share.base import ControlError
from mlflow_batchai.cluster import clusters
from mlflow_batchai.documents.job import JobProperties
from mlflow_batchai.documents.model import parse as parse_model
from mlflow_batchai.errors import BatchAIError, ShareError
from mlflow_batchai.follower import credentials as of_attempts
from mlflow_batchai.plan.volumes import check_volumes, choose_volumes
from mlflow_batchai.storage import accounts, azure_client, credentials, open_share
from mlflow_batchai.storage.azure_files import AzureFilesShare
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.location import AzureLocation, account_of, parse
from mlflow_batchai.storage.opening import download_url, for_nodes

KEY = base64.b64encode(b"k" * 64).decode()
SAS = "sv=1&ss=f&srt=sco&sp=rwdlc&se=2999-01-01T00:00:00Z&sig=hush"
ACCOUNT = "acct"


class Attacker:
    """A host of somebody else's: whatever name is looked up leads to it, and what comes is counted.

    Attributes:
        port: where it listens, on 127.0.0.2.
        asked: names that were looked up.
        came: how many connections it saw.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.2", 0))
        self.port = self._socket.getsockname()[1]
        self.asked: list[str] = []
        self.came = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.came += 1
            connection.close()

    def look_up(self, host: Any, *_: Any, **__: Any) -> list[Any]:
        """In place of ``socket.getaddrinfo``."""
        self.asked.append(str(host))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", self.port))]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def attacker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Attacker]:
    """An attacker's host, and a user who has a key for the account ``acct`` and nothing else."""
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith(("AZURE_", "BATCHAI_STORAGE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", ACCOUNT)
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", KEY)
    monkeypatch.setattr(credentials, "_named", set())
    monkeypatch.setattr(azure_client, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(azure_client, "LONGEST_SECONDS", 0.5)
    made = Attacker()
    monkeypatch.setattr(socket, "getaddrinfo", made.look_up)
    yield made
    made.close()


HOSTS = """
    https://acct.file.attacker.example https://acct.file.core.windows.net.attacker.example
    https://acct.file.core.windows.net. https://acct.file.core.windows.net.. https://acct.file.core.windows.net:8443
    https://acct.file.core.windows.net:80 https://acct.file.core-windows.net https://acct.file.xcore.windows.net
    https://acct.file.windows.net https://acct.file.core.windows.com https://acct.file.core.cloudapi.de
    https://acct.file.storage.azure.net https://acct.z123.file.storage.azure.net https://acct.zz1.file.storage.azure.net
    https://acct.attacker.z12.file.storage.azure.net https://acct.file.z12.storage.azure.net
    https://acct.file.storage.azure.net.attacker.example https://acct.z12.file.core.windows.net
    https://acct.privatelink.file.core.windows.net https://acct.file.core.windows.net@attacker.example
    https://acct.file.core.windows.net:443@attacker.example https://attacker.example:x@acct.file.core.windows.net
    https://acct.file.attacker.example#.file.core.windows.net https://acct.file.attacker.example?.file.core.windows.net
    https://acct.file.attacker.example\\.file.core.windows.net https://acct.file.core.windows.net\\.attacker.example
    https://acct.file.core.windows.net\\@attacker.example https://acct%2efile.core.windows.net
    https://acct.file%2ecore%2ewindows%2enet https://acct.file.core.windows.net%2eattacker.example
    https://acct.file.core.windows.net%00.attacker.example https://acct.file.core.windows.net\u3002attacker.example
    https://acct.file.core\u3002windows\uff0enet https://acct.file.c\u043ere.windows.net
    https://acct.file.xn--cre-emc.windows.net https://\u0430cct.file.core.windows.net https://ACCT.FILE.ATTACKER.EXAMPLE
    http://acct.file.core.windows.net ftp://acct.file.core.windows.net https://acct.blob.core.windows.net
    https://attacker.example/acct https://127.0.0.2:PORT/acct http://127.0.0.2:PORT/acct http://localhost:PORT/acct
    https://2130706434:PORT/acct https://0x7f000002:PORT/acct https://127.2:PORT/acct https://[::1]:PORT/acct
    https://[::ffff:127.0.0.2]:PORT/acct https://[::ffff:7f00:2]:PORT/acct
"""


def address(host: str, attacker: Attacker) -> str:
    return host.replace("PORT", str(attacker.port)) + "/data"


def refused(attacker: Attacker, *ways: Any) -> None:
    for way in ways:
        with pytest.raises(BatchAIError) as error:
            way()
        said = str(error.value)
        assert KEY not in said and "sig=" not in said and "\n" not in said
        assert "address" in said or "Endpoint" in said, said
    assert (attacker.came, attacker.asked) == (0, [])


@pytest.mark.parametrize("host", HOSTS.split())
def test_no_key_is_used_at_an_address_that_nobody_has_named(host: str, attacker: Attacker) -> None:
    url = address(host, attacker)
    refused(attacker, lambda: open_share(url).list(""), lambda: for_nodes(parse(url), 600))


@pytest.mark.parametrize("host", HOSTS.split())
def test_no_job_document_leads_there(host: str, attacker: Attacker) -> None:
    """The volume of a job whose document somebody else wrote, by each kind of mount."""
    entry = {"azureFileUrl": address(host, attacker), "relativeMountPath": "data"}
    properties, _ = parse_model(JobProperties, {"mountVolumes": {"azureFileShares": [entry]}}, "job.json")

    def planned(mount: str) -> None:
        write_cluster(mount=mount)
        cluster = clusters.load("c")[0]
        check_volumes(choose_volumes(properties, cluster, "job.json", 600.0).volumes, cluster)

    refused(attacker, lambda: planned("rclone"), lambda: planned("cifs"))


def write_cluster(**changes: Any) -> None:
    folder = Path(os.environ["BATCHAI_HOME"]) / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "c.yaml").write_text(json.dumps({"engine": "local", **changes}), encoding="utf-8")


ELSEWHERE = ["https://acct.file.attacker.example", "http://127.0.0.2:PORT/acct", "https://other.file.core.windows.net"]


@pytest.mark.parametrize("host", ELSEWHERE)
@pytest.mark.parametrize("credential", [Credential(KEY), Credential(sas=SAS), Credential()], ids=["key", "sas", "login"])
def test_whatever_opens_the_account(
    host: str, credential: Credential, attacker: Attacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key signs, a SAS stands in the address, a login is a token in a header: none is made for another's host."""
    monkeypatch.delenv("AZURE_BATCHAI_STORAGE_KEY")
    monkeypatch.setattr(credentials, "_remembered", {ACCOUNT: credential} if credential.kind != "login" else {})
    logins: list[str] = []
    monkeypatch.setattr(azure_client, "_login", lambda: logins.append("made"))
    location = AzureLocation(host.replace("PORT", str(attacker.port)), ACCOUNT, "data")
    volume = Volume("job", "x", "azureFiles", how="rclone", account=ACCOUNT, container="data", endpoint=location.endpoint)
    refused(
        attacker,
        lambda: AzureFilesShare(location).read("x"),
        lambda: for_nodes(location, 600),
        lambda: download_url(AzureFilesShare(location), "x", 5),
        lambda: of_attempts._opens_anew(volume, 600),
        lambda: of_attempts._opens_anew(replace(volume, how="cifs"), 600),
        lambda: of_attempts._opens_anew(replace(volume, kind="azureBlob"), 600),
    )
    assert logins == []


def test_another_accounts_endpoint_is_not_this_ones(attacker: Attacker, tmp_path: Path) -> None:
    """The endpoint of one account in config.yaml, or in a cluster document without ACCOUNT, opens no other."""
    (tmp_path / "home").mkdir()
    settings = "shares: {other: {fileEndpoint: 'https://other.file.corp.example'}}"
    (tmp_path / "home" / "config.yaml").write_text(settings, encoding="utf-8")
    write_cluster(fileEndpoint="https://third.file.corp.example", blobEndpoint="http://127.0.0.2:1/third")
    for endpoint in ("https://acct.file.corp.example", "https://other.file.corp.example", "https://third.file.corp.example"):
        with pytest.raises(ShareError):
            credentials.at(endpoint, ACCOUNT)
    with pytest.raises(ShareError, match="blobEndpoint"):
        credentials.at("http://127.0.0.2:1/third", ACCOUNT, "blob")
    with pytest.raises(ShareError):
        credentials.at("https://acct.file.core.windows.net", ACCOUNT, "blob")
    with pytest.raises(ShareError):
        credentials.at("https://acct.blob.core.windows.net", ACCOUNT)


@pytest.mark.parametrize("suffix", ["core.windows.net", "core.usgovcloudapi.net", "core.chinacloudapi.cn"])
def test_azures_own_clouds_need_no_word(suffix: str, attacker: Attacker) -> None:
    assert credentials.at(f"https://acct.file.{suffix}", ACCOUNT) == Credential(KEY)
    assert credentials.at(f"https://acct.blob.{suffix}", ACCOUNT, "blob") == Credential(KEY)
    assert parse(f"HTTPS://Acct.File.{suffix.upper()}/data").endpoint == f"https://acct.file.{suffix}"


def test_a_zone_of_azures(attacker: Attacker) -> None:
    location = parse("https://acct.z7.file.storage.azure.net/data/a")
    assert location == AzureLocation("https://acct.z7.file.storage.azure.net", ACCOUNT, "data", "a")
    assert credentials.at(location.endpoint, ACCOUNT) == Credential(KEY)
    assert credentials.at("https://acct.z50.blob.storage.azure.net", ACCOUNT, "blob") == Credential(KEY)
    assert account_of("https://acct.z7.blob.storage.azure.net", "blob") == ACCOUNT


def by_config(endpoint: str) -> None:
    text = f"shares: {{acct: {{fileEndpoint: '{endpoint}'}}}}"
    Path(os.environ["BATCHAI_HOME"]).mkdir(exist_ok=True)
    (Path(os.environ["BATCHAI_HOME"]) / "config.yaml").write_text(text, encoding="utf-8")


def by_connection(endpoint: str) -> None:
    os.environ["AZURE_STORAGE_CONNECTION_STRING"] = f"AccountName=acct;AccountKey={KEY};FileEndpoint={endpoint.lower()}/"


def by_document(endpoint: str) -> None:
    write_cluster(fileEndpoint=endpoint.replace("acct", "ACCOUNT"))


@pytest.mark.parametrize("named", [by_config, by_connection, by_document])
@pytest.mark.parametrize(
    "endpoint", ["https://acct.file.corp.example", "http://127.0.0.2:PORT/acct", "https://acct.file.corp.example:8443"]
)
def test_what_the_user_has_named_is_asked(
    named: Any, endpoint: str, attacker: Attacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "")
    endpoint = endpoint.replace("PORT", str(attacker.port))
    named(endpoint)
    with pytest.raises(ShareError):
        open_share(f"{endpoint}/data").list("")
    assert attacker.asked or attacker.came


@pytest.mark.parametrize(
    "endpoint", ["http://acct.file.corp.example", "https://u:p@acct.file.corp.example", "https://corp.example"]
)
@pytest.mark.parametrize("named", [by_config, by_document])
def test_what_is_no_endpoint_can_t_be_named(named: Any, endpoint: str, attacker: Attacker) -> None:
    named(endpoint)
    refused(attacker, lambda: credentials.at(endpoint, ACCOUNT))


def test_a_connection_string_of_a_command_is_the_users_word(attacker: Attacker) -> None:
    accounts.open_account(ACCOUNT, f"http://127.0.0.2:{attacker.port}/acct")
    with pytest.raises(ShareError):
        accounts.open_account("acct2", None, login=True).using("x").__enter__().list("")
    assert attacker.asked and set(attacker.asked) <= {
        "acct2.file.core.windows.net",
        "169.254.169.254",
        "login.microsoftonline.com",
    }


# Redirects.


class Redirecting(BaseHTTPRequestHandler):
    """Sends whoever asks to the attacker, with the query that he came with."""

    target: ClassVar[str]
    seen: ClassVar[list[str]]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        self.send_response(307)
        self.send_header("Location", self.target + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_HEAD = do_DELETE = do_GET

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def redirecting(attacker: Attacker) -> Iterator[str]:
    handler = type("Handler", (Redirecting,), {"target": f"http://127.0.0.2:{attacker.port}", "seen": []})
    server = ThreadingHTTPServer(("127.0.0.3", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    credentials.name_endpoint(f"http://127.0.0.3:{server.server_port}/ACCOUNT")
    yield f"http://127.0.0.3:{server.server_port}/acct/data"
    assert handler.seen
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("credential", [Credential(KEY), Credential(sas=SAS)], ids=["key", "sas"])
def test_the_client_follows_no_answer_to_another_host(
    redirecting: str, attacker: Attacker, credential: Credential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(credentials, "_remembered", {ACCOUNT: credential})
    credentials.name_endpoint(redirecting.removesuffix("/data"))
    share = open_share(redirecting)
    for ask in (lambda: share.read("x"), lambda: share.write("x", b"1"), lambda: share.list("")):
        with pytest.raises(ShareError) as error:
            ask()
        assert "307" in str(error.value) and "hush" not in str(error.value)
    assert attacker.came == 0


def test_agents_follow_no_answer_to_another_host(redirecting: str, attacker: Attacker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    share = open_control(redirecting, SAS, 1.0)
    for ask in (lambda: share.read_closed("x"), lambda: share.write_closed("x", [{}]), lambda: share.entries("")):
        with pytest.raises(ControlError) as error:
            ask()
        assert "307" in str(error.value) and "hush" not in str(error.value)
    assert attacker.came == 0


# Nodes.


@pytest.mark.parametrize("how", ["rclone", "cifs", "blobs"])
@pytest.mark.parametrize("to", ["https://devaccount.file.attacker.example", "http://127.0.0.2:1/devaccount", ""])
def test_a_node_uses_what_it_was_told_for_that_address_only(how: str, to: str, azure: Any, tmp_path: Path) -> None:
    """Whoever changes the plan on the share gets nothing: the credential came with the address that it is for."""
    volume = blob_volume(azure) if how == "blobs" else files_volume(azure)
    told = {"0": {"key": azure.key, "endpoint": volume["endpoint"]}}
    changed = {**volume, "how": how.replace("blobs", "rclone"), "endpoint": to}
    azure.reset()
    failure = Node(tmp_path / "node", [changed], told).failure()
    assert "what opens it is for" in str(failure) and azure.key not in str(failure)
    assert list(tmp_path.rglob("smb")) == []
