"""From documents to a plan, and everything that is refused with one sentence before anything exists."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.api.examine import needs
from mlflow_batchai.agent.plan import Artifacts, CodeFile, Condition, LogPlace, Volume, plain, read, read_plan
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.batchai import parse_batchai
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.documents.mlproject import bind, find_entry_point, load_project
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.errors import BatchAIError, ClusterError, DocumentError, NotSupportedError, ParameterError, ProjectError
from mlflow_batchai.job import places
from mlflow_batchai.plan import projects
from mlflow_batchai.plan.prepared import needs_of
from mlflow_batchai.storage.directory import DirectoryShare

SHARE = {"azureFileUrl": "https://acc.file.core.windows.net/data", "relativeMountPath": "afs"}


class Desk:
    """Where a person stands with a project and a cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "project"
        self.project.mkdir()
        (self.project / "train.py").write_text("print(1)\n", encoding="utf-8")
        self.cwd = root / "cwd"
        self.cwd.mkdir()
        self.command = "python train.py"
        self.parameters = ""
        self.write = True

    def prepare(self, config=None, given=None, entry="main", env_manager=None, nodes=2, **cluster_keys):
        text = f"name: toy\nentry_points:\n  main:\n    command: {json.dumps(self.command)}\n"
        if self.parameters:
            text += f"    parameters: {self.parameters}\n"
        if self.write:
            (self.project / "MLproject").write_text(text, encoding="utf-8")
        project = load_project(self.project)
        point = find_entry_point(project, entry)
        values = bind(point, given or {}, project.source)
        document = ClusterDocument(**cluster_keys)
        engine = SimpleNamespace(node_limit=nodes)
        share, home = DirectoryShare(self.root / "share"), DirectoryShare(self.root / "home")
        places = str(share.root), (home, "shares", str(home.root / "shares"))
        self.cluster = cluster = Cluster(
            "c", document, share, engine, places[0], document.mount or "folder", places[1], "/py", "/envs"
        )
        file, _ = parse_batchai(config or {}, "batchai.yaml")
        return projects.prepare(project, point, values, file, cluster, self.cwd, env_manager, "batchai.yaml")


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    return Desk(tmp_path)


def properties(**entries):
    return {"properties": entries}


def test_a_bare_project(desk):
    prepared = desk.prepare()
    plan = prepared.plan
    assert (plan.framework, plan.node_count, plan.ranks) == ("custom", 1, 1)
    assert plan.command == "python train.py"
    share = desk.root / "share"
    control = ("cluster", "share", "link", share.as_uri(), "control share", "cluster 'c': share")
    assert plan.volumes == (Volume(*control, source=str(share)),)
    assert [entry.path for entry in plan.code] == ["MLproject", "train.py"]
    assert prepared.plan.name == f"toy-{prepared.plan.job[:6]}"
    assert plan.max_wall_clock_seconds == 7 * 86400
    assert (prepared.secrets, prepared.warnings, plan.model) == ({}, [], None)


@pytest.mark.parametrize(
    ("ignored", "ours", "warning"),
    [
        ("", "", None),
        ("nothing\n__pycache__\n", "", None),
        ("*.log\n", "", "1 file or folder is not sent to the nodes (.gitignore)"),
        ("data\n*.log\n", "", "2 files and folders are not sent to the nodes (.gitignore)"),
        ("*.log\n", "data\n!a.log\n", "1 file or folder is not sent to the nodes (.batchaiignore)"),
        ("*.log\n", "data\n", "2 files and folders are not sent to the nodes (.gitignore, .batchaiignore)"),
    ],
)
def test_what_ignore_files_keep_back_is_told(desk, ignored, ours, warning):
    for name in ("a.log", "data/one.csv", "data/two.csv", "__pycache__/x.pyc"):
        (desk.project / name).parent.mkdir(exist_ok=True)
        (desk.project / name).write_text("")
    (desk.project / ".gitignore").write_text(ignored)
    (desk.project / ".batchaiignore").write_text(ours)
    assert desk.prepare().warnings == ([warning] if warning else [])


@pytest.mark.parametrize("address", ["sqlite:///{}", "sqlite:///../project/runs.db?timeout=9", ""])
def test_a_store_in_the_project_or_in_an_input_is_not_read(desk, monkeypatch, address):
    """Reading it would drop the locks of this process's other threads; and while jobs run it changes on its way."""
    store = desk.project / ("runs.db" if address else "mlflow.db")
    monkeypatch.chdir(desk.cwd if address else desk.project)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address.format(store))
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as writer:
        writer.execute("CREATE TABLE t (x)")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO t VALUES (1)")
        assert {file.path for file in desk.prepare().code} == {"MLproject", "train.py"}
        desk.parameters = "{data: path}"
        inputs = desk.prepare(given={"data": str(desk.project)}).inputs
        assert {file.path for file in inputs} == {"project/MLproject", "project/train.py"}
        with pytest.raises(ParameterError, match="MLflow's store"):
            desk.prepare(given={"data": str(store)})
        code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
        other = subprocess.run([sys.executable, "-c", code, store], capture_output=True, text=True, check=False)
    assert other.stderr.endswith("database is locked\n"), other.stderr


@pytest.mark.parametrize(
    ("written", "theirs", "own", "seconds"),
    [
        (None, "", None, None),
        (None, "true", None, 10),
        (None, "1", "false", None),
        (None, "", "True", 10),
        (True, "", None, 10),
        ("PT2S", "", None, 2),
        (False, "true", "true", None),
    ],
)
def test_system_metrics_are_asked_for(desk, monkeypatch, written, theirs, own, seconds):
    """By our key, else by MLflow's own switch: the document's variable, else the submitter's."""
    switch = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
    monkeypatch.setenv(switch, theirs)
    entries = [] if own is None else [{"name": switch, "value": own}]
    document = {"systemMetrics": written, "properties": {"environmentVariables": entries}}
    assert desk.prepare({key: value for key, value in document.items() if value is not None}).plan.system_metrics == seconds


def test_what_only_our_documents_say(desk):
    outputs = {"checkpoints": True, "exclude": ["*.tmp", "cache/"]}
    model = {"register": "net", "alias": "champion", "promoteIf": "top@5"}
    plan = desk.prepare({"artifacts": outputs, "model": model}).plan
    assert plan.artifacts == Artifacts(True, ("*.tmp", "cache/"))
    assert plan.model.promote_if == Condition("top_5", "max"), "the metric has its name in MLflow"


def test_a_plan_is_json_whatever_was_typed(desk):
    desk.command, desk.parameters = "python train.py {note}", "{note: string}"
    note = 'a "b" \\ \n é \udcff $(x)'
    prepared = desk.prepare(given={"note": note})
    assert prepared.plan.parameters == {"BATCHAI_PARAM_note": note}
    assert prepared.parameters == {"note": note}
    assert note not in prepared.plan.command
    assert read_plan(protocol.decode_one(protocol.encode([prepared.plan.record()]))) == prepared.plan


@pytest.mark.parametrize(
    ("block", "nodes", "expected"),
    [
        ({"horovodSettings": {}}, 1, ("horovod", 1, 1, 1)),
        ({"horovodSettings": {}, "nodeCount": 2}, 2, ("horovod", 2, 2, 2)),
        ({"horovodSettings": {"processCount": 5}, "nodeCount": 2}, 2, ("horovod", 5, 2, 5)),
        ({"customToolkitSettings": {}, "nodeCount": 2}, 2, ("custom", 1, 2, 1)),
    ],
)
def test_frameworks(desk, block, nodes, expected):
    plan = desk.prepare(properties(**block), nodes=nodes).plan
    assert (plan.framework, plan.process_count, plan.node_count, plan.ranks) == expected


REFUSED = {
    "{nodeCount: 3}": (ClusterError, "nodeCount is 3 and cluster 'c' has 2 node(s)"),
    "{nodeCount: 2}": (
        DocumentError,
        "properties.nodeCount is 2, and without a framework block the command would run on one node",
    ),
    "{nodeCount: 2, horovodSettings: {processCount: 1}}": (DocumentError, "processCount is 1, less than nodeCount (2)"),
    "{horovodSettings: {pythonScriptFilePath: x.py}}": (DocumentError, "drop it from horovodSettings"),
    "{cntkSettings: {processCount: 1}}": (NotSupportedError, "properties.cntkSettings is not supported yet"),
    "{secrets: [{name: K, valueSecretReference: {sourceVault: {id: /x}, secretUrl: 'https://v/s'}}]}": (
        NotSupportedError,
        "secrets 'K': valueSecretReference",
    ),
    "{stdOutErrPathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share/../x}": (DocumentError, "'..' would lead out of the mount"),
    "{outputDirectories: [{id: M, pathPrefix: $AZ_BATCHAI_JOB_MOUNT_ROOT/nope}]}": (
        DocumentError,
        "outputDirectories M: pathPrefix is",
    ),
}


@pytest.mark.parametrize("text", [*REFUSED, "stage"])
def test_refused(desk, text):
    config = {"stage": ["data"]} if text == "stage" else {"properties": load_text(text, "x.yaml")}
    kind, words = REFUSED.get(text, (DocumentError, "stage names 'data'"))
    with pytest.raises(kind) as error:
        desk.prepare(config)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("batchai.yaml: ")
    assert not (desk.root / "share" / ".batchai").exists()


@pytest.mark.parametrize(
    ("command", "preparation", "refused"),
    [
        ("python nope.py --x 1", None, True),
        ("  bash -u sub/run.sh", None, True),
        ("python train.py", None, False),
        ("python nope.py", "curl -o nope.py http://x", False),
        ("cp train.py b.py && python b.py", None, False),
        ("echo python nope.py", None, False),
        ("cd sub && python nope.py", None, False),
        ("python /opt/nope.py", None, False),
        ("python -m nope", None, False),
        ("python $HOME/nope.py", None, False),
    ],
)
def test_a_script_that_isnt_there(desk, command, preparation, refused):
    desk.command = command
    config = properties(jobPreparation={"commandLine": preparation}) if preparation else {}
    if not refused:
        desk.prepare(config)
        return
    with pytest.raises(ProjectError, match="which is not in the project"):
        desk.prepare(config)


def test_a_docker_project_trains_in_its_image_and_in_nothing_else(desk):
    text = "docker_env: {image: x, environment: [[A, b]]}\nentry_points: {main: {command: ls}}"
    (desk.project / "MLproject").write_text(text, encoding="utf-8")
    desk.write = False
    plan = desk.prepare().plan
    assert (plan.container.image, plan.container.environment) == ("x", {"A": "b"})
    with pytest.raises(NotSupportedError, match="--env-manager virtualenv: the job trains in the image x"):
        desk.prepare(env_manager="virtualenv")
    notice = desk.prepare(containers="ignore")
    assert notice.plan.container is None
    assert "containers: ignore" in notice.warnings[0]


def test_files_travel_and_mlflow_keeps_what_was_typed(desk):
    desk.command, desk.parameters = "python train.py {a} {b} {c} {d}", "{a: path, b: uri, c: string, d: path}"
    (desk.cwd / "a file.csv").write_text("1", encoding="utf-8")
    folder = desk.root / "data set"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x.txt").write_text("2", encoding="utf-8")
    (desk.root / "elsewhere").mkdir()
    (desk.root / "elsewhere" / "y.txt").write_text("3", encoding="utf-8")
    (folder / "link").symlink_to(desk.root / "elsewhere")
    (folder / "round").symlink_to(folder)
    given = {"a": "a file.csv", "b": folder.as_uri(), "c": "file: not a path", "d": str(desk.cwd / ".." / "cwd" / "a file.csv")}
    prepared = desk.prepare(given=given)
    plan = prepared.plan
    assert prepared.parameters == given
    assert plan.parameters == {"BATCHAI_PARAM_c": "file: not a path"}
    assert [(entry.parameter, entry.name, [file.path for file in entry.files]) for entry in plan.inputs] == [
        ("a", "a file.csv", ["a file.csv"]),
        ("b", "data set", ["data set/link/y.txt", "data set/sub/x.txt"]),
        ("d", "a file.csv", ["a file.csv"]),
    ]
    assert len(prepared.inputs) == 4


def test_stage_takes_what_exists_and_leaves_the_rest(desk):
    desk.command, desk.parameters = "python train.py {a} {b}", "{a: string, b: string}"
    (desk.cwd / "here").write_text("1", encoding="utf-8")
    plan = desk.prepare({"stage": ["a", "b"]}, {"a": "here", "b": "x" * 5000}).plan
    assert [entry.parameter for entry in plan.inputs] == ["a"]
    assert plan.parameters == {"BATCHAI_PARAM_b": "x" * 5000}
    desk.command, desk.parameters = "python train.py {a}", "{a: {type: path, default: ''}}"
    assert desk.prepare().plan.inputs == (), "an empty path is no folder"


@pytest.mark.parametrize(
    ("kind", "text", "error", "words"),
    [
        ("path", "nope", ParameterError, "there is no file or folder"),
        ("path", "~nobody-of-that-name/x", ParameterError, "there is no file or folder"),
        ("path", "s3://bucket/x", NotSupportedError, "s3:// can't be fetched yet"),
        ("uri", "file:///nope", ParameterError, "there is no file or folder /nope"),
        ("string", "file:/nope", ParameterError, "there is no file or folder /nope"),
        ("path", "/", ParameterError, "can't be sent to the nodes as a whole"),
        ("path", "empty", ParameterError, "holds no file"),
        ("string", "x" * 140_000, ParameterError, "bytes long, and no program can be given more than 131071"),
    ],
)
def test_values_that_are_refused(desk, kind, text, error, words):
    (desk.cwd / "empty").mkdir()
    desk.command, desk.parameters = "python train.py {a}", f"{{a: {kind}}}"
    with pytest.raises(error) as found:
        desk.prepare(given={"a": text})
    assert words in str(found.value)
    assert "parameter 'a'" in str(found.value)
    assert len(str(found.value)) < 500


def test_a_script_as_entry_point_gets_all_that_is_given(desk):
    prepared = desk.prepare(given={"lr": "0.1", "a b": "x"}, entry="train.py")
    assert prepared.plan.command == 'python train.py --lr "${BATCHAI_PARAM_lr}" --\'a b\' "${BATCHAI_PARAM_a_b}"'


def test_what_nodes_are_asked_for_is_plain_data(desk):
    """Over SSH it goes as JSON, and a node reads it back."""
    volume = {"mountCommand": "mount -t tmpfs none", "relativeMountPath": "ram"}
    plan = desk.prepare(properties(mountVolumes={"unmanagedFileSystems": [volume]})).plan
    wanted = needs_of(plan)
    asked = json.loads(json.dumps(plain({name: getattr(wanted, name) for name in ("volumes", "container", "python")})))
    assert [read(Volume, given).command for given in asked["volumes"]] == ["mount -t tmpfs none"]
    assert needs(**asked) == {"trouble": None, "lacking": [], "machine": os.uname().machine}


def test_a_prefix_on_the_control_share_holds_the_job_folder(desk):
    plan = desk.prepare(properties(stdOutErrPathPrefix="$AZ_BATCHAI_MOUNT_ROOT/share/a/b/")).plan
    assert (plan.folder_prefix, plan.log_copy_prefix) == ("a/b", None)


def test_variables_that_nothing_defines_are_told_of(desk):
    desk.command = "python train.py $AZ_BATCHAI_OUTPUT_MODEL ${{AZ_BATCHAI_JOB_TEMP}} $AZ_BATCHAI_INPUT_NOPE"
    config = properties(outputDirectories=[{"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share"}])
    assert desk.prepare(config).warnings == ["batchai.yaml: $AZ_BATCHAI_INPUT_NOPE is used and nothing defines it"]


def test_secrets_stay_out_of_all_that_is_written(desk):
    config = properties(
        secrets=[{"name": "TOKEN", "value": "hush-hush"}],
        mountVolumes={"azureFileShares": [{**SHARE, "credentials": {"accountKey": "hush-hush"}}]},
    )
    prepared = desk.prepare(config)
    assert prepared.secrets == {"TOKEN": "hush-hush"}
    assert "hush-hush" not in json.dumps([prepared.plan.record(), prepared.document, prepared.warnings])
    assert prepared.plan.secret_names == ("TOKEN",)


def test_a_setup_task_and_its_secrets(desk):
    task = {
        "commandLine": "prepare $AZ_BATCHAI_JOB_TEMP",
        "stdOutErrPathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/afs/logs",
        "environmentVariables": [{"name": "A", "value": "$AZ_BATCHAI_MOUNT_ROOT"}],
        "secrets": [{"name": "TOKEN", "value": "hush-hush"}],
    }
    setup = {"mountVolumes": {"azureFileShares": [SHARE]}, "setupTask": task}
    prepared = desk.prepare(nodeSetup=setup)
    plan = prepared.plan.setup_task
    assert plain(plan) == {
        "id": plan.id,
        "command": task["commandLine"],
        "environmentVariables": task["environmentVariables"],
        "secretNames": ["TOKEN"],
        "logs": {"volume": 1, "path": f"logs/workspaces/default/clusters/c/{plan.id}"},
    }
    assert prepared.credentials["setup"] == {"TOKEN": "hush-hush"} and prepared.secrets == {}
    assert "hush-hush" not in json.dumps([prepared.plan.record(), prepared.document, prepared.warnings])
    assert prepared.warnings[-1] == "cluster 'c': nodeSetup.setupTask: $AZ_BATCHAI_JOB_TEMP is used and nothing defines it"
    # Not the secrets' values: only what they are called.
    again = desk.prepare(nodeSetup={**setup, "setupTask": {**task, "secrets": [{"name": "TOKEN", "value": "another"}]}})
    assert again.plan.setup_task.id == plan.id
    changed = desk.prepare(nodeSetup={**setup, "setupTask": {**task, "commandLine": "prepare"}})
    assert changed.plan.setup_task.id != plan.id
    loud = {**task, "environmentVariables": [{"name": "A", "value": "x hush-hush"}]}
    with pytest.raises(DocumentError, match=r"nodeSetup\.setupTask of the cluster document holds the text of a secret"):
        desk.prepare(nodeSetup={**setup, "setupTask": loud})
    on_share = {**task, "stdOutErrPathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share/"}
    logs = desk.prepare(nodeSetup={"setupTask": on_share}).plan.setup_task.logs
    assert logs == LogPlace(None, f"workspaces/default/clusters/c/{plan.id}")


def test_what_earlier_runs_left_is_no_code(desk):
    for name in ("mlflow.db", "mlflow.db-wal", ".DS_Store"):
        (desk.project / name).write_text("x", encoding="utf-8")
    for name in (".git", "mlruns/0/x", "__pycache__", ".venv/lib", "pkg/__pycache__", "empty"):
        (desk.project / name).mkdir(parents=True)
        (desk.project / name / "file").write_text("x", encoding="utf-8") if name != "empty" else None
    (desk.project / "pkg" / "a b\n\udcff.py").write_text("x", encoding="utf-8")
    (desk.project / "run.sh").write_text("x", encoding="utf-8")
    (desk.project / "run.sh").chmod(0o700)
    (desk.project / "pkg" / "link.py").symlink_to("../train.py")
    code = {entry.path: entry for entry in desk.prepare().plan.code}
    assert sorted(code) == ["MLproject", "pkg/a b\n\udcff.py", "pkg/link.py", "run.sh", "train.py"]
    assert code["run.sh"].mode == 0o755
    assert code["pkg/link.py"] == CodeFile("pkg/link.py", link="../train.py")


@pytest.mark.parametrize("target", ["/etc/passwd", "../../x", "sub/../../../x"])
def test_a_link_out_of_the_project_or_a_pipe_is_refused(desk, target):
    (desk.project / "sneaky").symlink_to(target)
    with pytest.raises(ProjectError, match="'sneaky' is a link out of the project"):
        desk.prepare()
    (desk.project / "sneaky").unlink()
    os.mkfifo(desk.project / "pipe")
    with pytest.raises(ProjectError, match="'pipe' of the project is neither a file nor a folder"):
        desk.prepare()


@pytest.mark.parametrize(
    ("manager", "text", "kind", "words"),
    [
        ("conda", "", NotSupportedError, "--env-manager conda is not supported"),
        ("virtualenv", None, ProjectError, "needs a python_env.yaml"),
        ("uv", "[1, 2]", BatchAIError, "python_env.yaml"),
        ("uv", "dependencies: numpy", DocumentError, "dependencies should be a list of requirements"),
        ("uv", "dependencies: [{a: 1}]", DocumentError, "dependencies should be a list of requirements"),
        ("uv", "dependencies: [", DocumentError, "python_env.yaml, line 1"),
        ("uv", 'dependencies: ["a\\0b"]', DocumentError, "dependencies[0] holds a NUL byte"),
    ],
)
def test_environments_that_are_refused(desk, manager, text, kind, words):
    if text is not None:
        (desk.project / "python_env.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(kind) as error:
        desk.prepare(env_manager=manager)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_hash_of_an_environment_changes_with_what_is_in_it(desk):
    (desk.project / "python_env.yaml").write_text("python: 3.11\ndependencies: [numpy, -r r.txt]", encoding="utf-8")
    (desk.project / "r.txt").write_text("scipy", encoding="utf-8")
    first = desk.prepare(env_manager="uv").plan.environment
    assert (first.manager, first.python, first.dependencies) == ("uv", "3.11", ("numpy", "-r r.txt"))
    assert desk.prepare(env_manager="uv").plan.environment == first
    (desk.project / "r.txt").write_text("scipy<2", encoding="utf-8")
    assert desk.prepare(env_manager="uv").plan.environment.hash != first.hash
    assert desk.prepare(env_manager="local").plan.environment is None


def test_of_a_conda_yaml_what_pip_can_have(desk):
    """As MLflow has it under virtualenv and uv; a package that only conda has is refused by its name."""
    conda = desk.project / "conda.yaml"
    pip = "- pip: [numpy==2.0, -r r.txt]"
    conda.write_text(
        f"channels: [x]\ndependencies:\n- python=3.11\n- conda-forge::pip<=24.0\n- wheel>=0.40,<1\n- setuptools~=70.0\n{pip}",
        encoding="utf-8",
    )
    (desk.project / "r.txt").write_text("scipy", encoding="utf-8")
    builds = ("pip<=24.0", "wheel>=0.40,<1", "setuptools~=70.0")
    for manager in ("virtualenv", "uv"):
        made = desk.prepare(env_manager=manager).plan.environment
        assert (made.python, made.build_dependencies, made.dependencies) == ("3.11", builds, ("numpy==2.0", "-r r.txt"))
    for version in ("<4", "~=3.11", ">=3.10,<4"):
        conda.write_text(f"dependencies: ['python{version}']", encoding="utf-8")
        with pytest.raises(DocumentError, match=rf"conda\.yaml: python{version}: write one version, such as python=3\.11"):
            desk.prepare(env_manager="uv")
    conda.write_text("dependencies: [python=3.11, cudatoolkit=11, numpy]", encoding="utf-8")
    with pytest.raises(DocumentError, match=r"conda\.yaml: cudatoolkit=11, numpy: without conda only"):
        desk.prepare(env_manager="uv")
    (desk.project / "python_env.yaml").write_text("python: 3.10", encoding="utf-8")
    assert desk.prepare(env_manager="uv").plan.environment.python == "3.10"


@pytest.mark.parametrize(("file", "built"), [("python_env.yaml", "builds it"), ("conda.yaml", "its pip part")])
def test_an_environment_is_not_dropped_without_a_word(desk, file, built):
    assert desk.prepare().warnings == []
    (desk.project / file).write_text("dependencies: [python=3.11]", encoding="utf-8")
    (warning,) = desk.prepare().warnings
    assert warning.startswith(f"{file} plays no part: the job trains with ") and warning.endswith(built)
    assert "--env-manager virtualenv (or uv)" in warning
    assert desk.prepare(env_manager="local").warnings == []


@pytest.mark.parametrize(
    ("text", "name"),
    [("My Project!", "My-Project"), ("ümlaut/x", "mlaut-x"), ("", "job"), ("---", "job"), ("a" * 99, "a" * 40)],
)
def test_slug(text, name):
    assert places.slug(text) == name


def test_gpus_as_the_cluster_document_has_them(desk):
    two = properties(nodeCount=2, horovodSettings={"processCount": 6})
    plan = desk.prepare(two).plan
    assert (plan.gpus_per_node, plan.oversubscribe) == (None, False)
    assert desk.prepare(two, gpus_per_node=3).plan.gpus_per_node == 3
    assert desk.prepare(two, gpus_per_node=0).plan.gpus_per_node == 0
    assert desk.prepare(two, gpus_per_node=2, oversubscribe=True).plan.oversubscribe is True
    with pytest.raises(ClusterError, match=r"processCount is 6 and 2 node\(s\) of cluster 'c' have 4 GPUs"):
        desk.prepare(two, gpus_per_node=2)


PREPARE = "pip install --target $BATCHAI_PREPARATION_DIR -r requirements.txt $BATCHAI_PARAM_more"


def cached(desk, cache, command=PREPARE, secret="s3cret", given=None, env_manager=None, **entries):
    (desk.project / "requirements.txt").touch()
    desk.parameters = "{more: {type: string, default: a}, lr: {type: float, default: 1}}"
    entries = {"jobPreparation": {"commandLine": command}, "secrets": [{"name": "TOKEN", "value": secret}], **entries}
    config = {"cachePreparation": cache, **properties(**entries)}
    return desk.prepare(config, given=given, env_manager=env_manager).plan.preparation_cache


def test_what_a_kept_preparation_depends_on(desk):
    assert cached(desk, False) is None
    [warning] = desk.prepare({"cachePreparation": True}).warnings
    assert "cachePreparation plays no part without properties.jobPreparation" in warning
    listed = cached(desk, ["./requirements.txt"])
    assert re.fullmatch(r"[0-9a-f]{16}", listed)
    # Not on a secret's value, nor on a parameter that the command doesn't name.
    assert cached(desk, ["requirements.txt"], secret="t0ken", given={"lr": "2"}) == listed
    others = [
        cached(desk, []),
        cached(desk, True),
        cached(desk, ["requirements.txt", "train.py"]),
        cached(desk, ["requirements.txt"], PREPARE + " -v"),
        cached(desk, ["requirements.txt"], given={"more": "b"}),
        cached(desk, ["requirements.txt"], environmentVariables=[{"name": "A", "value": "1"}]),
        cached(desk, ["requirements.txt"], secrets=[]),
    ]
    (desk.project / "python_env.yaml").write_text("dependencies: [numpy]\n", encoding="utf-8")
    assert cached(desk, ["requirements.txt"]) == listed
    (desk.project / "train.py").write_text("print(2)\n", encoding="utf-8")
    assert cached(desk, ["requirements.txt"]) == listed
    others.append(cached(desk, True))
    (desk.project / "requirements.txt").write_text("keras\n", encoding="utf-8")
    others.append(cached(desk, ["requirements.txt"]))
    assert len({listed, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("name", "hint"), [("requirement.txt", "; did you mean 'requirements.txt'?"), ("/etc/passwd", ""), ("../x", "")]
)
def test_a_kept_preparation_that_depends_on_no_file_of_the_project(desk, name, hint):
    with pytest.raises(DocumentError) as error:
        cached(desk, [name])
    assert str(error.value).endswith(f"cachePreparation names '{name}', which is no file of the project{hint}")


def test_more_text_than_a_program_can_be_given(desk):
    """Each key is within the limit; the variable with its name, or all of them together, are not."""
    name = "A" * 100
    for values, words in (([131_000], f"the variable {name}0 is 131102 bytes long"), ([130_000] * 12, "variables have 15")):
        variables = [{"name": f"{name}{index}", "value": "x" * length} for index, length in enumerate(values)]
        with pytest.raises(DocumentError, match=words):
            desk.prepare({"properties": {"environmentVariables": variables}})
