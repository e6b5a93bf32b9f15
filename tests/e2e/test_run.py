"""A job from ``mlflow run`` to its finished run, with a toy rank that costs a tenth of a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TWO_NODES = """
    properties:
      nodeCount: 2
      horovodSettings: {processCount: 2}
      outputDirectories:
        - {id: MODEL, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share, pathSuffix: models}
      inputDirectories:
        - {id: DATA, path: $AZ_BATCHAI_MOUNT_ROOT/share/data}
      environmentVariables:
        - {name: TIMELINE, value: $AZ_BATCHAI_OUTPUT_MODEL/timeline.json}
        - {name: AFTER, value: "${TIMELINE}.gz"}
      secrets:
        - {name: TOKEN, value: s3cr3t-canary}
      jobPreparation: {commandLine: "echo prepared on $BATCHAI_NODE; echo warned >&2"}
"""
PARAMETERS = """
    name: toy
    entry_points:
      main:
        parameters:
          epochs: {type: int, default: 2}
          note: {type: string, default: ""}
          data: {type: path, default: ""}
          scale: {type: float, default: 0.5}
        command: python train.py {epochs} --note "{note}" --scale={scale} --data '{data}'
"""


def test_two_nodes(world: Any) -> None:
    """Everything that a run of two nodes and two ranks leaves, in MLflow and in the job folder."""
    data = world.cwd / "my data.npz"
    data.write_text("real data", encoding="utf-8")
    project = world.project(
        """
        import json, os, sys, time
        from mlflow_batchai.training import report
        report.log(step=0, loss=0.5)
        print("args", json.dumps(sys.argv))
        print("data", open(sys.argv[-1]).read(), os.path.basename(sys.argv[-1]))
        print("environ", json.dumps(dict(os.environ)))
        report.log(step=1, loss=0.25, accuracy=0.75)
        if os.environ["HOROVOD_RANK"] == "0":
            open(os.environ["AZ_BATCHAI_OUTPUT_MODEL"] + "/result.txt", "w").write("42")
        print("to stderr", file=sys.stderr)
        """,
        PARAMETERS,
        TWO_NODES,
    )
    hostile = "$(touch pwned); \"x\" 'y' `touch pwned` \\ \n* é"
    result = world.run(project, "-P", f"note={hostile}", "-P", "data=my data.npz", "--run-name", "first", "-P", "epochs=3")
    assert result.returncode == 0, result.stderr
    run = world.last
    tags, plan_params = run.data.tags, run.data.params
    assert run.info.status == "FINISHED" and run.info.run_name == "first"
    assert plan_params == {"epochs": "3", "note": hostile, "data": "my data.npz", "scale": "0.5"}
    assert run.data.metrics == {"loss": 0.25, "accuracy": 0.75}
    assert world.points("loss", run) == [(0, 0.5), (1, 0.25)]
    assert (
        tags["batchai.executionState"] == "succeeded" and "batchai.exitCode" not in tags and tags["batchai.cluster"] == "local"
    )
    assert tags["mlflow.project.backend"] == "batchai" and tags["mlflow.source.type"] == "PROJECT"
    assert "batchai.reason" not in tags and "batchai.notes" not in tags

    # Ranks: whole lines with the rank in front, hostile text as typed, the staged file under its own name.
    out = world.log()
    assert sorted(line[:8] for line in out.splitlines() if "args" in line) == ["[0] args", "[1] args"]
    lines = dict(line[4:].split(" ", 1) for line in out.splitlines() if line.startswith("[1] "))

    arguments = json.loads(lines["args"])
    assert arguments[:5] == ["train.py", "3", "--note", hostile, "--scale=0.5"]
    assert lines["data"] == "real data my data.npz"
    assert not list(Path(world.root).rglob("pwned"))
    assert "[0] to stderr" in world.log("stderr.txt")
    assert result.stdout.count("args") == 2 and "step 1: loss 0.25" in result.stderr

    # Batch AI's variables, expanded where it expanded them, and nothing of the submitter's.
    environ = json.loads(lines["environ"])
    segment = world.folder(run).relative_to(world.home / "share").as_posix()
    assert environ["AZ_BATCHAI_OUTPUT_MODEL"] == f"{environ['AZ_BATCHAI_MOUNT_ROOT']}/share/{segment}/outputs/models"
    assert environ["AZ_BATCHAI_STDOUTERR_DIR"] == f"{environ['AZ_BATCHAI_MOUNT_ROOT']}/share/{segment}/stdouterr"
    assert environ["AZ_BATCHAI_INPUT_DATA"] == environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/data"
    assert environ["TIMELINE"] == environ["AZ_BATCHAI_OUTPUT_MODEL"] + "/timeline.json"
    assert environ["AFTER"] == environ["TIMELINE"] + ".gz"
    assert environ["AZ_BATCHAI_JOB_MOUNT_ROOT"].endswith("/mounts") and environ["AZ_BATCH_HOST_LIST"] == "127.0.0.1,127.0.0.1"
    assert environ["TOKEN"] == "s3cr3t-canary"
    assert (environ["HOROVOD_RANK"], environ["HOROVOD_SIZE"], environ["HOROVOD_CROSS_RANK"]) == ("1", "2", "1")
    assert "CANARY" not in environ and "PYTEST_CURRENT_TEST" not in environ and "BATCHAI_HOME" not in environ

    # Logs under Batch AI's names, here and among the artifacts; outputs too.
    names = {path.name for path in (world.folder(run) / "stdouterr").iterdir()}
    assert names == {
        *("stdout.txt", "stderr.txt", "stdout-0.txt", "stdout-1.txt", "stderr-0.txt", "stderr-1.txt"),
        *(f"{kind}-node-{node}.{end}" for node in (0, 1) for kind, end in (("execution", "log"), ("stdout-job_prep", "txt"))),
        *(f"stderr-job_prep-node-{node}.txt" for node in (0, 1)),
    }
    assert world.log("stdout-job_prep-node-1.txt") == "prepared on 1\n"
    assert world.artifact("logs/stdout.txt") == out
    assert world.artifact("outputs/MODEL/result.txt") == "42"

    # The secret is nowhere but in the ranks' environment (which this script chose to print).
    for path in world.root.rglob("*"):
        if (
            path.is_file()
            and not {"stdouterr", "logs"} & set(path.parts)
            and "events" not in path.parts
            and path.parent != project
        ):
            assert b"s3cr3t-canary" not in path.read_bytes(), path

    shown = world.batchai("job", "show", run.info.run_id)
    assert json.loads(shown.stdout)["executionState"] == "succeeded"
    listed = world.batchai("job", "list")
    assert tags["batchai.job"] in listed.stdout and "succeeded" in listed.stdout


def test_no_document(world: Any) -> None:
    """A project without batchai.yaml: one process on one node, output without prefix; what it leaves behind goes with the job."""
    project = world.project(
        """
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        print("alone", "HOROVOD_RANK" in os.environ)
        """
    )
    (world.home / "clusters").mkdir(parents=True)
    (world.home / "clusters" / "mine.yaml").write_text("nodes: 1\n")
    # What documents and options leave open, the user's defaults say.
    (world.home / "config.yaml").write_text("defaults: {cluster: mine, experiment: digits}\n")
    result = world.run(project, BATCHAI_WORKSPACE="vision")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "alone False\n"
    [run] = world.client.search_runs([world.client.get_experiment_by_name("digits").experiment_id])
    assert (run.data.tags["batchai.cluster"], run.data.tags["batchai.workspace"]) == ("mine", "vision")
    assert world.log(run=run) == "alone False\n"
    assert {path.name for path in (world.folder(run) / "stdouterr").iterdir()} == {"stdout.txt", "stderr.txt", "execution.log"}
    world.wait_gone()


def test_metrics_come_while_it_runs_and_the_next_job_waits(world: Any) -> None:
    """An epoch's metrics are in MLflow before the next one begins; the job behind it is SCHEDULED until its nodes are free."""
    two = "properties: {nodeCount: 2, customToolkitSettings: {}, outputDirectories: [{id: GATE, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share}]}"
    project = world.project(
        """
        import os, time
        from mlflow_batchai.training import report
        for epoch in range(2):
            report.log(step=epoch, loss=1.0 / (epoch + 1))
            while not os.path.exists(os.environ["AZ_BATCHAI_OUTPUT_GATE"] + "/go%d" % epoch):
                time.sleep(0.05)
        """,
        batchai=two,
    )
    first = world.start(world.command(project))
    run = world.wait(lambda: world.runs() and world.last)
    world.wait(lambda: len(world.points(run=run)) == 1)
    assert world.client.get_run(run.info.run_id).info.status == "RUNNING"
    second = world.start(world.command(world.project("print('mine')", batchai=two, name="second")))
    world.wait(lambda: len(world.runs()) == 2 and world.last.data.tags.get("batchai.executionState") == "queued")
    world.wait(lambda: len(world.agents()) == 4)
    assert world.last.info.status == "SCHEDULED" and len(world.job_processes()) == 1
    (world.folder(run) / "outputs" / "go0").touch()
    world.wait(lambda: len(world.points(run=run)) == 2)
    (world.folder(run) / "outputs" / "go1").touch()
    assert (first.wait(120), second.wait(120)) == (0, 0)
    assert [run.info.status for run in world.runs()] == ["FINISHED", "FINISHED"]


def test_wait_false_and_attach(world: Any) -> None:
    """``mlflow run`` returns at once, with ``--run-id`` and ``--backend-config``; ``job attach`` shows all. No line of it is ours."""
    project = world.project(
        """
        import os, time
        print("Epoch 1/2\\n32/32 - 1s - 20ms/step - accuracy: 0.5000 - loss: 1.2500\\nspeed=10 it/s")
        while not os.path.exists(os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/go"):
            time.sleep(0.05)
        print("Epoch 2/2\\n32/32 - 1s - 20ms/step - accuracy: 0.7500 - loss: 1.0000\\nspeed=12 it/s")
        print(os.environ.get("A"), os.environ.get("B"))
        """,
        batchai=r"""
            metrics: [{name: speed, regex: 'speed=(\d+)'}]
            properties: {environmentVariables: [{name: A, value: base}], nodeCount: 2}
        """,
    )
    (world.cwd / "more.yaml").write_text("properties: {environmentVariables: [{name: B, value: file}]}\n", encoding="utf-8")
    # An experiment that `batchai experiment create` made has a workspace, and so have its jobs.
    world.client.set_experiment_tag("0", "batchai.workspace", "vision")
    run_id = world.client.create_run("0").info.run_id
    over = '{"config": "more.yaml", "wait": false, "properties": {"nodeCount": 1}}'
    result = world.run(project, "--run-id", run_id, "--backend-config", over)
    assert result.returncode == 0 and "job attach" in result.stderr
    assert [run.info.run_id for run in world.runs()] == [run_id], "which MLflow itself does for no plugin"
    assert world.last.data.tags["batchai.workspace"] == "vision"
    assert world.last.info.status in ("SCHEDULED", "RUNNING")
    (world.home / "share" / "go").touch()
    attached = world.batchai("job", "attach", world.last.data.tags["batchai.job"])
    assert attached.returncode == 0, attached.stderr
    assert attached.stdout.splitlines()[0] == "Epoch 1/2" and attached.stdout.endswith("speed=12 it/s\nNone file\n")
    assert world.last.info.status == "FINISHED"
    found = {key: world.points(key) for key in ("loss", "accuracy", "speed")}
    assert found == {"loss": [(0, 1.25), (1, 1.0)], "accuracy": [(0, 0.5), (1, 0.75)], "speed": [(0, 10.0), (1, 12.0)]}


def test_no_secret_reaches_the_share(world: Any) -> None:
    """Wherever the configuration keeps a secret, in whatever spelling, that file stays here, as do client folder and store."""
    more = r'{"properties": {"secrets": [{"name": "KEY", "value": "open\u002dup"}, {"name": "TOKEN", "value": "sesame"}]}}'
    project = world.project(
        "import os; print(sorted(os.listdir('.')), os.environ['TOKEN'] == 'ses' + 'ame', os.environ['KEY'] == 'open-' + 'up')",
        r"""
        name: toy
        entry_points:
          main: {command: python train.py}
        batchai:
          properties:
            secrets: [{name: TOKEN, value: "s\x65same"}]
        """,
        **{"more.json": more, "copy.txt": "my key is open-up", "plain.txt": "nothing"},
    )
    (project / "mine" / "followers").mkdir(parents=True)
    (project / "mine" / "followers" / "earlier.log").write_text("of a job before")
    world.cwd = project
    result = world.run(
        ".", "--backend-config", '{"config": "more.json"}', BATCHAI_HOME="mine", MLFLOW_TRACKING_URI="sqlite:///mlflow.db"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "['plain.txt', 'train.py'] True True\n"
    assert "'copy.txt' is not sent to the nodes" in result.stderr
    files = [path for path in (project / "mine" / "share").rglob("*") if path.is_file()]
    spellings = (b"sesame", rb"s\x65same", b"open-up", rb"open\u002dup")
    assert files and not [path for path in files if any(text in path.read_bytes() for text in spellings)]
