"""Commands of container engines, as text, and a whole job by a stand-in for docker that notes its arguments."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from node_world import Cluster, Job
from waiting import wait_for

from mlflow_batchai.agent import containers, plan
from mlflow_batchai.agent.containers import container as commands
from mlflow_batchai.agent.containers import engines
from mlflow_batchai.agent.containers.container import Mount
from mlflow_batchai.agent.containers.engines import Engine
from mlflow_batchai.agent.environment import for_engines
from mlflow_batchai.agent.mounts import mountpoints

DOCKER, PODMAN = Engine("/usr/bin/docker", "docker"), Engine("/usr/bin/podman", "podman")
PLAN = plan.Container("team/toy:1")

# Stands for docker: every call's arguments go to a file, what is to run in the container runs here.
FAKE = r"""#!/bin/bash
printf '%s\0' "$@" >> "$FAKE/calls"; printf '\n' >> "$FAKE/calls"
config=; host=
while [[ $1 == --config=* || $1 == --host=* ]]; do shift; done
case $1 in
  version) echo "Server: Docker Engine - Community" ;;
  info) echo "[name=seccomp,profile=builtin]" ;;
  context) echo unix:///run/fake.sock ;;
  login) cat > "$FAKE/password"; [ -e "$FAKE/closed" ] && { echo "denied: $(cat "$FAKE/password") is wrong" >&2; exit 1; }; echo "Login Succeeded" ;;
  pull) [ -e "$FAKE/gone" ] && { echo "manifest unknown" >&2; exit 1; }; [ -e "$FAKE/slow" ] && exec sleep 600; echo "Pulling fs layer"; touch "$FAKE/image" ;;
  image) [ -e "$FAKE/image" ] || exit 1; echo '[{"Id": "sha256:feed", "Config": {"Env": ["PATH='"$PATH"'", "FROM=image"]}}]' ;;
  run) [ -e "$FAKE/broken" ] && { echo "docker: Error response from daemon: no shim" >&2; exit 125; }; printf '%s\n' "${@#--name=}" > "$FAKE/container" ;;
  inspect) echo 0 ;;
  exec)
    shift
    while [[ $1 == --* ]]; do [[ $1 == --workdir=* ]] && cd "${1#*=}"; shift; done
    shift
    FROM=image exec "$@" ;;
  rm) rm -f "$FAKE/container" ;;
  ps) [ ! -e "$FAKE/container" ] || cat "$FAKE/container" ;;
esac
"""


class FakeDocker:
    """A program ``docker`` in a folder of its own, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        program = folder / "docker"
        program.write_text(FAKE.replace("$FAKE", str(folder)))
        program.chmod(0o755)
        self.environment = {"PATH": f"{folder}:{os.environ['PATH']}"}

    def set(self, name: str) -> None:
        (self.folder / name).touch()

    def calls(self) -> list[list[str]]:
        text = (self.folder / "calls").read_text() if (self.folder / "calls").exists() else ""
        return [line.split("\0")[:-1] for line in text.split("\n") if line.endswith("\0")]

    def verbs(self) -> list[str]:
        return [next(word for word in call if not word.startswith("--")) for call in self.calls()]

    def submit(self, cluster: Cluster, command: str, container: dict | None = None, **changes) -> Job:
        return cluster.submit(
            command, container={**plan.plain(PLAN), **(container or {})}, environment=self.environment, **changes
        )


@pytest.fixture
def docker(tmp_path: Path) -> FakeDocker:
    return FakeDocker(tmp_path / "fake")


def test_mounts_reach_the_container_where_the_node_shares_them() -> None:
    table = (
        "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "30 27 0:25 / /data rw,relatime - xfs /dev/vdb rw\n"
        "31 30 0:26 / /data/with\\040space rw master:7 - xfs /dev/vdc rw\n"
    )
    expected = {"/srv/x": "rslave", "/data/x": "rprivate", "/data/with space/x": "rslave", "/database": "rslave"}
    assert {path: commands.propagation(path, mountpoints.parse(table)) for path in expected} == expected


def test_the_command_that_starts_a_container() -> None:
    wanted = replace(PLAN, shm_size="16gb", volumes=("/data:/data:ro",))
    mounts = [Mount("/srv/a, b", "rslave"), Mount("/agents/agent.pyz", read_only=True)]
    rest = ["sha256:feed", "n", {"BATCHAI_JOB": "j/1"}, mounts, {"PATH": "/bin:/jobs/bin"}, "0:0"]
    text = """
    run --detach --rm --name=n --label=BATCHAI_JOB=j/1 --network=host --stop-signal=SIGKILL --pids-limit=-1
    --security-opt=label=disable --user=0:0 --shm-size=16gb GPUS --env=PATH=/bin:/jobs/bin
    '--mount=type=bind,"source=/srv/a, b","target=/srv/a, b",bind-propagation=rslave'
    --mount=type=bind,source=/agents/agent.pyz,target=/agents/agent.pyz,bind-propagation=rprivate,readonly
    --volume=/data:/data:ro --entrypoint=sh sha256:feed -c KEEPER /jobs/alive"""
    for engine, gpus in (
        (DOCKER, ['--gpus="device=GPU-a,MIG-b"']),
        (PODMAN, ["--device=nvidia.com/gpu=GPU-a", "--device=nvidia.com/gpu=MIG-b"]),
    ):
        made = commands.create(engine, wanted, *rest, gpus=["GPU-a", "MIG-b"], pipe="/jobs/alive")
        words = {"GPUS": gpus, "KEEPER": [commands.KEEPER]}
        assert made == [engine.program, *(each for word in shlex.split(text) for each in words.get(word, [word]))]
    without = commands.create(DOCKER, replace(wanted, shm_size=None), *rest, gpus=[], pipe="/jobs/alive")
    assert not [word for word in without if word.startswith(("--shm", "--gpus", "--device"))]


@pytest.mark.parametrize(
    ("engine", "gpus", "option"),
    [
        (DOCKER, ["GPU-a"], "--gpus=device=GPU-a"),
        (DOCKER, ["0"], "--gpus=all"),
        (PODMAN, ["GPU-a"], "--device=nvidia.com/gpu=all"),
    ],
)
def test_gpus_that_a_container_is_given(engine: Engine, gpus: list[str], option: str) -> None:
    offered = commands.offered(engine, gpus)
    assert option in commands.create(engine, PLAN, "sha256:feed", "n", {}, [], {}, "0:0", gpus=offered, pipe="/jobs/alive")
    assert commands.offered(engine, []) == []


def test_no_value_stands_in_the_arguments() -> None:
    client = {"PATH": "/usr/bin", "HOME": "/root", "https_proxy": "http://proxy"}
    variables = {"SECRET": "s3cret", "https_proxy": "http://proxy", "A": "a\nb"}
    argv, environment = commands.enter(DOCKER, "n", ["bash", "-c", "train"], variables, client, "/code", 0o077)
    options = ["--workdir=/code", "--env=SECRET", "--env=https_proxy", "--env=A"]
    shell = ["/bin/sh", "-c", 'umask 077; exec "$@"', "sh"]
    assert argv == ["/usr/bin/docker", "exec", *options, "n", *shell, "bash", "-c", "train"]
    assert environment == {**client, **variables}


def test_what_the_client_would_heed_itself_goes_under_another_name() -> None:
    client = {"PATH": "/usr/bin", "HOME": "/root"}
    names = ("PATH", "LD_LIBRARY_PATH", "DOCKER_HOST", "TMPDIR", "GODEBUG", "MINE")
    variables = {name: f"/of/the/job's {name}" for name in names}
    argv, environment = commands.enter(DOCKER, "n", ["/usr/bin/env"], variables, client, "/", 0o022, stdin=True)
    assert environment["PATH"] == "/usr/bin"
    assert not {"LD_LIBRARY_PATH", "DOCKER_HOST", "TMPDIR", "GODEBUG"} & set(environment)
    at = argv.index("n")
    assert "--interactive" in argv[:at]
    # As the engine would: the named variables, and what follows the container's name.
    named = [word.removeprefix("--env=") for word in argv[:at] if word.startswith("--env=")]
    given = {"PATH": "/bin", **{name: environment[name] for name in named}}
    said = subprocess.run(argv[at + 1 :], env=given, capture_output=True, text=True, check=True).stdout
    seen = dict(line.split("=", 1) for line in said.splitlines())
    assert {name: seen.pop(name) for name in names} == variables
    assert not [name for name in seen if name.startswith("BATCHAI_")]


def test_engines_see_where_they_are_and_no_secret() -> None:
    given = {"DOCKER_HOST": "ssh://h", "DOCKER_AUTH_CONFIG": "secret", "DOCKER_PASSWORD": "secret", "CONTAINERS_CONF": "/c"}
    assert for_engines(given) == {"DOCKER_HOST": "ssh://h", "CONTAINERS_CONF": "/c"}


def test_which_engine(tmp_path: Path, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    """docker if it answers, else podman; a docker that is podman takes podman's options."""
    path = {"PATH": str(docker.folder) + ":/bin:/usr/bin"}
    assert engines.look(path)[0] == Engine(str(docker.folder / "docker"), "docker")
    (docker.folder / "docker").write_text("#!/bin/bash\necho 'Client: Podman Engine'\n")
    assert engines.look(path)[0] == Engine(str(docker.folder / "docker"), "podman")
    (docker.folder / "docker").write_text("#!/bin/bash\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n")
    podman = docker.folder / "podman"
    podman.write_text("#!/bin/bash\n")
    podman.chmod(0o755)
    assert engines.look(path)[0] == Engine(str(podman), "podman")
    podman.write_text("#!/bin/bash\nexec sleep 600\n")
    monkeypatch.setenv("PATH", path["PATH"])
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.5)
    begun = time.monotonic()
    assert str(containers.missing(PLAN)).startswith(
        "no container engine works (docker: Cannot connect to the Docker daemon; podman: podman info did not answer within 0 s)"
    )
    assert time.monotonic() - begun < 40
    monkeypatch.setenv("PATH", "/nowhere")
    assert "(docker is not on PATH; podman is not on PATH)" in str(containers.missing(PLAN))


def test_a_job_by_docker(cluster: Cluster, docker: FakeDocker) -> None:
    """The password comes by standard input into a configuration of its own, which is gone before the container starts."""
    job = docker.submit(
        cluster,
        'echo "$FROM $SECRET $(pwd)"; exit 3',
        {"image": "reg.example.com/toy:1", "server": "reg.example.com", "credentials": True, "shmSize": "1gb"},
        preparation="echo prepared",
        secrets={"SECRET": "s3cret"},
        told={"registry": {"username": "ada", "password": "p4ssword"}},
    )
    verdict = job.wait()
    assert (verdict["executionState"], verdict["exitCode"]) == ("failed", 3), job.said()
    folder = cluster.roots[0] / "jobs" / job.plan.job
    assert job.log("stdout.txt") == f"image s3cret {folder}/temp/code\n"
    assert job.log("stdout-job_prep.txt") == "prepared\n"
    assert "docker: Pulling fs layer" in job.log("execution.log")
    calls = docker.calls()
    own = [f"--config={folder}/registry", "--host=unix:///run/fake.sock"]
    assert [*own, "login", "--username=ada", "--password-stdin", "reg.example.com"] in calls
    assert [*own, "pull", "reg.example.com/toy:1"] in calls
    assert (docker.folder / "password").read_text() == "p4ssword"
    [run] = [call for call in calls if call[0] == "run"]
    for mount in (cluster.roots[0] / "mounts", folder, cluster.share):
        assert f"--mount=type=bind,source={mount},target={mount},bind-propagation=rprivate" in run
    assert {f"--name=batchai-{job.plan.job}-1-0", f"--label=BATCHAI_JOB={job.mark}", "--shm-size=1gb", "sha256:feed"} < set(run)
    assert docker.verbs()[-2:] == ["rm", "ps"]
    assert not (docker.folder / "container").exists()
    assert "s3cret" not in shlex.join(word for call in calls for word in call)
    for file in [*cluster.roots[0].rglob("*"), *(cluster.share / job.plan.folder / "batchai").rglob("*")]:
        assert not file.is_file() or b"p4ssword" not in file.read_bytes(), file


def test_a_registry_that_refuses(cluster: Cluster, docker: FakeDocker) -> None:
    docker.set("closed")
    told = {"registry": {"username": "ada", "password": "p4ssword"}}
    job = docker.submit(cluster, "echo never", {"credentials": True}, told=told)
    verdict = job.wait()
    assert verdict["errors"][0]["code"] == "FailedStartingContainer"
    assert "the container of image team/toy:1 on node-0: docker.io does not let ada in: denied: *** is" in verdict["reason"]
    assert "run" not in docker.verbs()
    assert not (cluster.roots[0] / "container.json").exists()


def test_an_image_of_the_node_serves_where_its_registry_does_not(cluster: Cluster, docker: FakeDocker) -> None:
    docker.set("image")
    docker.set("gone")
    job = docker.submit(cluster, "echo here")
    assert job.wait()["executionState"] == "succeeded", job.said()
    note = "the image team/toy:1 can't be pulled (manifest unknown); this node has one of that name, which is used"
    assert note in job.log("execution.log")
    assert note in [record["phase"] for record in job.records("phase")]


def test_an_image_that_is_nowhere(cluster: Cluster, docker: FakeDocker) -> None:
    """The reason and the image are told (azure-docs 15559: FailedStartingContainer and no word more)."""
    docker.set("gone")
    verdict = docker.submit(cluster, "echo never").wait()
    [error] = verdict["errors"]
    assert error["code"] == "FailedStartingContainer"
    assert {"name": "imageName", "value": "team/toy:1"} in error["details"]
    assert "on node-0: it can't be pulled: manifest unknown" in verdict["reason"]


@pytest.mark.parametrize("image", ["localhost/toy:1", "team/toy@sha256:" + "ab" * 32])
def test_an_image_that_cannot_have_changed_is_not_pulled(cluster: Cluster, docker: FakeDocker, image: str) -> None:
    docker.set("image")
    assert docker.submit(cluster, "echo here", {"image": image}).wait()["executionState"] == "succeeded"
    assert "pull" not in docker.verbs()


def test_a_cancel_does_not_wait_for_the_image(cluster: Cluster, docker: FakeDocker) -> None:
    docker.set("slow")
    job = docker.submit(cluster, "echo never")
    wait_for(lambda: "pull" in docker.verbs(), what=job.said)
    job.cancel("ada", "enough")
    assert job.wait()["terminated"], job.said()
    assert job.processes() == set()
    assert "run" not in docker.verbs()


def test_what_a_job_prepared_is_kept_for_its_image(cluster: Cluster, docker: FakeDocker) -> None:
    changes = {"preparation": 'echo once; touch "$BATCHAI_PREPARATION_DIR/made"', "preparationCache": "0123456789abcdef"}
    for expected in ("once\n", ""):
        job = docker.submit(cluster, 'ls "$BATCHAI_PREPARATION_DIR"', **changes)
        cluster.roots[1] = cluster.roots[0]  # the queue gives the next job the other node, which is the same one
        assert job.wait()["executionState"] == "succeeded", job.said()
        assert job.log("stdout-job_prep.txt") == expected
        assert job.log("stdout.txt") == "made\n"
    marker = (cluster.roots[0] / "prepared" / "0123456789abcdef" / ".complete").read_text()
    assert marker.startswith("sha256:feed ")
