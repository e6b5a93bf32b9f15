"""A real Slurm on this machine, for tests: munged, slurmctld and a slurmd for each node, ended by their own processes.

Each has its own folder, key, socket and ports, so several may run at once. The nodes have two CPUs and two (fake) GPUs each.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sshd import free_port
from waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
GPUS = 2


def missing() -> str | None:
    """Why no Slurm can be started on this machine, or None."""
    lacking = [program for program in PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"no {lacking[0]} (apt-get install slurm-wlm munge)" if lacking else None


class SlurmDaemons:
    """The daemons of one cluster.

    Attributes:
        config: its slurm.conf, for ``SLURM_CONF``.
        daemons: ``munged``, ``slurmctld``, ``n0``, ... -> its process, of those that run.
        count: nodes.

    Args:
        settings: further lines of slurm.conf, in place of ours.
    """

    def __init__(self, root: Path, count: int, settings: dict[str, str]) -> None:
        self.count = count
        self.config = root / "slurm.conf"
        self._root = root
        # As it is now: a test's own would have daemons that it starts taken for its job's, and killed.
        self._environment = {
            **os.environ,
            "SLURM_CONF": str(self.config),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        # Others have to reach munge's socket.
        root.chmod(0o755)
        (root / "munge.key").write_bytes(os.urandom(128))
        (root / "munge.key").chmod(0o600)
        (root / "state").mkdir()
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        lines = {
            "ClusterName": root.name,
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthInfo": f"socket={root}/munge.socket",
            "SlurmctldPort": str(free_port(["127.0.0.1"])),
            "SlurmctldPidFile": f"{root}/slurmctld.pid",
            "StateSaveLocation": f"{root}/state",
            "SlurmdPidFile": f"{root}/%n.pid",
            "SlurmdSpoolDir": f"{root}/spool.%n",
            "SlurmdTimeout": "10",
            "InactiveLimit": "0",
            "KillWait": "30",
            "ReturnToService": "2",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerParameters": "bf_interval=1,sched_interval=2",
            "PriorityType": "priority/basic",
            "AccountingStorageType": "accounting_storage/none",
            "SlurmdParameters": "config_overrides",
            "GresTypes": "gpu",
            **settings,
        }
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        gres = ""
        for node in range(count):
            port = free_port(["127.0.0.1"])
            text += (
                f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 Gres=gpu:{GPUS}\n"
            )
            # Any device file does: only their number matters.
            gres += "".join(f"NodeName=n{node} Name=gpu File=/dev/tty{card}\n" for card in range(GPUS))
        text += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        text += "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10\n"
        self.config.write_text(text)
        (root / "gres.conf").write_text(gres)
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        try:
            for name in ("munged", "slurmctld", *(f"n{node}" for node in range(count))):
                self.start(name)
            self.wait_idle()
        except BaseException:
            self.stop()
            raise

    def start(self, name: str) -> None:
        """Start a daemon, or start it again."""
        root = self._root
        munge = ["--force", "--foreground", f"--socket={root}/munge.socket", f"--key-file={root}/munge.key"]
        munge += [f"--pid-file={root}/munged.pid", f"--log-file={root}/munged.log", f"--seed-file={root}/munge.seed"]
        argv = {"munged": ["munged", *munge], "slurmctld": ["slurmctld", "-D"]}.get(name, ["slurmd", "-D", "-N", name])
        # They end with the tests, even if these are killed.
        with (root / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *argv],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if name == "munged":
            wait_for((root / "munge.socket").exists)

    def kill(self, name: str) -> None:
        """Kill a daemon, as if its machine had crashed (what it had started goes on).

        The controller may end in order: one that is killed within seconds of a job's start takes it for PENDING afterwards.
        """
        process = self.daemons.pop(name)
        process.terminate() if name == "slurmctld" else process.kill()
        process.wait()

    def ask(self, *argv: str) -> str:
        """Output of one of Slurm's commands."""
        environment = {**os.environ, "SLURM_CONF": str(self.config)}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60).stdout

    def wait_idle(self) -> None:
        """Wait until all nodes take jobs."""
        wait_for(lambda: self.ask("sinfo", "-h", "-t", "idle", "-p", "main", "-o", "%D").strip() == str(self.count))

    def stop(self) -> None:
        """Stop all: nodes first, so that they can say goodbye."""
        for name in sorted(self.daemons, key=lambda name: (name == "munged", name == "slurmctld")):
            self.daemons[name].terminate()
        for process in self.daemons.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.daemons.clear()


@contextlib.contextmanager
def slurm_daemons(count: int = 4, **settings: str) -> Iterator[SlurmDaemons]:
    """A running Slurm for a fixture; ``SLURM_CONF`` names it meanwhile. Skips the test where Slurm isn't installed."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    # A socket's path has to be short.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, pytest.MonkeyPatch.context() as patch:
        daemons = SlurmDaemons(Path(folder), count, settings)
        patch.setenv("SLURM_CONF", str(daemons.config))
        try:
            yield daemons
        finally:
            daemons.stop()
