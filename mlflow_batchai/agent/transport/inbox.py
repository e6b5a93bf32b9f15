"""What an agent receives through the job folder: its peers' records, requests, and the verdict.

The share thread reads; the main thread takes what was read, and never waits for the share.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Callable

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.share.sharefiles import SegmentReader, SegmentReaders


class Inbox:
    """Records, requests and verdict that others have written for this agent so far.

    Args:
        peers: nodes whose segments are read (node 0: all others; others: node 0).
        join: given what peers' ranks have written (node 0 only).

    Attributes:
        verdict: the attempt's, as soon as it lies there.
    """

    def __init__(self, layout: NodeLayout, peers: list[int], join: Callable[[Record], None]) -> None:
        self._layout = layout
        self._join = join
        self._followers = {node: SegmentReader(protocol.agent_writer(node)) for node in peers}
        self._rounds = SegmentReaders(self._followers, layout.attempt, layout.control.at_once)
        self._lock = threading.Lock()
        self._records: collections.deque[tuple[int, Record]] = collections.deque()
        self._requests: dict[str, Record] = {}
        self._checked = time.monotonic()
        self.verdict: Record | None = None

    # Called by the main thread.

    def received(self) -> list[tuple[int, Record]]:
        """(node, record) that peers have sent since the last call, logs excepted."""
        with self._lock:
            found = list(self._records)
            self._records.clear()
        return found

    def requests(self) -> list[Record]:
        """Requests seen so far, of whichever attempt (node 0 only)."""
        with self._lock:
            return list(self._requests.values())

    def silent_seconds(self, node: int) -> float:
        """For how long a peer has been silent, by our own clock, while the share could be read."""
        return self._followers[node].silent

    def saw(self, node: int) -> None:
        """Another node gave a sign of life; those whose segments we don't read are nothing to us."""
        if node in self._followers:
            self._followers[node].silent = 0.0

    def heard(self, node: int) -> int:
        return self._followers[node].sequence

    def expect(self, node: int, segments: int) -> None:
        """Note how many segments a peer says that it has written."""
        self._followers[node].final = segments

    def has_spoken(self, node: int) -> bool:
        return self._followers[node].sequence > 0 or self._followers[node].heartbeats > 0

    # Called by the share thread.

    def read(self, heeds: bool) -> None:
        """Take in what is new. Raises OSError: the share can't be read, or the job's folder is gone from it."""
        layout, attempt = self._layout, self._layout.attempt
        attempt.look()
        self._check_folder()
        self._rounds.read(self._take_in, heeds)
        if self.verdict is None:
            self.verdict = attempt.read("verdict", layout.paths.verdict_file)
        if layout.node == 0:
            for name in attempt.requests():
                if name not in self._requests:
                    request = attempt.read("request-" + name, layout.paths.request(name))
                    if request is not None:
                        with self._lock:
                            self._requests[name] = request

    def close(self) -> None:
        self._rounds.close()

    def _check_folder(self) -> None:
        """Raise ``ControlShare.gone`` if the job's folder isn't there; where that is a request, errors of others tell it."""
        layout = self._layout
        if layout.plan.board or time.monotonic() - self._checked < layout.attempt.heartbeat_seconds:
            return
        plan = layout.paths.plan
        if layout.control.read_closed(plan) is None and layout.control.torn.seconds(plan) is None:
            raise layout.control.gone(plan)
        self._checked = time.monotonic()

    def _take_in(self, node: int, records: list[Record]) -> None:
        for record in records:
            if record["k"] == "log":
                if self._layout.node == 0:
                    self._join(record)
            else:
                with self._lock:
                    self._records.append((node, record))
