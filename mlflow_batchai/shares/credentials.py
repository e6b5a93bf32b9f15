"""What opens a storage account: from documents, from the environment, or (if there is neither) who the user is to Azure."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from urllib.parse import parse_qs, urlsplit

from mlflow_batchai.errors import ShareError
from mlflow_batchai.shares.location import AzureLocation

# How a process passes on what it read in documents to one that it starts: never in an argument.
VARIABLE = "BATCHAI_STORAGE_CREDENTIALS"
NODE_PERMISSIONS = "rcwdl"
PERMISSION_NAMES = {"r": "read", "c": "create", "w": "write", "d": "delete", "l": "list"}


@dataclass(frozen=True)
class Credential:
    """What opens a storage account. With neither, it is opened by ``azure-identity`` (a login, a managed identity).

    Attributes:
        key: the account's key, base64 text.
        sas: a shared access signature, without a "?" before it.
    """

    key: str | None = field(default=None, repr=False)
    sas: str | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """How a sentence calls it."""
        return "account key" if self.key else "SAS" if self.sas else "login"


_remembered: dict[str, Credential] = {}


def remember(account: str, credential: Credential) -> None:
    """Use this for an account from now on, in this process and those that get ``exported``.

    Raises:
        ShareError: the key is no key, or the SAS no SAS.
    """
    _remembered[account.lower()] = _checked(account, credential)


def find(account: str) -> Credential:
    """What opens an account. The first that names it: what was remembered, what our parent process exported,
    AZURE_BATCHAI_STORAGE_ACCOUNT with _KEY, then as the `az` command has it AZURE_STORAGE_CONNECTION_STRING, and
    AZURE_STORAGE_ACCOUNT with _KEY or _SAS_TOKEN. An empty one if none does.

    Raises:
        ShareError: what was found is no key or no SAS; the sentence says where it stands.
    """
    account = account.lower()
    if account in _remembered:
        return _remembered[account]
    for source, found in (
        (VARIABLE, _exported_to_us(account)),
        ("AZURE_BATCHAI_STORAGE_KEY", _pair(account, "AZURE_BATCHAI_STORAGE")),
        ("AZURE_STORAGE_CONNECTION_STRING", _connection_string(account)),
        ("AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN", _pair(account, "AZURE_STORAGE")),
    ):
        if found:
            return _checked(account, found, f" ({source})")
    return Credential()


def exported() -> dict[str, str]:
    """Environment variables for a process that is to have what was remembered here; empty if nothing was."""
    known = {account: (found.key, found.sas) for account, found in (_inherited() | _remembered).items()}
    return {VARIABLE: json.dumps(known)} if known else {}


def for_nodes(location: AzureLocation, seconds: float) -> dict[str, str]:
    """What agents open the share with, as ``{"sas": text}``.

    From a key, a new SAS of this share for as long as the job may take; from a login a user delegation SAS, which lasts a week
    at most; a SAS of the user's is passed on.

    Args:
        seconds: for how long.

    Raises:
        ShareError: the user's SAS has expired or lacks a permission, or no SAS can be made.
    """
    found = find(location.account)
    if found.sas:
        check_sas(found.sas, location)
        return {"sas": found.sas}
    from mlflow_batchai.shares.azure_sdk import make_sas

    return {"sas": make_sas(location, found.key, seconds)}


def check_sas(sas: str, location: AzureLocation) -> None:
    """Raise ShareError if a SAS says itself that it has expired, or that it can't do what a job needs."""
    fields = {name: values[0] for name, values in parse_qs(sas).items()}
    where = f"the SAS of storage account '{location.account}'"
    if (end := expiry(sas)) is not None and end <= datetime.now(timezone.utc):
        raise ShareError(f"{where} expired at {fields['se']}; make a new one")
    # A SAS with a stored policy (si) has its permissions and its times there.
    missing = [PERMISSION_NAMES[letter] for letter in NODE_PERMISSIONS if letter not in fields.get("sp", NODE_PERMISSIONS)]
    if missing:
        raise ShareError(f"{where} does not permit to {', '.join(missing)} on {location.root}; make one that does")
    if "f" not in fields.get("ss", "f") or "o" not in fields.get("srt", "o"):
        raise ShareError(f"{where} is not for files (it needs ss=f and srt=sco); make one that is")


def expiry(sas: str) -> datetime | None:
    """When a SAS ends by what it says itself; None if it doesn't."""
    text = parse_qs(sas).get("se", [""])[0]
    try:
        end = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return end if end.tzinfo else end.replace(tzinfo=timezone.utc)


def _checked(account: str, found: Credential, source: str = "") -> Credential:
    """The same, tidied."""
    key = (found.key or "").strip() or None
    sas = (found.sas or "").strip().lstrip("?") or None
    if key:
        try:
            base64.b64decode(key, validate=True)
        except (binascii.Error, ValueError):
            raise ShareError(f"the key of storage account '{account}'{source} is not base64 text; copy it again") from None
    if sas and "sig" not in parse_qs(sas):
        raise ShareError(f"the SAS of storage account '{account}'{source} has no signature (sig=); copy all of it")
    return Credential(key, None if key else sas)


def _inherited() -> dict[str, Credential]:
    try:
        return {account: Credential(*pair) for account, pair in json.loads(os.environ.get(VARIABLE) or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        raise ShareError(f"the environment variable {VARIABLE} can't be read; it is set by mlflow-batchai itself") from None


def _exported_to_us(account: str) -> Credential | None:
    return _inherited().get(account)


def _pair(account: str, prefix: str) -> Credential | None:
    if os.environ.get(f"{prefix}_ACCOUNT", "").lower() != account:
        return None
    key, sas = os.environ.get(f"{prefix}_KEY"), os.environ.get(f"{prefix}_SAS_TOKEN")
    return Credential(key, sas) if key or sas else None


def _connection_string(account: str) -> Credential | None:
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    fields = {name.strip().lower(): value.strip() for name, _, value in (part.partition("=") for part in text.split(";"))}
    if _account_of(fields) != account:
        return None
    key, sas = fields.get("accountkey"), fields.get("sharedaccesssignature")
    return Credential(key, sas) if key or sas else None


def _account_of(fields: Mapping[str, str]) -> str:
    """A connection string with a SAS may name its account by the endpoint only."""
    if "accountname" in fields:
        return fields["accountname"].lower()
    return (urlsplit(fields.get("fileendpoint", "")).hostname or "").partition(".")[0]
