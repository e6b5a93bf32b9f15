"""Five jobs in one follower, and one of them has trouble: the metrics of the other four come as soon as ever."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from follower_site import GRACE_SECONDS, Site, open_site
from job_folder import FOLDER, JobFolder, report
from stalling import Stalling
from waiting import wait_for

LATE_SECONDS = 2.0
# A holder that has said nothing for so long may be followed by another.
STALL_SECONDS = GRACE_SECONDS + 5.0
LARGE_BYTES = 2 << 30


@pytest.fixture
def site(tmp_path: Path, store_template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with open_site(tmp_path, store_template, monkeypatch) as made:
        yield made


def followed(site: Site, one: JobFolder) -> list[JobFolder]:
    """Four more jobs; all have come to the same follower."""
    four = [site.job(f"job-{number}") for number in range(4)]
    for made in (one, *four):
        site.follow(made)
    assert len(site.pids) == 1
    for made in (one, *four):
        wait_for(lambda made=made: site.relayed(made), 120)
    return four


def delays(site: Site, jobs: Sequence[JobFolder], ends: Callable[[], bool]) -> list[float]:
    """Seconds from each of the reports that four ranks write five times a second to its value in the store."""
    came: dict[float, float] = {}
    written: list[float] = []
    step = 2
    while not ends() or len(came) < len(written):
        if not ends():
            for made in jobs:
                written.append(time.time())
                made.segment(step, report(step, written=written[-1]))
            step += 1
        with contextlib.closing(sqlite3.connect(site.root / "m.db", timeout=60)) as store:
            for (value,) in store.execute("SELECT value FROM metrics WHERE key = 'written'"):
                came.setdefault(value, time.time())
        assert time.time() - written[-1] < 60, "not all has come"
        time.sleep(0.2)
    return sorted(came[value] - value for value in written)


def in_time(late: Sequence[float]) -> bool:
    """Whether 95 of 100 came in time."""
    print(f"{len(late)} points: {late[len(late) // 2]:.2f} s, p95 {late[len(late) * 95 // 100]:.2f} s, {late[-1]:.2f} s")
    return late[len(late) * 95 // 100] <= LATE_SECONDS


def end(site: Site, *jobs: JobFolder) -> None:
    for made in jobs:
        made.verdict()
    for made in jobs:
        wait_for(lambda made=made: site.status(made) == "FINISHED", 120)


def test_a_share_that_hangs(site: Site, stopped_server: Stalling) -> None:
    one = site.job("hangs", stopped_server.place)
    four = followed(site, one)
    until = time.monotonic() + STALL_SECONDS
    stopped_server.stall()
    try:
        late = delays(site, four, lambda: time.monotonic() > until)
        end(site, *four)
    finally:
        stopped_server.go_on()
    assert in_time(late)
    end(site, one)


def test_a_large_artifact(site: Site) -> None:
    output = {"id": "M", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": "m"}
    one = site.job("large", outputDirectories=[output])
    four = followed(site, one)
    large = one.share.local(f"{FOLDER}/outputs/m/large")
    large.parent.mkdir(parents=True)
    with large.open("wb") as file:
        file.truncate(LARGE_BYTES)
    one.verdict()
    until = time.monotonic() + 5.0
    assert in_time(delays(site, four, lambda: site.status(one) == "FINISHED" and time.monotonic() > until))
    (sent,) = (site.root / "artifacts").rglob("large")
    assert sent.stat().st_size == LARGE_BYTES
    end(site, *four)
