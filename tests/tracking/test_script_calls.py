"""MLflow calls of scripts, relayed into a real store: each once, wherever the relay dies."""

from __future__ import annotations

import hashlib
import json
from unittest.mock import Mock

import mlflow
import pytest
import requests
from job_folder import JobFolder, report
from relay_world import Crash

from mlflow_batchai.errors import ShareError
from mlflow_batchai.storage import credentials, open_share, spelling
from mlflow_batchai.storage.credentials import Credential
from mlflow_batchai.tracking.models.logged import last_of_scripts
from mlflow_batchai.tracking.script_calls import files

MODEL = "m-" + "5" * 32


@pytest.fixture
def scene(relayed):
    made, client, relay = relayed
    made.write(made.paths.plan, {**made.plan, "model": None})
    return made, client, relay


def said(kind, **body):
    return {"k": "report", "t": 1, "body": {"type": kind, "rank": 0, **body}}


def put(made, path, text, told=None):
    """Write an artifact; its record."""
    file = made.share.root / made.paths.artifacts / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    content = hashlib.sha256(text.encode()).hexdigest()
    return said("artifact", path=path, size=len(text) if told is None else told, sha256=content)


def a_model(made, model_id=MODEL, **fields):
    """What is said of a model, and its files."""
    description = {"model_id": model_id, "artifact_path": f"models:/{model_id}", "run_id": made.plan["runId"]}
    return [
        said(
            "logged_model", id=model_id, name="net", model_type="m", tags={"a": "b", "c": "d"}, params={"depth": "3"}, **fields
        ),
        said("logged_model", id=model_id, step=2),
        put(made, f"models/{model_id}/MLmodel", json.dumps(description)),
        put(made, f"models/{model_id}/data/weights.bin", "weights"),
        said("logged_model", id=model_id, tags={"c": None, "e": "f"}),
        said("logged_model", id=model_id, metrics=[{"key": "loss", "step": 1}, {"key": "never", "step": 1}]),
        said("logged_model", id=model_id, status="READY"),
    ]


def artifacts(client, run_id, path=None):
    """All but those of the job itself."""
    found = []
    for file in client.list_artifacts(run_id, path):
        if file.path != "job":
            found += artifacts(client, run_id, file.path) if file.is_dir else [file.path]
    return found


def text(client, run_id, path):
    with open(client.download_artifacts(run_id, path)) as file:
        return file.read()


def end(made, relay):
    made.announce(0)
    made.verdict()
    relay.finish(made.job.state())


def pass_through(made, relay):
    """All that was said, by one relay that lives."""
    first = relay()
    first.step()
    end(made, first)


def notes(made, client):
    return client.get_run(made.plan["runId"]).data.tags["batchai.notes"]


def test_params_tags_and_datasets(scene):
    """A script that logs a parameter of the run with another value fails nothing (mlflow 7152)."""
    made, client, relay = scene
    run_id = made.plan["runId"]
    client.log_param(run_id, "epochs", "5")
    facts = {"name": "digits", "digest": "d1", "source_type": "code", "source": "{}", "schema": None, "profile": "{}"}
    made.segment(
        0,
        said("param", values={"epochs": "6", "rate": "0.1", "bad:key()": "1", **{f"p{i}": str(i) for i in range(150)}}),
        said("param", values={"rate": "0.2", "p1": "1"}),
        said("tag", values={"a": "1", "gone": "1", "batchai.cancel": "true", "odd()": "1"}),
        said("tag", values={"a": "2", "gone": None}),
        said("dataset", tags={"mlflow.data.context": "training"}, **facts),
        said("param", values={"p": 1}),
        said("tag", values=None),
        said("dataset", name="no more"),
    )
    first = relay()
    first.step()
    assert client.calls.count("log_batch") < 20, "one call for each"
    end(made, first)
    run = client.get_run(run_id)
    assert {key: run.data.params[key] for key in ("epochs", "rate", "p149")} == {"epochs": "5", "rate": "0.1", "p149": "149"}
    assert (run.data.tags["a"], "gone" in run.data.tags, "batchai.cancel" in run.data.tags) == ("2", False, False)
    ((dataset, tags),) = [(given.dataset, given.tags) for given in run.inputs.dataset_inputs]
    assert (dataset.name, dataset.digest, tags[0].value) == ("digits", "d1", "training")
    told = notes(made, client)
    for words in ("'epochs' is '5'", "'rate' is '0.1'", "'bad:key()' was refused", "'odd()' was refused", "3 lines"):
        assert words in told
    assert run.info.status == "FINISHED"


def test_files_are_sent_when_they_are_new_or_others(scene, monkeypatch):
    made, client, relay = scene
    run_id = made.plan["runId"]
    made.segment(0, put(made, "run/d/a.txt", "one"), put(made, "run/b.txt", "later", told=99))
    first = relay()
    first._next_logs = 0.0
    first.step()
    with monkeypatch.context() as broken, pytest.raises(ShareError):
        broken.setattr(first._logs, "send", Mock(side_effect=ShareError("logs can't be read")))
        first.logs_when_due()
    assert artifacts(client, run_id) == ["d/a.txt"]  # of the other one not all is there yet
    made.segment(1, put(made, "run/d/a.txt", "one"), put(made, "run/c.txt", "c"))
    first.step()
    first._next_logs = 0.0
    client.calls.clear()
    first.logs_when_due()
    assert client.calls.count("log_artifact") == 1
    made.segment(2, put(made, "run/d/a.txt", "two"))
    first.step()
    # Another process goes on with what this one knew.
    client.calls.clear()
    made.segment(3, put(made, "run/c.txt", "c"))
    end(made, relay())
    assert (text(client, run_id, "d/a.txt"), text(client, run_id, "b.txt")) == ("two", "later")
    assert client.calls.count("log_artifact") == 2, client.calls


def test_nothing_astray_is_sent(scene, tmp_path):
    made, client, relay = scene
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    put(made, "run/link.txt", "x")
    link = made.share.root / made.paths.artifacts / "run/link.txt"
    link.unlink()
    link.symlink_to(secret)
    one = {"size": 6, "sha256": "0" * 64}
    wrong = ["run/../../../x", "/etc/passwd", "run//x", "plan.json", "run", "models/x", "run/" + "x" * 300, "run/a\0b"]
    made.segment(0, said("artifact", path="run/link.txt", **one), said("artifact", path="run/gone.txt", **one))
    made.segment(1, *[said("artifact", path=path, **one) for path in wrong], said("artifact", path=1, **one))
    pass_through(made, relay)
    assert artifacts(client, made.plan["runId"]) == []
    told = notes(made, client)
    assert "artifacts not sent: link.txt" in told and "gone.txt" in told and f"{len(wrong) + 1} lines" in told


def test_a_file_that_is_refused_holds_up_no_other(scene):
    made, client, relay = scene
    made.segment(0, put(made, "run/huge.bin", "1"), put(made, "run/next.txt", "2"))
    first = relay()
    first.step()
    refused = requests.HTTPError("413 Request Entity Too Large", response=requests.Response())
    refused.response.status_code = 413
    client.before["log_artifact"] = [refused]
    first._next_logs = 0.0
    first.logs_when_due()
    assert artifacts(client, made.plan["runId"]) == ["next.txt"]
    made.segment(1, put(made, "run/last.txt", "3"))
    first.step()
    # Another process tells it, once.
    second = relay()
    client.before["log_artifact"] = [UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed")]
    end(made, second)
    told = notes(made, client)
    assert told.startswith("artifacts not sent: huge.bin (") and told.count("huge.bin") == 1 and "last.txt (" in told


def test_text_that_no_store_takes(scene):
    made, client, relay = scene
    odd, shown = "a\0b\udcff", "a\\x00b\\udcff"
    facts = {"name": odd, "digest": "d1", "source_type": odd, "source": odd, "schema": odd, "profile": None}
    model = said("logged_model", id=MODEL, name=f"n{odd}", model_type=odd, tags={"t": odd}, params={"p": odd})
    made.segment(
        0,
        said("param", values={"p": odd, "q": "1"}),
        said("tag", values={"t": odd, "long": "x" * 8000}),
        said("dataset", tags={"mlflow.data.context": odd}, **facts),
        *[model, said("logged_model", id=MODEL, status="READY"), put(made, f"models/{MODEL}/MLmodel", "{}")],
    )
    pass_through(made, relay)
    run = client.get_run(made.plan["runId"])
    assert run.data.params == {"p": shown, "q": "1"}
    assert (run.data.tags["t"], len(run.data.tags["long"])) == (shown, 8000)
    ((dataset, tags),) = [(given.dataset, given.tags) for given in run.inputs.dataset_inputs]
    assert (dataset.name, dataset.source, dataset.schema, tags[0].value) == (shown,) * 4
    (made_model,) = client.search_logged_models([run.info.experiment_id])
    assert (made_model.model_type, made_model.tags["t"], made_model.params) == (shown, shown, {"p": shown})


def test_a_crowd_of_files_is_bounded(scene, monkeypatch):
    made, client, relay = scene
    monkeypatch.setattr(files, "CROWD", 3)
    monkeypatch.setattr(files, "MOST_WAITING", 4)
    made.segment(0, *[put(made, f"run/{i}.txt", str(i)) for i in range(4)])
    made.segment(1, *[put(made, f"run/x{i}.txt", str(i)) for i in range(4)])
    made.segment(2, *[put(made, f"run/y{i}.txt", str(i)) for i in range(6)])
    first = relay()
    first.step()
    assert len(artifacts(client, made.plan["runId"])) == 12  # those before them are sent when more come
    end(made, first)
    assert len(artifacts(client, made.plan["runId"])) == 12
    assert "2 more" in notes(made, client)


CRASHES = [
    ("create_logged_model", True),
    ("log_model_artifact", True),
    ("finalize_logged_model", True),
    ("log_outputs", True),
    (None, True),
]


def test_a_file_on_a_share_over_the_network(azure, monkeypatch):
    monkeypatch.setattr(credentials, "_remembered", {azure.account: Credential(azure.key)})
    azure.share("tracked")
    share = open_share(azure.url("tracked"))
    volumes = [{"scope": "cluster", "path": "share", "kind": "azureFiles", "how": "rclone"}]
    job = JobFolder(share, volumes=volumes).job
    name = "run/d/a:b?.txt"  # as a rank wrote it on a mount
    share.write(spelling.on_share(f"{job.paths.artifacts}/{name}"), b"seven b")
    for size in (7, None):
        with files.local(job, name, size) as file:
            assert (file.name, file.read_bytes()) == ("a:b?.txt", b"seven b")
        assert not file.exists()
    for path, size in ((name, 8), ("run/none", None)):
        with pytest.raises(files.NotThereError), files.local(job, path, size):
            pass


@pytest.mark.parametrize(("method", "done"), CRASHES)
def test_a_model_is_made_once_wherever_a_relay_dies(scene, method, done):
    made, client, relay = scene
    run_id = made.plan["runId"]
    made.segment(0, report(1, loss=0.5), report(2, loss=0.25), *a_model(made))
    first = relay()
    first.step()
    if method:
        (client.after if done else client.before)[method] = [Crash()]
        with pytest.raises(Crash):
            end(made, first)
        client.dead = False
        client.before, client.after = {}, {}
        first = relay()
        first.finish(made.job.state())
    else:
        end(made, first)
    run = client.get_run(run_id)
    experiment = run.info.experiment_id
    (model,) = [one for one in client.search_logged_models([experiment]) if str(one.status) == "READY"]
    assert (model.name, model.model_type, model.params) == ("net", "m", {"depth": "3"})
    assert {key: model.tags.get(key) for key in "ace"} == {"a": "b", "c": None, "e": "f"}
    assert [(metric.key, metric.value, metric.step) for metric in model.metrics] == [("loss", 0.5, 1)]
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model.model_id, 2)]
    assert len(client.get_metric_history(run_id, "loss")) == 2
    place = f"{model.artifact_location}/MLmodel"
    with open(mlflow.artifacts.download_artifacts(place, tracking_uri=client.tracking_uri)) as file:
        description = json.load(file)
    assert description == {"model_id": model.model_id, "artifact_path": f"models:/{model.model_id}", "run_id": run_id}
    assert sorted(one.path for one in client.list_logged_model_artifacts(model.model_id)) == ["MLmodel", "data"]
    assert last_of_scripts(client, run_id).model_id == model.model_id
    assert "batchai.notes" not in run.data.tags, run.data.tags["batchai.notes"]


def test_a_model_of_values_that_came_at_one_moment(scene):
    made, client, relay = scene
    values = [said("metric", ts=5, step=1, every=True, values={"loss": value}) for value in (0.5, 0.25)]
    made.segment(0, *values, *a_model(made))
    pass_through(made, relay)
    run = client.get_run(made.plan["runId"])
    (model,) = client.search_logged_models([run.info.experiment_id])
    assert (str(model.status), len(model.metrics)) == ("READY", 1)
    assert sorted(point.value for point in client.get_metric_history(run.info.run_id, "loss")) == [0.25, 0.5]
    assert "batchai.notes" not in run.data.tags, run.data.tags["batchai.notes"]


def test_models_that_can_t_be_made(scene):
    made, client, relay = scene
    run_id = made.plan["runId"]
    whole = a_model(made)
    made.segment(0, *whole, *a_model(made, "m-open")[:-1], *a_model(made, "m-short"), said("logged_model", id=7))
    (made.share.root / made.paths.artifacts / "models/m-short/data/weights.bin").unlink()
    made.segment(1, *[said("logged_model", id="m-failed", name="f", status="FAILED")])
    pass_through(made, relay)
    run = client.get_run(run_id)
    assert len(run.outputs.model_outputs) == 1
    told = notes(made, client)
    assert "'net' was begun" in told and "'net': data/weights.bin" in told
    assert run.info.status == "FINISHED"


def test_a_script_s_own_model_is_registered_where_no_file_was_saved(relayed):
    made, client, relay = relayed
    run_id = made.plan["runId"]
    made.segment(0, report(1, loss=0.5), *a_model(made))
    first = relay()
    first.step()
    client.after["create_model_version"] = [Crash()]
    with pytest.raises(Crash):
        end(made, first)
    client.dead = False
    relay().finish(made.job.state())
    run = client.get_run(run_id)
    (model,) = client.search_logged_models([run.info.experiment_id])
    assert (run.data.tags["batchai.model"], run.data.tags["batchai.modelVersion"]) == (model.model_uri, "models:/net/1")
    assert [str(one.version) for one in client.search_model_versions("name = 'net'")] == ["1"]
