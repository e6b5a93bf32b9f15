"""Addresses of tracking stores without their secrets, and the run of a job in a real store."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from mlflow_batchai import terminal
from mlflow_batchai.client import submitting
from mlflow_batchai.errors import JobNotFoundError, UsageError
from mlflow_batchai.tracking import index, runs

HERE = Path("/here")


@pytest.mark.parametrize(
    ("uri", "absolute"),
    [
        ("sqlite:///mlflow.db", "sqlite:////here/mlflow.db"),
        ("sqlite:///a b/../m.db?timeout=5", "sqlite:////here/a b/../m.db?timeout=5"),
        ("sqlite:////abs/m.db", "sqlite:////abs/m.db"),
        ("sqlite+pysqlite:///m.db", "sqlite+pysqlite:////here/m.db"),
        ("mlruns", "/here/mlruns"),
        ("./ml runs", "/here/ml runs"),
        ("/abs/mlruns", "/abs/mlruns"),
        ("file:ml%20runs", "file:///here/ml%20runs"),
        ("file:///abs/mlruns", "file:///abs/mlruns"),
        ("http://host:5000/base", "http://host:5000/base"),
        ("databricks", "databricks"),
        ("databricks://profile", "databricks://profile"),
    ],
)
def test_an_address_means_the_same_from_anywhere(uri, absolute):
    tracking = runs.absolute(uri, HERE)
    assert (tracking.uri, tracking.address) == (absolute, absolute)
    assert tracking.environment == {"MLFLOW_TRACKING_URI": absolute}
    again = runs.absolute(tracking.address, Path("/"))
    assert again == tracking


@pytest.mark.parametrize(
    ("uri", "shown", "user", "password"),
    [
        ("https://us%40er:p%2Fw%40rd@host:5000/x", "https://host:5000/x", "us@er", "p/w@rd"),
        ("http://user@host", "http://host", "user", None),
    ],
)
def test_a_servers_password_is_in_its_variable_only(uri, shown, user, password):
    tracking = runs.absolute(uri, HERE)
    assert (tracking.uri, tracking.address) == (shown, shown)
    found = [tracking.environment.get(f"MLFLOW_TRACKING_{name}") for name in ("URI", "USERNAME", "PASSWORD")]
    assert found == [shown, user, password] and "p/w" not in repr(tracking)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:p@ss@db:5432/mlflow", "postgresql://db:5432/mlflow"),
        ("postgresql://db/mlflow?user=me&password=secret", "postgresql://db/mlflow?user=me&password=***"),
        ("postgresql://me:se/cr#et@db/mlflow", "postgresql://db/mlflow"),
        ("postgresql:///mlflow?host=/run/pg&sslpassword=s%26s", "postgresql:///mlflow?host=/run/pg&sslpassword=***"),
    ],
)
def test_a_databases_password_is_in_the_address_only(uri, shown):
    tracking = runs.absolute(uri, HERE)
    assert (tracking.uri, tracking.address) == (shown, uri)
    assert "secret" not in repr(tracking)
    assert terminal.shown(tracking.uri) == tracking.uri


def test_page():
    assert runs.page("https://u:p@h/x/", "1", "r") == "https://h/x/#/experiments/1/runs/r?workflowType=machine_learning"
    assert runs.page("sqlite:///x", "1", "r") is None


@pytest.fixture
def store(store_template, tmp_path):
    shutil.copy(store_template, tmp_path / "m.db")
    tracking = runs.absolute("sqlite:///m.db", tmp_path)
    mlflow = runs.client(tracking)
    experiment = mlflow.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    return mlflow, experiment


def test_create_and_find(store):
    mlflow, experiment = store
    parameters = {f"p{number}": str(number) for number in range(150)} | {"note": 'a "b"\n', "empty": ""}
    odd = {"bytes": "z\udcf6lf"}  # of a command line: the node is given them as they are, and MLflow's stores take none
    run = runs.create(mlflow, experiment, {runs.TAG_JOB: "toy-1", "mlflow.user": "me"}, {**parameters, **odd}, "my name", None)
    stored = mlflow.get_run(run.info.run_id)
    assert stored.info.status == "SCHEDULED"
    assert stored.info.run_name == "my name"
    assert stored.data.params == {**parameters, "bytes": "z\\udcf6lf"}
    assert index.find(mlflow, "toy-1").info.run_id == run.info.run_id
    assert index.find(mlflow, run.info.run_id).info.run_id == run.info.run_id
    for name in ("n'o\"pe", "x" * 32, "a' OR '1'='1"):
        with pytest.raises(JobNotFoundError, match="toy-1"):
            index.find(mlflow, name)
    again = runs.create(mlflow, experiment, {runs.TAG_JOB: "toy-1"}, {}, None, None)
    assert index.find(mlflow, "toy-1").info.run_id == again.info.run_id


def test_an_experiment_that_is_made_by_two_at_once(tmp_path, store_template, monkeypatch):
    shutil.copy(store_template, tmp_path / "m.db")
    tracking = runs.absolute("sqlite:///m.db", tmp_path)
    mlflow = runs.client(tracking)
    real, other = mlflow.create_experiment, []

    def create(name):
        if not other:
            other.append(real(name))
        return real(name)

    monkeypatch.setattr(mlflow, "create_experiment", create)
    monkeypatch.setattr(runs, "client", lambda tracking: mlflow)
    assert submitting.experiment_named(tracking, "new").experiment_id == other[0]
    with pytest.raises(MlflowException, match="Invalid experiment name"):
        submitting.experiment_named(tracking, "")


def test_an_existing_run(store):
    mlflow, experiment = store
    made = mlflow.create_run(experiment)
    mlflow.log_param(made.info.run_id, "lr", "0.1")
    for tag in ("batchai.job", "batchai.promotion", "mine"):
        mlflow.set_tag(made.info.run_id, tag, "of an earlier job")
    same = runs.create(mlflow, experiment, {runs.TAG_JOB: "toy-2"}, {"lr": "0.1", "x": "z\udcf6"}, "named", made.info.run_id)
    stored = mlflow.get_run(same.info.run_id)
    assert same.info.run_id == made.info.run_id
    assert (stored.info.status, stored.data.tags[runs.TAG_JOB], stored.info.run_name) == ("SCHEDULED", "toy-2", "named")
    assert [tag for tag, value in stored.data.tags.items() if value == "of an earlier job"] == ["mine"]
    runs.create(mlflow, experiment, {}, {"x": "z\udcf6"}, None, made.info.run_id)
    with pytest.raises(UsageError, match="'lr'"):
        runs.create(mlflow, experiment, {}, {"lr": "0.2"}, None, made.info.run_id)
    with pytest.raises(UsageError, match="--run-id nope"):
        runs.create(mlflow, experiment, {}, {}, None, "nope")
    mlflow.delete_run(made.info.run_id)
    with pytest.raises(UsageError, match="is deleted"):
        runs.create(mlflow, experiment, {}, {}, None, made.info.run_id)


def test_a_time_as_a_tag():
    tags = {runs.TAG_STARTED: runs.time_text(1_700_000_001_200)}
    assert tags == {"batchai.startTime": "2023-11-14T22:13:21.200+00:00"}
    assert (runs.started(tags), runs.started({})) == (1_700_000_001_200, None)
    for text in ("1700000001200", "yesterday", "0001-01-01"):  # that somebody has written
        assert runs.started({runs.TAG_STARTED: text}) is None


def test_fail(store):
    mlflow, experiment = store
    run = runs.create(mlflow, experiment, {runs.TAG_JOB: "toy"}, {}, None, None)
    runs.fail(mlflow, run.info.run_id, "why " * 3000)
    stored = mlflow.get_run(run.info.run_id)
    assert stored.info.status == "FAILED"
    assert stored.data.tags["batchai.reason"].startswith("why why")
    assert stored.data.tags["batchai.executionState"] == "failed"


def test_a_client_uses_the_addresss_own_user(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "other")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "other")
    mlflow = runs.client(runs.absolute("http://me:word@127.0.0.1:9", HERE))
    assert mlflow.tracking_uri == "http://127.0.0.1:9"
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("me", "word")


def test_who_wants_a_store_waits_for_another_who_makes_it(store_template, tmp_path):
    """MLflow's own creation of tables fails for all but one."""
    shutil.copy(store_template, tmp_path / "m.db")
    tracking = runs.absolute("sqlite:///m.db", tmp_path)
    runs.client(tracking)  # what MLflow takes its time for the first time
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    thread = threading.Thread(target=runs.client, args=(tracking,), daemon=True)
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    os.close(folder)
    thread.join(60)
    assert not thread.is_alive()
    assert [path.name for path in tmp_path.iterdir()] == ["m.db"]


def test_a_new_client_drops_no_lock_that_its_process_holds_on_the_store(store_template, tmp_path):
    """A follower makes clients for new jobs while its threads write for others: a lost lock damages the database."""
    shutil.copy(store_template, tmp_path / "m.db")
    tracking = runs.absolute("sqlite:///m.db", tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "m.db", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        runs.client(tracking)
        code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('BEGIN IMMEDIATE')"
        other = subprocess.run([sys.executable, "-c", code, tmp_path / "m.db"], capture_output=True, text=True, check=False)
    assert other.returncode and other.stderr.endswith("database is locked\n"), other.stderr


def test_the_store_is_asked_once_for_all_runs_of_an_experiment_that_are_to_end(world, monkeypatch):
    client, asked = world.client, []
    experiment = client.create_experiment("e")
    cancelled, other, ended = (client.create_run(experiment).info.run_id for _ in range(3))
    client.set_tag(cancelled, "batchai.cancel", "True")
    client.set_tag(other, "batchai.cancel", "no")
    client.set_tag(ended, "batchai.cancel", "true")
    client.set_terminated(ended)
    search, answers = client.search_runs, []
    # Meanwhile another job's thread asks, too: it has the same answer.
    other_thread = threading.Thread(target=lambda: answers.append(tags.wanted(client, cancelled)))

    def look(*args, **options):
        asked.append(args)
        client.set_tag(other, "batchai.cancel", "yes")
        found = search(*args, **options)
        other_thread.start()
        other_thread.join(0.1)
        return found

    monkeypatch.setattr(client, "search_runs", look)
    tags = index.cancel_tags(world.uri, experiment)
    assert tags is index.cancel_tags(world.uri, experiment)
    assert [tags.wanted(client, run) for run in (cancelled, other)] == [True, False]
    assert asked == []  # of two each is asked for by itself
    assert [tags.wanted(client, run) for run in (ended, other, cancelled)] == [False, True, True]
    other_thread.join()
    assert answers == [True] and len(asked) == 1
