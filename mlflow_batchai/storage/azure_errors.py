"""From what a file service answered, or why it didn't, to one sentence with the remedy: pure functions, no SDK.

Codes: https://learn.microsoft.com/rest/api/storageservices/file-service-error-codes and .../common-rest-api-error-codes.
"""

from __future__ import annotations

import socket
import ssl
from datetime import datetime, timezone
from typing import NamedTuple
from urllib.parse import urlsplit

from mlflow_batchai.agent.azure_errors import FULL, NO_SHARE, NOT_FROM_HERE, NOT_PERMITTED
from mlflow_batchai.errors import ShareError, ShareMissingError, ShareNotFoundError
from mlflow_batchai.storage.credentials import Credential, expiry
from mlflow_batchai.storage.location import AzureLocation

NO_PARENT = "ParentNotFound"
# A request that the service does not know in this form.
NOT_KNOWN = ("UnsupportedHeader", "ContentLengthMustBeZero", "InvalidHeaderValue", "InvalidInput", "RequestBodyTooLarge")
BUSY = ("ServerBusy", "OperationTimedOut", "InternalError", "TooManyRequests")
SHARED_FILE = ("SharingViolation", "FileLockConflict", "DeletePending", "ClientCacheFlushDelay", "CannotDeleteFileOrDirectory")
BAD_NAME = ("InvalidResourceName", "InvalidFileOrDirectoryPathName", "InvalidUri", "RequestUrlFailedToParse", "OutOfRangeInput")
LARGEST_SKEW_SECONDS = 600.0


class Answer(NamedTuple):
    """What the service said.

    Attributes:
        status: the HTTP status.
        code: its error code, or an empty string.
        detail: what it said of a refused signature; may hold text of the request, so it is never shown.
        skew: seconds by which our clock is ahead of the service's; None if it gave no time.
    """

    status: int
    code: str = ""
    detail: str = ""
    skew: float | None = None


def _where(location: AzureLocation, path: str) -> str:
    return f"share {location.url}: '{path}'" if path else f"share {location.url}"


def of_answer(location: AzureLocation, path: str, credential: Credential, answer: Answer) -> ShareError:
    """The error that an answer is."""
    where = _where(location, path)
    code, status = answer.code, answer.status
    if code in NO_SHARE:
        named = f"file share '{location.share}' in the storage account '{location.account}' ({location.root})"
        if code == "ShareNotFound":
            return ShareMissingError(f"there is no {named}; create it, or correct the name")
        return ShareError(f"there is no usable {named}; it is being deleted, or is disabled ({code})")
    if code == NO_PARENT or status == 404:
        return ShareNotFoundError(f"there is no '{path}' on the share {location.url}")
    if code in FULL or status in (413, 507):
        return ShareError(f"{where}: the share is full; delete from it, or raise its quota")
    if status in (401, 403):
        return ShareError(f"{where}: {_refusal(location, credential, answer)}")
    if code in BUSY or status in (429, 500, 503):
        return ShareError(f"{where}: the storage account is too busy ({status} {code}); try again later")
    if code in SHARED_FILE:
        return ShareError(f"{where}: another process holds it open or is deleting it ({code}); try again when that has ended")
    if code in BAD_NAME:
        return ShareError(f"{where}: that can't be a name on an Azure file share ({code}); rename it")
    if code == "ResourceTypeMismatch":
        return ShareError(f"{where}: a file lies where a folder is wanted, or a folder where a file is; remove it")
    return ShareError(f"{where}: the file service answered {status} {code or 'without a code'}; try again later")


def _refusal(location: AzureLocation, credential: Credential, answer: Answer) -> str:
    kind, code = credential.kind, answer.code
    if answer.skew is not None and abs(answer.skew) > LARGEST_SKEW_SECONDS:
        way = "ahead of" if answer.skew > 0 else "behind"
        return f"this machine's clock is {abs(answer.skew) / 60:.0f} minutes {way} the service's; set it right"
    end = expiry(credential.sas) if credential.sas else None
    if end is not None and end <= datetime.now(timezone.utc):
        return f"the SAS of storage account '{location.account}' expired at {end:%Y-%m-%d %H:%M} UTC; make a new one"
    if "not valid in the specified time frame" in answer.detail:
        return f"the SAS of storage account '{location.account}' is not valid now; make a new one"
    if code == "AccountIsDisabled":
        return f"the storage account '{location.account}' is disabled; enable it, or use another one"
    if code == "KeyBasedAuthenticationNotPermitted":
        return f"the storage account '{location.account}' takes no keys; log in (az login) and give no key"
    if code in NOT_PERMITTED:
        if credential.sas:
            return f"the SAS lacks the permission for this ({code}); make one that may read, create, write, delete and list"
        return f"the {kind} has no permission for this ({code}); it needs the role Storage File Data Privileged Contributor"
    if code in NOT_FROM_HERE:
        hint = "; make a SAS that permits it" if credential.sas else ""
        return f"the account refuses this machine or this request ({code}): look at its network rules{hint}"
    return (
        f"storage account '{location.account}' refused the {kind} ({code or answer.status}): it is wrong, was renewed, or is "
        "of another account; give the right one"
    )


def of_network(location: AzureLocation, path: str, error: BaseException) -> ShareError:
    """The error that a request without an answer is. Texts of such errors hold whole addresses, a SAS with them: not shown."""
    address = urlsplit(location.endpoint)
    host, scheme = address.netloc, address.scheme.upper()
    where = _where(location, path)
    causes = list(_causes(error))
    names = {type(cause).__name__ for cause in causes}
    if is_unknown_host(error):
        return ShareError(f"{where}: there is no host {host}; correct the account's name, or look at this machine's network")
    if "ProxyError" in names:
        return ShareError(f"{where}: the proxy that {scheme}_PROXY names can't be used; correct it")
    if any(isinstance(cause, ssl.SSLError) for cause in causes) or "SSLError" in names:
        return ShareError(f"{where}: {host} has no certificate that is trusted here; REQUESTS_CA_BUNDLE names others")
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return ShareError(f"{where}: nothing answers at {host}; look whether the address is right")
    if any("Timeout" in name for name in names):
        port = address.port or {"HTTP": 80}.get(scheme, 443)
        return ShareError(f"{where}: {host} does not answer in time; look at this machine's network ({scheme}, port {port})")
    return ShareError(f"{where}: the connection to {host} was cut again and again; try again later")


def is_unknown_host(error: BaseException) -> bool:
    """Whether a name could not be resolved: no retry makes that better soon."""
    return any(isinstance(cause, socket.gaierror) or type(cause).__name__ == "NameResolutionError" for cause in _causes(error))


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
