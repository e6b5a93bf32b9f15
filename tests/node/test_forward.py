"""A forwarded port carries requests and answers of any size, both ways, whoever ends first."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from mlflow_batchai.node import forward


@pytest.fixture
def echo() -> Iterator[int]:
    """A server on ::1 that answers all that it was sent, when it has all; its port."""
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on this machine")

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(read(connection)[::-1])

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    thread.join()
    server.close()


def read(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def ask(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 10.0) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return read(connection)


def test_forward(echo: int) -> None:
    port = forward.start("::1", echo)
    big = bytes(range(256)) * 8192
    assert ask(port, big) == big[::-1]
    assert [ask(port, b"%d" % number) for number in range(10)] == [b"%d" % number for number in range(10)]


def test_a_target_that_is_gone_closes_the_connection() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = forward.start("127.0.0.1", closed.getsockname()[1])
        assert ask(port, b"") == b""
