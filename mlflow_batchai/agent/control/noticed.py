"""An attempt's files where every look costs a request: what the board names is read, and what is written is put on it."""

from typing import TYPE_CHECKING, Dict, List, Optional, Sequence

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.control.base import Attempt
from mlflow_batchai.agent.control.board import Board
from mlflow_batchai.agent.protocol import JobPaths, Record

if TYPE_CHECKING:
    from mlflow_batchai.agent.control.rest import RestShare

BEAT_SECONDS = 20.0
FLUSH_SECONDS = 1.0
# A segment costs several requests, and one each who reads it; a beat costs one.
LINGER_SECONDS = 60.0
# The share thread comes back by itself; in between it has other things to do.
HASTE_SECONDS = 5.0


class NoticedFiles(Attempt):
    """An attempt whose files are asked for once the board has named them."""

    def __init__(self, share: "RestShare", paths: JobPaths, node: int, nodes: int) -> None:
        self._share = share
        self._paths = paths
        self._writer = protocol.agent_writer(node)
        self._node = node
        self._board = Board(self._list, node, self._matters, nodes - 1)
        self._written: Optional[int] = None
        self.beat_seconds = BEAT_SECONDS
        self.flush_seconds = FLUSH_SECONDS
        self.linger_seconds = LINGER_SECONDS

    @property
    def looked(self) -> float:
        return self._board.looked

    @property
    def longest_silence(self) -> float:
        return self._board.interval + self.beat_seconds

    def hasty(self) -> None:
        self._share.wire.hasty(HASTE_SECONDS)

    def look(self) -> None:
        self._board.look()

    def pace(self, phase: str) -> None:
        self._board.pace(phase)

    def read(self, notice: str, path: str) -> Optional[Record]:
        return self._share.read_closed(path) if self._board.has(notice) else None

    def write(self, notice: str, path: str, records: Sequence[Record]) -> None:
        self._share.write_closed(path, records)
        self._share.claim(self._paths.notice(notice))

    def requests(self) -> List[str]:
        return self._board.names("request-")

    def segment(self, writer: str, sequence: int) -> Optional[List[Record]]:
        if sequence >= self._board.count("segments-" + writer):
            return None
        data = self._share.content(self._paths.segment(writer, sequence))
        try:
            return None if data is None else protocol.decode(data)
        except protocol.TornFileError:
            return None

    def went_on(self, writer: str, sequence: int) -> bool:
        return sequence < self._board.count("segments-" + writer)

    def send(self, writer: str, sequence: int, records: Sequence[Record]) -> int:
        # An error of the notice must not have a megabyte sent twice.
        if self._written != sequence:
            self._share.write(self._paths.segment(writer, sequence), protocol.encode(records, compress=True))
            self._written = sequence
        self._share.mark(self._paths.notice("segments-" + writer), sequence + 1)
        return 0

    def beat(self, writer: str, number: int) -> bool:
        self._share.mark(self._paths.notice("beats-" + writer), number)
        return True

    def beats(self, writer: str) -> int:
        return self._board.count("beats-" + writer)

    def _list(self) -> Dict[str, int]:
        return {entry.name: entry.size for entry in self._share.entries(self._paths.board)}

    def _matters(self, name: str) -> bool:
        """Node 0 hears everyone, the others hear node 0; that someone lives is nothing to hurry for."""
        if name.startswith("beats-") or name == "segments-" + self._writer:
            return False
        return self._node == 0 or not name.startswith("segments-") or name == "segments-" + protocol.agent_writer(0)
