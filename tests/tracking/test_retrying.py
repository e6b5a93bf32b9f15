"""Retries: of what, how often, for how long, and what the log says of it."""

from __future__ import annotations

import re
import time

import pytest
from mlflow.exceptions import MlflowException

from mlflow_batchai.errors import ShareError
from mlflow_batchai.job.lease import LeaseLostError
from mlflow_batchai.tracking import retrying
from mlflow_batchai.tracking.retrying import GivenUpError, LogThrottle, RetryPolicy, spoken


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves."""

    class Clock:
        def __init__(self):
            self.now = 1000.0
            self.naps = []

        def sleep(self, seconds):
            self.naps.append(seconds)
            self.now += seconds

    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


def in_turn(*answers):
    """Raises or returns one after the other, the last for ever."""
    left = list(answers)

    def act():
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return act


def test_waits_grow_to_a_minute_and_are_not_the_same_for_all(clock):
    with pytest.raises(GivenUpError):
        RetryPolicy(3600, LogThrottle(lambda: clock.now), lambda: 0.0).do(in_turn(ConnectionError("down")))
    assert all(0.5 <= nap <= max(1.0, min(60, 2**tries)) for tries, nap in enumerate(clock.naps))
    assert max(clock.naps) > 30 and len(set(clock.naps)) > len(clock.naps) / 2
    assert 3600 < clock.now - 1000 < 3600 + 60


def test_a_store_is_given_up_after_the_job_has_ended_and_a_share_after_it_was_there_last(clock):
    ended = []
    endures = RetryPolicy(100, LogThrottle(lambda: clock.now), lambda: ended[0] if ended else None)

    def down():
        if clock.now > 5000 and not ended:
            ended.append(clock.now)
        raise ConnectionError("down")

    with pytest.raises(GivenUpError, match=r"tracking server .* ConnectionError: down"):
        endures.do(down)
    assert 5100 < clock.now < 5300
    ended.clear()
    begun = clock.now
    with pytest.raises(GivenUpError, match=r"share .* no host x"):
        endures.do(in_turn(ShareError("no host x")))
    assert 100 < clock.now - begun < 200


def test_it_ends_with_what_comes_and_not_with_a_lost_lease(clock, capsys):
    told = []
    endures = RetryPolicy(
        100, LogThrottle(lambda: clock.now), on_error=lambda error, seconds: told.append((str(error), seconds))
    )
    assert endures.do(in_turn(ConnectionError("down"), MlflowException("503"), 7)) == 7
    assert [text for text, _ in told] == ["down", "503"] and told[1][1] > 0
    with pytest.raises(LeaseLostError):
        endures.do(in_turn(ConnectionError("down"), LeaseLostError("gone")))
    tries = []
    capsys.readouterr()
    assert endures.do(in_turn(ConnectionError("down")), sleep=tries.append, enough=lambda: len(tries) == 3) is None
    assert "works again" not in capsys.readouterr().err


def test_a_log_of_a_day_is_short(clock, capsys):
    texts = [f"<object at 0x7f{number:x}> port {number}: refused" for number in range(10000)]
    act = in_turn(*(MlflowException(text + "\n<html>" + "no " * 1000) for text in texts))
    with pytest.raises(GivenUpError) as given_up:
        RetryPolicy(86400, LogThrottle(lambda: clock.now), lambda: 0.0).do(act)
    log = capsys.readouterr().err
    assert 24 <= log.count("refused") <= 26 and len(log) < 25 * 800
    assert re.match(r"the tracking server could not be used for 24(:0\d)? h", str(given_up.value))


def test_the_log_says_where_a_fault_of_ours_comes_from_and_when_it_works_again(clock, capsys):
    log = LogThrottle(lambda: clock.now)
    log.over()
    assert capsys.readouterr().err == ""
    RetryPolicy(100, log, lambda: None).do(in_turn(KeyError("x"), ShareError("full"), 1))
    log = capsys.readouterr().err
    assert "Traceback" in log and "KeyError: 'x'" in log and log.count("Traceback") == 1
    assert "full\ntrying again in" in log and "it works again, after" in log.splitlines()[-1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (119, "119 s"), (300, "5 min"), (7200, "2 h"), (86400, "24 h"), (9000, "2:30 h")]
)
def test_times_for_people(seconds, text):
    assert spoken(seconds) == text == retrying.spoken(seconds + 0.3)
