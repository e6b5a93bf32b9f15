"""Logs and outputs from an Azure file share into a real store: each byte of a growing log once, everything whole at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from job_folder import FOLDER, JobFolder

from mlflow_batchai.job.sent import SentFiles
from mlflow_batchai.storage import Entry, credentials, open_share
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.tracking import artifacts, runs
from mlflow_batchai.tracking.logs import Logs
from mlflow_batchai.tracking.models.job_model import local_copy
from mlflow_batchai.tracking.outputs import Outputs

LOGS = f"{FOLDER}/stdouterr"
OUTPUTS = f"{FOLDER}/outputs"


class Scene:
    """A job on an Azure share, and the run that it goes into."""

    def __init__(self, azure, client, artifacts, run_id):
        name = f"share-{uuid.uuid4().hex}"
        azure.share(name)
        self.azure = azure
        self.client = client
        self.artifacts = artifacts
        self.share = open_share(azure.url(name))
        self.job = JobFolder(
            self.share,
            runId=run_id,
            volumes=[{"scope": "cluster", "path": "share", "kind": "azureFiles", "how": "bind", "share": self.share.url}],
            outputDirectories=[
                {"id": "A", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": ""},
                {"id": "B", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": "deep"},
            ],
        ).job

    def outputs(self, number=1):
        """As a new relay would send them, that holds the lease of this number."""
        return Outputs(self.client, self.job, SentFiles(self.job, number))

    def log(self, name="stdout.txt"):
        """What has been sent of a log."""
        return (self.artifacts / "logs" / name).read_bytes()

    def asked(self):
        """(method, name, bytes that came) since the last look."""
        found = [(one.method, one.path.rpartition("/")[2], one.sent) for one in self.azure.requests()]
        self.azure.reset()
        return found


@pytest.fixture
def scene(azure, monkeypatch, store_template, tmp_path):
    monkeypatch.setattr(credentials, "_remembered", {azure.account: Credential(azure.key)})
    shutil.copy(store_template, tmp_path / "m.db")
    client = runs.client(runs.absolute("sqlite:///m.db", tmp_path))
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    run = runs.create(client, experiment, {runs.TAG_JOB: "toy"}, {}, None, None)
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    yield Scene(azure, client, artifacts, run.info.run_id)
    azure.fail(0)


def test_a_growing_log_is_fetched_once(scene):
    logs = Logs(scene.client, scene.job)
    assert logs.send() == []
    first, second = os.urandom(200_000), os.urandom(100_000)
    scene.share.write(f"{LOGS}/stdout-0.txt", first)
    scene.share.write(f"{LOGS}/stdout-1.txt", b"quiet")
    logs.send()
    assert scene.log("stdout-0.txt") == first
    scene.share.write(f"{LOGS}/stdout-0.txt", first + second)
    scene.asked()
    logs.send()
    assert scene.asked()[1:] == [("GET", "stdout-0.txt", len(second))]
    assert scene.log("stdout-0.txt") == first + second
    # Nothing does: one listing.
    assert logs.send() == []
    assert [method for method, _, _ in scene.asked()] == ["GET"]


def test_a_log_that_grows_all_the_time_is_sent(scene, monkeypatch):
    """However long it takes: what is written meanwhile is for the next time."""
    written = os.urandom(9 << 20)
    scene.share.write(f"{LOGS}/stdout.txt", written)
    real = scene.share._get

    def get(path, start, length):
        piece = real(path, start, length)
        scene.share.write(f"{LOGS}/stdout.txt", written + os.urandom(1 + start))
        return piece

    monkeypatch.setattr(scene.share, "_get", get)
    Logs(scene.client, scene.job).send()
    assert scene.log() == written


def test_nuls_at_the_end_are_looked_at_again_and_a_log_may_begin_anew(scene):
    """A reader may come between the two requests by which a file grows: it is longer, and not written yet."""
    logs = Logs(scene.client, scene.job)
    for written in (b"one\n" + bytes(4), b"one\ntwo\n", b"new\n", b"new\ntwo\n\0\0"):
        scene.share.write(f"{LOGS}/stdout.txt", written)
        logs.send()
        assert scene.log() == written


def test_all_outputs_come_while_a_tenth_of_the_requests_fails(scene):
    files = {f"{folder}{number}.h5": os.urandom(number * 1000) for folder in ("", "deep/", "deep/er/") for number in range(15)}
    files["deep/large"] = os.urandom(9 << 20)
    for name, data in files.items():
        scene.share.write(f"{OUTPUTS}/{name}", data)
    scene.share.write(f"{LOGS}/stdout.txt", b"log")
    scene.azure.fail(0.1, seed=7, retry_after=0.1)
    assert scene.outputs().send() == []
    assert Logs(scene.client, scene.job).send(complete=True) == []
    for name, data in files.items():
        # What lies in the other output directory is that one's.
        sent = "B/" + name.removeprefix("deep/") if name.startswith("deep/") else "A/" + name
        assert (scene.artifacts / "outputs" / sent).read_bytes() == data
    assert scene.log() == b"log"


def test_outputs_lie_here_a_portion_at_a_time_and_are_sent_once(scene, monkeypatch):
    """Neither the memory nor the disk of this machine has to hold them all; who is cut off goes on where he was."""
    monkeypatch.setattr(artifacts, "PORTION", 2500)
    sizes = {"a": 1000, "b": 1000, "c/d": 1000, "e": 5000, "f": 400, "g": 400}
    for name, size in sizes.items():
        scene.share.write(f"{OUTPUTS}/{name}", os.urandom(size))
    scene.job.plan = replace(scene.job.plan, output_directories=scene.job.plan.output_directories[:1])
    real, sent = scene.client.log_artifact, []

    def log_artifact(run_id, file, artifact):
        name = file.rpartition("/")[2]
        scratch = Path(file.partition("/c/")[0]).parent if "/c/" not in file else Path(file.partition("/c/")[0])
        here = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        sent.append((name, here))
        if [one for one, _ in sent].count("f") == 1 and name == "f":
            raise OSError("the store is away")
        real(run_id, file, artifact)

    monkeypatch.setattr(scene.client, "log_artifact", log_artifact)
    outputs = scene.outputs()
    with pytest.raises(OSError, match="away"):
        outputs.send()
    before = [name for name, _ in sent]
    scene.asked()
    assert outputs.send() == []
    # What had been sent is neither fetched nor sent again.
    again = [name for name, _ in sent][len(before) :]
    assert sorted(name for method, name, _ in scene.asked() if method == "GET" and name in "abdefg") == sorted(again)
    assert sorted([*before[:-1], *again]) == ["a", "b", "d", "e", "f", "g"]
    assert all(here <= 2500 or name == "e" for name, here in sent)
    for name, size in sizes.items():
        assert (scene.artifacts / "outputs" / "A" / name).stat().st_size == size


def test_outputs_cost_a_listing_a_folder_and_a_request_a_file(scene):
    for number in range(20):
        scene.share.write(f"{OUTPUTS}/a/{number}", b"1")
    scene.job.plan = replace(scene.job.plan, output_directories=scene.job.plan.output_directories[:1])
    scene.share.claim(scene.job.paths.lease(1))
    scene.asked()
    scene.outputs().send()
    # Two more: what relays before have sent, and a note of what this one has.
    assert len(scene.asked()) == 2 + 20 + 2


def test_names_that_lead_out_of_a_folder_are_left_out(scene, monkeypatch):
    """A share's server is not this machine: what it calls a file must not become a path here."""
    real = scene.share.list
    evil = [Entry("..", 0, True), Entry("../../evil", 1, False), Entry(".", 0, True)]
    scene.share.write(f"{LOGS}/stdout.txt", b"log")
    monkeypatch.setattr(scene.share, "list", lambda path: evil + real(path))
    notes = Logs(scene.client, scene.job).send(complete=True)
    assert len(notes) == 3 and "'../../evil'" in notes[1]
    assert [path.name for path in (scene.artifacts / "logs").iterdir()] == ["stdout.txt"]


def test_names_are_as_ranks_wrote_them(scene, azure, tmp_path):
    """Azure takes no colon; rclone, by which nodes mount a share, writes another letter for it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if shutil.which("rclone", path=path) is None:
        pytest.skip("rclone is not installed")
    files = ["a:b/10:30?.h5", "c \uff1a.txt", "dot.", "plain.txt"]
    local = tmp_path / "rank"
    for name in files:
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_text(name)
    name = scene.share.url.rpartition("/")[2]
    settings = {"TYPE": "azurefiles", "SHARE_NAME": name, "SAS_URL": f"{azure.endpoint}?{azure.sas(name)}"}
    environment = {f"RCLONE_CONFIG_A_{key}": value for key, value in settings.items()}
    argv = ["rclone", "--config", "/dev/null", "copy", str(local), f"a:{OUTPUTS}/run 1:2"]
    subprocess.run(argv, env={**os.environ, **environment, "PATH": path}, check=True)
    plan = scene.job.plan
    volumes = (replace(plan.volumes[0], how="rclone"),)
    directories = (replace(plan.output_directories[0], path_suffix="run 1:2"),)
    scene.job.plan = replace(plan, volumes=volumes, output_directories=directories)
    assert scene.outputs().send() == []
    for name in files:
        assert (scene.artifacts / "outputs" / "A" / name).read_text() == name
    with local_copy(scene.job, f"/mnt/share/{OUTPUTS}/run 1:2/{files[0]}") as file:
        assert file.read_text() == files[0]


def test_one_file_that_cant_be_had_costs_no_other(scene, monkeypatch):
    for name in ("a", "b"):
        scene.share.write(f"{OUTPUTS}/{name}", name.encode())
    real = scene.share.list
    more = [Entry("gone", 4, False), Entry("長" * 200, 1, False)]  # Azure counts letters
    monkeypatch.setattr(scene.share, "list", lambda path: more + real(path) if path == OUTPUTS else real(path))
    notes = scene.outputs().send()
    assert len(notes) == 2 and "長長" in notes[0] and "gone" in notes[1]
    assert sorted(path.name for path in (scene.artifacts / "outputs" / "A").iterdir()) == ["a", "b"]


def test_copies_go_with_their_owner(scene, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logs = Logs(scene.client, scene.job)
    assert list(tmp_path.glob("batchai-logs-*"))
    del logs
    assert not list(tmp_path.glob("batchai-logs-*"))
