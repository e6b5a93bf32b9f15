"""A server as a chat's webhook is, for tests of what is told there."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Channel:
    """Attributes: ``posts`` has (path, content type, body) of each; ``status`` is the answer."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, str, Any]] = []
        self.status = 200
        channel = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                channel.posts.append((self.path, self.headers["Content-Type"], json.loads(body)))
                self.send_response(channel.status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
