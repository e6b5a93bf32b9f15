"""Listeners, probes, and the choice of addresses that follows from what each node found."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
from waiting import wait_for

from mlflow_batchai.node import descriptors, reach


def four(name: str, address: str) -> dict[str, object]:
    return {"name": name, "address": address, "family": 4}


def six(name: str, address: str) -> dict[str, object]:
    return {"name": name, "address": address, "family": 6}


A, B, C = [[four("eth0", f"10.0.0.{n}"), four("docker0", "172.17.0.1")] for n in (1, 2, 3)]
MIXED = [[four("eth0", f"10.0.0.{n}"), six("eth1", f"fd00::{n}")] for n in (1, 2)]
PORTS = ["32768-60999", "40000-50000", "50000-60000"]
NAMES = ["node-0 (a)", "node-1 (b)", "node-2 (c)"]
DO = "to the other nodes, or name another interface (networkInterface in the cluster document)"


def chosen(found: list[dict[str, object]] | None) -> list[str] | None:
    return found and [str(interface["address"]) for interface in found]


@pytest.mark.parametrize(
    ("candidates", "findings", "expected"),
    [
        pytest.param([A, B], {0: {1: ["", "refused"]}, 1: {0: ["", "refused"]}}, ["10.0.0.1", "10.0.0.2"], id="plain"),
        pytest.param(
            [A[::-1], B[::-1], C],
            {
                0: {1: ["refused", ""], 2: ["", ""]},
                1: {0: ["", ""], 2: ["", "refused"]},
                2: {0: ["refused", ""], 1: ["no", ""]},
            },
            ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
            id="reached-by-one-is-not-enough",
        ),
        pytest.param([A, B], {0: {1: ["", "no"]}, 1: {0: ["no answer", "no"]}}, None, id="one-way"),
        pytest.param([A, B], {0: {1: ["", None]}}, None, id="not-known-yet"),
        pytest.param(MIXED, {0: {1: ["", ""]}, 1: {0: ["", ""]}}, ["10.0.0.1", "10.0.0.2"], id="ipv4-first"),
        pytest.param(MIXED, {0: {1: ["", ""]}, 1: {0: ["no", ""]}}, ["fd00::1", "fd00::2"], id="one-family-for-all"),
        pytest.param(MIXED, {0: {1: ["", "no"]}, 1: {0: ["no", ""]}}, None, id="no-family-for-all"),
        pytest.param([A, []], {0: {1: []}, 1: {0: ["", ""]}}, None, id="nothing-to-reach"),
    ],
)
def test_choose(candidates: list, findings: reach.Findings, expected: list[str] | None) -> None:
    assert chosen(reach.choose(candidates, findings)) == expected


def test_hoping() -> None:
    found: reach.Findings = {0: {1: [None, ""]}, 1: {0: ["", ""]}}
    assert chosen(reach.choose([A, B], found)) == ["10.0.0.1", "172.17.0.1"]
    assert chosen(reach.choose([A, B], found, hoping=True)) == ["10.0.0.1", "10.0.0.2"]
    assert reach.choose([A, B], {0: {1: ["refused", "no answer"]}}, hoping=True) is None


@pytest.mark.parametrize(
    ("candidates", "findings", "expected"),
    [
        pytest.param(
            [A, B],
            {0: {1: ["refused", "no answer"]}},
            f"node-0 (a) can't reach node-1 (b) at 10.0.0.2 (eth0: refused), 172.17.0.1 (docker0: no answer):"
            f" open TCP ports 40000-50000 on node-1 (b) {DO}",
            id="what-is-known",
        ),
        pytest.param(
            [A, B, C],
            {
                0: {1: ["", "no"], 2: ["", "no"]},
                1: {0: ["", "no"], 2: ["", "no"]},
                2: {0: ["no answer", ""], 1: ["", "no"]},
            },
            f"node-2 (c) can't reach node-0 (a) at 10.0.0.1 (eth0: no answer): open TCP ports 32768-60999 on node-0 (a) {DO}",
            id="no-address-is-reached-by-all",
        ),
        pytest.param(
            MIXED,
            {0: {1: ["", "no"]}, 1: {0: ["no", ""]}},
            "Horovod needs addresses of one family, and the nodes reach each other with IPv4 and IPv6 mixed (node-0 (a) at fd00::1,"
            " node-1 (b) at 10.0.0.2): give them all the same, or name another interface (networkInterface in the cluster document)",
            id="families",
        ),
        pytest.param(
            [A, []],
            {},
            "node-1 (b) has no network interface that other nodes could reach; connect it to their network",
            id="nothing-to-reach",
        ),
    ],
)
def test_explain(candidates: list, findings: reach.Findings, expected: str) -> None:
    assert reach.choose(candidates, findings, hoping=True) is None
    count = len(candidates)
    assert reach.explain(NAMES[:count], candidates, findings, PORTS[:count]) == expected


@pytest.fixture
def listener() -> Iterator[reach.Listener]:
    made = reach.Listener("job/1 node-1")
    yield made
    made.close()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def test_a_probe_tells_who_answers(listener: reach.Listener) -> None:
    other = reach.Listener("job/1 node-2")
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        targets = {
            "it": ("127.0.0.1", listener.port, "job/1 node-1"),
            "another": ("127.0.0.1", other.port, "job/1 node-1"),
            "mute": ("127.0.0.1", mute.getsockname()[1], "job/1 node-1"),
            "closed": ("127.0.0.1", closed.getsockname()[1], "job/1 node-1"),
        }
        if has_ipv6():
            targets["six"] = ("::1", listener.port, "job/1 node-1")
        found = reach.probe(targets, seconds=0.5)
    other.close()
    assert found.pop("six", "") == ""
    assert found == {"it": "", "another": "another program answers there", "mute": "no answer", "closed": "refused"}


def test_a_probe_ends_when_all_is_known(listener: reach.Listener) -> None:
    started = time.monotonic()
    targets = dict.fromkeys(range(100), ("127.0.0.1", listener.port, "job/1 node-1"))
    assert reach.probe(targets, 30.0) == dict.fromkeys(range(100), "")
    assert time.monotonic() - started < 5.0


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """How many connections this process may have; the hard limit lets it have more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    looks: list[int] = []

    # What earlier tests have left may still be opening and closing files.
    def settled() -> bool:
        looks.append(len(os.listdir("/proc/self/fd")))
        return len(looks) > 4 and len(set(looks[-5:])) == 1

    wait_for(settled, 20, pause=0.1)
    used = looks[-1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + descriptors.SPARE + 10, hard))
    yield 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_peers_than_descriptors(listener: reach.Listener, few_descriptors: int) -> None:
    """Those that never answer don't keep the others from being tried."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as mute:
        silent = {f"mute {n}": ("127.0.0.1", mute.getsockname()[1], "x") for n in range(2 * few_descriptors)}
        there = {f"there {n}": ("127.0.0.1", listener.port, "job/1 node-1") for n in range(30)}
        found = reach.probe({**silent, **there}, seconds=0.3)
    assert found == {**dict.fromkeys(silent, "no answer"), **dict.fromkeys(there, "")}


def test_no_descriptor_at_all(listener: reach.Listener, few_descriptors: int) -> None:
    with contextlib.ExitStack() as stack:
        probe = reach.Probe({}, 0.3)  # it has what it needs itself

        def fill() -> None:
            with contextlib.suppress(OSError):
                while True:
                    stack.enter_context(open(os.devnull))

        fill()
        probe = stack.enter_context(contextlib.closing(probe))
        probe._targets = {"it": ("127.0.0.1", listener.port, "job/1 node-1")}
        probe._tokens = {"it": b"job/1 node-1\n"}
        probe._waiting.append("it")
        assert not probe.step(0.05)
        assert probe.results == {}
        until = time.monotonic() + 5.0
        while not probe.step(0.05):
            assert time.monotonic() < until
        assert probe.results == {"it": "too many open files"}


def test_more_descriptors_for_a_while(few_descriptors: int) -> None:
    def limit() -> int:
        return int(subprocess.run(["sh", "-c", "ulimit -n"], capture_output=True, text=True, check=True).stdout)

    before = limit()
    with descriptors.more(5):
        assert limit() == before
    with pytest.raises(KeyError), descriptors.more(200):
        assert limit() == before + 190
        assert descriptors.free() == 200
        raise KeyError
    assert limit() == before
    assert 0 < descriptors.free() <= few_descriptors


def test_a_check_ends_a_probe() -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(KeyboardInterrupt):
        reach.probe({0: ("127.0.0.1", mute.getsockname()[1], "x")}, 30.0, check)


def test_strangers_do_not_hold_a_listener(listener: reach.Listener) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):  # that send nothing, read nothing and stay
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        loud = stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        with contextlib.suppress(OSError):
            loud.sendall(b"GET / HTTP/1.1\r\n" * 10000)
        assert reach.probe({0: ("127.0.0.1", listener.port, "job/1 node-1")}) == {0: ""}


def test_a_closed_listener_is_gone(listener: reach.Listener) -> None:
    listener.close()
    listener.close()
    assert reach.probe({0: ("127.0.0.1", listener.port, "job/1 node-1")}) == {0: "refused"}
