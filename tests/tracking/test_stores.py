"""Errors of the tracking store as sentences, and limits of time for its calls."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.tracking import MlflowClient
from relay_world import http_error
from requests import ConnectionError as Unreached

from mlflow_batchai.errors import TrackingError
from mlflow_batchai.tracking import stores


def test_a_refusal_is_no_trouble():
    assert stores.is_refusal(MlflowException("no", error_code=INVALID_PARAMETER_VALUE))
    for error in (MlflowException("503"), ConnectionError("down"), http_error(404), KeyError("x")):
        assert not stores.is_refusal(error)
    assert stores.may_pass(ConnectionError("down")) and not stores.may_pass(KeyError("x"))


def test_a_call_comes_back_in_time_unless_the_user_wants_it_otherwise(monkeypatch):
    """What MLflow itself makes of the environment."""
    from mlflow.environment_variables import (
        MLFLOW_HTTP_REQUEST_MAX_RETRIES,
        MLFLOW_HTTP_REQUEST_TIMEOUT,
        MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER,
    )

    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "MLFLOW_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "3")  # taken back at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(stores.logging.getLogger("urllib3"), "level", 0)
    stores.bound_calls()
    assert MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 0 and not MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER.get()
    assert MLFLOW_HTTP_REQUEST_TIMEOUT.get() == 120
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    stores.bound_calls()
    assert MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 5


@pytest.mark.parametrize("place", ["http://127.0.0.1:9", "http://tracking.invalid"])
def test_a_server_that_nobody_reached_is_one_sentence(monkeypatch, place):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError) as caught, stores.as_tracking_error():
        MlflowClient(place.replace("//", "//user:secret@")).search_experiments()
    # The system's own words for it in brackets.
    said = rf"the tracking server {re.escape(place)} can't be reached \([A-Z][a-z ]+\); MLFLOW_TRACKING_URI says which one is asked"
    assert re.fullmatch(said, str(caught.value))


def test_what_is_no_call_to_the_store_is_not_said_of_it():
    assert stores.away(MlflowException("token expired")) is None
    assert stores.away(Unreached(request=SimpleNamespace(url="https://elsewhere.example"))) is None


@pytest.mark.parametrize("wanted", [None, "7"])
def test_at_a_prompt_a_server_is_tried_shortly_and_afterwards_as_before(monkeypatch, wanted):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # taken back at the end
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    if wanted:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", wanted)
    with pytest.raises(ValueError, match="inside"), stores.tried_shortly():
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == (wanted or stores.RETRIES_AT_A_PROMPT)
        raise ValueError("inside")
    assert os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES") == wanted
