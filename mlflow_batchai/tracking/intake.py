"""What the agents and ranks of an attempt have said goes into the job's run: each thing once, wherever a relay is cut off.

MLflow drops what is replayed after a crash, since the points are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.reports import LOST, points_of
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.metrics import MetricFold, Pace, Point, SampleFold
from mlflow_batchai.terminal import printable
from mlflow_batchai.tracking.tracked import relayed

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

BATCH = 1000
# What is sent twice costs MLflow ten times as much.
MOST_UNCERTAIN = 10 * BATCH
MOST_NAMES_TOLD = 20
WAITED = ", which waited too long for their node's disk"
# Keys in one record of what a rank had to drop.
MOST_LOST = 10_000
_LOST: records.Shape = {
    "values": lambda value: isinstance(value, dict) and len(value) <= MOST_LOST and all(map(records.is_count, value.values()))
}
_MODEL: records.Shape = {"path": records.is_text, "meta": records.is_mapping}


class Intake:
    """Reads the events of an attempt, and stores what comes of them.

    Args:
        memory: what ``remember`` returned in an earlier process, of whichever attempt.
        same_attempt: whether that was in this attempt.
        gone: whether the run was deleted.
        note: takes a sentence for the run.
        environment: takes a record of what trains.
        save: keeps what ``remember`` returns; called when the store has all that came before.

    Attributes:
        tracked: what scripts have logged by MLflow.
        models: saved models that ranks have reported.
        received: of each rank of this attempt how many records have come, and points in them.
    """

    def __init__(
        self,
        client: MlflowClient,
        job: Job,
        memory: Mapping[str, Any],
        same_attempt: bool,
        *,
        gone: Callable[[], bool],
        note: Callable[[str], None],
        environment: Callable[[Record], None],
        save: Callable[[], None],
    ) -> None:
        self._client = client
        self._run_id = job.plan.run_id
        self._gone, self._note, self._environment, self._save = gone, note, environment, save
        here = memory if same_attempt else {}
        self._reader = EventReader(job, here.get("cursor"), bool(here.get("ending")))
        self._metrics = MetricFold(job.plan.metrics, memory.get("metrics"), same_attempt)
        self._samples = SampleFold(job.node_count, memory.get("samples"), same_attempt)
        self.models: list[Record] = list(memory.get("models", []))
        self.tracked = relayed.Tracked(client, job, gone, memory.get("tracked"))
        self._dropped = int(memory.get("dropped", 0))
        self._refused = int(memory.get("refused", 0))
        self._ranks = job.plan.ranks
        self.received: dict[str, list[int]] = {rank: list(count) for rank, count in here.get("reports", {}).items()}
        # What ranks had to drop: name -> how often.
        self._lost: dict[str, int] = dict(memory.get("lost", {}))
        # What could not be read: lines, files.
        self._skipped: list[int] = list(memory.get("skipped", [0, 0]))
        # Points that the store has not taken yet: they wait for it, and nothing is saved before them.
        self._pending: list[Point] = []
        self._unsaved = False
        # How many points would be sent again by the next relay, if we died now.
        self._uncertain = 0

    def remember(self) -> dict[str, Any]:
        """All that another process needs to go on, as JSON."""
        return {
            "cursor": dict(self._reader.cursor),
            "ending": self._reader.ending,
            "metrics": self._metrics.remember(),
            "samples": self._samples.remember(),
            "models": list(self.models),
            "tracked": self.tracked.remember(),
            "reports": {rank: list(count) for rank, count in self.received.items()},
            "lost": dict(self._lost),
            "dropped": self._dropped,
            "refused": self._refused,
            "skipped": list(self._skipped),
        }

    def read(self, to_the_end: bool = False) -> int:
        """Store what is new; the number of segments that were read. ``to_the_end``: nothing more will be written."""
        count = 0
        for _, _, found in self._reader.read(to_the_end):
            # A backlog of hours does not go through memory at once, and in whole batches, since a call costs as much for a few.
            if self.tracked.crowded or self._uncertain >= MOST_UNCERTAIN:
                self._store()  # the cursor is behind the segment before this one
            self._send(BATCH)
            self._unsaved = True
            self._pending += self._metrics.feed(found)
            self._pending += self._samples.feed(found)
            for record in found:
                self._take(record)
            count += 1
        self._store()
        return count

    def finish(self) -> None:
        """The attempt is over: store what was held back until then."""
        self._pending += self._metrics.finish()
        self._send()

    def heard(self, node: int) -> int:
        """How many of a node's segments have been read."""
        return self._reader.cursor.get(protocol.agent_writer(node), 0)

    @property
    def cursor(self) -> Mapping[str, int]:
        """Of each writer how many segments have been read."""
        return self._reader.cursor

    @property
    def lacks(self) -> bool:
        """Whether agents or this relay had to leave something out that ranks have said."""
        return bool(self._dropped or any(self._skipped) or self._lost or self._refused)

    @property
    def ending(self) -> bool:
        """Whether an agent has said that it failed or stops."""
        return self._reader.ending

    @property
    def pace(self) -> Pace | None:
        """How far the training has come, if its lines tell."""
        return self._metrics.pace

    @property
    def last_step(self) -> int | None:
        """The highest step that anything was reported for."""
        return self._metrics.last_step

    def _store(self) -> None:
        self._send()
        self.tracked.send()
        if self._unsaved:
            self._save()
            self._unsaved = False
            self._uncertain = 0

    def _take(self, record: Record) -> None:
        if record["k"] == "report":
            self._count(record)
        if record["k"] == "report" and record["body"].get("type") == "model":
            if records.has(record["body"], _MODEL):
                self.models.append(record["body"])
            else:
                self._skipped[0] += 1
        elif record["k"] == "report" and record["body"].get("type") in relayed.KINDS:
            self._skipped[0] += not self.tracked.take(record["body"])
        elif record["k"] == "environment":
            self._environment(record)
        elif record["k"] == "dropped":
            self._dropped += record["lines"]
        elif record["k"] == records.SKIPPED:
            self._skipped = [self._skipped[0] + record["lines"], self._skipped[1] + record["files"]]

    def _count(self, record: Record) -> None:
        body, rank = record["body"], record.get("r")
        if body.get("type") == LOST:
            for name, count in body["values"].items() if records.has(body, _LOST) else ():
                if name in self._lost or len(self._lost) < MOST_LOST:
                    self._lost[name] = self._lost.get(name, 0) + count
        elif isinstance(rank, int) and records.is_count(rank) and rank < self._ranks:
            count = self.received.setdefault(str(rank), [0, 0])
            count[0] += 1
            count[1] += points_of(body)

    def _send(self, least: int = 1) -> None:
        """Send what waits, as long as there are so many points."""
        while len(self._pending) >= least:
            batch = self._pending[:BATCH]
            self._log(batch)
            del self._pending[: len(batch)]
            self._uncertain += len(batch)

    def _log(self, points: list[Point]) -> None:
        """Store points; one that MLflow will never take is told of, so that it doesn't hold up the others for ever."""
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        try:
            metrics = [Metric(point.key, point.value, point.timestamp, point.step) for point in points]
            self._client.log_batch(self._run_id, metrics=metrics)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE" or self._gone():
                raise
            if len(points) == 1:
                self._refused += 1
                self._note(f"metric '{points[0].key}' at step {points[0].step} was refused: {error.message}")
                return
            middle = len(points) // 2
            self._log(points[:middle])
            self._log(points[middle:])

    def told(self) -> list[str]:
        """Sentences on what was not stored as it came."""
        lines, files = self._skipped
        counts = [
            (self._dropped, "log lines were dropped while the share stalled"),
            (lines, "lines of what agents and ranks had reported could not be read, and were left out"),
            (files, "event files were damaged or missing on the share, and were left out"),
            (self._metrics.repeated, "metric values came for a step that had one; the first stands"),
            (self._metrics.unread + self._samples.unread, "metric values were no numbers, and were left out"),
        ]
        lost = [
            f"missing are {count} " + (f"values of '{printable(name)}'" if name else "params, tags and files") + WAITED
            for name, count in sorted(self._lost.items())[:MOST_NAMES_TOLD]
        ]
        names = self._metrics.names.notices()
        more = [f"{len(names) - MOST_NAMES_TOLD} more names of metrics were changed"] if len(names) > MOST_NAMES_TOLD else []
        told = [*(f"{count} {what}" for count, what in counts if count), *names[:MOST_NAMES_TOLD], *more]
        return [*lost, *told, *self._metrics.refused[:MOST_NAMES_TOLD], *self.tracked.notes()]
