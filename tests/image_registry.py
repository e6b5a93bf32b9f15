"""A registry with one image and one user: as much of the OCI distribution protocol as pulling needs, over plain HTTP."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar"


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def image_registry(layer: Path, name: str, environment: list[str], username: str, password: str) -> Iterator[str]:
    """Serve ``NAME:1`` to that user alone; yields the registry's address (``127.0.0.1:PORT``).

    Args:
        layer: the image's only layer, a tar file.
        environment: the image's variables, as ``NAME=value``.
    """
    with layer.open("rb") as file:
        layer_digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": environment},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": len(config), "digest": _digest(config)},
            "layers": [{"mediaType": LAYER, "size": layer.stat().st_size, "digest": layer_digest}],
        }
    ).encode()
    token = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
    answers = {
        "/v2/": ("application/json", b"{}"),
        f"/v2/{name}/manifests/1": (MANIFEST, manifest),
        f"/v2/{name}/manifests/{_digest(manifest)}": (MANIFEST, manifest),
        f"/v2/{name}/blobs/{_digest(config)}": (CONFIG, config),
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != token:
                self._answer(401, "application/json", b'{"errors": [{"code": "UNAUTHORIZED", "message": "who are you?"}]}')
            elif self.path.endswith(layer_digest):
                self._answer(200, LAYER, layer.read_bytes())
            elif self.path in answers:
                self._answer(200, *answers[self.path])
            else:
                self._answer(404, "application/json", b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "no such image"}]}')

        do_HEAD = do_GET

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="tests"')
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", _digest(body))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
