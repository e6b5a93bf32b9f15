"""Jobs to look at in MLflow's pages: toy ranks that speak as the CIFAR project does, or the project itself for pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2] / "projects" / "cifar_horovod"
BIN = Path(sys.executable).parent
EXPERIMENT = MODEL = "digits"
RATES = ("1e-4", "3e-4", "1e-3")
ALIAS = "champion"
SETTINGS = {"model": {"register": MODEL, "alias": ALIAS, "promoteIf": "val_accuracy"}}

MLPROJECT = """
    name: cifar_horovod
    entry_points:
      main:
        parameters:
          epochs: {type: int, default: 100}
          learning_rate: {type: float, default: 0.0001}
          data: {type: string, default: cifar10}
          note: {type: string, default: ""}
        command: python train.py {epochs} {learning_rate} {data}
"""
BATCHAI = """
    systemMetrics: 1
    properties:
      nodeCount: 2
      horovodSettings: {processCount: 2}
      stdOutErrPathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share
      outputDirectories: [{id: MODEL, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share, pathSuffix: models}]
"""
# With more than 1000 epochs it trains until it is told to end.
TRAIN = """
    import os, sys, time
    from pathlib import Path
    from mlflow_batchai.training import report

    epochs, rate, data = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    if data != "digits":
        sys.exit(f"train.py: --data {data} is not a file: give cifar10, digits or the path of an .npz file.")
    go = Path(os.environ["AZ_BATCHAI_MOUNT_ROOT"], "share", "go")
    if os.environ["HOROVOD_RANK"] == "0":
        for epoch in range(epochs):
            left = 1 / (1 + 2e3 * rate * epoch)
            report.log(step=epoch, loss=2.3 * left, accuracy=1 - 0.9 * left, val_loss=2.4 * left, val_accuracy=1 - 0.92 * left)
            print(f"epoch {epoch + 1}: loss {2.3 * left:.4f}", flush=True)
            time.sleep(1 if epochs > 1000 else 0.05)
            if epochs > 1000 and go.exists():
                break
        folder = Path(os.environ["AZ_BATCHAI_OUTPUT_MODEL"], "saved")
        folder.mkdir()
        (folder / "MLmodel").write_text("flavors: {toy: {weights: weights}}")
        (folder / "weights").write_text("42")
        report.model(folder)
        print("trained", flush=True)
"""


class Jobs:
    """What somebody runs who looks at MLflow's pages afterwards.

    Attributes:
        world: its tracking store is a server.
        real: train the CIFAR project on digits, one job after the other: minutes, but worth a picture.
    """

    def __init__(self, world: Any, real: bool) -> None:
        self.world = world
        self.real = real
        self._project = PROJECT if real else world.project(TRAIN, MLPROJECT, BATCHAI, name="cifar_horovod")
        if not real:
            (world.home / "clusters").mkdir(parents=True)
            (world.home / "clusters" / "local.yaml").write_text("engine: local\nnodes: 8\n")

    def _given(self, **parameters: str) -> list[str]:
        given = {"data": "digits", **({"augment": "false"} if self.real else {}), **parameters}
        return [word for key, value in given.items() for word in ("-P", f"{key}={value}")]

    def _start(self, name: str, **parameters: str) -> subprocess.Popen[str]:
        words = ["--experiment-name", EXPERIMENT, "--run-name", name, *self._given(**parameters)]
        words += ["-c", '{"systemMetrics": true}'] if self.real else []
        return self.world.start(self.world.command(self._project, *words))  # type: ignore[no-any-return]

    @property
    def experiment_id(self) -> str:
        return str(self.world.client.get_experiment_by_name(EXPERIMENT).experiment_id)

    def named(self, name: str) -> Any:
        """The run of that name; None while there is none."""
        experiment = self.world.client.get_experiment_by_name(EXPERIMENT)
        found = self.world.client.search_runs([experiment.experiment_id], f"run_name = '{name}'") if experiment else []
        return found[0] if found else None

    def sweep(self) -> list[Any]:
        """Three runs that differ in their learning rate, each with a model that is the champion if it is the best so far."""
        words = ["--experiment-name", EXPERIMENT, "--run-name", "rates", *(["--parallel", "1"] if self.real else [])]
        values = self._given(epochs="16", learning_rate=",".join(RATES))
        command = [str(BIN / "batchai"), "sweep", str(self._project), *words, *values, "-c", json.dumps(SETTINGS), "-o", "json"]
        done = self.world.call(command, timeout=400)
        assert done.returncode == 0, (done.stdout, done.stderr)
        found = {job["runId"]: job["parameters"]["learning_rate"] for job in json.loads(done.stdout)["jobs"]}
        return [self.world.client.get_run(run_id) for run_id in sorted(found, key=lambda run_id: RATES.index(found[run_id]))]

    def failure(self) -> Any:
        """A run that failed for a reason."""
        process = self._start("typo", data="digitz")
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1, err
        return self.named("typo")

    def live(self) -> Any:
        """A run that reports its points one by one until it is told to end (a real one trains on)."""
        note = {} if self.real else {"note": "it's 5 o'clock"}
        self._running = self._start("baseline", epochs="40" if self.real else "100000", learning_rate="2e-4", **note)

        def reports() -> Any:
            run = self.named("baseline")
            return run if run and len(self.world.client.get_metric_history(run.info.run_id, "loss")) > 1 else None

        return self.world.wait(reports, 120, "points of a job that runs")

    def end(self) -> str:
        """Have that run end; what ``mlflow run`` printed of it."""
        (self.world.home / "share" / "go").touch()
        out, err = self._running.communicate(timeout=400)
        assert self._running.returncode == 0, (out, err)
        return str(err)
