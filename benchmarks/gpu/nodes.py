"""Whether this machine's GPUs are its nodes' own, within a minute: what the driver says, what jobs see, what is counted.

    python benchmarks/gpu/nodes.py [--work FOLDER] [--ssh]

One node a GPU: as many jobs run at once, and one more waits. The interpreter that runs it also trains; with PyTorch ranks say
what that sees. Without MLflow there is no job, and one process is started as a rank would be. With ``--ssh`` the machine's own
sshd makes it a node over SSH as well. Ends with 1 if something is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mlflow_batchai.agent import gpus  # noqa: E402
from mlflow_batchai.agent.metrics.gpu import GpuMeter  # noqa: E402
from mlflow_batchai.tracking import runs  # noqa: E402

NEEDS = ("mlflow", "pydantic", "click", "rich", "yaml", "jmespath", "paramiko")
SECONDS = 120.0
# A rank: what it was told, and what PyTorch makes of that. It computes until it has been sampled.
RANK = """
import json, os, time
found = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "BATCHAI_NODE_GPUS")}
try:
    import torch
except ImportError:
    found["torch"] = None
else:
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found["torch"] = ["GPU-%s" % card.uuid if hasattr(card, "uuid") else card.name for card in cards]
print("SAW " + json.dumps(found), flush=True)
until = time.monotonic() + float(os.environ.get("SECONDS_OF_WORK", "0"))
square = torch.rand(4096, 4096, device="cuda") if found["torch"] else None
while time.monotonic() < until:
    time.sleep(0.0 if found["torch"] else 0.1)
    if square is not None:
        square = torch.nn.functional.normalize(square @ square)
        torch.cuda.synchronize()
"""


class Report:
    """What is printed, and whether all was as it should be."""

    def __init__(self) -> None:
        self.wrong = 0

    def say(self, what: str, text: Any) -> None:
        print(f"{what:<18} {text}", flush=True)

    def check(self, what: str, right: bool, text: Any) -> None:
        self.wrong += not right
        self.say(what, f"{'ok' if right else 'WRONG'}: {text}")


def driver(report: Report) -> gpus.Gpus:
    """What nvidia-smi says, how long it takes, and a sample of its meters."""
    for turn in ("first", "second"):
        begun = time.monotonic()
        found = gpus.list_gpus(os.environ)
        report.say(f"listing, {turn}", f"{len(found.ids)} in {time.monotonic() - begun:.2f} s ({found.note}) {found.trouble}")
    report.check("GPUs", bool(found.ids), ", ".join(found.ids) or "none")
    said: list[str] = []
    sample = GpuMeter(found.ids, os.environ, said.append).look()
    report.check("a sample", not found.ids or bool(sample), json.dumps(sample) if sample else said)
    return found


def like_a_rank(report: Report, found: gpus.Gpus) -> None:
    """Each GPU as the one of a process, without a job."""
    for name in found.ids:
        own = gpus.visibility_variables(gpus.Gpus([name], ""), 0)
        done = subprocess.run(
            [sys.executable, "-c", RANK],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        saw(report, "a process", done.stdout or done.stderr, [name])


def saw(report: Report, what: str, text: str, allowed: list[str]) -> str:
    """Check what a rank printed; the GPU that it had."""
    line = next((line.partition("SAW ")[2] for line in text.splitlines() if "SAW " in line), "")
    if not line:
        report.check(what, False, text[-500:] or "it printed nothing")
        return ""
    found = json.loads(line)
    told, seen = found["CUDA_VISIBLE_DEVICES"], found["torch"]
    right = told in allowed and (
        seen is None or (len(seen) == 1 and seen[0] in (told, *([seen[0]] if "GPU-" not in seen[0] else [])))
    )
    report.check(what, right, line)
    return str(told)


class Site:
    """A user of his own, with clusters and a project; jobs are submitted from this process."""

    def __init__(self, work: Path) -> None:
        self.work = work
        os.environ["BATCHAI_HOME"] = str(work / "home")
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{work}/mlflow.db"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        for folder in ("home/clusters", "share", "project"):
            (work / folder).mkdir(parents=True, exist_ok=True)
        (work / "project" / "train.py").write_text(RANK)
        (work / "project" / "MLproject").write_text("name: saw\nentry_points:\n  main:\n    command: python train.py\n")

    def cluster(self, name: str, document: dict[str, Any]) -> None:
        """Describe a cluster."""
        whole = {"share": str(self.work / "share"), "python": sys.executable, **document}
        (self.work / "home" / "clusters" / f"{name}.yaml").write_text(json.dumps(whole))

    def submit(self, cluster: str) -> Any:
        """A job on one node."""
        import mlflow_batchai

        variables = [{"name": "SECONDS_OF_WORK", "value": "6"}]
        config = {"systemMetrics": 1, "properties": {"nodeCount": 1, "environmentVariables": variables}}
        return mlflow_batchai.submit(self.work / "project", cluster=cluster, config=config)

    def log(self, run: str) -> str:
        """What the job's rank has printed so far."""
        from mlflow.tracking import MlflowClient

        folder = runs.tags_of(MlflowClient().get_run(run))[runs.TAG_FOLDER]
        path = self.work / "share" / folder / "stdouterr" / "stdout.txt"
        return path.read_text() if path.exists() else ""

    def batchai(self, *arguments: str) -> str:
        """What a command says."""
        code = "from mlflow_batchai.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return (done.stdout + ("" if done.returncode == 0 else done.stderr)).strip()


def jobs(report: Report, site: Site, found: gpus.Gpus) -> None:
    """As many jobs as GPUs at once, one more that waits, and their metrics."""
    from mlflow.tracking import MlflowClient

    site.cluster("gpus", {"nodes": len(found.ids), "gpusPerNode": 1})
    started = [site.submit("gpus") for _ in range(len(found.ids) + 1)]
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and not all("SAW " in site.log(job.run_id) for job in started[:-1]):
        time.sleep(0.2)
    report.check("one more waits", site.log(started[-1].run_id) == "", started[-1].status)
    for job in started:
        while time.monotonic() < until and job.status not in ("FINISHED", "FAILED", "KILLED"):
            time.sleep(0.2)
    given = [saw(report, f"job {job.status}", site.log(job.run_id), found.ids) for job in started]
    report.check("each its own", len(set(given[:-1])) == len(found.ids), f"{len(set(given[:-1]))} of {len(found.ids)}")
    for job in started[:1]:
        metrics = MlflowClient().get_run(job.run_id).data.metrics
        sampled = {name: value for name, value in metrics.items() if "/gpu_" in name}
        report.check("system metrics", "system/node-0/gpu_0_utilization_percentage" in sampled, json.dumps(sampled))
    report.say("batchai doctor", "\n" + site.batchai("doctor", "gpus"))


@contextlib.contextmanager
def own_sshd(work: Path) -> Iterator[dict[str, Any]]:
    """This machine's sshd, for this user and one key; what a cluster document says of it."""
    folder = work / "sshd"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it wants an empty folder of root's
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "Subsystem": "sftp internal-sftp",
        "SetEnv": "PATH=" + os.environ["PATH"],
    }
    (folder / "config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    key = (folder / "host.pub").read_text().split()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key[0]} {key[1]}\n")
    program = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
    log = (folder / "log").open("wb")
    server = subprocess.Popen([str(program), "-D", "-e", "-f", str(folder / "config")], stderr=log)
    try:
        hosts = {"hosts": [{"host": "127.0.0.1", "root": str(work / "node")}], "port": port, "user": getpass.getuser()}
        yield {"engine": "ssh", "keyFile": str(folder / "user"), "knownHosts": str(folder / "known"), **hosts}
    finally:
        server.kill()
        server.wait()
        log.close()


def over_ssh(report: Report, site: Site, found: gpus.Gpus) -> None:
    """A job on this machine as a node over SSH."""
    path = os.environ["PATH"] + ":/usr/sbin"
    if missing := [name for name in ("sshd", "ssh-keygen") if shutil.which(name, path=path) is None]:
        report.say("over SSH", f"not run: there is no {' and no '.join(missing)} on this machine")
        return
    with own_sshd(site.work) as document:
        time.sleep(1.0)
        site.cluster("ssh", {**document, "gpusPerNode": 1})
        try:
            job = site.submit("ssh")
        except Exception as error:
            report.check("over SSH", False, f"{error}\n{(site.work / 'sshd' / 'log').read_text()}")
            return
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and job.status not in ("FINISHED", "FAILED", "KILLED"):
            time.sleep(0.2)
        saw(report, f"over SSH {job.status}", site.log(job.run_id), found.ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, help="an empty folder to work in, which is kept")
    parser.add_argument("--ssh", action="store_true", help="also by the machine's own sshd, where it has one")
    options = parser.parse_args()
    report = Report()
    found = driver(report)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing or not found.ids:
        report.say("jobs", f"not run: {'no ' + ', '.join(missing) if missing else 'no GPU'}")
        like_a_rank(report, found)
        return 1 if report.wrong else 0
    with contextlib.ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        folder.mkdir(parents=True, exist_ok=True)
        site = Site(folder.absolute())
        jobs(report, site, found)
        if options.ssh:
            over_ssh(report, site, found)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
