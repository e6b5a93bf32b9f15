"""Credentials of a storage account, and the addresses to which they may be sent.

It comes from documents, the environment or config.yaml, or (if none does) is who the user is to Azure. It goes to Azure's own
clouds, and to services that this machine's user has named: no others.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
import os
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from mlflow_batchai.agent.azure_errors import moment
from mlflow_batchai.config import home, settings
from mlflow_batchai.errors import DocumentError, ShareError
from mlflow_batchai.storage.location import AzureLocation, account_of, parse

# How a process passes on what it read in documents to one that it starts: never in an argument.
VARIABLE = "BATCHAI_STORAGE_CREDENTIALS"
CONNECTION_VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"
_IN_CONFIG = "config.yaml: shares"
KEY_BYTES = 64
NODE_PERMISSIONS = "rcwdl"
PERMISSION_NAMES = {"r": "read", "c": "create", "w": "write", "d": "delete", "l": "list"}

# The clouds that Microsoft runs (azure.core.AzureClouds has the same), and the zones of its newer accounts:
# https://learn.microsoft.com/azure/storage/common/storage-account-overview#storage-account-endpoints
_CLOUD = re.compile(
    r"https://(?P<account>[a-z0-9-]+)\.(?:(?P<service>file|blob)\.core\.(?:windows\.net|usgovcloudapi\.net|chinacloudapi\.cn)"
    r"|z\d{1,2}\.(?P<zoned>file|blob)\.storage\.azure\.net)(?::443)?",
    re.ASCII,
)


@dataclass(frozen=True)
class Credential:
    """Credential of a storage account. Without key and SAS ``azure-identity`` is used (a login, a managed identity).

    Attributes:
        key: the account's key, base64 text.
        sas: a shared access signature, without a "?" before it.
    """

    key: str | None = field(default=None, repr=False)
    sas: str | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        return "account key" if self.key else "SAS" if self.sas else "login"


class Connection(NamedTuple):
    """Parts of a connection string.

    Attributes:
        account: its name, in small letters.
        endpoint: its file service, without a slash at its end; None: the public cloud's.
    """

    account: str
    credential: Credential
    endpoint: str | None


# By account, and by account/share: clusters whose shares are of one account may each have a SAS of their own.
_remembered: dict[str, Credential] = {}
_named: set[str] = set()


def remember(account: str, credential: Credential, share: str = "") -> None:
    """Use this for an account from now on, in this process and those that get ``exported``.

    Args:
        share: the file share that it is given for; what is remembered for another share of the account leaves it be.

    Raises:
        ShareError: the key is no key, or the SAS no SAS.
    """
    account, checked = account.lower(), _checked(account, credential)
    _remembered.update(dict.fromkeys((account, f"{account}/{share}"), checked) if share else {account: checked})


def find(account: str, share: str = "") -> Credential:
    """Find the credential of an account. The first that names it: what was remembered, here or by the process that ``exported``
    it to us (for this share of it, else for any), AZURE_BATCHAI_STORAGE_ACCOUNT with _KEY, then as the `az` command has it
    AZURE_STORAGE_CONNECTION_STRING, and AZURE_STORAGE_ACCOUNT with _KEY or _SAS_TOKEN, then ``shares`` of config.yaml. An empty
    one if none does.

    Raises:
        ShareError: what was found is no key or no SAS; the sentence says where it stands.
        DocumentError: config.yaml is wrong.
    """
    account = account.lower()
    known = _inherited() | _remembered
    for source, found in (
        (VARIABLE, known.get(f"{account}/{share}") or known.get(account)),
        ("AZURE_BATCHAI_STORAGE_KEY", _pair(account, "AZURE_BATCHAI_STORAGE")),
        (CONNECTION_VARIABLE, _of_connection(account)),
        ("AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN", _pair(account, "AZURE_STORAGE")),
    ):
        if found:
            return _checked(account, found, f" ({source})")
    configured = _configured(account)
    return _checked(account, configured.credential, f" ({_IN_CONFIG})") if configured else Credential()


def at(endpoint: str, account: str, service: str = "file", share: str = "") -> Credential:
    """Credential for the address of an account's service: sent only to Azure and to addresses that the user names.

    Args:
        service: ``file`` or ``blob``.

    Raises:
        ShareError: the account is not known to be there; or as ``find``.
        DocumentError: config.yaml is wrong.
    """
    if not (_is_cloud(endpoint, account, service) or _is_named(endpoint, account, service)):
        host = urlsplit(endpoint).netloc.rpartition("@")[2]
        where = f"{service}Endpoint of the cluster's document"
        if service == "file":
            where += f", or of {account} under shares: in config.yaml"
        raise ShareError(
            f"the storage account '{account}' is not known to be at {host}, so its key, SAS or login is not used there;"
            f" correct the address, or, if it is true, name it as the {where}"
        )
    return find(account, share)


def name_endpoint(endpoint: str) -> None:
    """Let credentials of its account go to a service from now on, in this process: the user has named it.

    Args:
        endpoint: ``ACCOUNT`` in it stands for any account.
    """
    _named.add(endpoint)


def _is_cloud(endpoint: str, account: str, service: str) -> bool:
    match = _CLOUD.fullmatch(endpoint)
    return match is not None and match["account"] == account and service in (match["service"], match["zoned"])


def _is_named(endpoint: str, account: str, service: str) -> bool:
    """Whether the user has named an endpoint for an account: in this process, a cluster document, or what names the account."""
    own = file_endpoint(account) if service == "file" else None
    for template in (own, *_named, *_of_clusters(service)):
        found = (template or "").replace("ACCOUNT", account).rstrip("/")
        if found == endpoint and account_of(found, service) == account:
            return True
    return False


def _of_clusters(service: str) -> list[str]:
    paths = sorted((home() / "clusters").glob("*.yaml"))
    pairs = [_of_cluster(path, path.stat().st_mtime_ns) for path in paths]
    return [found for pair in pairs if (found := pair[service == "blob"])]


@functools.lru_cache(maxsize=128)
def _of_cluster(path: Path, changed: int) -> tuple[str | None, str | None]:
    from mlflow_batchai.documents.cluster import load_cluster

    try:
        document = load_cluster(path)[0]
    except DocumentError:
        # Whoever uses the cluster is told.
        return None, None
    return document.file_endpoint, document.blob_endpoint


def file_endpoint(account: str) -> str | None:
    """Where an account's file service is, as AZURE_STORAGE_CONNECTION_STRING or config.yaml says; None: neither does.

    Raises:
        DocumentError: config.yaml is wrong.
    """
    account = account.lower()
    named = connection(os.environ.get(CONNECTION_VARIABLE, ""))
    if named and named.account == account and named.endpoint:
        return named.endpoint
    configured = _configured(account)
    return configured.endpoint if configured else None


def is_key(text: str) -> bool:
    """Whether a text could be an account's key: base64 of 64 bytes. What stands in documents in its place is none."""
    try:
        return len(base64.b64decode(text.strip(), validate=True)) == KEY_BYTES
    except ValueError:
        return False


def connection(text: str) -> Connection | None:
    """A connection string taken apart; None if it names no storage account."""
    parts = (part.partition("=") for part in text.split(";"))
    fields = {name.strip().lower(): value.strip() for name, _, value in parts}
    endpoint = fields.get("fileendpoint", "").rstrip("/") or None
    account = fields.get("accountname", "").lower()
    if not account and endpoint:
        # One with a SAS may name its account by the endpoint only.
        with contextlib.suppress(ShareError):
            account = parse(f"{endpoint}/share").account
    if not account:
        return None
    if not endpoint and (suffix := fields.get("endpointsuffix")):
        endpoint = f"https://{account}.file.{suffix}"
    return Connection(account, Credential(fields.get("accountkey"), fields.get("sharedaccesssignature")), endpoint)


def exported() -> dict[str, str]:
    """Environment variables for a process that is to have what was remembered here; empty if nothing was."""
    known = {account: (found.key, found.sas) for account, found in (_inherited() | _remembered).items()}
    return {VARIABLE: json.dumps(known)} if known else {}


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
    return moment(parse_qs(sas).get("se", [""])[0])


def _checked(account: str, found: Credential, source: str = "") -> Credential:
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


def _pair(account: str, prefix: str) -> Credential | None:
    if os.environ.get(f"{prefix}_ACCOUNT", "").lower() != account:
        return None
    key, sas = os.environ.get(f"{prefix}_KEY"), os.environ.get(f"{prefix}_SAS_TOKEN")
    return Credential(key, sas) if key or sas else None


def _of_connection(account: str) -> Credential | None:
    named = connection(os.environ.get(CONNECTION_VARIABLE, ""))
    found = named.credential if named and named.account == account else Credential()
    return found if found.key or found.sas else None


def _configured(account: str) -> Connection | None:
    file = settings()
    entry = {name.lower(): entry for name, entry in file.shares.items()}.get(account) if file else None
    if entry is None:
        return None
    endpoint = entry.file_endpoint.replace("ACCOUNT", account).rstrip("/") if entry.file_endpoint else None
    if entry.connection_string:
        named = connection(entry.connection_string.get_secret_value())
        if named is None or named.account != account:
            raise ShareError(f"the connectionString of storage account '{account}' ({_IN_CONFIG}) is not one of it")
        return named._replace(endpoint=endpoint or named.endpoint)
    key, sas = (secret.get_secret_value() if secret else None for secret in (entry.account_key, entry.sas_token))
    return Connection(account, Credential(key, sas), endpoint)
