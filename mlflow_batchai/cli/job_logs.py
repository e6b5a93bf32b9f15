"""``batchai job logs``: what a job's ranks write."""

from __future__ import annotations

import click

from mlflow_batchai.cli.job_lookup import find_job, of_attempt
from mlflow_batchai.cli.options import Scope, command, named, notice
from mlflow_batchai.cli.streaming import show_text, stream_file
from mlflow_batchai.errors import UsageError


@command(example="batchai job logs -f digits-3f2a1c --rank 3", experiment=True)
@named("job")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="Only what this rank wrote.  [all, joined]")
@click.option("--stderr", is_flag=True, help="Standard error instead of standard output.")
@of_attempt
def logs(scope: Scope, name: str, follow: bool, rank: int | None, stderr: bool, attempt: int | None) -> None:
    """A job's output so far, of all ranks or of one. Ctrl-C leaves the job running."""
    from mlflow_batchai.job import streams
    from mlflow_batchai.tracking import directories

    found = find_job(scope, name, attempt)
    job = found.job
    ranks = job.plan.ranks
    if rank is not None and rank >= ranks:
        raise UsageError(f"--rank {rank}: job {job.name} has {ranks} rank{'s' * (ranks > 1)}, numbered from 0")
    file = directories.log_name(job, rank, "stderr" if stderr else "stdout")
    if follow:
        show_text(stream_file(found, directories.LOGS, file, required=False), job.name)
        return
    place = directories.directory(job, directories.LOGS)
    state = job.state()
    ended = state.ended or state.next_attempt is not None
    tail = streams.Tail(place.share, place.inside(file))
    show_text(streams.so_far(tail, ended), job.name)
    if not tail.found:
        notice(f"job {job.name} has written no {file}{'' if ended else ' yet'}")
