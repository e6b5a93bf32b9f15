"""A store that is away, refuses us, or answers late: what the follower sends again, what it leaves, and when it ends."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    INVALID_PARAMETER_VALUE,
    PERMISSION_DENIED,
    RESOURCE_DOES_NOT_EXIST,
    TEMPORARILY_UNAVAILABLE,
)
from mlflow.tracking import MlflowClient
from relay_world import EXPECTED, StoreClient, fill, history
from requests import ConnectionError as Unreached
from requests import HTTPError
from waiting import wait_for

from mlflow_batchai.errors import ShareError, TrackingError
from mlflow_batchai.follower import detached, follower
from mlflow_batchai.job import lease as lease_module
from mlflow_batchai.job.lease import Hold, Lease
from mlflow_batchai.tracking import lastthings, runs, stores
from mlflow_batchai.tracking.trouble import GivenUpError


class Always(Sequence):
    """An error at each call."""

    def __init__(self, make=lambda: ConnectionError("down")):
        self._make = make

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self._make()

    def pop(self, index):
        return self._make()


ALL = ("log_batch", "get_run", "set_tag", "update_run", "set_terminated", "log_artifacts", "log_artifact")


def down(client, make=lambda: ConnectionError("down")):
    for name in ALL:
        client.before[name] = Always(make)


def up(client):
    client.before.clear()


def test_the_state_is_shown_when_the_store_is_back(relayed):
    made, client, relay = relayed
    made.announce(0)
    one = relay()
    for method in ("log_batch", "update_run"):
        client.before[method] = [ConnectionError("down")]
        with pytest.raises(ConnectionError):
            one.show_state(made.job.state())
    one.show_state(made.job.state())
    assert client.get_run(made.plan["runId"]).info.status == "RUNNING"
    client.calls.clear()
    one.show_state(made.job.state())
    assert client.calls == []


def test_a_call_that_comes_after_the_end_does_not_bring_the_run_back(relayed):
    """It hung in the server while another took over, and ended the run."""
    made, client, relay = relayed
    made.announce(0)
    one, run_id = relay(), made.plan["runId"]
    state = made.job.state()
    real = client._real

    class Late:
        def __getattr__(self, name):
            return getattr(real, name)

        def update_run(self, *arguments, **named):
            client._real = real
            made.verdict("failed", errors=[{"code": "JobFailed"}])
            relay().finish(made.job.state())
            real.update_run(*arguments, **named)

    client._real = Late()
    one.show_state(state)
    run = client.get_run(run_id)
    assert (run.info.status, run.info.end_time) == ("FAILED", 1_700_000_000_000)
    assert run.data.tags["batchai.executionState"] == "failed"


def test_each_of_the_last_things_is_sent_once(relayed):
    made, client, relay = relayed
    fill(made)
    made.share.write(made.paths.stdouterr + "/stdout.txt", b"hello\n")
    for name in ("a", "b", "sub/c"):
        made.share.write(f"{made.paths.folder}/outputs/m/{name}", name.encode())
    made.verdict()
    one, state = relay(), made.job.state()
    client.before["log_artifact"] = [None, ConnectionError("down"), None, ConnectionError("down")]  # the log, outputs
    client.before["set_terminated"] = [ConnectionError("down")]
    for _ in range(3):
        with pytest.raises(ConnectionError):
            one.finish(state)
    one.finish(state)
    # The log, the three outputs, and those that failed; the files of the job itself go at once.
    assert client.calls.count("log_artifact") == 6 and client.calls.count("log_artifacts") == 1
    assert client.calls.count("set_terminated") == 2
    run_id = made.plan["runId"]
    assert history(client, run_id) == EXPECTED
    found = [entry.path for folder in ("outputs/M", "outputs/M/sub") for entry in client.list_artifacts(run_id, folder)]
    assert sorted(found) == ["outputs/M/a", "outputs/M/b", "outputs/M/sub", "outputs/M/sub/c"]
    notes = client.get_run(run_id).data.tags["batchai.notes"]
    assert (
        notes
        == "batchai.yaml asks for a model and none was saved in an output directory (a .h5 or .keras file, a SavedModel, an MLflow model)"
    )


def http_error(code):
    return HTTPError(f"{code}", response=SimpleNamespace(status_code=code))


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (http_error(503), True),
        (http_error(429), True),
        (http_error(403), False),
        (TimeoutError("slow"), True),
        (MlflowException("what its server says of a fault"), True),
        (MlflowException("database is locked", error_code=TEMPORARILY_UNAVAILABLE), True),
        (MlflowException("may not", error_code=PERMISSION_DENIED), False),
        (OSError("disk full"), False),
    ],
)
def test_what_a_store_refuses_is_tried_for_a_while_if_that_may_help(relayed, monkeypatch, error, waits):
    """The server answers, but where it keeps artifacts is away, or won't have them: the run ends all the same, and says it."""
    made, client, relay = relayed
    made.share.write(f"{made.paths.folder}/outputs/m/a", b"a")
    made.verdict("failed")
    one, state, now = relay(), made.job.state(), [1000.0]
    monkeypatch.setattr(lastthings.time, "monotonic", lambda: now[0])
    client.before["log_artifacts"] = client.before["log_artifact"] = Always(lambda: error)
    if waits:
        with pytest.raises(type(error)):
            one.finish(state)
        now[0] += 301
    one.finish(state)
    run = client.get_run(made.plan["runId"])
    assert run.info.status == "FAILED"
    assert f"outputs: {type(error).__name__}: {error}" in run.data.tags["batchai.notes"]


def test_a_store_that_answers_nobody_is_waited_for_whatever_the_error(relayed, monkeypatch):
    made, client, relay = relayed
    made.share.write(f"{made.paths.folder}/outputs/m/a", b"a")
    made.verdict("failed")
    one, state = relay(), made.job.state()
    monkeypatch.setattr(lastthings, "AWAY_SECONDS", 0.0)
    denied = MlflowException("token expired", error_code=PERMISSION_DENIED)
    client.before["log_artifacts"] = [denied]
    client.before["get_run"] = [denied]
    with pytest.raises(MlflowException):
        one.finish(state)
    one.finish(state)
    assert "batchai.notes" not in client.get_run(made.plan["runId"]).data.tags


def test_a_run_that_the_store_does_not_know_is_not_a_deleted_one(relayed):
    """A server that came back with another database: results that went nowhere would be taken for relayed, and removed."""
    made, client, relay = relayed
    one = relay()
    unknown = MlflowException("no run", error_code=RESOURCE_DOES_NOT_EXIST)
    assert stores.is_refusal(unknown) and not stores.may_pass(unknown)
    client.before["get_run"] = [unknown]
    assert not one.run_gone()
    client.delete_run(made.plan["runId"])
    assert one.run_gone()


def test_a_refusal_is_no_trouble():
    assert stores.is_refusal(MlflowException("no", error_code=INVALID_PARAMETER_VALUE))
    for error in (MlflowException("503"), ConnectionError("down"), http_error(404), KeyError("x")):
        assert not stores.is_refusal(error)
    assert stores.may_pass(ConnectionError("down")) and not stores.may_pass(KeyError("x"))


# The follower around it.


def test_the_deadline(following, monkeypatch):
    """The lease is let go with the reason, and the next follower has it at once."""
    made, client, follow = following
    monkeypatch.setattr(follower.time, "sleep", _nap)
    made.write(made.paths.plan, {**made.plan, "relaySeconds": 0.2})
    fill(made)
    made.announce(0)
    made.verdict()
    down(client)
    with pytest.raises(GivenUpError) as given_up:
        follow()
    said = (
        r"the tracking server could not be used for \d+ s \(at last: ConnectionError: down\); job toy-0123 ended succeeded; its"
        rf" results are at {re.escape(made.share.url)}/{made.paths.folder} and go .* with: batchai job attach toy-0123"
    )
    assert re.fullmatch(said, str(given_up.value))
    glance = Lease(made.job).glance()
    assert (glance.hold, glance.trouble) == (Hold.FREE, str(given_up.value))
    up(client)
    assert follow().execution_state == "succeeded"
    run = client.get_run(made.plan["runId"])
    assert (run.info.status, run.info.end_time) == ("FINISHED", 1_700_000_000_000)
    assert history(client, made.plan["runId"]) == EXPECTED


def test_a_database_that_cannot_be_opened_is_waited_for_while_the_nodes_are_watched(following, monkeypatch):
    made, client, follow = following
    made.announce(0)
    tries = []

    def opened(tracking):
        tries.append(1)
        if len(tries) < 3:
            raise MlflowException("could not connect to the database")
        return client

    monkeypatch.setattr(runs, "client", opened)
    assert follow().error_code == "NodeLost"
    assert client.get_run(made.plan["runId"]).info.status == "FAILED" and len(tries) == 3


def test_another_one_takes_over_from_a_follower_that_the_store_refuses(following, monkeypatch):
    """Its token has expired. Whoever attaches with a new one goes on at once; the old one leaves, and writes nothing more."""
    made, client, follow = following
    monkeypatch.setattr(follower, "TELL_TROUBLE_SECONDS", 0.1)
    monkeypatch.setattr(lease_module, "PACE", (0.05, 20.0, 0.05))
    monkeypatch.setattr(follower.time, "sleep", _nap)
    fill(made)
    made.announce(0)
    made.verdict()
    old, mine = StoreClient(client._real), threading.local()
    down(old, lambda: MlflowException("401", error_code=PERMISSION_DENIED))
    monkeypatch.setattr(runs, "client", lambda tracking: getattr(mine, "client", client))
    ended = []

    def refused():
        mine.client = old
        ended.append(follow())

    first = threading.Thread(target=refused)
    first.start()
    glance = wait_for(lambda: (seen := Lease(made.job).glance()).trouble and seen)
    assert glance.hold is Hold.HELD and "401" in glance.trouble and glance.who.startswith("process ")
    # One that the store refuses, too, leaves it alone.
    mine.client = old
    assert follow() is None and not ended
    mine.client = client
    assert follow().execution_state == "succeeded"
    first.join(60)
    assert ended == [None] and Lease(made.job).glance().number == 2
    assert client.get_run(made.plan["runId"]).info.status == "FINISHED"
    assert history(client, made.plan["runId"]) == EXPECTED


def test_a_share_that_is_away_has_the_same_deadline(following, monkeypatch):
    made, _, follow = following
    made.write(made.paths.plan, {**made.plan, "relaySeconds": 0.2})
    monkeypatch.setattr(follower.time, "sleep", _nap)
    made.announce(0)

    def away(*arguments, **named):
        raise ShareError("there is no host x")

    monkeypatch.setattr(follower.Job, "state", away)
    with pytest.raises(
        GivenUpError, match=r"its share could not be used for .* no host x\); job toy-0123 goes on, as far as is known"
    ):
        follow()
    monkeypatch.setattr(Lease, "acquire", away)
    with pytest.raises(GivenUpError, match="its share could not be used for"):
        follow()


@pytest.mark.parametrize(
    ("told", "kept"), [("", {}), ('{"variables": {"TOKEN": "s3', {}), ('{"setup": {"A": "b"}}', {"setup": {"A": "b"}})]
)
def test_what_a_submitter_that_was_killed_has_told(folder, monkeypatch, told, kept):
    made, given = folder(), []
    monkeypatch.setattr(follower, "follow", lambda job, tracking, kept: given.append(kept))
    monkeypatch.setattr(follower.sys, "argv", ["follower", made.share.url, made.paths.folder, made.plan["runId"]])
    monkeypatch.setattr(follower.sys, "stdin", io.StringIO(told))
    monkeypatch.setattr(stores, "bound_calls", lambda: None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert (follower.main(), given) == (0, [kept])


def test_the_exit_code_of_one_that_has_given_up(folder, monkeypatch, capsys):
    made = folder(relaySeconds=0.0)

    def away(*arguments, **named):
        raise ShareError("there is no host x")

    monkeypatch.setattr(Lease, "acquire", away)
    monkeypatch.setattr(follower.sys, "argv", ["follower", made.share.url, made.paths.folder, made.plan["runId"]])
    monkeypatch.setattr(follower.sys, "stdin", io.StringIO("{}"))
    monkeypatch.setattr(stores, "bound_calls", lambda: None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert follower.main() == 75
    assert "its share could not be used for 0 s (at last: there is no host x)" in capsys.readouterr().err


def test_a_run_that_a_person_has_ended_gets_its_true_end(following):
    made, client, follow = following
    made.announce(0)
    fill(made)
    client.set_terminated(made.plan["runId"], "KILLED")
    made.verdict()
    assert follow().execution_state == "succeeded"
    run = client.get_run(made.plan["runId"])
    assert (run.info.status, run.info.end_time) == ("FINISHED", 1_700_000_000_000)
    assert history(client, made.plan["runId"]) == EXPECTED


def test_who_watches_a_follower_in_trouble_tries_once(folder, monkeypatch):
    made = folder()
    holder = Lease(made.job)
    holder.acquire()
    started = []
    monkeypatch.setattr(detached, "start_follower", lambda job: (started.append(1), setattr(job, "starts", 1)))
    watcher = detached.Submitted(made.job, "r", runs.absolute("sqlite:///m.db", made.share.root))
    detached.keep_follower(watcher)
    assert not started
    holder.trouble = "401"
    holder.save({})
    watcher = detached.Submitted(made.job, "r", watcher.tracking)
    for _ in range(2):
        detached.keep_follower(watcher)
    assert started == [1]


_sleep = time.sleep


def _nap(seconds):
    _sleep(min(seconds, 0.05))


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


@pytest.mark.parametrize(
    ("address", "place", "why"),
    [
        ("http://user:secret@127.0.0.1:9", "http://127.0.0.1:9", "Connection refused"),
        ("http://tracking.invalid", "http://tracking.invalid", "[A-Z][a-z ]+"),  # the system's words for a name it doesn't know
    ],
)
def test_a_server_that_nobody_reached_is_one_sentence(monkeypatch, address, place, why):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError) as caught, stores.as_tracking_error():
        MlflowClient(address).search_experiments()
    said = f"the tracking server {re.escape(place)} can't be reached \\({why}\\); MLFLOW_TRACKING_URI says which one is asked"
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
