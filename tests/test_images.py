"""From containerSettings and docker_env to the plan's container: what is taken, what is refused, and no secret in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent.plan import Container
from mlflow_batchai.documents.batchai import parse_batchai
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.documents.mlproject import MLProject, load_project
from mlflow_batchai.errors import BatchAIError, DocumentError, NotSupportedError, ProjectError
from mlflow_batchai.plan.images import choose_container, copied_variables

RUN, IGNORE, APPTAINER = (ClusterDocument(containers=how) for how in ("run", "ignore", "apptainer"))


@pytest.fixture
def project(tmp_path: Path) -> Any:
    """A project with this ``docker_env``."""

    def make(docker_env: str = "") -> MLProject:
        text = f"docker_env: {docker_env}\n" if docker_env else ""
        (tmp_path / "MLproject").write_text(text + "entry_points: {main: {command: ls}}\n")
        return load_project(tmp_path)

    return make


def properties(registry: dict[str, Any] | None = None, **settings: Any) -> Any:
    given = {"containerSettings": {"imageSourceRegistry": registry, **settings}} if registry else {}
    return parse_batchai({"properties": given}, "job.json")[0].properties


def test_a_job_without_a_container(project: Any) -> None:
    assert choose_container(project(), properties(), RUN, "job.json") == (None, None, [])
    assert copied_variables(project(), RUN) == {}


@pytest.mark.parametrize(
    ("registry", "image", "server"),
    [
        ({"image": "tensorflow/tensorflow:1.8.0-gpu"}, "tensorflow/tensorflow:1.8.0-gpu", None),
        ({"serverUrl": "https://reg.azurecr.io/", "image": "reg.azurecr.io/a/b:1"}, "reg.azurecr.io/a/b:1", "reg.azurecr.io"),
        ({"serverUrl": "reg.azurecr.io", "image": "reg.azurecr.io/a"}, "reg.azurecr.io/a", "reg.azurecr.io"),
        ({"serverUrl": "http://10.0.0.4:5000", "image": "10.0.0.4:5000/a"}, "10.0.0.4:5000/a", "10.0.0.4:5000"),
        ({"serverUrl": "https://index.docker.io/v1/", "image": "team/a"}, "team/a", None),
        ({"image": "reg.azurecr.io/a/b"}, "reg.azurecr.io/a/b", "reg.azurecr.io"),
    ],
)
def test_images_of_registries(project: Any, registry: dict[str, Any], image: str, server: str | None) -> None:
    found, login, notices = choose_container(project(), properties(registry), RUN, "job.json")
    assert found == Container(image, server)
    assert (login, notices) == (None, [])


def test_credentials_are_not_in_the_plan(project: Any) -> None:
    credentials = {"username": "ada", "password": "p4ssword"}
    given = properties({"image": "reg.io/a", "serverUrl": "https://reg.io", "credentials": credentials}, shmSize="16gb")
    found, login, _ = choose_container(project(), given, RUN, "job.json")
    assert found == Container("reg.io/a", "reg.io", "16gb", credentials=True)
    assert login == credentials


def test_docker_env(project: Any) -> None:
    made = project("{image: team/a, volumes: ['/data:/data:ro'], environment: [[CONSTANT, 1], COPIED]}")
    found, login, notices = choose_container(made, properties(), RUN, "job.json")
    assert found == Container("team/a", volumes=("/data:/data:ro",), environment={"CONSTANT": "1"})
    assert (login, notices) == (None, [])
    assert copied_variables(made, RUN, {"COPIED": "s3cret", "OTHER": "x"}) == {"COPIED": "s3cret"}
    with pytest.raises(ProjectError, match="COPIED"):
        copied_variables(made, RUN, {})


@pytest.mark.parametrize("image", ["team/a", "/images/train 1.sif"])
def test_by_apptainer(project: Any, image: str) -> None:
    """A file of the nodes is an image for it alone."""
    expected = Container(image, engine="apptainer")
    assert choose_container(project(), properties({"image": image}), APPTAINER, "job.json") == (expected, None, [])
    assert choose_container(project(f"{{image: '{image}'}}"), properties(), APPTAINER, "job.json") == (expected, None, [])


def test_ignored(project: Any) -> None:
    made = project("{image: team/a, environment: [COPIED]}")
    found, login, notices = choose_container(made, properties(), IGNORE, "job.json")
    assert (found, login) == (None, None)
    assert len(notices) == 1 and "containers: ignore" in notices[0] and "team/a" in notices[0]
    assert copied_variables(made, IGNORE, {}) == {}


@pytest.mark.parametrize(
    ("docker_env", "registry", "kind", "message"),
    [
        ("{image: a}", {"image": "b"}, DocumentError, "both name a container; keep one"),
        ("", {"image": "a", "serverUrl": "https://reg.io"}, DocumentError, "write reg.io/a$"),
        ("", {"image": "other.io/a", "serverUrl": "https://reg.io"}, DocumentError, "write reg.io/a$"),
        ("", {"image": "a", "serverUrl": "https://"}, DocumentError, "serverUrl is 'https://'"),
        ("", {"image": "/images/a.sif"}, DocumentError, "which needs containers: apptainer in the cluster document"),
        ("", {"image": "--privileged"}, DocumentError, "image is '--privileged'"),
        ("{image: 'a b'}", None, ProjectError, "docker_env.image is 'a b'"),
        ("{image: a, volumes: ['data:/data']}", None, ProjectError, "volumes has 'data:/data'"),
        (
            "",
            {
                "image": "reg.io/a",
                "credentials": {
                    "username": "u",
                    "passwordSecretReference": {"sourceVault": {"id": "/v"}, "secretUrl": "https://v"},
                },
            },
            NotSupportedError,
            "credentials.passwordSecretReference",
        ),
    ],
)
def test_refused(
    project: Any, docker_env: str, registry: dict[str, Any] | None, kind: type[BatchAIError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        choose_container(project(docker_env), properties(registry), RUN, "job.json")


@pytest.mark.parametrize(
    ("docker_env", "message"),
    [
        ("{volumes: []}", "name an image"),
        ("team/a", "name an image"),
        ("{image: a, volumes: /data}", "docker_env.volumes"),
        ("{image: a, environment: {A: b}}", "docker_env.environment"),
        ("{image: a, environment: [[A]]}", "docker_env.environment"),
        ("{image: a, volume: []}", "unknown key 'volume'"),
    ],
)
def test_a_docker_env_that_is_none(project: Any, docker_env: str, message: str) -> None:
    with pytest.raises(ProjectError, match=message):
        project(docker_env)
