"""From what the SDK raises to our own errors: texts of its errors may hold an address with a SAS, so none is shown or kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

import requests
from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError, ResourceExistsError

from mlflow_batchai.errors import ShareError
from mlflow_batchai.storage import azure_errors
from mlflow_batchai.storage.azure_client import ThrottledError
from mlflow_batchai.storage.azure_errors import Answer
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.location import AzureLocation

EXISTS = ("ResourceAlreadyExists", "ResourceTypeMismatch", "ShareAlreadyExists")


class AnsweredError(ShareError):
    """A ShareError with what the service said."""

    answer = Answer(0)


class ExistsError(ShareError):
    """Something lies there already."""


@contextlib.contextmanager
def translated(location: AzureLocation, credential: Credential, path: str) -> Iterator[None]:
    """Raise what is raised inside as ShareError, ShareNotFoundError, ExistsError or AnsweredError."""
    try:
        yield
    except ResourceExistsError as error:
        if error.status_code == 409 and _code(error) in EXISTS:
            raise ExistsError(str(_answered(location, credential, path, error))) from None
        raise _answered(location, credential, path, error) from None
    except HttpResponseError as error:
        # azure-identity raises one without an answer of the service.
        if error.response is None and isinstance(error, ClientAuthenticationError):
            raise _no_login(location, credential) from None
        if error.response is None:
            raise azure_errors.of_network(location, path, error) from None
        raise _answered(location, credential, path, error) from None
    except ThrottledError:
        raise azure_errors.of_answer(location, path, credential, Answer(429)) from None
    except (AzureError, requests.RequestException, OSError) as error:
        raise azure_errors.of_network(location, path, error) from None
    except ValueError as error:
        if not (credential.key or credential.sas) and "HTTPS" in str(error):
            raise _no_login(location, credential) from None
        raise ShareError(f"share {location.url}: '{path}': the SDK can't send that ({type(error).__name__})") from None


def _no_login(location: AzureLocation, credential: Credential) -> ShareError:
    if credential.key:
        return ShareError(f"the key of storage account '{location.account}' can't sign; copy it again")
    return ShareError(
        f"there is no key, SAS or Azure login for the storage account '{location.account}'; give its key in the "
        "document (credentials) or in config.yaml (shares), set AZURE_BATCHAI_STORAGE_ACCOUNT and AZURE_BATCHAI_STORAGE_KEY, "
        "or log in (az login)"
    )


def _answered(location: AzureLocation, credential: Credential, path: str, error: HttpResponseError) -> ShareError:
    answer = Answer(error.status_code or 0, _code(error), _detail(error), _skew(_headers(error).get("Date")))
    made = azure_errors.of_answer(location, path, credential, answer)
    if type(made) is not ShareError:
        return made
    answered = AnsweredError(str(made))
    answered.answer = answer
    return answered


def _code(error: HttpResponseError) -> str:
    found = getattr(error, "error_code", None) or _headers(error).get("x-ms-error-code")
    return str(getattr(found, "value", found) or "")


def _headers(error: HttpResponseError) -> Any:
    return getattr(error.response, "headers", {})


def _detail(error: HttpResponseError) -> str:
    info: dict[str, Any] = getattr(error, "additional_info", None) or {}
    return str(info.get("authenticationerrordetail", ""))


def _skew(date: str | None) -> float | None:
    try:
        return (datetime.now(timezone.utc) - parsedate_to_datetime(date or "")).total_seconds()
    except (TypeError, ValueError):
        return None
