"""Horovod wheels of the share: the first that installs and imports is used, others cost nothing but time, built ones are published."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_world import Cluster, Job

from mlflow_batchai.agent.environments import wheels
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.plan import PythonEnvironment
from mlflow_batchai.horovod_wheel import HorovodBuildError
from mlflow_batchai.horovod_wheel.environment import cache_key
from mlflow_batchai.horovod_wheel.interpreter import probe
from mlflow_batchai.plan.environments import choose_wheels
from mlflow_batchai.storage.directory import DirectoryShare

BROKEN = "raise ImportError('undefined symbol: _ZN10tensorflow8OpKernel')\n"


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str], tags: str = "py3-none-any") -> Path:
    """A pure Python wheel, by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tags}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*files, f"{info}/METADATA", f"{info}/WHEEL"]))
    return path


def make_horovod(folder: Path, says: str, version: str = "0.28.1", tags: str = "py3-none-any", binding: str = "") -> Path:
    files = {"horovod/__init__.py": f"WHEEL = {says!r}\n", "horovod/tensorflow/__init__.py": binding}
    return make_wheel(folder, "horovod", version, files, tags)


def named(share: Path) -> dict[str, str]:
    """As a plan names the wheels of a share that are there now."""
    return choose_wheels(PythonEnvironment("virtualenv", "abc", dependencies=("horovod",)), share, DirectoryShare(share))[0]


@pytest.mark.parametrize("cards, used", [("9.0", "b-for-gpus"), ("", "a-for-cpus")])
def test_gpus_are_not_left_idle_by_a_wheel_without_nccl(
    make_layout: Callable[..., NodeLayout], tmp_path: Path, cards: str, used: str
) -> None:
    layout = make_layout()
    for name, nccl in (("a-for-cpus", 0), ("b-for-gpus", 22809)):
        files = {"horovod/__init__.py": "", "horovod/torch/__init__.py": f"def nccl_built(): return {nccl}\n"}
        make_wheel(Path(layout.mounted_share) / "wheels" / name, "horovod", "0.28.1", files)
    layout.plan = replace(layout.plan, wheels=named(Path(layout.mounted_share)))
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    (site / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda = '13.0'\n")
    for name, text in {
        "python": f'PYTHONPATH="{site}:$WHEEL" exec "{sys.executable}" "$@"',
        "nvidia-smi": f"echo {cards}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said: list[str] = []

    def attempt(argv: list[str], name: str) -> Any:
        """pip's part is a path on PYTHONPATH; what is imported is real."""
        if name == "installing Horovod":
            variables["WHEEL"] = argv[-1]
        code = 0 if "pip" in argv else subprocess.run(argv, env=variables, stderr=subprocess.PIPE).returncode
        return SimpleNamespace(exit_code=code)

    steps = wheels.Steps(attempt, attempt, said.append, variables)
    wheels.install(layout, str(tmp_path / "python"), "torch", ["horovod"], steps)
    assert said[-1] == f"using the Horovod wheel wheels/{used}/horovod-0.28.1-py3-none-any.whl of the share"
    key, nccl = wheels.content(str(tmp_path / "python"), "torch", variables)
    assert key is not None and ("_cuda13.0_sm90-" in key, nccl) == (bool(cards), bool(cards))


def test_a_disk_of_the_node_that_takes_no_wheel_is_no_change_of_the_wheel(make_layout: Callable[..., NodeLayout]) -> None:
    layout = make_layout()
    make_wheel(Path(layout.mounted_share) / "wheels", "horovod", "0.28.1", {})
    layout.plan = replace(layout.plan, wheels=named(Path(layout.mounted_share)))
    Path(layout.temp, "wheels", "0", "horovod-0.28.1-py3-none-any.whl").mkdir(parents=True)
    steps: Any = wheels.Steps(None, None, print, {})  # type: ignore[arg-type]
    with pytest.raises(IsADirectoryError):
        wheels.install(layout, "/bin/false", "tensorflow", ["horovod"], steps)


def start(cluster: Cluster, dependencies: list[str], content: str, **environment: str) -> Job:
    """A job that prints which Horovod it got, in an environment of its own."""
    python_env = {
        "manager": "virtualenv",
        "python": None,
        "buildDependencies": [],
        "dependencies": dependencies,
        "hash": content,
    }
    command = "python -c 'import horovod.tensorflow; print(horovod.WHEEL)'"
    settings = {"PIP_NO_INDEX": "1", **environment}
    return cluster.submit(command, python_env=python_env, environment=settings, wheels=named(cluster.share))


def test_a_wheel_of_the_share_is_used_if_it_works_here(cluster: Cluster) -> None:
    share = cluster.share / "wheels"
    make_horovod(share / "1", "older", version="0.27.0")
    make_horovod(share / "2", "another machine's", tags="cp27-cp27m-win_amd64")
    make_horovod(share / "3", "another TensorFlow's", binding=BROKEN)
    make_horovod(share / "4", "good")
    make_horovod(share / "5", "not needed")
    job = start(cluster, ["horovod[tensorflow]==0.28.1"], "abc")
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "good\n"
    log = job.log("execution.log")
    assert [number for number in "12345" if f"the Horovod wheel wheels/{number}/" in log] == ["1", "2", "3", "4"]
    assert "the Horovod wheel wheels/3/horovod-0.28.1-py3-none-any.whl of the share does not fit" in log
    assert "using the Horovod wheel wheels/4/horovod-0.28.1-py3-none-any.whl of the share" in log
    assert "undefined symbol" in job.log("stderr-job_prep.txt")
    assert "building" not in log.replace("building the training environment", "")
    again = start(cluster, ["horovod[tensorflow]==0.28.1"], "abc")
    assert again.wait()["executionState"] == "succeeded", again.said()
    assert again.log("stdout.txt") == "good\n" and "building" not in again.log("execution.log")


def test_what_one_node_has_built_others_use(cluster: Cluster, tmp_path: Path) -> None:
    try:
        framework = probe(sys.executable, "tensorflow")
    except HorovodBuildError as error:
        pytest.skip(str(error))
    # The builder's own cache stands for the minutes of a build.
    key = cache_key(framework, {})
    make_horovod(tmp_path / "cache" / key, "built")
    tensorflow = make_wheel(tmp_path / "pypi", "tensorflow_cpu", framework.framework_version, {"tensorflow.py": ""})
    packages = [f"tensorflow-cpu=={framework.framework_version}", "horovod"]
    found = {"PIP_FIND_LINKS": str(tensorflow.parent)}
    first = start(cluster, packages, "one", **found, BATCHAI_HOROVOD_CACHE=str(tmp_path / "cache"))
    assert first.wait()["executionState"] == "succeeded", first.said()
    published = f"wheels/{key}/horovod-0.28.1-py3-none-any.whl"
    assert "building a Horovod wheel, which takes minutes" in first.log("execution.log")
    assert f"the Horovod wheel is on the share for others: {published}" in first.log("execution.log")
    assert (cluster.share / published).is_file()
    # Another environment, as on another disk, whose node can't build.
    second = start(cluster, packages, "two", **found, BATCHAI_HOROVOD_CACHE=str(tmp_path / "empty"))
    assert second.wait()["executionState"] == "succeeded", second.said()
    assert second.log("stdout.txt") == "built\n"
    assert f"using the Horovod wheel {published} of the share" in second.log("execution.log")


def test_no_wheel_and_no_build_is_a_sentence(cluster: Cluster) -> None:
    job = start(cluster, ["horovod"], "abc")
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "EnvironmentFailed", job.said()
    assert verdict["reason"].startswith("building the Horovod wheel for python_env.yaml on node-0 exited with code 1\n")
    assert "TensorFlow is not installed in " in verdict["reason"]
    # Nothing but the locks.
    assert sorted(path.name for path in (cluster.roots[0] / "envs").iterdir()) == ["abc.lock", "abc.used"]
