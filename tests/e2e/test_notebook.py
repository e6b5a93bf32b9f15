"""``mlflow_batchai.submit`` and ``attach``, as a notebook calls them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

import mlflow_batchai
from mlflow_batchai import errors
from mlflow_batchai.tracking import runs

TRAIN = """
    import os, sys
    from mlflow_batchai.training import report
    print("rate", sys.argv[1])
    report.log(step=0, loss=float(sys.argv[1]))
    if os.environ["HOROVOD_RANK"] == "0":
        open(os.environ["AZ_BATCHAI_OUTPUT_MODEL"] + "/weights.txt", "w").write("w" + sys.argv[1])
"""
MLPROJECT = """
    name: toy
    entry_points:
      main:
        parameters: {rate: float}
        command: python train.py {rate}
"""
BATCHAI = """
    properties:
      nodeCount: 1
      horovodSettings: {}
      outputDirectories: [{id: MODEL, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share}]
"""


@pytest.fixture(autouse=True)
def _here(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the user's."""
    monkeypatch.chdir(world.cwd)
    for name in ("BATCHAI_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, world.environment[name])


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each of them returns, called by a thread of its own."""
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda at=at, call=call: found.update({at: call()})) for at, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[at] for at in range(len(calls))]


def test_two_at_once(world: Any, tmp_path: Any) -> None:
    """Two jobs by two threads, in a process with a running event loop, as a notebook's is."""
    project = world.project(TRAIN, MLPROJECT, BATCHAI)

    def start(rate: float) -> mlflow_batchai.SubmittedJob:
        return mlflow_batchai.submit(
            project,
            parameters={"rate": rate},
            nodes=2,
            experiment="sweep",
            tags={"of": "us"},
            config={"name": f"rate-{1 / rate:.0f}"},
        )

    async def cell() -> list[mlflow_batchai.SubmittedJob]:
        return at_once(lambda: start(0.5), lambda: start(0.25))

    first, second = asyncio.run(cell())
    assert (first.name, second.name) == ("rate-2", "rate-4")
    assert sorted(first.logs(follow=True)) == ["[0] rate 0.5", "[1] rate 0.5"]
    again = mlflow_batchai.attach("rate-4")
    assert again.run_id == second.run_id
    assert at_once(first.wait, second.wait, again.wait) == [first, second, again]
    for job, rate in ((first, 0.5), (again, 0.25)):
        run = world.client.get_run(job.run_id)
        assert (job.status, run.info.status, job.reason) == ("FINISHED", "FINISHED", None)
        assert job.metrics == run.data.metrics and job.metrics["loss"] == rate
        assert run.data.tags["of"] == "us" and runs.tags_of(run)["batchai.nodes"] == "2"
        assert world.client.get_experiment(run.info.experiment_id).name == "sweep"
        assert list(job.logs(rank=1)) == [f"rate {rate}"] and list(job.logs(stream="stderr")) == []
        assert job.outputs()["MODEL/weights.txt"] == len(f"w{rate}") and "stdouterr/stdout-1.txt" in job.outputs()
        assert job.download("MODEL/weights.txt", tmp_path / job.name).read_text() == f"w{rate}"
        assert (job.download("MODEL", tmp_path / job.name) / "weights.txt").read_text() == f"w{rate}"
    with pytest.raises(errors.NotFoundError, match=r"there is no 'nope' in MODEL of job rate-2; there is: weights.txt"):
        first.download("MODEL/nope")
    with pytest.raises(errors.UsageError, match="has no rank 2"):
        first.logs(rank=2)


def test_a_job_that_fails(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import os, time\nprint('up')\nwhile not os.path.exists(os.environ['AZ_BATCHAI_MOUNT_ROOT'] + '/share/go'): time.sleep(0.05)"
    project = world.project(f"{script}\nraise SystemExit('no luck')")
    with mlflow.start_run() as parent:
        job = mlflow_batchai.submit(project, run_name="mine")
    with pytest.raises(TimeoutError, match=rf"job {job.name} has not ended within 0.1 s; it goes on"):
        job.wait(0.1)
    (world.home / "share" / "go").touch()
    with pytest.raises(errors.JobFailedError, match=r"(?s)failed: rank 0 .*no luck") as failed:
        job.wait(show=True)
    assert failed.value.exit_code == 1
    assert capsys.readouterr().out == "up\n"
    assert job.status == "FAILED" and "no luck" in (job.reason or "")
    run = world.client.get_run(job.run_id)
    assert (run.info.run_name, run.data.tags["mlflow.parentRunId"]) == ("mine", parent.info.run_id)
    job.cancel()
    assert world.client.get_run(job.run_id).info.status == "FAILED", "it had ended"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"parameters": {"rat": 1}}, errors.ParameterError, "parameter 'rate' (float) has no default and was not given"),
        ({"parameters": {"rate": 1}, "nodes": 0}, errors.DocumentError, "with config=: properties.nodeCount"),
        ({"parameters": {"rate": 1}, "run_id": "0" * 32}, errors.UsageError, "0" * 32),
    ],
)
def test_refused(world: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    project = world.project(TRAIN, MLPROJECT)
    with pytest.raises(error) as refused:
        mlflow_batchai.submit(project, **options)
    assert words in str(refused.value) and "Traceback" not in str(refused.value)
    assert not world.runs()


def test_nothing_to_attach_to(world: Any) -> None:
    with pytest.raises(errors.JobNotFoundError, match="there is no job 'nope'"):
        mlflow_batchai.attach("nope")
    with pytest.raises(errors.ProjectError, match="there is no project at"):
        mlflow_batchai.submit("nope")


def test_as_the_reference_has_it(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With a project in place of the one that trains."""
    reference = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
    (example,) = [text for text in re.findall(r"^```python\n(.*?)^```", reference, re.S | re.M) if "batchai.submit" in text]
    train = TRAIN.replace("loss=", "val_accuracy=").replace("sys.argv[1]", "'0.75'")
    project = world.project(train, MLPROJECT.replace("{rate: float}", "{data: string, epochs: int, augment: string}"), BATCHAI)
    (project / "MLproject").write_text((project / "MLproject").read_text().replace(" {rate}", ""))
    (world.cwd / "projects").mkdir()
    project.rename(world.cwd / "projects" / "cifar_horovod")
    exec(example, {})
    said = capsys.readouterr().out.splitlines()
    assert sorted(said[:2]) == ["[0] rate 0.75", "[1] rate 0.75"] and said[2:] == ["FINISHED 0.75"]
    assert (world.cwd / "trained" / "MODEL" / "weights.txt").read_text() == "w0.75"
    assert world.last.info.run_name == "from a notebook"
