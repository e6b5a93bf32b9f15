"""What our SSH costs over bare paramiko: many nodes connected at once, and one command on an open connection.

    python benchmarks/ssh_connect.py [--pairs 5] [--connections 64] [--commands 50]

Four sshd processes of this machine stand for the nodes. Each round runs bare, ours, bare: the ratio bare/bare says how much of
ours/bare is noise. Nearly all of the time is sshd's own, on the same cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from sshd import SshNode, SshNodes, missing

from mlflow_batchai.engines.parallel import AT_ONCE
from mlflow_batchai.engines.shell.connection import Connection, open_all
from mlflow_batchai.engines.shell.target import resolve


def bare_client(nodes: SshNodes, node: SshNode) -> paramiko.SSHClient:
    """A connection as paramiko's own documentation makes it."""
    client = paramiko.SSHClient()
    client.load_host_keys(str(nodes.known_hosts))
    client.connect(
        node.address,
        nodes.port,
        nodes.user,
        key_filename=str(nodes.key_file),
        allow_agent=False,
        look_for_keys=False,
        timeout=60,
    )
    return client


def bare_command(client: paramiko.SSHClient) -> None:
    """One command to its end."""
    _, output, _ = client.exec_command("true")
    output.read()
    if output.channel.recv_exit_status():
        sys.exit("the command failed")


def our_command(connection: Connection) -> None:
    """One command to its end."""
    if connection.run(["true"]).code:
        sys.exit("the command failed")


def our_connection(nodes: SshNodes, node: SshNode, number: int) -> Connection:
    """A connection that isn't open yet, to a name of its own."""
    name = f"{nodes.user}@{node.address}:{nodes.port}"
    target = resolve(name, key_file=nodes.key_file, known_hosts=nodes.known_hosts, timeout=60)
    return Connection(dataclasses.replace(target, name=f"node{number}"))


def bare(nodes: SshNodes, count: int) -> float:
    """Seconds to connect and run a command everywhere, by one thread a connection."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        clients = list(pool.map(lambda number: bare_client(nodes, nodes[number % len(nodes)]), range(count)))
        list(pool.map(bare_command, clients))
    taken = time.perf_counter() - begun
    for client in clients:
        client.close()
    return taken


def ours(nodes: SshNodes, count: int) -> float:
    """The same by ``open_all``."""
    begun = time.perf_counter()
    connections = [our_connection(nodes, nodes[number % len(nodes)], number) for number in range(count)]
    problems = [problem for problem in open_all(connections).values() if problem]
    if problems:
        sys.exit(str(problems[0]))
    with ThreadPoolExecutor(min(AT_ONCE, count)) as pool:
        list(pool.map(our_command, connections))
    taken = time.perf_counter() - begun
    for connection in connections:
        connection.close()
    return taken


def milliseconds(command: Callable[[], None], count: int) -> list[float]:
    """How long each of several commands takes, after one to warm up."""
    times = []
    for _ in range(count + 1):
        begun = time.perf_counter()
        command()
        times.append(1000 * (time.perf_counter() - begun))
    return times[1:]


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--commands", type=int, default=50)
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    rounds: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory(prefix="ssh-connect-") as scratch:
        nodes = SshNodes(Path(scratch) / "nodes")
        try:
            for number in range(options.pairs):
                count = options.connections
                rounds.append((bare(nodes, count), ours(nodes, count), bare(nodes, count)))
                print(f"round {number + 1} of {options.pairs} done", file=sys.stderr)
            with our_connection(nodes, nodes[0], 0) as connection:
                opened = milliseconds(lambda: our_command(connection), options.commands)
            client = bare_client(nodes, nodes[0])
            nagle = milliseconds(lambda: bare_command(client), options.commands)
            transport = client.get_transport()
            assert transport
            transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nodelay = milliseconds(lambda: bare_command(client), options.commands)
            client.close()
        finally:
            nodes.stop()
    print(
        f"{options.pairs} rounds of bare, ours, bare; {options.connections} connections to {len(nodes)} servers, "
        f"{os.cpu_count()} cores; medians (min to max)\n"
    )
    _row(
        "connect everywhere and run one command: ours / bare (at most 1.5)", [2 * own / (one + two) for one, own, two in rounds]
    )
    _row("connect everywhere and run one command: bare / bare", [two / one for one, _, two in rounds])
    _row("connect everywhere and run one command: ours (s)", [own for _, own, _ in rounds])
    _row("one command on an open connection: ours (ms)", opened)
    _row("one command on an open connection: bare paramiko (ms)", nagle)
    _row("one command on an open connection: bare paramiko with TCP_NODELAY (ms)", nodelay)


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
