"""Memory of the output files that are already among the run's artifacts, so that none is sent twice."""

from __future__ import annotations

from typing import NamedTuple

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.protocol import Record, TornFileError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.storage import job_file


class Stamp(NamedTuple):
    """Size and time by which a file's content is known.

    Attributes:
        size: bytes.
        modified: seconds since the epoch, by the clock of what keeps it; None where that isn't known.
    """

    size: int
    modified: float | None = None


class SentFiles:
    """The files that were sent, with their stamps as they were looked at before.

    They are kept beside the lease, in a file of their own: there may be thousands, and the cursor is written all the time.

    Args:
        number: of the lease that is held.
    """

    def __init__(self, job: Job, number: int) -> None:
        self._job = job
        self._number = number
        self._files: dict[str, Stamp] | None = None
        self._unsaved = False

    def has(self, artifact: str, stamp: Stamp) -> bool:
        """Whether a file with this content was sent to this path of the run's artifacts."""
        return self._known().get(artifact) == stamp

    def add(self, artifact: str, stamp: Stamp) -> None:
        """Note that a file was sent."""
        self._known()[artifact] = stamp
        self._unsaved = True

    def save(self) -> None:
        """Let the next relay know. Raises ShareError."""
        if self._unsaved:
            # Without a time a file's content could be another one by then.
            files = {path: list(stamp) for path, stamp in self._known().items() if stamp.modified is not None}
            self._job.share.write(self._job.paths.sent(self._number), protocol.encode([{"files": files}]))
            self._unsaved = False

    def _known(self) -> dict[str, Stamp]:
        if self._files is None:
            numbers = (int(entry.name) for entry in self._job.share.list(self._job.paths.relay) if entry.name.isdecimal())
            found = (self._read(number) for number in sorted(numbers, reverse=True) if number < self._number)
            files: Record = next((record["files"] for record in found if record is not None), {})
            self._files = {path: Stamp(*pair) for path, pair in files.items() if _is_stamp(pair)}
        return self._files

    def _read(self, number: int) -> Record | None:
        """Read a relay's memory; None: there is none, or it can't be read."""
        try:
            record = protocol.decode_one(job_file(self._job.share, self._job.paths.sent(number)) or b"")
        except TornFileError:
            return None
        return record if records.has(record, {"files": records.is_mapping}) else None


def _is_stamp(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and records.is_count(value[0]) and records.is_number(value[1])
