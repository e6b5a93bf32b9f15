"""The job document: every framework block, the odd forms that real files have, and which key a refusal names."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from whole_documents import HIDDEN, JOB

from mlflow_batchai.documents.cluster import parse_cluster
from mlflow_batchai.documents.job import (
    FRAMEWORKS,
    HorovodSettings,
    JobConstraints,
    JobDocument,
    JobProperties,
    forbid_program,
    parse_job,
    require_complete,
)
from mlflow_batchai.documents.model import masked
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.errors import DocumentError

SCRIPT = "$AZ_BATCHAI_JOB_MOUNT_ROOT/code/train.py"

BLOCKS: dict[str, dict[str, Any]] = {
    "horovodSettings": {"pythonScriptFilePath": SCRIPT, "commandLineArgs": "--epochs 2", "processCount": 8},
    "customMpiSettings": {"commandLine": f"python -u {SCRIPT} --out $AZ_BATCHAI_OUTPUT_LABELS", "processCount": 2},
    "customToolkitSettings": {"commandLine": "mpirun --hostfile $AZ_BATCHAI_MPI_HOST_FILE python t.py | tee r.txt"},
    "tensorFlowSettings": {
        "pythonScriptFilePath": SCRIPT,
        "pythonInterpreterPath": "/opt/py/bin/python",
        "masterCommandLineArgs": "--task $AZ_BATCHAI_TASK_INDEX --data $AZ_BATCHAI_INPUT_DATA",
        "workerCommandLineArgs": "--task $AZ_BATCHAI_TASK_INDEX",
        "parameterServerCommandLineArgs": "--ps $AZ_BATCHAI_PS_HOSTS",
        "workerCount": 2,
        "parameterServerCount": 1,
    },
    "pyTorchSettings": {
        "pythonScriptFilePath": SCRIPT,
        "commandLineArgs": "--in data/*/part*.tsv --url $AZ_BATCHAI_PYTORCH_INIT_METHOD",
        "communicationBackend": "Gloo",
        "processCount": 4,
    },
    "cntkSettings": {"configFilePath": "$AZ_BATCHAI_INPUT_CONFIG/net.cntk", "commandLineArgs": "rootDir=. k=v"},
    "caffeSettings": {"configFilePath": "/data/solver.prototxt", "processCount": 1},
    "caffe2Settings": {"pythonScriptFilePath": SCRIPT, "commandLineArgs": "--num_shards 2"},
    "chainerSettings": {"pythonScriptFilePath": SCRIPT, "commandLineArgs": "-g", "processCount": 8},
}


def job(**properties: Any) -> dict[str, Any]:
    return {"properties": {"nodeCount": 2, "stdOutErrPathPrefix": "/logs", **properties}}


def read(**properties: Any) -> JobProperties:
    document, warnings = parse_job(job(**properties), "job.json")
    assert warnings == []
    return document.properties


def refusal(data: object) -> str:
    with pytest.raises(DocumentError) as caught:
        parse_job(data, "job.json")
    assert caught.value.__context__ is None, "pydantic's error holds the input"
    return str(caught.value)


@pytest.mark.parametrize("key", FRAMEWORKS)
def test_every_framework_block_is_read(key: str) -> None:
    properties = read(**{key: BLOCKS[key]})
    assert properties.framework is not None
    name, settings = properties.framework
    given = settings.model_dump(by_alias=True, exclude_unset=True)
    lowered = {"communicationBackend": "gloo"} if key == "pyTorchSettings" else {}
    assert (name, given) == (key, {**BLOCKS[key], **lowered})
    require_complete(properties, "job.json")
    with pytest.raises(DocumentError) as caught:
        forbid_program(properties, "batchai.yaml")
    message = str(caught.value)
    assert message.startswith(f"batchai.yaml: properties.{key} names ")
    counts = ("processCount", "workerCount", "parameterServerCount", "communicationBackend")
    assert all((field in message) is (field not in counts) for field in BLOCKS[key])


@pytest.mark.parametrize("key", FRAMEWORKS)
def test_a_block_may_lack_its_program_only_in_a_project(key: str) -> None:
    properties = read(**{key: {}})
    forbid_program(properties, "batchai.yaml")
    with pytest.raises(DocumentError, match=rf"^job\.json: properties lacks {key}\."):
        require_complete(properties, "job.json")


def test_a_project_may_prepare_its_nodes_and_count_processes() -> None:
    properties = read(horovodSettings={"processCount": 4}, jobPreparation={"commandLine": "apt update; pip list"})
    forbid_program(properties, "batchai.yaml")
    assert properties.horovod_settings == HorovodSettings(process_count=4)
    forbid_program(read(), "batchai.yaml")


def test_incomplete_documents_are_told_all_that_is_missing() -> None:
    properties = parse_job({"properties": {}}, "job.json")[0].properties
    with pytest.raises(DocumentError, match=r"properties lacks nodeCount, stdOutErrPathPrefix and a framework block \("):
        require_complete(properties, "job.json")
    with pytest.raises(DocumentError, match=r"cntkSettings\.configFilePath or pythonScriptFilePath"):
        require_complete(read(cntkSettings={}), "job.json")


def test_a_whole_document() -> None:
    properties = read(**{**JOB["properties"], "schedulingPriority": "High"})
    require_complete(properties, "job.json")
    assert properties.cluster is not None and properties.cluster.name == "gpu"
    assert properties.scheduling_priority == "high"
    assert [volume.relative_mount_path for volume in properties.mount_volumes.all] == ["logs", "folder", "data", "nfs", "gv"]
    assert [share.file_mode for share in properties.mount_volumes.azure_file_shares] == ["0777", "0700"]
    assert properties.constraints.max_wall_clock_time == timedelta(hours=2)
    assert properties.secrets[0].value is not None and properties.secrets[0].value.get_secret_value() == HIDDEN


def test_keys_that_never_had_a_meaning_are_dropped_with_a_warning() -> None:
    data = job(
        comment="a note",
        toolType="custom",
        experimentName="e",
        customToolkitSettings={"commandLine": "true", "processCount": 8},
        outputDirectories=[{"id": "O", "pathPrefix": "/p", "type": "custom", "createNew": True, "$comment": 1}],
    )
    data.update({"$schema": "https://example.com/schemas/2017-09-01-preview/job.json", "location": "eastus"})
    document, warnings = parse_job(data, "job.json")
    assert document.properties.custom_toolkit_settings is not None
    ignored = ["location", "properties.comment", "properties.toolType", "properties.experimentName"]
    ignored += ["properties.customToolkitSettings.processCount"]
    ignored += [f"properties.outputDirectories[0].{key}" for key in ("type", "createNew", "$comment")]
    version = "job.json: $schema names another version; the document is read as 2018-05-01"
    assert sorted(warnings) == sorted([version, *(f"job.json: {key} has no effect and is ignored" for key in ignored)])
    assert "comment" in data["properties"], "the input is left as it was"
    assert parse_job({"$schema": "https://example.com/schemas/2018-05-01/job.json", "properties": {}}, "job.json")[1] == []


def test_null_means_absent_and_numbers_may_be_text() -> None:
    properties = read(secrets=None, caffeSettings=None, horovodSettings={"processCount": None})
    assert properties.secrets == ()
    assert properties.framework == ("horovodSettings", HorovodSettings())
    properties = read(nodeCount="3", environmentVariables=[{"name": "N", "value": 2}])
    assert (properties.node_count, properties.environment_variables[0].value) == (3, "2")


REFUSED = {
    "horovodSettings: {proccessCount: 2}": ".horovodSettings.proccessCount is not a known key; did you mean processCount?",
    "node_count: 2": ".node_count is not a known key; did you mean nodeCount?",
    "nodecount: ": ".nodecount is not a known key; did you mean nodeCount?",
    "customToolkitSettings: {zzz: 2}": ".customToolkitSettings.zzz is not a known key; known keys: commandLine",
    "mountVolumes: {azureFileShares: [{azureFileUrl: u, relativeMountPath: r, credentialsInfos: {}}]}": (
        ".mountVolumes.azureFileShares[0].credentialsInfos is not a known key; did you mean credentials?"
    ),
    "mountVolumes: {azureFileShares: [{azureFileUrl: u, relativeMountPath: r, credentials: {}}]}": (
        ".mountVolumes.azureFileShares[0].credentials is empty"
    ),
    "outputDirectories: [{id: B, pathPrefx: p}]": ".outputDirectories[0].pathPrefx is not a known key; did you mean pathPrefix?",
    "outputDirectories: [{id: A}]": ".outputDirectories[0].pathPrefix is missing",
    "nodeCount: two": ".nodeCount must be a whole number",
    "nodeCount: true": ".nodeCount must be a whole number",
    "nodeCount: 0": ".nodeCount must be at least 1",
    "nodeCount: 100000000000000000000000000": ".nodeCount must be at most 100",
    "horovodSettings: {processCount: 10000000000}": ".horovodSettings.processCount must be at most 10000",
    "constraints: {maxWallClockTime: P99999999D}": ".constraints.maxWallClockTime is 'P99999999D', which is too long",
    "customToolkitSettings: {commandLine: ' '}": ".customToolkitSettings.commandLine must not be empty",
    'stdOutErrPathPrefix: "\\t"': ".stdOutErrPathPrefix must not be empty",
    f"outputDirectories: [{{id: A, pathPrefix: {'p' * 256}}}]": ".outputDirectories[0].pathPrefix is longer than a path can be",
    f"mountVolumes: {{unmanagedFileSystems: [{{mountCommand: m, relativeMountPath: {'p' * 256}}}]}}": (
        ".mountVolumes.unmanagedFileSystems[0].relativeMountPath is longer than a path can be"
    ),
    "schedulingPriority: 1": ".schedulingPriority is not an allowed value",
    "pyTorchSettings: {communicationBackend: udp}": ".pyTorchSettings.communicationBackend is 'udp'",
    "environmentVariables: {A: 1}": ".environmentVariables must be a list",
    "environmentVariables: [A=1]": ".environmentVariables[0] must be a mapping",
    "jobPreparation: apt update": ".jobPreparation must be a mapping",
    "jobPreparation: {commandLine: ''}": ".jobPreparation.commandLine must not be empty",
    "{horovodSettings: {}, customMpiSettings: {}}": " has horovodSettings and customMpiSettings",
    "secrets: [{name: A, vaule: x}]": ".secrets[0].vaule is not a known key; did you mean value?",
    "mountVolumes: {azureFileShares: [{azureFileUrl: u, relativeMountPath: r, credentials: {accountKeyx: x}}]}": (
        ".mountVolumes.azureFileShares[0].credentials.accountKeyx is not a known key; did you mean accountKey?"
    ),
    "secrets: [{name: A}]": ".secrets[0] must have either value or valueSecretReference",
    "{secrets: [{name: A, value: x}], environmentVariables: [{name: A, value: y}]}": " gives the environment variable or secret 'A'",
    "inputDirectories: [{id: A, path: p}, {id: A, path: p}]": ".inputDirectories gives the id 'A' twice",
    "outputDirectories: [{id: stdouterr, pathPrefix: p}]": ".outputDirectories[0].id is 'stdouterr'",
    "inputDirectories: [{id: A-B, path: p}]": ".inputDirectories[0].id is 'A-B'",
    "mountVolumes: {unmanagedFileSystems: [{mountCommand: m, relativeMountPath: ../x}]}": (
        ".mountVolumes.unmanagedFileSystems[0].relativeMountPath is '../x'"
    ),
    "mountVolumes: {unmanagedFileSystems: [&m {mountCommand: m, relativeMountPath: x}, *m]}": (
        ".mountVolumes gives the relativeMountPath 'x' twice"
    ),
    "containerSettings: {imageSourceRegistry: {image: i}, shmSize: lots}": ".containerSettings.shmSize is 'lots'",
    "constraints: {maxWallClockTime: P0D}": ".constraints.maxWallClockTime is 'P0D'",
    "constraints: {maxWallClockTime: 7200}": ".constraints.maxWallClockTime must be a duration",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals_name_the_key(text: str) -> None:
    message = refusal(job(**load_text(text, "job.yaml")))
    assert message.startswith(f"job.json: properties{REFUSED[text]}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "properties is missing"),
        ([], "must be a mapping"),
        ({"properties": []}, "properties must be a mapping"),
        ({"propertys": {}}, "propertys is not a known key; did you mean properties?"),
        ({"properties": {}, 3: 4}, "3 is a key that is not text"),
        ({"nodeCount": 2}, "the job's keys must stand under 'properties'"),  # Batch AI ignored all of it.
    ],
)
def test_refusals_at_the_top(data: object, words: str) -> None:
    assert refusal(data).startswith(f"job.json: {words}")


FORMS = "write it as ISO 8601 ('PT2H', 'P7D') or as 'd.hh:mm:ss' ('0.02:00:00'), in quotes"
WORDING = {
    "nodeCount: [2]": ".nodeCount must be a whole number, not a list",
    "schedulingPriority: urgent": ".schedulingPriority is 'urgent'; allowed: 'low', 'normal', 'high'",
    "environmentVariables: [{name: A, value: true}]": (
        ".environmentVariables[0].value must be text, not true or false; put it in quotes"
    ),
    "environmentVariables: [{name: A B, value: ''}]": (
        ".environmentVariables[0].name is 'A B', but must be a variable's name, without spaces or '='"
    ),
    "horovodSettings: ": " has an empty horovodSettings; write 'horovodSettings: {}' for a block without settings",
    "constraints: {maxWallClockTime: 1h}": f".constraints.maxWallClockTime is '1h', which is not a duration; {FORMS}",
}


@pytest.mark.parametrize("text", WORDING)
def test_the_wording_of_refusals(text: str) -> None:
    """One sentence of each kind: the file, the path of the key, what is wrong and what to write instead."""
    assert refusal(job(**load_text(text, "job.yaml"))) == f"job.json: properties{WORDING[text]}"


def test_several_faults_take_a_line_each_and_at_most_ten() -> None:
    lines = refusal(job(nodeCount="x", horovodSettings={"processCount": "y", "foo": 1})).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("job.json: properties.") for line in lines)
    many = refusal(job(environmentVariables=[{}] * 8)).splitlines()
    assert len(many) == 11
    assert many[-1] == "job.json: and 6 more"


def test_two_outputs_in_one_folder_are_pointed_out() -> None:
    places = [
        {"id": "A", "pathPrefix": "/logs"},
        {"id": "B", "pathPrefix": "/logs/"},
        {"id": "C", "pathPrefix": "/logs", "pathSuffix": "c"},
    ]
    (warning,) = parse_job(job(outputDirectories=places), "job.json")[1]
    assert warning.startswith("job.json: outputDirectories A and B are the same folder")


def test_python_code_uses_snake_case() -> None:
    constraints = JobConstraints(max_wall_clock_time=timedelta(hours=30))
    properties = JobProperties(node_count=1, horovod_settings=HorovodSettings(), constraints=constraints)
    assert properties.framework == ("horovodSettings", HorovodSettings())
    given = {"nodeCount": 1, "horovodSettings": {}, "constraints": {"maxWallClockTime": "P1DT6H"}}
    assert masked(JobDocument(properties=properties)) == {"properties": given}


def test_names_of_older_versions_are_read_with_a_notice() -> None:
    """``credentialsInfo`` as in Azure's sample (azure-docs), and keys of API 2017-09-01-preview and 2018-03-01."""
    share = {"azureFileUrl": "u", "relativeMountPath": "r", "credentialsInfo": {"accountKey": "k"}}
    blob = {"containerName": "ccc", "relativeMountPath": "b", "credentialsInfo": {"accountKey": "k"}}
    mounts = {"azureFileShares": [share], "azureBlobFileSystems": [blob]}
    document, warnings = parse_job({"tags": {}, "properties": {"mountVolumes": mounts, "priority": 0}}, "j")
    assert [volume.credentials.account_key.get_secret_value() for volume in document.properties.mount_volumes.all] == ["k", "k"]
    key = "properties.mountVolumes.azureFileShares[0].credentialsInfo"
    assert f"j: {key} is read as credentials, as API 2018-05-01 calls it" in warnings
    assert len(warnings) == 4
    task = {"commandLine": "c", "stdOutErrPathPrefix": "p", "runElevated": True}
    cluster, warnings = parse_cluster({"properties": {"nodeSetup": {"mountVolumes": mounts, "setupTask": task}}}, "c")
    assert len(warnings) == 3
    assert "credentialsInfo" not in json.dumps(masked(cluster))
