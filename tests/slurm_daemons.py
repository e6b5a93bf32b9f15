"""A real Slurm on this machine, for tests: munged, slurmctld and a slurmd for each node, ended by their own processes.

Each has its own folder, key, socket and ports, so several may run at once. The nodes have two CPUs and two (fake) GPUs each.
With accounting there are a MariaDB, which listens on a socket in that folder, and a slurmdbd.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from sshd import free_port
from waiting import wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
ACCOUNTING = ("mariadbd", "slurmdbd")
GPUS = 2


def missing(accounting: bool = False) -> str | None:
    """Why no Slurm can be started on this machine, or None."""
    programs = PROGRAMS + ACCOUNTING * accounting
    lacking = [program for program in programs if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    packages = "slurm-wlm munge" + " slurmdbd slurm-wlm-mysql-plugin mariadb-server-core" * accounting
    return f"no {lacking[0]} (apt-get install {packages})" if lacking else None


class SlurmDaemons:
    """The daemons of one cluster.

    Attributes:
        config: its slurm.conf, for ``SLURM_CONF``.
        daemons: ``munged``, ``mariadbd``, ``slurmdbd``, ``slurmctld``, ``n0``, ... -> its process, of those that run.
        count: nodes.

    Args:
        settings: further lines of slurm.conf, in place of ours.
        accounting: whether slurmdbd keeps what the controller forgets.
    """

    def __init__(self, root: Path, count: int, settings: dict[str, str], accounting: bool = False) -> None:
        self.count = count
        self.config = root / "slurm.conf"
        self._root = root
        # As it is now: a test's own would have daemons that it starts taken for its job's, and killed.
        self._environment = {
            **os.environ,
            "SLURM_CONF": str(self.config),
            "MYSQL_UNIX_PORT": f"{root}/database/socket",
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
            **(self._accounting(user) if accounting else {}),
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
            for name in ("munged", *ACCOUNTING * accounting, "slurmctld", *(f"n{node}" for node in range(count))):
                self.start(name)
            self.wait_idle()
        except BaseException:
            self.stop()
            raise

    def _accounting(self, user: str) -> dict[str, str]:
        """Settings of slurmdbd; those by which slurmctld finds it."""
        root, port = self._root, str(free_port(["127.0.0.1"]))
        (root / "database").mkdir(0o700)
        lines = {
            "AuthInfo": f"socket={root}/munge.socket",
            "DbdHost": "localhost",
            "DbdAddr": "127.0.0.1",
            "DbdPort": port,
            "SlurmUser": user,
            "PidFile": f"{root}/slurmdbd.pid",
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "localhost",
            "StorageUser": user,
            "StorageLoc": "slurm",
        }
        (root / "slurmdbd.conf").write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
        (root / "slurmdbd.conf").chmod(0o600)
        return {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "127.0.0.1",
            "AccountingStoragePort": port,
            "AccountingStoragePass": f"{root}/munge.socket",
        }

    def _argv(self, name: str) -> Sequence[str]:
        root = self._root
        if name == "munged":
            files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
            return ["munged", "--force", "--foreground", *(f"--{option}={root}/munge.{file}" for option, file in files.items())]
        if name == "mariadbd":
            # An empty folder is database enough, and nobody but its user gets in there.
            own = (f"--datadir={root}/database", f"--socket={root}/database/socket", f"--user={getpass.getuser()}")
            small = ("--innodb-log-file-size=4M", "--innodb-buffer-pool-size=16M", "--innodb-lock-wait-timeout=900")
            return ["mariadbd", "--no-defaults", "--skip-networking", "--skip-grant-tables", *own, *small]
        return [name, "-D"] if name in ("slurmdbd", "slurmctld") else ["slurmd", "-D", "-N", name]

    def start(self, name: str, within: Sequence[str] = ()) -> None:
        """Start a daemon, or start it again.

        Args:
            within: the command that it is started by.
        """
        # They end with the tests, even if these are killed.
        output = self._root / f"{name}.out"
        with output.open("ab") as log:
            before = log.tell()
            self.daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *within, *self._argv(name)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        sockets = {"munged": "munge.socket", "mariadbd": "database/socket"}
        if name in sockets:
            wait_for((self._root / sockets[name]).exists, what=f"{name} answers")
        elif name != "slurmctld":
            # The controller takes a node for idle until it notices that its daemon is not there yet.
            word = b"started" if name == "slurmdbd" else b"started on "
            wait_for(lambda: word in output.read_bytes()[before:], what=f"{name} answers")

    def kill(self, name: str) -> None:
        """Kill a daemon, as if its machine had crashed (what it had started goes on)."""
        if name == "slurmctld":
            self._save()
        process = self.daemons.pop(name)
        process.kill()
        process.wait()

    def _save(self) -> None:
        """Have the controller write its jobs: it takes up to 5 s for that, and one that it has just started is PENDING if it dies before."""
        state, now = self._root / "state" / "job_state", time.time()
        jobs = self.ask("squeue", "-h", "-t", "PD,R", "-o", "%i").split()
        for job in jobs:
            self.ask("scontrol", "update", f"JobId={job}", "AdminComment=seen")
        if jobs:
            wait_for(lambda: state.exists() and state.stat().st_mtime > now, what="the controller writes its jobs")

    def ask(self, *argv: str) -> str:
        """Output of one of Slurm's commands, once it succeeds: one that gets no answer has no output either."""
        environment = {**os.environ, "SLURM_CONF": str(self.config)}
        done = subprocess.CompletedProcess[str](argv, 1)

        def succeeds() -> bool:
            nonlocal done
            done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
            return done.returncode == 0

        wait_for(succeeds, what=lambda: f"{argv}: {done.stderr}")
        return done.stdout

    def wait_idle(self) -> None:
        """Wait until all nodes take jobs (one that is "idle*" does not answer)."""
        wait_for(lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * self.count)

    def stop(self) -> None:
        """Stop all: nodes first, so that they can say goodbye, then what was started first last."""
        order = ("slurmctld", "slurmdbd", "mariadbd", "munged")
        for name in sorted(self.daemons, key=lambda name: order.index(name) + 1 if name in order else 0):
            self.daemons[name].terminate()
        for process in self.daemons.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.daemons.clear()
        for step in self.steps():
            for process in [*step.children(recursive=True), step]:
                process.kill()

    def steps(self, node: str = "") -> list[psutil.Process]:
        """The processes (slurmstepd) that run what was submitted, of a node or of all; a slurmd that is killed leaves its own."""
        # Since 23.11 their title hides their environment. Each listens in its node's folder.
        folder, found = self._root / (f"spool.{node}" if node else ""), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmstepd":
                    sockets = [Path(str(one.laddr)) for one in process.net_connections("unix")]
                    found += [process] * any(socket.is_relative_to(folder) for socket in sockets)
        return found


@contextlib.contextmanager
def slurm_daemons(count: int = 4, accounting: bool = False, **settings: str) -> Iterator[SlurmDaemons]:
    """A running Slurm for a fixture; ``SLURM_CONF`` names it meanwhile. Skips the test where Slurm isn't installed."""
    reason = missing(accounting)
    if reason:
        pytest.skip(reason)
    # A socket's path has to be short.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, pytest.MonkeyPatch.context() as patch:
        daemons = SlurmDaemons(Path(folder), count, settings, accounting)
        patch.setenv("SLURM_CONF", str(daemons.config))
        try:
            yield daemons
        finally:
            daemons.stop()
