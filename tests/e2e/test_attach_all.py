"""``batchai job attach --all`` as cron and systemd run it, by the very lines of docs/reference.md: real jobs whose followers died."""

from __future__ import annotations

import configparser
import getpass
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from waiting import wait_for

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").partition("## Jobs that nobody relays\n")[2]
TRAIN = """
    import os, time
    from mlflow_batchai.training import report
    print("up", flush=True)
    report.log({"loss": 0.5}, step=0)
    while not os.path.exists(os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/go"):
        time.sleep(0.05)
    report.log({"loss": 0.25}, step=1)
"""
BATCHAI = "wait: false\nproperties: {nodeCount: 1, horovodSettings: {}}"


def documented(language: str) -> list[str]:
    """The text of the code blocks of a language, in the section on jobs that nobody relays."""
    return re.findall(rf"^```{language}\n(.*?)^```", REFERENCE.partition("\n## ")[0], re.S | re.M)


class Account:
    """A login whose environment is what cron and systemd give: its client folder is the world's."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.home = world.root / "ada"
        (self.home / "venv").mkdir(parents=True)
        (self.home / "venv" / "bin").symlink_to(Path(world.command()[0]).parent)
        world.home.mkdir(exist_ok=True)
        (self.home / ".batchai").symlink_to(world.home)
        (text,) = documented("properties")
        text = text.replace("https://mlflow.example.com", world.uri).replace("/home/ada", str(self.home))
        self.file = world.home / "attach.env"
        self.file.write_text(text, encoding="utf-8")
        self.file.chmod(0o600)
        self.bare = {"HOME": str(self.home), "LOGNAME": getpass.getuser(), "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}

    def cron(self) -> subprocess.Popen[str]:
        """The line of the crontab, as cron runs it."""
        (line,) = documented("cron")
        command = line.strip().split(maxsplit=5)[5]
        assert "%" not in command, "cron makes a new line of it"
        return self._start(["/bin/sh", "-c", command], self.bare)

    def systemd(self) -> subprocess.Popen[str]:
        """What the unit's ExecStart runs, in the environment that it names."""
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(documented("ini")[0].replace("%h", str(self.home)))
        service = unit["Service"]
        assert (service["Type"], service["KillMode"]) == ("oneshot", "process")
        lines = Path(service["EnvironmentFile"]).read_text(encoding="utf-8").splitlines()
        given = dict(line.split("=", 1) for line in lines)
        return self._start(shlex.split(service["ExecStart"]), {**self.bare, **given})

    def _start(self, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        # HOME stands in its environment, so what it leaves is the world's.
        return subprocess.Popen(
            argv,
            env=environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def test_by_cron_and_by_systemd(cli: Cli) -> None:
    world, account = cli.world, Account(cli.world)
    assert world.run(world.project(TRAIN, batchai=BATCHAI)).returncode == 0
    world.wait(lambda: (world.folder() / "stdouterr" / "stdout.txt").exists() and "up" in world.log())
    run_id, name = world.last.info.run_id, world.last.data.tags["batchai.job"]
    world.wait(lambda: world.client.get_run(run_id).data.metrics.get("loss") == 0.5)
    assert world.lose_followers() == 1
    process = account.cron()
    assert (process.communicate(timeout=120), process.returncode) == (("", ""), 0)
    log = (world.home / "attach.log").read_text()
    assert re.fullmatch(
        rf"batchai: job {name} \(run {run_id}\): follower started \(process \d+\); process \d+ on .+ is gone\n", log
    )

    # Both at once: two may start a follower, and one of these ends.
    assert world.lose_followers() == 1
    both = account.cron(), account.systemd()
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, ""), err
    wait_for(lambda: len(world.followers()) == 1)
    # The next tick finds it.
    said = cli("job", "attach", "--all")
    (follower,) = world.followers()
    assert said.err == f"batchai: job {name} (run {run_id}): followed by process {follower.pid} on {os.uname().nodename}\n"
    assert "what-the-job-wants" not in "".join(follower.environ().values())

    # It ends while nobody looks.
    assert world.lose_followers() == 1
    (world.home / "share" / "go").touch()
    world.wait(lambda: (world.folder() / "batchai" / "attempts" / "1" / "verdict" / "verdict.json").exists())
    assert world.last.info.status == "RUNNING"
    rows = cli.json("job", "attach", "--all", "--wait")
    assert [(row["result"], row["executionState"]) for row in rows] == [("finished", "succeeded")]
    assert world.last.info.status == "FINISHED"
    assert world.points() == [(0, 0.5), (1, 0.25)]
    world.wait_gone()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_units_are_what_systemd_takes(tmp_path: Path) -> None:
    service, timer = documented("ini")
    (tmp_path / "batchai-attach.service").write_text(service, encoding="utf-8")
    (tmp_path / "batchai-attach.timer").write_text(timer, encoding="utf-8")
    (tmp_path / ".batchai").mkdir()
    (tmp_path / ".batchai" / "attach.env").touch()
    argv = ["systemd-analyze", "--user", "verify", *(f"./batchai-attach.{kind}" for kind in ("service", "timer"))]
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    said = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_the_commands_around_them() -> None:
    """The timer that is enabled is the one that stands there, and every command of the section is known to these tests."""
    assert [line for block in documented("sh") for line in block.splitlines()] == [
        "batchai job attach --all",
        "systemctl --user daemon-reload",
        "systemctl --user enable --now batchai-attach.timer",
        "loginctl enable-linger",
    ]
    assert "`batchai-attach.timer`:" in REFERENCE and "`batchai-attach.service`:" in REFERENCE
