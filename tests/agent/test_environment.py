"""The rank environment: nothing of the submitter's or the node's leaks in, and who wins over whom."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from node_world import Cluster

from mlflow_batchai.agent.environment import (
    ALLOCATOR,
    SYSTEM_METRICS_SWITCH,
    TRACKING_URI,
    allocator_variables,
    allowed,
    for_builds,
    for_engines,
    job_environment,
    thread_variables,
)
from mlflow_batchai.agent.layout import NodeLayout

OF_THE_NODE = """
    PATH=/usr/bin:/bin HOME=/home/ann LANG=C.UTF-8 LC_ALL=C CUDA_VISIBLE_DEVICES=0 https_proxy=http://proxy:1
    CANARY=leaked PYTHONPATH=/leaked PYTHONHOME=/leaked LD_PRELOAD=/leaked.so VIRTUAL_ENV=/leaked MLFLOW_TRACKING_URI=http://leaked
    MLFLOW_TRACKING_PASSWORD=leaked AWS_SECRET_ACCESS_KEY=leaked BATCHAI_HOME=/leaked BATCHAI_JOB=leaked SLURM_JOB_ID=leaked
    HOROVOD_RANK=leaked MY_CUDA_=leaked
"""
NODE = dict(word.split("=") for word in OF_THE_NODE.split())


def variables(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in pairs]


@pytest.fixture
def environment(make_layout: Callable[..., NodeLayout]) -> Callable[..., dict[str, str]]:
    def build(
        extra: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None, node: int = 0, **changes: Any
    ) -> dict[str, str]:
        layout = make_layout(node, nodeCount=2, **changes)
        return job_environment(layout, NODE, ["10.0.0.4", "10.0.0.5"], 2, secrets or {}, "/envs/x/bin/python", extra)

    return build


def test_nothing_leaks(environment: Callable[..., dict[str, str]]) -> None:
    found = environment()
    assert "leaked" not in json.dumps(found)
    assert (found["HOME"], found["LC_ALL"], found["CUDA_VISIBLE_DEVICES"]) == ("/home/ann", "C", "0")
    # Where an interpreter has no ``python`` beside it, the job's own folder has one.
    ours = os.path.join(os.path.dirname(found["AZ_BATCHAI_JOB_TEMP"]), "bin")
    assert found["PATH"] == f"/envs/x/bin:{ours}:/usr/bin:/bin"
    assert found["MLFLOW_TRACKING_URI"] == TRACKING_URI
    assert set(allowed(NODE)) == {"PATH", "HOME", "LANG", "LC_ALL", "CUDA_VISIBLE_DEVICES", "https_proxy"}


def test_service_variables(environment: Callable[..., dict[str, str]], make_layout: Callable[..., NodeLayout]) -> None:
    found = environment(node=1)
    assert (found["AZ_BATCHAI_NUM_GPUS"], found["AZ_BATCH_HOST_LIST"]) == ("2", "10.0.0.4,10.0.0.5")
    assert found["AZ_BATCHAI_JOB_TEMP"] == make_layout(1).temp
    assert (found["BATCHAI_JOB"], found["BATCHAI_NODE"]) == ("abc1234567/1", "1")
    assert (found["MLFLOW_RUN_ID"], found["BATCHAI_SPOOL"]) == ("0" * 32, make_layout(1).spool)


def test_document_variables_are_filled_in_in_order(environment: Callable[..., dict[str, str]]) -> None:
    found = environment(
        parameters={"BATCHAI_PARAM_epochs": "3 $HOME"},
        environmentVariables=variables(
            ("A", "$AZ_BATCHAI_JOB_TEMP/a"),
            ("B", "${A}:$A:$C:$$"),
            ("C", "$BATCHAI_PARAM_epochs"),
            ("PATH", "/mine:$PATH"),
            ("CANARY", "$CANARY"),
        ),
    )
    temp = found["AZ_BATCHAI_JOB_TEMP"]
    assert found["A"] == f"{temp}/a"
    assert found["B"] == f"{temp}/a:{temp}/a:$C:$$"  # C comes later; what is unknown stays
    assert found["C"] == "3 $HOME"  # values are filled in once
    assert found["PATH"] == f"/mine:/envs/x/bin:{os.path.dirname(temp)}/bin:/usr/bin:/bin"
    assert found["CANARY"] == "$CANARY"


def test_who_a_rank_is_can_t_be_overridden(environment: Callable[..., dict[str, str]]) -> None:
    extra = {"HOROVOD_RANK!": "1", "BATCHAI_RANK!": "1", **thread_variables(4)}
    entries = variables(
        ("HOROVOD_RANK", "7"), ("BATCHAI_RANK", "7"), ("BATCHAI_JOB", "x"), ("BATCHAI_NODE", "9"), ("OMP_NUM_THREADS", "1")
    )
    found = environment(extra, {"HOROVOD_RANK": "8", "BATCHAI_JOB": "y"}, environmentVariables=entries)
    assert (found["HOROVOD_RANK"], found["BATCHAI_RANK"]) == ("1", "1")
    assert (found["BATCHAI_JOB"], found["BATCHAI_NODE"]) == ("abc1234567/1", "0")
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("1", "4")
    assert not any(name.endswith("!") for name in found)


def test_mlflow_in_a_rank_does_not_sample_what_the_agent_samples(environment: Callable[..., dict[str, str]]) -> None:
    entries = variables((SYSTEM_METRICS_SWITCH, "true"))
    assert environment(environmentVariables=entries)[SYSTEM_METRICS_SWITCH] == "true"
    assert environment(environmentVariables=entries, systemMetrics=10.0)[SYSTEM_METRICS_SWITCH] == "false"


def test_secrets_stand_over_the_document(environment: Callable[..., dict[str, str]]) -> None:
    found = environment(
        secrets={"PASSWORD": "a$HOME"}, environmentVariables=variables(("PASSWORD", "plain"), ("COPY", "$PASSWORD"))
    )
    assert (found["PASSWORD"], found["COPY"]) == ("a$HOME", "plain")


@pytest.mark.parametrize(
    ("theirs", "result"),
    [
        (None, "/site:/agent.pyz"),
        ("", "/site:/agent.pyz"),
        ("/lib", "/site:/agent.pyz:/lib"),
        ("/site:/agent.pyz", "/site:/agent.pyz"),
    ],
)
def test_python_path_of_the_document_comes_after_ours(
    environment: Callable[..., dict[str, str]], theirs: str | None, result: str
) -> None:
    entries = [] if theirs is None else variables(("PYTHONPATH", theirs))
    assert environment({"PYTHONPATH": "/site:/agent.pyz"}, environmentVariables=entries)["PYTHONPATH"] == result


def test_preparation_has_no_python_path_of_ours(environment: Callable[..., dict[str, str]]) -> None:
    assert "PYTHONPATH" not in environment()
    assert environment(environmentVariables=variables(("PYTHONPATH", "/lib")))["PYTHONPATH"] == "/lib"


def test_staged_parameters_are_paths_on_the_node(
    environment: Callable[..., dict[str, str]], make_layout: Callable[..., NodeLayout]
) -> None:
    staged = {"parameter": "data", "variable": "BATCHAI_PARAM_data", "name": "my data", "files": []}
    assert environment(inputs=[staged])["BATCHAI_PARAM_data"] == f"{make_layout().inputs}/BATCHAI_PARAM_data/my data"


def test_threads() -> None:
    assert set(thread_variables(0).values()) == {"1"}
    assert thread_variables(3)["TF_NUM_INTRAOP_THREADS"] == "3"


@pytest.mark.parametrize(
    ("document", "docker", "others", "is_set"),
    [
        ([], {}, [{}, {}], True),
        (
            [("OMP_NUM_THREADS", "1"), ("MY_MALLOC_", "x"), ("LD_LIBRARY_PATH", "/l")],
            {"A": "b"},
            [{"KEY": "s"}, {"PATH": "/"}],
            True,
        ),
        ([("GLIBC_TUNABLES", "")], {}, [], False),
        ([("MALLOC_ARENA_MAX", "8")], {}, [], False),
        ([("LD_PRELOAD", "/lib/libjemalloc.so")], {}, [], False),
        ([], {"MALLOC_TRIM_THRESHOLD_": "1"}, [], False),
        ([], {}, [{"LD_PRELOAD": "secret"}, {}], False),
        ([], {}, [{}, {"GLIBC_TUNABLES": "of the image"}], False),
    ],
)
def test_the_allocator_of_ranks_on_cpus(
    document: list[tuple[str, str]],
    docker: dict[str, str],
    others: list[dict[str, str]],
    is_set: bool,
    make_layout: Callable[..., NodeLayout],
) -> None:
    container = {"container": {"image": "i", "environment": docker}} if docker else {}
    plan = make_layout(0, environmentVariables=variables(*document), **container).plan
    assert allocator_variables(plan, *others) == ({"GLIBC_TUNABLES": ALLOCATOR} if is_set else {})


def test_a_rank_sees_it(cluster: Cluster) -> None:
    job = cluster.submit('echo "$GLIBC_TUNABLES"')
    assert job.wait()["executionState"] == "succeeded"
    assert job.log("stdout.txt") == f"{ALLOCATOR}\n"


@pytest.mark.parametrize(
    ("chosen", "kept", "dropped"),
    [
        (
            allowed,
            "PATH LANG LC_ALL TZ LD_LIBRARY_PATH CUDA_HOME NVIDIA_VISIBLE_DEVICES",
            "HOME_ xLC_ALL AWS_SECRET",
        ),
        (for_builds, "PIP_INDEX_URL UV_INDEX XDG_CACHE_HOME PYENV_ROOT", "MYPIP_X PATH XDG_CONFIG_HOME"),
        (
            for_engines,
            "DOCKER_HOST DOCKER_CERT_PATH APPTAINER_TMPDIR REGISTRY_AUTH_FILE",
            "DOCKER_PASSWORD APPTAINERENV_A",
        ),
    ],
)
def test_variables_of_the_node(chosen: Any, kept: str, dropped: str) -> None:
    found = chosen(dict.fromkeys([*kept.split(), *dropped.split()], "x"))
    assert sorted(found) == sorted(kept.split())
