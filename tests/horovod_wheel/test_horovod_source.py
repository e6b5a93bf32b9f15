"""Horovod's source is changed exactly where expected or not at all, and unpacked only if it is PyPI's."""

import pytest

from mlflow_batchai.horovod_wheel import HorovodBuildError
from mlflow_batchai.horovod_wheel.source import Patch, apply_patches, unpack

PATCH = Patch("a/b.cc", "#if X\n", "#if X && Y\n")


@pytest.mark.parametrize(
    "text, problem", [("", "0 times"), ("#if X \n", "0 times"), ("#if X\n#if X\n", "2 times"), (None, "be read")]
)
def test_a_file_without_the_one_text_is_named(tmp_path, text, problem):
    (tmp_path / "a").mkdir()
    if text is not None:
        (tmp_path / "a/b.cc").write_text(text)
    with pytest.raises(HorovodBuildError, match=rf"a/b\.cc .*{problem}"):
        apply_patches(tmp_path, (PATCH,))


def test_patches_are_written_to_the_tree(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.cc").write_bytes("é\r\n#if X\n".encode())
    apply_patches(tmp_path, (PATCH, Patch("a/b.cc", "&& Y", "&& Z")))
    assert (tmp_path / "a/b.cc").read_bytes() == "é\r\n#if X && Z\n".encode()


def test_an_archive_that_is_not_pypis_is_refused(tmp_path):
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    archive.write_bytes(b"something else")
    with pytest.raises(HorovodBuildError, match=r"is not the horovod 0\.28\.1 of PyPI"):
        unpack(archive, tmp_path)
