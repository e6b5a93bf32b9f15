"""An Azure Files endpoint (and a small blob endpoint) over real directories, as a process of its own.

    with AzureServer(tmp_path) as server:
        folder = server.share("data")                       # a share is this directory
        ShareClient(server.endpoint, "data", credential=server.key)

Written from Microsoft's public description of the service. It checks every signature, and every right of a SAS, with code of its own.
``fail`` makes a part of the requests fail, ``latency`` slows them, ``requests`` says what came.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import secrets
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azure_signing import make_sas

ACCOUNT = "devaccount"
NEWEST = "2026-12-06"  # Microsoft's clients: Python 12.27 asks for 2026-10-06, rclone 1.75 for 2026-12-06 (blobs)


@dataclass(frozen=True)
class Request:
    """One request as it came.

    Attributes:
        path: decoded, without the account: ``/share/folder/file``.
        status: 0 where the connection was cut, or as long as no answer was sent.
        received, sent: bytes of content, headers not counted.
        time: seconds since 1970 at which the whole request was there; ``seconds`` until the answer was sent.
        error: the service's error code, "cut" for a cut connection, else "".
    """

    service: str
    method: str
    path: str
    comp: str
    restype: str
    status: int
    received: int
    sent: int
    time: float
    seconds: float
    agent: str
    error: str


class AzureServer:
    """The endpoint, started when this is made, ended by ``stop`` (or with the process that made it).

    Attributes:
        endpoint, blob_endpoint: ``http://ADDRESS:PORT/devaccount`` (``https`` with a certificate).
        account, key: of the storage account; the key is base64.
        pid: of the server's process.
    """

    def __init__(
        self, root: Path, address: str = "127.0.0.1", certificate: Path | None = None, private_key: Path | None = None
    ) -> None:
        self.root = root
        self.account = ACCOUNT
        self.key = base64.b64encode(secrets.token_bytes(64)).decode()
        self._lock = threading.Lock()
        # Keys go over the pipe: command lines are for everybody to read.
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid
        files = [None if file is None else str(file) for file in (certificate, private_key)]
        ports = self._tell("start", root=str(root), address=address, account=self.account, key=self.key, tls=files)
        scheme = "http" if certificate is None else "https"
        self.endpoint = f"{scheme}://{address}:{ports['file']}/{self.account}"
        self.blob_endpoint = f"{scheme}://{address}:{ports['blob']}/{self.account}"

    def __enter__(self) -> AzureServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _tell(self, command: str, **arguments: object) -> Any:
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, "the storage endpoint has ended"
        return json.loads(line)

    def share(self, name: str) -> Path:
        """The directory of a share; made where it isn't there."""
        path = self.root / "file" / name
        path.mkdir(exist_ok=True)
        return path

    def container(self, name: str) -> Path:
        """The directory of a blob container; made where it isn't there. A blob ``a/b`` is the file ``a/b`` in it."""
        path = self.root / "blob" / name
        path.mkdir(exist_ok=True)
        return path

    def url(self, share: str, folder: str = "") -> str:
        """The address of a share, or of a folder in it, without a SAS."""
        return "/".join(part for part in (self.endpoint, share, folder) if part)

    def sas(
        self,
        share: str | None = None,
        permissions: str = "rcwdl",
        seconds: float = 3600,
        starts: float = -300,
        **fields: str,
    ) -> str:
        """A SAS (no "?") for a share, for a file in it (``share/path``), or for the account; valid from ``starts`` to ``seconds`` from now.

        ``fields`` replace or add signed fields: ``srt="o"``, ``ss="b"``.
        """
        return make_sas(self.account, self.key, "file", share, permissions, seconds, starts, **fields)

    def container_sas(
        self, container: str, permissions: str = "racwdl", seconds: float = 3600, starts: float = -300, **fields: str
    ) -> str:
        """A SAS (no "?") for a blob container, or for a blob in it (``container/blob``)."""
        return make_sas(self.account, self.key, "blob", container, permissions, seconds, starts, **fields)

    def requests(self) -> list[Request]:
        """All requests since the start or the last ``reset``, in the order in which they came."""
        return [Request(**entry) for entry in self._tell("requests")]

    def reset(self) -> None:
        """Forget the requests."""
        self._tell("reset")

    def fail(
        self,
        rate: float = 0.1,
        kinds: Sequence[str] = ("503", "cut"),
        seed: int = 1,
        path: str = "",
        methods: Sequence[str] = (),
        comp: str = "",
        retry_after: float = 1.0,
        limit: int | None = None,
    ) -> None:
        """Make a part ``rate`` of the requests fail from now on; 0 ends that.

        Kinds: ``503`` (ServerBusy: how Azure Files throttles), ``500`` (InternalError), ``429`` (TooManyRequests with ``Retry-After``, as
        gateways throttle; Microsoft's Python client doesn't try again after it, rclone does), ``cut-before`` (nothing was done), ``cut-after`` (it was done, no
        answer), ``cut-middle`` (it was done, half an answer), ``cut`` (one of the three), ``full`` (ShareSizeLimitReached). Only
        requests whose path holds ``path``, whose method is one of ``methods`` and whose query says ``comp`` (empty: any) fail, and
        at most ``limit`` of them.
        """
        self._tell(
            "fail",
            rate=rate,
            kinds=list(kinds),
            seed=seed,
            path=path,
            methods=list(methods),
            comp=comp,
            retry_after=retry_after,
            limit=limit,
        )

    def quota(self, share: str, size: int | None) -> None:
        """The most bytes that a share may hold; None for no limit. What would exceed it gets 403 ShareSizeLimitReached."""
        self._tell("quota", share=share, size=size)

    def latency(self, seconds: float) -> None:
        """Let every answer come that much later."""
        self._tell("latency", seconds=seconds)

    def newest(self, version: str = NEWEST) -> None:
        """Be an older service: refuse a later x-ms-version (400 InvalidHeaderValue), and data in Create File before 2026-10-06."""
        self._tell("newest", version=version)

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=5)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def self_signed(folder: Path, address: str = "127.0.0.1") -> tuple[Path, Path]:
    """A self-signed certificate for an address and its private key: (certificate, key), in PEM files of a folder."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "storage endpoint of a test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "certificate.pem", folder / "private.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return certificate, private


def commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """The server's process: commands on standard input, an answer to each on standard output; the end of input ends it."""
    from azure_blobs import Blobs, blob_needs
    from azure_files import Files, needs
    from azure_http import listen
    from azure_site import Faults, Site
    from azure_store import Store

    given = commands()
    start = next(given)
    root = Path(start["root"])
    files, blobs = Store(root / "file"), Store(root / "blob")
    site = Site(
        start["account"],
        start["key"],
        {"file": Files(files).answer, "blob": Blobs(blobs).answer},
        {"file": needs, "blob": blob_needs},
        NEWEST,
    )
    context = None
    if start["tls"][0]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*start["tls"])
    answer: object = {service: listen(site, service, start["address"], context) for service in ("file", "blob")}
    while True:
        print(json.dumps(answer), flush=True)
        command = next(given, None)
        if command is None:
            os._exit(0)  # threads wait in sockets
        name = command.pop("do")
        answer = None
        if name == "requests":
            answer = list(site.record)
        elif name == "reset":
            site.record = []
        elif name == "latency":
            site.latency = command["seconds"]
        elif name == "newest":
            site.newest = command["version"]
        elif name == "quota":
            files.quotas.pop(command["share"], None)
            if command["size"] is not None:
                files.quotas[command["share"]] = command["size"]
        elif name == "fail":
            command["kinds"] = tuple(command["kinds"])
            site.faults = Faults(chance=random.Random(command.pop("seed")), **command)


if __name__ == "__main__":
    main()
