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


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("$AZ_BATCHAI_MOUNT_ROOT/share", (0, "")),
        ("${AZ_BATCHAI_MOUNT_ROOT}/share/", (0, "")),
        ("$AZ_BATCHAI_MOUNT_ROOT/share/logs/a b", (0, "logs/a b")),
        ("$AZ_BATCHAI_JOB_MOUNT_ROOT/share/x", (3, "x")),
        ("$AZ_BATCHAI_JOB_MOUNT_ROOT/data/x", (1, "x")),
        ("$AZ_BATCHAI_JOB_MOUNT_ROOT/data/inner/x", (2, "x")),
        ("$AZ_BATCHAI_JOB_MOUNT_ROOT/data/innermost", (1, "innermost")),
        ("$AZ_BATCHAI_MOUNT_ROOT/share/..x/y..", (0, "..x/y..")),
    ],
)
def test_located(text, place):
    assert locate(text, PREFIXES, "here") == place


@pytest.mark.parametrize(
    "text",
    [
        "/mnt/share",
        "share/x",
        "$AZ_BATCHAI_MOUNT_ROOT",
        "$AZ_BATCHAI_MOUNT_ROOT/shared",
        "$AZ_BATCHAI_MOUNT_ROOT/data",
        "$AZ_BATCHAI_JOB_TEMP/x",
        "$AZ_BATCHAI_MOUNT_ROOTS/share",
        "",
    ],
)
def test_elsewhere_is_refused_with_the_mounts(text):
    with pytest.raises(DocumentError) as error:
        locate(text, PREFIXES, "job.json: properties.stdOutErrPathPrefix")
    assert str(error.value).startswith(f"job.json: properties.stdOutErrPathPrefix is '{text}', which lies on no mounted volume")
    assert "$AZ_BATCHAI_MOUNT_ROOT/share, $AZ_BATCHAI_JOB_MOUNT_ROOT/data" in str(error.value)
    assert "\0" not in str(error.value)


@pytest.mark.parametrize("inside", ["..", "../x", "a/../../x", "a/.."])
def test_up_and_out_is_refused(inside):
    with pytest.raises(DocumentError, match="would lead out of the mount"):
        locate(f"$AZ_BATCHAI_MOUNT_ROOT/share/{inside}", PREFIXES, "here")


def test_output_places():
    directories = (
        OutputDirectory("MODEL", "$AZ_BATCHAI_MOUNT_ROOT/share/runs/", "/models/"),
        OutputDirectory("ALL", "$AZ_BATCHAI_JOB_MOUNT_ROOT/data"),
    )
    plan = bare_plan(volumes=tuple(VOLUMES), segment="workspaces/w/jobs/j/id", output_directories=directories)
    models = "runs/workspaces/w/jobs/j/id/outputs/models"
    assert output_places(plan) == [
        {"id": "MODEL", "share": "file:///control", "path": models, "rclone": False},
        {"id": "ALL", "share": "file:///data", "path": "workspaces/w/jobs/j/id/outputs", "rclone": False},
    ]
