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
    reported = {key: value for key, value in run.data.metrics.items() if not key.startswith("system/")}
    assert reported == {"loss": 0.25, "accuracy": 0.75}
    assert world.points("loss", run) == [(0, 0.5), (1, 0.25)]
    assert (
        tags["batchai.executionState"] == "succeeded" and tags["batchai.exitCode"] == "0" and tags["batchai.cluster"] == "local"
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
    """A project without batchai.yaml is one process on one node; its output has no prefix; the logs are Batch AI's of one node."""
    project = world.project("import os; print('alone', 'HOROVOD_RANK' in os.environ)")
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


def test_metrics_come_while_it_runs(world: Any) -> None:
    """An epoch's metrics are in MLflow before the next epoch ends; the run is RUNNING meanwhile."""
    project = world.project(
        """
        import os, time
        from mlflow_batchai.training import report
        for epoch in range(3):
            report.log(step=epoch, loss=1.0 / (epoch + 1))
            print("Epoch", epoch, flush=True)
            gate = os.environ["AZ_BATCHAI_OUTPUT_GATE"] + "/go%d" % epoch
            while not os.path.exists(gate):
                time.sleep(0.05)
        """,
        batchai="properties: {outputDirectories: [{id: GATE, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share}]}",
    )
    process = world.start(world.command(project))
    for epoch in range(3):
        # The rank does not go on before the test has seen this epoch in MLflow.
        run = world.wait(lambda: world.runs() and world.last)
        world.wait(lambda step=epoch: len(world.points()) == step + 1)
        assert world.client.get_run(run.info.run_id).info.status == "RUNNING"
        (world.folder() / "outputs" / f"go{epoch}").touch()
    assert process.wait(120) == 0
    assert world.last.info.status == "FINISHED"


def test_wait_false_and_attach(world: Any) -> None:
    """``wait: false`` returns at once; ``job attach`` shows everything and exits 0 when the job has succeeded."""
    script = "import os, time\nprint('one')\nwhile not os.path.exists(os.environ['AZ_BATCHAI_MOUNT_ROOT'] + '/share/go'): time.sleep(0.05)"
    project = world.project(f"{script}\nprint('two')", batchai="wait: false")
    # An experiment that `batchai experiment create` made has a workspace, and so have its jobs.
    world.client.set_experiment_tag("0", "batchai.workspace", "vision")
    result = world.run(project)
    assert result.returncode == 0 and "job attach" in result.stderr
    assert world.last.data.tags["batchai.workspace"] == "vision"
    assert world.last.info.status in ("SCHEDULED", "RUNNING")
    (world.home / "share" / "go").touch()
    attached = world.batchai("job", "attach", world.last.data.tags["batchai.job"])
    assert attached.returncode == 0, attached.stderr
    assert attached.stdout == "one\ntwo\n"
    assert world.last.info.status == "FINISHED"


def test_two_jobs_queue(world: Any) -> None:
    """The second job is SCHEDULED while the first has the nodes, and runs when they are free."""
    batchai = "properties: {nodeCount: 2}"
    first = world.project(
        "import os, time\nwhile not os.path.exists(os.environ['AZ_BATCHAI_MOUNT_ROOT'] + '/share/go'): time.sleep(0.05)",
        batchai=batchai,
        name="first",
    )
    second = world.project("print('mine')", batchai=batchai, name="second")
    one = world.start(world.command(first))
    world.wait(lambda: world.runs() and world.last.info.status == "RUNNING")
    two = world.start(world.command(second))
    world.wait(lambda: len(world.runs()) == 2 and "batchai.folder" in world.last.data.tags)
    world.wait(lambda: len(world.agents()) == 4 and len(world.job_processes()) == 1)
    world.wait(lambda: world.last.data.tags.get("batchai.executionState") == "queued")
    assert world.last.info.status == "SCHEDULED" and len(world.job_processes()) == 1
    (world.home / "share" / "go").touch()
    assert (one.wait(120), two.wait(120)) == (0, 0)
    assert [run.info.status for run in world.runs()] == ["FINISHED", "FINISHED"]


def test_run_id_is_honoured(world: Any) -> None:
    """``--run-id`` uses that run, which MLflow itself does for no plugin."""
    run_id = world.client.create_run("0").info.run_id
    result = world.run(world.project(), "--run-id", run_id)
    assert result.returncode == 0, result.stderr
    assert [run.info.run_id for run in world.runs()] == [run_id]
    assert world.last.info.status == "FINISHED"


def test_custom_toolkit_runs_once(world: Any) -> None:
    """A customToolkit command runs on node 0 only, preparation on all nodes (as on Batch AI), and the second node stays taken."""
    project = world.project(
        "import os; print('node', os.environ['BATCHAI_NODE'], open(os.environ['AZ_BATCHAI_MPI_HOST_FILE']).read().count('slots'))",
        batchai="""
            properties:
              nodeCount: 2
              customToolkitSettings: {}
              jobPreparation: {commandLine: echo prepared}
        """,
    )
    assert world.run(project).returncode == 0
    assert world.log() == "node 0 2\n"
    assert world.log("stdout-job_prep-node-1.txt") == "prepared\n"


def test_azure_file_share_is_a_directory_here(world: Any) -> None:
    """A job document with azureFileShares runs on the local cluster: the share is a directory, logs and outputs lie on it."""
    project = world.project(
        "import os; open(os.environ['AZ_BATCHAI_OUTPUT_MODEL'] + '/m.txt', 'w').write('x'); print(os.environ['AZ_BATCHAI_OUTPUT_MODEL'])",
        batchai="""
            properties:
              stdOutErrPathPrefix: $AZ_BATCHAI_JOB_MOUNT_ROOT/external
              mountVolumes:
                azureFileShares:
                  - {azureFileUrl: "https://acct.file.core.windows.net/batchai", relativeMountPath: external}
              outputDirectories: [{id: MODEL, pathPrefix: $AZ_BATCHAI_JOB_MOUNT_ROOT/external}]
        """,
    )
    result = world.run(project)
    assert result.returncode == 0, result.stderr
    assert "is the directory" in result.stderr
    share = world.home / "shares" / "acct" / "batchai"
    assert [path.name for path in share.rglob("m.txt")] == ["m.txt"]
    assert [path.name for path in share.rglob("stdout.txt")] == ["stdout.txt"]
    assert world.artifact("outputs/MODEL/m.txt") == "x"


def test_keras_lines_and_rules(world: Any) -> None:
    """Metrics without a line of our code: Keras' own progress lines, and rules of batchai.yaml."""
    project = world.project(
        """
        print("Epoch 1/2")
        print("32/32 - 1s - 20ms/step - accuracy: 0.5000 - loss: 1.2500")
        print("speed=10 it/s")
        print("Epoch 2/2")
        print("32/32 - 1s - 20ms/step - accuracy: 0.7500 - loss: 1.0000")
        print("speed=12 it/s")
        """,
        batchai=r"""
            metrics:
              - {name: speed, regex: 'speed=(\d+)'}
        """,
    )
    assert world.run(project).returncode == 0
    history = {
        key: [(m.step, m.value) for m in world.client.get_metric_history(world.last.info.run_id, key)]
        for key in ("loss", "accuracy", "speed")
    }
    assert history == {"loss": [(0, 1.25), (1, 1.0)], "accuracy": [(0, 0.5), (1, 0.75)], "speed": [(0, 10.0), (1, 12.0)]}


def test_backend_config_overrides(world: Any) -> None:
    """``--backend-config`` overrides batchai.yaml key by key, and may name a YAML file."""
    project = world.project(
        "import os; print(os.environ.get('A'), os.environ.get('B'))",
        batchai="""
        properties:
          environmentVariables: [{name: A, value: base}]
          nodeCount: 2
    """,
    )
    (world.cwd / "more.yaml").write_text("properties: {environmentVariables: [{name: B, value: file}]}\n", encoding="utf-8")
    assert world.run(project, "--backend-config", '{"config": "more.yaml", "properties": {"nodeCount": 1}}').returncode == 0
    assert world.log() == "None file\n"


def test_three_nodes(world: Any) -> None:
    """Four ranks on three nodes: two on the first, one on each of the others, numbered as Horovod does."""
    (world.home / "clusters").mkdir(parents=True)
    (world.home / "clusters" / "three.yaml").write_text("nodes: 3\n", encoding="utf-8")
    names = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE"
    project = world.project(
        f"import os; print(*(os.environ['HOROVOD_' + name] for name in '{names}'.split()), os.environ['BATCHAI_NODE'])",
        batchai="""
            cluster: three
            properties: {nodeCount: 3, horovodSettings: {processCount: 4}}
        """,
    )
    result = world.run(project)
    assert result.returncode == 0, result.stderr
    assert sorted(line[4:] for line in world.log().splitlines()) == [
        "0 4 0 2 0 3 0",
        "1 4 1 2 0 1 0",
        "2 4 0 1 1 3 1",
        "3 4 0 1 2 3 2",
    ]


def test_no_secret_reaches_the_share(world: Any) -> None:
    """Wherever the configuration keeps a secret, in whatever spelling, the file stays here; the ranks get the value."""
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
    result = world.run(project, "--backend-config", f'{{"config": "{project}/more.json"}}')
    assert result.returncode == 0, result.stderr
    assert world.log() == "['plain.txt', 'train.py'] True True\n"
    assert "'copy.txt' is not sent to the nodes" in result.stderr
    for path in (world.home / "share").rglob("*"):
        if path.is_file():
            assert not [
                word for word in (b"sesame", rb"s\x65same", b"open-up", rb"open\u002dup") if word in path.read_bytes()
            ], path


def test_a_client_folder_inside_the_project(world: Any) -> None:
    """$BATCHAI_HOME and the store may lie in the project: they are no part of it, however often it is run."""
    project = world.project("import os; print(sorted(os.listdir('.')))")
    world.cwd = project
    for _ in range(2):
        result = world.run(".", BATCHAI_HOME="mine", MLFLOW_TRACKING_URI="sqlite:///mlflow.db")
        assert result.returncode == 0, result.stderr
        assert result.stdout == "['MLproject', 'train.py']\n"
