"""A job's files on the terminal: from one attempt to the next, and whatever becomes of the terminal."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure_server import AzureServer
from job_folder import FOLDER, JobFolder
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.cli import file
from mlflow_batchai.errors import JobError, NotFoundError, UsageError
from mlflow_batchai.follower import detached
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job import lease
from mlflow_batchai.storage import credentials, open_share
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import directories
from mlflow_batchai.tracking.runs import Tracking


class Attempts(JobFolder):
    """A job folder with attempts, as their agents write it."""

    @property
    def submitted(self) -> Submitted:
        return Submitted(self.job, "r" * 32, Tracking("", {}))

    def log(self, attempt: int, text: str, name: str = "stdout.txt") -> None:
        self.share.write(f"{protocol.JobPaths(FOLDER, attempt).stdouterr}/{name}", text.encode())

    def end(self, attempt: int, following: int | None = None) -> None:
        if attempt > 1:
            self.begin(attempt)
        self.verdict(protocol.QUEUED, next=following, reason="it makes room") if following else self.verdict()


@pytest.fixture(autouse=True)
def _followers(monkeypatch: pytest.MonkeyPatch) -> list[Submitted]:
    """Jobs that got a follower: none is started."""
    found: list[Submitted] = []

    def start(submitted: Submitted) -> None:
        found.append(submitted)
        submitted.starts += 1

    monkeypatch.setattr(detached, "start_follower", start)
    return found


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path / "share", name="toy")


def test_a_stream_goes_on_with_the_next_attempt(attempts: Attempts, capsys: pytest.CaptureFixture[str]) -> None:
    """What the first attempt wrote last is shown, then the whole of the second."""
    attempts.log(1, "one\n")
    pieces = file.growing(attempts.submitted, directories.LOGS, "./stdout.txt")
    assert next(pieces) == "one\n"
    attempts.log(1, "one\nlast of the first\n")
    attempts.end(1, following=2)
    assert next(pieces) == "last of the first\n"
    attempts.log(2, "two\n")
    attempts.end(2)
    assert "".join(pieces) == "two\n"
    assert "job toy goes on with attempt 2" in capsys.readouterr().err
    # Who comes later begins with the present one.
    assert "".join(file.growing(attempts.submitted, directories.LOGS, "stdout.txt")) == "two\n"


def test_a_job_that_nobody_relays_gets_a_follower(
    attempts: Attempts, _followers: list[Submitted], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its nodes and its follower are lost: who reads its output is not left waiting for ever."""
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.0)
    attempts.log(1, "one\n")
    pieces = file.growing(attempts.submitted, directories.LOGS, "stdout.txt")
    assert (next(pieces), len(_followers)) == ("one\n", 1)
    monkeypatch.setattr(detached, "FOLLOWER_STARTS", 2)
    sentence = "nobody relays job toy, so its end may stay unseen: the process that relays job toy into MLflow keeps"
    said: list[str] = []

    def ends() -> None:
        """As a follower that finds the nodes gone does, once the reader was told."""
        wait_for(lambda: said.append(capsys.readouterr().err) or sentence in "".join(said))
        attempts.end(1)

    ending = threading.Thread(target=ends)
    ending.start()
    assert ("".join(pieces), len(_followers)) == ("", 2)
    ending.join()
    said.append(capsys.readouterr().err)
    assert "".join(said).count(sentence) == 1


def test_a_job_that_has_ended_needs_no_follower_to_be_read(attempts: Attempts, _followers: list[Submitted]) -> None:
    attempts.log(1, "one\n")
    attempts.end(1)
    assert "".join(file.growing(attempts.submitted, directories.LOGS, "stdout.txt")) == "one\n"
    assert _followers == []


def test_a_file_that_never_came(attempts: Attempts, capsys: pytest.CaptureFixture[str]) -> None:
    attempts.end(1)
    with pytest.raises(JobError, match=r"^The file nope\.txt not found for the completed job\.$"):
        list(file.growing(attempts.submitted, directories.LOGS, "nope.txt"))
    assert list(file.growing(attempts.submitted, directories.LOGS, "stdout.txt", required=False)) == []
    assert "job toy has written no stdout.txt" in capsys.readouterr().err


def test_an_output_directory_is_the_same_for_all_attempts(tmp_path: Path) -> None:
    directory = {"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": None}
    attempts = Attempts(tmp_path / "share", name="toy", outputDirectories=[directory])
    attempts.share.write(f"{FOLDER}/outputs/notes.txt", b"one\n")
    pieces = file.growing(attempts.submitted, "MODEL", "notes.txt")
    assert next(pieces) == "one\n"
    attempts.end(1, following=2)
    attempts.share.write(f"{FOLDER}/outputs/notes.txt", b"one\ntwo\n")
    attempts.end(2)
    assert "".join(pieces) == "two\n"


@pytest.mark.parametrize(
    ("path", "words"), [("./../x", "no file of"), ("./", "no file of"), ("./folder", "'./folder' is a folder of stdouterr")]
)
def test_what_can_be_no_file_is_not_waited_for(attempts: Attempts, path: str, words: str) -> None:
    attempts.log(1, "x", "folder/text")
    with pytest.raises(UsageError, match=words):
        next(file.growing(attempts.submitted, directories.LOGS, path))


def test_a_stream_that_begins_anew_says_so(attempts: Attempts, capsys: pytest.CaptureFixture[str]) -> None:
    attempts.log(1, "one\n")
    pieces = file.growing(attempts.submitted, directories.LOGS, "stdout.txt")
    assert next(pieces) == "one\n"
    attempts.log(1, "another\n")
    assert next(pieces) == "another\n"
    attempts.end(1)
    assert list(pieces) == []
    assert "batchai: stdout.txt was cut or replaced; it begins anew\n" in capsys.readouterr().err


def test_a_share_where_every_look_costs_a_request(azure: AzureServer) -> None:
    """An Azure file share: the end is seen in the index."""
    azure.share("streams")
    credentials.remember(azure.account, Credential(azure.key))
    attempts = Attempts(open_share(azure.url("streams")), name="toy", board=True)
    attempts.log(1, "one\n")
    pieces = file.growing(attempts.submitted, directories.LOGS, "stdout.txt")
    assert next(pieces) == "one\n"
    timer = threading.Timer(0.1, attempts.log, (1, "one\ntwo\n"))
    timer.start()
    assert next(pieces) == "two\n"
    timer.join()
    attempts.log(1, "one\ntwo\nlast\n")
    attempts.submitted.job.claim_verdict(protocol.verdict_record(protocol.SUCCEEDED, "agent-0", 0))
    azure.reset()
    assert "".join(pieces) == "last\n"
    looks = [one.path for one in azure.requests() if one.method == "GET" and one.path.endswith("stdout.txt")]
    assert len(looks) < 40


def test_ctrl_c_leaves_the_job_running(capsys: pytest.CaptureFixture[str]) -> None:
    def pieces() -> Iterator[str]:
        yield "one\n"
        raise KeyboardInterrupt

    file.show_text(pieces(), "toy")
    assert capsys.readouterr() == ("one\n", "\nbatchai: job toy goes on\n")


class Closed(io.StringIO):
    """Standard output whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_reader_that_leaves_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", Closed())
    file.show_text(iter(["one\n"]), "toy")
    assert capsys.readouterr().err == ""


def test_names_that_rclone_spells_otherwise(tmp_path: Path) -> None:
    """What a rank calls ``epoch:1.h5`` is found by that name, and shown by it."""
    share = DirectoryShare(tmp_path)
    share.write("outputs/epoch\uff1a1.h5", b"x")
    share.write("outputs/more\uff1f/a", b"y")
    place = directories.Directory("MODEL", share, "outputs", rclone=True)
    assert list(place.entries(".")) == ["epoch:1.h5", "more?"]
    assert share.read(place.inside("epoch:1.h5")) == b"x"
    assert list(place.entries("more?")) == ["more?/a"]
    with pytest.raises(NotFoundError, match=r"there is no 'less\?' in MODEL; there is: epoch:1\.h5, more\?"):
        place.entries("less?")
