"""Whole jobs on four nodes over SSH: reattached by another client, cut off, and no secret anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
from ssh_world import NAME, WAITS, config, describe, ended, on_servers, running
from sshd import SshNodes, make_key

TOKEN = "s3cr3t-canary-of-the-document"
PASSPHRASE = "pass-canary of the key"
PASSWORD = "w0rd-canary-of-the-admin"


def go(world: Any) -> None:
    """Let ranks that run ``WAITS`` end."""
    (world.root / "share" / "go").touch()


def test_attached_by_another_client(world: Any, ssh_servers: SshNodes) -> None:
    """``mlflow run`` and its follower are killed; a second client, without the cluster's document, brings the run to its end."""
    describe(world, on_servers(ssh_servers, world))
    process = world.start(world.command(world.project(WAITS, batchai=config(2))))
    run = running(world)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert world.lose_followers() == 1

    folder, home = world.root / "elsewhere", world.root / "second"
    folder.mkdir()
    home.mkdir()
    shutil.copy(world.home / "key", home / "key")
    name = run.data.tags["batchai.job"]
    attach = world.start(
        ["env", "-C", str(folder), str(Path(sys.executable).parent / "batchai"), "job", "attach", name], BATCHAI_HOME=str(home)
    )
    world.wait(world.followers)
    go(world)
    out, err = attach.communicate(timeout=120)
    assert attach.returncode == 0, err
    assert out.count("up") == 2 and "Traceback" not in err
    run = ended(world, run)
    assert run.info.status == "FINISHED"
    assert world.points("loss", run) == [(0, 0.5), (1, 0.25)]
    assert "there is no cluster 'nc6'" in run.data.tags["batchai.notes"]
    world.wait_gone()


def secrets_in_processes() -> list[str]:
    """Argument lists of this machine that hold one of the secrets."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if any(secret in line for secret in (TOKEN, PASSPHRASE, PASSWORD)):
            found.append(line)
    return found


def secrets_in_files(world: Any) -> tuple[list[Path], list[Path]]:
    """(files of the world, those that hold one of the secrets): nodes, share, client's folder, tracking store, artifacts."""
    own = {world.root / "toy" / "batchai.yaml", world.home / "clusters" / f"{NAME}.yaml"}
    looked, found = [], []
    for path in world.root.rglob("*"):
        if path.is_file() and path not in own:
            with contextlib.suppress(FileNotFoundError):  # a job that runs removes some
                data = path.read_bytes()
                looked.append(path)
                found += [path] * any(secret.encode() in data for secret in (TOKEN, PASSPHRASE, PASSWORD))
    return looked, found


def test_secrets(world: Any, ssh_servers: SshNodes) -> None:
    """The document's, the key's passphrase and the login's password: in no argument list, file, tag, log or message."""
    key = make_key(world.root / "locked", passphrase=PASSPHRASE)
    for server in ssh_servers:
        with server.authorized_keys.open("a") as file:
            file.write(Path(f"{key}.pub").read_text())
    account = {"adminUserName": ssh_servers.user, "adminUserPassword": PASSWORD}
    describe(world, on_servers(ssh_servers, world), keyFile=str(key), userAccountSettings=account)
    look = """
        import os, time
        seen = dict(os.environ)
        print("token", len(seen.pop("TOKEN")), [name for name in seen if "canary" in seen[name]])
        print("up", flush=True)
        while not os.path.exists(os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/go"):
            time.sleep(0.05)
    """
    project = world.project(look, batchai=config(2, secrets=[{"name": "TOKEN", "value": TOKEN}]))

    wrong = world.run(project, BATCHAI_SSH_PASSPHRASE=PASSPHRASE.replace("key", "lock"))
    assert wrong.returncode == 1 and f"the passphrase in BATCHAI_SSH_PASSPHRASE doesn't open the key file {key}" in wrong.stderr
    assert "canary" not in wrong.stdout + wrong.stderr and "Traceback" not in wrong.stderr
    assert world.runs() == []

    process = world.start(world.command(project), BATCHAI_SSH_PASSPHRASE=PASSPHRASE)
    running(world)
    agents = [*world.agents(), *world.job_processes()]
    assert len(agents) >= 4 and secrets_in_processes() == []
    assert not [agent for agent in agents if "BATCHAI_SSH_PASSPHRASE" in agent.environ()]
    looked, found = secrets_in_files(world)
    jobs = [world.root / f"root{node}" / "jobs" for node in range(2)]
    for place in (*jobs, world.folder(), world.home):
        assert any(place in path.parents for path in looked), place
    assert found == []
    go(world)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"token {len(TOKEN)} []" in out and "canary" not in out + err
    run = world.last
    assert "canary" not in json.dumps([run.data.tags, run.data.params])
    world.wait_gone()
    looked, found = secrets_in_files(world)
    assert len(looked) > 5 and found == []
