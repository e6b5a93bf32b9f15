"""The SDK's client for one share: its connections, when it asks again, and by whom it is opened.

Raises ImportError where the SDK isn't installed: import it where it is used.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import requests
import requests.adapters
from azure.core.credentials import AzureNamedKeyCredential
from azure.core.exceptions import ClientAuthenticationError, ServiceResponseError
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.fileshare import ExponentialRetry, ShareClient, ShareServiceClient

from mlflow_batchai.errors import ShareError
from mlflow_batchai.storage import azure_errors
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.location import AzureLocation

CONNECTIONS = 32
BLOCK = 1 << 20
CONNECT_SECONDS, READ_SECONDS = 10, 30
# No request is tried again when this has passed since it was first sent.
LONGEST_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 10.0
LOGGERS = ("azure.core", "azure.storage", "azure.identity", "msal")


class ThrottledError(ServiceResponseError):
    """Status 429, which the SDK's policy takes as final."""


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
        if isinstance(error, ClientAuthenticationError) or (error is not None and azure_errors.is_unknown_host(error)):
            return False
        return time.monotonic() < settings["until"] and bool(super().increment(settings, request, response, error))

    def get_backoff_time(self, settings: dict[str, Any]) -> float:
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** settings["count"], LONGEST_PAUSE_SECONDS)
        return float(pause * random.uniform(0.5, 1.5))


def _as_it_is(request: Any) -> Any:
    return request


class _Session(requests.Session):
    """Asks the environment for its proxies once, where requests does so for each request, and never a .netrc file."""

    def __init__(self) -> None:
        super().__init__()
        self.auth = _as_it_is

    @functools.cached_property
    def _environment(self) -> Callable[..., dict[str, Any]]:
        return functools.lru_cache(maxsize=None)(super().merge_environment_settings)

    def merge_environment_settings(self, url: str, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        if proxies:
            return super().merge_environment_settings(url, proxies, stream, verify, cert)
        host = "/".join(url.split("/", 3)[:3])
        return dict(self._environment(host, None, stream, verify, cert))


@functools.lru_cache(maxsize=16)
def share_client(location: AzureLocation, credential: Credential) -> ShareClient:
    """A share's client, with its connections: one for all threads. Raises ShareError, and what the SDK raises."""
    return ShareClient(location.endpoint, location.share, credential=_opens(location, credential), **_settings(credential))


def service_client(location: AzureLocation, credential: Credential) -> ShareServiceClient:
    """The client of a share's account."""
    return ShareServiceClient(location.endpoint, credential=_opens(location, credential), **_settings(credential))


def _opens(location: AzureLocation, credential: Credential) -> Any:
    # The SDK finds the account in the address only for hosts that it knows: so the key goes with its name.
    return AzureNamedKeyCredential(location.account, credential.key) if credential.key else credential.sas or _login()


@functools.lru_cache(maxsize=1)
def _login() -> Any:
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError:
        raise ShareError("azure-identity is not installed: pip install 'mlflow-batchai[azure]'") from None
    return DefaultAzureCredential()


def _settings(credential: Credential) -> dict[str, Any]:
    _hush()
    session = _Session()
    adapter = requests.adapters.HTTPAdapter(pool_connections=1, pool_maxsize=CONNECTIONS)
    for scheme in ("https://", "http://"):
        session.mount(scheme, adapter)
    transport = RequestsTransport(
        session=session, connection_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS, connection_data_block_size=BLOCK
    )
    return {
        "transport": transport,
        "retry_policy": _Retries(retry_total=8, retry_connect=4, retry_read=8, retry_status=8),
        "raw_response_hook": _look_at,
        # What opens an account is not sent on to where an answer points.
        "permit_redirects": False,
        "allow_trailing_dot": True,
        "allow_source_trailing_dot": True,
        # One ranged read is one request.
        "max_single_get_size": 1 << 40,
        **({} if credential.key or credential.sas else {"token_intent": "backup"}),
    }


def _look_at(response: Any) -> None:
    answer = response.http_response
    if answer.status_code == 429 or answer.status_code >= 500:
        # The SDK asks again and leaves the answer to a streamed read where it is, with its connection.
        answer.read()
    if answer.status_code == 429:
        raise ThrottledError("throttled", response=answer)


def _hush() -> None:
    """The SDK warns of what it then raises; whoever wants to see that sets a level of their own."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.CRITICAL)
