"""The promises of Share (storage/base.py), held against every implementation: a new one adds a fixture."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlflow_batchai.agent import safeopen
from mlflow_batchai.agent.protocol import OBJECTS, identity_path
from mlflow_batchai.errors import ShareError, ShareNotFoundError
from mlflow_batchai.storage import job_file, open_share
from mlflow_batchai.storage.base import identify
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.objects import scan_input, upload

NASTY = ["plain", "two words", "quo'te\"s", "line\nbreak", "hé 世界", "a%20b#c?d", "-dash", "\\back", "$HOME;*", ".hidden"]


# Azure Files takes no " \ : | < > * ? and no control characters.
AZURE_NASTY = ["plain", "two words", "quo'te`s", "a+b&c=d", "hé 世界", "a%20b#c%2Fd", "-dash", "dot.", "$HOME;~{}[]", ".hidden"]


@pytest.fixture
def azure_share(azure, monkeypatch):
    """A folder that isn't there yet of a new share; other processes of the test find the key as we do."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", azure.account)
    monkeypatch.setenv("AZURE_STORAGE_KEY", azure.key)
    name = f"share-{uuid.uuid4().hex}"
    azure.share(name)
    return open_share(azure.url(name, "some%20where/in it"))


@pytest.fixture(params=range(len(NASTY)))
def name(request, share):
    """A name that the share takes though many tools wouldn't."""
    return nasty(share)[request.param]


def nasty(share):
    return NASTY if isinstance(share, DirectoryShare) else AZURE_NASTY


def told(share, folder):
    """What a listing says, without times."""
    return [entry[:3] for entry in share.list(folder)]


def test_1_what_was_written_is_read_whole(share, name):
    path = f"a/{name}/{name}"
    data = bytes(range(256)) * 5000
    share.write(path, data)
    assert share.read(path) == data
    assert share.read(path, 100, 7) == data[100:107]
    assert share.read(path, len(data) - 3) == data[-3:]
    assert share.read(path, len(data) - 3, 50) == data[-3:]
    assert share.read(path, len(data) + 10) == b""
    assert share.read(path, 0, 0) == b""


class Source(io.BytesIO):
    """A file that does something whenever it is read."""

    def __init__(self, data, act=lambda: None):
        super().__init__(data)
        self.act = act

    def read(self, size):
        self.act()
        return super().read(size)


SIZES = [13, 4 << 20, (4 << 20) + 1, 9 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_1_what_is_sent_appears_when_all_of_it_is_there_and_not_before(share, size):
    data = os.urandom(size)

    def look():
        assert share.list("a") == []
        with pytest.raises(ShareNotFoundError):
            share.read("a/x")

    share.send("a/x", Source(data, look), size)
    assert share.read("a/x") == data
    assert told(share, "a") == [("x", size, False)]


@pytest.mark.parametrize("before", [None, b"old"])
@pytest.mark.parametrize("size", [13, 9 << 20])
@pytest.mark.parametrize("change", [-1, 1, 5 << 20, "gone", "fails"])
def test_2_what_cant_be_sent_whole_leaves_what_was_there(share, before, size, change):
    if before is not None:
        share.write("a/x", before)
    if change == "fails":
        with pytest.raises(ZeroDivisionError):
            share.send("a/x", Source(bytes(size), lambda: 1 / 0), size)
        for error in (FileNotFoundError(2, "No such file"), OSError(5, "I/O error"), ValueError("closed file")):

            def fail(error=error):
                raise error

            with pytest.raises(ShareError, match="'a/x'") as caught:
                share.send("a/x", Source(bytes(size), fail), size)
            assert type(caught.value) is ShareError and caught.value.__cause__ is error
    else:
        content = b"" if change == "gone" else os.urandom(size + change)
        with pytest.raises(ShareError, match=f"'a/x' has not the {size} bytes"):
            share.send("a/x", Source(content), size)
    assert told(share, "a") == ([("x", 3, False)] if before else [])
    if before:
        assert share.read("a/x") == before


def test_2_write_replaces_and_never_shows_half(share):
    ones, twos = b"1" * 400_000, b"2" * 300_000
    share.write("x", ones)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            share.write("x", twos)
            share.write("x", ones)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert {share.read("x") for _ in range(50)} <= {ones, twos}
    finally:
        stop.set()
        thread.join()


def test_2_an_empty_file_is_a_file(share):
    share.write("deep/er/x", b"")
    assert (share.read("deep/er/x"), told(share, "deep/er")) == (b"", [("x", 0, False)])


def test_3_one_thread_of_many_gets_a_claim(share, name):
    barrier = threading.Barrier(8)
    won = []

    def claim():
        barrier.wait()
        won.append(share.claim(f"claims/{name}"))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert not share.claim(f"claims/{name}")
    assert told(share, "claims") == [(name, 0, True)]


def test_3_one_process_of_many_gets_a_claim(share):
    code = (
        "import sys; from mlflow_batchai.storage import open_share; share = open_share(sys.argv[1]); sys.stdin.read(1);"
        "print(*[int(share.claim(f'c/{n}')) for n in range(50)])"
    )
    argv = [sys.executable, "-c", code, share.url]
    share.claim("another")
    environment = dict(os.environ)
    if location := getattr(share, "location", None):
        environment["AZURE_STORAGE_CONNECTION_STRING"] = f"AccountName={location.account};FileEndpoint={location.endpoint}"
    processes = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)
    ]
    for process in processes:
        process.stdin.write("x")
        process.stdin.flush()
    rows = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [sum(int(row[n]) for row in rows) for n in range(50)] == [1] * 50


def test_3_a_claim_makes_its_parents_and_can_hold_a_file(share):
    assert share.claim("a/b/c")
    share.write("a/b/c/x", b"1")
    assert not share.claim("a/b/c")
    assert not share.claim("a/b")


def test_4_a_listing_shows_names_sizes_and_kinds_in_order(share):
    names = nasty(share)
    for one in names:
        share.write(f"d/{one}", one.encode())
    share.write("d/z/inside", b"12")
    share.claim("d/claimed")
    expected = [(one, len(one.encode()), False) for one in names] + [("z", 0, True), ("claimed", 0, True)]
    assert told(share, "d") == sorted(expected)
    assert [entry.name for entry in share.list("")] == ["d"]
    assert share.list("d/nowhere") == share.list(f"d/{names[0]}") == []


def test_4_another_opened_at_its_address_sees_the_same(share, name):
    share.write(f"a/{name}", b"1")
    again = open_share(share.url)
    assert again.url == share.url
    assert again.read(f"a/{name}") == b"1"


def test_5_delete(share, name):
    share.write(f"a/{name}/x", b"1")
    share.write("a/keep", b"1")
    share.delete(f"a/{name}")
    share.delete(f"a/{name}")
    share.delete("nowhere/at/all")
    assert told(share, "a") == [("keep", 1, False)]
    share.delete("a/keep")
    assert share.list("a") == []
    share.write("a", b"now a file") if not share.list("") else share.delete("a")


def test_a_file_that_is_touched_is_the_same_and_younger(share):
    share.write("a/file", b"1")
    (before,) = share.list("a")
    assert share.touch("a/file")
    (after,) = share.list("a")
    assert after.modified > before.modified and share.read("a/file") == b"1"
    assert not share.touch("a/none") and not share.touch("none/file")


@pytest.mark.parametrize("path", ["..", "../x", "a/../../x", "a/\0"])
def test_6_no_path_leads_out(share, path):
    many = (lambda: share.write(path, b"x"), lambda: list(share.read_many(["none", path])))
    for call in (*(lambda name=name: getattr(share, name)(path) for name in ("read", "claim", "list", "delete")), *many):
        with pytest.raises(ShareError):
            call()


def test_6_other_failures_name_the_share_and_the_path(share):
    share.write("file", b"1")
    for fails in (
        lambda: share.write("file/below", b"2"),
        lambda: share.claim("file/below"),
        lambda: share.read("file/below/x"),
    ):
        with pytest.raises(ShareError, match="file/below"):
            fails()
    share.claim("folder")
    with pytest.raises(ShareError, match="folder"):
        share.read("folder")


def test_7_many_are_read_in_order_and_those_that_are_missing_passed_over(share):
    names = [f"a/{one}/{one}" for one in nasty(share)]
    for one in names[::2]:
        share.write(one, one.encode())
    wanted = [*reversed(names), "nowhere/at/all", "a/none"]
    assert list(share.read_many(wanted)) == [(path, path.encode()) for path in wanted if path in names[::2]]
    assert list(share.read_many([])) == []


def test_7_many_are_read_as_they_are_taken(share):
    share.write("a/1", b"1")
    found = share.read_many(["a/1", *(f"a/none{number}" for number in range(share.at_once)), "a/2"])
    assert next(found) == ("a/1", b"1")
    share.write("a/2", b"2")
    assert next(found) == ("a/2", b"2")
    found.close()  # a reader may stop
    assert share.read("a/2") == b"2"


def test_7_of_many_what_is_no_file_is_not_there(share):
    share.write("file", b"1")
    share.claim("folder")
    # What lies below a file isn't there; a folder is no file: Azure Files knows none of that name.
    found = list(share.read_many(["file/below", "folder", "file"]))
    assert found[-1] == ("file", b"1") and not any(data for _, data in found[:-1]), found


def test_7_of_many_none_is_read_that_is_too_long(share):
    share.write("long", b"12345")
    share.write("short", b"1234")
    assert list(share.read_many(["long", "short"], 4)) == [("long", b""), ("short", b"1234")]
    assert job_file(share, "none") is None and job_file(share, "a/requests/x.json") is None
    share.write("a/requests/x.json", bytes(64 << 10))
    share.write("a/requests/y.json", bytes((64 << 10) + 1))
    assert [len(job_file(share, f"a/requests/{name}.json")) for name in "xy"] == [64 << 10, 0]


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 11_000_000])
def test_8_a_download_is_the_file_and_nothing_beside_it(share, tmp_path, size):
    data = os.urandom(1 << 20) * (size >> 20) + os.urandom(size & 0xFFFFF)
    share.send("a/big", io.BytesIO(data), size)
    target = tmp_path / "not" / "there" / "yet"
    told = []
    share.download("a/big", target, told.append)
    assert target.read_bytes() == data == share.read("a/big")
    assert sum(told) == size
    assert list(target.parent.iterdir()) == [target]
    share.write("a/big", b"new")
    share.download("a/big", target)
    assert target.read_bytes() == b"new"
    assert [entry.name for entry in share.list("a")] == ["big"]


def test_8_a_download_of_nothing(share, tmp_path):
    with pytest.raises(ShareNotFoundError, match="a/none"):
        share.download("a/none", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_9_many_threads_write_read_list_and_delete(share):
    def work(number):
        folder = f"a/{number % 3}/b{number}"
        for turn in range(5):
            share.write(f"{folder}/{turn}", bytes([number]) * 1000)
        assert [entry.name for entry in share.list(folder)] == list("01234")
        assert {data for _, data in share.read_many(f"{folder}/{turn}" for turn in range(5))} == {bytes([number]) * 1000}
        share.delete(folder)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(24)))
    assert [entry for number in range(3) for entry in share.list(f"a/{number}")] == []


def test_10_a_listing_tells_when_a_file_was_written(share):
    before = time.time()
    share.write("a/first", b"1")
    time.sleep(0.05)
    between = time.time()
    share.send("a/second", io.BytesIO(b"2"), 1)
    share.claim("a/folder")
    found = {entry.name: entry.modified for entry in share.list("a")}
    # What keeps a file stamps it by a clock that ticks every few milliseconds.
    assert before - 0.02 <= found["first"] < between <= found["second"] + 0.02
    assert all(modified <= time.time() for modified in found.values())
    share.write("a/first", b"3")
    assert {entry.name: entry.modified for entry in share.list("a")}["first"] > found["first"]


# The directory.


class Mount:
    """A mount that remembers that a name was missing until its folder is opened (nfs(5): lookupcache, close-to-open)."""

    def __init__(self, monkeypatch, missing):
        self.missing = missing
        self.asked = []
        self.looked = []
        self._open, self._lstat = os.open, os.lstat
        monkeypatch.setattr(safeopen, "OPENAT2", 100_000)  # what the kernel opens at once is not seen here
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "lstat", self.lstat)

    def lstat(self, name, *, dir_fd=None):
        if dir_fd is None:
            return self._lstat(name)
        path = f"{os.path.realpath(f'/proc/self/fd/{dir_fd}')}/{name}"
        self.asked.append(path)
        folder = self.missing.setdefault(os.path.dirname(path), set())
        if path in folder:
            raise FileNotFoundError(2, "No such file or directory", path)
        try:
            return self._lstat(name, dir_fd=dir_fd)
        except FileNotFoundError:
            folder.add(path)
            raise

    def open(self, name, flags, *arguments, **named):
        descriptor = self._open(name, flags, *arguments, **named)
        # A folder that is only passed on the way is not asked for anything.
        if flags & os.O_DIRECTORY and not flags & os.O_PATH:
            path = os.path.realpath(f"/proc/self/fd/{descriptor}")
            self.looked.append(path)
            self.missing.pop(path, None)
        return descriptor


def test_a_mount_that_remembers_misses_looks_anew_once_a_folder(tmp_path, monkeypatch):
    share = DirectoryShare(tmp_path)
    for path in ("a/3", "b/19"):
        share.write(path, b"x")
    paths = [f"{folder}/{number}" for number in range(20) for folder in ("a", "b")]
    missing = {str(tmp_path / folder): {str(tmp_path / path) for path in paths} for folder in ("a", "b")}
    mount = Mount(monkeypatch, missing)
    assert [path for path, _ in share.read_many(paths)] == ["a/3", "b/19"]
    assert mount.looked == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert len(mount.asked) == len(paths) + 2


@pytest.mark.parametrize("umask", [0o077, 0o022, 0])
def test_files_and_folders_are_as_open_as_the_root(tmp_path, umask):
    """A node that is another user has to read the plan, and who may write the root may write what a client makes."""
    for mode, folders, files in (
        (0o777, 0o777, 0o666),
        (0o1777, 0o777, 0o666),
        (0o2770, 0o2770, 0o660),
        (0o755, 0o755, 0o644),
        (0o750, 0o750, 0o640),
    ):
        root = tmp_path / f"{mode:o}"
        root.mkdir()
        root.chmod(mode)
        share = DirectoryShare(root)
        (tmp_path / "source").write_bytes(b"code")
        before = os.umask(umask)
        try:
            share.write("a/b/plan.json", b"")
            share.send("a/stream", io.BytesIO(b"1"), 1)
            share.claim("c/d")
            assert share.made("e/f") == root / "e" / "f"
            upload(share, scan_input(tmp_path / "source"))
        finally:
            os.umask(before)
        (sent,) = (root / OBJECTS).rglob("?" * 64)
        made = dict.fromkeys(map(root.joinpath, ("a", "a/b", "c", "c/d", "e", "e/f")), folders)
        made |= dict.fromkeys((root / "a/b/plan.json", root / "a/stream", sent), files)
        for path, expected in made.items():
            found = stat.S_IMODE(path.stat().st_mode)
            assert found & expected == expected, (oct(mode), path, oct(found))
            assert umask != 0o077 or found == expected


@pytest.mark.parametrize("root", [*NASTY, "\udcff"], ids=repr)
def test_a_directorys_address_is_exact(tmp_path, root):
    share = DirectoryShare(tmp_path / root)
    share.write("x", b"1")
    again = open_share(share.url)
    assert share.url.isascii()
    assert again.root == tmp_path / root
    assert again.read("x") == b"1"


def test_a_link_is_a_name_like_any_other_and_what_it_points_to_stays(tmp_path):
    share = DirectoryShare(tmp_path / "share")
    share.write("d/a", b"1")
    (tmp_path / "precious").mkdir()
    for name, target in (("dangling", "nowhere"), ("link", tmp_path / "precious")):
        (tmp_path / "share" / "d" / name).symlink_to(target)
    assert [entry[::2] for entry in share.list("d")] == [("a", False), ("dangling", False), ("link", False)]
    for name in ("dangling", "link"):
        share.delete(f"d/{name}")
    assert told(share, "d") == [("a", 1, False)] and (tmp_path / "precious").is_dir()


def test_a_directory_that_isnt_there_is_not_made_from_its_address_nor_a_file_taken_for_one(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(ShareError, match=f"{tmp_path}/x"):
        DirectoryShare(tmp_path / "x")
    with pytest.raises(ShareError, match=f"{tmp_path}/none"):
        open_share((tmp_path / "none").as_uri())
    assert not (tmp_path / "none").exists()


def away(root):
    """Take a share off its mount point; gives it back."""
    root.rename(root.with_name("elsewhere"))
    root.mkdir()

    def back():
        root.rmdir()  # which only an empty folder lets happen
        root.with_name("elsewhere").rename(root)

    return back


def test_13_a_folder_that_is_kept_is_not_made_below_an_empty_mount_point(tmp_path):
    share = DirectoryShare(tmp_path / "share")
    share.write("jobs/one/plan", b"1")
    kept = share.keeping("jobs/one")
    assert kept.keeping("jobs/one") is kept and kept.url == share.url
    back = away(share.root)
    for write in (kept.claim, kept.made, lambda path: kept.write(path, b"")):
        for path in ("jobs/one/x/y", "jobs/one/x"):
            with pytest.raises(ShareError, match=f"isn't mounted at {share.root}"):
                write(path)
    assert kept.list("jobs/one") == []
    back()
    assert kept.claim("jobs/one/claim") and not kept.claim("jobs/one/claim")
    # Mounted again a share may be another folder to the system.
    share.root.rename(tmp_path / "old")
    subprocess.run(["cp", "-a", tmp_path / "old", share.root], check=True)
    kept.write("jobs/one/x", b"2")
    back = away(share.root)
    with pytest.raises(ShareError, match="isn't mounted"):
        kept.write("jobs/one/x", b"3")
    back()
    assert kept.read("jobs/one/x") == b"2"
    # Of a share that is there a folder may have been deleted: what says how its job ended can still be written.
    share.delete("jobs")
    kept.write("jobs/one/x", b"4")
    assert share.read("jobs/one/x") == b"4"


def test_identity(tmp_path):
    one, other = DirectoryShare(tmp_path / "one"), DirectoryShare(tmp_path / "other")
    name = identify(one)
    assert name == identify(one) == identify(DirectoryShare(tmp_path / "one"))
    assert name != identify(other)
    assert (tmp_path / "one" / identity_path(name)).is_dir()
