"""The SDK's client for a storage account's file service: connections, retries, credentials, SASs.

Raises ImportError where the SDK isn't installed: import it where it is used.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import requests
import requests.adapters
import requests.utils
from azure.core.credentials import AzureNamedKeyCredential
from azure.core.exceptions import ClientAuthenticationError
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.fileshare import ExponentialRetry, ShareServiceClient, generate_file_sas, generate_share_sas

from mlflow_batchai.errors import ShareError
from mlflow_batchai.storage.azure_errors import ThrottledError, is_lasting, translated
from mlflow_batchai.storage.credentials import NODE_PERMISSIONS, Credential
from mlflow_batchai.storage.location import AzureLocation

CONNECTIONS = 32
BLOCK = 1 << 20
CONNECT_SECONDS, READ_SECONDS = 10, 30
# No request is tried again when this has passed since it was first sent.
LONGEST_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 10.0
LOGGERS = ("azure.core", "azure.storage", "azure.identity", "msal")
LONGEST_DELEGATION = timedelta(days=7)
# A SAS is valid from so long ago: clocks differ.
EARLIER = timedelta(minutes=15)


class Again:
    """A ``retry_hook`` that notes that the SDK sent a request once more."""

    def __init__(self) -> None:
        self.happened = False

    def __call__(self, **_: Any) -> None:
        self.happened = True


class _Retries(ExponentialRetry):
    """The SDK's exponential policy, with a first pause of tenths of a second and an end by the clock."""

    def configure_retries(self, request: Any) -> dict[str, Any]:
        return {**super().configure_retries(request), "until": time.monotonic() + LONGEST_SECONDS}

    def increment(self, settings: dict[str, Any], request: Any, response: Any = None, error: Any = None) -> bool:
        if isinstance(error, ClientAuthenticationError) or (error is not None and is_lasting(error)):
            return False
        return time.monotonic() < settings["until"] and bool(super().increment(settings, request, response, error))

    def get_backoff_time(self, settings: dict[str, Any]) -> float:
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** settings["count"], LONGEST_PAUSE_SECONDS)
        return float(pause * random.uniform(0.5, 1.5))


def service_client(location: AzureLocation, credential: Credential) -> ShareServiceClient:
    """The client of a share's account, one for all threads. Raises ShareError, and what the SDK raises."""
    return _service_client(location.endpoint, location.account, credential)


@functools.lru_cache(maxsize=16)
def _service_client(endpoint: str, account: str, credential: Credential) -> ShareServiceClient:
    for name in LOGGERS:
        # The SDK warns of what it then raises; whoever wants to see that sets a level of their own.
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
    session = requests.Session()
    # The environment is asked once for its proxies and certificates, and never a .netrc file.
    session.trust_env = False
    session.proxies = requests.utils.get_environ_proxies(endpoint)
    verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
    adapter = requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=CONNECTIONS)
    for scheme in ("https://", "http://"):
        session.mount(scheme, adapter)
    # The SDK finds the account in the address only for hosts that it knows: so the key goes with its name.
    opens = AzureNamedKeyCredential(account, credential.key) if credential.key else credential.sas or _login()
    return ShareServiceClient(
        endpoint,
        credential=opens,
        transport=RequestsTransport(
            session=session,
            connection_verify=verify,
            connection_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            connection_data_block_size=BLOCK,
        ),
        retry_policy=_Retries(retry_total=8, retry_connect=4, retry_read=8, retry_status=8),
        raw_response_hook=_look_at,
        # What opens an account is not sent on to where an answer points.
        permit_redirects=False,
        allow_trailing_dot=True,
        allow_source_trailing_dot=True,
        # One ranged read is one request.
        max_single_get_size=1 << 40,
        token_intent="backup" if credential.kind == "login" else None,
    )


@functools.lru_cache(maxsize=1)
def _login() -> Any:
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        raise ShareError("azure-identity is not installed: pip install 'mlflow-batchai[azure]'") from None
    return DefaultAzureCredential()


def _look_at(response: Any) -> None:
    answer = response.http_response
    if answer.status_code == 429 or answer.status_code >= 500:
        # The SDK asks again and leaves the answer to a streamed read where it is, with its connection.
        answer.read()
    if answer.status_code == 429:
        raise ThrottledError("throttled", response=answer)


def share_sas(location: AzureLocation, key: str | None, seconds: float) -> str:
    """A SAS of one share that may do what agents need: by the key without a request, else by the login, for a week at most.

    Raises:
        ShareError: it can't be made.
    """
    with translated(location, Credential(key), ""):
        return generate_share_sas(location.account, location.share, **_signed(location, key, NODE_PERMISSIONS, seconds))


def file_sas(location: AzureLocation, key: str | None, seconds: float) -> str:
    """A SAS that reads the one file which the location's folder names; otherwise as ``share_sas``."""
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
