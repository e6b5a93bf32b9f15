"""Turn errors of an Azure file service into our own: one sentence with the remedy.

Texts of the SDK's errors may hold an address with a SAS: none is shown, and none stays as a cause. Raises ImportError where the
SDK isn't installed: import it where it is used.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import requests
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError, ServiceResponseError

from mlflow_batchai.agent.azure_errors import FULL, NOT_PERMITTED, time_trouble
from mlflow_batchai.errors import ShareError, ShareMissingError, ShareNotFoundError
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.location import AzureLocation

LARGEST_SKEW_SECONDS = 600.0
EXISTS = frozenset(("ResourceAlreadyExists", "ResourceTypeMismatch", "ShareAlreadyExists"))

# https://learn.microsoft.com/rest/api/storageservices/file-service-error-codes and .../common-rest-api-error-codes
_SENTENCES: dict[str | tuple[str, ...], str] = {
    ("ShareBeingDeleted", "ShareDisabled"): "the share is being deleted, or is disabled ({code})",
    FULL: "the share is full; delete from it, or raise its quota",
    ("ServerBusy", "OperationTimedOut", "InternalError", "TooManyRequests"): (
        "the storage account is too busy ({code}); try again later"
    ),
    ("SharingViolation", "FileLockConflict", "DeletePending", "ClientCacheFlushDelay", "CannotDeleteFileOrDirectory"): (
        "another process holds it open or is deleting it ({code}); try again when that has ended"
    ),
    ("InvalidResourceName", "InvalidFileOrDirectoryPathName", "InvalidUri", "RequestUrlFailedToParse", "OutOfRangeInput"): (
        "that can't be a name on an Azure file share ({code}); rename it"
    ),
    "ResourceTypeMismatch": "a file lies where a folder is wanted, or a folder where a file is; remove it",
    "AccountIsDisabled": "the storage account '{account}' is disabled; enable it, or use another one",
    "KeyBasedAuthenticationNotPermitted": "the storage account '{account}' takes no keys; log in (az login) and give no key",
    NOT_PERMITTED: "the {kind} lacks the permission for this ({code}); {grant}",
    ("AuthorizationFailure", "AuthorizationProtocolMismatch", "AuthorizationSourceIPMismatch"): (
        "the account refuses this machine or this request ({code}): look at its network rules, or at those of the SAS"
    ),
}
BY_CODE = {code: said for codes, said in _SENTENCES.items() for code in ((codes,) if isinstance(codes, str) else codes)}
_REFUSED = (
    "storage account '{account}' refused the {kind} ({code}): it is wrong, was renewed, or of another account; correct it"
)
BY_STATUS = {
    **dict.fromkeys((413, 507), BY_CODE["ShareFull"]),
    **dict.fromkeys((429, 500, 503), BY_CODE["ServerBusy"]),
    **dict.fromkeys((401, 403), _REFUSED),
}


class ThrottledError(ServiceResponseError):
    """Status 429, which the SDK's policy takes as final."""


class ExistsError(ShareError):
    """Something lies there already."""


@contextlib.contextmanager
def translated(location: AzureLocation, credential: Credential, path: str) -> Iterator[None]:
    """Raise what is raised inside as ShareError, ShareNotFoundError, ShareMissingError or ExistsError."""
    try:
        yield
    except (AzureError, requests.RequestException, OSError, ValueError) as error:
        raise _explain(location, credential, path, error) from None


def _explain(location: AzureLocation, credential: Credential, path: str, error: Exception) -> ShareError:
    if isinstance(error, HttpResponseError) and error.response is not None:
        return _of_answer(location, credential, path, error)
    if isinstance(error, ThrottledError):
        return ShareError(f"{_where(location, path)}: {BY_STATUS[429].format(code='status 429')}")
    if isinstance(error, ClientAuthenticationError):  # azure-identity raises it without an answer of the service
        return _no_login(location, credential)
    if isinstance(error, (AzureError, requests.RequestException, OSError)):
        return of_network(location, path, error)
    if credential.kind == "login" and "HTTPS" in str(error):  # over http the SDK sends no token
        return _no_login(location, credential)
    return ShareError(f"{_where(location, path)}: the SDK can't send that ({type(error).__name__})")


def _no_login(location: AzureLocation, credential: Credential) -> ShareError:
    if credential.key:
        return ShareError(f"the key of storage account '{location.account}' can't sign; copy it again")
    return ShareError(
        f"there is no key, SAS or Azure login for the storage account '{location.account}'; give its key in the "
        "document (credentials) or in config.yaml (shares), set AZURE_BATCHAI_STORAGE_ACCOUNT and AZURE_BATCHAI_STORAGE_KEY, "
        "or log in (az login)"
    )


def _of_answer(location: AzureLocation, credential: Credential, path: str, error: HttpResponseError) -> ShareError:
    code, status = code_of(error), error.status_code or 0
    if code == "ShareNotFound":
        named = f"file share '{location.share}' in the storage account '{location.account}' ({location.root})"
        return ShareMissingError(f"there is no {named}; create it, or correct the name")
    sentence = BY_CODE.get(code)
    if code == "ParentNotFound" or (status == 404 and sentence is None):
        return ShareNotFoundError(f"there is no '{path}' on the share {location.url}")
    if status in (401, 403):
        sentence = _of_time(error, credential) or sentence
    sas, role = (
        "make one that may read, create, write, delete and list",
        "it needs the role Storage File Data Privileged Contributor",
    )
    said = (sentence or BY_STATUS.get(status, "the file service answered with {code}; try again later")).format(
        code=code or f"status {status}",
        account=location.account,
        kind=credential.kind,
        grant=sas if credential.sas else role,
    )
    return (ExistsError if status == 409 and code in EXISTS else ShareError)(f"{_where(location, path)}: {said}")


def code_of(error: HttpResponseError) -> str:
    found = getattr(error, "error_code", None) or getattr(error.response, "headers", {}).get("x-ms-error-code")
    return str(getattr(found, "value", found) or "")


def _of_time(error: HttpResponseError, credential: Credential) -> str | None:
    date = getattr(error.response, "headers", {}).get("Date", "")
    with contextlib.suppress(TypeError, ValueError):
        ahead = (datetime.now(timezone.utc) - parsedate_to_datetime(date)).total_seconds()
        if abs(ahead) > LARGEST_SKEW_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            return f"this machine's clock is {abs(ahead) / 60:.0f} minutes {way} the service's; set it right"
    why = time_trouble(credential.sas, date) if credential.sas else ""
    # A SAS by a stored access policy doesn't say its times. This text may hold parts of the request: it is never shown.
    detail = (getattr(error, "additional_info", None) or {}).get("authenticationerrordetail")
    if not why and "not valid in the specified time frame" in str(detail):
        why = "is not valid now"
    return f"the SAS of storage account '{{account}}' {why}; make a new one" if why else None


def of_network(location: AzureLocation, path: str, error: BaseException) -> ShareError:
    """The error that a request without an answer is."""
    address = urlsplit(location.endpoint)
    host, scheme = address.netloc, address.scheme.upper()
    causes = list(_causes(error))
    names = {type(cause).__name__ for cause in causes}
    if names & {"ProxyError", "InvalidProxyURL", "InvalidURL"}:
        said = f"the proxy that {scheme}_PROXY names can't be used; correct it"
    elif is_lasting(error):
        said = f"there is no host {host}; correct the account's name, or look at this machine's network"
    elif any(isinstance(cause, ssl.SSLError) for cause in causes) or "SSLError" in names:
        said = f"{host} has no certificate that is trusted here; REQUESTS_CA_BUNDLE names others"
    elif any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        said = f"nothing answers at {host}; look whether the address is right"
    elif any("Timeout" in name for name in names):
        port = address.port or {"HTTP": 80}.get(scheme, 443)
        said = f"{host} does not answer in time; look at this machine's network ({scheme}, port {port})"
    else:
        said = f"the connection to {host} was cut again and again; try again later"
    return ShareError(f"{_where(location, path)}: {said}")


def _where(location: AzureLocation, path: str) -> str:
    return f"share {location.url}: '{path}'" if path else f"share {location.url}"


def is_lasting(error: BaseException) -> bool:
    """Whether no retry makes it better soon: a name that could not be resolved, or a proxy's address that can't be read."""
    kinds = (socket.gaierror, requests.exceptions.InvalidURL)
    return any(isinstance(cause, kinds) or type(cause).__name__ == "NameResolutionError" for cause in _causes(error))


def _causes(error: BaseException) -> list[BaseException]:
    """An error and all that it was raised from or wraps (requests and urllib3 keep theirs in attributes and arguments)."""
    found: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseException) and one not in found and len(found) < 30:
            found.append(one)
            attributes = (getattr(one, name, None) for name in ("__cause__", "__context__", "inner_exception", "reason"))
            waiting += [*attributes, *one.args]
    return found
