"""Environment variables, secrets and references to Azure resources, as jobs and clusters write them."""

from __future__ import annotations

from typing import Annotated

from pydantic import model_validator

from mlflow_batchai.documents.base import (
    NonEmpty,
    SecretText,
    SpecModel,
    Text,
    exactly_one,
    matching,
    refuse_repeats,
)

VariableName = Annotated[str, matching(r"[^=\s\0]+", "be a variable's name, without spaces or '='")]


class ResourceId(SpecModel):
    """A reference to an Azure resource by its ARM id."""

    id: NonEmpty

    @property
    def name(self) -> str:
        """The last segment of the id: the resource's own name."""
        return self.id.rstrip("/").rsplit("/", 1)[-1]


class SecretReference(SpecModel):
    """A secret in an Azure Key Vault."""

    source_vault: ResourceId
    secret_url: NonEmpty


class EnvironmentVariable(SpecModel):
    """A variable for the job and its preparation; a bare number as value is taken as its text."""

    name: VariableName
    value: Text


class Secret(SpecModel):
    """A variable whose value is never stored or shown: given here, or by a Key Vault reference."""

    name: VariableName
    value: SecretText | None = None
    value_secret_reference: SecretReference | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Secret:
        exactly_one(self, "value", "value_secret_reference")
        return self


def check_names(variables: tuple[EnvironmentVariable, ...], secrets: tuple[Secret, ...]) -> None:
    """Raise if two variables or secrets share a name: which one would win was never documented."""
    names = [variable.name for variable in variables] + [secret.name for secret in secrets]
    refuse_repeats(names, "environment variable or secret")
