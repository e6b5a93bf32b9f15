"""``config.yaml``: a user's defaults, and storage accounts with their keys.

Apart from `mlflow_batchai.config`, which every command imports, and most without pydantic.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mlflow_batchai.documents.common import NotifySettings
from mlflow_batchai.documents.fields import Endpoint, Name, NonEmpty, SecretText, matching
from mlflow_batchai.documents.model import SpecModel, exactly_one

GroupName = Annotated[str, matching(r"[-\w.]{1,90}", "have 1 to 90 letters, digits, '-', '_' or '.'")]


class Defaults(SpecModel):
    """Defaults of commands for absent options."""

    resource_group: GroupName | None = None
    workspace: Name | None = None
    experiment: NonEmpty | None = None
    cluster: NonEmpty | None = None
    output: Literal["json", "jsonc", "yaml", "table", "tsv", "none"] | None = None


class AccountSettings(SpecModel):
    """Credentials of a storage account, and its place if not in the public cloud (``ACCOUNT`` is the account's name)."""

    account_key: SecretText | None = None
    sas_token: SecretText | None = None
    connection_string: SecretText | None = None
    file_endpoint: Endpoint | None = None

    @model_validator(mode="after")
    def _one_source(self) -> AccountSettings:
        # A key may also come from the environment; then only the address stands here.
        if self.file_endpoint is None or self.model_fields_set & {"account_key", "sas_token", "connection_string"}:
            exactly_one(self, "account_key", "sas_token", "connection_string")
        return self


class SettingsFile(SpecModel):
    """A whole config.yaml; every key is optional.

    ``shares`` maps a storage account to what opens it. ``notify`` counts for jobs whose batchai.yaml has none.
    """

    defaults: Defaults = Defaults()
    shares: dict[NonEmpty, AccountSettings] = Field(default_factory=dict)
    notify: NotifySettings | None = None
