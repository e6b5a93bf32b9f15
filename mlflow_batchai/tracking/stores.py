"""MLflow's store when it is away: limits of time for calls, and readable errors."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from mlflow_batchai import terminal
from mlflow_batchai.errors import BatchAIError, TrackingError
from mlflow_batchai.tracking import runs
from mlflow_batchai.tracking.runs import Tracking

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Item = TypeVar("Item")

# MLflow's variable: how often a failed call is made again.
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
# MLflow's own are made for who has nothing else to do: 8 tries of 120 s with growing pauses are 18 minutes for one call, and a
# server's Retry-After may say an hour. One try: what must not be done twice (a model's version) is looked for before the next.
# Its time stays: a server that passes a big file on answers when it has done so.
# Threads of many jobs share a process's connections: none waits for another's.
_BOUNDS = {
    RETRIES: "0",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_HTTP_POOL_MAXSIZE": "100",
    "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "100",
}
# For who waits at a prompt: MLflow would try a server that is down for minutes, in silence.
RETRIES_AT_A_PROMPT = "2"
LONGEST_SENTENCE = 500
_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
# What a server, or a proxy before it, says of one file, not of all that come from us.
_OF_A_FILE = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.REQUEST_URI_TOO_LONG,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
# What the system said, in the words of three libraries around it.
_REASON = re.compile(r"\[Errno -?\d+\] ([^'\")\]]+)|(certificate verify failed[^'\"()]*)")


def bound_calls() -> None:
    """Limit each call of MLflow to minutes, for callers that retry by themselves; the user's settings stay.

    Its libraries say nothing of the tries in between: errors say it.
    """
    for name, value in _BOUNDS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "CRITICAL")
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def load(tracking: Tracking) -> None:
    """Import what a process uses of MLflow, before it has several threads that use it.

    MLflow's modules import each other in circles: of threads that import one for the first time at once, some get half of it.
    """
    import mlflow.artifacts
    import mlflow.models
    import mlflow.store.artifact.artifact_repository_registry
    import mlflow.store.tracking.rest_store

    if not tracking.uri.startswith(("http://", "https://", "databricks")):
        with contextlib.suppress(ImportError):  # a small MLflow has no databases
            import mlflow.store.model_registry.sqlalchemy_store
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


@contextlib.contextmanager
def tried_shortly() -> Iterator[None]:
    """Limit retries inside, so that a server that is down is reported within seconds; the user's settings stay.

    The variable is gone afterwards: processes that are started later wait as long as they mean to.
    """
    if RETRIES in os.environ:
        yield
        return
    os.environ[RETRIES] = RETRIES_AT_A_PROMPT
    try:
        yield
    finally:
        os.environ.pop(RETRIES, None)


class _LateClient:
    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking
        self._made: MlflowClient | None = None

    def __getattr__(self, name: str) -> Any:
        self._made = self._made or runs.client(self._tracking)
        return getattr(self._made, name)


def client_when_used(tracking: Tracking) -> MlflowClient:
    """A client that is made at its first use, again and again while that fails: to make one of a database opens it."""
    return cast("MlflowClient", _LateClient(tracking))


def reaches(tracking: Tracking, run_id: str) -> bool:
    """Whether the store, asked from here, says something of a run."""
    try:
        runs.client(tracking).get_run(run_id)
    except Exception:  # MLflow raises whatever its store raises
        return False
    return True


@contextlib.contextmanager
def as_tracking_error() -> Iterator[None]:
    """Turn MLflow's errors into a TrackingError with MLflow's sentence."""
    try:
        yield
    except Exception as error:
        from mlflow.exceptions import MlflowException

        if not isinstance(error, MlflowException):
            raise
        raise TrackingError(away(error) or f"MLflow: {terminal.shown(error.message)}") from error


def away(error: BaseException) -> str | None:
    """The sentence for a server that a call has not reached; None: it is something else that went wrong.

    MLflow repeats what all libraries below it say of that, one in the other.
    """
    from mlflow.exceptions import MlflowException
    from requests import ConnectionError as Unreached
    from requests import Timeout

    below: BaseException | None = error if isinstance(error, MlflowException) else None
    while below is not None and not isinstance(below, (Unreached, Timeout)):
        below = below.__cause__ or below.__context__
    if below is None or below.request is None:
        return None
    address = urlsplit(str(below.request.url))
    found = _REASON.search(str(below))
    why = (found[1] or found[2]).strip() if found else "no answer in time" if isinstance(below, Timeout) else "no answer"
    place = f"{address.scheme}://{address.netloc.rpartition('@')[2]}"
    return f"the tracking server {place} can't be reached ({why}); MLFLOW_TRACKING_URI says which one is asked"


def is_answer(error: BaseException) -> bool:
    """Whether an error is a store's answer, or the lack of one, whichever call it came from."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    return isinstance(error, (MlflowException, RequestException, ConnectionError, TimeoutError))


def may_pass(error: BaseException) -> bool:
    """Whether the same call may be answered later: nobody was there, or the server had a fault or too much to do."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, HTTPError):
        status = HTTPStatus.OK if error.response is None else error.response.status_code
    elif isinstance(error, MlflowException):
        status = error.get_http_status_code()
    else:
        return is_answer(error)
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _PASSING


def refuses_a_file(error: BaseException) -> bool:
    """Whether a store never takes this artifact, for its name or its size: then it must not hold up those behind it."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, MlflowException):
        return bool(error.error_code == "INVALID_PARAMETER_VALUE")
    if isinstance(error, HTTPError):
        return error.response is not None and error.response.status_code in _OF_A_FILE
    # A name of bytes that are no UTF-8 can't be part of an address.
    return isinstance(error, UnicodeError)


def is_refusal(error: BaseException) -> bool:
    """Whether MLflow has understood a call and won't do it, now or later."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and not may_pass(error)


def sentence(error: BaseException) -> str:
    """An error on one line of bearable length: servers answer with whole pages."""
    text = str(error) if isinstance(error, BatchAIError) else f"{type(error).__name__}: {error}"
    text = terminal.printable(" ".join(text.split()))
    return text if len(text) <= LONGEST_SENTENCE else text[:LONGEST_SENTENCE] + " ..."


def log_what_is_taken(
    items: Sequence[Item],
    log: Callable[[Sequence[Item]], object],
    refused: Callable[[Item, str], None],
    gone: Callable[[], bool],
    codes: Collection[str] = ("INVALID_PARAMETER_VALUE",),
) -> None:
    """Store items in one call; one that MLflow will never take is refused, so that it doesn't hold up the others for ever.

    Args:
        refused: takes such an item, and what MLflow says of it.
        gone: whether the run was deleted: MLflow's answer is none to the item then.
        codes: what MLflow says of such an item.
    """
    from mlflow.exceptions import MlflowException

    try:
        log(items)
    except MlflowException as error:
        if error.error_code not in codes or gone():
            raise
        if len(items) == 1:
            refused(items[0], str(error.message))
            return
        for half in (items[: len(items) // 2], items[len(items) // 2 :]):
            log_what_is_taken(half, log, refused, gone, codes)
