"""The tracking server is down, slow, failing, or doesn't know our token any more: training never notices, and nothing is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import Cli
from endless import DONE, STEPS
from mlflow_server import MlflowServer
from store_world import Gate, cut, hang, hang_up, status

from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease, LeaseState
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import runs

OUTPUTS = """
    output = pathlib.Path(os.environ["AZ_BATCHAI_OUTPUT_M"])
    for name in ("one", "two", "three"):
        (output / name).write_text(name)
"""
BATCHAI = """
    wait: {wait}
    relayDeadline: {deadline}
    properties:
      outputDirectories: [{{id: M, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share, pathSuffix: m}}]
"""


@pytest.fixture
def gate(server: MlflowServer) -> Iterator[Gate]:
    made = Gate(server)
    yield made
    made.close()


pytestmark = pytest.mark.timeout(600)


class Scene:
    """A job in a world whose tracking server is behind the gate."""

    def __init__(self, world: Any, gate: Gate) -> None:
        self.world, self.gate = world, gate
        world.environment["MLFLOW_TRACKING_URI"] = gate.url
        world.uri = gate.server.url  # what the test itself asks

    def start(self, wait: bool = False, deadline: str = "PT24H") -> Any:
        """Start the job; its steps are in the run when this returns."""
        known = len(self.world.runs())
        batchai = BATCHAI.format(wait=str(wait).lower(), deadline=deadline)
        process = self.world.start(self.world.command(self.world.project(STEPS + OUTPUTS + DONE, batchai=batchai)))
        if not wait:
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, (out, err)
        self.world.wait(lambda: len(self.world.runs()) > known and "loss" in self.world.last.data.metrics, 150)
        self.run_id = self.world.last.info.run_id
        self.name = self.world.last.data.tags["batchai.job"]
        return process

    def go(self) -> None:
        """Have the job end."""
        (self.world.home / "share" / "go").touch()

    def step(self) -> int:
        """The step that it is at, by its own word."""
        return int((self.world.home / "share" / "step").read_text())

    def trains_on(self) -> None:
        """Wait until it has trained for some steps more, whatever our server does."""
        now = self.step()
        self.world.wait(lambda: self.step() > now + 10)

    def catches_up(self) -> None:
        """Wait until the run has what was reported by now."""
        now = self.step()
        self.world.wait(lambda: self.world.client.get_run(self.run_id).data.metrics["loss"] <= 1 / (now + 1), 150)

    @property
    def job(self) -> Job:
        run = self.world.client.get_run(self.run_id)
        return Job(DirectoryShare(self.world.home / "share"), runs.tags_of(run)["batchai.folder"])

    @property
    def follower(self) -> Any:
        return self.world.followers()[0]

    @property
    def log(self) -> str:
        """What its followers have said."""
        return (self.world.home / "followers" / f"{self.job.plan.job}.log").read_text()

    def check(self) -> None:
        """All is in MLflow, once, as it was reported; the run ended as and when the job did."""
        run = self.world.client.get_run(self.run_id)
        job = self.job
        verdict = json.loads(job.share.read(job.paths.verdict_file).splitlines()[0])
        assert (run.info.status, run.info.end_time) == ("FINISHED", verdict["endTime"])
        assert run.data.tags["batchai.executionState"] == "succeeded"
        assert "batchai.notes" not in run.data.tags, run.data.tags["batchai.notes"]
        bodies = [r["body"] for _, _, records in EventReader(job).read() for r in records if r["k"] == "report"]
        reported = [(body["step"], body["values"]["loss"], body["ts"]) for body in bodies if "loss" in body.get("values", {})]
        history = self.world.client.get_metric_history(self.run_id, "loss")
        assert sorted((point.step, point.value, point.timestamp) for point in history) == reported
        assert len(reported) == self.step() + 1
        assert self.world.artifact("logs/stdout.txt", run).endswith("done\n")
        assert [self.world.artifact(f"outputs/M/{name}", run) for name in ("one", "two", "three")] == ["one", "two", "three"]


@pytest.fixture
def scene(world: Any, gate: Gate) -> Scene:
    return Scene(world, gate)


FAULTS = {
    "500": status(500),
    "503": status(503, Retry_After="3600"),
    "429": status(429, Retry_After="3600"),
    "401": status(401),
    "cut in the middle": cut,
    "hung up": hang_up,
    "slow": hang,
}


def brings_news(line: str) -> bool:
    """Whether a request brings points or a file: while a job trains only its follower sends those."""
    return "/runs/log-batch" in line or line.startswith("PUT ")


def test_a_server_that_fails_in_every_way_while_a_job_trains(scene: Scene) -> None:
    """Training goes on through each fault; what was reported meanwhile comes when the fault is over, and nothing twice."""
    gate, world = scene.gate, scene.world
    process = scene.start(wait=True)
    for fault in FAULTS.values():
        # While others ask the server too, only the follower brings news: it has met the fault once some were refused.
        with gate.failing(fault, only=brings_news if fault is hang else lambda line: True):
            world.wait(lambda: any(map(brings_news, gate.failed)))
            scene.trains_on()
        # The second time in a later round: the one before has ended, and with it the trouble.
        scene.catches_up()
        scene.catches_up()
    with gate.server.stopped():
        scene.trains_on()
    scene.catches_up()
    # Its uploads fail in the middle, after the first file, while the server answers all else.
    sent: list[str] = []

    def second_file(line: str) -> bool:
        if line.startswith("PUT") and "/outputs/" in line:
            sent.append(line)
        return len(sent) == 2 and line == sent[1]

    gate.taken.clear()
    with gate.failing(status(503), only=second_file):
        scene.go()
        assert process.wait(150) == 0, process.communicate()
    assert len(gate.failed) == 1
    scene.check()
    outputs = [name for name in gate.artifacts() if name.startswith("outputs/")]
    assert sorted(outputs) == ["outputs/M/one", "outputs/M/three", "outputs/M/two"]
    points = gate.points(scene.run_id)
    assert len(points) == len(set(points))
    log = scene.log
    assert "Traceback" not in log and log.count("it works again") >= len(FAULTS)
    assert max(len(line) for line in log.splitlines()) < 700
    for code in ("500", "503", "429", "401"):
        assert re.search(rf"\b{code}\b", log), log


def test_a_follower_killed_while_the_server_is_down(scene: Scene, cli: Cli) -> None:
    """The job ends without anybody who could tell MLflow; ``job attach`` brings everything, when the server is back."""
    world = scene.world
    scene.start()
    with scene.gate.server.down():
        scene.trains_on()
        scene.follower.kill()
        scene.go()
        world.wait(lambda: not world.agents())
    assert world.last.info.status == "RUNNING"
    said = cli("job", "attach", scene.name)
    assert said.code == 0, said
    scene.check()


def test_the_relay_deadline(scene: Scene, cli: Cli) -> None:
    """Nothing is given up while the job goes on; 3 s after its end the follower says why it ends, and so does who watches."""
    gate, world = scene.gate, scene.world
    process = scene.start(wait=True, deadline="PT3S")
    with gate.failing(hang_up):
        world.wait(lambda: gate.failed)
        begun = scene.step()
        world.wait(lambda: scene.step() > begun + 80)  # 4 s
        follower = scene.follower
        scene.go()
        _, err = process.communicate(timeout=150)
        assert process.returncode == 1 and "Traceback" not in err, err
        job = scene.job
        sentence = (
            rf"the tracking server could not be used for \d+ (s|min) \(at last: .*127\.0\.0\.1.*\); job {scene.name} ended succeeded;"
            rf" its results are at {re.escape(job.share.url)}/{re.escape(job.folder)} .*batchai job attach {scene.name}"
        )
        assert re.search(sentence, err), err
        assert re.search(sentence, scene.log), scene.log
        world.wait(lambda: not follower.is_running())
        found = Lease(job).view()
        assert found.state is LeaseState.FREE and re.search(sentence, found.trouble)
        assert world.client.get_run(scene.run_id).info.status == "RUNNING"
    said = cli("job", "attach", scene.name)
    assert said.code == 0, said
    scene.check()
