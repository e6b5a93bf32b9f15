"""``batchai job attach --all``: which jobs are looked after, which get a follower, and what is said of the others."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import socket
import threading
from types import SimpleNamespace

import pytest
from job_folder import FOLDER, JobFolder

from mlflow_batchai.agent.processes import proc
from mlflow_batchai.client import lookup, orphans, runner
from mlflow_batchai.follower import detached, retries, service_client
from mlflow_batchai.follower.service_client import Told
from mlflow_batchai.job import lease
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import runs

ME = proc.identity()
FAR = {"machine": "another pid:[1]", "pid": 7, "started": 1, "host": "far"}


class Jobs:
    """A user's jobs: their runs, their folders, and the followers that were started for them."""

    def __init__(self, cli, root):
        self.cli = cli
        self.client = cli.world.client
        self.root = root
        self.started = []
        self.pids = itertools.repeat(4242)
        self.ids = {}

    def run(self, name, share, status="RUNNING", experiment="0", signed=True, **tags):
        given = {
            runs.TAG_JOB: name,
            runs.TAG_CLUSTER: "elsewhere",
            runs.TAG_SHARE: share,
            runs.TAG_FOLDER: FOLDER,
            "mlflow.user": runner.user(),
            **tags,
        }
        given = {key: value for key, value in given.items() if value}
        run = self.client.create_run(experiment, tags=given)
        if signed:
            self.client.set_tag(run.info.run_id, runs.TAG_MAC, runs.signature(run.info.run_id, given))
        self.client.update_run(run.info.run_id, status=status)
        self.ids[name] = run.info.run_id
        return run.info.run_id

    def job(self, name, holder=None, finished=False, **run):
        """A job whose follower said its last word as this process."""
        made = JobFolder(self.root / name, name=name, job=name)
        if holder is not None:
            made.share.claim(made.paths.lease(1))
            self.heartbeat(made, 3, holder, finished=finished)
        made.run_id = self.run(name, made.share.url, **run)
        made.write(made.paths.plan, {**made.plan, "runId": made.run_id})
        return made

    def heartbeat(self, made, counter, holder, **fields):
        made.write(
            made.paths.cursor(1),
            {"counter": counter, "attempt": 1, "finished": False, "holder": holder, "memory": {}, **fields},
        )

    def attach(self, *options, **environment):
        said = self.cli("job", "attach", "--all", *options, **environment)
        rows = {row["name"]: row for row in json.loads(said.out)} if said.out else {}
        lines = [line.removeprefix("batchai: ") for line in said.err.splitlines()]
        return said.code, rows, lines


@pytest.fixture
def jobs(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHAI_HOME", str(cli.world.home))  # the commands' key
    made = Jobs(cli, tmp_path / "shares")

    def follow(order, environment):
        made.started.append((order["share"], environment))
        return Told(next(made.pids), True)

    monkeypatch.setattr(service_client, "follow", follow)
    monkeypatch.setattr(lease, "GRACE_SECONDS", 0.6)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    return made


def test_each_job_is_looked_after(jobs, monkeypatch):
    # The one that sends heartbeats has to be heard, however busy this machine is.
    monkeypatch.setattr(lease, "GRACE_SECONDS", 4.0)
    nobody, here, gone = jobs.job("nobody"), jobs.job("here", ME), jobs.job("gone", {**ME, "started": 1})
    lives, dead, over = jobs.job("lives", FAR), jobs.job("dead", FAR), jobs.job("over", ME, finished=True)
    restored = jobs.job("restored", ME, finished=True)
    of_run = lookup.of_run

    def ends(run, store):
        if run.info.run_id == over.run_id:
            jobs.client.set_terminated(over.run_id)
        return of_run(run, store)

    monkeypatch.setattr(lookup, "of_run", ends)
    other = jobs.client.create_experiment("other")
    elsewhere = jobs.job("elsewhere", experiment=other, status="SCHEDULED")
    jobs.run("away", "file:///nowhere/at/all")
    jobs.run("untagged", nobody.share.url, **{runs.TAG_FOLDER: ""})
    empty = DirectoryShare(jobs.root / "empty")
    empty.write(".batchai/objects/00/0", b"")
    jobs.run("unstarted", empty.url, status="SCHEDULED", **{runs.TAG_CLUSTER: "local"})
    # What is not looked at: what has ended, is another's, or was deleted.
    jobs.job("ended", status="FINISHED")
    jobs.job("theirs", signed=False)
    jobs.client.delete_run(jobs.job("deleted").run_id)
    counters = itertools.count(4)
    done = threading.Event()

    def heartbeat():
        while not done.wait(0.1):
            jobs.heartbeat(lives, next(counters), FAR)

    thread = threading.Thread(target=heartbeat)
    thread.start()
    try:
        code, rows, lines = jobs.attach()
    finally:
        done.set()
        thread.join()
    assert code == 1  # one could not be looked at
    started = [made.share.url for made in (elsewhere, gone, nobody, restored, dead)]
    assert sorted(share for share, _ in jobs.started) == sorted(started)
    assert jobs.started[-1][0] == dead.share.url
    assert lease.Lease(restored.job).view().state is lease.LeaseState.FREE
    assert lease.Lease(over.job).view().state is lease.LeaseState.FINISHED
    results = {name: (row["result"], row["follower"] and row["follower"]["state"]) for name, row in rows.items()}
    assert results == {
        "nobody": ("followerStarted", "none"),
        "here": ("followed", "relaying"),
        "gone": ("followerStarted", "none"),
        "lives": ("followed", "relaying"),
        "dead": ("followerStarted", "none"),
        "over": ("finished", "finished"),
        "restored": ("followerStarted", "finished"),
        "elsewhere": ("followerStarted", "none"),
        "away": ("unseen", None),
        "untagged": ("unseen", None),
        "unstarted": ("unstarted", None),
    }
    said = {name: next(line for line in lines if line.startswith(f"job {name} ")) for name in rows}
    assert len(lines) == len(rows) + 1
    assert any(line.startswith("waiting up to 4 s to see whether the followers of ") for line in lines)
    assert said["nobody"] == f"job nobody (run {nobody.run_id}): follower started (process 4242)"
    host = socket.gethostname()
    assert said["here"] == f"job here (run {here.run_id}): followed by process {ME['pid']} on {host}"
    assert rows["here"]["follower"] == {"state": "relaying", "process": ME["pid"], "host": host, "trouble": None}
    assert said["lives"].endswith("followed by process 7 on far")
    assert said["dead"].endswith("follower started (process 4242); process 7 on far is gone")
    assert "the share of job away is not on this machine" in said["away"]
    assert said["unstarted"].endswith(f"batchai job terminate {jobs.ids['unstarted']} ends its run")
    assert rows["nobody"] == {
        "name": "nobody",
        "runId": nobody.run_id,
        "executionState": "queued",
        "follower": {"state": "none", "process": None, "host": None, "trouble": None},
        "result": "followerStarted",
        "detail": "follower started (process 4242)",
    }


def test_one_that_counts_as_relayed_is_relayed_again_only_if_its_run_lacks_its_end(jobs):
    made = jobs.job("restored", ME, finished=True)
    found = lookup.find("restored", runs.absolute(jobs.cli.world.uri, jobs.root))
    jobs.client.set_tag(made.run_id, runs.TAG_FOLDER, "another")
    assert detached.ensure_follower(found).state is lease.LeaseState.FINISHED
    jobs.client.set_tag(made.run_id, runs.TAG_FOLDER, FOLDER)
    jobs.client.delete_run(made.run_id)
    assert detached.ensure_follower(found).state is lease.LeaseState.FINISHED
    jobs.client.restore_run(made.run_id)
    assert detached.ensure_follower(found).state is lease.LeaseState.FREE
    assert found.followed().state is lease.LeaseState.FREE
    assert len(jobs.started) == 1 and lease.Lease(made.job).view().number == 2


def test_one_that_cannot_reach_the_store_is_replaced(jobs):
    jobs.heartbeat(jobs.job("troubled", ME), 4, ME, trouble="401 Unauthorized")
    _, rows, _ = jobs.attach()
    host = socket.gethostname()
    told = f"follower started (process 4242); process {ME['pid']} on {host} says: 401 Unauthorized"
    assert rows["troubled"]["detail"] == told
    assert rows["troubled"]["follower"]["trouble"] == "401 Unauthorized"


def test_an_attempt_that_needs_secrets_waits_for_who_has_them(jobs, monkeypatch):
    """No follower is started only to say that again; with the secrets in the environment it is."""
    made = jobs.job("retried", {**ME, "started": 1})
    made.verdict("queued", next=2, retriesLeft=1, exitCode=None)
    monkeypatch.setattr(
        retries, "_cluster", lambda job: SimpleNamespace(name="c", location=None, engine=SimpleNamespace(close=lambda: None))
    )
    monkeypatch.setattr(retries, "_secrets", secrets)
    code, rows, _ = jobs.attach()
    assert (code, jobs.started, rows["retried"]["result"]) == (0, [], "waitsForAttach")
    assert rows["retried"]["detail"] == "waiting for attach (needs BATCHAI_SECRET_TOKEN)"
    _, rows, _ = jobs.attach(BATCHAI_SECRET_TOKEN="t")
    assert rows["retried"]["result"] == "followerStarted"
    # What was begun needs a follower, whoever has the secrets.
    made.begin(2)
    _, rows, _ = jobs.attach()
    assert rows["retried"]["result"] == "followerStarted"


def secrets(job, cluster, kept):
    if "BATCHAI_SECRET_TOKEN" not in os.environ:
        raise retries.NotHereError("waiting for attach (needs BATCHAI_SECRET_TOKEN)")


def test_a_share_that_hangs_holds_up_no_other(jobs, monkeypatch):
    jobs.job("nobody")
    jobs.run("hangs", "file:///hangs")
    of_run, done = lookup.of_run, threading.Event()
    monkeypatch.setattr(orphans, "FIRST_LOOK_SECONDS", 2.0)  # the other one is to be seen in that time
    monkeypatch.setattr(
        lookup, "of_run", lambda run, store: of_run(run, store) if "nobody" in run.data.tags.values() else done.wait()
    )
    code, rows, _ = jobs.attach()
    done.set()
    assert (code, rows["nobody"]["result"], rows["hangs"]["result"]) == (1, "followerStarted", "unseen")
    assert rows["hangs"]["detail"] == "its share has not answered for 2 s"


def answering(status, body):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, b"<html>" + b"busy " * 500, "503"),
        (200, b"no json", ""),
        (401, b'{"error_code": "UNAUTHENTICATED"}', "UNAUTHENTICATED"),
    ],
)
def test_a_store_that_is_in_trouble_is_one_sentence(cli, status, body, words):
    server = answering(status, body)
    try:
        uri = f"http://me:pa55@127.0.0.1:{server.server_port}"
        said = cli("job", "attach", "--all", MLFLOW_TRACKING_URI=uri, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    finally:
        server.shutdown()
        server.server_close()
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    start = f"batchai: the tracking store http://127.0.0.1:{server.server_port} can't be asked: "
    assert said.err.startswith(start) and words in said.err and len(said.err) < len(start) + 510
