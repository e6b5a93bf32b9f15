"""One follower process for all jobs of a user: how it is found, started and replaced, and when it ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sqlite3
import stat
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from follower_site import open_site
from notify_channel import Channel
from relay_world import EXPECTED, history
from waiting import freeze, wait_for

from mlflow_batchai.errors import ClusterError, ShareError
from mlflow_batchai.follower import detached, service, service_client, spawning
from mlflow_batchai.follower.service import Service
from mlflow_batchai.job import lease as lease_module
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.tracking import runs

SECRET = "hush-hush"


@pytest.fixture
def site(tmp_path, store_template, monkeypatch):
    with open_site(tmp_path, store_template, monkeypatch) as made:
        yield made


def assert_nowhere(text, root):
    """In no file below a folder, nor in its path."""
    for path in (Path(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files)):
        with contextlib.suppress(FileNotFoundError):  # of a store's, which come and go
            assert text not in str(path) and (not path.is_file() or text.encode() not in path.read_bytes()), path


def test_jobs_of_one_user_have_one_process(site, monkeypatch):
    made = [site.job(name) for name in ("first", "second", "third")]
    told = [site.follow(job) for job in made]
    (pid,) = site.pids
    for job in made:
        wait_for(lambda job=job: site.relayed(job), 120)
        assert site.log(job.plan["name"]).endswith("the job is relayed, and its nodes can't be asked\n")
    assert stat.S_IMODE((site.home / "followers").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (site.home / "followers").glob("*.log")} == {0o600}
    # Told again, also from elsewhere, it doubles nothing.
    for found, job in zip(told, made, strict=True):
        assert (found.starts, found.followed().state, site.follow(job).starts) == (1, LeaseState.HELD, 0)
        detached.keep_follower(found)
        assert (found.starts, Lease(job.job).view().number) == (1, 1)
    assert len(site.pids) == 1

    # Killed, it is started once more by whoever watches one of the jobs; the others come back to it.
    site.kill(pid)
    for found in told:
        wait_for(lambda found=found: detached.keep_follower(found) or found.starts == 2)
    assert len({found.follower for found in told} - {pid}) == 1
    site.pids |= {found.follower for found in told}
    for job in made:
        job.verdict()
    for job in made:
        wait_for(lambda job=job: site.status(job) == "FINISHED", 120)
        assert history(site.client, job.plan["runId"]) == EXPECTED
    wait_for(lambda: not psutil.pid_exists(told[0].follower), what="it has no jobs any more")
    assert site.sockets() == []


def test_other_credentials_have_another_process(site, monkeypatch):
    names = set()

    def name(tracking=site.tracking, **environment):
        with monkeypatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            found = service_client._name(spawning.environment_for(tracking))
        assert SECRET not in found and os.sep not in found
        new = found not in names
        names.add(found)
        return new

    assert name() and not name()
    assert name(AWS_SECRET_ACCESS_KEY=SECRET) and name(AWS_SECRET_ACCESS_KEY=SECRET + "2")
    assert name(MLFLOW_TRACKING_TOKEN=SECRET) and name(https_proxy="http://proxy") and name(CUDA_VISIBLE_DEVICES="1")
    assert name(runs.absolute("https://host", site.root)) and name(runs.absolute("https://me:pa55@host", site.root))
    assert not name(SHLVL="7") and not name(BATCHAI_CLUSTER="c")
    monkeypatch.setattr(service_client.mlflow_batchai, "__version__", "99")
    assert name()
    # It can't be found out by trying: it depends on the user's key.
    (site.home / "key").unlink()
    assert name()


def test_no_secret_leaves_the_memory(site, monkeypatch):
    """Not to arguments, names, logs or the environment; a variable of another command's is not kept either."""
    monkeypatch.setenv("BATCHAI_SECRET_OTHER", SECRET)
    monkeypatch.setenv("BATCHAI_SECRET_TOKEN", SECRET)
    monkeypatch.setenv("MLFLOW_RUN_ID", SECRET)
    made = site.job("job", retries=1, secretVariables=["TOKEN"], secretNames=["TOKEN"])
    found = site.follow(made, secrets={"variables": {"TOKEN": SECRET}, "share": SECRET})
    wait_for(lambda: site.relayed(made), 120)
    process = psutil.Process(found.follower)
    assert SECRET not in " ".join([*process.cmdline(), *process.environ().values()])
    assert_nowhere(SECRET, site.root)
    made.verdict()
    wait_for(lambda: site.status(made) == "FINISHED")


def test_a_process_that_was_stopped_is_replaced(site, monkeypatch):
    monkeypatch.setattr(service_client, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(service_client, "START_SECONDS", 1.0)
    monkeypatch.setattr(service_client, "ASK_SECONDS", 0.5)
    monkeypatch.setattr(lease_module, "GRACE_SECONDS", 6.0)
    first, second = site.job("first"), site.job("second")
    stopped = site.follow(first)
    wait_for(lambda: site.relayed(first), 120)
    # Not while it writes: nobody could use the store then.
    with contextlib.closing(sqlite3.connect(site.root / "m.db", timeout=60, isolation_level=None)) as store:
        store.execute("BEGIN EXCLUSIVE")
        freeze(stopped.follower)
    other = site.follow(second)
    assert other.follower != stopped.follower and other.starts == 1
    # Whoever watches the first job sees that it makes no progress.
    stopped.told_at = 0.0
    wait_for(lambda: detached.keep_follower(stopped) or stopped.follower == other.follower, what="its lease counts as free")
    first.verdict()
    second.verdict()
    wait_for(lambda: site.status(first) == site.status(second) == "FINISHED", 120)
    os.kill(min(site.pids - {other.follower}), signal.SIGCONT)
    wait_for(lambda: not any(map(psutil.pid_exists, site.pids)), what="both end")


@pytest.fixture
def here(site, monkeypatch):
    """The service in threads of this process, which relays nothing: ``taken`` counts what it was told to follow."""
    taken: Counter[str] = Counter()
    threads: list[threading.Thread] = []

    def spawn(words, environment, log, listening):
        own = socket.socket(fileno=os.dup(listening.fileno()))
        made = Service(own, site.home / "followers" / words[-2], int(words[-1]), 0.02)

        def run():
            with own:
                made.run()

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        site.services = [*getattr(site, "services", []), made]
        return os.getpid()

    monkeypatch.setenv("MLFLOW_TRACKING_URI", site.tracking.address)
    monkeypatch.setattr(spawning, "spawn", spawn)
    monkeypatch.setattr(service, "open_share", lambda url: url)
    monkeypatch.setattr(service, "Job", lambda share, folder: made_job(share))
    monkeypatch.setattr(service, "Lease", lambda job: None)
    monkeypatch.setattr(service, "follow", lambda job, *rest: taken.update([job.name]))
    yield taken
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def made_job(name):
    plan = type("P", (), {"run_id": "r"})
    return type("J", (), {"name": name, "plan": plan, "check_trusted": staticmethod(lambda: None)})


def order(name, **told):
    return {"share": name, "folder": "f", "run": "r", "job": name, "told": told}


def test_a_job_that_comes_while_it_ends_is_not_lost(site, here):
    """Several tell of jobs at about the times at which it has had none for long enough."""
    chance = random.Random(1)

    def tell(number, pauses):
        for place, pause in enumerate(pauses):
            time.sleep(pause)
            assert service_client.follow(order(f"{number}-{place}"), dict(os.environ)).news

    submitters = [
        threading.Thread(target=tell, args=(number, [chance.uniform(0, 0.08) for _ in range(25)])) for number in range(4)
    ]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    wait_for(lambda: sum(here.values()) == 100)
    assert set(here.values()) == {1}
    assert len(site.services) > 1, "it has ended now and then"


def test_one_job_holds_up_no_other(site, here, monkeypatch):
    """One hangs, one ends in what nobody expects: each says so in its own log, and the others go on."""
    released = threading.Event()

    def opens(url):
        if url == "hangs":
            released.wait(60)
        if url == "away":
            raise ShareError("there is no share here")
        if url == "breaks":
            raise AssertionError("a mistake of ours")
        return url

    monkeypatch.setattr(service, "open_share", opens)
    for name in ("hangs", "breaks", "away", "good", "hangs"):
        service_client.follow(order(name), dict(os.environ))
    wait_for(lambda: here["good"] == 1)
    wait_for(lambda: service_client._known.clear() or service_client.answers() == {os.getpid(): {("hangs", "f")}})
    assert service_client.followers(("hangs", "f")) == {os.getpid()} and not service_client.followers(("good", "f"))
    assert "AssertionError: a mistake of ours" in site.log("breaks") and site.log("away").endswith(" there is no share here\n")
    assert site.log("good") == site.log("hangs") == ""
    released.set()
    # The second one who told of it may have had what the first one lacked.
    wait_for(lambda: here["hangs"] == 2)


def test_what_a_starter_tells_later_is_added(site, here, monkeypatch):
    released, seen = threading.Event(), []
    monkeypatch.setattr(service, "follow", lambda job, tracking, told, *rest: released.wait(60) and seen.append(told))
    for told in ({"variables": {"A": "1"}, "environment": {"X": "1"}}, {"environment": {"BATCHAI_SECRET_A": "2"}}):
        service_client.follow(order("job", **told), dict(os.environ))
    released.set()
    wait_for(lambda: seen)
    assert seen[0] == {"variables": {"A": "1"}, "environment": {"X": "1", "BATCHAI_SECRET_A": "2"}}


def test_a_job_whose_thread_hangs_is_taken_over(site, here, monkeypatch):
    """Its counter stands still, so its lease counts as free: whoever attaches to it gets another thread."""
    released = threading.Event()
    monkeypatch.setattr(service, "Lease", lambda job: type("L", (), {"is_stale": staticmethod(lambda: not here)}))
    monkeypatch.setattr(service, "follow", lambda *_: here.update("x") if released.is_set() else released.wait(60))
    assert service_client.follow(order("job"), dict(os.environ)).news
    wait_for(lambda: any(followed.lease for made in site.services for followed in made._jobs.values()))
    service_client._known.clear()
    # Who watches the job sees that nobody follows it.
    assert service_client.answers() == {os.getpid(): set()}
    assert service_client.follow(order("job"), dict(os.environ)).news
    released.set()


def test_a_job_that_is_told_of_while_its_thread_leaves_is_followed_once_more(site, here, monkeypatch):
    """Who attaches with a secret just after its follower has found that it lacks it is not told in vain."""
    asked, told_again, seen = threading.Event(), threading.Event(), []

    def leaves(job, tracking, told, *_):
        seen.append(dict(told["environment"]))
        asked.set()
        assert told_again.wait(60)

    monkeypatch.setattr(service, "follow", leaves)
    service_client.follow(order("job"), dict(os.environ))
    assert asked.wait(60)
    assert not service_client.follow(order("job", environment={"BATCHAI_SECRET_A": "2"}), dict(os.environ)).news
    told_again.set()
    wait_for(lambda: not site.sockets())
    assert seen == [{}, {"BATCHAI_SECRET_A": "2"}]


def test_who_says_nothing_or_nonsense_is_not_waited_for(site, here, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(service, "READ_SECONDS", 1.0)
    monkeypatch.setattr(service, "follow", lambda *_: released.wait(60))
    service_client.follow(order("job"), dict(os.environ))
    (path,) = site.sockets()
    with service_client._connected(path, 5.0), service_client._connected(path, 5.0) as other:
        other.sendall(b"[]")
        other.shutdown(socket.SHUT_WR)
        assert other.recv(1) == b""
        assert not service_client.follow(order("job"), dict(os.environ)).news
    released.set()


def test_sockets_of_dead_processes_are_removed(site, here, monkeypatch):
    """Those of this machine: of another one's, which has the same home folder, nothing can be said from here."""
    names = [service_client._ours("dead")]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        names.append(service_client._ours("dead"))
    folder = service_client.folder()
    for name in names:
        with socket.socket(socket.AF_UNIX) as dead, service_client._short(folder / name) as address:
            dead.bind(address)
    assert service_client.answers() == {}
    service_client.follow(order("job"), dict(os.environ))
    assert [(folder / name).exists() for name in names] == [False, True]


def test_a_process_that_hangs_at_its_start_holds_up_no_other(site, here, monkeypatch):
    """The lock is its own: whose jobs need other credentials are not behind it."""
    young = site.home / "followers" / service_client._name(dict(os.environ))
    service_client.folder()
    with socket.socket(socket.AF_UNIX) as hangs, service_client._short(young) as address:
        hangs.bind(address)
        hangs.listen()
        waits = threading.Thread(target=service_client.follow, args=(order("behind"), dict(os.environ)))
        monkeypatch.setattr(service_client, "START_SECONDS", 5.0)
        monkeypatch.setattr(service_client, "ANSWER_SECONDS", 5.0)
        waits.start()
        begun = time.monotonic()
        service_client.follow(order("other"), {**os.environ, "AWS_PROFILE": "other"})
        assert time.monotonic() - begun < 4.0 and waits.is_alive()
        waits.join()
    wait_for(lambda: here["other"] == here["behind"] == 1)


@pytest.mark.parametrize("text", ["soon", "nan", "-1", "inf"])
def test_a_variable_that_is_no_number_is_a_sentence(site, here, text):
    with pytest.raises(ClusterError, match=f"BATCHAI_FOLLOWER_IDLE is '{text}'; set it to a number of seconds"):
        service_client.follow(order("job"), {**os.environ, "BATCHAI_FOLLOWER_IDLE": text})
    assert not here and not site.sockets()


def test_one_word_at_the_end_whoever_follows_the_job_then(site):
    """The follower that was told the address is killed; its submitter tells the next one, and the address is written nowhere."""
    channel = Channel()
    made = site.job("job", notify={"url": "${NOTIFY_URL}", "on": ["succeeded"]})
    found = site.follow(made, told={"NOTIFY_URL": f"{channel.url}/{SECRET}"})
    wait_for(lambda: site.relayed(made), 120)
    site.kill(found.follower)
    wait_for(lambda: detached.keep_follower(found) or found.starts == 2)
    site.pids.add(found.follower)
    process = psutil.Process(found.follower)
    assert SECRET not in " ".join([*process.cmdline(), *process.environ().values()])
    made.verdict()
    wait_for(lambda: channel.posts, 120)
    wait_for(lambda: not psutil.pid_exists(found.follower), what="it has no jobs any more")
    assert [(path, body["text"]) for path, _, body in channel.posts] == [(f"/{SECRET}", "job job succeeded")]
    assert site.status(made) == "FINISHED"
    assert_nowhere(SECRET, site.root)
    assert SECRET not in str(site.client.get_run(made.plan["runId"]).to_dictionary())
    channel.close()
