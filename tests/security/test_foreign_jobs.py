"""Runs and sweeps that another user of the tracking server has made, or changed, direct no client of this user."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import Cli
from job_folder import JobFolder

from mlflow_batchai.agent import protocol
from mlflow_batchai.follower import service_client
from mlflow_batchai.follower.service_client import Told
from mlflow_batchai.job import signing
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.tracking import runs

FOLDER = "workspaces/default/experiments/Default/jobs/bait/0123456789"
PRIVATE = "the private key of the victim"


class Attacker:
    """Another user of the tracking server and of the machine: his own key, his own share."""

    def __init__(self, world: Any, root: Path) -> None:
        self.world = world
        self.client = world.client
        self.home = root / "his-home"
        self.share = DirectoryShare(root / "his-share")
        self.victims = root / "victims-home"
        self.victims.mkdir(mode=0o700)
        (self.victims / "id_rsa").write_text(PRIVATE)
        (self.share.root / "workspaces").mkdir(parents=True)
        self.share.write(".batchai/objects/00/0", b"")

    def job(self, name: str = "bait", sign: bool = True, **tags: str) -> str:
        """A run with the victim's name that names a job folder of his; its outputs are the victim's home."""
        given = {
            runs.TAG_JOB: name,
            runs.TAG_CLUSTER: "local",
            runs.TAG_SHARE: self.share.url,
            runs.TAG_FOLDER: FOLDER,
            "mlflow.user": os.environ.get("USER", "root"),
            **tags,
        }
        run_id = str(self.client.create_run("0", tags=given).info.run_id)
        self.client.update_run(run_id, status="RUNNING")
        control = {"scope": "cluster", "path": "share", "kind": "link", "share": self.share.url}
        trap = {"scope": "job", "path": "x", "kind": "link", "share": "file:///"}
        evil = {"id": "EVIL", "pathPrefix": f"$AZ_BATCHAI_JOB_MOUNT_ROOT/x{self.victims.parent}", "pathSuffix": ""}
        plan = {"name": name, "runId": run_id, "segment": "", "volumes": [control, trap], "outputDirectories": [evil]}
        (self.victims.parent / "outputs").symlink_to(self.victims)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BATCHAI_HOME", str(self.home))
            made = JobFolder(self.share, folder=FOLDER, lossSeconds=1.0, maxWallClockSeconds=60.0, **plan)
            mac = runs.signature(run_id, given)
        if sign:
            self.client.set_tag(run_id, runs.TAG_MAC, mac)
        else:
            self.share.write(made.paths.plan, protocol.encode([made.plan]))
        made.verdict(protocol.FAILED)
        return run_id


@pytest.fixture
def attacker(world: Any, tmp_path: Path) -> Attacker:
    return Attacker(world, tmp_path)


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that would have been followed."""
    found: list[Any] = []
    monkeypatch.setattr(service_client, "follow", lambda order, environment: found.append(order) or Told(4242, True))
    return found


def forged(world: Any) -> str:
    """A signature with the fingerprint of the victim's key, which every run of the victim's shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHAI_HOME", str(world.home))
        return f"{signing.fingerprints()[0]}:{'0' * 64}"


@pytest.mark.parametrize("sign", [True, False])
def test_all_jobs_of_a_user_are_those_of_his_key(cli: Cli, attacker: Attacker, followers: list[Any], sign: bool) -> None:
    """H4: a run with the victim's `mlflow.user`; the line that cron runs looks at none of it."""
    run_id = attacker.job(sign=sign)
    said = cli("job", "attach", "--all")
    assert (said.code, followers) == (0, [])
    assert run_id not in said.out and "no job that was signed with your key" in said.err
    # With the fingerprint of the victim's key, which every run of his shows.
    attacker.client.set_tag(run_id, runs.TAG_MAC, forged(cli.world))
    said = cli("job", "attach", "--all")
    assert (said.code, followers) == (0, []) and run_id not in said.out


@pytest.mark.parametrize("verb", ["attach", "show", "wait", "logs", "retry", "terminate", "delete"])
def test_no_command_opens_the_share_of_a_foreign_run(
    cli: Cli, attacker: Attacker, followers: list[Any], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    run_id = attacker.job()
    opened: list[str] = []
    monkeypatch.setattr("mlflow_batchai.client.lookup.open_share", opened.append)
    said = cli("job", verb, run_id, *(["-y"] if verb in ("terminate", "delete") else []))
    assert said.code == 1 and "is not signed with this user's key" in said.err and f"--trust {run_id}" in said.err
    assert (opened, followers) == ([], [])
    assert cli.world.client.get_run(run_id).info.lifecycle_stage == "active"


def test_a_foreign_job_on_a_share_of_ours_is_seen_and_not_obeyed(cli: Cli, attacker: Attacker, followers: list[Any]) -> None:
    """A colleague's: what this machine's cluster document leads to is read, and nothing is done as its plan says."""
    attacker.share = DirectoryShare(cli.world.home / "share")
    run_id = attacker.job()
    assert cli("job", "show", run_id).code == 0
    for verb in (["attach"], ["wait"], ["retry"]):
        said = cli("job", *verb, run_id)
        assert said.code == 1, verb
        assert "another user, or from a machine with another key" in said.err or "the key that signed it" in said.err
    listed = cli("job", "file", "list", "-j", run_id, "-d", "EVIL")
    assert listed.code == 1 and "another key" in listed.err and "id_rsa" not in listed.out
    assert followers == []


def test_trust_is_given_to_what_was_shown(cli: Cli, attacker: Attacker, followers: list[Any]) -> None:
    run_id = attacker.job()
    said = cli("job", "attach", "--trust", run_id)
    assert said.code == 2 and "needs -y where there is no terminal" in said.err
    shown = said.err
    assert f"outputs that are sent to the run: file://{attacker.victims.parent}/outputs" in shown.replace("////", "///")
    assert run_id in shown and attacker.share.url in shown and followers == []
    # It waits for its follower, which is not started here, but has ended the run.
    cli.world.client.set_terminated(run_id, "FAILED")
    attacker.share.claim(protocol.JobPaths(FOLDER).lease(1))
    cursor = {"counter": 1, "attempt": 1, "finished": True, "holder": {}, "memory": {}}
    attacker.share.write(protocol.JobPaths(FOLDER).cursor(1), protocol.encode([cursor]))
    said = cli("job", "attach", "--trust", run_id, "-y")
    assert said.code == 1 and "job bait failed" in said.err
    assert cli("job", "wait", run_id).code == 1
    # Another plan than was shown is not trusted.
    path = attacker.share.root / FOLDER / "batchai" / "plan.json"
    plan = protocol.decode_one(path.read_bytes())
    path.write_bytes(protocol.encode([{**plan, "command": "another"}]))
    said = cli("job", "file", "list", "-j", run_id, "-d", "EVIL")
    assert said.code == 1 and "another key" in said.err


def test_another_machine_of_the_same_user(world: Any, tmp_path: Path) -> None:
    """It takes the key along, and follows what was submitted elsewhere; its own jobs stay its own."""
    result = world.run(world.project("import time; time.sleep(300)", batchai="wait: false"))
    assert result.returncode == 0, result.stderr
    other = {"BATCHAI_HOME": str(tmp_path / "laptop")}
    document = tmp_path / "laptop" / "clusters" / "local.yaml"
    document.parent.mkdir(parents=True)
    document.write_text(f"engine: local\nshare: {world.home / 'share'}\n")
    command = [world.command()[0].replace("/mlflow", "/batchai")]
    run_id = world.last.info.run_id
    said = world.call([*command, "key", "export"])
    assert len(said.stdout.strip()) == 64
    assert world.call([*command, "job", "attach", "--all", "-o", "json"], **other).stdout == "[]\n"
    with subprocess.Popen(
        [*command, "key", "import"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**world.environment, **other},
        text=True,
    ) as process:
        _, told = process.communicate(said.stdout)
    assert process.returncode == 0 and "signs your jobs now" in told and said.stdout.strip() not in told
    rows = json.loads(world.call([*command, "job", "attach", "--all", "-o", "json"], **other).stdout)
    assert [row["runId"] for row in rows] == [run_id]
    assert world.call([*command, "job", "terminate", "-y", run_id], **other).returncode == 0
    assert len((tmp_path / "laptop" / "key").read_text().split()) == 2
    world.wait_gone()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.chmod(0o644), "chmod 600"),
        (lambda path: path.chmod(0o620), "chmod 600"),
        (lambda path: path.write_text(""), "holds no key"),
        (lambda path: path.write_text("0" * 63), "holds no key"),
        (lambda path: path.write_text("g" * 64), "holds no key"),
        (lambda path: path.write_bytes(b"\0" * 64), "holds no key"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "can't be read"),
        (lambda path: (path.unlink(), path.mkdir()), "can't be read"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "not a file"),
        (lambda path: os.chown(path, 12345, -1), "not a file of this user"),
    ],
)
def test_a_key_that_others_could_have_is_none(cli: Cli, spoil: Any, said: str) -> None:
    if os.geteuid() != 0 and said == "not a file of this user":
        pytest.skip("only root can give a file away")
    assert cli("key", "export").code == 0
    spoil(cli.world.home / "key")
    signing._cached.clear()  # another process reads it
    found = cli("key", "export")
    assert found.code == 2 and said in found.err and "Traceback" not in found.err


@pytest.mark.parametrize("text", ["", "x", "0" * 63, "0" * 65, "G" * 64, "0" * 64 + "\n" + "1" * 64, "é" * 64])
def test_what_is_no_key_is_not_taken_over(cli: Cli, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = SimpleNamespace(isatty=lambda: False, read=lambda: text)
    monkeypatch.setattr("sys.stdin", stdin)
    said = cli("key", "import")
    assert said.code == 2 and "this is no key" in said.err and not (cli.world.home / "key").exists()


def test_a_sweep_of_another_key_starts_no_jobs(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan names a project and a folder, whose code would be run as this user."""
    world = cli.world
    project = world.project(
        "print(1)", mlproject="name: toy\nentry_points:\n  main:\n    parameters: {a: int}\n    command: python train.py\n"
    )
    with monkeypatch.context() as patch:  # its own jobs are nobody's business here
        patch.setattr("mlflow_batchai.sweep.driver.ensure", lambda sweep: None)
        said = cli("sweep", project, "-P", "a=1,2", "--no-wait")
    assert said.code == 0, said
    parent = next(run for run in world.runs() if "batchai.sweepName" in run.data.tags)
    text = json.loads(world.artifact("sweep/plan.json", parent))
    evil = world.project(f"open({str(world.root / 'pwned')!r}, 'w')", name="evil")
    text["uri"] = str(evil)
    bait = world.client.create_run(
        "0", tags={**{key: value for key, value in parent.data.tags.items() if key.startswith("batchai.sweep")}}
    )
    world.client.log_text(bait.info.run_id, json.dumps(text), "sweep/plan.json")
    for mac in (None, parent.data.tags[runs.TAG_MAC]):
        world.client.set_tag(bait.info.run_id, "batchai.sweep", bait.info.run_id)
        if mac:
            world.client.set_tag(bait.info.run_id, runs.TAG_MAC, mac)
        found = cli("sweep", "attach", bait.info.run_id)
        assert found.code == 1 and "is not signed with this user's key" in found.err
    assert not (world.root / "pwned").exists()
