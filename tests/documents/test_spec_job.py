"""The job document: every framework block, the odd forms that real files have, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from mlflow_batchai.documents.job import (
    FRAMEWORKS,
    HorovodSettings,
    JobConstraints,
    JobDocument,
    JobProperties,
    forbid_program,
    require_complete,
)
from mlflow_batchai.documents.model import masked
from mlflow_batchai.documents.reading import parse_job
from mlflow_batchai.errors import DocumentError

SCRIPT = "$AZ_BATCHAI_JOB_MOUNT_ROOT/code/train.py"

BLOCKS: dict[str, dict[str, Any]] = {
    "horovodSettings": {"pythonScriptFilePath": SCRIPT, "commandLineArgs": "--epochs 2", "processCount": 8},
    "customMpiSettings": {
        "commandLine": f"python -u {SCRIPT} --out $AZ_BATCHAI_OUTPUT_LABELS",
        "processCount": 2,
    },
    "customToolkitSettings": {
        "commandLine": ("mpirun --hostfile $AZ_BATCHAI_MPI_HOST_FILE python t.py | tee $AZ_BATCHAI_OUTPUT_O/r.txt")
    },
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
        "commandLineArgs": ("--in $AZ_BATCHAI_JOB_MOUNT_ROOT/data/*/part*.tsv --url $AZ_BATCHAI_PYTORCH_INIT_METHOD"),
        "communicationBackend": "Gloo",
        "processCount": 4,
    },
    "cntkSettings": {
        "configFilePath": "$AZ_BATCHAI_INPUT_CONFIG/net.cntk",
        "commandLineArgs": "rootDir=. k=v",
    },
    "caffeSettings": {"configFilePath": "/data/solver.prototxt", "processCount": 1},
    "caffe2Settings": {"pythonScriptFilePath": SCRIPT, "commandLineArgs": "--num_shards 2"},
    "chainerSettings": {"pythonScriptFilePath": SCRIPT, "commandLineArgs": "-g", "processCount": 8},
}


def job(**properties: Any) -> dict[str, Any]:
    return {"properties": {"nodeCount": 2, "stdOutErrPathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/logs", **properties}}


def read(**properties: Any) -> JobProperties:
    document, warnings = parse_job(job(**properties), "job.json")
    assert warnings == []
    return document.properties


def refusal(data: object) -> str:
    with pytest.raises(DocumentError) as caught:
        parse_job(data, "job.json")
    assert caught.value.__context__ is None, "pydantic's error holds the input"
    return str(caught.value)


def test_the_table_of_blocks_is_complete() -> None:
    assert set(BLOCKS) == set(FRAMEWORKS)


@pytest.mark.parametrize("key", BLOCKS)
def test_every_framework_block_is_read_and_is_complete(key: str) -> None:
    properties = read(**{key: BLOCKS[key]})
    assert properties.framework is not None
    name, settings = properties.framework
    assert name == key
    given = settings.model_dump(by_alias=True, exclude_unset=True)
    expected = {**BLOCKS[key], **({"communicationBackend": "gloo"} if key == "pyTorchSettings" else {})}
    assert given == expected
    require_complete(properties, "job.json")


@pytest.mark.parametrize("key", BLOCKS)
def test_a_block_may_lack_its_program_only_in_a_project(key: str) -> None:
    properties = read(**{key: {}})
    forbid_program(properties, "batchai.yaml")
    with pytest.raises(DocumentError, match=rf"^job\.json: properties lacks {key}\."):
        require_complete(properties, "job.json")


@pytest.mark.parametrize("key", BLOCKS)
def test_a_project_refuses_a_program(key: str) -> None:
    with pytest.raises(DocumentError) as caught:
        forbid_program(read(**{key: BLOCKS[key]}), "batchai.yaml")
    message = str(caught.value)
    assert message.startswith(f"batchai.yaml: properties.{key} names ")
    for field in BLOCKS[key]:
        is_count = field in ("processCount", "workerCount", "parameterServerCount", "communicationBackend")
        assert (field in message) is not is_count


def test_a_project_may_prepare_its_nodes_and_count_processes() -> None:
    properties = read(horovodSettings={"processCount": 4}, jobPreparation={"commandLine": "apt update; pip list"})
    forbid_program(properties, "batchai.yaml")
    assert properties.horovod_settings == HorovodSettings(process_count=4)


def test_a_project_may_leave_the_framework_open() -> None:
    forbid_program(read(), "batchai.yaml")


def test_incomplete_documents_are_told_all_that_is_missing() -> None:
    properties = parse_job({"properties": {}}, "job.json")[0].properties
    assert properties.framework is None
    with pytest.raises(DocumentError) as caught:
        require_complete(properties, "job.json")
    assert str(caught.value).startswith(
        "job.json: properties lacks nodeCount, stdOutErrPathPrefix and a framework block (horovodSettings, "
    )
    with pytest.raises(DocumentError, match=r"cntkSettings\.configFilePath or pythonScriptFilePath; a job"):
        require_complete(read(cntkSettings={}), "job.json")


def test_a_whole_document() -> None:
    properties = read(
        cluster={"id": "/subscriptions/s/resourceGroups/g/providers/p/workspaces/w/clusters/gpu"},
        schedulingPriority="High",
        horovodSettings=BLOCKS["horovodSettings"],
        mountVolumes={
            "azureFileShares": [
                {
                    "azureFileUrl": "https://<AZURE_BATCHAI_STORAGE_ACCOUNT>.file.core.windows.net/logs",
                    "relativeMountPath": "logs",
                },
                {
                    "accountName": "acct",
                    "azureFileUrl": "https://acct.file.core.windows.net/share/folder",
                    "relativeMountPath": "folder",
                    "credentials": {"accountKey": "k"},
                    "fileMode": "0700",
                },
            ],
            "azureBlobFileSystems": [
                {"accountName": "a", "containerName": "c", "relativeMountPath": "data", "mountOptions": ""}
            ],
            "fileServers": [{"fileServer": {"id": "/x/nfs1"}, "relativeMountPath": "nfs", "sourceDirectory": "d"}],
            "unmanagedFileSystems": [{"mountCommand": "mount -t nfs4 10.0.0.4:/v", "relativeMountPath": "gv"}],
        },
        containerSettings={
            "shmSize": "16gb",
            "imageSourceRegistry": {
                "serverUrl": "registry.example.com",
                "image": "registry.example.com/team/image:1",
                "credentials": {
                    "username": "$oauthtoken",
                    "passwordSecretReference": {
                        "sourceVault": {"id": "/v"},
                        "secretUrl": "https://v/secrets/s",
                    },
                },
            },
        },
        inputDirectories=[{"id": "DATA", "path": "$AZ_BATCHAI_JOB_MOUNT_ROOT/data"}],
        outputDirectories=[
            {"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/logs", "pathSuffix": "models"},
            {"id": "LOGS", "pathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/logs", "pathSuffix": "logs"},
        ],
        environmentVariables=[{"name": "HOROVOD_TIMELINE", "value": "$AZ_BATCHAI_OUTPUT_LOGS/t.json"}],
        secrets=[
            {"name": "TOKEN", "value": "t"},
            {
                "name": "OTHER",
                "valueSecretReference": {"sourceVault": {"id": "/v"}, "secretUrl": "https://v/s"},
            },
        ],
        constraints={"maxWallClockTime": "PT2H"},
    )
    require_complete(properties, "job.json")
    assert properties.cluster is not None and properties.cluster.name == "gpu"
    assert properties.scheduling_priority == "high"
    assert [volume.relative_mount_path for volume in properties.mount_volumes.all] == [
        "logs",
        "folder",
        "data",
        "nfs",
        "gv",
    ]
    assert properties.mount_volumes.azure_file_shares[0].file_mode == "0777"
    assert properties.constraints.max_wall_clock_time == timedelta(hours=2)
    assert properties.secrets[0].value is not None and properties.secrets[0].value.get_secret_value() == "t"


def test_numbers_are_read_as_batch_ai_did() -> None:
    properties = read(nodeCount="3", environmentVariables=[{"name": "N", "value": 2}])
    assert properties.node_count == 3
    assert properties.environment_variables[0].value == "2"


def test_documents_are_frozen() -> None:
    properties = read()
    with pytest.raises(ValueError, match="frozen"):
        properties.node_count = 3  # type: ignore[misc]


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
    assert sorted(warnings) == sorted(
        [
            "job.json: $schema names another version; the document is read as 2018-05-01",
            "job.json: location has no effect and is ignored",
            "job.json: properties.comment has no effect and is ignored",
            "job.json: properties.toolType has no effect and is ignored",
            "job.json: properties.experimentName has no effect and is ignored",
            "job.json: properties.customToolkitSettings.processCount has no effect and is ignored",
            "job.json: properties.outputDirectories[0].type has no effect and is ignored",
            "job.json: properties.outputDirectories[0].createNew has no effect and is ignored",
            "job.json: properties.outputDirectories[0].$comment has no effect and is ignored",
        ]
    )
    assert "comment" in data["properties"], "the input is left as it was"


def test_the_schema_of_this_version_needs_no_warning() -> None:
    data = {"$schema": "https://example.com/schemas/2018-05-01/job.json", "properties": {}}
    assert parse_job(data, "job.json")[1] == []


def test_null_means_absent() -> None:
    properties = read(secrets=None, caffeSettings=None, horovodSettings={"processCount": None})
    assert properties.secrets == ()
    assert properties.framework == ("horovodSettings", HorovodSettings())


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        (
            {"horovodSettings": {"proccessCount": 2}},
            "properties.horovodSettings.proccessCount is not a known key; did you mean processCount?",
        ),
        ({"node_count": 2}, "properties.node_count is not a known key; did you mean nodeCount?"),
        ({"nodecount": None}, "properties.nodecount is not a known key; did you mean nodeCount?"),
        (
            {"customToolkitSettings": {"zzz": 2}},
            "properties.customToolkitSettings.zzz is not a known key; known keys: commandLine",
        ),
        (
            {"mountVolumes": {"azureFileShares": [{"azureFileUrl": "u", "relativeMountPath": "r", "credentialsInfo": {}}]}},
            "properties.mountVolumes.azureFileShares[0].credentialsInfo is not a known key; did you mean credentials?",
        ),
        (
            {"outputDirectories": [{"id": "A", "pathPrefix": "p"}, {"id": "B", "pathPrefx": "p"}]},
            "properties.outputDirectories[1].pathPrefx is not a known key; did you mean pathPrefix?",
        ),
        ({"outputDirectories": [{"id": "A"}]}, "properties.outputDirectories[0].pathPrefix is missing"),
        ({"nodeCount": "two"}, "properties.nodeCount must be a whole number"),
        ({"nodeCount": [2]}, "properties.nodeCount must be a whole number, not a list"),
        ({"nodeCount": True}, "properties.nodeCount must be a whole number, not true or false"),
        ({"nodeCount": 0}, "properties.nodeCount must be at least 1"),
        (
            {"schedulingPriority": "urgent"},
            "properties.schedulingPriority is 'urgent'; allowed: 'low', 'normal', 'high'",
        ),
        (
            {"schedulingPriority": 1},
            "properties.schedulingPriority is not an allowed value; allowed: 'low', 'normal', 'high'",
        ),
        (
            {"pyTorchSettings": {"communicationBackend": "nccl"}},
            "properties.pyTorchSettings.communicationBackend is 'nccl'; allowed: 'tcp', 'gloo', 'mpi'",
        ),
        (
            {"environmentVariables": {"A": "1"}},
            "properties.environmentVariables must be a list, not a mapping",
        ),
        ({"environmentVariables": ["A=1"]}, "properties.environmentVariables[0] must be a mapping"),
        (
            {"environmentVariables": [{"name": "A", "value": True}]},
            "properties.environmentVariables[0].value must be text, not true or false; put it in quotes",
        ),
        (
            {"environmentVariables": [{"name": "A B", "value": ""}]},
            "properties.environmentVariables[0].name is 'A B', but must be a variable's name, without spaces or '='",
        ),
        ({"jobPreparation": "apt update"}, "properties.jobPreparation must be a mapping"),
        ({"jobPreparation": {"commandLine": ""}}, "properties.jobPreparation.commandLine must not be empty"),
        (
            {"horovodSettings": None},
            "properties has an empty horovodSettings; write 'horovodSettings: {}' for a block without settings",
        ),
        (
            {"horovodSettings": {}, "customMpiSettings": {}},
            "properties has horovodSettings and customMpiSettings; a job has one framework block",
        ),
        (
            {"caffeSettings": {"configFilePath": "a", "pythonScriptFilePath": "b"}},
            "properties.caffeSettings has both configFilePath and pythonScriptFilePath; keep one",
        ),
        (
            {"cntkSettings": {"languageType": "python", "configFilePath": "a"}},
            "properties.cntkSettings has a configFilePath, which languageType 'Python' doesn't read",
        ),
        (
            {"cntkSettings": {"languageType": "BrainScript", "pythonScriptFilePath": "a"}},
            "properties.cntkSettings has a pythonScriptFilePath, which languageType 'BrainScript' doesn't read",
        ),
        (
            {"secrets": [{"name": "A"}]},
            "properties.secrets[0] must have either value or valueSecretReference",
        ),
        (
            {"secrets": [{"name": "A", "value": "x"}], "environmentVariables": [{"name": "A", "value": "y"}]},
            "properties gives the environment variable or secret 'A' twice",
        ),
        (
            {"inputDirectories": [{"id": "A", "path": "p"}, {"id": "A", "path": "q"}]},
            "properties gives the inputDirectories id 'A' twice",
        ),
        (
            {"outputDirectories": [{"id": "stdouterr", "pathPrefix": "p"}]},
            "properties.outputDirectories[0].id is 'stdouterr', the id of the job's own log directory; choose another",
        ),
        (
            {"inputDirectories": [{"id": "A-B", "path": "p"}]},
            "properties.inputDirectories[0].id is 'A-B', but must have only letters, digits and '_', as it becomes a variable",
        ),
        (
            {"mountVolumes": {"unmanagedFileSystems": [{"mountCommand": "m", "relativeMountPath": "../x"}]}},
            "properties.mountVolumes.unmanagedFileSystems[0].relativeMountPath is "
            "'../x', but must be a relative "
            "path that stays below its root",
        ),
        (
            {"mountVolumes": {"unmanagedFileSystems": [{"mountCommand": "m", "relativeMountPath": "x"}] * 2}},
            "properties.mountVolumes gives the relativeMountPath 'x' twice",
        ),
        (
            {"containerSettings": {"imageSourceRegistry": {"image": "i"}, "shmSize": "lots"}},
            "properties.containerSettings.shmSize is 'lots', but must be a size as Docker writes it, such as '16gb'",
        ),
        (
            {"constraints": {"maxWallClockTime": "P0D"}},
            "properties.constraints.maxWallClockTime is 'P0D', but must be longer than zero",
        ),
        (
            {"constraints": {"maxWallClockTime": 7200}},
            "properties.constraints.maxWallClockTime must be a duration; write it as "
            "ISO 8601 ('PT2H', 'P7D') or as "
            "'d.hh:mm:ss' ('0.02:00:00'), in quotes",
        ),
    ],
)
def test_refusals_are_one_sentence_with_the_path(properties: dict[str, Any], message: str) -> None:
    assert refusal(job(**properties)) == f"job.json: {message}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "properties is missing"),
        ([], "must be a mapping, not a list"),
        ({"properties": []}, "properties must be a mapping, not a list"),
        ({"propertys": {}}, "propertys is not a known key; did you mean properties?"),
        ({"properties": {}, 3: 4}, "3 is a key that is not text; put it in quotes"),
    ],
)
def test_refusals_at_the_top(data: object, message: str) -> None:
    assert refusal(data) == f"job.json: {message}"


def test_a_flat_document_is_refused_since_batch_ai_ignored_all_of_it() -> None:
    assert refusal(job()["properties"]) == ("job.json: the job's keys must stand under 'properties': {\"properties\": {...}}")


def test_several_faults_take_a_line_each_and_at_most_ten() -> None:
    lines = refusal(job(nodeCount="x", horovodSettings={"processCount": "y", "foo": 1})).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("job.json: properties.") for line in lines)
    many = refusal(job(environmentVariables=[{}] * 8)).splitlines()
    assert len(many) == 11
    assert many[-1] == "job.json: and 6 more"


def test_two_outputs_in_one_folder_are_pointed_out() -> None:
    data = job(
        outputDirectories=[
            {"id": "A", "pathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/logs"},
            {"id": "B", "pathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/logs/"},
            {"id": "C", "pathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/logs", "pathSuffix": "c"},
        ]
    )
    assert parse_job(data, "job.json")[1] == [
        "job.json: outputDirectories A and B are the same folder; give them different values of pathSuffix"
    ]


def test_python_code_uses_snake_case() -> None:
    constraints = JobConstraints(max_wall_clock_time=timedelta(hours=30))
    properties = JobProperties(node_count=1, horovod_settings=HorovodSettings(), constraints=constraints)
    assert properties.framework == ("horovodSettings", HorovodSettings())
    assert masked(JobDocument(properties=properties)) == {
        "properties": {
            "nodeCount": 1,
            "horovodSettings": {},
            "constraints": {"maxWallClockTime": "P1DT6H"},
        }
    }
