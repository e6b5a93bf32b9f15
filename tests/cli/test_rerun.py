"""``batchai job rerun``: the code and the document that are kept with a run, as a new job."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
    import os, pathlib, sys
    from package import text
    pathlib.Path(os.environ["AZ_BATCHAI_OUTPUT_MODEL"], "result.txt").write_text(f"{text} {sys.argv[1:]} {os.environ['TOKEN']}"[:-8])
"""
PROJECT = """
    name: digits toy
    entry_points:
      main: {command: "false"}
      train:
        parameters: {lr: {type: float, default: 0.1}, note: string}
        command: python train.py {lr} {note}
"""
SETTINGS = """
    properties:
      secrets: [{name: TOKEN, value: s3cr3t-canary}]
      outputDirectories: [{id: MODEL, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share}]
"""


def told(said: Any, code: int = 1) -> str:
    assert (said.code, said.out) == (code, ""), said
    return str(said.err)


@pytest.mark.timeout(400)
def test_a_job_that_succeeded_runs_again(cli: Any) -> None:
    """From the artifacts of its run alone, which are run only as its user has signed them."""
    world = cli.world
    project = world.project(TRAIN, PROJECT, SETTINGS, name="elsewhere", package="text = 'never'")
    (project / "package").rename(project / "package.py")
    (project / "also.py").symlink_to("package.py")
    (project / "package.py").write_text("text = 'same'")
    done = world.run(project, "-e", "train", "-P", "note=it's", "--run-name", "first")
    assert done.returncode == 0, done.stderr
    first, code = world.last, world.plan()["code"]
    assert world.artifact("outputs/MODEL/result.txt", first) == "same ['0.1', \"it's\"] s3cr3"
    shutil.rmtree(project)
    shutil.rmtree(world.folder(first))
    name = first.data.tags["batchai.job"]

    assert "set BATCHAI_SECRET_TOKEN" in told(cli("job", "rerun", name))
    assert "NAME=VALUE" in told(cli("job", "rerun", name, "-P", "lr"), 2)
    secret = {"BATCHAI_SECRET_TOKEN": "s3cr3t-canary"}
    for file in ("plan.json", "document.json", "code.tar.gz"):
        kept = Path(world.root, "mlruns", "0", first.info.run_id, "artifacts", "job", file)
        before = kept.read_bytes()
        if file == "code.tar.gz":
            kept.write_bytes(before[:-40])
        else:
            kept.write_bytes(before.replace(b"train", b"other") if file == "plan.json" else b'{"name": "other"}')
        assert f"is not what it ran: job/{file}" in told(cli("job", "rerun", name, **secret))
        kept.write_bytes(before)
    assert len(world.runs()) == 1
    other = {**secret, "BATCHAI_HOME": str(world.root / "other")}
    assert "is not signed with your key" in told(cli("job", "rerun", name, **other))
    asked = told(cli("job", "rerun", "--trust", name, **other), 2)
    assert "command: python train.py {lr} {note}" in asked and "code: MLproject, also.py, package.py, train.py" in asked

    said = cli("job", "rerun", name, "-P", "lr=0.5", **secret)
    assert said.code == 0, said
    again = world.last
    assert world.artifact("outputs/MODEL/result.txt", again) == "same ['0.5', \"it's\"] s3cr3"
    assert again.data.params == {"lr": "0.5", "note": "it's"} and world.plan()["code"] == code
    tags = again.data.tags
    assert tags["batchai.rerunOf"] == first.info.run_id and tags["mlflow.source.name"] == str(project)
    assert tags["mlflow.project.entryPoint"] == "train" and tags["batchai.job"].startswith("digits-toy-")
    assert (
        world.artifact_file("job/code.tar.gz", again).read_bytes() == world.artifact_file("job/code.tar.gz", first).read_bytes()
    )


@pytest.mark.timeout(400)
def test_a_command_runs_again(cli: Any) -> None:
    """For another user too, who has seen what runs and trusts it."""
    world = cli.world
    (world.cwd / "train.py").write_text("import sys; print(sys.argv[1:])")
    assert cli("run", "--", "python", "train.py", "--lr", "0.1", "a {b}").code == 0
    other = {"BATCHAI_HOME": str(world.root / "other")}
    words = ("job", "rerun", world.last.data.tags["batchai.job"], "-P", "lr=0.2", "--into", "mine", "--trust", "-y")
    said = cli(*words, **other)
    assert said.code == 0 and "batchai: code: train.py" in said.err and "['--lr', '0.1', 'a {b}', '--lr', '0.2']" in said.out, (
        said
    )
    client = world.client
    (again,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert again.data.params == {"lr": "0.2", "arg1": "a {b}"}


@pytest.mark.timeout(400)
def test_code_that_is_not_kept(cli: Any) -> None:
    world = cli.world
    (world.cwd / "train.py").write_text("#" * 2000)
    assert cli("run", "--backend-config", json.dumps({"artifacts": {"code": "1kB"}}), "python", "train.py").code == 0
    assert "code.tar.gz" not in {Path(entry.path).name for entry in world.client.list_artifacts(world.last.info.run_id, "job")}
    said = told(cli("job", "rerun", world.last.data.tags["batchai.job"]))
    assert (
        "was not kept with its run: it has 2,000 bytes, more than artifacts.code allows (1,000)" in said
        and "{code: 1MB}" in said
    )
