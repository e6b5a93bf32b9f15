"""batchai.yaml: its keys, its metric rules, and how --backend-config overrides it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mlflow_batchai.documents.batchai import BatchaiFile, MetricRule, ModelSettings, merge
from mlflow_batchai.documents.job import HorovodSettings
from mlflow_batchai.documents.reading import load_text, parse_batchai
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.job.metrics import MetricFold

FORMS = "write it as ISO 8601 ('PT2H', 'P7D') or as 'd.hh:mm:ss' ('0.02:00:00'), in quotes"
ABOVE_ZERO = "must be more than zero seconds, and no more than a duration can be"
WHOLE = """
cluster: gpu
experiment: Cifar ten (nightly)
workspace: team-a
name: run_1
retries: 2
wait: false
stage: [data, weights]
model: {path: $AZ_BATCHAI_OUTPUT_MODEL/model.h5, register: cifar}
metrics:
  - {name: loss, regex: 'loss: ([0-9.]+)'}
properties:
  horovodSettings: {processCount: 4}
  jobPreparation: {commandLine: "pip list"}
  constraints: {maxWallClockTime: 1:30:00}
"""


def test_a_whole_file() -> None:
    document, warnings = parse_batchai(load_text(WHOLE, "batchai.yaml"), "batchai.yaml")
    assert warnings == []
    assert document.properties.framework == ("horovodSettings", HorovodSettings(process_count=4))
    assert document.model == ModelSettings(path="$AZ_BATCHAI_OUTPUT_MODEL/model.h5", register="cifar")
    assert document.model.register_as == "cifar" and document.model.name == "model"
    assert (document.retries, document.wait, document.stage) == (2, False, ("data", "weights"))
    assert str(document.properties.constraints.max_wall_clock_time) == "1:30:00"


def test_seconds_are_a_number_or_a_duration() -> None:
    document, _ = parse_batchai({"terminateGrace": 2.5, "relayDeadline": "PT1H"}, "batchai.yaml")
    assert document.terminate_grace.total_seconds() == 2.5 and document.relay_deadline.total_seconds() == 3600
    assert parse_batchai(document.model_dump(mode="json", by_alias=True), "again")[0] == document


def test_every_key_is_optional() -> None:
    assert parse_batchai({}, "batchai.yaml")[0] == BatchaiFile()
    assert BatchaiFile().wait and BatchaiFile().workspace is None and BatchaiFile().model is None


@pytest.mark.parametrize(
    ("given", "kept"), [(True, True), (False, False), ([], ()), (["a.txt", "b"], ("a.txt", "b")), (None, False)]
)
def test_what_a_kept_preparation_depends_on(given: Any, kept: bool | tuple[str, ...]) -> None:
    assert parse_batchai({"cachePreparation": given}, "batchai.yaml")[0].cache_preparation == kept


@pytest.mark.parametrize(
    ("regex", "step", "line", "value", "at"),
    [
        (r"loss: ([\d.]+)", None, "loss: 0.5", "0.5", None),
        (r"epoch (?P<step>\d+) loss ([\d.]+)", None, "epoch 3 loss 0.5", "0.5", "3"),
        (r"(?P<name>\w+)=(?P<value>\S+)", None, "acc=0.9", "0.9", None),
        (r"(?P<value>\S+) at (?P<epoch>\d+)", "epoch", "0.9 at 7", "0.9", "7"),
    ],
)
def test_metric_rules(regex: str, step: str | None, line: str, value: str, at: str | None) -> None:
    rule = MetricRule(name="m", regex=regex, step=step)
    fold = MetricFold([{"name": rule.name, "regex": rule.regex, "step": rule.step}])
    (point,) = fold.feed([{"k": "log", "r": 0, "s": "out", "t": 1, "x": line + "\n"}])
    assert (point.value, point.step) == (float(value), int(at or 0))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"metrics": [{"name": "a", "regex": "(b"}]},
            "metrics[0] ('a') has a regex that RE2 does not take: missing ): (b",
        ),
        (
            {"metrics": [{"name": "a", "regex": "b"}]},
            "metrics[0] ('a') has a regex without a group for the value; put parentheses around the number",
        ),
        (
            {"metrics": [{"name": "a", "regex": r"(?P<step>\d+)"}]},
            "metrics[0] ('a') has a regex without a group for the value; put parentheses around the number",
        ),
        (
            {"metrics": [{"name": "a", "regex": "(b)", "step": "epoch"}]},
            "metrics[0] ('a') has the step 'epoch', but its regex has no group of that name",
        ),
        ({"metrics": [{"name": "a"}]}, "metrics[0].regex is missing"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"retries": 101}, "retries must be at most 100"),
        ({"minNodes": 0}, "minNodes must be at least 1"),
        ({"properties": {"nodeCount": 2}, "minNodes": 3}, "has minNodes 3, more than properties.nodeCount (2)"),
        ({"terminateGrace": 0}, f"terminateGrace is 0, but {ABOVE_ZERO}"),
        ({"terminateGrace": True}, f"terminateGrace must be a duration; {FORMS}"),
        ({"terminateGrace": "PT11M"}, "terminateGrace must be PT10M at most: agents that end a job are waited for that long"),
        ({"relayDeadline": "soon"}, f"relayDeadline is 'soon', which is not a duration; {FORMS}"),
        ({"relayDeadline": float("inf")}, f"relayDeadline is inf, but {ABOVE_ZERO}"),
        ({"wait": "maybe"}, "wait must be true or false"),
        ({"stage": "data"}, "stage must be a list"),
        ({"stage": ["data", "data"]}, "gives the staged parameter 'data' twice"),
        ({"cachePreparation": "yes"}, "cachePreparation must be true, false, or a list of the project's files"),
        ({"cachePreparation": 1}, "cachePreparation must be true, false, or a list of the project's files"),
        ({"cachePreparation": [1]}, "cachePreparation must be true, false, or a list of the project's files"),
        ({"cachePreparation": ["a", ""]}, "cachePreparation must be true, false, or a list of the project's files"),
        ({"name": "my job"}, "name is 'my job', but must have 1 to 64 letters, digits, '-' or '_'"),
        (
            {"workspace": "w" * 65},
            f"workspace is '{'w' * 65}', but must have 1 to 64 letters, digits, '-' or '_'",
        ),
        ({"unheardOf": 2}, None),
        ({"nodeCount": 2}, "nodeCount is not a known key; did you mean properties.nodeCount?"),
        ({"node_count": 2}, "node_count is not a known key; did you mean properties.nodeCount?"),
        ({"jobPreparation": {}}, "jobPreparation is not a known key; did you mean properties.jobPreparation?"),
        ({"register": "digits"}, "register is not a known key; did you mean model.register?"),
        (
            {"properties": {"nodeCount": 2, "processCount": 2}},  # six blocks have it
            "properties.processCount is not a known key; did you mean properties.horovodSettings.processCount or "
            "properties.customMpiSettings.processCount or properties.pyTorchSettings.processCount?",
        ),
        (
            {"commandLine": "make"},
            "commandLine is not a known key; did you mean properties.customMpiSettings.commandLine or "
            "properties.customToolkitSettings.commandLine or properties.jobPreparation.commandLine?",
        ),
        (
            {"artifacts": {"exclude": ["../x"]}},
            "artifacts.exclude has '../x', which fits no file; write a pattern such as *.tmp, cache/ or models/old-*.h5",
        ),
        (
            {"artifacts": {"exclude": ["# all"]}},
            "artifacts.exclude has '# all', which fits no file; write a pattern such as *.tmp, cache/ or models/old-*.h5",
        ),
        ({"artifacts": {"checkpoint": True}}, "artifacts.checkpoint is not a known key; did you mean checkpoints?"),
        (
            {"model": {"register": "n", "promoteIf": "loss"}},
            "model has promoteIf without alias: say which alias a better model gets, such as alias: champion",
        ),
        (
            {"model": {"alias": "champion"}},
            "model has alias without register: say which registered model has the alias",
        ),
        (
            {"model": {"register": "n", "alias": ["v1"]}},
            "model.alias is 'v1', but must have 1 to 200 letters, digits, '-' or '_', and not be latest or v and a number",
        ),
        (
            {"model": {"register": "n", "alias": "a" * 201}},
            f"model.alias is '{'a' * 201}', but must have 1 to 200 letters, digits, '-' or '_', and not be latest or v and a number",
        ),
        ({"model": {"register": "'n\""}}, "model.register is '\\'n\"', but MLflow finds no name with both kinds of quotes"),
        ({"model": {"register": "n", "alias": ["a", "a"]}}, "model.alias gives the alias 'a' twice"),
        (
            {"model": {"register": "a/b"}},
            "model.register is 'a/b', but MLflow takes no name without letters, or with one of / :",
        ),
        ({"model": {"path": "/m.h5"}}, "model.path is '/m.h5', but must be a relative path that stays below its root"),
        (
            {"model": {"checkTimeout": "PT2H"}},
            "model.checkTimeout must be between 1 second and PT1H: the job keeps its nodes for that long",
        ),
        (
            {"model": {"register": "n", "alias": "a", "promoteIf": {"metric": "m", "mode": "least"}}},
            "model.promoteIf.mode is 'least'; allowed: 'min', 'max'",
        ),
        ({"model": {"registr": "x"}}, "model.registr is not a known key; did you mean register?"),
        (
            {"properties": {"horovodSettings": {"proccessCount": 2}}},
            "properties.horovodSettings.proccessCount is not a known key; did you mean processCount?",
        ),
    ],
)
def test_refusals(data: dict[str, Any], message: str | None) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_batchai(data, "batchai.yaml")
    if message is None:
        assert str(caught.value).startswith("batchai.yaml: unheardOf is not a known key; known keys: cluster, ")
    else:
        assert str(caught.value) == f"batchai.yaml: {message}"


@pytest.mark.parametrize(
    ("base", "override", "result"),
    [
        ({}, {}, {}),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": None, "z": 3}}, {"a": {"x": 1, "z": 3}}),
        ({"a": 1}, {"a": {"x": None, "y": 2}}, {"a": {"y": 2}}),
        ({"a": {"x": 1}}, {"a": 2}, {"a": 2}),
        (
            {"properties": {"nodeCount": 2, "horovodSettings": {"processCount": 4}}},
            {"properties": {"customMpiSettings": {"processCount": 2}}},
            {"properties": {"nodeCount": 2, "customMpiSettings": {"processCount": 2}}},
        ),
        (
            {"properties": {"horovodSettings": {"processCount": 4, "commandLineArgs": "x"}}},
            {"properties": {"horovodSettings": {"processCount": 8}}},
            {"properties": {"horovodSettings": {"processCount": 8, "commandLineArgs": "x"}}},
        ),
        (
            {"properties": {"horovodSettings": {"processCount": 4}}},
            {"properties": {"customMpiSettings": None, "nodeCount": 1}},
            {"properties": {"horovodSettings": {"processCount": 4}, "nodeCount": 1}},
        ),
        (
            {"properties": {"horovodSettings": {}}},
            {"properties": {"horovodSettings": None}},
            {"properties": {}},
        ),
        ({}, {"properties": {"horovodSettings": {}}}, {"properties": {"horovodSettings": {}}}),
        (
            {"properties": {"horovodSettings": {}}},
            {"properties": {"horovodSettings": {}, "customMpiSettings": {}}},
            {"properties": {"horovodSettings": {}, "customMpiSettings": {}}},
        ),
    ],
)
def test_merge(base: dict[str, Any], override: dict[str, Any], result: dict[str, Any]) -> None:
    before = copy.deepcopy((base, override))
    assert merge(base, override) == result
    assert (base, override) == before


@pytest.mark.parametrize(
    ("given", "metric", "better"),
    [
        ("val_accuracy", "val_accuracy", "max"),
        ("val_loss", "val_loss", "min"),
        ("RMSE", "RMSE", "min"),
        ("mean_absolute_error", "mean_absolute_error", "min"),
        ({"metric": "val_loss", "mode": "max"}, "val_loss", "max"),
    ],
)
def test_promotion(given: Any, metric: str, better: str) -> None:
    document, _ = parse_batchai({"model": {"register": "n", "alias": "champion", "promoteIf": given}}, "batchai.yaml")
    assert document.model and document.model.promote_if
    assert (document.model.promote_if.metric, document.model.promote_if.better) == (metric, better)
    assert document.model.alias == ("champion",)
