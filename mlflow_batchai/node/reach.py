"""Which addresses of other nodes answer: a listener, a probe of many at once, and the choice that follows from it.

Two ranks whose addresses are of different families never connect (gloo, ``tcp/pair.cc``), so a choice is of one family.
Nothing here knows of jobs or plans.
"""

import collections
import errno
import os
import selectors
import socket
import threading
import time
from typing import Any, Callable, Dict, Hashable, List, Mapping, Optional, Sequence, Tuple

from mlflow_batchai.node import descriptors
from mlflow_batchai.node.network import Interface

# What one node found out of another: for each of its interfaces "" (reached), why not, or None (not known yet).
Findings = Mapping[int, Mapping[int, Sequence[Optional[str]]]]

PROBE_SECONDS = 5.0
LONGEST_ANSWER = 1024

_NO_ANSWER = "no answer"
_STRANGER = "another program answers there"
_REASONS = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "refused",
    errno.ETIMEDOUT: _NO_ANSWER,
    errno.ENETUNREACH: "no route",
    errno.EHOSTUNREACH: "no route",
}
_SHORT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class Listener:
    """Says who is here to everyone who connects: one line with a token, on every address, IPv4 and IPv6.

    It reads nothing, so a stranger learns the token (which is no secret) and can do no more.

    Attributes:
        port: where it listens.
    """

    def __init__(self, token: str) -> None:
        self._answer = (token + "\n").encode("utf-8", "backslashreplace")
        self._socket = _listening_socket()
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="network listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; may be called twice."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # on Linux this ends a waiting accept, which close() does not
        except OSError:
            return
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):
                    return
                time.sleep(0.05)  # out of descriptors, or the peer has gone already
                continue
            with connection:
                connection.setblocking(False)
                try:
                    connection.send(self._answer)  # a new connection's buffer holds it
                    connection.shutdown(socket.SHUT_WR)
                except OSError:
                    pass


def _listening_socket() -> socket.socket:
    try:
        found = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind(("::", 0))
            found.listen(256)
        except OSError:
            found.close()
            raise
        return found
    except OSError:  # IPv6 is switched off
        found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        found.bind(("0.0.0.0", 0))
        found.listen(256)
        return found


class Probe:
    """Connects to many listeners at once and learns which ones answer with their token.

    Those for which there are no descriptors are tried as soon as others are known.

    Args:
        targets: key -> (address, port, token).
        seconds: what hasn't answered that long after it was tried is out of reach.

    Attributes:
        results: key -> "" (reached), a few words why not, or None while it isn't known.
    """

    def __init__(self, targets: Mapping[Hashable, Tuple[str, int, str]], seconds: float = PROBE_SECONDS) -> None:
        self.results: Dict[Hashable, Optional[str]] = dict.fromkeys(targets)
        self._targets = targets
        self._tokens = {key: (token + "\n").encode("utf-8", "backslashreplace") for key, (_, _, token) in targets.items()}
        self._heard: Dict[Hashable, bytes] = {}
        self._seconds = seconds
        self._until: Dict[Hashable, float] = {}
        self._most = descriptors.free()
        self._waiting = collections.deque(targets)
        self._selector = selectors.DefaultSelector()
        self._start_waiting()

    def step(self, timeout: float = 0.0) -> bool:
        """Take in what has come, waiting that long for something; whether all is known now."""
        if self._selector.get_map():
            for event, _ in self._selector.select(timeout):
                self._hear(event.data, event.fileobj)
        elif self._waiting:
            time.sleep(timeout)
        now = time.monotonic()
        for event in list(self._selector.get_map().values()):
            if now > self._until[event.data]:
                self._settle(event.data, event.fileobj, _NO_ANSWER)
        self._start_waiting()
        return not self._selector.get_map() and not self._waiting

    def close(self) -> None:
        """Give up what isn't known yet."""
        self._waiting.clear()
        for event in list(self._selector.get_map().values()):
            self._settle(event.data, event.fileobj, None)
        self._selector.close()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._selector.get_map()) < self._most:
            key = self._waiting[0]
            until = self._until.setdefault(key, time.monotonic() + self._seconds)
            code = self._start(key)
            # Others of this process need descriptors too, and will let go of them, some day.
            if code in _SHORT_OF_DESCRIPTORS and (self._selector.get_map() or time.monotonic() < until):
                return
            self._waiting.popleft()
            if code:
                self.results[key] = _reason(code)

    def _start(self, key: Hashable) -> int:
        """Begin to connect; 0, or the error that came at once."""
        address, port, _ = self._targets[key]
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:  # IPv6 is switched off, or no descriptor is left
            return error.errno or errno.EIO
        connection.setblocking(False)
        code = connection.connect_ex((address, port))
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            return code
        # Nothing is sent: it becomes readable with the answer, or when the attempt has failed.
        self._selector.register(connection, selectors.EVENT_READ, key)
        self._until[key] = time.monotonic() + self._seconds
        return 0

    def _hear(self, key: Hashable, connection: Any) -> None:
        try:
            data = connection.recv(LONGEST_ANSWER)
        except BlockingIOError:
            return
        except OSError as error:
            self._settle(key, connection, _reason(error.errno))
            return
        heard = self._heard[key] = self._heard.get(key, b"") + data
        if heard == self._tokens[key]:
            self._settle(key, connection, "")
        elif not data or not self._tokens[key].startswith(heard):
            self._settle(key, connection, _STRANGER)

    def _settle(self, key: Hashable, connection: Any, result: Optional[str]) -> None:
        self.results[key] = result
        self._selector.unregister(connection)
        connection.close()


def _reason(code: Optional[int]) -> str:
    return _REASONS.get(code or 0) or os.strerror(code or 0).lower()


def probe(
    targets: Mapping[Hashable, Tuple[str, int, str]],
    seconds: float = PROBE_SECONDS,
    check: Callable[[], None] = lambda: None,
) -> Dict[Hashable, str]:
    """``Probe.results`` when all is known; ``check`` is called meanwhile and may raise."""
    running = Probe(targets, seconds)
    try:
        while not running.step(0.1):
            check()
    finally:
        running.close()
    return {key: result or "" for key, result in running.results.items()}


def choose(candidates: Sequence[Sequence[Interface]], findings: Findings, hoping: bool = False) -> Optional[List[Interface]]:
    """For each node its first interface that all others reach, all of one family, IPv4 before IPv6; None if there are none.

    Args:
        candidates: each node's ``network.interfaces``.
        findings: node -> other node -> what it found out of each of its interfaces.
        hoping: whether what isn't known yet is taken for reached.
    """
    for family in (4, 6):
        picks: List[Interface] = []
        for node, own in enumerate(candidates):
            picks += [
                candidate
                for index, candidate in enumerate(own)
                if candidate["family"] == family and not _missed(node, index, len(candidates), findings, hoping)
            ][:1]
        if len(picks) == len(candidates):
            return picks
    return None


def explain(names: Sequence[str], candidates: Sequence[Sequence[Interface]], findings: Findings, ports: Sequence[str]) -> str:
    """Why there is nothing to ``choose``, even hoping, and what to do, in one sentence: nodes, addresses tried, ports to open.

    Args:
        names: of the nodes, as people know them.
        ports: each node's range of ports, as ``32768-60999``.
    """
    nodes = range(len(names))
    for node in nodes:
        if not candidates[node]:
            return "%s has no network interface that other nodes could reach; connect it to their network" % names[node]
    common: List[Interface] = []
    for node in nodes:
        # Of an interface that not all others reach, we tell of the one that the most reach, and of who doesn't.
        missed = [_missed(node, index, len(names), findings, hoping=True) for index in range(len(candidates[node]))]
        best = min(range(len(missed)), key=lambda index: len(missed[index]))
        if not missed[best]:
            common.append(candidates[node][best])
            continue
        alone = [other for other in nodes if other != node and all(other in each for each in missed)]
        other, tried = (alone[0], range(len(missed))) if alone else (missed[best][0], range(best, best + 1))
        told = ", ".join(
            "%s (%s: %s)"
            % (candidates[node][index]["address"], candidates[node][index]["name"], _known(findings, other, node, index))
            for index in tried
        )
        return (
            "%s can't reach %s at %s: open TCP ports %s on %s to the other nodes, or name another interface"
            " (networkInterface in the cluster document)" % (names[other], names[node], told, ports[node], names[node])
        )
    told = ", ".join("%s at %s" % (names[node], common[node]["address"]) for node in nodes)
    return (
        "Horovod needs addresses of one family, and the nodes reach each other with IPv4 and IPv6 mixed (%s): give them all"
        " the same, or name another interface (networkInterface in the cluster document)" % told
    )


def _missed(node: int, index: int, count: int, findings: Findings, hoping: bool) -> List[int]:
    """The nodes that don't reach an interface of a node."""
    fine = ("", None) if hoping else ("",)
    return [other for other in range(count) if other != node and _known(findings, other, node, index) not in fine]


def _known(findings: Findings, other: int, node: int, index: int) -> Optional[str]:
    told = findings.get(other, {}).get(node)
    return None if told is None else told[index]
