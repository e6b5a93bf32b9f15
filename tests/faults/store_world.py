"""A gate before a real MLflow server, that fails as servers and proxies do."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mlflow_server import MlflowServer

NOT_PASSED_ON = ("host", "connection", "content-length", "transfer-encoding")

Fault = Callable[["_Handler"], None]


class Gate:
    """What clients take for the server.

    Attributes:
        fault: answers a request in the server's place; None: requests go on to it.
        only: which requests ("PUT /api/...") the fault is for.
        failed: those that it was, in their order.
        taken: the requests that the server took and whose answer went back whole, as (method, path, body).
    """

    def __init__(self, server: MlflowServer) -> None:
        self.server = server
        self.fault: Fault | None = None
        self.only: Callable[[str], bool] = lambda line: True
        self.failed: list[str] = []
        self.taken: list[tuple[str, str, bytes]] = []
        self.released = threading.Event()
        self._http = _Quiet(("127.0.0.1", 0), _Handler)
        self._http.gate = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def failing(self, fault: Fault, only: Callable[[str], bool] = lambda line: True) -> Iterator[None]:
        """For the time of the block it fails so."""
        self.failed, self.only, self.fault = [], only, fault
        self.released.clear()
        try:
            yield
        finally:
            self.fault = None
            self.released.set()

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def points(self, run_id: str) -> list[tuple[str, int]]:
        """(key, step) of each metric that a call of ``log_batch`` brought, as often as it did."""
        found = []
        for _, path, body in self.taken:
            if path.endswith("/runs/log-batch"):
                call = json.loads(body)
                if call["run_id"] == run_id:
                    found += [(metric["key"], int(metric.get("step", 0))) for metric in call.get("metrics", [])]
        return found

    def artifacts(self) -> list[str]:
        """The names of the files that were sent, as often as they were."""
        return [path.rpartition("/artifacts/")[2] for method, path, _ in self.taken if method == "PUT"]


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    gate: Gate

    def handle_error(self, request: Any, address: Any) -> None:
        """Clients that are gone are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    server: _Quiet

    def _any(self) -> None:
        gate = self.server.gate
        self.body = self._read()
        self.close_connection = True
        fault = gate.fault
        line = f"{self.command} {self.path}"
        if fault is not None and gate.only(line):
            gate.failed.append(line)
            fault(self)
            return
        status, data = self.forwarded()
        self.answer(status, data)
        gate.taken.append((self.command, self.path, self.body))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""  # so `requests` sends an empty file
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def forwarded(self) -> tuple[int, bytes]:
        """The server's answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.gate.server.port, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON}
            try:
                connection.request(self.command, self.path, self.body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except OSError:  # as a proxy does whose server is down
                return 502, b"<html>Bad gateway</html>"

    def answer(self, status: int, data: bytes, whole: bool = True, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data) if whole else len(data) + 100))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Nothing to see."""


def status(code: int, **headers: str) -> Fault:
    """Answers with that code, and a page for people."""
    return lambda handler: handler.answer(code, b"<html>" + b"no " * 2000 + b"</html>", **headers)


def cut(handler: _Handler) -> None:
    """Has the server do it, and loses half of its answer."""
    code, data = handler.forwarded()
    handler.answer(code, data, whole=False)


def hang_up(handler: _Handler) -> None:
    """Closes the connection without a word."""


def hang(handler: _Handler) -> None:
    """Accepts and never answers, as long as the fault lasts; then it closes the connection."""
    handler.server.gate.released.wait()
