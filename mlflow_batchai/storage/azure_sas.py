"""Shared access signatures: by an account's key without a request, by a login with one.

Raises ImportError where the SDK isn't installed: import it where it is used.
"""

from __future__ import annotations

import functools
from datetime import datetime, timedelta, timezone
from typing import Any

from azure.storage.fileshare import generate_file_sas, generate_share_sas

from mlflow_batchai.storage.azure_answers import translated
from mlflow_batchai.storage.azure_client import service_client
from mlflow_batchai.storage.credentials import NODE_PERMISSIONS, Credential
from mlflow_batchai.storage.location import AzureLocation

LONGEST_DELEGATION = timedelta(days=7)
# Clocks differ.
EARLIER = timedelta(minutes=15)


def share_sas(location: AzureLocation, key: str | None, seconds: float) -> str:
    """A SAS of one share that may do what agents need; with no key by the login, for a week at most.

    Raises:
        ShareError: it can't be made.
    """
    with translated(location, Credential(key), ""):
        return generate_share_sas(location.account, location.share, **_signed(location, key, NODE_PERMISSIONS, seconds))


def file_sas(location: AzureLocation, key: str | None, seconds: float) -> str:
    """A SAS that reads the one file which the location's folder names; with no key by the login, for a week at most.

    Raises:
        ShareError: it can't be made.
    """
    path = location.folder.split("/")
    with translated(location, Credential(key), location.folder):
        return generate_file_sas(location.account, location.share, path, **_signed(location, key, "r", seconds))


def _signed(location: AzureLocation, key: str | None, permission: str, seconds: float) -> dict[str, Any]:
    # Whole minutes: a login asks once for all that is signed in one of them.
    now = datetime.now(timezone.utc).replace(second=0, microsecond=0)
    starts, ends = now - EARLIER, now + timedelta(seconds=seconds + 60)
    fields: dict[str, Any] = {"permission": permission, "start": starts, "expiry": ends}
    if location.endpoint.startswith("https:"):
        fields["protocol"] = "https"
    if key:
        return {**fields, "account_key": key}
    ends = min(ends, now + LONGEST_DELEGATION - timedelta(minutes=1))
    delegation = _delegation(location._replace(share="", folder=""), starts, ends)
    return {**fields, "expiry": ends, "user_delegation_key": delegation}


@functools.lru_cache(maxsize=16)
def _delegation(location: AzureLocation, starts: datetime, ends: datetime) -> Any:
    return service_client(location, Credential()).get_user_delegation_key(start=starts, expiry=ends)
