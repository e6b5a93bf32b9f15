"""A node's network: its interfaces with the address that gloo binds, its machine, its ports, and the TCP test of another node."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from islands import Island
from netns import unavailable

from mlflow_batchai.agent import network

ROOT = Path(__file__).parents[2]

apart = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture
def island(tmp_path: Path) -> Iterator[Island]:
    made = Island("lonely", tmp_path)
    yield made
    made.close()


@pytest.fixture
def see(island: Island) -> Callable[..., list[dict[str, object]]]:
    """``interfaces(only)`` on the island."""

    def look(only: str | None = None) -> list[dict[str, object]]:
        code = [
            "import sys, json",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "from mlflow_batchai.agent import network",
            f"try: found = network.interfaces({only!r})",
            "except network.InterfaceError as error: found = str(error)",
            "print(json.dumps(found))",
        ]
        return json.loads(island.run(sys.executable, "-I", "-S", "-c", "\n".join(code)))

    return look


@pytest.fixture
def listener() -> Iterator[network.Listener]:
    made = network.Listener("job/1 node-0")
    yield made
    made.close()


def test_this_machine() -> None:
    assert network.interfaces("lo") == [network.LOOPBACK]
    assert "lo" not in [found["name"] for found in network.interfaces()]
    assert network.machine() == network.machine()
    low, _, high = network.port_range().partition("-")
    assert 0 < int(low) < int(high) < 65536


def test_an_unknown_interface() -> None:
    with pytest.raises(network.InterfaceError, match=r"^has no network interface eth99; it has lo \(127\.0\.0\.1\)"):
        network.interfaces("eth99")


@apart
def test_interfaces(island: Island, see: Callable[..., list[dict[str, object]]]) -> None:
    for line in [
        "tuntap add mode tun name vpn0",
        "address add 10.8.0.2 peer 10.8.0.1 dev vpn0",
        "link set vpn0 up",
        "link add name plain0 type bridge",
        "address add 10.0.0.5/24 dev plain0",
        "address add 10.0.0.6/24 dev plain0",
        "address add fd00:1::5/64 dev plain0 nodad",
        "link set plain0 up",
        "link add name six0 type bridge",
        "address add fd00:2::5/64 dev six0 nodad",
        "link set six0 up",
        "link add name down0 type bridge",
        "address add 10.3.0.5/24 dev down0",
        "link add name empty0 type bridge",
        "link set empty0 addrgenmode none",
        "link set empty0 up",
    ]:
        island.ip(line)
    assert see() == [{"name": "plain0", "address": "10.0.0.5"}, {"name": "vpn0", "address": "10.8.0.2"}]
    assert see("vpn0") == [{"name": "vpn0", "address": "10.8.0.2"}]
    for name, why in {"down0": "down", "six0": "no IPv4 address, which Horovod needs", "empty0": "no IPv4 address"}.items():
        told = str(see(name))
        assert told.startswith(f"can't use its network interface {name}; it has lo (127.0.0.1), ")
        assert f" {name} ({why}" in told


@apart
def test_machines_differ(island: Island) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mlflow_batchai.agent import network; print(network.machine())"
    there = island.run(sys.executable, "-I", "-S", "-c", code).strip()
    assert there != network.machine()
    assert there.split()[0] == network.machine().split()[0]


def test_a_connection_tells_who_answers(listener: network.Listener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = [listener.port, mute.getsockname()[1], closed.getsockname()[1]]
        found = [network.connect("127.0.0.1", port, "job/1 node-0", 0.5) for port in ports]
    assert found == [("", "127.0.0.1"), ("no answer", ""), ("refused", "")]
    assert network.connect("127.0.0.1", listener.port, "job/2 node-0") == ("another program answers there", "")


def test_strangers_do_not_hold_a_listener(listener: network.Listener) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):  # that send nothing, read nothing and stay
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        loud = stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        with contextlib.suppress(OSError):
            loud.sendall(b"GET / HTTP/1.1\r\n" * 10000)
        assert network.connect("127.0.0.1", listener.port, "job/1 node-0") == ("", "127.0.0.1")


def test_a_closed_listener_is_gone(listener: network.Listener) -> None:
    listener.close()
    listener.close()
    assert network.connect("127.0.0.1", listener.port, "job/1 node-0") == ("refused", "")
