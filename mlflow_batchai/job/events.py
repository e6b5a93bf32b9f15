"""Read a job's events: each writer's segments, in order, each once."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.protocol import Record, TornFileError
from mlflow_batchai.job.jobs import Index, Job

SEGMENTS_A_TIME = 32
# Agents send heartbeats more often: a writer that was silent for so long may have gone on behind a missing segment.
QUIET_SECONDS = 8.0
LOOK_SECONDS = 0.5
# How many segments behind one that isn't there are asked for, to see whether its writer went on.
AHEAD = 8

Cursor = dict[str, int]
ENDING = ("failed", "stop")

Segment = tuple[str, int, list[Record]]


class EventReader:
    """Reads an attempt's segments, each writer's in order, each once.

    A segment that was damaged stops nothing: once it has stayed as it is for ``records.SETTLE_SECONDS``, though its writer went
    on or nothing more will be written, it is skipped. A record of kind ``records.SKIPPED`` stands for what was left out.

    Args:
        cursor: writer -> next sequence; kept up to date.
        ending: what it was when the cursor was there.

    Attributes:
        cursor: with ``ending``, enough to go on from in another process.
        ending: whether an agent has said that it failed or stops, as each does before it writes so into its ``exit.json``. What
            could not be read may have said it.
    """

    def __init__(
        self,
        job: Job,
        cursor: Cursor | None = None,
        ending: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._share = job.share
        self._paths = job.paths
        self._index = job.index
        self._clock = clock
        self._sleep = sleep
        self._writers = [protocol.agent_writer(node) for node in range(job.node_count)]
        # Of each writer: what was found where its next segment should be, if that wasn't closed; since when it is there, though
        # there are later ones; and when it was heard last.
        self._torn: dict[str, bytes] = {}
        self._stuck: dict[str, float] = {}
        self._heard = dict.fromkeys(self._writers, clock())
        # What lies there when nothing more is written, looked at once a round.
        self._listed: dict[str, list[int]] | None = None
        self.cursor: Cursor = dict(cursor or {})
        self.ending = ending

    def read(self, to_the_end: bool = False) -> Iterator[Segment]:
        """(writer, sequence, records) of each segment that was closed since the last call, of all writers in turn.

        The cursor moves on when the consumer takes the next one, so a segment that it fails on comes again.

        Args:
            to_the_end: whether nothing more will be written: then what dead writers could not put on the index is read too, and
                damaged segments are waited for until it is certain that they are.
        """
        while True:
            self._listed = None
            yield from self._closed(to_the_end)
            stuck = [writer for writer in self._suspects(to_the_end) if self._is_stuck(writer, to_the_end)]
            ripe = [writer for writer in stuck if self._clock() - self._stuck[writer] >= records.SETTLE_SECONDS]
            for writer in ripe:
                yield from self._skip(writer, to_the_end)
            if not ripe and not (stuck and to_the_end):
                return
            if not ripe:
                self._sleep(LOOK_SECONDS)

    def _closed(self, to_the_end: bool) -> Iterator[Segment]:
        if self._index is not None:
            yield from self._indexed(self._index)
            if not to_the_end:
                return
        # Each writer's next file is asked for by name: listing folders of a thousand segments costs a hundred times as much.
        writers = self._writers
        while writers:
            wanted = {self._next(writer): writer for writer in writers}
            writers = yield from self._segments(wanted)

    def _next(self, writer: str, ahead: int = 0) -> str:
        return self._paths.segment(writer, self.cursor.get(writer, 0) + ahead)

    def _indexed(self, index: Index) -> Iterator[Segment]:
        """Segments that the index speaks of, many at a time."""
        index.look()
        while True:
            wanted = {
                self._paths.segment(writer, sequence): writer
                for writer in self._writers
                for sequence in range(self.cursor.get(writer, 0), index.count(f"segments-{writer}"))[:SEGMENTS_A_TIME]
            }
            if not wanted or not (yield from self._segments(wanted)):
                return

    def _segments(self, wanted: Mapping[str, str]) -> Generator[Segment, None, list[str]]:
        """The wanted files (path -> writer) that exist: each writer's in order, up to the first that is missing.

        Returns:
            Their writers.
        """
        found: list[str] = []
        for path, data in self._share.read_many(wanted):
            writer = wanted[path]
            if path != self._next(writer):
                continue  # the one before it is missing
            try:
                events, others = records.sort_out(protocol.decode(data))
            except TornFileError:
                if self._torn.get(writer) != data:
                    self._torn[writer] = data
                    self._stuck.pop(writer, None)
                continue
            yield from self._passed(writer, [*events, records.skipped(others)] if others else events)
            found.append(writer)
        return found

    def _passed(self, writer: str, events: list[Record]) -> Iterator[Segment]:
        """Give a segment, and go on to the next."""
        sequence = self.cursor.get(writer, 0)
        self.ending = self.ending or any(event["k"] in (*ENDING, records.SKIPPED) for event in events)
        yield writer, sequence, events
        self.cursor[writer] = sequence + 1
        self._heard[writer] = self._clock()
        self._torn.pop(writer, None)
        self._stuck.pop(writer, None)

    # Segments that will never be closed.

    def _suspects(self, to_the_end: bool) -> list[str]:
        """Writers whose next segment may be one."""
        if to_the_end:
            return self._writers
        if (index := self._index) is not None:
            return [writer for writer in self._writers if index.count(f"segments-{writer}") > self.cursor.get(writer, 0)]
        quiet = self._clock() - QUIET_SECONDS
        known = self._torn.keys() | self._stuck.keys()
        return [writer for writer in self._writers if writer in known or self._heard[writer] < quiet]

    def _is_stuck(self, writer: str, to_the_end: bool) -> bool:
        """Whether a writer's next segment is missing or torn, though it will not be written any more."""
        left = to_the_end and writer in self._torn
        if left or self._later(writer, to_the_end) is not None:
            self._stuck.setdefault(writer, self._clock())
        else:
            self._stuck.pop(writer, None)
            self._heard[writer] = self._clock()  # it is asked for again in a while
        return writer in self._stuck

    def _later(self, writer: str, to_the_end: bool) -> int | None:
        """The number of the next segment that is there after a missing one; None: none is. A writer writes them in order."""
        behind = self.cursor.get(writer, 0) + 1
        if self._index is not None:
            return behind if self._index.count(f"segments-{writer}") >= behind else None
        if to_the_end:
            return min((number for number in self._there(writer) if number >= behind), default=None)
        later = {self._paths.segment(writer, number): number for number in range(behind, behind + AHEAD)}
        return min((later[path] for path, _ in self._share.read_many(later)), default=None)

    def _there(self, writer: str) -> list[int]:
        """The numbers of a writer's segments, from the folder of the next one that any writer lacks on."""
        if self._listed is None:
            self._listed = defaultdict(list)
            least = min(self.cursor.get(each, 0) for each in self._writers)
            first = self._paths.event_folder(least).rpartition("/")[2]
            folders = [entry.name for entry in self._share.list(self._paths.events) if entry.name >= first]
            for entry in itertools.chain(*(self._share.list(f"{self._paths.events}/{name}") for name in folders)):
                name, _, number = entry.name.removesuffix(".jsonl").rpartition("-")
                if number.isdecimal():
                    self._listed[name].append(int(number))
        return self._listed[writer]

    def _skip(self, writer: str, to_the_end: bool) -> Iterator[Segment]:
        """Pass over a damaged segment, or over those that are missing up to the next one that is there."""
        is_torn, since, here = writer in self._torn, self._stuck[writer], self.cursor.get(writer, 0)
        later = None if is_torn else self._later(writer, to_the_end)
        count = 1 if later is None else later - here
        self.cursor[writer] = here + count - 1
        yield from self._passed(writer, [records.skipped(0, count)])
        if not is_torn:
            self._stuck[writer] = since  # several may be missing in a row
