"""Choose the metrics of a job from all that its ranks report: pure, so that a replay gives the same points.

Sources in order of precedence per key: ``report`` calls, ``metrics:`` rules of batchai.yaml, Keras' own progress lines of rank
0 (used only for keys that no other source has spoken of, and not where the script logs its epochs by MLflow, which calls them
by other names, too). The first value of (key, step) stands. What scripts log by MLflow
counts as it does there, each value, since many never say a step; but a step that is trained again by a later attempt doesn't.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mlflow_batchai.agent.layout import node_id
from mlflow_batchai.agent.plan import MetricRule
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.records import is_number
from mlflow_batchai.documents import metric_rules as rules
from mlflow_batchai.terminal import printable

REPORT, RULE, KERAS = 0, 1, 2
# An epoch that doesn't fit into 64 bits is none.
_EPOCH = re.compile(r"Epoch (?P<epoch>\d{1,18})/(?P<epochs>\d{1,18})\s*")
# Up to Keras 2.3 verbose=2 gave no number of steps: " - 1s - loss: 0.5".
_PROGRESS = re.compile(r"\s*(?:(?P<done>\d+)/(?P<steps>\d+)\s|\s- \d+m?s -)(?P<values>.*)")
_VALUE = re.compile(r"(?P<name>[^:]+): (?P<value>[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|inf|nan))")

_BAD_KEY = re.compile(r"[^\w\-. :/]")
# Colours and what else a terminal is told (ECMA-48: CSI; OSC up to its end): Keras and others write them into pipes, too.
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))|\x08")
LONGEST_KEY = 250
# What of a line is looked at.
LONGEST_LINE = 4096
# Of how many names that were changed it is remembered how they came.
MOST_NAMES = 1000
AUTOLOGGING = "mlflow.autologging"
LARGEST_STEP = 2**63 - 1
# The steps of a key whose values came without any: MLflow says 0 then.
_NO_STEPS = [[0, 0, 1]]


SYSTEM = "system"


class Point(NamedTuple):
    """One value to store; ``timestamp`` in milliseconds since the epoch."""

    key: str
    value: float
    timestamp: int
    step: int


def metric_key(name: str) -> str:
    """A name that MLflow stores (one bad name would fail a whole batch): other characters become ``_``, and so does ``..``.

    MLflow takes a name only if it is a path in its shortest form: ``a//b`` and ``a/./b`` become ``a/b``, ``/a`` becomes ``a``.
    """
    parts = _BAD_KEY.sub("_", name)[:LONGEST_KEY].split("/")
    path = "/".join("__" if part == ".." else part for part in parts if part not in ("", "."))
    return "__" + path[2:] if path.startswith("..") else path or "_"


def whole(value: object) -> int:
    """A step or a time as MLflow can store it; 0 for anything else, since a rank may have written anything."""
    try:
        number = int(value) if isinstance(value, (int, float, str)) else 0
    except (ValueError, OverflowError):
        return 0
    return number if abs(number) <= LARGEST_STEP else 0


def _time(value: object) -> int:
    """Milliseconds since the epoch as MLflow can store them: it takes none before."""
    return max(0, whole(value))


def as_shown(line: str) -> str:
    """A line as a terminal would show it in the end, without colours: of a bar that redraws itself the last state."""
    return _CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2])


class Names:
    """Under which name each metric is stored, and what there is to tell of that.

    Args:
        known: keys that it had given by then.
    """

    def __init__(self, memory: Mapping[str, Sequence[str]] | None = None, known: Iterable[str] = ()) -> None:
        # Key -> all names that became it, of keys that at least one name had to be changed for.
        self._changed: dict[str, list[str]] = {key: list(names) for key, names in (memory or {}).items()}
        self._count = sum(map(len, self._changed.values()))
        self._news: list[str] = []
        self._as_they_are = set(known) - self._changed.keys()

    def remember(self) -> dict[str, list[str]]:
        """The memory for a later process, as JSON."""
        return {key: list(names) for key, names in self._changed.items()}

    def key(self, name: str) -> str:
        """The key that a metric of that name is stored under (``metric_key``)."""
        if name in self._as_they_are and name not in self._changed:
            return name
        key = metric_key(name)
        if key == name and key not in self._changed:
            self._as_they_are.add(key)
            return key
        names = self._changed.get(key) or ([key] if key in self._as_they_are else [])
        if (short := _shown(name)) not in names and self._count < MOST_NAMES:
            self._changed[key] = [*names, short]
            self._count += 1
            self._news.append(self._sentence(key))
        return key

    def _sentence(self, key: str) -> str:
        names = self._changed[key]
        if len(names) == 1:
            return f"metric '{names[0]}' is stored as '{key}'"
        quoted = " and ".join(f"'{name}'" for name in names)
        return f"metrics {quoted} are all stored as '{key}': of each step the first value stands"

    def notices(self) -> list[str]:
        """A sentence for each key that names were changed for."""
        return [self._sentence(key) for key in self._changed]

    def news(self) -> list[str]:
        """The sentences that have become true since the last call."""
        news, self._news = self._news, []
        return news


def _shown(name: str) -> str:
    """A name in a sentence, on one line."""
    some = name[:LONGEST_KEY]
    if len(name) <= LONGEST_KEY:
        return printable(some)
    return f"{printable(some)}... ({len(name)} letters, {zlib.crc32(name.encode('utf-8', 'replace')):08x})"


class MetricFold:
    """Turns records into points, each (key, step) once.

    Args:
        same_attempt: whether that was in this attempt.

    Attributes:
        repeated: how many values came for a step that had one.
        refused: sentences on rules that can't be used: a share may have changed them since they were checked.
    """

    def __init__(self, rules: Sequence[MetricRule], memory: Mapping[str, Any] | None = None, same_attempt: bool = True) -> None:
        memory = memory or {}
        self.refused: list[str] = []
        self._rules = self._compiled(rules)
        # key -> [first, last, stride] of the steps that have a value: a run of a million costs one triple.
        self._source: dict[str, int] = dict(memory.get("source", {}))
        self._steps = _copied(memory.get("steps", {}))
        # The same, of earlier attempts.
        self._earlier = _copied(memory.get("earlier" if same_attempt else "steps", {}))
        self._highest = {key: max(span[1] for span in spans) for key, spans in self._steps.items()}
        self._counts: dict[str, int] = dict(memory.get("counts", {}))
        # Keys that scripts have logged by MLflow, and the tag of its autologging, which comes before the first epoch's end.
        self._by_mlflow: set[str] = set(memory.get("mlflow", ()))
        self._keras = KerasLines(memory.get("keras"))
        self.names = Names(memory.get("names"), self._source)
        self.repeated = int(memory.get("repeated", 0))
        self.unread = int(memory.get("unread", 0))

    def _compiled(self, given: Sequence[MetricRule]) -> list[tuple[str, Any, str | None]]:
        found = []
        for number, rule in enumerate(given):
            try:
                found.append((rule.name, rules.compiled(rule.regex, rule.step), rule.step))
            except rules.RuleError as error:
                self.refused.append(f"metrics[{number}] ('{_shown(rule.name)}') {error}: it plays no part")
        return found

    def remember(self) -> dict[str, Any]:
        """The memory for a later process, as JSON."""
        return {
            "source": dict(self._source),
            "steps": _copied(self._steps),
            "earlier": _copied(self._earlier),
            "counts": dict(self._counts),
            "mlflow": sorted(self._by_mlflow),
            "keras": self._keras.remember(),
            "names": self.names.remember(),
            "repeated": self.repeated,
            "unread": self.unread,
        }

    def feed(self, records: Iterable[Record]) -> list[Point]:
        """The new points of some records, in their order."""
        points: list[Point] = []
        for record in records:
            if record["k"] == "report" and record["body"].get("type") == "metric":
                points += self._report(record["body"])
            elif record["k"] == "report" and record["body"].get("type") == "tag":
                values = record["body"].get("values")
                self._by_mlflow |= {AUTOLOGGING} & values.keys() if isinstance(values, Mapping) else set()
            elif record["k"] == "log" and record["r"] is not None:
                points += self._log(record)
        return points

    def finish(self) -> list[Point]:
        """The points that were still held back when the attempt ended; what comes now is of another one."""
        return self._of_epoch(self._keras.finish())

    @property
    def pace(self) -> Pace | None:
        """Progress of the training by Keras' lines."""
        return self._keras.pace

    @property
    def last_step(self) -> int | None:
        """The highest step that anything was reported for; None: nothing was."""
        return max(self._highest.values(), default=None)

    def _of_epoch(self, found: EpochValues | None) -> list[Point]:
        if found is None:
            return []
        numbers = {self.names.key(name): number for name, text in found.values.items() if (number := numeric(text)) is not None}
        if not self._by_mlflow.isdisjoint({*numbers, AUTOLOGGING}):
            return []
        points = [self._point(KERAS, key, number, found.time, found.epoch) for key, number in numbers.items()]
        return [point for point in points if point]

    def _report(self, body: Mapping[str, Any]) -> list[Point]:
        rank = whole(body.get("rank"))
        prefix = f"rank_{rank}/" if rank else ""
        values = body.get("values")
        if not isinstance(values, Mapping):
            self.unread += 1
            return []
        every = body.get("every") is True
        found: list[Point | None] = []
        for name, value in values.items():
            number = numeric(value)
            if number is None:
                self.unread += 1
                continue
            key = self.names.key(name if name.startswith(prefix) else prefix + name)
            if every:
                self._by_mlflow.add(key)
            found.append(self._point(REPORT, key, number, _time(body.get("ts")), whole(body.get("step")), every))
        return [point for point in found if point]

    def _log(self, record: Record) -> list[Point]:
        points: list[Point | None] = []
        for line in record["x"].split("\n") if record["r"] == 0 else ():
            shown = as_shown(line)
            # RE2 takes UTF-8 only.
            looked_at = shown[:LONGEST_LINE].encode("utf-8", "replace").decode("utf-8") if self._rules else ""
            for name, pattern, step_group in self._rules:
                match = pattern.search(looked_at)
                if match:
                    points.append(self._rule(name, match, step_group, _time(record["t"])))
            # Keras prints an epoch's line before a callback can report it: it counts when the next epoch begins.
            if record["s"] == "out" and len(shown) <= LONGEST_LINE:
                points += self._of_epoch(self._keras.feed(shown, _time(record["t"])))
        return [point for point in points if point]

    def _rule(self, name: str, match: Any, step_group: str | None, timestamp: int) -> Point | None:
        groups, indexes = match.groupdict(), match.re.groupindex
        step_index = indexes.get(step_group or "step")
        value_index = indexes.get("value")
        if value_index is None or value_index == step_index:  # then the first group with a text that isn't the step
            others = (index for index in range(1, match.re.groups + 1) if index != step_index)
            value_index = next((index for index in others if match[index] is not None), None)
        number = numeric(match[value_index]) if value_index is not None else None
        if number is None:
            self.unread += 1
            return None
        key = self.names.key(name)
        step_text = groups.get(step_group or "step")
        told = step_text is not None and re.fullmatch(r"\d{1,18}", step_text)
        step = int(step_text) if told and step_text else self._counts.get(key, 0)
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._point(RULE, key, number, timestamp, step)

    def _point(self, source: int, key: str, value: float, timestamp: int, step: int, every: bool = False) -> Point | None:
        best = self._source.get(key, source)
        if source > best:
            return None
        self._source[key] = source
        if not self._first(key, step) and not (every and self._may_follow(key, step)):
            if source == REPORT:
                self.repeated += 1
            return None
        return Point(key, value, timestamp, step)

    def _may_follow(self, key: str, step: int) -> bool:
        """Whether another value of a step is news: no earlier attempt has one, or its key is logged without steps."""
        earlier = self._earlier.get(key, [])
        return earlier == _NO_STEPS or not _is_among(step, earlier)

    def _first(self, key: str, step: int) -> bool:
        """Note (key, step); False if it was there."""
        spans = self._steps.setdefault(key, [])
        highest = self._highest.get(key)
        if highest is None or step > highest:
            self._highest[key] = step
        elif _is_among(step, spans):
            return False
        if spans and step > spans[-1][1] and (spans[-1][0] == spans[-1][1] or step == spans[-1][1] + spans[-1][2]):
            spans[-1][2] = step - spans[-1][1]
            spans[-1][1] = step
        else:
            spans.append([step, step, 1])
        return True


def _copied(steps: Mapping[str, Iterable[Iterable[int]]]) -> dict[str, list[list[int]]]:
    return {key: [list(span) for span in spans] for key, spans in steps.items()}


def _is_among(step: int, spans: Iterable[Sequence[int]]) -> bool:
    return any(low <= step <= high and (step - low) % stride == 0 for low, high, stride in spans)


def numeric(value: object) -> float | None:
    """A value as a number; "nan" and "inf" come as text, since JSON has no word for them."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float, str)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        return math.copysign(1.797e308, number) if math.isinf(number) else number
    return None


class EpochValues(NamedTuple):
    """An epoch's own line: its number from 0, when it came (milliseconds since the epoch), name -> number as written."""

    epoch: int
    time: int
    values: dict[str, str]


class _Line(NamedTuple):
    """A complete line: of how many steps (0: it doesn't say), when, and what it says."""

    steps: int
    time: int
    values: dict[str, str]


def _line(memory: Any) -> _Line | None:
    return _Line(int(memory[0]), int(memory[1]), dict(memory[2])) if memory else None


class Pace(NamedTuple):
    """Progress of a training.

    Attributes:
        epoch: the one that is being trained, from 1.
        end: when the last of them will have ended, as it goes: milliseconds since the epoch; None: that can't be told yet.
    """

    epoch: int
    epochs: int
    end: int | None


class KerasLines:
    """Keras' progress lines of one rank: which of them are an epoch's, and how far a training has come.

    Keras 2 and 3 write ``Epoch 1/5`` and then, with ``verbose=1``, a bar that is redrawn with carriage returns, with
    ``verbose=2`` one line. An evaluation looks the same, and callbacks of an epoch evaluate before its own line is written.
    Lines are read without colours and all but the last state of each; JSON in, JSON out (``remember``).
    """

    def __init__(self, memory: Mapping[str, Any] | None = None) -> None:
        memory = memory or {}
        # The epoch that is being trained, from 1, and of how many; 0: none.
        self._epoch = int(memory.get("epoch", 0))
        self._epochs = int(memory.get("epochs", 0))
        self._time = int(memory.get("time", 0))
        # The first epoch line of this training: number, time.
        self._first = int(memory.get("first", 0))
        self._begun = int(memory.get("begun", 0))
        # Steps of an epoch of this training, once one is over; 0: not known.
        self._steps = int(memory.get("steps", 0))
        # Of the epoch's complete lines the one that is its own, if it is the last epoch; and the last one.
        self._best = _line(memory.get("best"))
        self._last = _line(memory.get("last"))

    def remember(self) -> dict[str, Any]:
        """The memory for a later process, as JSON."""
        return {
            "epoch": self._epoch,
            "epochs": self._epochs,
            "time": self._time,
            "first": self._first,
            "begun": self._begun,
            "steps": self._steps,
            "best": self._best and list(self._best),
            "last": self._last and list(self._last),
        }

    def feed(self, line: str, time: int) -> EpochValues | None:
        """Take a line; the values of the epoch before, if the line begins another one."""
        if match := _EPOCH.fullmatch(line):
            return self._begin(int(match["epoch"]), int(match["epochs"]), time)
        match = _PROGRESS.match(line) if self._epoch and " - " in line else None
        if match and match["done"] == match["steps"]:
            found = [_VALUE.fullmatch(part.strip()) for part in match["values"].split(" - ")]
            if values := {value["name"]: value["value"] for value in found if value}:
                self._consider(_Line(int(match["steps"] or 0), time, values))
        return None

    def finish(self) -> EpochValues | None:
        """No more lines come: the values of the last epoch."""
        found = self._taken(self._best)
        self._epoch = 0
        return found

    @property
    def pace(self) -> Pace | None:
        """Progress of the training; None: unknown."""
        if not self._epoch:
            return None
        done = self._epoch - self._first
        left = self._epochs - self._epoch + 1
        end = self._time + (self._time - self._begun) * left // done if done else None
        return Pace(self._epoch, self._epochs, end)

    def _begin(self, epoch: int, epochs: int, time: int) -> EpochValues | None:
        goes_on = epoch == self._epoch + 1 and epochs == self._epochs
        # What is written last before the next epoch is the epoch's own line: callbacks come before it.
        last = self._last
        found = self._taken(last if goes_on else self._best)
        if goes_on and last:
            self._steps = last.steps
        if not goes_on:
            self._first, self._begun, self._steps = epoch, time, 0
        self._epoch, self._epochs, self._time = epoch, epochs, time
        return found

    def _consider(self, line: _Line) -> None:
        best, self._last = self._best, line
        fits = self._steps == line.steps != 0
        # A bar that something else was written into is drawn again, with what it lacked.
        if best is None or line.values.keys() > best.values.keys() or (fits and best.steps != self._steps):
            self._best = line

    def _taken(self, line: _Line | None) -> EpochValues | None:
        self._best = self._last = None
        return EpochValues(self._epoch - 1, line.time, line.values) if line else None


class SampleFold:
    """Turns what nodes say of themselves into points, named as MLflow's own system metrics: ``system/node-0/...``.

    A node's samples are numbered through all attempts of the job, from 0: these are the steps.

    Args:
        same_attempt: whether that was in this attempt.

    Attributes:
        unread: how many values were no numbers, or of no node.
    """

    def __init__(self, nodes: int, memory: Mapping[str, Any] | None = None, same_attempt: bool = True) -> None:
        memory = memory or {}
        self._nodes = nodes
        # Of each node that has said something: where this attempt's steps begin, and the step after its last sample.
        self._following: dict[str, int] = dict(memory.get("following", {}))
        self._first: dict[str, int] = dict(memory.get("first", {})) if same_attempt else dict(self._following)
        self.unread = int(memory.get("unread", 0))

    def remember(self) -> dict[str, Any]:
        """The memory for a later process, as JSON."""
        return {"first": dict(self._first), "following": dict(self._following), "unread": self.unread}

    def feed(self, records: Iterable[Record]) -> list[Point]:
        """The points of the samples among some records, in their order."""
        return [point for record in records if record["k"] == SYSTEM for point in self._points(record)]

    def _points(self, record: Record) -> list[Point]:
        node = node_id(record["node"])
        step = self._first.get(node, 0) + record["n"]
        if record["node"] >= self._nodes or step >= LARGEST_STEP:
            self.unread += len(record["v"])
            return []
        self._following[node] = max(step + 1, self._following.get(node, 0))
        numbers = {name: float(value) for name, value in record["v"].items() if is_number(value)}
        self.unread += len(record["v"]) - len(numbers)
        time = max(0, whole(record["t"]))
        return [Point(metric_key(f"{SYSTEM}/{node}/{name}"), value, time, step) for name, value in numbers.items()]
