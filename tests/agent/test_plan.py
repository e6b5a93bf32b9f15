"""The plan as one tree: what is written is read back, and what is no plan is refused with the key that is wrong."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from plans import bare_plan

from mlflow_batchai.agent.plan import (
    Artifacts,
    CodeFile,
    Condition,
    Container,
    InputDirectory,
    InputFile,
    LogPlace,
    MetricRule,
    Model,
    OutputDirectory,
    PlanError,
    PythonEnvironment,
    SetupTask,
    StagedInput,
    Tool,
    Variable,
    Volume,
    read_plan,
)
from mlflow_batchai.agent.protocol import PROTOCOL_VERSION, decode_one, encode

CONTROL = Volume("cluster", "share", "link", "file:///share", "control share", source="/share")
SMALL = bare_plan(volumes=(CONTROL,))
FULL = bare_plan(
    framework="horovod",
    node_count=2,
    process_count=4,
    ranks=4,
    setup_task=SetupTask("1f", "apt-get update", LogPlace(None, "logs"), (Variable("A", "b"),), ("TOKEN",)),
    container=Container("team/x:1", "registry", "1g", True, ("/a:/b",), {"X": "y"}),
    environment=PythonEnvironment("uv", "ab12", "3.11", ("pip",), ("numpy", "-r r.txt"), "/envs"),
    parameters={"BATCHAI_PARAM_lr": "\udcff 0.1"},
    inputs=(StagedInput("data", "BATCHAI_PARAM_data", "d", (InputFile("a.csv", "0" * 64, 7),)),),
    code=(CodeFile("train.py", "1" * 64, 0o755), CodeFile("link.py", link="train.py")),
    input_directories=(InputDirectory("DATA", "/data"),),
    output_directories=(OutputDirectory("MODEL", "$AZ_BATCHAI_MOUNT_ROOT/share"),),
    volumes=(CONTROL, Volume("job", "data", "azureFiles", None, how="rclone", endpoint="https://e")),
    log_copy_prefix=LogPlace(1, "logs"),
    tools={"rclone": Tool("x86_64", "2" * 64, 9)},
    wheels={"wheels/k/h.whl": "3" * 64},
    system_metrics=10.0,
    metrics=(MetricRule("f1", r"f1 (\S+)"), MetricRule("loss", r"it (?P<it>\d+) (\S+)", "it")),
    artifacts=Artifacts(True, ("*.tmp",)),
    model=Model("m", "net", "model", ("champion",), Condition("acc", "max"), 60.0),
)


@pytest.mark.parametrize("plan", [SMALL, FULL])
def test_what_is_written_is_read_back(plan: Any) -> None:
    """Through the file's own form; the attempt's numbers are no part of it."""
    assert read_plan(decode_one(encode([plan.record()]))) == plan
    assert read_plan(replace(plan, attempt=3, retries_left=1).record()) == plan


def test_it_is_frozen_and_its_file_is_small() -> None:
    with pytest.raises(FrozenInstanceError):
        SMALL.ranks = 2  # type: ignore[misc]
    assert FULL.record()["code"][1] == {"path": "link.py", "link": "train.py"}
    assert (FULL.record()["nodeCount"], SMALL.record()["model"]) == (2, None)


def test_keys_that_are_not_known_and_null_for_a_default() -> None:
    """As plans of other versions have them."""
    record = {**SMALL.record(), "later": 1, "umask": None, "lossSeconds": 60}
    record["volumes"] = [{**record["volumes"][0], "options": None, "later": {}}]
    assert read_plan(record) == SMALL


KIND = "has a value of another kind"


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"command": None}, "command", KIND),
        ({"nodeCount": "2"}, "nodeCount", KIND),
        ({"nodeCount": True}, "nodeCount", KIND),
        ({"nodeCount": 1.5}, "nodeCount", KIND),
        ({"nodeCount": 0}, "nodeCount", "is 0"),
        ({"nodeCount": 10**6}, "nodeCount", "is 1000000"),
        ({"ranks": 10**9}, "ranks", "is 1000000000"),
        ({"lossSeconds": float("nan")}, "lossSeconds", KIND),
        ({"volumes": []}, "volumes", "is empty"),
        ({"volumes": [{"scope": "job", "path": "x"}]}, "volumes[0].kind", "is missing"),
        ({"metrics": "f1"}, "metrics", "is no list"),
        ({"metrics": ["f1"]}, "metrics[0]", "is no object"),
        ({"tools": {"rclone": {"machine": 1, "sha256": "", "size": 0}}}, "tools.rclone.machine", KIND),
        ({"parameters": []}, "parameters", "is no object"),
        ({"logCopyPrefix": {"volume": 1, "path": ""}}, "logCopyPrefix.volume", "is 1"),
        ({"setupTask": {"id": "1", "command": "x", "logs": {"volume": 9, "path": ""}}}, "setupTask.logs.volume", "is 9"),
        ({"umask": "x"}, "umask", "is 'x'"),
        ({"volumes": [{"scope": "job", "path": "x", "kind": "azureFiles"}]}, "volumes[0].how", "is 'azureFiles'"),
    ],
)
def test_what_is_no_plan(changes: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(f"{key} {words}")):
        read_plan({**SMALL.record(), **changes})


def test_a_plan_of_another_protocol() -> None:
    """It may be read, to be looked at; where it can't be, the protocol is the reason."""
    assert read_plan({**SMALL.record(), "protocol": 1}).protocol == 1
    with pytest.raises(PlanError, match=f"^it is of protocol 99, and this version reads {PROTOCOL_VERSION}$"):
        read_plan({"protocol": 99})
    for record in (None, [], {}, {"nodeCount": 1}):
        with pytest.raises(PlanError, match=r"^the plan is no object|^protocol is missing"):
            read_plan(record)


# What the version before wrote otherwise: null where nothing was given, and no default left out.
BEFORE: dict[str, Any] = {
    **SMALL.record(),
    "protocol": 2,
    "setupTask": None,
    "preparation": None,
    "volumes": [{"scope": "cluster", "path": "share", "kind": "link", "share": "file:///s", "source": "/s", "where": "c"}],
    "container": {"image": "x", "server": None, "shmSize": None, "credentials": False, "volumes": [], "environment": {}},
    "minNodes": 1,
    "model": {
        "path": None,
        "register": "net",
        "name": "model",
        "alias": ["champion"],
        "promoteIf": None,
        "checkSeconds": 300.0,
    },
    "code": [{"path": "train.py", "sha256": "3d", "mode": 420}],
}


def test_a_plan_of_the_version_before() -> None:
    plan = read_plan(BEFORE)
    assert (plan.protocol, plan.preparation, plan.least_nodes, plan.setup_task) == (2, "", 1, None)
    assert (plan.container, plan.code) == (Container("x"), (CodeFile("train.py", "3d", 0o644),))
    assert plan.model == Model(None, "net", "model", ("champion",), None, 300.0)
