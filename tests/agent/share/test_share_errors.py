"""Which failures of the share end a job, after how long, and in what words."""

from __future__ import annotations

import errno
import os

import pytest

from mlflow_batchai.agent.share.base import ControlError
from mlflow_batchai.agent.share.sharefiles import AWAY_SECONDS, ShareErrors, sentence


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.trouble = ShareErrors(30.0, lambda: self.now)

    def after(self, seconds: float, found: OSError | None) -> str | None:
        self.now += seconds
        self.trouble.saw(found)
        return self.trouble.told()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the share is full (No space left on device); make room there, or raise its quota"),
        (errno.EDQUOT, "the share's quota is used up (Disk quota exceeded); make room there"),
        (errno.EROFS, "the share is read-only (Read-only file system); make it writable"),
        (errno.EACCES, "the share refuses this node's user (Permission denied); give it the right"),
        (errno.ENOENT, "the job's folder is gone from the share (No such file or directory); was it deleted"),
        (errno.ESTALE, "the share's mount is no longer valid"),
        (errno.ENOTCONN, "the share's mount has lost its file system"),
        (errno.ECONNABORTED, "the share's mount has lost its file system"),
    ],
)
def test_what_does_not_pass_ends_the_job_after_a_while(number, words):
    scene = Scene()
    assert scene.after(0.0, error(number)) is None
    assert scene.after(30.0, error(number)) is None
    assert scene.after(1.0, error(number)).startswith(words)


def test_what_has_passed_is_forgotten():
    scene = Scene()
    assert scene.after(0.0, error(errno.ENOSPC)) is None
    assert scene.after(29.0, None) is None
    assert scene.after(5.0, error(errno.ENOSPC)) is None
    assert scene.after(29.0, error(errno.ENOSPC)) is None


def test_one_error_before_a_round_that_hangs_is_not_for_good():
    scene = Scene()
    assert scene.after(0.0, error(errno.ESTALE)) is None
    scene.now += 60.0
    assert scene.trouble.told() is None
    assert scene.after(0.0, None) is None


@pytest.mark.parametrize("passing", [error(errno.EIO), error(errno.ETIMEDOUT), ControlError("the share can't be reached")])
def test_what_may_pass_is_borne_for_a_quarter_of_an_hour(passing):
    scene = Scene()
    assert sentence(passing) is None
    assert scene.after(AWAY_SECONDS - 1, passing) is None
    assert "the share could not be used for 901 s (" in scene.after(2.0, passing)
    assert scene.after(1.0, None) is None
