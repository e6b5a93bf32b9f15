"""Check what a relay has noted in its cursor: the next one goes on from there, and a share may have damaged it."""

from __future__ import annotations

from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.records import (
    Check,
    Shape,
    has,
    is_count,
    is_mapping,
    is_number,
    is_pair_of_counts,
    is_text,
    list_of,
    or_none,
)

DAMAGED = "what the relay had noted on the share was damaged: the attempt's events were read again from the first one"
_SENTENCES = ("notes", "leftOut", "onlyThere", "missing")


def _mapping_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and is_number(value)


def _is_span(value: object) -> bool:
    return list_of(_is_whole)(value) and isinstance(value, list) and len(value) == 3 and value[0] <= value[1] and value[2] > 0


def _is_line(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    steps, time, values = value
    return is_count(steps) and _is_whole(time) and _mapping_of(is_text)(values)


def _as_far_as_there(value: object, shape: Shape) -> bool:
    return isinstance(value, dict) and has(value, {key: check for key, check in shape.items() if key in value})


_KERAS: Shape = {
    **dict.fromkeys(("epoch", "epochs", "first", "steps"), is_count),
    **dict.fromkeys(("time", "begun"), _is_whole),
    **dict.fromkeys(("best", "last"), or_none(_is_line)),
}
_METRICS: Shape = {
    "source": _mapping_of(is_count),
    **dict.fromkeys(("steps", "earlier"), _mapping_of(lambda spans: list_of(_is_span)(spans) and bool(spans))),
    "counts": _mapping_of(is_count),
    "keras": lambda value: _as_far_as_there(value, _KERAS),
    "names": _mapping_of(list_of(is_text)),
    "repeated": is_count,
    "unread": is_count,
}
_SAMPLES: Shape = {"first": _mapping_of(is_count), "following": _mapping_of(is_count), "unread": is_count}
_FILES: Shape = {
    "waiting": _mapping_of(lambda told: isinstance(told, list) and len(told) == 2 and is_count(told[0]) and is_text(told[1])),
    "sent": _mapping_of(is_text),
    "leftOut": is_count,
    "refused": list_of(is_text),
}
_MODEL: Shape = {
    **dict.fromkeys(("name", "status"), is_text),
    "model_type": or_none(is_text),
    "step": is_number,
    **dict.fromkeys(("tags", "params"), _mapping_of(or_none(is_text))),
    "links": _mapping_of(list_of(_is_whole)),
    "files": _mapping_of(is_count),
}
_MODEL_ALWAYS: Shape = {key: _MODEL[key] for key in ("name", "tags", "params", "links", "files")}
_TRACKED: Shape = {
    "words": lambda value: _as_far_as_there(value, {"notes": list_of(is_text), "more": is_count}),
    "files": lambda value: _as_far_as_there(value, _FILES),
    "models": _mapping_of(lambda told: _as_far_as_there(told, _MODEL) and has(told, _MODEL_ALWAYS)),
}
# What belongs together: without one of these the others say nothing.
_PLACE: Shape = {
    "attempt": is_count,
    "cursor": _mapping_of(is_count),
    "ending": lambda value: isinstance(value, bool),
    "metrics": lambda value: _as_far_as_there(value, _METRICS),
    "samples": lambda value: _as_far_as_there(value, _SAMPLES),
    "models": list_of(is_mapping),
    "tracked": lambda value: _as_far_as_there(value, _TRACKED),
    "environment": or_none(is_text),
    "reports": _mapping_of(is_pair_of_counts),
    "lost": _mapping_of(is_count),
    "refused": is_count,
    "dropped": is_count,
    "skipped": is_pair_of_counts,
    "state": is_text,
}


def usable(memory: object) -> Record:
    """The part of a relay's memory that can be gone on from; with ``DAMAGED`` among its notes if that isn't all.

    A place that can't be trusted is given up as a whole: what is relayed again MLflow drops, since the points are the same.
    """
    if not isinstance(memory, dict):
        return {"notes": [DAMAGED]}
    sentences: Record = {key: memory[key] for key in _SENTENCES if list_of(is_text)(memory.get(key))}
    if _as_far_as_there(memory, _PLACE):
        return {**{key: value for key, value in memory.items() if key not in _SENTENCES}, **sentences}
    attempt = {"attempt": memory["attempt"]} if has(memory, {"attempt": is_count}) else {}
    return {**sentences, **attempt, "notes": [*sentences.get("notes", []), DAMAGED]}
