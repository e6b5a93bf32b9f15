"""Write the description of a job's run (``mlflow.note.content``) as Markdown for MLflow's run page."""

from __future__ import annotations

import re
import shlex
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.job.metrics import Pace, as_shown
from mlflow_batchai.job.states import JobState
from mlflow_batchai.tracking.runs import LONGEST_TAG, tag_text

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TAG = "mlflow.note.content"
# What stands outside of these is the user's.
BEGIN = "<!-- batchai: kept up to date from here, what you write outside of it stays -->"
END = "<!-- /batchai -->"
SECONDS = 10.0
# What is wider in a block pushes what stands beside the description out of MLflow's page.
WIDEST_LINE = 70
MOST_HOSTS, MOST_NOTES, LONGEST_LINE, LONGEST_NAME = 8, 10, 400, 100
# So much of a failure is told, the last of it; of what a script has said of the run the first.
LONGEST_REASON, LONGEST_SCRIPT_NOTE = 2500, 1500
# What stands around that: a heading, and two fences longer than its lines.
FRAME = 40 + 2 * WIDEST_LINE


@dataclass(frozen=True)
class Facts:
    """Facts about a job for its description.

    Attributes:
        waits: what it waits for before it is started; empty: nothing, or for nodes only.
        pace: how far its training has come, if its lines tell.
        notes: sentences on what was left out, and what else there is to tell.
    """

    plan: Plan
    attempt: int
    state: JobState
    hosts: Sequence[str] = ()
    waits: str = ""
    pace: Pace | None = None
    last_step: int | None = None
    sending: str = ""
    notes: Sequence[str] = ()
    script_note: str = ""


def markdown(facts: Facts, room: int = LONGEST_TAG) -> str:
    """Write the description, without its markers.

    What users and ranks have written stands in code only, where neither Markdown nor HTML means anything.

    Args:
        room: how many characters it may have; what a failed rank has written is shortened for it, then notes are left out.
    """
    head, about = _head(facts), "\n".join(_about(facts))
    tail = block("\n".join(map(_command, commands(facts.plan, facts.state))), "sh")
    left = room - len(head) - len(about) - len(tail) - 6
    parts = [head]
    if reason := _bounded(facts.state.reason or facts.waits):
        # Before all else: the page shows the first lines, and the others when it is asked to. Of these the last says most.
        *before, last = reason.rstrip().split("\n")
        if before and len(said := f": {code(last[:LONGEST_LINE])}") < left // 3:
            parts = [head + said]
            left -= len(said)
        parts.append(block(_last(_folded(reason), min(left - 40, LONGEST_REASON))))
        left -= len(parts[-1]) + 2
    parts.append(about)
    notes = [f"- {code(_last(note, LONGEST_LINE))}" for note in facts.notes[:MOST_NOTES]]
    while notes and len("\n".join(notes)) + 2 > left:
        notes.pop()
    if notes:
        parts.append("\n".join(notes))
        left -= len(parts[-1]) + 2
    if (said := _folded(facts.script_note.strip())) and (most := min(left - FRAME, LONGEST_SCRIPT_NOTE)) > 0:
        kept = said if len(said) <= most else f"{said[:most].rstrip()}\n..."
        parts.append(f"note from the script:\n\n{block(kept)}")
    return "\n\n".join([*parts, tail])


def _head(facts: Facts) -> str:
    plan, state = facts.plan, facts.state
    said = [f"**{'terminated' if state.terminated else state.execution_state}**"]
    left = int(plan.retries_left or 0)
    said.append(f"attempt {facts.attempt}" + (f" of at most {facts.attempt + left}" if left else ""))
    if state.error_code:
        said.append(code(state.error_code[:LONGEST_NAME]))
    if state.exit_code is not None:
        said.append(f"exit code {state.exit_code}")
    return ", ".join(said)


def _about(facts: Facts) -> list[str]:
    plan = facts.plan
    nodes, ranks = plan.node_count, plan.ranks
    hosts = sorted(set(facts.hosts))
    where = ", ".join(code(host[:LONGEST_NAME]) for host in hosts[:MOST_HOSTS]) + (", ..." if len(hosts) > MOST_HOSTS else "")
    on = f" on {where}" if hosts else ""
    lines = [
        f"- job {code(plan.name)}, cluster {code(plan.cluster)}",
        f"- {_count(nodes, 'node')}{on}, {_count(ranks, 'rank')}",
    ]
    if progress := _progress(facts):
        lines.append(f"- {progress}")
    if facts.sending:
        lines.append(f"- sending {code(facts.sending)}")
    return lines


def _progress(facts: Facts) -> str:
    pace, ended = facts.pace, facts.state.ended
    if pace is not None:
        expected = f", expected end {_moment(pace.end)}" if pace.end is not None and not ended else ""
        return f"epoch {pace.epoch} of {pace.epochs}{expected}"
    return "" if facts.last_step is None else f"last step {facts.last_step}"


def commands(plan: Plan, state: JobState) -> list[str]:
    """Shell commands that a person may want for a job."""
    name = plan.name
    if not state.ended:
        wanted = [["attach", name], ["logs", "-f", name], ["terminate", name]]
    else:
        wanted = [["logs", name], ["file", "list", "-j", name]]
        if state.execution_state != protocol.SUCCEEDED:
            wanted.append(["retry", name])
    scope = ["-w", plan.workspace, "-e", plan.experiment]
    return [shlex.join(["batchai", "job", *words, *scope]) for words in wanted]


def _command(text: str) -> str:
    """A command as a block shows it: on two lines if it is wide."""
    return text if len(text) <= WIDEST_LINE else text.replace(" -w ", " \\\n  -w ", 1)


def code(text: object) -> str:
    """Text of others inside of a line, as it is."""
    plain = " ".join(_tame(str(text)).split())
    ticks = "`" * (_longest(plain) + 1)
    return f"{ticks} {plain} {ticks}" if "`" in plain or not plain else f"{ticks}{plain}{ticks}"


def block(text: str, language: str = "") -> str:
    """Text of others as a block: its fence is longer than any row of backticks in it."""
    plain = _tame(text)
    fence = "`" * max(3, _longest(plain) + 1)
    return f"{fence}{language}\n{plain}\n{fence}"


def _longest(text: str) -> int:
    return max((len(row) for row in re.findall("`+", text)), default=0)


def _tame(text: str) -> str:
    """Remove control sequences and text that looks like our markers."""
    lines = (as_shown(line) for line in text.split("\n"))
    shown = "\n".join("".join(letter if letter.isprintable() else " " for letter in line) for line in lines)
    return shown.replace("<!--", "<! --")


def _folded(text: str) -> str:
    """Text of others with its wide lines on several."""
    fold = textwrap.TextWrapper(WIDEST_LINE, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False)
    return "\n".join("\n".join(fold.wrap(line)) for line in _tame(text).split("\n"))


def _bounded(reason: str) -> str:
    """The parts of a failure that the description shows."""
    first, _, rest = reason.partition("\n")
    return f"{first[:LONGEST_REASON]}\n{rest[-2 * LONGEST_REASON :]}" if rest else first[:LONGEST_REASON]


def _last(text: str, room: int) -> str:
    """The first line, and as many of the last ones as have room."""
    first, _, rest = text.strip("\n").partition("\n")
    if len(first) + len(rest) + 1 <= room:
        return text.strip("\n")
    first = first[:LONGEST_LINE]
    kept: list[str] = []
    for line in reversed(rest.split("\n")):
        room -= len(line) + 1
        if room < len(first) + 5:
            break
        kept.insert(0, line)
    return "\n".join([first, *(["..."] if rest else []), *kept])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _moment(milliseconds: int) -> str:
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1000, timezone.utc):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # a node's clock says what it likes
        return "unknown"


def merged(present: str, write: Callable[[int], str]) -> str:
    """A run's description with our part in it brought up to date; what a person has written around it stays.

    Args:
        write: makes our part, given how many characters it may have; one that is longer has no room beside what he wrote.
    """
    end = present.find(END)
    begin = present.rfind(BEGIN, 0, end) if end >= 0 else -1
    if begin >= 0:
        before, after = present[:begin], present[end + len(END) :]
    else:
        # None of ours, or one that a person has cut in two: then all of it is his.
        before, after = (present.rstrip() + "\n\n" if present.strip() else ""), ""
    room = LONGEST_TAG - len(before) - len(after) - len(BEGIN) - len(END) - 2
    ours = write(room)
    return present if len(ours) > room else f"{before}{BEGIN}\n{ours}\n{END}{after}"


class Description:
    """Keeps a run's description up to date."""

    def __init__(self, client: MlflowClient, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._run_id = run_id
        self._clock = clock
        self._said = ""
        self._state: tuple[int, str] | None = None
        self._next = 0.0

    def show(self, facts: Facts) -> None:
        """Send what has changed: another state at once, all else every ``SECONDS`` at most."""
        state, now = (facts.attempt, facts.state.execution_state), self._clock()
        if (state == self._state and now < self._next) or (said := markdown(facts)) == self._said:
            return
        for tag, text in self.tags(facts).items():
            self._client.set_tag(self._run_id, tag, text)
        self._said, self._state, self._next = said, state, now + SECONDS

    def tags(self, facts: Facts) -> dict[str, str]:
        """The tag that is to be set for it, if it isn't as it should be; a person may write in it at any time."""
        present = self._client.get_run(self._run_id).data.tags.get(TAG, "")
        wanted = merged(present, lambda room: markdown(facts, room))
        return {} if wanted == present else {TAG: tag_text(wanted)}
