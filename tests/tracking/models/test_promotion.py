"""An alias of a registered model moves to a better version only, whoever else moves it."""

import shutil

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST
from mlflow.tracking import MlflowClient

from mlflow_batchai.errors import ModelError
from mlflow_batchai.tracking.models import promotion
from mlflow_batchai.tracking.models.promotion import Condition, promote

MORE, LESS = Condition("accuracy", "max"), Condition("loss", "min")


@pytest.fixture
def registry(store_template, tmp_path, monkeypatch):
    """(client, makes a version of the model ``net`` whose run has such metrics)"""
    monkeypatch.setattr(promotion, "MOVE_SECONDS", 0.0)
    shutil.copy(store_template, tmp_path / "m.db")
    client = MlflowClient(f"sqlite:///{tmp_path}/m.db")
    client.create_registered_model("net")

    def version(**metrics):
        run = client.create_run("0").info.run_id
        for key, values in metrics.items():
            for step, value in enumerate(values):
                client.log_metric(run, key, value, step=step)
        return str(client.create_model_version("net", source=str(tmp_path), run_id=run).version)

    return client, version


def holder(client):
    return str(client.get_model_version_by_alias("net", "champion").version)


def test_the_first_and_the_better_ones_are_promoted(registry):
    client, version = registry
    first = promote(client, "net", version(accuracy=[0.95, 0.8]), "champion", MORE)
    assert (first.done, holder(client)) == (True, "1")
    assert str(first) == "first version (accuracy 0.8), promoted to @champion"
    again = promote(client, "net", "1", "champion", MORE)
    assert (again.done, holder(client)) == (True, "1")
    for values, done, why in [
        ([0.7], False, "accuracy 0.7 does not beat 0.8 of version 1"),
        ([0.8], False, "accuracy 0.8 does not beat 0.8 of version 1"),
        ([0.1, 0.9], True, "accuracy 0.9 beats 0.8 of version 1"),
    ]:
        made = version(accuracy=values)
        told = promote(client, "net", made, "champion", MORE)
        assert told.done is done and told.why.endswith(why)
        assert (holder(client) == made) is done


def test_what_cant_be_compared_is_not_promoted(registry):
    client, version = registry
    for metrics, why in [({}, "its run has no loss"), ({"loss": [float("nan")]}, "the loss of its run is NaN")]:
        told = promote(client, "net", version(**metrics), "champion", LESS)
        assert not told.done and told.why.endswith(why)
    client.set_registered_model_alias("net", "champion", "1")
    told = promote(client, "net", version(loss=[0.5]), "champion", LESS)
    assert not told.done and "the run of version 1, which has it, has no loss" in told.why
    client.set_registered_model_alias("net", "champion", "2")
    assert promote(client, "net", "3", "champion", LESS).done, "anything is better than NaN"


def test_without_a_condition_the_newer_stays(registry):
    client, version = registry
    old, new = version(), version()
    assert promote(client, "net", new, "champion", None).done
    told = promote(client, "net", old, "champion", None)
    assert (told.done, holder(client)) == (False, new) and "is newer" in told.why


@pytest.mark.parametrize("other", [0.5, 0.99])
def test_two_jobs_that_end_at_once(registry, other):
    """The other one's alias comes between our look and our own; then both are looked at."""
    client, version = registry
    ours, theirs = version(accuracy=[0.9]), version(accuracy=[other])
    real = client.set_registered_model_alias
    moves = [theirs]

    def meanwhile(name, alias, to):
        real(name, alias, to)
        if moves:
            real(name, alias, moves.pop())

    client.set_registered_model_alias = meanwhile
    told = promote(client, "net", ours, "champion", MORE)
    assert told.done is (other < 0.9)
    assert holder(client) == (ours if other < 0.9 else theirs)


def test_a_worse_one_that_had_looked_before_moves_it_afterwards(registry, monkeypatch):
    client, version = registry
    ours, worse = version(accuracy=[0.9]), version(accuracy=[0.5])
    late = [worse] * promotion.MOVES
    monkeypatch.setattr(promotion.time, "sleep", lambda _: client.set_registered_model_alias("net", "champion", late.pop()))
    told = promote(client, "net", ours, "champion", MORE)
    assert (told.done, told.why, late) == (False, "other jobs move it all the time", [])
    monkeypatch.setattr(
        promotion.time, "sleep", lambda _: late and client.set_registered_model_alias("net", "champion", late.pop())
    )
    late = [worse] * (promotion.MOVES - 1)
    assert promote(client, "net", ours, "champion", MORE).done and holder(client) == ours


@pytest.mark.parametrize("other", [0.5, 0.99])
def test_two_jobs_that_give_the_first_alias_at_once(registry, other):
    """A database refuses to add what the other has added since this one looked."""
    client, version = registry
    ours, theirs = version(accuracy=[0.9]), version(accuracy=[other])
    real = client.set_registered_model_alias

    def refused_once(name, alias, to):
        client.set_registered_model_alias = real
        promote(client, name, theirs, alias, MORE)
        raise MlflowException("UNIQUE constraint failed: registered_model_aliases.name", BAD_REQUEST)

    client.set_registered_model_alias = refused_once
    assert promote(client, "net", ours, "champion", MORE).done is (other < 0.9)
    assert holder(client) == (ours if other < 0.9 else theirs)


def test_a_registry_that_gives_no_alias(registry):
    client, version = registry

    def refuse(name, alias, to):
        raise MlflowException("read-only", BAD_REQUEST)

    client.set_registered_model_alias = refuse
    with pytest.raises(ModelError, match=r"the alias champion of net could not be moved to version 1: read-only"):
        promote(client, "net", version(), "champion", None)


def test_what_a_person_has_moved_stays(registry):
    """A version that was better, and lost the alias to a person, gets it back from no other job."""
    client, version = registry
    broken, good = version(accuracy=[0.99]), version(accuracy=[0.7])
    promote(client, "net", broken, "champion", MORE)
    client.set_registered_model_alias("net", "champion", good)
    told = promote(client, "net", version(accuracy=[0.8]), "champion", MORE)
    assert (told.done, holder(client)) == (True, "3")
