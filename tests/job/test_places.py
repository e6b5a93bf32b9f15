"""Where paths of a document lie on shares, as a client works it out."""

from __future__ import annotations

import pytest
from plans import bare_plan

from mlflow_batchai.agent.plan import OutputDirectory, Volume
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.job.places import locate, mount_points, output_places

VOLUMES = [
    Volume("cluster", "share", "link", "file:///control"),
    Volume("job", "data", "link", "file:///data"),
    Volume("job", "data/inner", "link", "file:///inner"),
    Volume("job", "share", "link", "file:///other"),
]
PREFIXES = mount_points(VOLUMES)
CLUSTER, JOB = "$AZ_BATCHAI_MOUNT_ROOT", "$AZ_BATCHAI_JOB_MOUNT_ROOT"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"{CLUSTER}/share", (0, "")),
        ("${AZ_BATCHAI_MOUNT_ROOT}/share/", (0, "")),
        (f"{CLUSTER}/share/logs/a b", (0, "logs/a b")),
        (f"{JOB}/share/x", (3, "x")),
        (f"{JOB}/data/inner/x", (2, "x")),
        (f"{JOB}/data/innermost", (1, "innermost")),
        (f"{CLUSTER}/share/..x/y..", (0, "..x/y..")),
    ],
)
def test_located(text, place):
    assert locate(text, PREFIXES, "here") == place


@pytest.mark.parametrize(
    "text",
    [
        *(
            "/mnt/share",
            "share/x",
            CLUSTER,
            f"{CLUSTER}/shared",
            f"{CLUSTER}/data",
            "$AZ_BATCHAI_JOB_TEMP/x",
            f"{CLUSTER}S/share",
            "",
        ),
        *(f"{CLUSTER}/share/{inside}" for inside in ("..", "../x", "a/../../x", "a/..")),
    ],
)
def test_elsewhere_and_out_is_refused(text):
    with pytest.raises(DocumentError) as error:
        locate(text, PREFIXES, "job.json: properties.stdOutErrPathPrefix")
    assert str(error.value).startswith(f"job.json: properties.stdOutErrPathPrefix is '{text}'") and "\0" not in str(error.value)


def test_output_places():
    directories = (OutputDirectory("MODEL", f"{CLUSTER}/share/runs/", "/models/"), OutputDirectory("ALL", f"{JOB}/data"))
    plan = bare_plan(volumes=tuple(VOLUMES), segment="workspaces/w/jobs/j/id", output_directories=directories)
    models = "runs/workspaces/w/jobs/j/id/outputs/models"
    assert output_places(plan) == [
        {"id": "MODEL", "share": "file:///control", "path": models, "rclone": False},
        {"id": "ALL", "share": "file:///data", "path": "workspaces/w/jobs/j/id/outputs", "rclone": False},
    ]
