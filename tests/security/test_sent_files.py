"""Odd files in place of a job's files bring none of this machine's own files into the run."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_folder import FOLDER, JobFolder
from mlflow.tracking import MlflowClient

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking import directories, runs
from mlflow_batchai.tracking.artifacts import Folder
from mlflow_batchai.tracking.logs import Logs
from mlflow_batchai.tracking.models.job_model import local_copy
from mlflow_batchai.tracking.script_calls.files import NotThereError, local

SECRET = "the private key of who submitted"
LOGS, OUTPUTS, ARTIFACTS = f"{FOLDER}/stdouterr", f"{FOLDER}/outputs/m", f"{FOLDER}/artifacts/run"


class Scene:
    """A job on a share of this machine, its run, and a private file of the one who submitted it."""

    def __init__(self, tmp_path: Path, tracking: str) -> None:
        self.client: MlflowClient = runs.client(runs.absolute(tracking, tmp_path))
        where = None if tracking.startswith("http") else (tmp_path / "artifacts").as_uri()
        experiment = self.client.create_experiment(f"e{time.monotonic_ns()}", artifact_location=where)
        self.run_id = runs.create(self.client, experiment, {runs.TAG_JOB: "toy"}, {}, None, None).info.run_id
        prefix = "$AZ_BATCHAI_MOUNT_ROOT/share"
        self.made = JobFolder(
            tmp_path / "share",
            runId=self.run_id,
            outputDirectories=[{"id": "M", "pathPrefix": prefix, "pathSuffix": "m"}],
        )
        self.root = self.made.share.root
        self.private = tmp_path / "private"
        self.private.mkdir()
        (self.private / "key").write_text(SECRET)
        # Of another job on the same share, and what lies on it for nobody.
        other = self.root / FOLDER.replace("toy", "other")
        (other / "outputs").mkdir(parents=True)
        (other / "outputs" / "theirs").write_text(SECRET)
        for folder in (LOGS, OUTPUTS, ARTIFACTS):
            (self.root / folder).mkdir(parents=True)
            (self.root / folder / "file").write_text("of the job")

    def folder(self, path: str = OUTPUTS) -> Folder:
        return Folder(self.client, self.made.job, self.made.share, path, "sent")

    def send(self, folder: Folder | None = None, between: Callable[[], object] = lambda: None) -> list[str]:
        """Send a folder, with something done after it was looked at; its notes."""
        folder = folder or self.folder()
        files = folder.look()
        between()
        list(folder.send(files))
        return folder.notes

    def sent(self, path: str = "sent") -> dict[str, str]:
        """The run's artifacts."""
        found = {}
        for entry in self.client.list_artifacts(self.run_id, path):
            if entry.is_dir:
                found |= self.sent(entry.path)
            else:
                found[entry.path] = Path(self.client.download_artifacts(self.run_id, entry.path)).read_text()
        return found


@pytest.fixture
def scene(tmp_path: Path, store_template: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.chdir(tmp_path)
    shutil.copy(store_template, tmp_path / "m.db")
    return Scene(tmp_path, "sqlite:///m.db")


def folder_behind_a_link(scene: Scene, path: Path) -> None:
    path.parent.rename(path.parent.with_name("aside"))
    (scene.private / "file").write_text(SECRET)
    path.parent.symlink_to(scene.private)


def named_socket(scene: Scene, path: Path) -> None:
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


THEIRS = Path(FOLDER.replace("toy", "other"), "outputs", "theirs")
SWAPS: dict[str, Callable[[Scene, Path], object]] = {
    "link": lambda scene, path: path.symlink_to(scene.private / "key"),
    "relative link": lambda scene, path: path.symlink_to(os.path.relpath(scene.private / "key", path.parent)),
    "link to another job": lambda scene, path: path.symlink_to(scene.root / THEIRS),
    "folder behind a link": folder_behind_a_link,
    "hard link": lambda scene, path: (os.link(scene.private / "key", path), os.chown(path, 12345, 12345)),
    "FIFO": lambda scene, path: os.mkfifo(path),
    "folder": lambda scene, path: path.mkdir(),
    "socket": named_socket,
    "device": lambda scene, path: os.mknod(path, 0o20666, os.makedev(1, 5)),
}


def swap(scene: Scene, kind: str, name: str = f"{OUTPUTS}/file") -> None:
    """Put something else in a file's place."""
    path = scene.root / name
    path.rename(path.with_name("aside")) if kind == "rename" else path.unlink()
    if kind in SWAPS:
        SWAPS[kind](scene, path)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others and make devices")


@needs_root
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [*SWAPS, "gone", "rename"])
def test_a_file_that_was_swapped_after_it_was_looked_at(scene: Scene, kind: str) -> None:
    notes = scene.send(between=lambda: swap(scene, kind))
    assert scene.sent() == {} and len(notes) == 1 and "not sent: file (" in notes[0], notes


@needs_root
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SWAPS)
def test_a_file_that_lies_there(scene: Scene, kind: str) -> None:
    swap(scene, kind)
    notes = scene.send()
    assert scene.sent() == {}
    assert bool(notes) is ("link" in kind), "what is no file was never sent, and not told of"


@pytest.mark.parametrize("store", ["local", "server"])
@pytest.mark.parametrize("kind", ["link", "relative link", "link to another job"])
def test_what_is_sent_is_what_was_opened(
    request: pytest.FixtureRequest, tmp_path: Path, scene: Scene, store: str, kind: str
) -> None:
    """Swapped at the last moment, when the file has been checked and MLflow is about to open it."""
    if store == "server":
        shutil.rmtree(tmp_path / "share")
        shutil.rmtree(tmp_path / "private")
        scene = Scene(tmp_path, request.getfixturevalue("server").url)
    real = scene.client.log_artifact

    def log_artifact(run_id: str, file: str, artifact: str | None = None) -> None:
        swap(scene, kind)
        real(run_id, file, artifact)

    scene.client.log_artifact = log_artifact  # type: ignore[method-assign]
    assert scene.send() == []
    assert scene.sent() == {"sent/file": "of the job"}


@pytest.mark.parametrize("kind", ["link", "relative link", "link to another job", "folder behind a link"])
def test_logs_too(scene: Scene, kind: str) -> None:
    swap(scene, kind, f"{LOGS}/file")
    (note,) = Logs(scene.client, scene.made.job).send(complete=True)
    assert "not sent" in note and scene.sent("logs") == {}


@pytest.mark.parametrize("kind", ["link", "relative link", "link to another job", "folder behind a link"])
def test_what_scripts_have_logged_too(scene: Scene, kind: str) -> None:
    with local(scene.made.job, "run/file", 10) as file:
        swap(scene, kind, f"{ARTIFACTS}/file")
        assert file.read_text() == "of the job" and file.name == "file"
    with pytest.raises(NotThereError), local(scene.made.job, "run/file", None):
        pass


@pytest.mark.parametrize("kind", ["link", "relative link", "link to another job", "folder behind a link"])
def test_a_model_too(scene: Scene, kind: str) -> None:
    path = f"/mnt/share/{OUTPUTS}/file"
    with local_copy(scene.made.job, path) as file:
        swap(scene, kind)
        assert file.read_text() == "of the job" and not file.is_symlink()
    with pytest.raises(ModelError, match="is not there, or a link out"), local_copy(scene.made.job, path):
        pass


def test_a_models_folder_is_looked_at_where_nobody_can_change_it(scene: Scene) -> None:
    path, folder = f"/mnt/share/{OUTPUTS}/net", scene.root / OUTPUTS / "net"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "weights").write_text("weights")
    (folder / "same").symlink_to("data/weights")
    with local_copy(scene.made.job, path) as copy:
        (folder / "data" / "weights").unlink()
        (folder / "data" / "weights").symlink_to(scene.private / "key")
        assert {file.name: file.read_text() for file in copy.rglob("*") if file.is_file()} == {
            "weights": "weights",
            "same": "weights",
        }
    with pytest.raises(ModelError, match="data/weights in it is a link out"), local_copy(scene.made.job, path):
        pass


def test_links_of_a_job_to_its_own_files_work(scene: Scene) -> None:
    """What many scripts make: the newest checkpoint has a name of its own."""
    here = scene.root / OUTPUTS
    (here / "epoch-3").mkdir()
    (here / "epoch-3" / "weights").write_text("w")
    (here / "latest").symlink_to("epoch-3/weights")
    (here / "absolute").symlink_to(here / "epoch-3" / "weights")
    (here / "folder").symlink_to(here / "epoch-3")
    (here / "log").symlink_to(scene.root / LOGS / "file")
    assert scene.send() == []
    own = {"sent/file": "of the job", "sent/log": "of the job"}
    assert scene.sent() == own | dict.fromkeys(
        ("sent/absolute", "sent/latest", "sent/epoch-3/weights", "sent/folder/weights"), "w"
    )
    place = directories.directory(scene.made.job, "M")
    assert [entry[:3] for entry in place.entries("folder").values()] == [("weights", 1, False)]
    assert place.entries("latest")["latest"].size == 1


@pytest.mark.timeout(60)
def test_links_that_multiply_end(scene: Scene) -> None:
    """Two links a folder, thirty deep, would be a thousand million names for one file."""
    here = scene.root / OUTPUTS
    for level in range(30):
        (here / f"d{level}").mkdir()
        for name in ("x", "y"):
            (here / f"d{level}" / name).symlink_to(here / f"d{level + 1}")
    (here / "d30").mkdir()
    (here / "d30" / "file").write_text("x")
    folder = scene.folder()
    assert len(folder.look()) < 2000 and "it lies too deep" in folder.notes[0]


@pytest.mark.timeout(60)
def test_folders_that_lie_deep_and_chains_of_links_end(scene: Scene) -> None:
    path = scene.root / OUTPUTS
    for _ in range(300):
        path = path / "d"
        path.mkdir()
    (path / "file").write_text("deep")
    here = scene.root / OUTPUTS
    for number in range(3000):
        (here / f"l{number}").symlink_to(f"l{number + 1}")
    (here / "l3000").symlink_to(scene.private / "key")
    folder = scene.folder()
    assert list(folder.look()) == ["file"]
    assert "links out of the share" in folder.notes[0] and "it lies too deep" in folder.notes[1]


@pytest.mark.parametrize("name", ["volume", "deep/er"])
def test_a_volume_on_the_control_share_that_becomes_a_link(scene: Scene, name: str) -> None:
    """Its folder lies where ranks can write: the client finds it from the control share's own root."""
    plan: dict[str, Any] = scene.made.plan
    address = f"{scene.made.share.url}/{name}"
    plan["volumes"].append({"scope": "cluster", "path": "v", "kind": "link", "share": address})
    plan["outputDirectories"] = [{"id": "V", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/v", "pathSuffix": ""}]
    scene.made.write(scene.made.paths.plan, plan)
    (scene.private / FOLDER / "outputs").mkdir(parents=True)
    (scene.private / FOLDER / "outputs" / "key").write_text(SECRET)
    (scene.root / name).parent.mkdir(exist_ok=True)
    (scene.root / name).symlink_to(scene.private)
    job = scene.made.job
    folder = Folder(scene.client, job, *job.place(address, f"{FOLDER}/outputs"), "sent")
    assert "behind a link" in "".join(scene.send(folder)) and scene.sent() == {}
    assert directories.files(directories.directory(job, "V")) == {}
