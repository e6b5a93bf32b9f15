"""The relay into a real store: a crash at any point, replayed, leaves the same run; who has lost the lease writes nothing."""

from __future__ import annotations

import re
import shutil
import zipfile

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from relay_world import EXPECTED, Crash, fill, history

from mlflow_batchai.errors import ShareError
from mlflow_batchai.follower import follower, keeper
from mlflow_batchai.job.lease import Hold, Lease, LeaseLostError
from mlflow_batchai.tracking import lastthings
from mlflow_batchai.tracking.relay import Relay
from mlflow_batchai.tracking.sending import Outputs
from mlflow_batchai.tracking.trouble import GivenUpError

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


@pytest.fixture
def scene(relayed):
    return relayed


def model(made, name="net.keras"):
    path = made.share.root / made.paths.folder / "outputs" / "m" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    made.segment(2, {"k": "report", "t": 1, "body": {"type": "model", "path": str(path), "meta": META}})


def test_a_rule_that_this_version_does_not_take(scene):
    """All else of the job is relayed."""
    made, client, relay = scene
    made.write(made.paths.plan, {**made.plan, "metrics": [{"name": "odd", "regex": "(?=a)(b)", "step": None}]})
    fill(made)
    made.announce(0)
    made.verdict("failed", reason="no")
    relay().finish(made.job.state())
    run = client.get_run(made.plan["runId"])
    assert history(client, made.plan["runId"]) == {key: EXPECTED[key] for key in ("loss", "acc")}
    assert "plays no part" in run.data.tags["batchai.notes"]


def test_a_whole_job(scene):
    made, client, relay = scene
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
    assert run.data.tags["batchai.exitCode"] == "0"
    assert run.data.tags["batchai.modelVersion"] == "models:/net/1"
    assert "batchai.notes" not in run.data.tags, run.data.tags["batchai.notes"]
    assert [entry.path for entry in client.list_artifacts(run_id, "outputs/M")] == ["outputs/M/net.keras"]
    assert [entry.path for entry in client.list_artifacts(run_id, "logs")] == ["logs/stdout.txt"]
    assert relay() is None


# Where a relay dies: (method, whether the call was still made, which of its calls)
CRASHES = [
    ("log_batch", True, 0),
    ("log_batch", False, 0),
    ("log_batch", True, 1),
    ("log_artifact", True, 0),
    ("log_artifacts", True, 0),
    ("create_logged_model", True, 0),
    ("log_model_artifacts", False, 0),
    ("log_outputs", True, 0),
    ("finalize_logged_model", True, 0),
    ("create_registered_model", True, 0),
    ("create_model_version", True, 0),
    ("set_registered_model_alias", True, 0),
    ("set_registered_model_alias", False, 0),
    ("set_model_version_tag", True, 0),
    ("set_tag", True, 0),
    ("set_terminated", False, 0),
    ("set_terminated", True, 0),
]


@pytest.mark.parametrize(("method", "made_it", "which"), CRASHES)
def test_a_relay_that_dies_anywhere_is_made_up_for(scene, method, made_it, which):
    made, client, relay = scene
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
    assert re.match("champion points to version 1: (nothing had it|it had it)", run.data.tags["batchai.promotion"])
    assert versions[0].description and versions[0].description.startswith("champion: ")
    assert relay() is None


def test_points_wait_for_a_store_that_is_down(scene):
    made, client, relay = scene
    first = relay()
    fill(made)
    client.before["log_batch"] = [ConnectionError("down"), ConnectionError("down")]
    for _ in range(2):
        with pytest.raises(ConnectionError):
            first.step()
        # What is not stored is not ticked off either.
        assert Lease(made.job)._cursor(1)["memory"] == {}
    first.step()
    assert Lease(made.job)._cursor(1)["memory"]["cursor"] == {"agent-0": 2}
    client.before["log_batch"] = [ConnectionError("down")]
    made.verdict()
    with pytest.raises(ConnectionError):
        first.finish(made.job.state())
    first.finish(made.job.state())
    assert history(client, made.plan["runId"]) == EXPECTED
    notes = client.get_run(made.plan["runId"]).data.tags["batchai.notes"]
    assert notes.startswith("batchai.yaml asks for a model and none was saved in an output directory (a .h5 or .keras file")


def test_a_point_that_mlflow_never_takes_holds_up_no_other(scene):
    made, client, relay = scene
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
    assert "metric 'f1' at step 0 was refused: no f1 here" in client.get_run(made.plan["runId"]).data.tags["batchai.notes"]


def test_who_has_lost_the_lease_writes_nothing(scene):
    made, client, relay = scene
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


def test_a_failed_job_makes_no_model_and_says_why(scene):
    made, client, relay = scene
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


@pytest.mark.parametrize("stays_away", [False, True])
def test_results_on_a_share_that_is_away_are_waited_for(scene, monkeypatch, stays_away):
    """The lid was closed in the middle of a download: its run must not end without them, nor wait for ever."""
    made, client, relay = scene
    made.write(made.paths.plan, {**made.plan, "board": True, "model": None})
    made.verdict()
    made.notice("verdict")
    ending = relay()
    now = [1000.0]
    monkeypatch.setattr(lastthings.time, "monotonic", lambda: now[0])
    send, tries = Outputs.send, []

    def failing(*arguments):
        tries.append(1)
        now[0] += 60
        if len(tries) == 1 or stays_away:
            raise ShareError("there is no host x")
        return send(*arguments)

    monkeypatch.setattr(Outputs, "send", failing)
    state = made.job.state()
    for _ in range(4 if stays_away else 1):
        with pytest.raises(ShareError, match="no host x"):
            ending.finish(state)
        assert client.get_run(made.plan["runId"]).info.status != "FINISHED"
    ending.finish(state)
    run = client.get_run(made.plan["runId"])
    assert (run.info.status, run.data.tags.get("batchai.notes")) == ("FINISHED", "there is no host x" if stays_away else None)


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ({"check": {"outcome": "failed", "why": "its file needs 'Scale'", "seconds": 1}}, "its file needs 'Scale'"),
        ({"meta": {"format": "torch"}}, "is a PyTorch file"),
        ({"check": {"outcome": "unchecked", "why": "it has no keras", "seconds": 1}}, None),
    ],
)
def test_a_model_that_is_not_good_is_not_made(scene, body, note):
    """The job has succeeded all the same."""
    made, client, relay = scene
    path = made.share.root / made.paths.folder / "outputs" / "m" / "net.keras"
    model(made)
    record = {"type": "model", "path": str(path), "meta": META, "chosen": True, **body}
    made.segment(3, {"k": "report", "t": 1, "body": record})
    fill(made)
    made.verdict()
    relay().finish(made.job.state())
    run = client.get_run(made.plan["runId"])
    assert run.info.status == "FINISHED"
    models = client.search_logged_models([run.info.experiment_id])
    if note is None:
        assert [str(one.status) for one in models] == ["READY"] and "was not checked: it has no keras" in run.data.tags[
            "batchai.notes"
        ]
    else:
        assert note in run.data.tags["batchai.notes"] and models == []
        assert client.search_registered_models() == [] and "batchai.promotion" not in run.data.tags


def test_a_model_outside_of_the_outputs_is_a_note(scene):
    made, client, relay = scene
    marker = f"{made.paths.folder}/outputs/m"
    for sequence, path in enumerate(["/tmp/x.keras", f"/n/{marker}/../../../../etc/x.keras"]):
        made.segment(sequence, {"k": "report", "t": 1, "body": {"type": "model", "path": path, "meta": META}})
    made.verdict()
    relay().finish(made.job.state())
    assert "is not there, or a link out of the share" in client.get_run(made.plan["runId"]).data.tags["batchai.notes"]


def test_what_could_not_be_sent_is_remembered(scene):
    """`batchai gc` asks: the share has the only copy."""
    made, client, relay = scene
    made.share.write(f"{made.paths.folder}/outputs/m/net.keras", b"x")
    made.verdict()
    first = relay()
    client.before["log_artifact"] = [OSError("disk full")]
    first.finish(made.job.state())
    assert Lease(made.job).finished() and Lease(made.job).left_out() == ["outputs: OSError: disk full"]
    assert "outputs: OSError: disk full" in client.get_run(made.plan["runId"]).data.tags["batchai.notes"]


def test_links_out_of_the_share_are_not_followed(scene, tmp_path):
    """What a rank links to would be read here, on another machine, with another user's rights."""
    made, client, relay = scene
    (tmp_path / "private").write_text("of this machine")
    (tmp_path / "folder").mkdir()
    outputs = made.share.root / made.paths.folder / "outputs" / "m"
    (outputs / "sub").mkdir(parents=True)
    for name, target in (
        ("stolen", tmp_path / "private"),
        ("sub/stolen too", tmp_path / "folder"),
        ("dangling", outputs / "none"),
        ("net.keras", tmp_path / "private"),
        ("fine", outputs / "sub" / "real"),
    ):
        (outputs / name).symlink_to(target)
    (outputs / "sub" / "real").write_text("x")
    path = str(outputs / "net.keras")
    made.segment(0, {"k": "report", "t": 1, "body": {"type": "model", "path": path, "meta": META}})
    made.verdict()
    relay().finish(made.job.state())
    run_id = made.plan["runId"]
    found = [entry.path for folder in ("outputs/M", "outputs/M/sub") for entry in client.list_artifacts(run_id, folder)]
    assert sorted(found) == ["outputs/M/fine", "outputs/M/sub", "outputs/M/sub/real"]
    notes = client.get_run(run_id).data.tags["batchai.notes"]
    assert "outputs/M: not sent: dangling, net.keras, stolen, sub/stolen too (links out of the share, or to nothing)" in notes
    assert f"the saved model {path} is not there, or a link out of the share" in notes
    assert client.search_logged_models(["0"]) == []


@pytest.mark.parametrize("linked", ["stdouterr", "outputs/m", "outputs", "a volume"])
def test_a_folder_that_is_a_link_out_of_the_share_is_not_sent(scene, tmp_path, linked):
    """Not even where what leads out is a parent of it, or the folder that a mounted volume is."""
    made, client, relay = scene
    folder = made.share.root / made.paths.folder
    private = tmp_path / "private"
    for name in ("stdouterr", "outputs/m"):
        for parent in (private, private / "m", folder / name, private / name, private / made.paths.folder / name):
            parent.mkdir(parents=True, exist_ok=True)
            (parent / "text").write_text("of this machine")
    if linked == "a volume":
        (made.share.root / "volume").symlink_to(private)
        made.plan["volumes"].append({"scope": "cluster", "path": "v", "kind": "link", "share": made.share.url + "/volume"})
        made.plan["outputDirectories"][0]["pathPrefix"] = "$AZ_BATCHAI_MOUNT_ROOT/v"
        made.write(made.paths.plan, made.plan)
    else:
        shutil.copytree(folder / linked, private, dirs_exist_ok=True)  # what else is read of the job lies there too
        shutil.rmtree(folder / linked)
        (made.share.root / made.paths.folder / linked).symlink_to(private)
    made.verdict()
    relay().finish(made.job.state())
    run_id = made.plan["runId"]
    notes = client.get_run(run_id).data.tags["batchai.notes"]
    stolen = ["stdouterr"] if linked == "stdouterr" else ["outputs/m"]
    for name, artifact in (("stdouterr", "logs"), ("outputs/m", "outputs/M")):
        sent = [entry.path for entry in client.list_artifacts(run_id, artifact)]
        assert sent == ([] if name in stolen else [artifact + "/text"])
        where = f"volume/{made.paths.folder}" if linked == "a volume" else made.paths.folder
        assert (f"{artifact}: not sent: {where}/{name} lies behind a link out" in notes) is (name in stolen)


# The follower around it.


def test_it_ends_a_job_that_was_lost(following):
    made, client, follow = following
    made.announce(0)
    state = follow()
    assert state.error_code == "NodeLost"
    run = client.get_run(made.plan["runId"])
    assert run.info.status == "FAILED"
    assert run.data.tags["batchai.notes"].endswith("\ncan't be ended from here")
    assert Lease(made.job).finished()
    assert follow() is None


def test_it_waits_for_a_store_that_is_down(following):
    made, client, follow = following
    fill(made)
    made.verdict()
    client.before["log_batch"] = [ConnectionError("down")] * 5
    client.before["get_run"] = [ConnectionError("down")] * 5
    assert follow().execution_state == "succeeded"
    assert history(client, made.plan["runId"]) == EXPECTED


def test_a_run_that_was_deleted_is_not_waited_for(following):
    made, client, follow = following
    fill(made)
    made.announce(0)
    client.delete_run(made.plan["runId"])
    with pytest.raises(GivenUpError, match=r"is deleted .* ended failed"):
        follow()
    assert Lease(made.job).glance().hold is Hold.FREE
    client.restore_run(made.plan["runId"])
    assert follow().error_code == "NodeLost"
    assert client.get_run(made.plan["runId"]).info.status == "FAILED"
    assert history(client, made.plan["runId"]) == EXPECTED


def test_a_run_that_is_restored_while_its_job_runs_is_relayed_on(following, monkeypatch):
    """Of a deleted one the store is asked from time to time only."""
    made, client, follow = following
    run_id, looks = made.plan["runId"], []
    monkeypatch.setattr(follower, "GONE_LOOK_SECONDS", 1.0)
    monkeypatch.setattr(keeper.Watch, "check_or_complain", lambda watch: None)

    def run_gone(relay, run_gone=Relay.run_gone):
        looks.append(run_gone(relay))
        if looks == [True, True]:
            client.restore_run(run_id)
        return looks[-1]

    def describe(relay, state):
        made.verdict()

    monkeypatch.setattr(Relay, "run_gone", run_gone)
    monkeypatch.setattr(Relay, "describe", describe)
    fill(made)
    made.announce(0)
    client.delete_run(run_id)
    assert follow().execution_state == "succeeded"
    assert looks == [True, True, False]
    assert history(client, run_id) == EXPECTED


def test_a_follower_whose_way_to_the_share_is_gone_leaves_when_another_has_ended_the_run(following, monkeypatch):
    """Its SAS has expired, say; without this it would try for ever, and hold connections to the nodes."""
    made, client, follow = following
    made.announce(0)

    def refused(*arguments):
        raise ShareError("the SAS has expired")

    lost = []

    def state(job, ending=True):
        lost.append(job)
        if len(lost) == 20:
            client.set_terminated(made.plan["runId"], "KILLED")
        return refused()

    monkeypatch.setattr(follower.Job, "state", state)
    monkeypatch.setattr(keeper.Watch, "check_or_complain", lambda watch: None)
    assert follow() is None
    assert 20 <= len(lost) <= 21
