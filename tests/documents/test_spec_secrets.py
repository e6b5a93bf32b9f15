"""Secrets never show: not in repr, text, JSON, masked copies, warnings, errors or tracebacks."""

from __future__ import annotations

import copy
import json
import traceback
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_batchai.documents.job import FRAMEWORKS, JobDocument
from mlflow_batchai.documents.model import masked
from mlflow_batchai.documents.reading import load_text, parse_cluster, parse_job
from mlflow_batchai.errors import DocumentError

HIDDEN = "hunter2hunter2"
JOB: dict[str, Any] = {
    "properties": {
        "nodeCount": 1,
        "secrets": [{"name": "TOKEN", "value": HIDDEN}],
        "mountVolumes": {
            "azureFileShares": [
                {
                    "azureFileUrl": "https://a/s",
                    "relativeMountPath": "s",
                    "credentials": {"accountKey": HIDDEN},
                }
            ],
            "azureBlobFileSystems": [{"containerName": "c", "relativeMountPath": "c", "credentials": {"accountKey": HIDDEN}}],
        },
        "containerSettings": {"imageSourceRegistry": {"image": "i", "credentials": {"username": "u", "password": HIDDEN}}},
    }
}
CLUSTER: dict[str, Any] = {
    "userAccountSettings": {"adminUserName": "u", "adminUserPassword": HIDDEN},
    "nodeSetup": {
        "setupTask": {
            "commandLine": "true",
            "stdOutErrPathPrefix": "/p",
            "secrets": [{"name": "TOKEN", "value": HIDDEN}],
        },
        "performanceCountersSettings": {"appInsightsReference": {"component": {"id": "/c"}, "instrumentationKey": HIDDEN}},
    },
}


@pytest.mark.parametrize(("parser", "data"), [(parse_job, JOB), (parse_cluster, CLUSTER)])
def test_no_form_of_a_document_shows_a_secret(parser: Any, data: dict[str, Any]) -> None:
    document, warnings = parser(data, "job.json")
    copied = masked(document)
    shown = [repr(document), str(document), document.model_dump_json(), json.dumps(copied), repr(warnings)]
    shown += [repr(document.model_dump()), f"{document}"]
    assert not any(HIDDEN in text for text in shown)
    assert json.loads(json.dumps(data).replace(HIDDEN, "*" * 10)) == copied, "all else is as it was given"
    again, _ = parser(copied, "spec.json")
    assert masked(again) == copied


def test_the_secret_is_there_for_who_asks() -> None:
    document, _ = parse_job(JOB, "job.json")
    value = document.properties.secrets[0].value
    assert value is not None and value.get_secret_value() == HIDDEN


@pytest.mark.parametrize(
    "secrets",
    [
        HIDDEN,
        [HIDDEN],
        {"TOKEN": HIDDEN},
        [{"name": "A", "value": [HIDDEN]}],
        [{"name": "A", "value": {"value": HIDDEN}}],
        [{"name": "A", "valu": HIDDEN}],
        [
            {
                "name": "A",
                "value": HIDDEN,
                "valueSecretReference": {"sourceVault": {"id": "v"}, "secretUrl": "u"},
            }
        ],
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


def test_a_number_may_be_a_secret() -> None:
    data = copy.deepcopy(JOB)
    data["properties"]["secrets"][0]["value"] = 12345678
    document, _ = parse_job(data, "job.json")
    assert document.properties.secrets[0].value is not None
    assert document.properties.secrets[0].value.get_secret_value() == "12345678"


TEXT = st.text(min_size=1, max_size=12)
IDS = st.from_regex(r"[A-Z_]{1,6}", fullmatch=True)
JOBS = st.fixed_dictionaries(
    {},
    optional={
        "nodeCount": st.integers(1, 100),
        "stdOutErrPathPrefix": TEXT,
        "schedulingPriority": st.sampled_from(["low", "normal", "high"]),
        "jobPreparation": st.fixed_dictionaries({"commandLine": TEXT}),
        "constraints": st.fixed_dictionaries({"maxWallClockTime": st.sampled_from(["P7D", "PT90S", "1.02:03:04"])}),
        "inputDirectories": st.lists(
            st.fixed_dictionaries({"id": IDS, "path": TEXT}), max_size=3, unique_by=lambda entry: entry["id"]
        ),
        "environmentVariables": st.lists(
            st.fixed_dictionaries({"name": IDS, "value": st.text(max_size=9)}),
            max_size=3,
            unique_by=lambda entry: entry["name"],
        ),
    },
)


@settings(max_examples=60, deadline=None)
@given(properties=JOBS, block=st.sampled_from(sorted(FRAMEWORKS)))
def test_a_stored_copy_reads_as_the_same_document(properties: dict[str, Any], block: str) -> None:
    document, _ = parse_job({"properties": {**properties, block: {}}}, "job.json")
    stored = json.loads(json.dumps(masked(document)))
    assert parse_job(stored, "spec.json")[0] == document
