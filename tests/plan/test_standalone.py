"""A job document that names its own program: its command, its script, its plan, and what is refused before anything exists."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from plans import bare_plan

from mlflow_batchai.agent.plan import LogPlace, Volume
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.documents.job import parse_job
from mlflow_batchai.documents.reading import read
from mlflow_batchai.errors import BatchAIError, DocumentError, NotSupportedError
from mlflow_batchai.plan import standalone
from mlflow_batchai.plan.volumes import check_volumes
from mlflow_batchai.storage.directory import DirectoryShare

SHARE = {"azureFileUrl": "https://acc.file.core.windows.net/data", "relativeMountPath": "external"}
EXTERNAL = "$AZ_BATCHAI_JOB_MOUNT_ROOT/external"
SCRIPT = f"{EXTERNAL}/hvd/train.py"
SECRET = "hush-hush-4711"


class Desk:
    """Where a person stands with a document, a cluster, and what lies on his share."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "home" / "shares" / "acc" / "data"
        share, home = DirectoryShare(root / "share"), DirectoryShare(root / "home")
        self.control = share.root
        places = (home, "shares", str(home.root / "shares"))
        engine = SimpleNamespace(node_limit=2)
        self.cluster = Cluster(
            "c", ClusterDocument(containers="ignore"), share, engine, str(share.root), "folder", places, "/py", "/envs"
        )

    def put(self, path: str, folder: Path | None = None) -> None:
        file = (folder or self.folder) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")

    def prepare(self, block=None, check=True, **entries):
        entries = {
            "nodeCount": 1,
            "stdOutErrPathPrefix": EXTERNAL,
            "mountVolumes": {"azureFileShares": [SHARE]},
            **({"horovodSettings": {"pythonScriptFilePath": SCRIPT}} if block is None else block),
            **entries,
        }
        properties = {key: value for key, value in entries.items() if value is not None}
        document, _ = parse_job({"properties": properties}, "job.json")
        prepared = standalone.prepare(document, "myjob", self.cluster, "job.json")
        if check:
            standalone.check_script(prepared, document.properties, "job.json")
        return prepared


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    return Desk(tmp_path)


def horovod(path=SCRIPT, **settings):
    return {"horovodSettings": {"pythonScriptFilePath": path, **settings}}


def test_a_horovod_job(desk):
    desk.put("hvd/train.py")
    prepared = desk.prepare(horovod(commandLineArgs=" --epochs 5 *.npz\n", processCount=4), nodeCount=2)
    plan = prepared.plan
    assert (plan.framework, plan.node_count, plan.process_count, plan.ranks) == ("horovod", 2, 4, 4)
    assert plan.command == 'python "${AZ_BATCHAI_JOB_MOUNT_ROOT}/external/hvd/train.py" --epochs 5 *.npz'
    assert (plan.code, plan.inputs, plan.parameters, plan.python) == ((), (), {}, "/py")
    assert (plan.folder_prefix, plan.log_copy_prefix) == ("", LogPlace(1, ""))
    assert (plan.name, list(prepared.code)) == ("myjob", [])
    assert prepared.parameters == {"epochs": "5", "arg1": "*.npz"}
    assert prepared.document["properties"]["horovodSettings"]["processCount"] == 4


@pytest.mark.parametrize(("asked", "told"), [("TCP", "gloo"), ("nccl", "nccl"), ("MPI", "mpi"), (None, "")])
def test_a_pytorch_job(desk, asked, told):
    desk.put("hvd/train.py")
    settings = {"pythonScriptFilePath": SCRIPT, "commandLineArgs": "--dist-url $AZ_BATCHAI_PYTORCH_INIT_METHOD"}
    settings.update({"communicationBackend": asked} if asked else {}, processCount=4)
    prepared = desk.prepare({"pyTorchSettings": settings}, nodeCount=2)
    plan = prepared.plan
    assert (plan.framework, plan.process_count, plan.ranks, plan.communication_backend) == ("pytorch", 4, 4, told)
    assert plan.command.endswith('hvd/train.py" --dist-url $AZ_BATCHAI_PYTORCH_INIT_METHOD')
    warnings = " ".join(prepared.warnings)
    assert "AZ_BATCHAI" not in warnings and ("are not started by mpirun" in warnings) is (asked == "MPI")


def test_what_plays_no_part_is_told_of(desk):
    desk.put("hvd/train.py")
    before = desk.prepare(schedulingPriority="normal").warnings
    assert desk.prepare(schedulingPriority="high").warnings == [
        "job.json: properties.schedulingPriority plays no part: jobs start in the order in which they came",
        *before,
    ]


def test_a_command_line_of_its_own_runs_as_it_is(desk):
    line = "echo a | tee b; cd $AZ_BATCHAI_JOB_TEMP && ./x *"
    prepared = desk.prepare({"customToolkitSettings": {"commandLine": line}}, nodeCount=2)
    assert (prepared.plan.framework, prepared.plan.ranks, prepared.plan.command) == ("custom", 1, line)
    assert prepared.parameters == {"commandLine": line}
    assert "job.json: without horovodSettings the command runs once" in prepared.warnings[-1]


@pytest.mark.parametrize(
    ("path", "variables", "word"),
    [
        ("$A/plain.py", {"A": "/x"}, "$A/plain.py"),
        ("$AZ_BATCHAI_X/a b.py", {}, "/mnt it/a b.py"),
        ("${AZ_BATCHAI_X}y/a'b\"c`d\\e.py", {}, "/mnt ity/a'b\"c`d\\e.py"),
        ("$AZ_BATCHAI_X/$(touch pwned);*.py", {}, "/mnt it/$(touch pwned);*.py"),
        ("$OWN/$OTHER/$TOKEN.py", {"OWN": "o w", "OTHER": "x"}, "o w/$OTHER/t o.py"),
        ("/opt/a+b-c/d_1.py", {}, "/opt/a+b-c/d_1.py"),
    ],
)
def test_a_scripts_path_is_one_word_whatever_stands_in_it(desk, tmp_path, path, variables, word):
    """As bash reads it: the service's and the document's variables are expanded, nothing else."""
    own = [{"name": "OWN", "value": "o w"}]
    secrets = [{"name": "TOKEN", "value": "t o"}]
    settings = horovod(path, commandLineArgs="1", pythonInterpreterPath="printf")
    plan = desk.prepare(settings, environmentVariables=own, secrets=secrets, check=False).plan
    environment = {"PATH": os.environ["PATH"], "AZ_BATCHAI_X": "/mnt it", "TOKEN": "t o", **variables}
    command = plan.command.replace("printf ", "printf '<%s>' ", 1)
    said = subprocess.run(["bash", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == (f"<{word}><1>", "")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("settings", "entries", "command", "python"),
    [
        ({}, {}, "python", "/py"),
        ({"pythonInterpreterPath": "/opt/conda/bin/python"}, {}, "/opt/conda/bin/python", "/opt/conda/bin/python"),
        ({"pythonInterpreterPath": "~/env/bin/python3.8"}, {}, "~/env/bin/python3.8", "~/env/bin/python3.8"),
        # It is yet to be made, or found by a variable: Horovod's server starts with the cluster's.
        (
            {"pythonInterpreterPath": "/opt/conda/bin/python"},
            {"jobPreparation": {"commandLine": "conda create"}},
            "/opt/conda/bin/python",
            "/py",
        ),
        ({"pythonInterpreterPath": "$CONDA/python"}, {"environmentVariables": [{"name": "CONDA", "value": "/c"}]}, None, "/py"),
    ],
)
def test_which_python_runs_it(desk, settings, entries, command, python):
    plan = desk.prepare(horovod(**settings), check=False, **entries).plan
    assert plan.python == python
    assert plan.command.startswith(f"{command} " if command else '"${CONDA}/python" "$')


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (SCRIPT, "and there is no such file: looked for 'hvd/train.py' on the file share acc/data (FOLDER)"),
        (f"{EXTERNAL}/folder", "and that is a folder: looked for 'folder' on the file share acc/data (FOLDER)"),
        ("$AZ_BATCHAI_INPUT_CODE/x.py", "and there is no such file: looked for 'in/x.py' on the file share acc/data (FOLDER)"),
        ("$AZ_BATCHAI_MOUNT_ROOT/share/x.py", "and there is no such file: looked for 'x.py' on the control share (CONTROL)"),
        (
            "$AZ_BATCHAI_MOUNT_ROOT/external/x.py",
            "which lies on no mounted volume; the mounts are: $AZ_BATCHAI_MOUNT_ROOT/share",
        ),
        (f"{EXTERNAL}/../x.py", "'..' would lead out of the mount"),
        ("train.py", "a job begins in an empty folder: put the script on a share, or have jobPreparation fetch it"),
        ("$AZ_BATCHAI_JOB_TEMP/x.py", "a job begins in an empty folder"),
    ],
)
def test_a_script_that_is_not_there(desk, path, words):
    desk.put("folder/file")
    entries = {"inputDirectories": [{"id": "CODE", "path": f"{EXTERNAL}/in"}]}
    with pytest.raises(DocumentError) as caught:
        desk.prepare(horovod(path), **entries)
    assert str(caught.value).startswith(f"job.json: properties.horovodSettings.pythonScriptFilePath is '{path}'")
    assert words.replace("FOLDER", str(desk.folder)).replace("CONTROL", str(desk.control)) in str(caught.value)
    # A preparation may make it, or a mount of its own.
    desk.prepare(horovod(path), jobPreparation={"commandLine": "git clone x"}, **entries)


@pytest.mark.parametrize("path", ["/opt/on/the/nodes.py", "$CODE/x.py", "$AZ_BATCHAI_JOB_MOUNT_ROOT/nfs/x.py", "~/x.py"])
def test_a_script_that_can_not_be_seen_from_here(desk, path):
    mounts = {
        "azureFileShares": [SHARE],
        "unmanagedFileSystems": [{"mountCommand": "mount -t x y", "relativeMountPath": "nfs"}],
    }
    desk.prepare(horovod(path), mountVolumes=mounts, environmentVariables=[{"name": "CODE", "value": "/code"}])


def test_a_script_on_an_azure_share(azure, desk, monkeypatch):
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", azure.account)
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_KEY", azure.key)
    desk.put("hvd/train.py", azure.share("scripts"))
    volume = Volume("job", "external", "azureFiles", azure.url("scripts"), "file share x/scripts")
    document, _ = parse_job({"properties": {"nodeCount": 1, **horovod()}}, "job.json")
    prepared = SimpleNamespace(plan=bare_plan(volumes=(volume,)))
    standalone.check_script(prepared, document.properties, "job.json")
    document, _ = parse_job({"properties": {"nodeCount": 1, **horovod(f"{EXTERNAL}/hvd")}}, "job.json")
    with pytest.raises(DocumentError, match="and that is a folder: looked for 'hvd' on the file share x/scripts"):
        standalone.check_script(prepared, document.properties, "job.json")


QUOTED = f"--token {SECRET[:4]}'{SECRET[4:]}'"
REFUSED = {
    "no program": ({"horovodSettings": {}}, {}, "lacks horovodSettings.pythonScriptFilePath"),
    "no command": ({"customToolkitSettings": {}}, {}, "lacks customToolkitSettings.commandLine"),
    "no block": ({}, {}, "lacks a framework block"),
    "no nodes": (None, {"nodeCount": None}, "lacks nodeCount"),
    "no place for logs": (None, {"stdOutErrPathPrefix": None}, "lacks stdOutErrPathPrefix"),
    "another framework": ({"chainerSettings": {"pythonScriptFilePath": "x.py"}}, {}, "chainerSettings is not supported yet"),
    "secret": (horovod(commandLineArgs=f"--token {SECRET}"), {}, "properties.horovodSettings holds the text of a secret"),
    "quoted secret": (horovod(commandLineArgs=QUOTED), {}, "properties.horovodSettings holds the text of a secret"),
    "secret in a command": ({"customToolkitSettings": {"commandLine": SECRET}}, {}, "commandLine holds the text of a secret"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(desk, case):
    block, entries, words = REFUSED[case]
    with pytest.raises(NotSupportedError if case == "another framework" else DocumentError) as caught:
        desk.prepare(block, check=False, secrets=[{"name": "TOKEN", "value": SECRET}], **entries)
    assert words in str(caught.value) and "\n" not in str(caught.value) and SECRET not in str(caught.value)
    assert str(caught.value).startswith("job.json: ")
    assert not desk.folder.exists() and not desk.control.exists()


def test_nothing_is_made_before_a_job_is_checked(desk):
    prepared = desk.prepare(check=False)
    assert not desk.folder.exists() and not desk.control.exists()
    check_volumes(prepared.plan.volumes, desk.cluster)
    assert desk.folder.is_dir()
    assert SECRET not in json.dumps(desk.prepare(check=False, secrets=[{"name": "T", "value": SECRET}]).document)


# Real documents.

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
JOBS = [path for path in sorted(CORPUS.rglob("*.json")) if "cluster" not in path.name]


@pytest.mark.skipif(not JOBS, reason=f"the corpus of real Batch AI files is not at {CORPUS}")
@pytest.mark.parametrize("path", JOBS, ids=[str(path.relative_to(CORPUS)) for path in JOBS])
def test_a_real_document_plans_or_is_refused_with_a_sentence(desk, path, monkeypatch):
    monkeypatch.setenv("AZURE_BATCHAI_STORAGE_ACCOUNT", "acc")
    desk.cluster.engine.node_limit = 8
    try:
        document, _ = parse_job(read(path), str(path))
        prepared = standalone.prepare(document, "job", desk.cluster, str(path))
    except BatchAIError as error:
        assert "\n" not in str(error) and str(error).startswith(str(path))
        text = path.read_text()
        supported = (
            any(f"{key}Settings" in text for key in ("horovod", "customToolkit", "pyTorch"))
            and "_documentation" not in path.parts
        )
        if isinstance(error, NotSupportedError):
            assert not supported and "Settings is not supported yet" in str(error)
        else:
            assert isinstance(error, DocumentError)
            # Mounts of a cluster that isn't here, blob containers without a key, what is no JSON or no whole job.
            reasons = ("lies on no mounted volume", "there is no key", "not valid JSON", "properties lacks", "not a known key")
            assert any(reason in str(error) for reason in reasons), str(error)
        return
    block = prepared.plan.framework
    assert (
        block in ("horovod", "custom", "pytorch")
        and prepared.plan.command
        and "REDACTED" not in json.dumps(prepared.plan.record())
    )
    assert subprocess.run(["bash", "-n", "-c", prepared.plan.command], check=False).returncode == 0
    assert prepared.parameters or not document.properties.framework[1].command_line_args
