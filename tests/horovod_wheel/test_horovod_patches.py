"""Horovod's source is changed exactly where expected or not at all, and unpacked only if it is PyPI's."""

import io
import tarfile

import pytest

from mlflow_batchai.horovod_wheel import HorovodBuildError, source
from mlflow_batchai.horovod_wheel.source import PATCHES, Patch, apply_patches, patched, refuse_unsafe, unpack

PATCH = Patch("a/b.cc", "#if X\n", "#if X && Y\n")


def test_the_one_occurrence_is_replaced():
    assert patched("before\n#if X\nafter\n", PATCH) == "before\n#if X && Y\nafter\n"


@pytest.mark.parametrize("text, count", [("", 0), ("#if X \n", 0), ("#if X\n#if X\n", 2)])
def test_a_missing_or_repeated_text_is_an_error_that_names_the_file(text, count):
    with pytest.raises(HorovodBuildError, match=rf"a/b\.cc occurs {count} times"):
        patched(text, PATCH)


def test_patches_are_written_to_the_tree(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.cc").write_bytes("é\r\n#if X\n".encode())
    apply_patches(tmp_path, (PATCH, Patch("a/b.cc", "&& Y", "&& Z")))
    assert (tmp_path / "a/b.cc").read_bytes() == "é\r\n#if X && Z\n".encode()


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(HorovodBuildError, match=r"a/b\.cc can't be read"):
        apply_patches(tmp_path, (PATCH,))


@pytest.mark.parametrize("framework", sorted(PATCHES))
def test_a_patched_text_can_not_be_patched_twice(framework):
    for patch in PATCHES[framework]:
        if patch.old in patch.new:  # an insertion after its anchor
            continue
        with pytest.raises(HorovodBuildError):
            patched(patched(patch.old, patch), patch)


def test_an_archive_that_is_not_pypis_is_refused(tmp_path):
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    archive.write_bytes(b"something else")
    with pytest.raises(HorovodBuildError, match=r"is not the horovod 0\.28\.1 of PyPI"):
        unpack(archive, tmp_path)


def test_the_expected_archive_is_unpacked(tmp_path, monkeypatch):
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        member = tarfile.TarInfo("horovod-0.28.1/setup.py")
        member.size = 2
        file.addfile(member, io.BytesIO(b"ok"))
    monkeypatch.setattr(source, "SDIST_SHA256", source.hashlib.sha256(archive.read_bytes()).hexdigest())
    assert (unpack(archive, tmp_path / "work") / "setup.py").read_bytes() == b"ok"


@pytest.mark.parametrize("name", ["/etc/passwd", "horovod/../../x", ".."])
def test_a_member_outside_of_the_folder_is_refused(name):
    with pytest.raises(HorovodBuildError, match="not a plain file"):
        refuse_unsafe([tarfile.TarInfo("fine"), tarfile.TarInfo(name)], "x.tar.gz")


def test_a_link_is_refused():
    link = tarfile.TarInfo("horovod/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with pytest.raises(HorovodBuildError, match="horovod/link"):
        refuse_unsafe([link], "x.tar.gz")
