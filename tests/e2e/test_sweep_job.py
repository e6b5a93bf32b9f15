"""Sweeps whose process dies, and sweeps that nobody stays for: real jobs on the local cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from command_line import Cli

from mlflow_batchai.sweep import search, sweeps
from mlflow_batchai.tracking.runs import Tracking

BATCHAI = Path(sys.executable).parent / "batchai"
MLPROJECT = """
    name: toy
    entry_points:
      main:
        parameters: {lr: float, gate: string}
        command: python train.py {lr} {gate}
"""
TRAIN = """
    import os, sys, time
    from mlflow_batchai.training import report
    report.log({"val_loss": float(sys.argv[1])}, step=0)
    print("up", flush=True)
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
"""


def test_a_sweep_goes_on_after_kill_9(cli: Cli) -> None:
    """Of whoever watches it: nothing changes. Of the process that starts its jobs: another one goes on."""
    world, gate = cli.world, cli.world.root / "gate"
    project = world.project(TRAIN, MLPROJECT)
    options = ("-P", "lr=0.1,0.2", "-P", f"gate={gate}", "--parallel", "1", "--run-name", "dies")
    process = world.start([str(BATCHAI), "sweep", str(project), *options])
    world.wait(
        lambda: any(run.info.run_name == "dies-1" and run.data.metrics for run in world.runs()), what="the first has begun"
    )
    process.kill()
    process.wait()
    begun = {run.info.run_name: run for run in world.runs()}
    assert set(begun) == {"dies", "dies-1"}
    os.kill(json.loads(begun["dies"].data.tags["batchai.sweepDriver"])["pid"], signal.SIGKILL)
    # Jobs of other code could not be compared.
    train = (project / "train.py").read_text()
    (project / "train.py").write_text(train + "\n# changed\n")
    gate.touch()
    said = cli("sweep", "attach", "dies")
    assert said.code == 1 and "has changed since sweep dies was started" in said.err
    (project / "train.py").write_text(train)

    said = cli("job", "attach", "--all", "-o", "none")
    assert "goes on with it, if no other machine does" in said.err
    said = cli("sweep", "attach", "dies")
    assert said.code == 0, said
    runs = {run.info.run_name: run for run in world.runs()}
    assert len(world.runs()) == len(runs) == 3
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert runs["dies-1"].info.run_id == begun["dies-1"].info.run_id
    assert not [name for name, run in runs.items() if name != "dies" and "batchai.attempt" in run.data.tags]
    assert runs["dies"].data.tags["batchai.sweepBest"] == runs["dies-1"].info.run_id, "less of a loss is better"


def test_nobody_stays_and_it_is_terminated(cli: Cli) -> None:
    world = cli.world
    project = world.project(TRAIN, MLPROJECT)
    said = cli("sweep", project, "-P", "lr=0.1,0.2", "-P", "gate=/nope", "--no-wait", "--run-name", "alone", "--parallel", "1")
    assert said.code == 0 and "stay with it: batchai sweep attach alone" in said.err, said
    world.wait(lambda: any(run.info.run_name == "alone-1" and run.data.metrics for run in world.runs()), what="it has begun")
    said = cli("sweep", "terminate", "alone", "-y")
    assert said.code == 0, said
    runs = {run.info.run_name: run for run in world.runs()}
    assert {name: run.info.status for name, run in runs.items()} == {"alone": "KILLED", "alone-1": "KILLED"}
    assert "1 terminated, 1 not started" in runs["alone"].data.tags["mlflow.note.content"]


SEARCHED = """
    import os, sys, time
    from mlflow_batchai.training import report
    value, gate = float(sys.argv[1]), sys.argv[2]
    for step in range(3):
        report.log({"val_accuracy": value + step}, step=step)
        time.sleep(0.1)
    while value < 0 or not (gate == "-" or os.path.exists(gate)):
        time.sleep(0.1)
"""


def test_a_search_goes_on_after_kill_9_with_the_same_trials(cli: Cli) -> None:
    world = cli.world
    project, gate = world.project(SEARCHED, MLPROJECT), world.home / "gate"
    options = ("--trials", "3", "--metric", "val_accuracy", "--seed", "3", "--parallel", "1", "--run-name", "dies")
    said = cli("sweep", project, "-P", "lr=1e-5..1:log", "-P", f"gate={gate}", "--sampler", "tpe", *options, "--no-wait")
    assert said.code == 0 and "3 jobs, 1 at once, to maximize val_accuracy; run " in said.err, said
    world.wait(lambda: any(run.info.run_name == "dies-1" and run.data.metrics for run in world.runs()), what="it has begun")
    (parent,) = [run for run in world.runs() if run.info.run_name == "dies"]
    os.kill(json.loads(parent.data.tags["batchai.sweepDriver"])["pid"], signal.SIGKILL)
    gate.touch()
    said = cli("sweep", "attach", "dies", "-o", "json")
    assert said.code == 0, said
    tracking = Tracking(world.uri, {"MLFLOW_TRACKING_URI": world.uri})
    jobs = {int(run.data.tags["batchai.sweepIndex"]): run for run in world.runs() if "batchai.sweepIndex" in run.data.tags}
    plan = sweeps.of_run(parent, tracking).plan
    for number, run in jobs.items():
        before = {other: jobs[other] for other in range(1, number)}
        assert search.ask(plan, before, number) == {"lr": run.data.params["lr"]}
    assert sorted(jobs) == [1, 2, 3]
    best = max(float(run.data.params["lr"]) for run in jobs.values())
    assert float(json.loads(said.out)["best"]["parameters"]["lr"]) == best


def test_a_job_that_falls_behind_gives_its_nodes_back(cli: Cli) -> None:
    world = cli.world
    project = world.project(SEARCHED, MLPROJECT)
    options = ("--metric", "val_accuracy", "--stop", "median", "--parallel", "2", "--run-name", "stops", "-P", "gate=-")
    said = cli("sweep", project, "-P", "lr=1,-1,2,3,4,5", *options)
    assert said.code == 0, said
    found = {run.info.run_name: run for run in world.runs()}
    states = {name: run.info.status for name, run in found.items()}
    assert states.pop("stops-2") == "KILLED" and set(states.values()) == {"FINISHED"} and len(states) == 6
    assert found["stops-2"].data.tags["batchai.reason"] == "terminated: stopped early at epoch 3"
    assert "5 succeeded, 1 stopped early" in said.err
