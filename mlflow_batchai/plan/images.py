"""Plan the container of a job, from ``containerSettings`` or MLproject's ``docker_env``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mlflow_batchai.agent.containers.engines import APPTAINER, registry
from mlflow_batchai.agent.plan import Container
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.documents.job import ContainerSettings, JobProperties, RegistryCredentials
from mlflow_batchai.documents.mlproject import MLProject
from mlflow_batchai.errors import DocumentError, NotSupportedError, ProjectError

# As Docker's reference grammar has it, near enough: it keeps options, spaces and shell text out of a command.
_IMAGE = re.compile(r"[A-Za-z0-9][\w.-]*(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@[\w+.-]+:[0-9a-fA-F]+)?")
# A .sif file, or a folder with an image's files.
_FILE = re.compile(r"/[^\0\n]*")
_HUB = frozenset(("docker.io", "index.docker.io", "hub.docker.com", "registry-1.docker.io", "registry.hub.docker.com"))

# The plan's ``container``, the registry's ``username`` and ``password``, sentences to print.
Chosen = tuple[Container | None, dict[str, str] | None, list[str]]


def choose_container(project: MLProject | None, properties: JobProperties, document: ClusterDocument, source: str) -> Chosen:
    """The container that a job asks for, unless its cluster's document says ``containers: ignore``.

    Args:
        project: None for a document that stands alone.

    Returns:
        The plan's container, None where the job runs on the bare nodes; ``username`` and ``password`` of the image's registry,
        or None, which are never in the plan; sentences to print.

    Raises:
        DocumentError, ProjectError: two containers are asked for, or one that can't be.
        NotSupportedError: the registry's password is in Azure Key Vault.
    """
    settings, docker_env = properties.container_settings, project.docker_env if project else None
    if settings and project and docker_env:
        raise DocumentError(
            f"{source}: properties.containerSettings and docker_env in {project.source} both name a container; keep one"
        )
    if not settings and not docker_env:
        return None, None, []
    if _ignored(document):
        image = settings.image_source_registry.image if settings else (docker_env or {})["image"]
        notice = (
            f"notice: the cluster document says containers: ignore, so the job runs on the bare nodes, without the image"
            f" {image} and what its container was to mount and set"
        )
        return None, None, [notice]
    if settings:
        container, login = _of_settings(settings, document, f"{source}: properties.containerSettings")
        return container, login, []
    assert project and docker_env
    return _of_project(docker_env, document, f"{project.source}: docker_env"), None, []


def copied_variables(
    project: MLProject, document: ClusterDocument, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables that ``docker_env.environment`` copies from the submitter: treated as secret, never in the plan.

    Raises:
        ProjectError: one of them is not set here (as MLflow has it).
    """
    found: dict[str, str] = {}
    if not project.docker_env or _ignored(document):
        return found
    for name in project.docker_env.get("environment") or ():
        if not isinstance(name, str):
            continue
        if name not in environment:
            raise ProjectError(
                f"{project.source}: docker_env.environment copies {name} from here, and it is not set; set it, or give it a"
                f" value: [{name}, value]"
            )
        found[name] = environment[name]
    return found


def _ignored(document: ClusterDocument) -> bool:
    return document.containers == "ignore"


def _engine(document: ClusterDocument) -> str:
    return APPTAINER if document.containers == APPTAINER else ""


def _of_settings(settings: ContainerSettings, document: ClusterDocument, where: str) -> tuple[Container, dict[str, str] | None]:
    source = settings.image_source_registry
    where = f"{where}.imageSourceRegistry"
    server = _server(source.server_url, f"{where}.serverUrl")
    image = _checked(source.image, document, f"{where}.image")
    own = _host(image)
    if server and own != server:
        raise DocumentError(
            f"{where}.image is '{image}', but with serverUrl it must be fully qualified: write {server}/{_path(image)}"
        )
    login = _login(source.credentials, f"{where}.credentials")
    return Container(image, own, settings.shm_size, login is not None, engine=_engine(document)), login


def _of_project(docker_env: Mapping[str, Any], document: ClusterDocument, where: str) -> Container:
    image = _checked(docker_env["image"], document, f"{where}.image", ProjectError)
    volumes = tuple(_volume(entry, where) for entry in docker_env.get("volumes") or ())
    pairs = [entry for entry in docker_env.get("environment") or () if not isinstance(entry, str)]
    environment = {name: str(value) for name, value in pairs}
    return Container(image, _host(image), volumes=volumes, environment=environment, engine=_engine(document))


def _checked(
    image: str, document: ClusterDocument, where: str, kind: type[DocumentError | ProjectError] = DocumentError
) -> str:
    if _FILE.fullmatch(image):
        if _engine(document) != APPTAINER:
            raise kind(f"{where} is '{image}', a file of the nodes, which needs containers: apptainer in the cluster document")
        return image
    if not _IMAGE.fullmatch(image):
        raise kind(f"{where} is '{image}', which is no image's name; write it as docker pull takes it, such as user/name:tag")
    return image


def _host(image: str) -> str | None:
    """The registry that an image's name begins with, as Docker reads it, or None for Docker Hub."""
    named = registry(image)
    return named if named and named not in _HUB else None


def _path(image: str) -> str:
    return image.partition("/")[2] if _host(image) else image


def _server(url: str | None, where: str) -> str | None:
    """The host of a registry's address, None for Docker Hub."""
    if not url:
        return None
    host = urlsplit(url if "://" in url else f"https://{url}").netloc
    if not re.fullmatch(r"[\w.-]+(:\d+)?", host):
        raise DocumentError(f"{where} is '{url}', which names no host; write it as https://registry.example.com")
    return None if host in _HUB else host


def _login(credentials: RegistryCredentials | None, where: str) -> dict[str, str] | None:
    if credentials is None:
        return None
    if credentials.password is None:
        raise NotSupportedError(
            f"{where}.passwordSecretReference (Azure Key Vault) is not supported; give the password as {where}.password"
        )
    return {"username": credentials.username, "password": credentials.password.get_secret_value()}


def _volume(text: str, where: str) -> str:
    host, _, rest = text.partition(":")
    target = rest.partition(":")[0]
    if not host.startswith("/") or not target.startswith("/"):
        raise ProjectError(
            f"{where}.volumes has '{text}'; write it as /folder/on/the/node:/folder/in/the/container, with :ro behind it if it"
            " is only read"
        )
    return text
