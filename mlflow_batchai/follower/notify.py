"""Tell people that a job or a sweep has ended: by a JSON POST or a command, as its batchai.yaml says, else config.yaml."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence

from mlflow_batchai import config, terminal
from mlflow_batchai.agent.mounts.mount import Mask
from mlflow_batchai.agent.plan import Notify
from mlflow_batchai.agent.protocol import JobPaths
from mlflow_batchai.documents.common import NAMED_SECRET
from mlflow_batchai.errors import BatchAIError, UsageError
from mlflow_batchai.follower.credentials import SECRET_PREFIX
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.signing import Signature
from mlflow_batchai.job.states import JobState
from mlflow_batchai.tracking.runs import tag_text

# For how long an address or a command may take.
SECONDS = 30.0
LONGEST_REASON, LONGEST_LINE = 2000, 300


def check(planned: Notify | None, known: Mapping[str, str]) -> None:
    """Raise UsageError if the URL names secrets that neither ``known`` nor the environment has."""
    notify, written_out = _chosen(planned)
    missing = _missing(notify, {**_named(notify), **known, **written_out})
    if missing:
        raise UsageError(f"notify.url names {missing}: set {SECRET_PREFIX}{missing}, or put it among properties.secrets")


def secrets(planned: Notify | None, known: Mapping[str, str]) -> dict[str, str]:
    """The secrets that the URL names, as far as ``known`` and the environment have them."""
    notify, _ = _chosen(planned)
    return {name: value for name, value in {**_named(notify), **known}.items() if name in _names(notify)}


def is_wanted(ends: Sequence[str] | None, state: str) -> bool:
    """Whether news of an end are wanted, by the ends that batchai.yaml names; None: as config.yaml says."""
    chosen = _chosen(None)[0] if ends is None else None
    return state in (chosen.on if chosen else ends or ())


def tell(job: Job, attempt: int, end: JobState, page: str, known: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Tell that a job has ended for good, at most once for this end, however many followers come to it.

    Args:
        page: address of the run's page, or nothing.
        known: secrets by name.
        say: as of ``send``.
    """
    state = "terminated" if end.terminated else end.execution_state
    event = {"job": job.name, "runId": job.plan.run_id, "state": state, "reason": tag_text(end.reason), "runUrl": page}
    planned = job.plan.notify if job.signature is Signature.OWN else None
    # Claimed before it is tried: a command may have effects, so one that was cut off is not repeated.
    send(planned, f"job {job.name}", event, known, say, lambda: job.share.claim(JobPaths(job.folder, attempt).notified))


def send(
    planned: Notify | None,
    what: str,
    event: Mapping[str, str],
    known: Mapping[str, str],
    say: Callable[[str], None],
    claim: Callable[[], bool] = lambda: True,
) -> None:
    """Send the news of an end, if they are wanted.

    Args:
        what: the job or the sweep, for people.
        event: job, runId, state, reason and runUrl.
        known: secrets by name.
        say: told what fails, in one sentence that holds no secret.
        claim: asked last; False: another process sends them.
    """
    mask = Mask(known.values(), 1)
    try:
        notify, written_out = _chosen(planned)
        known = {**known, **written_out}
        mask = Mask(known.values(), 1)
        if notify is None or event["state"] not in notify.on or not claim():
            return
        if missing := _missing(notify, known):
            say(f"notify.url of {what}: this process was not told {missing} ({SECRET_PREFIX}{missing})")
        elif notify.url:
            url = NAMED_SECRET.sub(lambda name: known[name[1]], notify.url)
            _try(f"notify.url of {what}", lambda: _post(url, what, event), mask, say)
        if notify.command:
            _try(f"notify.command of {what}", lambda: _run(notify.command, event, known), mask, say)
    except Exception as error:
        why = str(error) if isinstance(error, BatchAIError) else type(error).__name__
        say(mask(f"nobody was told of the end of {what}: {why}"))


def _chosen(planned: Notify | None) -> tuple[Notify | None, dict[str, str]]:
    """(who is told, the URL by its name if it is written out in config.yaml)."""
    if planned is None and (settings := config.settings()) and settings.notify:
        return settings.notify.planned, settings.notify.written_out
    return planned, {}


def _names(notify: Notify | None) -> list[str]:
    return NAMED_SECRET.findall(notify.url) if notify else []


def _named(notify: Notify | None) -> dict[str, str]:
    """Of the environment only what is called a secret of jobs: a project from elsewhere must not send away other variables."""
    return {name: os.environ[SECRET_PREFIX + name] for name in _names(notify) if SECRET_PREFIX + name in os.environ}


def _missing(notify: Notify | None, known: Mapping[str, str]) -> str:
    return next((name for name in _names(notify) if name not in known), "")


def _try(of: str, act: Callable[[], str], mask: Mask, say: Callable[[str], None]) -> None:
    try:
        trouble = act()
    except (OSError, ValueError) as error:  # texts of requests quote the address
        trouble = getattr(error, "strerror", None) or type(error).__name__
    if trouble:
        say(mask(f"{of}: {terminal.printable(trouble)}"))


def _post(url: str, what: str, event: Mapping[str, str]) -> str:
    """Send what Slack and Teams show; what was wrong, or nothing."""
    import requests  # clients look here only for the names of secrets

    text = html.escape(" ".join(filter(None, (f"{what} {event['state']}", event["runUrl"]))), quote=False)
    if event["reason"]:
        # Ranks write it: in a block of code nothing of it is a link or calls people.
        block = html.escape(event["reason"][:LONGEST_REASON].replace("`", "'"), quote=False)
        text = f"{text}\n```\n{block}\n```"
    with requests.post(url, json={"text": text}, timeout=SECONDS, allow_redirects=False, stream=True) as answer:
        return "" if answer.status_code < 300 else f"HTTP {answer.status_code}"


def _run(command: Sequence[str], event: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Run the command; what was wrong, or nothing."""
    variables = {"JOB": "job", "RUN_ID": "runId", "STATE": "state", "REASON": "reason", "RUN_URL": "runUrl"}
    told = {f"BATCHAI_{name}": event[key] for name, key in variables.items()}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(json.dumps(event).encode())
        given.seek(0)
        environment = {**os.environ, **known, **told}
        process = subprocess.Popen(
            list(command), stdin=given, stdout=errors, stderr=errors, env=environment, start_new_session=True
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it took longer than {SECONDS:.0f} s and was ended"
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - LONGEST_LINE))
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {code}: {last}" if code else ""
