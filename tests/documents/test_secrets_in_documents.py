"""Secrets never show: not in repr, text, JSON, masked copies, warnings, errors or tracebacks."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_documents import AZURE, HIDDEN, JOB

from mlflow_batchai.documents.cluster import parse_cluster
from mlflow_batchai.documents.job import FRAMEWORKS, JobDocument, parse_job
from mlflow_batchai.documents.model import masked, secret_values
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.errors import DocumentError


@pytest.mark.parametrize(("parser", "data"), [(parse_job, JOB), (parse_cluster, AZURE)])
def test_no_form_of_a_document_shows_a_secret(parser: Any, data: dict[str, Any]) -> None:
    document, warnings = parser(data, "job.json")
    copied = masked(document)
    shown = [repr(document), str(document), document.model_dump_json(), json.dumps(copied), repr(warnings)]
    shown += [repr(document.model_dump()), f"{document}"]
    assert not any(HIDDEN in text for text in shown)
    assert json.loads(json.dumps(data).replace(HIDDEN, "*" * 10)) == copied, "all else is as it was given"
    again, _ = parser(copied, "spec.json")
    assert masked(again) == copied


@pytest.mark.parametrize(("value", "secret"), [(HIDDEN, HIDDEN), (12345678, "12345678")])
def test_the_secret_is_there_for_who_asks(value: object, secret: str) -> None:
    document, _ = parse_job({"properties": {"secrets": [{"name": "TOKEN", "value": value}]}}, "job.json")
    assert list(secret_values(document)) == [secret]


VAULT = {"sourceVault": {"id": "v"}, "secretUrl": "u"}


@pytest.mark.parametrize(
    "secrets",
    [
        HIDDEN,
        [HIDDEN],
        {"TOKEN": HIDDEN},
        [{"name": "A", "value": [HIDDEN]}],
        [{"name": "A", "value": {"value": HIDDEN}}],
        [{"name": "A", "valu": HIDDEN}],
        [{"name": "A", "value": HIDDEN, "valueSecretReference": VAULT}],
        [{"name": "A", "value": HIDDEN}, {"name": "A", "value": HIDDEN}],
        [{"value": HIDDEN}],
        [{"name": "A", "value": HIDDEN, "comment": HIDDEN, "extra": HIDDEN}],
    ],
)
def test_errors_do_not_repeat_a_secret(secrets: Any) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_job({"properties": {"secrets": secrets}}, "job.json")
    assert HIDDEN not in str(caught.value)
    frames = "".join(traceback.format_exception(caught.value))
    assert HIDDEN not in frames
    assert caught.value.__context__ is None
    with pytest.raises(ValueError) as raw:
        JobDocument.model_validate({"properties": {"secrets": secrets}})
    assert HIDDEN not in str(raw.value)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (f'{{"value": "{HIDDEN}" "x"}}', "job.json"),
        (f'{{"value": "{HIDDEN}", "value": "{HIDDEN}"}}', "job.json"),
        (f"value: '{HIDDEN}", "batchai.yaml"),
        (f"value: {HIDDEN}: x", "batchai.yaml"),
        (f"value: {HIDDEN}\nvalue: {HIDDEN}", "batchai.yaml"),
    ],
)
def test_syntax_errors_do_not_repeat_a_secret(text: str, source: str) -> None:
    with pytest.raises(DocumentError) as caught:
        load_text(text, source)
    assert HIDDEN not in "".join(traceback.format_exception(caught.value, limit=0))


LETTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])  # a document with others is refused
TEXT = st.text(LETTERS, min_size=1, max_size=12).filter(str.strip)
IDS = st.from_regex(r"[A-Z_]{1,6}", fullmatch=True)


def named(key: str, **others: Any) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.fixed_dictionaries({key: IDS, **others}), max_size=3, unique_by=lambda entry: entry[key])


JOBS = st.fixed_dictionaries(
    {},
    optional={
        "nodeCount": st.integers(1, 100),
        "stdOutErrPathPrefix": TEXT,
        "schedulingPriority": st.sampled_from(["low", "normal", "high"]),
        "jobPreparation": st.fixed_dictionaries({"commandLine": TEXT}),
        "constraints": st.fixed_dictionaries({"maxWallClockTime": st.sampled_from(["P7D", "PT90S", "1.02:03:04"])}),
        "inputDirectories": named("id", path=TEXT),
        "environmentVariables": named("name", value=st.text(LETTERS, max_size=9)),
    },
)


@settings(max_examples=60, deadline=None)
@given(properties=JOBS, block=st.sampled_from(sorted(FRAMEWORKS)))
def test_a_stored_copy_reads_as_the_same_document(properties: dict[str, Any], block: str) -> None:
    document, _ = parse_job({"properties": {**properties, block: {}}}, "job.json")
    stored = json.loads(json.dumps(masked(document)))
    assert parse_job(stored, "spec.json")[0] == document
