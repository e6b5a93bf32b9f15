"""The events of a job, as its agents have sent them: segments, each writer's in order, each once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

from mlflow_batchai.job.board import Board
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.node import protocol
from mlflow_batchai.node.protocol import Record, TornFileError

SEGMENTS_A_TIME = 32

Cursor = dict[str, int]
ENDING = ("failed", "stop")


class EventReader:
    """Reads an attempt's segments, each writer's in order, each once.

    Args:
        job: the job.
        cursor: writer -> next sequence; kept up to date.
        ending: what it was when the cursor was there.

    Attributes:
        cursor: with ``ending``, enough to go on from in another process.
        ending: whether an agent has said that it failed or stops, as each does before it writes so into its ``exit.json``.
    """

    def __init__(self, job: Job, cursor: Cursor | None = None, ending: bool = False) -> None:
        self._share = job.share
        self._paths = job.paths
        self._board = job.board
        self._writers = [protocol.agent_writer(node) for node in range(job.node_count)]
        self.cursor: Cursor = dict(cursor or {})
        self.ending = ending

    def read(self, to_the_end: bool = False) -> Iterator[tuple[str, int, list[Record]]]:
        """(writer, sequence, records) of each segment that was closed since the last call, of all writers in turn.

        The cursor moves on when the consumer takes the next one, so a segment that it fails on comes again.

        Args:
            to_the_end: whether nothing more will be written: then what dead writers could not put on the board is read too.
        """
        if self._board is not None:
            yield from self._noticed(self._board)
            if not to_the_end:
                return
        # Each writer's next file is asked for by name: listing folders of a thousand segments costs a hundred times as much.
        writers = self._writers
        while writers:
            wanted = {self._paths.segment(writer, self.cursor.get(writer, 0)): writer for writer in writers}
            writers = yield from self._segments(wanted)

    def _noticed(self, board: Board) -> Iterator[tuple[str, int, list[Record]]]:
        """Segments that the board speaks of, many at a time."""
        board.look()
        while True:
            wanted = {
                self._paths.segment(writer, sequence): writer
                for writer in self._writers
                for sequence in range(self.cursor.get(writer, 0), board.count(f"segments-{writer}"))[:SEGMENTS_A_TIME]
            }
            if not wanted or not (yield from self._segments(wanted)):
                return

    def _segments(self, wanted: Mapping[str, str]) -> Generator[tuple[str, int, list[Record]], None, list[str]]:
        """Those of the wanted files (path -> writer) that are there, each writer's in order, up to the first that isn't.

        Returns:
            Their writers.
        """
        found: list[str] = []
        for path, data in self._share.read_many(wanted):
            writer = wanted[path]
            sequence = self.cursor.get(writer, 0)
            if path != self._paths.segment(writer, sequence):
                continue  # the one before it is missing
            try:
                records = protocol.decode(data)
            except TornFileError:
                continue
            self.ending = self.ending or any(record.get("k") in ENDING for record in records)
            yield writer, sequence, records
            self.cursor[writer] = sequence + 1
            found.append(writer)
        return found
