"""containerSettings: the image a job runs in."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from mlflow_batchai.documents.base import NonEmpty, SecretText, SpecModel, exactly_one, matching
from mlflow_batchai.documents.environment import SecretReference


class RegistryCredentials(SpecModel):
    """A user of a private registry, with a password or a Key Vault reference to it."""

    username: NonEmpty
    password: SecretText | None = None
    password_secret_reference: SecretReference | None = None

    @model_validator(mode="after")
    def _one_source(self) -> RegistryCredentials:
        exactly_one(self, "password", "password_secret_reference")
        return self


class ImageSourceRegistry(SpecModel):
    """An image; with a ``server_url`` of its own the image's name must be fully qualified."""

    server_url: NonEmpty | None = None
    image: NonEmpty
    credentials: RegistryCredentials | None = None


class ContainerSettings(SpecModel):
    """The job's container; ``shm_size`` is Docker's form (``16gb``)."""

    image_source_registry: ImageSourceRegistry
    shm_size: Annotated[str, matching(r"\d+(?i:[bkmg]b?)?", "be a size as Docker writes it, such as '16gb'")] | None = None
