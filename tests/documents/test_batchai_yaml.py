"""batchai.yaml: its keys, its metric rules, how --backend-config overrides it, and which key a refusal names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from whole_documents import BATCHAI, HIDDEN

from mlflow_batchai.agent.plan import Notify
from mlflow_batchai.documents.batchai import BatchaiFile, ModelSettings, merge, parse_batchai
from mlflow_batchai.documents.job import HorovodSettings
from mlflow_batchai.documents.model import masked, secret_values
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.errors import DocumentError


def test_a_whole_file() -> None:
    document, warnings = parse_batchai(BATCHAI, "batchai.yaml")
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


REFUSED = {
    "metrics: [{name: a, regex: (b}]": "metrics[0] ('a') has a regex that RE2 does not take",
    "metrics: [{name: a, regex: b}]": "metrics[0] ('a') has a regex without a group for the value",
    "metrics: [{name: a, regex: '(?P<step>x)'}]": "metrics[0] ('a') has a regex without a group for the value",
    "metrics: [{name: a, regex: (b), step: epoch}]": "metrics[0] ('a') has the step 'epoch'",
    "metrics: [{name: a}]": "metrics[0].regex is missing",
    "retries: -1": "retries must be at least 0",
    "retries: 101": "retries must be at most 100",
    "minNodes: 0": "minNodes must be at least 1",
    "{properties: {nodeCount: 2}, minNodes: 3}": "has minNodes 3, more than properties.nodeCount (2)",
    "terminateGrace: 0": "terminateGrace is 0, but must be more than zero seconds",
    "terminateGrace: true": "terminateGrace must be a duration",
    "terminateGrace: PT11M": "terminateGrace must be PT10M at most",
    "relayDeadline: soon": "relayDeadline is 'soon', which is not a duration",
    "relayDeadline: 99999999999999": "relayDeadline is 99999999999999, but",
    "systemMetrics: PT0.5S": "systemMetrics must be PT1S at least",
    "umask: 777": "umask is not an allowed value; allowed: '077', '022'",
    "wait: maybe": "wait must be true or false",
    "stage: data": "stage must be a list",
    "stage: [data, data]": "stage gives the staged parameter 'data' twice",
    **{f"cachePreparation: {value}": "cachePreparation must be true, false, or a list" for value in ("yes", 1, [1], ["a", ""])},
    "name: my job": "name is 'my job', but must have 1 to 64 letters",
    f"workspace: {'w' * 65}": f"workspace is '{'w' * 65}', but must have 1 to 64 letters",
    "unheardOf: 2": "unheardOf is not a known key; known keys: cluster, ",
    "nodeCount: 2": "nodeCount is not a known key; did you mean properties.nodeCount?",
    "node_count: 2": "node_count is not a known key; did you mean properties.nodeCount?",
    "register: digits": "register is not a known key; did you mean model.register?",
    "properties: {nodeCount: 2, processCount: 2}": (  # six blocks have it
        "properties.processCount is not a known key; did you mean properties.horovodSettings.processCount or "
        "properties.customMpiSettings.processCount or properties.pyTorchSettings.processCount?"
    ),
    "properties: {horovodSettings: {proccessCount: 2}}": "properties.horovodSettings.proccessCount is not a known key; did you",
    "artifacts: {exclude: [../x]}": "artifacts.exclude[0] is '../x', which fits no file",
    "artifacts: {exclude: [a, '# all']}": "artifacts.exclude[1] is '# all', which fits no file",
    "artifacts: {checkpoint: true}": "artifacts.checkpoint is not a known key; did you mean checkpoints?",
    "artifacts: {code: 1TB}": "artifacts.code is '1TB'; write a size such as 1MB, or false",
    "artifacts: {code: 1GB}": "artifacts.code must be at most 100000000",
    "model: {register: n, promoteIf: loss}": "model has promoteIf without alias",
    "model: {alias: champion}": "model has alias without register",
    **{f"model: {{register: n, alias: {it}}}": f"model.alias[0] is '{it}'" for it in ("v1", "Latest", "a b", "a" * 201)},
    "model: {register: n, alias: [a, a]}": "model.alias gives the alias 'a' twice",
    'model: {register: "\'n\\""}': "model.register is ",
    "model: {register: a/b}": "model.register is 'a/b', but MLflow takes no name",
    "model: {name: ' '}": "model.name is ' ', but MLflow takes no name",
    "model: {name: a.b}": "model.name is 'a.b', but MLflow takes no name",
    "model: {path: /m.h5}": "model.path is '/m.h5'",
    "model: {checkTimeout: PT2H}": "model.checkTimeout must be PT1H at most",
    "model: {register: n, alias: a, promoteIf: {metric: m, mode: least}}": "model.promoteIf.mode is 'least'; allowed: 'min', 'max'",
    "notify: {on: [failed]}": "notify needs url or command",
    "notify: {url: hooks.slack.com/x}": "notify.url must be an address (https://...), or name a secret",
    "notify: {url: 'https://x/T/b?x=${X}'}": "notify.url has a part of the address beside ${NAME}, which may be a secret",
    "notify: {url: 'https://x', on: [ended]}": "notify.on[0] is 'ended'; allowed: 'failed', 'succeeded', 'terminated'",
    "notify: {url: 'https://x', on: [failed, failed]}": "notify.on gives the end 'failed' twice",
    'notify: {command: "mail \'me"}': "notify.command can't be split into words: No closing quotation",
    "notify: {command: ['']}": "notify.command[0] must not be empty",
    "model: {registr: x}": "model.registr is not a known key; did you mean register?",
}


@pytest.mark.parametrize(
    ("url", "planned", "told"),
    [
        (f"https://hooks/{HIDDEN}", "${NOTIFY_URL}", {"NOTIFY_URL": f"https://hooks/{HIDDEN}"}),
        ("https://hooks/${TOKEN}", "https://hooks/${TOKEN}", {}),
        ("${SLACK}", "${SLACK}", {}),
    ],
)
def test_an_address_is_a_secret_unless_it_names_one(url: str, planned: str, told: dict[str, str]) -> None:
    document, _ = parse_batchai({"notify": {"url": url, "command": "mail -s 'it ended' me"}}, "batchai.yaml")
    assert document.notify is not None and document.notify.written_out == told == dict.fromkeys(told, *secret_values(document))
    assert document.notify.planned == Notify(planned, ("failed", "succeeded"), ("mail", "-s", "it ended", "me"))
    copied = masked(document)
    assert HIDDEN not in f"{document!r} {copied} {document.notify.planned}"
    assert masked(parse_batchai(copied, "spec.json")[0]) == copied


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_batchai(load_text(text, "batchai.yaml"), "batchai.yaml")
    assert str(caught.value).startswith(f"batchai.yaml: {REFUSED[text]}")


HOROVOD = {"horovodSettings": {"processCount": 4, "commandLineArgs": "x"}}
MPI = {"customMpiSettings": {"processCount": 2}}


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
        ({"properties": {"nodeCount": 2, **HOROVOD}}, {"properties": MPI}, {"properties": {"nodeCount": 2, **MPI}}),
        (
            {"properties": HOROVOD},
            {"properties": {"horovodSettings": {"processCount": 8}}},
            {"properties": {"horovodSettings": {"processCount": 8, "commandLineArgs": "x"}}},
        ),
        ({"properties": HOROVOD}, {"properties": {"customMpiSettings": None}}, {"properties": HOROVOD}),
        ({"properties": HOROVOD}, {"properties": {"horovodSettings": None}}, {"properties": {}}),
        ({}, {"properties": HOROVOD}, {"properties": HOROVOD}),
        ({"properties": HOROVOD}, {"properties": {**HOROVOD, **MPI}}, {"properties": {**HOROVOD, **MPI}}),
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


def test_sizes_of_code():
    sizes = {"1MB": 1000**2, "500 kB": 500_000, "1m": 1000**2, 2000: 2000, False: 0, True: 1000**2}
    for written, size in sizes.items():
        config, _ = parse_batchai({"artifacts": {"code": written}}, "here")
        assert config.artifacts.code == size and parse_batchai(masked(config), "again")[0] == config
