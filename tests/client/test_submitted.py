"""A submitted job as a Python object, over a job folder that agents and a relay write."""

from __future__ import annotations

import html
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_folder import JobFolder

import mlflow_batchai
from mlflow_batchai.agent import protocol
from mlflow_batchai.client import streaming, submitted
from mlflow_batchai.client.submitted import SubmittedJob
from mlflow_batchai.errors import JobError, NotFoundError, StillRunningError
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import directories, runs


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Submitted]:
    """Jobs that somebody has seen to being relayed; no process is started."""
    found: list[Submitted] = []
    monkeypatch.setattr(submitted, "keep_follower", found.append)
    monkeypatch.setattr("mlflow_batchai.client.runner.keep_follower", found.append)
    return found


def job_of(made: JobFolder, uri: str = "http://tracking:5000") -> SubmittedJob:
    return SubmittedJob(Submitted(made.job, "r" * 32, runs.absolute(uri, Path("/"))))


def relayed(made: JobFolder) -> None:
    lease = Lease(made.job)
    assert lease.acquire()
    lease.save({}, finished=True)


def test_the_end_is_told_when_the_run_is_complete(folder: Callable[..., JobFolder], kept: list[Submitted]) -> None:
    made = folder(nodes=1)
    job = job_of(made)
    assert (job.status, job.reason) == ("SCHEDULED", None)
    made.announce(0)
    assert job.status == "RUNNING"
    made.verdict(protocol.FAILED, reason="rank 0 failed")
    assert (job.status, kept != []) == ("RUNNING", True), "its last results are on their way"
    with pytest.raises(StillRunningError, match=r"has not ended within 0 s; it goes on"):
        job.wait(0)
    relayed(made)
    assert (job.status, job.reason) == ("FAILED", "rank 0 failed")


def test_an_end_that_nobody_can_bring_to_mlflow(folder: Callable[..., JobFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks until it has ended does not look for ever."""

    def fail(submitted: Submitted) -> None:
        raise JobError("the follower keeps ending")

    monkeypatch.setattr(submitted, "keep_follower", fail)
    made = folder(nodes=1)
    made.verdict()
    assert job_of(made).status == "FINISHED"


def test_a_job_that_goes_on_with_another_attempt(folder: Callable[..., JobFolder], kept: list[Submitted]) -> None:
    made = folder(nodes=1)
    job = job_of(made)
    made.announce(0)
    assert job.status == "RUNNING"
    made.verdict(protocol.QUEUED, next=2)
    assert (job.status, job.reason) == ("SCHEDULED", None)
    made.begin(2)
    made.announce(0)
    made.share.write(f"{made.paths.stdouterr}/stdout.txt", b"second\n")
    assert (job.status, list(job.logs())) == ("RUNNING", ["second"])


def test_cancel_in_time(folder: Callable[..., JobFolder], kept: list[Submitted]) -> None:
    """What was asked for stays asked for, though it takes longer than somebody waits."""
    made = folder(nodes=1)
    job = job_of(made)
    with pytest.raises(TimeoutError):
        job.cancel(0)
    (request,) = made.job.requests()
    assert (request["kind"], request["why"]) == (protocol.CANCEL, "cancel()")


def test_a_notebook_shows_it(folder: Callable[..., JobFolder], kept: list[Submitted], tmp_path: Path) -> None:
    made = folder(nodes=1, name='a <b> & "share"')
    job = SubmittedJob(Submitted(made.job, 'r"><script>', runs.absolute("http://tracking:5000", Path("/"))))
    shown = job._repr_html_()
    assert "<script>" not in shown and "SCHEDULED" in shown and html.escape("toy-0123") in shown
    assert 'href="http://tracking:5000/#/experiments/0/runs/r%22%3E%3Cscript%3E?workflowType=machine_learning"' in shown
    assert repr(job) == '<SubmittedJob toy-0123, run r"><script>>'
    (tmp_path / 'a <b> & "share"').rename(tmp_path / "away")
    (tmp_path / 'a <b> & "share"').write_text("no folder")
    shown = job._repr_html_()
    assert "a &lt;b&gt; &amp;" in shown and "<b>" not in shown, "a share that is away is told of, and harms no cell"


def test_used_by_many_threads(folder: Callable[..., JobFolder], kept: list[Submitted]) -> None:
    """One waits, others look, while it all happens."""
    made = folder(nodes=8)
    job = job_of(made)
    faults: list[BaseException] = []
    over = threading.Event()

    def until_over(look: Callable[[], Any]) -> None:
        try:
            while not over.is_set():
                look()
            look()
        except BaseException as error:
            faults.append(error)

    looks: list[Callable[[], Any]] = [lambda: job.status, lambda: list(job.logs()), job.outputs, job._repr_html_]
    threads = [threading.Thread(target=until_over, args=(look,)) for look in looks]
    waits = threading.Thread(target=job.wait)
    for thread in (*threads, waits):
        thread.start()
    for node in range(8):
        made.announce(node)
        made.share.write(f"{made.paths.stdouterr}/stdout-{node}.txt", b"x\n")
        made.exit(node)
    made.verdict()
    relayed(made)
    waits.join(60)
    over.set()
    for thread in threads:
        thread.join(60)
    assert (faults, job.status) == ([], "FINISHED")


def test_lines() -> None:
    assert list(streaming.lines(iter(["a", "b\n", "\nc\nd", "", "e"]))) == ["ab", "", "c", "de"]
    assert list(streaming.lines(iter([]))) == list(streaming.lines(iter([""]))) == []


def test_outputs_stay_in_the_share(folder: Callable[..., JobFolder], kept: list[Submitted], tmp_path: Path) -> None:
    """A rank may put any link there; nothing of this machine is listed or copied by it."""
    place = {"id": "M", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": "m"}
    made = folder(nodes=1, outputDirectories=[place])
    job, directory = job_of(made), directories.directory(made.job, "M")
    assert job.outputs() == {}
    assert isinstance(directory.share, DirectoryShare)
    root = directory.share.local(directory.inside(""))
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "weights.h5").write_bytes(b"12345")
    (tmp_path / "secret").write_text("secret")
    (root / "secret").symlink_to(tmp_path / "secret")
    (root / "round").symlink_to(root)
    (root / "same").symlink_to(root / "sub" / "weights.h5")
    assert job.outputs() == {"M/same": 5, "M/sub/weights.h5": 5}
    assert job.download("M/sub", tmp_path / "to") == tmp_path / "to" / "sub"
    assert (tmp_path / "to" / "sub" / "weights.h5").read_bytes() == b"12345"
    assert job.download("/M/", tmp_path / "to") == tmp_path / "to" / "M"
    assert sorted(path.name for path in (tmp_path / "to" / "M").iterdir()) == ["same", "sub"]
    for path in ("M/secret", "M/../secret", "M/su"):
        with pytest.raises(NotFoundError, match=r"there is: same, sub/weights.h5"):
            job.download(path, tmp_path / "to")


def test_the_package_names_what_it_has() -> None:
    assert set(mlflow_batchai.__all__) <= set(dir(mlflow_batchai))
    assert mlflow_batchai.SubmittedJob is SubmittedJob
    with pytest.raises(AttributeError, match="has no attribute 'submi'"):
        _ = mlflow_batchai.submi  # type: ignore[attr-defined]
    code = "import sys, mlflow_batchai; dir(mlflow_batchai); print('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
