"""What a node says of its network: its interfaces with the address that gloo binds, its machine, its ports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from islands import Island, unavailable

from mlflow_batchai.node import addresses, network

ROOT = Path(__file__).parents[2]

apart = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture
def island(tmp_path: Path) -> Iterator[Island]:
    made = Island("lonely", tmp_path)
    yield made
    made.close()


@pytest.fixture
def see(island: Island) -> Callable[..., list[dict[str, object]]]:
    """``interfaces(only)`` on the island, and whether what is seen without ctypes is the same."""

    def look(only: str | None = None, blind: bool = False) -> list[dict[str, object]]:
        code = [
            "import sys, json",
            f"sys.path.insert(0, {str(ROOT)!r})",
            "sys.modules['ctypes'] = None" if blind else "",
            "from mlflow_batchai.node import network",
            f"try: found = network.interfaces({only!r})",
            "except network.InterfaceError as error: found = str(error)",
            "print(json.dumps(found))",
        ]
        return json.loads(island.run(sys.executable, "-I", "-S", "-c", "\n".join(code)))

    return look


def test_this_machine() -> None:
    assert network.interfaces("lo") == [network.LOOPBACK]
    assert "lo" not in [found["name"] for found in network.interfaces()]
    assert network.machine() == network.machine()
    low, _, high = network.port_range().partition("-")
    assert 0 < int(low) < int(high) < 65536


def test_an_unknown_interface() -> None:
    with pytest.raises(network.InterfaceError, match=r"^has no network interface eth99; it has lo \(127\.0\.0\.1\)"):
        network.interfaces("eth99")


def test_every_interface_once() -> None:
    """Also where the C library can't be asked."""
    assert {found.name for found in addresses._by_ioctl()} == {found.name for found in addresses.all_addresses()}


@apart
@pytest.mark.parametrize("blind", [False, True])
def test_interfaces(island: Island, see: Callable[..., list[dict[str, object]]], blind: bool) -> None:
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
        "link add name near0 type bridge",
        "address add fe80::77/64 dev near0 nodad",
        "link set near0 up",
        "link add name down0 type bridge",
        "address add 10.3.0.5/24 dev down0",
        "link add name empty0 type bridge",
        "link set empty0 addrgenmode none",
        "link set empty0 up",
    ]:
        island.ip(line)
    assert see(blind=blind) == [
        {"name": "plain0", "address": "10.0.0.5", "family": 4},
        {"name": "six0", "address": "fd00:2::5", "family": 6},
        {"name": "vpn0", "address": "10.8.0.2", "family": 4},
    ]
    assert see("vpn0", blind) == [{"name": "vpn0", "address": "10.8.0.2", "family": 4}]
    for name, why in {"down0": "down", "near0": "only the link-local address fe80::", "empty0": "no address"}.items():
        told = str(see(name, blind))
        assert told.startswith(f"can't use its network interface {name}; it has lo (127.0.0.1), ")
        assert f" {name} ({why}" in told


@apart
def test_machines_differ(island: Island) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mlflow_batchai.node import network; print(network.machine())"
    there = island.run(sys.executable, "-I", "-S", "-c", code).strip()
    assert there != network.machine()
    assert there.split()[0] == network.machine().split()[0]
