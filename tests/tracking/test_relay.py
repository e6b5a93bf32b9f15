"""The relay into a real store: a crash at any point, replayed, leaves the same run; who has lost the lease writes nothing."""

from __future__ import annotations

import zipfile

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    INVALID_PARAMETER_VALUE,
    PERMISSION_DENIED,
    RESOURCE_DOES_NOT_EXIST,
    TEMPORARILY_UNAVAILABLE,
)
from relay_world import EXPECTED, Always, Crash, fill, history, http_error

from mlflow_batchai.job.lease import Lease, LeaseLostError
from mlflow_batchai.tracking import relay as relay_module
from mlflow_batchai.tracking import stores

TENSOR = {"name": "x", "shape": [-1, 4], "dtype": "float32"}
META = {
    "keras": "3.15.1",
    "backend": "tensorflow",
    "python": "3.11.4",
    "requirements": ["keras==3.15.1", "tensorflow-cpu==2.21.0"],
    "format": "keras",
    "inputs": [TENSOR],
    "outputs": [TENSOR],
}


def tags_of(made, client):
    return client.get_run(made.plan["runId"]).data.tags


def model(made, name="net.keras"):
    path = made.share.root / made.paths.folder / "outputs" / "m" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    made.segment(2, {"k": "report", "t": 1, "body": {"type": "model", "path": str(path), "meta": META}})


def test_a_rule_that_this_version_does_not_take(relayed):
    """All else of the job is relayed."""
    made, client, relay = relayed
    made.write(made.paths.plan, {**made.plan, "metrics": [{"name": "odd", "regex": "(?=a)(b)", "step": None}]})
    fill(made)
    made.announce(0)
    made.verdict("failed", reason="no")
    relay().finish(made.job.state())
    run = client.get_run(made.plan["runId"])
    assert history(client, made.plan["runId"]) == {key: EXPECTED[key] for key in ("loss", "acc")}
    assert "plays no part" in run.data.tags["batchai.notes"]


def test_a_whole_job(relayed):
    made, client, relay = relayed
    fill(made)
    model(made)
    made.share.write(made.paths.stdouterr + "/stdout.txt", b"hello\n")
    made.announce(0)
    first = relay()
    first.show_state(made.job.state())
    assert first.step() == 3
    run_id = made.plan["runId"]
    assert client.get_run(run_id).info.status == "RUNNING"
    made.verdict()
    first.finish(made.job.state())
    run = client.get_run(run_id)
    assert history(client, run_id) == EXPECTED
    assert (run.info.status, run.info.end_time) == ("FINISHED", 1_700_000_000_000)
    assert run.data.tags["batchai.executionState"] == "succeeded"
    assert "batchai.exitCode" not in run.data.tags
    assert run.data.tags["batchai.modelVersion"] == "models:/net/1"
    assert "batchai.notes" not in run.data.tags, run.data.tags["batchai.notes"]
    assert [entry.path for entry in client.list_artifacts(run_id, "outputs/M")] == ["outputs/M/net.keras"]
    assert [entry.path for entry in client.list_artifacts(run_id, "logs")] == ["logs/stdout.txt"]
    assert relay() is None


def test_outputs_are_sent_while_node_0_tries_the_model(relayed):
    """Then the ranks write nothing more; the end sends what is not there yet."""
    made, client, relay = relayed
    made.share.write(f"{made.paths.folder}/outputs/m/a", b"a")
    first, sent = relay(), []
    for sequence, phase in enumerate(("running", "checking the model")):
        made.segment(sequence, {"k": "phase", "t": 1, "phase": phase, "node": 0})
        first.step()
        first.outputs_when_whole()
        sent.append(client.calls.count("log_artifact"))
    first.outputs_when_whole()
    assert [*sent, client.calls.count("log_artifact")] == [0, 1, 1]
    made.verdict()
    made.share.write(f"{made.paths.folder}/outputs/m/b", b"b")
    first.finish(made.job.state())
    found = [entry.path for entry in client.list_artifacts(made.plan["runId"], "outputs/M")]
    assert (found, client.calls.count("log_artifact")) == (["outputs/M/a", "outputs/M/b"], 2)


# Where a relay dies: (method, whether the call was still made, which of its calls)
CRASHES = [
    ("log_batch", True, 0),
    ("log_batch", True, 1),
    ("log_artifact", True, 0),
    ("create_logged_model", True, 0),
    ("log_model_artifacts", False, 0),
    ("log_outputs", True, 0),
    ("finalize_logged_model", True, 0),
    ("create_registered_model", True, 0),
    ("create_model_version", True, 0),
    ("set_registered_model_alias", True, 0),
    ("set_registered_model_alias", False, 0),
    ("set_terminated", False, 0),
    ("set_terminated", True, 0),
]


@pytest.mark.parametrize(("method", "made_it", "which"), CRASHES)
def test_a_relay_that_dies_anywhere_is_made_up_for(relayed, method, made_it, which):
    made, client, relay = relayed
    run_id = made.plan["runId"]
    fill(made)
    model(made)
    made.verdict()
    (client.after if made_it else client.before)[method] = [None] * which + [Crash()]
    with pytest.raises(Crash):
        relay().finish(made.job.state())
    client.dead = False
    relay().finish(made.job.state())
    run = client.get_run(run_id)
    assert history(client, run_id) == EXPECTED
    assert run.info.status == "FINISHED"
    models = client.search_logged_models([run.info.experiment_id])
    assert len([one for one in models if str(one.status) == "READY"]) == 1
    assert all(str(one.status) != "PENDING" for one in models)
    versions = client.search_model_versions("name = 'net'")
    assert [version.version for version in versions] == [1]
    assert run.data.tags["batchai.modelVersion"] == "models:/net/1"
    assert client.get_model_version_by_alias("net", "champion").version == 1
    # A relay that has moved the alias before it died finds it there.
    told = {run.data.tags["batchai.promotion"], versions[0].description}
    assert told <= {"first version, promoted to @champion", "as before, promoted to @champion"}
    assert relay() is None


def test_a_point_that_mlflow_never_takes_holds_up_no_other(relayed):
    made, client, relay = relayed
    first = relay()
    real = client._real

    class Picky:
        def __getattr__(self, name):
            return getattr(real, name)

        def log_batch(self, run_id, metrics=(), **named):
            if any(metric.key == "f1" and metric.step == 0 for metric in metrics):
                raise MlflowException("no f1 here", error_code=INVALID_PARAMETER_VALUE)
            real.log_batch(run_id, metrics=metrics, **named)

    client._real = Picky()
    fill(made)
    first.step()
    made.verdict()
    first.finish(made.job.state())
    assert history(client, made.plan["runId"]) == {**EXPECTED, "f1": EXPECTED["f1"][1:]}
    assert "metric 'f1' at step 0 was refused: no f1 here" in tags_of(made, client)["batchai.notes"]


def test_who_has_lost_the_lease_writes_nothing(relayed):
    made, client, relay = relayed
    first = relay()
    fill(made)
    made.announce(0)
    second = relay()
    client.calls.clear()
    for write in (first.step, lambda: first.show_state(made.job.state()), lambda: first.finish(made.job.state())):
        with pytest.raises(LeaseLostError):
            write()
    assert client.calls == []
    second.step()
    made.verdict()
    # The lease is lost while outputs are sent: the end of the run is the heir's.
    made.share.write(made.paths.stdouterr + "/stdout.txt", b"x")
    second._client = second._logs._client = TakenOver(client, relay)
    with pytest.raises(LeaseLostError):
        second.finish(made.job.state())
    assert client.get_run(made.plan["runId"]).info.status != "FINISHED"
    assert "set_terminated" not in client.calls


class TakenOver:
    """During the first upload, another takes the lease."""

    def __init__(self, client, relay):
        self._client, self._relay = client, relay

    def __getattr__(self, name):
        return getattr(self._client, name)

    def log_artifact(self, *arguments):
        self._relay()


def test_a_failed_job_makes_no_model_and_says_why(relayed):
    made, client, relay = relayed
    fill(made)
    model(made)
    made.verdict(
        "failed", reason="rank 1 on node-0 exited with code 3\n" + "x" * 9000, errors=[{"code": "JobFailed"}], exitCode=3
    )
    relay().finish(made.job.state())
    run = client.get_run(made.plan["runId"])
    tags = run.data.tags
    assert (run.info.status, tags["batchai.exitCode"], tags["batchai.errorCode"]) == ("FAILED", "3", "JobFailed")
    assert len(tags["batchai.reason"]) == 5000
    assert client.search_logged_models([run.info.experiment_id]) == []


@pytest.mark.parametrize(
    ("body", "note", "is_made"),
    [
        ({"check": {"outcome": "failed", "why": "its file needs 'Scale'", "seconds": 1}}, "its file needs 'Scale'", False),
        ({"meta": {"format": "torch"}}, "PyTorch", False),
        ({"check": {"outcome": "unchecked", "why": "it has no keras", "seconds": 1}}, "it has no keras", True),
    ],
)
def test_a_model_that_is_not_good_is_not_made(relayed, body, note, is_made):
    """The job has succeeded all the same."""
    made, client, relay = relayed
    path = made.share.root / made.paths.folder / "outputs" / "m" / "net.keras"
    model(made)
    record = {"type": "model", "path": str(path), "meta": META, "chosen": True, **body}
    made.segment(3, {"k": "report", "t": 1, "body": record})
    fill(made)
    made.verdict()
    relay().finish(made.job.state())
    run = client.get_run(made.plan["runId"])
    assert run.info.status == "FINISHED" and note in run.data.tags["batchai.notes"]
    models = client.search_logged_models([run.info.experiment_id])
    assert [str(one.status) for one in models] == (["READY"] if is_made else [])
    if not is_made:
        assert client.search_registered_models() == [] and "batchai.promotion" not in run.data.tags


def test_a_model_outside_of_the_outputs_is_a_note(relayed):
    made, client, relay = relayed
    marker = f"{made.paths.folder}/outputs/m"
    for sequence, path in enumerate(["/tmp/x.keras", f"/n/{marker}/../../../../etc/x.keras"]):
        made.segment(sequence, {"k": "report", "t": 1, "body": {"type": "model", "path": path, "meta": META}})
    made.verdict()
    relay().finish(made.job.state())
    assert "x.keras is not there" in tags_of(made, client)["batchai.notes"]


# The end, while the store is away.


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
    assert len(tags_of(made, client)["batchai.notes"].splitlines()) == 1, "no model was saved, nothing else is lacking"


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (http_error(503), True),
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
    monkeypatch.setattr(relay_module.time, "monotonic", lambda: now[0])
    client.before["log_artifacts"] = client.before["log_artifact"] = Always(lambda: error)
    if waits:
        with pytest.raises(type(error)):
            one.finish(state)
        now[0] += 301
    one.finish(state)
    run = client.get_run(made.plan["runId"])
    assert run.info.status == "FAILED"
    said = f"outputs: {type(error).__name__}: {error}"
    assert said in run.data.tags["batchai.notes"] and said in Lease(made.job).left_out()  # `batchai gc` asks for them


def test_a_store_that_answers_nobody_is_waited_for_whatever_the_error(relayed, monkeypatch):
    made, client, relay = relayed
    made.share.write(f"{made.paths.folder}/outputs/m/a", b"a")
    made.verdict("failed")
    one, state = relay(), made.job.state()
    monkeypatch.setattr(relay_module, "AWAY_SECONDS", 0.0)
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
