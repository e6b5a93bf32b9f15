"""Passes connections to a port of this machine's loopback on to an address elsewhere.

Horovod's rendezvous client takes what stands before the first colon for the host, and asks for IPv4 only (0.28.1,
``third_party/HTTPRequest``), so ranks reach a rendezvous server on an IPv6 address through this. Its connections are short:
one a request.
"""

import selectors
import socket
import socketserver
import threading

CONNECT_SECONDS = 10.0
_CHUNK = 65536


def start(address: str, port: int) -> int:
    """Forward from now until this process ends.

    Returns:
        The port on 127.0.0.1.
    """
    server = _Server(("127.0.0.1", 0), _Handler)
    server.target = (address, port)
    threading.Thread(target=server.serve_forever, name="forward", daemon=True).start()
    return int(server.server_address[1])


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 256
    target = ("", 0)

    def handle_error(self, request: object, client_address: object) -> None:
        """One connection has failed: who made it sees it closed, and tries again."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        near = self.request
        with socket.create_connection(self.server.target, CONNECT_SECONDS) as far, selectors.DefaultSelector() as selector:
            far.settimeout(None)
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while selector.get_map():
                for event, _ in selector.select():
                    data = event.fileobj.recv(_CHUNK)  # type: ignore[union-attr]
                    if data:
                        event.data.sendall(data)
                    else:
                        selector.unregister(event.fileobj)
                        event.data.shutdown(socket.SHUT_WR)
