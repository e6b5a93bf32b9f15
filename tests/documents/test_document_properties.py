"""Whatever a document says, it gives a model or sentences that name the file: never another exception, never a long wait."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_documents import AZURE, BATCHAI, JOB, PROJECT, SETTINGS, SSH

from mlflow_batchai.documents.batchai import merge, parse_batchai, read_batchai
from mlflow_batchai.documents.cluster import parse_cluster
from mlflow_batchai.documents.job import parse_job
from mlflow_batchai.documents.mlproject import bind, find_entry_point, load_project
from mlflow_batchai.documents.model import parse
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.documents.settings import SettingsFile
from mlflow_batchai.errors import BatchAIError


def job(text: str, source: str) -> None:
    parse_job(load_text(text, source), source)


def cluster(text: str, source: str) -> None:
    parse_cluster(load_text(text, source), source)


def batchai(text: str, source: str) -> None:
    data = load_text(text, source)
    parse_batchai(data, source)
    parse_batchai(merge(BATCHAI, data), source)
    parse_batchai(merge(data, {"properties": {"customToolkitSettings": {"commandLine": "x"}}}), source)


def settings_file(text: str, source: str) -> None:
    parse(SettingsFile, load_text(text, source), source)


def mlproject(text: str, source: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "MLproject")
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            project = load_project(Path(folder))
            entry = find_entry_point(project, "main")
            bind(entry, {"data": "x"}, project.source)
            parse_batchai(read_batchai(path), source)
        except BatchAIError as error:
            raise type(error)(str(error).replace(str(path), source)) from None


KINDS = {"job.yaml": (job, JOB), "cluster.yaml": (cluster, {**SSH, "properties": AZURE}), "batchai.yaml": (batchai, BATCHAI)}
KINDS |= {"config.yaml": (settings_file, SETTINGS), "MLproject": (mlproject, PROJECT)}

NUMBERS = [0, -1, 2**31, 2**63, 10**400, -(10**30)]
TEXTS = ["", " ", "\0", "\n", "é", "\u2028", "\ud800", "..", "/", "$AZ_BATCHAI_MOUNT_ROOT/share/../..", "{", "{}", "P", "PT"]
TEXTS += ["PT99999999999H", "9" * 5000, "P1Y", "((((", "(?P<step>", "[", "*", "https://", "http://[", "https://a:b@c:d/e"]
KEYS = ["nodeCount", "node_count", "properties", "NodeCount", "comment", "$schema", "name", "value", "", "a.b", "é", "0"]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([*NUMBERS, *TEXTS])
keys = st.sampled_from(KEYS) | st.text(max_size=10)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a change can be made."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, below in inner for place in places(below, (*here, key)))]


def at(data: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        data = data[key]
    return data


@st.composite
def mutated(draw: st.DrawFn, valid: dict[str, Any]) -> Any:
    """A valid document after one to three changes."""
    data = {"document": json.loads(json.dumps(valid))}
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(data)[1:] or [("document",)]))
        above, key = at(data, place[:-1]), place[-1]
        how = draw(st.sampled_from(["replace", "delete", "rename", "nest", "move", "add"]))
        if key not in (above if isinstance(above, dict) else range(len(above))):
            continue
        if how == "delete" and len(place) > 1:
            del above[key]
        elif how == "rename" and isinstance(above, dict) and len(place) > 1:
            above[draw(keys)] = above.pop(key)
        elif how == "nest":
            above[key] = draw(st.sampled_from([[above[key]], {"properties": above[key]}, {draw(keys): above[key]}]))
        elif how == "move":
            above[key] = copy.deepcopy(at(data, draw(st.sampled_from(places(data)[1:]))))
        elif how == "add" and isinstance(above[key], dict):
            above[key][draw(keys)] = draw(values)
        else:
            above[key] = draw(values)
    return data["document"]


def written(data: Any, as_json: bool) -> str:
    if as_json:
        return json.dumps(data, ensure_ascii=False)
    return yaml.safe_dump(data, allow_unicode=True)


def check(read: Any, text: str, source: str) -> None:
    begun = time.monotonic()
    try:
        read(text, source)
    except BatchAIError as error:
        lines = str(error).splitlines() or [""]
        assert all(line.startswith(source) for line in lines), str(error)
        assert len(lines) <= 11 and all(len(line) < 2000 for line in lines), str(error)
        assert all(line.isprintable() for line in lines), repr(str(error))
    assert time.monotonic() - begun < 20.0


few = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_document_gives_a_model_or_sentences(name: str) -> None:
    read, valid = KINDS[name]

    @few
    @given(mutated(valid), st.booleans())
    def run(data: Any, as_json: bool) -> None:
        check(read, written(data, as_json), name)

    run()


ALIASES = ["&a [*a]", "&a {x: *a}", "x: &a [1]\ny: *a", "<<: *a", "&a [&b [*a, *b], *b]", "a: &x " + "[*x, " * 20]
MERGES = ["properties: &p {nodeCount: 1, inputDirectories: [*p]}", "<<: {nodeCount: 1}", "<<: [1]", "<<: x"]
TAGS = [
    "!!python/object/apply:os.system ['x']",
    "!!int x",
    "!!float x",
    "!!timestamp 2020-13-45",
    "!!binary '*'",
    "!!set {a, b}",
]
TAGS += ["!!omap [a: 1]", "!!pairs [a: 1]", "!unknown x", "%YAML 9.9\n---\na: 1", "%TAG ! tag:x:\n---\n!y z"]
SYNTAX = [
    "? [1]\n: 2",
    "? {a: b}\n: 2",
    "nodeCount: 1\nnodeCount: 2",
    "a: 1\n---\nb: 2",
    "...",
    "\t- x",
    "'",
    '"\\ud800"',
    '"\\x"',
]
SYNTAX += ["a: 0x1f\nb: 0o17\nc: 1_000\nd: 1:30\ne: .inf\nf: .nan\ng: 1e500", '{"a": 1, "a": 2}', '{"a": NaN}']
DEEP = ["{" * 400, "[" * 400, "- " * 400, '{"a":' * 400, "x: " + "9" * 5000, "\x00", "\x85", "\ud800", "\ufeff\ufeff"]
lines = st.sampled_from([*ALIASES, *MERGES, *TAGS, *SYNTAX, *DEEP])


@pytest.mark.parametrize("name", KINDS)
def test_odd_text_gives_a_model_or_sentences(name: str) -> None:
    read, valid = KINDS[name]
    whole = written(valid, False)

    @few
    @given(st.lists(lines | st.text(max_size=20), max_size=4), st.integers(0, len(whole)), st.booleans(), st.booleans())
    def run(pieces: list[str], cut: int, before: bool, alone: bool) -> None:
        odd = "\n".join(pieces)
        rest = whole[:cut] if before else whole[cut:]
        check(read, odd if alone else rest + "\n" + odd if before else odd + "\n" + rest, name)

    run()


def test_anchors_don_t_grow() -> None:
    """A billion entries in a hundred bytes."""
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for above, below in zip("bcdefghij", "abcdefghi", strict=True):
        bomb += f"{above}: &{above} [{', '.join(['*' + below] * 10)}]\n"
    for name, (read, _) in KINDS.items():
        check(read, bomb, name)
        check(read, bomb.replace("j: ", "properties: "), name)
        check(read, bomb.replace("j: ", "properties: {inputDirectories: ") + "}", name)
