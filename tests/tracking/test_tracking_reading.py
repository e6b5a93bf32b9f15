"""Jobs are looked up without MLflow, and found as MLflow finds them."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from mlflow.tracking import MlflowClient

from mlflow_batchai.client import jobview
from mlflow_batchai.errors import JobNotFoundError
from mlflow_batchai.tracking import experiments, index, reading, runs


@pytest.fixture
def serve() -> Iterator[Callable[[object], str]]:
    """Serves WSGI applications; returns their addresses."""
    servers = []

    class Silent(WSGIRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    def start(application) -> str:
        server = make_server("127.0.0.1", 0, application, handler_class=Silent)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def filled(world: Any) -> Any:
    """A store with jobs in three experiments, one of them deleted, and runs that are no jobs."""
    client = world.client
    for number, name in enumerate(("a", "b", "gone")):
        experiment = client.create_experiment(name, tags={"batchai.workspace": "vision"} if name == "b" else {})
        for job in range(3):
            tags = {
                "batchai.job": f"{name}-{job}",
                "batchai.cluster": "nc6",
                "batchai.workspace": ("default", "vision")[job % 2],
            }
            began = 1_700_000_000_000 + 10 * job + number
            run = client.create_run(experiment, began, {**tags, "batchai.executionState": ("running", "failed")[job % 2]})
            if job:
                client.set_terminated(run.info.run_id, ("KILLED", "FAILED")[job % 2], began + 5)
        client.create_run(experiment)
    client.delete_run(run.info.run_id)
    client.delete_experiment(experiment)
    return world


# MLflow's server imports a part of starlette that says so.
pytestmark = pytest.mark.filterwarnings("ignore:starlette.middleware.wsgi")


def no_mlflow(_tracking: object) -> None:
    raise AssertionError("MLflow was asked")


@pytest.fixture(params=["sqlite", "server"])
def both(request, filled, serve, monkeypatch) -> tuple[MlflowClient, MlflowClient]:
    """MLflow's client, and ours, which must not ask it."""
    uri = filled.uri
    if request.param == "server":
        from mlflow.server import app, handlers

        monkeypatch.setattr(handlers, "_tracking_store", None)
        monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", filled.uri)
        monkeypatch.setenv("MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE", "true")
        uri = serve(app)
    monkeypatch.setattr(runs, "client", no_mlflow)
    return filled.client, reading.client(runs.absolute(uri, filled.cwd))


def shown(found) -> list[dict[str, object]]:
    return [jobview.summary(run) for run in found]


def test_what_is_found(both):
    mlflow, ours = both
    assert [experiments.view(one) for one in experiments.every(ours)] == [
        experiments.view(one) for one in experiments.every(mlflow)
    ]
    assert experiments.view(experiments.find(ours, "b")) == experiments.view(experiments.find(mlflow, "b"))
    known = experiments.find(mlflow, "b").experiment_id
    for wanted in (
        {},
        {"name": "a-1"},
        {"workspace": "vision", "state": "failed", "cluster": "nc6"},
        {"state": index.TERMINATED},
        {"experiments": [known]},
        {"experiments": [known], "name": "a-1"},
        {"cluster": "it's"},
    ):
        found = index.jobs(ours, **wanted)
        assert shown(found) == shown(index.jobs(mlflow, **wanted)), wanted
        assert found.token is None
    assert len(index.jobs(ours)) == 6
    run = index.jobs(ours, name="b-1")[0]
    assert index.find(ours, run.info.run_id).info == run.info
    assert shown([ours.get_run(run.info.run_id)]) == shown([mlflow.get_run(run.info.run_id)])
    with pytest.raises(JobNotFoundError):
        index.find(ours, run.info.run_id, "default")


def test_a_page_goes_on_where_either_client_ended(both):
    mlflow, ours = both
    for first, second in ((ours, mlflow), (mlflow, ours), (ours, ours)):
        page = index.jobs(first, 4)
        token = page.token.decode() if isinstance(page.token, bytes) else page.token
        rest = index.jobs(second, 4, token)
        assert shown([*page, *rest]) == shown(index.jobs(mlflow)) and not rest.token


def test_credentials_stay_with_their_server(serve, world, monkeypatch):
    """They are sent as MLflow sends them, and no redirect is followed with them: MLflow is asked then."""
    asked: list[tuple[str, str | None]] = []

    def answers(environ, start):
        asked.append((environ["PATH_INFO"], environ.get("HTTP_AUTHORIZATION")))
        start("200 OK", [("Content-Type", "application/json")])
        return [b"{}"]

    def elsewhere(environ, start):
        start("302 Found", [("Location", target)])
        return [b""]

    target = serve(answers)
    monkeypatch.setattr(runs, "client", no_mlflow)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    assert experiments.every(reading.client(runs.absolute(target, world.cwd))) == []
    assert experiments.every(reading.client(runs.absolute(target.replace("//", "//me:se%40cret@"), world.cwd))) == []
    basic = base64.b64encode(b"me:se@cret").decode()
    path = "/api/2.0/mlflow/experiments/search"
    assert asked == [(path, "Bearer t0ken"), (path, f"Basic {basic}")]
    with pytest.raises(AssertionError, match="MLflow was asked"):
        experiments.every(reading.client(runs.absolute(serve(elsewhere), world.cwd)))
    assert len(asked) == 2


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_WORKSPACE"])
def test_what_only_mlflow_can_do_is_left_to_it(name, serve, world, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(runs, "client", no_mlflow)
    monkeypatch.setenv(name, "something")
    with pytest.raises(AssertionError, match="MLflow was asked"):
        experiments.every(reading.client(runs.absolute(serve(lambda *_: asked.append("!")), world.cwd)))
    assert asked == []


def test_the_list_imports_no_mlflow(filled):
    """Its import is nearly all that the command cost: 4 s of CPU. MLFLOW_TRACKING_URI or MLflow's default, both."""
    code = "import sys, atexit; from mlflow_batchai.cli import main; atexit.register(lambda: print('mlflow' in sys.modules)); main()"
    here = {key: value for key, value in filled.environment.items() if key != "MLFLOW_TRACKING_URI"}
    for environment, cwd in ((filled.environment, filled.cwd), (here, filled.root)):
        command = [sys.executable, "-c", code, "job", "list", "--query", "length(@)"]
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("6\nFalse\n", "")
