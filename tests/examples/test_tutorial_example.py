"""examples/tutorial: Batch AI's own tutorial, step by step as a shell script, on four nodes of this machine."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from example_text import commands

EXAMPLE = Path(__file__).parents[2] / "examples" / "tutorial"


def in_steps(output: str) -> dict[str, str]:
    """Step's title -> what its commands printed."""
    pieces = re.split(r"^# (\d+ .*)$", output, flags=re.M)
    return {title: text.strip("\n") for title, text in zip(pieces[1::2], pieces[2::2], strict=True)}


@pytest.mark.timeout(600)
def test_from_first_to_last(world: Any, tmp_path: Path) -> None:
    """Each step's output has the shape that Batch AI's had; training is real, and its .h5 is downloaded."""
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for name in [name for name in os.environ if name.startswith(("AZURE_", "BATCHAI_"))]:
        world.environment.pop(name, None)
    world.environment["BATCHAI_HOME"] = str(world.home)
    done = world.call(["sh", str(EXAMPLE / "tutorial.sh")], timeout=500, **variables)
    assert done.returncode == 0, (done.stdout, done.stderr)
    said = in_steps(done.stdout)
    assert [int(title.split()[0]) for title in said] == list(range(1, 14))
    step = {int(title.split()[0]): text for title, text in said.items()}

    titles, _, row = step[4].splitlines()
    assert len(re.split(r" {2,}", titles)) == 10
    cells = "nc6cluster batchai.horovod myworkspace STANDARD_NC6 steady 4 0 0 0 0"
    assert row.split() == cells.split()

    assert '"created": true' in step[5]
    job = json.loads(step[7])
    assert (job["name"], job["toolType"], job["nodeCount"]) == ("cifar_distributed", "horovod", 4)
    # Its nodes are free: a machine that is slow to ask finds it there.
    assert job["executionState"] in ("queued", "running")
    assert job["executionInfo"] is None or job["executionInfo"]["exitCode"] is None
    state, _, counts = step[8].partition("\n")
    assert json.loads(state) == "running"
    assert json.loads(counts)["runningNodeCount"] == 4 and json.loads(counts)["idleNodeCount"] == 0

    assert "4 ranks train 6 epochs each" in step[9]
    accuracy = re.search(r"^\[0\] Test accuracy: ([\d.]+)$", step[9], re.M)
    assert accuracy and float(accuracy[1]) > 0.85
    assert re.split(r" {2,}", step[10].splitlines()[0]) == ["Name", "Type", "Size", "Modified"]
    listed = {line.split()[0] for line in step[10].splitlines()}
    assert {"stdout.txt", "stderr.txt", "execution-node-3.log", "stdout-job_prep-node-0.txt", "cifar_cnn.h5"} <= listed

    assert (world.cwd / "cifar_cnn.h5").read_bytes().startswith(b"\x89HDF")
    assert "left" not in step[12]
    notices = [line for line in done.stderr.splitlines() if "mystorage" in line and "directory" in line]
    assert notices, "that the account is a directory here is said"

    # After its last step nothing is left but the run in MLflow's trash.
    for arguments in (
        ["job", "show", "cifar_distributed"],
        ["cluster", "show", "nc6cluster"],
        ["workspace", "show", "myworkspace"],
    ):
        assert world.batchai(*arguments).returncode == 3
    world.wait_gone()


def test_the_text_is_the_script() -> None:
    """Each command of the README stands in the script as it stands there."""
    script = (EXAMPLE / "tutorial.sh").read_text(encoding="utf-8")
    # The script is called from anywhere, the text's commands from its folder; and the account's name can be given.
    for there, here in (('"$here/cifar_cnn_distributed.py"', "cifar_cnn_distributed.py"), ('"$here/job.json"', "job.json")):
        assert there in script
        script = script.replace(there, here)
    script = script.replace('"${AZURE_BATCHAI_STORAGE_ACCOUNT:-mystorage}"', "mystorage")
    shown = [line for line in commands(EXAMPLE) if line != "sh examples/tutorial/tutorial.sh"]
    assert len([line for line in shown if line.startswith("batchai ")]) >= 17
    for line in shown:
        assert line in script.splitlines(), line
    assert len(re.findall(r"^step ", script, re.M)) == 13
