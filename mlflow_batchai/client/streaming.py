"""Stream a job's text files while they grow, from one attempt to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from mlflow_batchai.client import jobview, runner
from mlflow_batchai.errors import ClusterError, JobError, ShareError, UsageError
from mlflow_batchai.follower import detached
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job.streams import Tail, follow
from mlflow_batchai.tracking import directories

# Seconds between two looks at a file: at a folder of this machine or a mount, and where each costs a request.
LOOK_SECONDS, REQUEST_SECONDS = 0.2, 0.7


def stream_file(
    found: Submitted,
    identity: str,
    path: str,
    say: Callable[[str], None],
    opened: Callable[[str], None] = lambda address: None,
    restarted: Callable[[str], None] | None = None,
    required: bool = True,
) -> Iterator[str]:
    """A file of a job's directory as it grows, until the job has ended: of its present attempt, and of those that follow.

    A job that nobody relays gets a follower: if its nodes are lost as well, nobody else would ever say that it has ended.

    Args:
        opened: told the address of each file.
        restarted: told instead of ``say`` that the text begins anew.
        required: whether it is a failure if the job ends without it; else ``say`` is told so.

    Raises:
        JobError: the job has ended without it.
        NotFoundError: the job has no such directory.
        UsageError: it can't be a file.
    """
    name = path.rpartition("/")[2]
    _check(directories.directory(found.job, identity), path)
    patience = runner.Patience(found.job, say)
    seen = False
    while True:
        job = found.job
        place = directories.directory(job, identity)
        tail = Tail(place.share, place.found(path))
        opened(jobview.address(place.share, place.inside(path)))

        def over(attempt: int = job.attempt) -> bool:
            ended = runner.state(found, ending=False).ended
            if not ended:
                _keep_follower(found, say)
            return ended or (identity == directories.LOGS and found.job.attempt != attempt)

        def anew() -> None:
            (restarted or say)(f"{name} was cut or replaced; it begins anew")

        pause = LOOK_SECONDS if job.index is None else REQUEST_SECONDS
        yield from follow(tail, over, anew, pause, patience.trying)
        seen = seen or tail.found
        # An output directory is the same for all attempts; each has logs of its own.
        if identity != directories.LOGS or found.job.attempt == job.attempt:
            break
        say(f"job {job.name} goes on with attempt {found.job.attempt}")
    if not seen and not required:
        say(f"job {found.job.name} has written no {name}")
    elif not seen:
        raise JobError(f"The file {name} not found for the completed job.")


def _keep_follower(found: Submitted, say: Callable[[str], None]) -> None:
    try:
        detached.keep_follower(found)
    except (JobError, ClusterError) as error:
        say(f"nobody relays job {found.job.name}, so its end may stay unseen: {error}")


def _check(place: directories.Directory, path: str) -> None:
    """Raise UsageError for what would be waited for in vain, or until patience with a share ends."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise UsageError(f"'{path}' is no file of {place.id}: the path has to name one, without '..'")
    above, _, name = place.inside(path).rpartition("/")
    with contextlib.suppress(ShareError):  # who reads it waits for a share that is away
        if any(entry.name == name and entry.is_directory for entry in place.share.list(above)):
            raise UsageError(f"'{path}' is a folder of {place.id}; batchai job file list -p shows what lies in it")


def lines(pieces: Iterator[str]) -> Iterator[str]:
    """Split a text that comes in pieces into lines without their ends; a rest at the end counts as one."""
    rest: list[str] = []
    for piece in pieces:
        first, *more = piece.split("\n")
        rest.append(first)
        for text in more:
            yield "".join(rest)
            rest = [text]
    if last := "".join(rest):
        yield last
