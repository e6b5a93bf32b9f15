"""Whether what MLflow has of a job is what lies on its share, and nothing of the job is left. Reads the share by itself."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seed_cases import Case
from seed_world import SeedWorld

Points = dict[tuple[str, int], tuple[float, int]]
STATUSES = {"succeeded": "FINISHED", "failed": "FAILED"}
LOST = ("NodeLost", "NodeSetupFailed")
# What a run says that isn't whole: of points to the number; of what a killed agent had not sent that it can't know.
MISSING = re.compile(r"^missing: (\d+) of \d+ points", re.M)
MISSING_LINES = re.compile(r"^missing: \d+ of \d+ lines", re.M)
UNKNOWN = re.compile(r"^missing: the totals of ", re.M)
REPEATED = re.compile(r"(\d+) metric values came for a step that had one")


@dataclass
class OnShare:
    """What agents have sent.

    Attributes:
        points: (key, step) -> (value, timestamp) of the first report.
        repeated: how many reports came for a (key, step) that had one.
    """

    points: Points = field(default_factory=dict)
    repeated: int = 0


def closed(path: Path) -> list[dict[str, Any]] | None:
    """The records of a file with a terminator that fits; None for any other."""
    try:
        *lines, last = path.read_bytes().splitlines(keepends=True)
        end = json.loads(last)
        body = b"".join(lines)
        if not last.endswith(b"\n") or end["end"] != len(lines) or int(end["crc32"], 16) != zlib.crc32(body):
            return None
        return [json.loads(line) for line in lines]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def on_share(job: Path) -> OnShare:
    """All that was reported, of all attempts."""
    found = OnShare()
    for attempt in sorted((job / "batchai" / "attempts").iterdir(), key=lambda path: int(path.name)):
        segments = sorted(attempt.glob("events/*/agent-*.jsonl"), key=lambda path: path.name)
        for segment in segments:
            # Half a file that a dead agent has left is no file: the run says that its agent's totals are not known.
            for record in closed(segment) or ():
                if record["k"] == "report" and record["body"]["type"] == "metric":
                    _take(found, record["body"])
    return found


def _take(found: OnShare, body: dict[str, Any]) -> None:
    for name, value in body["values"].items():
        key = (name, body["step"])
        if key in found.points:
            found.repeated += 1
        else:
            found.points[key] = (float(value), body["ts"])


def wrong(world: SeedWorld, case: Case, codes: dict[str, int | None]) -> Iterator[str]:
    """Sentences on what is not as it has to be.

    Args:
        codes: exit codes of the commands that were not killed.
    """
    from mlflow.tracking import MlflowClient

    client = MlflowClient(world.uri)
    runs = client.search_runs(["0"])
    yield from (f"run {run.info.run_id} is {run.info.status}" for run in runs if run.info.status in ("RUNNING", "SCHEDULED"))
    yield from left_behind(world)
    for name in codes:
        # That of a rank is the job's output, and its lines say whose they are.
        if re.search("^Traceback", world.said(name), re.M):
            yield f"{name} shows a traceback"
    for log in (world.home / "followers").glob("*.log"):
        if "Traceback" in log.read_text(encoding="utf-8"):
            yield "a follower's log has a traceback"
    started = [folder for folder in world.job_folders() if list(folder.glob("batchai/attempts/*/verdict/verdict.json"))]
    if len(runs) > case.jobs or len(started) > case.jobs:
        yield f"{len(runs)} runs, {len(started)} jobs"
        return
    by_id = {run.info.run_id: run for run in runs}
    for folder in started:
        plan = (closed(folder / "batchai" / "plan.json") or [{}])[0]
        said = f"{plan['name']}: " if case.jobs > 1 else ""
        for trouble in _wrong_job(world, case, client, by_id[plan["runId"]], folder, plan["job"], codes):
            yield said + trouble
    if len(started) < case.jobs and not case.kills_submitter:
        yield "the job has no verdict" if case.jobs == 1 else f"{len(started)} jobs of {case.jobs} have a verdict"


def left_behind(world: SeedWorld) -> Iterator[str]:
    """Sentences on what is left of jobs on their nodes: processes, locks, reservations, mounts."""
    yield from (f"pid {pid} is left: {command}" for pid, command in world.alive().items())
    yield from (f"somebody holds the lock {name}" for name in world.held_locks())
    nodes = world.home / "nodes" / "local"
    book = nodes / "book" / "book.json"
    # Of those that their submitter could not write down nobody knows; who takes the next one sees that they have ended.
    known = {record["ticket"] for path in world.share.rglob("submitted.json") for record in closed(path) or ()}
    for reservation in json.loads(book.read_text())["tickets"] if book.exists() else ():
        if reservation["number"] in known:
            yield f"the reservation {reservation['number']} is left"
    with open("/proc/mounts", encoding="utf-8") as mounts:
        points = {line.split()[1] for line in mounts if str(world.root) in line} - {str(point) for point in world.mounts}
    yield from (f"a mount is left: {point}" for point in sorted(points))


def is_relayed(job: Path) -> bool:
    """Whether the last lease of a job says that its run has all."""
    cursors = [closed(path) for path in sorted(job.glob("batchai/relay/*/cursor.json"), key=lambda path: int(path.parent.name))]
    return bool(cursors and cursors[-1] and cursors[-1][0]["finished"])


def _wrong_job(
    world: SeedWorld, case: Case, client: Any, run: Any, job: Path, mark: str, codes: dict[str, int | None]
) -> Iterator[str]:
    newest = max(job.glob("batchai/attempts/*"), key=lambda path: int(path.name))
    records = closed(newest / "verdict" / "verdict.json")
    if records is None or len(records) != 1:
        yield "the verdict is not whole"
        return
    verdict = records[0]
    state, code = verdict["executionState"], (verdict["errors"] or [{"code": None}])[0]["code"]
    yield from _wrong_verdict(case, state, code, int(newest.name))
    succeeded = state == "succeeded"
    for name, ended in codes.items():
        if (ended == 0) != succeeded:
            yield f"{name} has exit code {ended} for a job that has {state}"
    tags = run.data.tags
    expected = {
        "status": "KILLED" if verdict["terminated"] else STATUSES[state],
        "end time": verdict["endTime"],
        "batchai.executionState": state,
        "batchai.exitCode": str(verdict["exitCode"]) if verdict["exitCode"] else None,
        "batchai.errorCode": code,
        "batchai.reason": verdict["reason"] or None,
    }
    there = {"status": run.info.status, "end time": run.info.end_time}
    for name, value in expected.items():
        if there.get(name, tags.get(name)) != value:
            yield f"{name} is {there.get(name, tags.get(name))!r}, and {value!r} on the share"
    if not is_relayed(job):
        yield "the last lease has not finished"
    yield from _wrong_points(client, run, on_share(job), world, mark, case)
    yield from _wrong_logs(world, client, run, job, case, succeeded)


def _wrong_verdict(case: Case, state: str, code: str | None, attempt: int) -> Iterator[str]:
    if case.retries and case.faults and (state, attempt > 1) != ("succeeded", True):
        yield f"attempt {attempt} has {state} ({code}), though it could be retried"
    half = any(fault.step in ("write plan.json", "ask reserve", "ask start") for fault in case.faults)
    if state == "succeeded":
        return
    if not (case.kills_agents or half):
        yield f"the job has {state} ({code}), and none of its agents was killed"
    elif code not in LOST:
        yield f"the job's error is {code}"


def _wrong_points(client: Any, run: Any, share: OnShare, world: SeedWorld, mark: str, case: Case) -> Iterator[str]:
    stored: Points = {}
    for key in (name for name in run.data.metrics if not name.startswith("system/")):
        for point in client.get_metric_history(run.info.run_id, key):
            if (key, point.step) in stored:
                yield f"{key} has two points of step {point.step}"
            stored[key, point.step] = (point.value, point.timestamp)
    lacking, more = share.points.keys() - stored.keys(), stored.keys() - share.points.keys()
    if lacking:
        yield f"{len(lacking)} points of the share are not in MLflow: {sorted(lacking)[:5]}"
    if more:
        yield f"{len(more)} points in MLflow are not on the share: {sorted(more)[:5]}"
    different = [key for key in stored.keys() & share.points.keys() if stored[key] != share.points[key]]
    if different:
        yield f"{len(different)} points are not the first ones: {sorted(different)[:5]}"
    told = REPEATED.search(run.data.tags.get("batchai.notes", ""))
    if (int(told[1]) if told else 0) != share.repeated:
        yield f"{share.repeated} values came for a step that had one, and the run says {told[1] if told else 'nothing'}"
    if not case.training:
        yield from _wrong_sum(run, {key: value for key, (value, _) in stored.items()}, world, mark, case)


def _wrong_sum(run: Any, stored: dict[tuple[str, int], float], world: SeedWorld, mark: str, case: Case) -> Iterator[str]:
    """What the ranks say they have reported is stored, or the run says to the number what is not."""
    tags = run.data.tags
    whole, notes = tags.get("batchai.complete"), tags.get("batchai.notes", "")
    if whole not in (None, "false"):
        yield f"batchai.complete is {whole!r}"
    due = {("loss", step): 1.0 / (step + 1) for step in world.said_steps(mark, 0)}
    if case.all_ranks:
        ranks = range(case.nodes)
        due |= {(f"rank_{rank}/speed", step): 100.0 * rank + step for rank in ranks for step in world.said_steps(mark, rank)}
    if case.retries:  # the first value stands, of whichever attempt
        values = {key: {value + 1000 * attempt for attempt in range(4)} for key, value in due.items()}
        due.update({key: value for key, value in stored.items() if value in values.get(key, ())})
    if run.info.status == "FINISHED" and world.said_steps(mark, 0) != set(range(case.steps)):
        yield "rank 0 has not reported every step"
    lacking = len(due.keys() - stored.keys())
    wrong = {key for key in stored.keys() & due.keys() if stored[key] != due[key]}
    if wrong:
        yield f"{len(wrong)} points have another value than ranks have reported: {sorted(wrong)[:5]}"
    if whole is None and lacking:
        yield f"{lacking} points of {len(due)} that ranks have reported are missing, and the run says that all are there"
    if whole == "false" and not UNKNOWN.search(notes):
        stated = sum(int(number) for number in MISSING.findall(notes))
        if stated != lacking or not (stated or MISSING_LINES.search(notes)):
            yield f"{lacking} points are missing, and the run says {stated}: {notes}"
    if whole == "false" and run.info.status == "FINISHED" and UNKNOWN.search(notes) and not case.retries:
        yield f"no agent was killed, and its totals are missing: {notes}"


def _wrong_logs(world: SeedWorld, client: Any, run: Any, job: Path, case: Case, succeeded: bool) -> Iterator[str]:
    sent = world.root / "mlruns" / "0" / run.info.run_id / "artifacts" / "logs"
    there = {
        path.relative_to(job / "stdouterr"): path.read_bytes() for path in (job / "stdouterr").rglob("*") if path.is_file()
    }
    # MLflow's own name for a file that it copies: one is left where its process was killed meanwhile.
    files = (path for path in sent.rglob("*") if path.is_file() and not path.name.startswith(".artifact.uploading."))
    artifacts = {path.relative_to(sent): path.read_bytes() for path in files}
    removed = case.outage is not None and case.outage.what == "logs removed"
    for name in sorted(there.keys() | artifacts.keys()) if not removed else ():
        if there.get(name) != artifacts.get(name):
            yield f"the artifact stdouterr/{name} is not what lies on the share"
    if succeeded and not case.training and not case.retries:
        lines = sorted(artifacts[Path("stdout.txt")].decode().splitlines())
        said = ["begun", "done", *(f"step {step}" for step in range(case.steps))]
        if lines != sorted(f"[{rank}] {line}" if case.nodes > 1 else line for rank in range(case.nodes) for line in said):
            yield "stdout.txt has not each line of each rank once"
