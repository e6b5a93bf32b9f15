"""Horovod's rendezvous server, run by the training interpreter; node 0's agent starts it and closes its input to end it."""

from __future__ import annotations

import json
import socketserver
import sys
import threading


def main(arguments: list[str]) -> int:
    """``rendezvous ADDRESS HOSTS SIZE``: serve, and say the port as one JSON line on standard output.

    Args:
        arguments: the IPv4 address to listen on, hosts as ``node-0:2,node-1:2``, and the number of ranks.

    Returns:
        0 when standard input was closed; 3 with a sentence on standard error where Horovod can't be imported.
    """
    address, hosts, size = arguments
    try:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer, RendezvousServer
    except ImportError as error:
        sys.stderr.write(
            f"Horovod can't be imported by {sys.executable} ({error}); build a wheel for it with"
            f" `batchai horovod build --python {sys.executable}` and install that.\n"
        )
        return 3

    class Http(RendezvousHTTPServer):  # type: ignore[misc]
        # HTTPServer's server_bind asks the name server for the address's name: seconds, where there is none.
        def server_bind(self) -> None:
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = self.server_address[0], self.server_address[1]

    class Server(RendezvousServer):  # type: ignore[misc]
        # Horovod's start() listens on every address of the machine; ranks need just one.
        def start(self, handler_cls: type = RendezvousHandler) -> int:
            self._httpd = Http((address, 0), handler_cls, 0)
            self._listen_thread = threading.Thread(target=self._httpd.serve_forever, daemon=True)
            self._listen_thread.start()
            return int(self._httpd.server_address[1])

    server = Server()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(hosts), int(size)))
    sys.stdout.write(json.dumps({"port": port}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0
