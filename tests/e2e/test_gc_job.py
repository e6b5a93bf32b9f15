"""`batchai gc` on what a real job leaves, and the same project submitted again afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path

from command_line import Cli

from mlflow_batchai.tracking import runs

TRAIN = """
    import os
    with open(os.path.join(os.environ["AZ_BATCHAI_OUTPUT_MODEL"], "model.txt"), "w") as file:
        file.write("weights")
    print("trained")
"""
OUTPUTS = "properties: {outputDirectories: [{id: MODEL, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share/models}]}"


def kinds(cli: Cli, *arguments: str) -> list[str]:
    return sorted({row["kind"] for row in cli.json("gc", "-y", "-o", "json", "--older-than", *arguments) or []})


def test_a_job_is_freed_and_submitted_again(cli: Cli, tmp_path: Path) -> None:
    world = cli.world
    world.environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    project = world.project(TRAIN, batchai=OUTPUTS)
    result = world.run(project)
    assert result.returncode == 0, result.stderr
    run, folder = world.last, world.folder()
    share = world.home / "share"
    models = share / "models" / runs.tags_of(run)["batchai.folder"]
    assert (models / "outputs" / "model.txt").is_file()
    assert kinds(cli, "1h") == []
    assert kinds(cli, "0m") == ["job", "log"]
    assert not folder.exists() and not models.exists()
    # What MLflow has is MLflow's.
    assert world.artifact("logs/stdout.txt", run) == "trained\n"
    # Young staged files stay: someone may be just about to name them.
    staged = [path for path in (share / ".batchai" / "objects").rglob("*") if path.is_file()]
    assert staged and kinds(cli, "0m") == []
    for path in staged:
        os.utime(path, (time.time() - 22 * 86400,) * 2)
    assert kinds(cli, "0m") == ["staged files"]
    assert not any(path.exists() for path in staged)
    result = world.run(project)
    assert result.returncode == 0, result.stderr
    assert world.log() == "trained\n"
