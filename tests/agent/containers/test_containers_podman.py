"""Jobs in containers: real agents, real podman, toy ranks; whatever happens, nothing of the container is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import podman_engine
import psutil
import pytest
from argument_watch import watch
from image_registry import image_registry
from node_world import SAVES, Cluster, Job, python39
from podman_engine import IMAGE, Podman
from waiting import wait_for

from mlflow_batchai.agent.reservation import agents

SECRET = "s3cret-of-the-job"
PASSWORD = "p4ssword-of-the-registry"

# Horovod's rendezvous server, as far as our own program uses it.
HOSTS = "def parse_hosts(text):\n    return text\n\n\ndef get_host_assignments(hosts, size):\n    return hosts\n"
SERVER = """
import socketserver
from http.server import BaseHTTPRequestHandler, HTTPServer

class RendezvousHandler(BaseHTTPRequestHandler):
    pass

class RendezvousHTTPServer(HTTPServer):
    def __init__(self, address, handler, verbose):
        super().__init__(address, handler)

class RendezvousServer:
    def init(self, assignments):
        pass
"""


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with podman_engine.podman() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(podman: Podman) -> Iterator[None]:
    """No test may leave a container, and each begins with none."""
    yield
    assert podman.containers() == []


def submit(cluster: Cluster, podman: Podman, command: str, container: dict | None = None, **changes) -> Job:
    environment = {**podman.environment, **changes.pop("environment", {})}
    image = {"image": IMAGE, "server": "localhost", "shmSize": None, "credentials": False, "volumes": [], "environment": {}}
    return cluster.submit(command, container={**image, **(container or {})}, environment=environment, **changes)


def test_all_of_a_job_runs_in_one_container(cluster: Cluster, podman: Podman, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "in.txt").write_text("from the node\n")
    with watch(SECRET, "two\nlines"):
        job = submit(
            cluster,
            podman,
            "cat /made-by-preparation; echo [$SECRET] [$TWO] $CONSTANT; df -h /dev/shm | tail -1 | awk '{print $2}'; cat /data/in.txt;"
            ' touch /data/out; pwd; echo "$PATH|$HOME|$LD_LIBRARY_PATH|$DOCKER_HOST"; python -c "import sys; print(sys.executable)";'
            ' cat "$AZ_BATCHAI_MOUNT_ROOT/share/seen"; id -u; hostname; echo "$CANARY $USER"; touch "$AZ_BATCHAI_JOB_TEMP/mine"',
            container={
                "shmSize": "96mb",
                "volumes": [f"{data}:/data"],
                "environment": {"CONSTANT": "constant", "DOCKER_HOST": "tcp://nowhere", "LD_LIBRARY_PATH": "/of/the/job"},
            },
            preparation="echo made > /made-by-preparation; echo prepared $SECRET; cat /etc/debian_version > /tmp/version",
            environmentVariables=[{"name": "PATH", "value": "$PATH:/more"}],
            secrets={"SECRET": SECRET, "TWO": "two\nlines"},
            environment={"CANARY": "leaked", "LD_LIBRARY_PATH": ""},
            python="/usr/bin/python3",
        )
        (cluster.share / "seen").write_text("through the mount\n")
        verdict = job.wait()
    assert verdict["executionState"] == "succeeded", job.said()
    root = cluster.roots[0]
    temp, own = root / "jobs" / job.plan.job / "temp", root / "jobs" / job.plan.job / "bin"
    path = f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{own}:/more"
    assert job.log("stdout.txt").splitlines() == [
        "made",
        f"[{SECRET}] [two lines] constant",
        "96M",
        "from the node",
        f"{temp}/code",
        f"{path}|/root|/of/the/job|tcp://nowhere",
        "/usr/bin/python3",
        "through the mount",
        "0",
        os.uname().nodename,
        " ",
    ]
    assert job.log("stderr.txt") == ""
    assert job.log("stdout-job_prep.txt") == f"prepared {SECRET}\n"
    assert (data / "out").exists()
    log = job.log("execution.log")
    assert f"image {IMAGE}" in log
    assert "training interpreter: /usr/bin/python3" in log
    assert job.processes() == set()
    assert not (root / "container.json").exists()
    assert os.listdir(root / "jobs") == []


def test_ranks_of_two_nodes_and_the_rendezvous_server(cluster: Cluster, podman: Podman) -> None:
    """Horovod itself is not in the image: a stand-in for its server is, and our own program serves it there."""
    library = cluster.share / "library"
    files = {"common/util/hosts.py": HOSTS, "http/http_server.py": SERVER}
    for name, text in files.items():
        file = library / "horovod" / "runner" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    job = submit(
        cluster,
        podman,
        'echo "rank $BATCHAI_RANK"; until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/end" ]; do sleep 0.05; done;'
        " exec 3<>/dev/tcp/127.0.0.1/$HOROVOD_GLOO_RENDEZVOUS_PORT && echo it listens",
        nodes=2,
        trainer=sys.executable,
        environmentVariables=[{"name": "PYTHONPATH", "value": str(library)}],
    )
    wait_for(lambda: job.log("stdout.txt").count("rank") == 2, what=job.said)
    name = f"batchai-{job.plan.job}-1-"
    assert sorted(podman.containers()) == [name + "0", name + "1"]
    inside = job.running("rendezvous")
    assert os.readlink(f"/proc/{inside[-1]}/root") != "/" or len(inside) == 2
    (job.share / job.plan.folder / "shared" / "end").touch()
    assert job.wait()["executionState"] == "succeeded", job.said()
    lines = ["[0] it listens", "[0] rank 0", "[1] it listens", "[1] rank 1"]
    assert sorted(job.log("stdout.txt").splitlines()) == lines
    assert job.processes() == set()


def test_cancel_asks_first_and_then_ends_all(cluster: Cluster, podman: Podman) -> None:
    job = submit(
        cluster,
        podman,
        "trap 'echo asked; exit 3' TERM; (env -i setsid bash -c 'trap \"\" TERM; sleep 600; sleep 600' &); echo go;"
        " while :; do sleep 0.05; done",
        python=python39() or sys.executable,
        terminateSeconds=2.0,
    )
    wait_for(lambda: "go" in job.log("stdout.txt"), what=job.said)
    job.cancel("ada", "enough")
    verdict = job.wait()
    assert verdict["terminated"], job.said()
    assert job.log("stdout.txt") == "go\nasked\n"
    assert job.exit(0)["ranks"][0]["exitCode"] == 3
    assert job.exit(0)["left"] == []
    assert job.processes() == set()


def test_who_saves_has_the_time_that_its_plan_gives(cluster: Cluster, podman: Podman) -> None:
    """Though the shell that the container's engine waits for dies at once."""
    job = submit(cluster, podman, SAVES, terminateSeconds=30.0)
    wait_for(lambda: "started" in job.log("stdout.txt"), what=job.said)
    job.cancel("ann", "enough")
    assert job.wait()["terminated"], job.said()
    assert job.log("stdout.txt") == "started\nsaving\nsaved\n"
    assert job.processes() == set()


@pytest.mark.parametrize("how", ["its agent lives", "its agent was killed"])
def test_end(cluster: Cluster, podman: Podman, how: str) -> None:
    """What runs in the container ends with its agent; ``end`` removes what is left."""
    job = submit(cluster, podman, "trap '' TERM; echo go; while :; do sleep 0.05; done")
    wait_for(lambda: "go" in job.log("stdout.txt"), what=job.said)
    assert job.processes()
    if how == "its agent was killed":
        os.kill(job.agents[0].pid, signal.SIGKILL)
        wait_for(lambda: not job.processes(), what="ranks have outlived their agent")
    begun = time.monotonic()
    root = str(cluster.roots[0])
    nodes = [[root, ""]]
    if how == "its agent lives":
        wait_for(lambda: agents.read(root, job.reservation["number"]))
    code = f"import json; from mlflow_batchai.agent.api import host; print(json.dumps(host.end({job.mark!r}, {nodes!r}, 10.0)))"
    environment = {**os.environ, **podman.environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"left": []}
    assert time.monotonic() - begun < 9.5  # podman's own patience is 10 s
    assert podman.containers() == []
    assert job.processes() == set()
    assert not (cluster.roots[0] / "container.json").exists()


def test_what_is_mounted_is_seen(cluster: Cluster, podman: Podman, tmp_path: Path) -> None:
    volume = {"scope": "job", "path": "scratch", "kind": "command", "name": "unmanaged file system", "share": None}
    share = {"scope": "cluster", "path": "share", "kind": "link", "name": "share", "source": str(cluster.share), "share": None}
    job = submit(
        cluster,
        podman,
        'cd "$AZ_BATCHAI_JOB_MOUNT_ROOT/scratch"; stat -f -c %T .; touch here; ls; ls "$AZ_BATCHAI_MOUNT_ROOT/share"',
        volumes=[share, {**volume, "command": "mount -t tmpfs none"}],
    )
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "tmpfs\nhere\nworkspaces\n"
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def _is_monitor(process: psutil.Process, container: str) -> bool:
    line = process.info["cmdline"] or [""]
    return "conmon" in line[0] and container in line


def test_the_next_job_removes_what_a_killed_agent_left(cluster: Cluster, podman: Podman) -> None:
    job = submit(cluster, podman, "echo go; while :; do sleep 0.05; done")
    wait_for(lambda: "go" in job.log("stdout.txt"), what=job.said)
    name = podman.containers()[0]
    identity = podman("inspect", "--format={{.Id}}", name).strip()
    monitors = [process.pid for process in psutil.process_iter(["cmdline"]) if _is_monitor(process, identity)]
    for pid in [job.agents[0].pid, *monitors]:  # who would have removed it
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not job.processes(), what="ranks have outlived their agent")
    assert podman.containers() == [name]
    cluster.roots.reverse()  # the queue gives the next job the other node, which is the same one
    cluster.roots[0] = cluster.roots[1]
    assert submit(cluster, podman, "echo next").wait()["executionState"] == "succeeded"


def test_a_volume_and_a_size_that_are_not_there(cluster: Cluster, podman: Podman) -> None:
    job = submit(cluster, podman, "echo never", {"volumes": ["/no/such/folder:/data"]})
    assert "there is no /no/such/folder; create it on the nodes" in job.wait()["reason"]
    job = submit(cluster, podman, "echo never", {"shmSize": "5zb"})
    assert f"the container of image {IMAGE} on node-0: podman can't start it: " in job.wait()["reason"]


def test_a_private_registry(cluster: Cluster, podman: Podman) -> None:
    """The password is on no command line and in no file of the job, and who has a wrong one is told so."""
    with image_registry(podman.layer, "team/toy", ["MARK=of the registry", "PATH=/usr/bin:/bin"], "ada", PASSWORD) as server:
        podman.trust(server)
        container = {"image": f"{server}/team/toy:1", "server": server, "credentials": True}
        with watch(PASSWORD, "wr0ng-password"):
            job = submit(
                cluster,
                podman,
                'echo $MARK; grep -rs p4ssword /proc/1/environ "$AZ_BATCHAI_JOB_TEMP/.."; ls "$AZ_BATCHAI_JOB_TEMP/.."; env',
                container,
                told={"registry": {"username": "ada", "password": PASSWORD}},
            )
            assert job.wait()["executionState"] == "succeeded", job.said()
            said = job.log("stdout.txt").split("\n", 8)
            assert said[:8] == ["of the registry", "alive", "bin", "hostfile", "mounts", "site", "spool", "temp"]
            told = {"registry": {"username": "ada", "password": "wr0ng-password"}}
            wrong = submit(cluster, podman, "echo never", container, told=told)
            reason = wrong.wait()["reason"]
    assert f"the container of image {server}/team/toy:1 on node-0: {server} does not let ada in: " in reason
    assert "pulling the image" in job.log("execution.log")
    assert "podman: Writing manifest to image destination" in job.log("execution.log")
    podman("rmi", "--force", f"{server}/team/toy:1")
    for file in cluster.folder.rglob("*"):
        if file.is_file():
            assert PASSWORD.encode() not in file.read_bytes(), file


def test_an_image_with_less_in_it(cluster: Cluster, podman: Podman) -> None:
    """Without bash commands are run by sh; ranks of Horovod need a Python, a command of one's own doesn't."""
    image = "localhost/batchai-less:1"
    podman("run", "--name=less", "--network=host", IMAGE, "sh", "-c", "rm /bin/bash /usr/bin/python3*")
    podman("commit", "--quiet", "less", image)
    podman("rm", "less")
    job = submit(cluster, podman, 'echo "by $0"', {"image": image})
    assert job.wait()["executionState"] == "succeeded", job.said()
    assert job.log("stdout.txt") == "by sh\n"
    assert "the image has no bash; commands are run by sh" in job.log("execution.log")
    assert "training interpreter: none" in job.log("execution.log")
    reason = submit(cluster, podman, "echo never", {"image": image}, framework="horovod").wait()["reason"]
    assert f"the container of image {image} on node-0: it has neither python3 nor python" in reason


def test_a_model_is_checked_in_the_container(cluster: Cluster, podman: Podman) -> None:
    """By its Python, with its packages; a check that hangs there is ended there."""
    package = "/usr/lib/python3/dist-packages/mlflow"
    job = submit(
        cluster,
        podman,
        'mkdir "$AZ_BATCHAI_OUTPUT_M/net" && touch "$AZ_BATCHAI_OUTPUT_M/net/MLmodel"',
        preparation=f"mkdir {package}; echo 'import time; time.sleep(300)' > {package}/pyfunc.py",
        trainer="/usr/bin/python3",
        model={"path": None, "register": None, "name": "model", "checkSeconds": 2.0},
        outputDirectories=[{"id": "M", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": "m"}],
    )
    assert job.wait()["executionState"] == "succeeded", job.said()
    (body,) = [record["body"] for record in job.records("report") if record["body"].get("chosen")]
    check = body["check"]
    assert (check["outcome"], check["why"]) == ("failed", "it could not be loaded and tried in 2 s (model.checkTimeout)")
    assert not job.processes()
