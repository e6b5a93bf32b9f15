"""Sweeps that choose as they go: Optuna's trials from the runs alone, jobs that fall behind, the picture of importances."""

from __future__ import annotations

import builtins
import dataclasses
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep_world import Toys, begin

from mlflow_batchai.agent import protocol
from mlflow_batchai.client import lookup
from mlflow_batchai.errors import UsageError
from mlflow_batchai.follower import detached
from mlflow_batchai.sweep import search, sweeps
from mlflow_batchai.sweep.driver import Driver
from mlflow_batchai.sweep.parameters import Range, combine, examples, parse_values, space
from mlflow_batchai.sweep.results import STOPPED, judge
from mlflow_batchai.tracking import runs

SPACE = space(parse_values(["lr=1e-5..1e-2:log", "units=16..128:16", "act=relu,tanh", "drop=0..0.5", "epochs=4"]))


@pytest.mark.parametrize(
    ("text", "first", "drawn"),
    [
        ("16..128:16", ["16", "32", "48"], r"16|32|48|64|80|96|112|128"),
        ("1..3", ["1", "2", "3"], "1|2|3"),
        ("-1..2:2", ["-1", "1"], "-1|1"),
        ("0.1..0.9:0.2", ["0.1", "0.3", "0.5"], r"0\.[13579]"),
        ("1..2:0.5", ["1", "1.5", "2"], "1|1.5|2"),
        ("1e-5..1e-2:log", None, r"\d\.?\d*e-05|0\.\d+"),
        ("1..1000:log", None, r"\d{1,4}"),
        (".5..1.", None, r"0\.\d{1,7}|1"),
    ],
)
def test_a_range(text: str, first: list[str] | None, drawn: str) -> None:
    found = Range.of("p", [text])
    assert found is not None
    if first is None:
        with pytest.raises(UsageError, match="has no steps"):
            found.texts(3)
    else:
        assert found.texts(3) == first
        assert combine({"p": [text]})[0][:3] == [{"p": value} for value in first]
    chance = random.Random(1)
    values = [found.draw(chance) for _ in range(200)]
    assert all(re.fullmatch(drawn, value) for value in values), values
    assert all(found.low <= float(value) <= found.high for value in values) and len(set(values)) > 1
    assert examples({"p": [text], "q": ["a", "b", "c"]})[2] == {"p": found.written(found.low), "q": "c"}


@pytest.mark.parametrize("text", ["2..1", "1..1", "0..1:log", "-1..1:log", "1..2:0", "1..2:5", "1..2:-1", "1..1e999"])
def test_a_range_of_nothing(text: str) -> None:
    with pytest.raises(UsageError, match="there is nothing between these numbers"):
        Range.of("p", [text])


@pytest.mark.parametrize("texts", [["1..2", "3"], ["a..b"], ["1.2"], ["..2"], ["1..2:x"], ["../data"], [""]])
def test_what_is_no_range(texts: list[str]) -> None:
    assert Range.of("p", texts) is None


def test_numbers_by_chance() -> None:
    values = parse_values(["lr=1e-5..1e-2:log", "act=relu,tanh"])
    found, repeated = combine(values, sample=20, seed=3)
    assert len(found) == 20 and repeated == 0 and {each["act"] for each in found} == {"relu", "tanh"}
    assert combine(values, sample=20, seed=3)[0] == found != combine(values, sample=20, seed=4)[0]


class Killed(BaseException):
    pass


class Searching(Toys):
    """Toys whose parameters Optuna chooses."""

    def submit(self, number: int) -> Any:
        chosen = search.ask(self.sweep.plan, sweeps.look(self._mlflow, self.sweep).jobs, number)
        submitted = super().submit(number)
        for name, value in {"epochs": "4", **chosen}.items():
            self._mlflow.log_param(submitted.run_id, name, value)
        return submitted

    def train(self) -> None:
        """Jobs end, the better the nearer they are to a learning rate of 1e-3 and to 64 units."""
        for number, run_id in list(self.active.items()):
            given = self._mlflow.get_run(run_id).data.params
            value = 1 - abs(float(given["lr"]) - 1e-3) * 100 - abs(int(given["units"]) - 64) / 200
            self.end(number, *(["FAILED"] if number == 3 else []), val_accuracy=value)


def searching(store: runs.Tracking, trials: int, **changes: Any) -> sweeps.Sweep:
    how = {"combinations": [{"epochs": "4"}] * trials, "metric": "val_accuracy", "space": SPACE, "asks": True, "seed": 7}
    return begin(store, **{**how, "parallel": 1, **changes})


def drive(sweep: Any, toys: Toys, pause: Callable[[], Any], said: list[str] | None = None) -> list[dict[str, str]]:
    """Drive it to its end; the parameters of its jobs."""
    toys.sweep = sweep
    say = print if said is None else said.append
    Driver(sweep, lambda: toys, say, lambda seconds: pause()).run()
    jobs = sweeps.look(runs.client(sweep.tracking), sweep).jobs
    return [sweep.plan.parameters(number, run) for number, run in jobs.items()]


def test_a_killed_process_changes_no_trial(store, mlflow) -> None:
    """Another one asks Optuna for the same trials with the same seed, also when that no longer tries by chance."""
    trials = 14
    toys = Searching(mlflow)
    whole = drive(searching(store, trials), toys, toys.train)
    assert len(whole) == trials and all(set(each) == {"epochs", *SPACE} for each in whole)
    assert all(1e-5 <= float(each["lr"]) <= 1e-2 and int(each["units"]) % 16 == 0 for each in whole)

    sweep, toys = searching(store, trials), Searching(mlflow)
    for place in (2, 12):

        def dies(place: int = place) -> None:
            toys.train()
            if len(toys.started) == place:
                raise Killed

        with pytest.raises(Killed):
            drive(sweep, toys, dies)
    assert drive(sweep, toys, toys.train) == whole
    assert toys.started == list(range(1, trials + 1)), "each once"
    toys = Searching(mlflow)
    assert drive(searching(store, 3, seed=8), toys, toys.train) != whole[:3]

    run = mlflow.get_run(sweep.run_id)
    found = judge(sweep.plan, sweeps.look(mlflow, sweep).jobs, protocol.now_ms())
    assert found.best is not None and run.data.tags[sweeps.TAG_BEST] == found.best.runId
    assert found.columns == list(SPACE) and f"lr={found.best.parameters['lr']}" in run.data.tags["mlflow.note.content"]
    picture = Path(mlflow.download_artifacts(sweep.run_id, sweeps.IMPORTANCES)).read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_several_at_once_know_of_each_other(store, mlflow) -> None:
    toys = Searching(mlflow)
    sweep = searching(store, 6, parallel=3)
    chosen = drive(sweep, toys, toys.train)
    assert toys.most == 3 and len({each["lr"] for each in chosen}) == 6
    # What somebody has written into the store takes nobody beyond the sweep's own values.
    (number, run), *_ = sweeps.look(mlflow, sweep).jobs.items()
    for params in ({"lr": "x"}, {"act": "rm -rf"}, {}):
        changed = dataclasses.replace(sweep.plan, seed=9)
        run.data._params = {**run.data.params, **params} if params else {}
        again = search.ask(changed, {number: run}, 7)
        assert again["act"] in SPACE["act"] and 1e-5 <= float(again["lr"]) <= 1e-2


def falling(store: runs.Tracking, mlflow: Any, metric: str, sign: int) -> tuple[Any, Toys, Callable[[], None]]:
    """A sweep of eight jobs, of which the seventh is worse than most at its sixth epoch, but never says how it ends."""
    sweep = begin(store, combinations=[{"lr": str(n)} for n in range(8)], metric=metric, stop=True)
    toys = Toys(mlflow)

    def epochs() -> None:
        for number, run_id in list(toys.active.items()):
            bad = number == 7 and len(toys.started) >= 7
            for step in range(6):
                mlflow.log_metric(run_id, metric, sign * (0.5 + step / 10 - 0.2 * bad * (step > 4)), step=step)
            if not bad:
                toys.end(number)

    return sweep, toys, epochs


@pytest.mark.parametrize(("metric", "sign"), [("val_accuracy", 1), ("val_loss", -1)])
def test_a_job_that_falls_behind_is_ended(store, mlflow, metric: str, sign: int) -> None:
    sweep, toys, epochs = falling(store, mlflow, metric, sign)
    drive(sweep, toys, epochs)
    jobs = sweeps.look(mlflow, sweep).jobs
    assert toys.started == list(range(1, 9)) and toys.most == 2, "its place is taken by the next"
    tags = jobs[7].data.tags
    why = "stopped early at epoch 6"
    assert (jobs[7].info.status, tags[runs.TAG_REASON], tags[sweeps.TAG_STOPPED]) == ("KILLED", why, why)
    found = judge(sweep.plan, jobs, 0)
    (row,) = [row for row in found.rows if row.state == STOPPED]
    assert row.sentence(metric) == f"job toy-7 {why}, {metric} {sign * 0.8:g} (lr=6)" and found.rows[-1] == row
    assert mlflow.get_run(sweep.run_id).info.status == "FINISHED"


def test_a_process_that_died_before_it_ended_the_job(store, mlflow, monkeypatch) -> None:
    sweep, toys, epochs = falling(store, mlflow, "val_accuracy", 1)

    def dies() -> None:
        epochs()
        if 7 in toys.active:
            mlflow.set_tag(toys.active[7], sweeps.TAG_STOPPED, "stopped early at epoch 6")
            raise Killed

    with pytest.raises(Killed):
        drive(sweep, toys, dies)
    found = sweeps.look(mlflow, sweep)
    monkeypatch.setattr(lookup, "of_run", lambda run, tracking: toys.again(int(run.data.tags[sweeps.TAG_INDEX])))
    monkeypatch.setattr(detached, "ensure_follower", lambda submitted: None)
    drive(sweep, toys, epochs)
    assert found.jobs[7].info.status == "SCHEDULED"
    assert sweeps.look(mlflow, sweep).jobs[7].info.status == "KILLED"


def test_without_optuna(store, mlflow, monkeypatch) -> None:
    """A search is refused in one sentence; a sweep that needs no choice ends without a picture, and says so."""
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "optuna":
            raise ImportError("No module named 'optuna'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UsageError, match=r"needs Optuna: pip install 'mlflow-batchai\[optuna\]'"):
        search.require()
    toys, said = Toys(mlflow), []
    sweep = begin(store, space={"lr": ["0.1", "0.2"]}, metric="accuracy")
    drive(sweep, toys, lambda: toys.end_all(accuracy=1.0), said)
    assert mlflow.get_run(sweep.run_id).info.status == "FINISHED"
    assert said == ["no picture of the parameters' importances: No module named 'optuna'; pip install 'mlflow-batchai[optuna]'"]
