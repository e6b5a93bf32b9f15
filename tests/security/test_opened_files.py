"""Odd files in place of a job folder's files hang nobody and fill no memory.

A FIFO without a writer blocks who opens it, and one who may not be stopped for ever; a sparse file of 6 GiB costs nothing to
make; a few kilobytes can be inflated to hundreds of megabytes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_folder import FOLDER, JobFolder
from node_world import Cluster
from plans import toy_plan
from relay_world import Time
from waiting import wait_for

from mlflow_batchai.admin.gc import Age, jobs, staged
from mlflow_batchai.agent import protocol, records
from mlflow_batchai.errors import ShareError
from mlflow_batchai.job import places
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.job.sent import SentFiles, Stamp
from mlflow_batchai.storage.directory import DirectoryShare

BEAT = {"k": "beat", "t": 1}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")


BOMB = zlib.compress(protocol.encode([{"k": "log", "x": "a" * (200 << 20)}]), 9)


def named_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's address may have 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


ODD: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "FIFO behind a link": lambda path: (os.mkfifo(path.with_name(f".{path.name}")), path.symlink_to(f".{path.name}")),
    "sparse": lambda path: (path.touch(), os.truncate(path, 6 << 30)),
    "one byte too many": lambda path: (path.touch(), os.truncate(path, protocol.longest(str(path)) + 1)),
    "folder": Path.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a private file": lambda path: path.symlink_to("/etc/shadow"),
    "socket": named_socket,
    "device": lambda path: os.mknod(path, 0o20666, os.makedev(1, 5)),  # /dev/zero
    "deflated": lambda path: path.write_bytes(BOMB),
}
KINDS = [pytest.param(kind, marks=needs_root) if kind == "device" else kind for kind in ODD]


def put(kind: str, path: Path) -> None:
    """Put something in place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    ODD[kind](path)


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Who waits for what lies there is interrupted: by a signal, since nothing else ends an open of a FIFO."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def made(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "share", nodes=2)
    made.announce(0)
    made.segment(0, BEAT)
    return made


# The client.


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_reads_on(made: JobFolder, kind: str, clock: Time) -> None:
    """In place of every file that others write at once: each counts as damaged, and the job goes on and ends."""
    root, paths = made.share.root, made.paths
    made.share.claim(paths.lease(1))
    odd = [paths.request("1"), paths.announce(1), paths.exit(1), paths.spec, paths.code, paths.submitted, paths.cursor(1)]
    for path in (*odd, paths.sent(1), paths.network, paths.rendezvous, paths.segment("agent-0", 1)):
        put(kind, root / path)
    made.segment(2, BEAT)
    made.write(paths.request("2"), protocol.request_record(protocol.CANCEL, 1, "me", "enough"))
    job = made.job
    assert job.state().execution_state == "terminating"
    assert [request["why"] for request in job.requests()] == ["enough"]
    assert (job.document(), job.changes(), job.handle()) == ({}, {}, None)
    assert list(job.snapshot().announces) == [0]
    # A holder that has said nothing: the next one takes over.
    assert Lease(job).view().state is LeaseState.UNKNOWN and Lease(job, clock.clock, clock.sleep).acquire()
    assert not SentFiles(job, 2).has("outputs/x", Stamp(1, 1.0))
    found = [record for _, _, events in EventReader(job).read(to_the_end=True) for record in events]
    assert [record["k"] for record in found] == ["beat", "skipped", "beat"]
    assert found[1]["files"] == 1, "and it is told of in the run's notes"


@pytest.mark.parametrize("kind", KINDS)
def test_a_verdict_can_still_be_given(made: JobFolder, kind: str, clock: Time) -> None:
    """What lies in its place is replaced, but for a folder: of that a sentence is said."""
    made.share.claim(made.paths.verdict)
    put(kind, made.share.root / made.paths.verdict_file)
    job = made.job
    given = protocol.verdict_record(protocol.FAILED, "follower", reason="lost")
    assert not job.state().ended and not job.claim_verdict(given)
    clock.now += records.SETTLE_SECONDS
    if kind == "folder":
        with pytest.raises(ShareError, match=r"verdict\.json"):
            job.finish_claim(given)
    else:
        job.finish_claim(given)
        assert job.state().reason == "lost"


@pytest.mark.parametrize("kind", KINDS)
def test_gc_judges_others(made: JobFolder, tmp_path: Path, kind: str) -> None:
    """A job whose plan can't be read stays, with a sentence, and holds up none of the others."""
    other = FOLDER.replace("/toy/", "/other/")
    put(kind, made.share.root / other / "batchai" / "plan.json")
    put(kind, made.share.root / ".batchai" / "prefixes" / "0")
    said: list[str] = []
    found = places.find(made.share)
    going = jobs.find(made.share, found, Age(0.0), (), said.append)
    assert found == [other, FOLDER] and going == {}
    assert len(said) == 1 and f"{other} stays" in said[0]
    with pytest.raises(ShareError, match="can't be read"):
        staged.named_hashes(made.share, found)


def test_deleting_leaves_what_links_lead_to(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"x")
    share = DirectoryShare(tmp_path / "share")
    share.write("job/deep/file", b"x")
    for path in ("job/deep/link", "job/link", "link"):
        (share.root / path).symlink_to(tmp_path / "precious")
    for path in ("link/file", "job/link/file", "job/deep/link/../link/file"):
        with pytest.raises(ShareError):
            share.delete(path)
    share.delete("job")
    share.delete("link")
    assert (tmp_path / "precious" / "file").exists() and share.list("") == []


# Memory.


def memory_of(act: Callable[[], Any]) -> float:
    """The most that it takes at a time, in MB."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def inflating(content: Callable[[], bytes]) -> Callable[[], object]:
    data = content()

    def act() -> None:
        with pytest.raises(protocol.TornFileError):
            protocol.decode(data)

    return act


@pytest.mark.parametrize(
    "content",
    [
        lambda: BOMB,
        lambda: zlib.compress(b"\n" * (200 << 20), 9),
        lambda: zlib.compress(b'{"k":"log"' + b"[" * (200 << 20), 9),
        lambda: zlib.compress(bytes(200 << 20), 9)[:-9],
        lambda: zlib.compress(zlib.compress(bytes(200 << 20), 9), 9),
    ],
    ids=["a line", "empty lines", "brackets", "cut", "twice"],
)
def test_inflating_stops(content: Callable[[], bytes]) -> None:
    act = inflating(content)
    assert memory_of(act) < 30


def test_a_segment_may_be_as_long_as_agents_make_them() -> None:
    """And no longer: a line of the longest kind, as many as go."""
    line = {"k": "log", "x": "a" * (protocol.LONGEST_LINE - 30)}
    for compress in (False, True):
        assert protocol.decode(protocol.encode([line] * 7, compress)) == [line] * 7
        for many in ([line] * 9, [{"k": "log", "x": "a" * protocol.LONGEST_LINE}]):
            with pytest.raises(protocol.TornFileError, match="too long"):
                protocol.decode(protocol.encode(many, compress))


@pytest.mark.parametrize("kind", ["sparse", "deflated", "FIFO"])
def test_looking_at_a_job_takes_little_memory(made: JobFolder, kind: str, clock: Time) -> None:
    for path in (made.paths.request("1"), made.paths.segment("agent-0", 1), made.paths.cursor(1), made.paths.exit(0)):
        put(kind, made.share.root / path)

    def look() -> None:
        job = made.job
        job.state()
        Lease(job).view()
        list(EventReader(job).read(to_the_end=True))

    assert memory_of(look) < 60


# Agents.


@pytest.fixture
def cluster(tmp_path: Path, agent_pyz: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, toy_plan, agent_pyz)
    yield made
    made.close()


# Run by a rank, in the job folder: something odd wherever an agent reads or writes.
PUT = """
import os, socket, sys
kind, node, sequences = sys.argv[1], int(sys.argv[2]), range(40)
here = "batchai/attempts/1"
os.makedirs("batchai/requests", exist_ok=True)
def put(path):
    os.path.lexists(path) and os.unlink(path)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "sparse":
        open(path, "wb").truncate(6 << 30)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "link":
        os.symlink("/dev/zero", path)
    elif kind == "socket":
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fchdir(folder)
        socket.socket(socket.AF_UNIX).bind(os.path.basename(path))
        os.chdir(top)
top = os.getcwd()
put("batchai/requests/odd.json")
put(here + "/nodes/%d/exit.json" % node)
put(here + "/reserve")
put("stdouterr/stderr.txt")
for sequence in sequences:
    path = here + "/events/0000/agent-%d-%08d.jsonl" % (node, sequence + 30)
    put(path)
"""


@pytest.mark.parametrize("kind", ["FIFO", "sparse", "folder", "link", "socket"])
def test_agents_end_their_job_and_free_their_nodes(cluster: Cluster, kind: str) -> None:
    put = cluster.folder / "put.py"
    put.write_text(PUT)
    where = '"$AZ_BATCHAI_MOUNT_ROOT/share/$FOLDER"'
    command = f"cd {where} && {sys.executable} {put} {kind} $BATCHAI_RANK && echo put && sleep 600"
    folder = f"workspaces/default/experiments/exp/jobs/toy/{os.getpid():x}j1"
    job = cluster.submit(command, environmentVariables=[{"name": "FOLDER", "value": folder}])
    wait_for(lambda: job.log("stdout.txt") == "put\n", what=job.said)
    job.cancel("me", "enough")
    verdict = job.wait()
    assert verdict["terminated"] and verdict["errors"][0]["code"] == "JobTerminate", job.said()
    assert not job.processes()
    # The node is free.
    assert cluster.submit("echo next").wait()["executionState"] == "succeeded"
