"""Outputs on their way into a run: each once, whoever sends them, with a word on how far they are, and in bounded memory."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import pytest
from job_folder import FOLDER
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from requests import HTTPError

from mlflow_batchai.agent import protocol, safeopen
from mlflow_batchai.errors import ShareError
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.job.sent import SentFiles, Stamp
from mlflow_batchai.storage import Entry
from mlflow_batchai.tracking import outputs as outputs_module
from mlflow_batchai.tracking.artifacts import FETCHED_AT_ONCE, at_once
from mlflow_batchai.tracking.outputs import Outputs

OUTPUTS = f"{FOLDER}/outputs/m"
CHECKPOINT = {"epochs_done": 1, "batches": 0, "sha256": "", "settings": None, "state": {}}


@pytest.fixture
def scene(relayed):
    """(job folder, client, makes a relay, names of outputs that were sent since the last look)"""
    made, client, relay = relayed
    made.write(made.paths.plan, {**made.plan, "model": None})
    real, sent = client._real.log_artifact, []

    def log_artifact(run_id, file, path):
        real(run_id, file, path)
        if path.startswith("outputs"):
            sent.append(f"{path}/{file.rpartition('/')[2]}")

    client._real.log_artifact = log_artifact

    def look():
        found = sorted(sent)
        sent.clear()
        return found

    return made, client, relay, look


def put(made, **files):
    for name, text in files.items():
        made.share.write(f"{OUTPUTS}/{name}", text.encode())


def notes(made, client):
    return client.get_run(made.plan["runId"]).data.tags.get("batchai.notes", "").split("\n")


def test_a_follower_that_comes_later_sends_what_is_left(scene):
    """One that was killed in the midst of it had sent two of three; the next one is told so by the share."""
    made, client, _, sent = scene
    put(made, a="one", b="two", c="three")
    made.verdict()
    client.before["log_artifact"] = [None, None, OSError("it is refused")]
    with pytest.raises(OSError, match="refused"):
        outputs(made, client, 1).send()
    assert sent() == ["outputs/M/a", "outputs/M/b"]
    assert outputs(made, client, 2).send() == [] and sent() == ["outputs/M/c"]
    assert outputs(made, client, 3).send() == [] and sent() == []
    # Another content of the same length, as a retry leaves it; what nobody has touched is not sent again.
    time.sleep(0.05)
    put(made, b="TWO")
    assert outputs(made, client, 4).send() == [] and sent() == ["outputs/M/b"]


def outputs(made, client, number):
    made.share.claim(made.paths.lease(number))
    return Outputs(client, made.job, SentFiles(made.job, number))


@pytest.mark.parametrize("files", [None, [1], {"outputs/M/a": [3]}, {"outputs/M/a": [3, "now"]}, {"outputs/M/a": None}])
def test_what_was_noted_is_damaged(scene, files):
    made, client, _, sent = scene
    put(made, a="one")
    outputs(made, client, 1).send()
    made.share.write(made.paths.sent(1), protocol.encode([{"files": files}]) if files else b"{}")
    sent()
    assert outputs(made, client, 2).send() == [] and sent() == ["outputs/M/a"]


def test_a_time_that_is_not_known_is_no_proof(scene):
    made, _, _, _ = scene
    files = SentFiles(made.job, 1)
    files.add("outputs/M/a", Stamp(3))
    files.add("outputs/M/b", Stamp(3, 1.0))
    files.save()
    again = SentFiles(made.job, 2)
    assert files.has("outputs/M/a", Stamp(3)) and not again.has("outputs/M/a", Stamp(3))
    assert again.has("outputs/M/b", Stamp(3, 1.0)) and not again.has("outputs/M/b", Stamp(3, 2.0))


@pytest.mark.parametrize("state", [protocol.SUCCEEDED, protocol.FAILED])
def test_what_is_not_to_be_sent_is_told_and_kept(scene, state):
    """`batchai gc` leaves what nobody else has; checkpoints of a job that succeeded have served."""
    made, client, relay, sent = scene
    made.write(made.paths.plan, {**made.plan, "model": None, "artifacts": {"checkpoints": False, "exclude": ["*.tmp"]}})
    put(made, **{"net.h5": "x", "a.tmp": "x", "b/c.tmp": "x"})
    put(made, **{"kept/epoch-0001.h5": "x", "kept/epoch-0001.json": json.dumps(CHECKPOINT)})
    made.verdict(state)
    relay().finish(made.job.state())
    assert sent() == ["outputs/M/net.h5"]
    told = [note for note in notes(made, client) if "on the share" in note]
    counts = [note.partition(" stay")[0] for note in told]
    assert counts == (["2 files"] if state == protocol.SUCCEEDED else ["1 checkpoint", "2 files"])
    assert Lease(made.job).left_out() == told


def test_checkpoints_go_if_they_are_asked_for(scene):
    made, client, relay, sent = scene
    made.write(made.paths.plan, {**made.plan, "model": None, "artifacts": {"checkpoints": True, "exclude": []}})
    put(made, **{"epoch-0001.h5": "x", "epoch-0001.json": json.dumps(CHECKPOINT)})
    made.verdict()
    relay().finish(made.job.state())
    assert sent() == ["outputs/M/epoch-0001.h5", "outputs/M/epoch-0001.json"]
    assert notes(made, client) == [""] and Lease(made.job).left_out() == []


def test_each_file_has_one_directory(scene):
    """Of two ids for one place the first has it; a directory inside of another has its files for itself."""
    made, client, _, sent = scene
    prefix = "$AZ_BATCHAI_MOUNT_ROOT/share"
    places = [("ALL", ""), ("M", "m"), ("SAME", "m/"), ("NEAR", "m2")]
    directories = [{"id": identity, "pathPrefix": prefix, "pathSuffix": suffix} for identity, suffix in places]
    made.write(made.paths.plan, {**made.plan, "outputDirectories": directories})
    for name in ("m/a", "m2/b", "c"):
        made.share.write(f"{FOLDER}/outputs/{name}", b"x")
    assert outputs(made, client, 1).send() == []
    assert sent() == ["outputs/ALL/c", "outputs/M/a", "outputs/NEAR/b"]


def test_a_file_that_cant_go_keeps_no_other_from_it(scene, monkeypatch):
    """A proxy that takes no large files, a name that a server doesn't know; what another account keeps to itself."""
    made, client, relay, sent = scene
    put(made, a="x", aa="x", **{"b\nb": "x"}, c="x", d="x", e="x", **{"own/f": "x", "g": "x"})
    made.verdict()
    open_folder, open_file = safeopen.open_folder, safeopen.open_file

    def list_folder(root, path):
        if path.endswith("/own"):
            raise PermissionError(13, "Permission denied", path)
        return open_folder(root, path)

    def open_it(root, path):
        if path.endswith("/e"):
            raise PermissionError(13, "Permission denied", path)
        if path.endswith("/d"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return open_file(root, path)

    monkeypatch.setattr(safeopen, "open_folder", list_folder)
    monkeypatch.setattr(safeopen, "open_file", open_it)
    odd = MlflowException("no such\npath", error_code=INVALID_PARAMETER_VALUE)
    client.before["log_artifact"] = [refusal(413, "Request Entity Too Large"), odd, refusal(404, "Not Found")]
    relay().finish(made.job.state())
    assert sent() == ["outputs/M/c", "outputs/M/g"]
    told = notes(made, client)
    names = [note.partition("not sent: ")[2].partition(" (")[0] for note in told]
    assert names == ["own/, e", "a", "aa", "b b", "d"] and Lease(made.job).left_out() == told


def test_a_share_that_is_away_keeps_no_other_from_being_sent(scene):
    """Of three directories one lies on a share that this machine can't open, and one on a share that goes in the midst of it."""
    made, client, _, sent = scene
    more = [{"scope": "job", "path": name, "share": f"file:///nowhere/{name}", "kind": "link"} for name in ("closed", "going")]
    volumes = [*made.plan["volumes"], *more]
    prefixes = ["$AZ_BATCHAI_JOB_MOUNT_ROOT/closed", "$AZ_BATCHAI_JOB_MOUNT_ROOT/going", "$AZ_BATCHAI_MOUNT_ROOT/share"]
    directories = [{"id": identity, "pathPrefix": prefix} for identity, prefix in zip("CGM", prefixes, strict=True)]
    made.write(made.paths.plan, {**made.plan, "volumes": volumes, "outputDirectories": directories})
    put(made, a="x")
    job = made.job
    here = job.place

    class Going:
        at_once = 1

        def list(self, path):
            return [Entry("b", 1, False)]

        def download(self, path, target):
            raise ShareError("share going: it is away")

    def place(address, path):
        if address.endswith("closed"):
            raise ShareError("share closed: there is no key for it")
        return (Going(), path) if address.endswith("going") else here(address, path)

    job.place = place
    made.share.claim(made.paths.lease(1))
    with pytest.raises(ShareError, match=r"share closed.*share going"):
        Outputs(client, job, SentFiles(job, 1)).send()
    assert sent() == ["outputs/M/m/a"]


def refusal(code, reason):
    return HTTPError(f"{code} Client Error", response=SimpleNamespace(status_code=code, reason=reason))


@pytest.mark.parametrize("code", [401, 403, 501])
def test_a_server_that_takes_no_file_is_asked_once(scene, code):
    made, client, _, sent = scene
    put(made, a="x", b="x")
    client.before["log_artifact"] = [refusal(code, "")]
    with pytest.raises(HTTPError):
        outputs(made, client, 1).send()
    assert sent() == []


def test_large_outputs_are_spoken_of(scene, monkeypatch):
    """In the description, and to whoever watches the job."""
    made, client, relay, _ = scene
    put(made, a="x" * 3_000_000, b="y" * 1_000_000)
    made.verdict()
    ending = relay()
    monkeypatch.setattr(outputs_module, "LARGE", 4_000_000)
    described = []
    real = client._real.log_artifact

    def log_artifact(*arguments):
        tags = client._real.get_run(made.plan["runId"]).data.tags
        described.append((tags.get("mlflow.note.content", ""), Lease(made.job).view().sending))
        real(*arguments)

    client._real.log_artifact = log_artifact
    ending.finish(made.job.state())
    text, watched = described[-2]
    assert watched == "outputs: file 1 of 2, 0 of 4 MB" and f"sending `{watched}`" in text
    run = client.get_run(made.plan["runId"])
    assert "sending" not in run.data.tags["mlflow.note.content"] and Lease(made.job).view().sending == ""


def test_as_many_files_at_once_as_have_room():
    lock, here, most = threading.Lock(), [0, 0], [0, 0]
    sizes = {f"small{number}": FETCHED_AT_ONCE // 4 for number in range(12)} | {"large": 10 * FETCHED_AT_ONCE}

    def act(name):
        with lock:
            here[0] += min(sizes[name], FETCHED_AT_ONCE)
            here[1] += 1
            most[:] = map(max, most, here)
        time.sleep(0.01)
        with lock:
            here[0] -= min(sizes[name], FETCHED_AT_ONCE)
            here[1] -= 1
        return name.upper()

    assert at_once(SimpleNamespace(at_once=16), act, sizes) == [name.upper() for name in sizes]
    assert most[0] <= FETCHED_AT_ONCE and most[1] <= 4
