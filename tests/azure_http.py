"""The wire of the storage endpoint: HTTP/1.1 with kept connections, a thread for each; faults on demand; the record of requests.

An answer goes out in one write without Nagle's delay (two writes cost 40 ms each), a file's content by ``sendfile``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import sys
import threading
import time
import traceback
import uuid
from http import HTTPStatus
from urllib.parse import unquote

from azure_answers import Answer, Call, Part, Refusal, http_date
from azure_signing import parse_query
from azure_site import Site

BODY_LIMIT = 256 << 20
FAULTS = {"500": "InternalError", "503": "ServerBusy", "429": "TooManyRequests", "full": "ShareSizeLimitReached"}
SMALL = 1 << 16  # bytes of content that are copied into the same write as the headers


class Cut(Exception):
    """The connection is to break now."""


def listen(site: Site, service: str, address: str, context: ssl.SSLContext | None) -> int:
    """Serve one service on a free port until the process ends; returns the port."""
    listener = socket.create_server((address, 0), backlog=512)

    def accept() -> None:
        while True:
            client, peer = listener.accept()
            threading.Thread(target=connection, args=(client, peer[0]), daemon=True).start()

    def connection(client: socket.socket, peer: str) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            secured = context.wrap_socket(client, server_side=True) if context else client
        except OSError:
            client.close()
            return
        with contextlib.closing(secured), contextlib.suppress(OSError, ValueError):
            Connection(site, service, secured, peer, context is not None).run()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


class Connection:
    """One client's connection: requests one after the other."""

    def __init__(self, site: Site, service: str, client: socket.socket, peer: str, secure: bool) -> None:
        self.site = site
        self.service = service
        self.client = client
        self.peer = peer
        self.secure = secure
        self.rest = b""

    def run(self) -> None:
        while head := self.head():
            call, keep, unread = self.request(head)
            started = time.time()
            entry: dict[str, object] = {
                "service": self.service,
                "method": call.method,
                "path": call.logical,
                "comp": call.comp,
                "restype": call.restype,
                "status": 0,
                "received": len(call.body),
                "sent": 0,
                "time": started,
                "seconds": 0.0,
                "agent": call.headers.get("user-agent", ""),
                "error": "",
            }
            self.site.record.append(entry)
            try:
                self.exchange(call, entry, keep, unread)
            except Cut:
                entry["error"] = "cut"
                # With a linger of 0 seconds closing is a reset: the client reads an error, no short answer.
                self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            finally:
                entry["seconds"] = time.time() - started
            if not keep:
                return

    def head(self) -> bytes:
        """The next request's line and headers; empty where the client has gone."""
        data = self.rest
        while (end := data.find(b"\r\n\r\n")) < 0:
            more = self.client.recv(SMALL)
            if not more or len(data) > SMALL:
                return b""
            data += more
        self.rest = data[end + 4 :]
        return data[:end]

    def request(self, head: bytes) -> tuple[Call, bool, bool]:
        """The request with its body; whether the connection goes on after it; whether the body was left unread."""
        line, *lines = head.decode("latin-1").split("\r\n")
        method, target, protocol = line.split(" ")
        headers: dict[str, str] = {}
        for text in lines:
            name, _, value = text.partition(":")
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]},{value}" if name in headers else value
        raw_path, _, raw_query = target.partition("?")
        account, _, below = unquote(raw_path).lstrip("/").partition("/")
        share, _, path = below.partition("/")
        segments = tuple(path.strip("/").split("/")) if path.strip("/") else ()
        call = Call(
            method,
            raw_path,
            parse_query(raw_query),
            headers,
            b"",
            self.service,
            account,
            share,
            segments,
            self.secure,
            self.peer,
        )
        keep = protocol == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        if "transfer-encoding" in headers or int(headers.get("content-length") or 0) > BODY_LIMIT:
            return call, False, True
        if headers.get("expect", "").lower() == "100-continue":
            self.client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        call.body = self.body(int(headers.get("content-length") or 0))
        return call, keep, False

    def body(self, length: int) -> bytes | bytearray:
        if length <= len(self.rest):
            body, self.rest = self.rest[:length], self.rest[length:]
            return body
        whole = bytearray(length)
        view = memoryview(whole)
        have = len(self.rest)
        view[:have], self.rest = self.rest, b""
        while have < length:
            got = self.client.recv_into(view[have:])
            if not got:
                raise ConnectionResetError
            have += got
        return whole

    def exchange(self, call: Call, entry: dict[str, object], keep: bool, unread: bool) -> None:
        """Answer one request, or fail it as the faults say."""
        site = self.site
        if site.latency:
            time.sleep(site.latency)
        fault = site.faults.draw(call)
        if fault == "cut-before":
            raise Cut
        extra = {}
        try:
            if fault in FAULTS:
                if fault == "429" and site.faults.retry_after:
                    extra["Retry-After"] = f"{site.faults.retry_after:g}"
                raise Refusal(FAULTS[fault])
            if unread:
                raise Refusal("MissingContentLengthHeader")
            answer = site.serve(call)
        except Refusal as refusal:
            answer = refusal.answer()
        except Exception:
            traceback.print_exc(file=sys.stderr)
            answer = Refusal("InternalError").answer()
        answer.headers.update(extra)
        entry["error"] = answer.headers.get("x-ms-error-code", "")
        try:
            if fault == "cut-after":
                raise Cut
            self.send(call, answer, entry, keep, fault == "cut-middle")
        finally:
            if isinstance(answer.body, Part):
                os.close(answer.body.descriptor)

    def send(self, call: Call, answer: Answer, entry: dict[str, object], keep: bool, cut: bool) -> None:
        body = answer.body
        part = body if isinstance(body, Part) else None
        length = part.length if part else len(body)  # type: ignore[arg-type]
        lines = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
            f"Content-Length: {length if answer.length is None or call.method != 'HEAD' else answer.length}",
            f"Date: {http_date(time.time())}",
            "Server: Windows-Azure-File/1.0 Microsoft-HTTPAPI/2.0",
            f"x-ms-request-id: {uuid.uuid4()}",
            f"x-ms-version: {call.headers.get('x-ms-version', self.site.newest)}",
        ]
        if "x-ms-client-request-id" in call.headers:
            lines.append(f"x-ms-client-request-id: {call.headers['x-ms-client-request-id']}")
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        if not keep:
            lines.append("Connection: close")
        data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
        if call.method == "HEAD":
            length = 0
        elif part is None:
            data += body  # type: ignore[operator]
        elif length <= SMALL:
            data += os.pread(part.descriptor, length, part.offset)
            part = None
        if cut:
            self.client.sendall(data[: len(data) // 2])
            raise Cut
        entry["status"], entry["sent"] = answer.status, length
        if part is None or call.method == "HEAD":
            self.client.sendall(data)
        else:
            self.stream(data, part)

    def stream(self, data: bytes, part: Part) -> None:
        """Headers and a file's content, from the file to the socket."""
        offset, end = part.offset, part.offset + part.length
        if self.secure:
            self.client.sendall(data)
            while offset < end:
                piece = os.pread(part.descriptor, min(1 << 20, end - offset), offset)
                if not piece:
                    raise Cut  # the file has become shorter
                self.client.sendall(piece)
                offset += len(piece)
            return
        self.client.sendall(data, socket.MSG_MORE)
        while offset < end:
            sent = os.sendfile(self.client.fileno(), part.descriptor, offset, end - offset)
            if not sent:
                raise Cut
            offset += sent
