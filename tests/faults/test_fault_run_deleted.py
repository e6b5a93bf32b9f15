"""A job's experiment is deleted in MLflow while the job runs: once it is restored, nothing of the job is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command_line import Cli
from endless import DONE, STEPS

from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import runs


class Scene:
    """A job, whose first steps are in its run."""

    def __init__(self, world: Any) -> None:
        self.world = world
        experiment = world.client.create_experiment("digits", artifact_location=f"{world.root}/artifacts")
        self.process = world.start([*world.command(world.project(STEPS + DONE, batchai="")), "--experiment-id", experiment])
        world.wait(lambda: any("loss" in run.data.metrics for run in world.client.search_runs([experiment])), 120)
        (run,) = world.client.search_runs([experiment])
        self.run_id, self.experiment, self.name = run.info.run_id, experiment, run.data.tags["batchai.job"]
        self.job = Job(DirectoryShare(world.home / "share"), runs.tags_of(run)["batchai.folder"])

    def trains_on(self) -> None:
        now = self._step()
        self.world.wait(lambda: self._step() > now + 20)

    def _step(self) -> int:
        return int((self.world.home / "share" / "step").read_text())

    def end(self) -> str:
        """Have the job end; what `mlflow run` says then."""
        (self.world.home / "share" / "go").touch()
        _, err = self.process.communicate(timeout=120)
        assert "Traceback" not in err, err
        return str(err)

    def check(self) -> None:
        """All is in the run, and its end is the job's."""
        run = self.world.client.get_run(self.run_id)
        verdict = json.loads(self.job.share.read(self.job.paths.verdict_file).splitlines()[0])
        assert (run.info.status, run.info.end_time) == ("FINISHED", verdict["endTime"])
        history = self.world.client.get_metric_history(self.run_id, "loss")
        assert [point.step for point in history] == list(range(self._step() + 1))
        assert self.world.artifact("logs/stdout.txt", run).endswith("done\n")
        assert "batchai.notes" not in run.data.tags, run.data.tags["batchai.notes"]
        assert Lease(self.job).finished()


def test_restored_after_the_end_of_its_job(world: Any, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(world)
    world.client.delete_experiment(scene.experiment)
    scene.trains_on()
    said = scene.end()
    why = f"run {scene.run_id} is deleted (mlflow runs restore --run-id {scene.run_id} brings it back); job {scene.name} ended"
    assert scene.process.returncode == 1 and why in said
    world.wait_gone()
    assert why in (world.home / "followers" / f"{scene.job.plan.job}.log").read_text()
    assert Lease(scene.job).view().state is LeaseState.FREE
    # Nobody relays it meanwhile.
    assert "no job that was signed with your key has not ended" in cli("job", "attach", "--all").err
    # Older versions took it for finished then.
    monkeypatch.setenv("BATCHAI_HOME", str(world.home))  # whose key signs it
    lease = Lease(scene.job.afresh())
    assert lease.acquire()
    lease.save({}, finished=True)
    world.client.restore_experiment(scene.experiment)
    (row,) = cli.json("job", "attach", "--all", "--wait")
    assert (row["result"], row["executionState"]) == ("finished", "succeeded")
    scene.check()
    world.wait_gone()
