"""The build's environment and the cache's folder follow from the interpreter and the user's variables."""

from pathlib import Path

import pytest

from mlflow_batchai.horovod_wheel.environment import build_environment, cache_key, cache_root, flags
from mlflow_batchai.horovod_wheel.interpreter import Interpreter

INTERPRETER = Interpreter(
    path="/opt/venv/bin/python",
    tag="cp311-linux_x86_64",
    libc="glibc-2.36",
    framework="tensorflow",
    framework_version="2.21.0",
    tools={},
    headers=True,
)


@pytest.mark.parametrize(
    "change",
    [
        {"tag": "cp313t-linux_x86_64"},
        {"tag": "cp311-linux_aarch64"},
        {"libc": "glibc-2.41"},
        {"framework": "torch"},
        {"framework_version": "2.20.0"},
    ],
)
def test_the_key_differs_where_the_wheel_would(change):
    assert cache_key(INTERPRETER._replace(**change), {}) != cache_key(INTERPRETER, {})


@pytest.mark.parametrize(
    "name",
    ["HOROVOD_GPU_OPERATIONS", "HOROVOD_NCCL_HOME", "HOROVOD_WITH_MPI", "HOROVOD_GPU", "CXXFLAGS", "CXX"],
)
def test_build_variables_of_the_user_make_another_wheel(name):
    assert cache_key(INTERPRETER, {name: "1"}) != cache_key(INTERPRETER, {})
    assert "1" in flags("tensorflow", {name: "1"})[name]


@pytest.mark.parametrize("framework, on, off", [("tensorflow", "TENSORFLOW", "PYTORCH"), ("torch", "PYTORCH", "TENSORFLOW")])
def test_only_the_framework_and_gloo_are_built(framework, on, off):
    horovod = {name: value for name, value in flags(framework, {}).items() if name.startswith("HOROVOD_")}
    assert horovod == {
        f"HOROVOD_WITH_{on}": "1",
        f"HOROVOD_WITHOUT_{off}": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
    }


def test_the_users_choice_replaces_ours_but_for_the_framework():
    result = flags("torch", {"HOROVOD_WITH_MPI": "1", "HOROVOD_WITHOUT_GLOO": "1", "HOROVOD_WITHOUT_PYTORCH": "1"})
    assert not {"HOROVOD_WITHOUT_MPI", "HOROVOD_WITH_GLOO", "HOROVOD_WITHOUT_PYTORCH"} & result.keys()
    assert result["HOROVOD_WITH_PYTORCH"] == "1"


def test_the_environment_keeps_the_users_and_adds_ours():
    user = {
        "PIP_INDEX_URL": "https://user:secret@pypi.example",
        "PATH": "/usr/bin",
        "PYTHONPATH": "/mine",
        "LDFLAGS": "-L/x",
        "CMAKE_GENERATOR": "Ninja",
        "MAKEFLAGS": "w -j --jobserver-auth=3,4",
        "MAKELEVEL": "1",
        "PIP_USER": "1",
    }
    result = build_environment(INTERPRETER, user, "/tmp/tools", jobs=3)
    assert result["PIP_INDEX_URL"] == user["PIP_INDEX_URL"]
    assert result["PATH"] == "/opt/venv/bin:/usr/bin"
    assert result["PYTHONPATH"] == "/tmp/tools:/mine"
    assert result["LDFLAGS"] == "-L/x -Wl,-s"
    assert result["MAKEFLAGS"] == "-j3"
    assert result["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert result["PIP_USER"] == "0"
    assert not {"CMAKE_GENERATOR", "MAKELEVEL"} & result.keys()


@pytest.mark.parametrize(
    "environ, root",
    [
        ({"BATCHAI_HOROVOD_CACHE": "/b", "XDG_CACHE_HOME": "/c"}, "/b"),
        ({"BATCHAI_HOROVOD_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/mlflow-batchai/horovod"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "~/.cache/mlflow-batchai/horovod"),
        ({}, "~/.cache/mlflow-batchai/horovod"),
    ],
)
def test_the_cache_lies_where_the_user_says(environ, root):
    assert cache_root(environ) == Path(root).expanduser()
