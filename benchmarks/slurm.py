"""What our start on Slurm costs: from submit to the first rank, beside a bare sbatch of the same script, and submitit.

    python benchmarks/slurm.py [--pairs 5]

A real Slurm of two nodes on this machine. Each round runs bare, ours, bare, with MLflow imported: the ratio bare/bare says how
much of the difference is noise. submitit takes part where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from slurm_daemons import SlurmDaemons, missing
from world import make_store

# What each of them starts on two nodes; the first one's time counts.
SCRIPT = "import sys, time\nwith open(sys.argv[1], 'a') as file:\n    file.write(f'{time.time()}\\n')\n"


def touch(script: str, mark: str) -> None:
    """What submitit runs."""
    subprocess.run([sys.executable, script, mark], check=True)


class Rounds:
    """Starts the script in several ways.

    Args:
        root: a folder for all that is written.
    """

    def __init__(self, slurm: SlurmDaemons, root: Path) -> None:
        self._slurm, self._root = slurm, root
        self._project, self._mark = root / "toy", root / "mark"
        (root / "home" / "clusters").mkdir(parents=True)
        (root / "share").mkdir()
        self._project.mkdir()
        document = {"engine": "slurm", "share": f"{root}/share", "root": f"{root}/nodes", "python": sys.executable}
        (root / "home" / "clusters" / "bench.yaml").write_text(json.dumps(document))
        command = f"python train.py {self._mark}"
        (self._project / "MLproject").write_text(json.dumps({"name": "toy", "entry_points": {"main": {"command": command}}}))
        (self._project / "train.py").write_text(SCRIPT)
        properties = {"nodeCount": 2, "horovodSettings": {}}
        (self._project / "batchai.yaml").write_text(json.dumps({"cluster": "bench", "properties": properties}))
        os.environ |= {"BATCHAI_HOME": f"{root}/home", "MLFLOW_TRACKING_URI": f"sqlite:///{make_store(root / 'store.db')}"}

    def seconds(self, start: Callable[[], object]) -> float:
        """From its start to the first line of the script; returns when Slurm is free again."""
        self._mark.unlink(missing_ok=True)
        begun = time.time()
        start()
        until = begun + 120
        while not self._mark.exists() or not self._mark.read_text() or self._slurm.ask("squeue", "-h"):
            if time.time() > until:
                sys.exit("the job has not ended within 120 s")
            time.sleep(0.2)
        return min(map(float, self._mark.read_text().split())) - begun

    def bare(self) -> None:
        """A job as its author would write it."""
        script = f"#!/bin/sh\nsrun --mpi=none {sys.executable} {self._project}/train.py {self._mark}\n"
        options = ["--nodes=2", "--ntasks-per-node=1", f"--output={self._root}/bare.out"]
        subprocess.run(["sbatch", "--parsable", *options], input=script, text=True, check=True, stdout=subprocess.DEVNULL)

    def ours(self) -> None:
        """The project, as ``mlflow run`` submits it."""
        import mlflow

        mlflow.projects.run(str(self._project), backend="batchai", synchronous=False)

    def submitit(self) -> None:
        """The script through submitit."""
        import submitit

        executor = submitit.AutoExecutor(folder=str(self._root / "submitit"))
        executor.update_parameters(nodes=2, tasks_per_node=1)
        executor.submit(touch, f"{self._project}/train.py", str(self._mark))


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    rows: list[tuple[float, float, float]] = []
    others: list[float] = []
    with tempfile.TemporaryDirectory(prefix="slurm") as daemons, tempfile.TemporaryDirectory() as scratch:
        slurm = SlurmDaemons(Path(daemons), 2, {})
        os.environ["SLURM_CONF"] = str(slurm.config)
        try:
            rounds = Rounds(slurm, Path(scratch))
            rounds.seconds(rounds.ours)  # imports, and a follower that stays
            for number in range(options.pairs):
                rows.append((rounds.seconds(rounds.bare), rounds.seconds(rounds.ours), rounds.seconds(rounds.bare)))
                others += [rounds.seconds(rounds.submitit)] if find_spec("submitit") else []
                print(f"round {number + 1} of {options.pairs} done", file=sys.stderr)
        finally:
            slurm.stop()
    print(
        f"{options.pairs} rounds of bare, ours, bare; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians (min to"
        " max)\n"
    )
    _row("from submit to the first rank: ours - bare (s; at most 1.0)", [own - (one + two) / 2 for one, own, two in rows])
    _row("from submit to the first rank: bare - bare (s)", [two - one for one, _, two in rows])
    _row("from submit to the first rank: ours (s)", [own for _, own, _ in rows])
    _row("from submit to the first rank: bare sbatch (s)", [one for one, _, _ in rows])
    if others:
        _row("from submit to the first rank: submitit (s)", others)


def _row(title: str, values: list[float]) -> None:
    print(f"{title}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
