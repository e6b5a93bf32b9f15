"""Volumes that a command mounts: SMB, NFS, what the administrator has mounted, and a document's own command.

This kernel has neither SMB nor NFS: of those the command is compared as text. That the credentials file is what an
SMB server wants is proved by Samba's own client and server.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from mount_world import needs_root
from smb_server import USER, needs_smbd, smb_share
from waiting import wait_for

from mlflow_batchai.agent import runtime
from mlflow_batchai.agent.mounts import commands, mountpoints, tools
from mlflow_batchai.agent.mounts.commands import KINDS, write_credentials
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.plan import Volume, read

KEY = base64.b64encode(secrets.token_bytes(64)).decode()


def cifs_volume(**changes: Any) -> dict[str, Any]:
    return {
        "scope": "job",
        "path": "data",
        "kind": "azureFiles",
        "how": "cifs",
        "name": "file share acct/data",
        "endpoint": "https://acct.file.core.windows.net",
        "account": "acct",
        "container": "data",
        "folder": "",
        "fileMode": "0640",
        "directoryMode": "0750",
        **changes,
    }


def nfs_volume(**changes: Any) -> dict[str, Any]:
    return {
        "scope": "job",
        "path": "nfs",
        "kind": "nfs",
        "name": "file server fs",
        "source": "fs:/export",
        "options": None,
        **changes,
    }


def command_volume(command: str) -> dict[str, Any]:
    return {"scope": "job", "path": "un managed", "kind": "command", "name": "unmanaged file system", "command": command}


CIFS_OPTIONS = (
    "vers=3.1.1,credentials=/f/smb,serverino,nosharesock,mfsymlinks,nobrl,actimeo=30,file_mode=0640,dir_mode=0750,uid=0,gid=0"
)
NFS_OPTIONS = "vers=4.1,ro; reboot"


@pytest.mark.parametrize(
    ("volume", "argv"),
    [
        (
            cifs_volume(folder="a/b"),
            ["mount", "-t", "cifs", "-o", CIFS_OPTIONS, "--", "//acct.file.core.windows.net/data/a/b", "/t"],
        ),
        (nfs_volume(), ["mount", "-t", "nfs", "--", "fs:/export", "/t"]),
        (nfs_volume(options=NFS_OPTIONS), ["mount", "-t", "nfs", "-o", NFS_OPTIONS, "--", "fs:/export", "/t"]),
        (command_volume("mount \\\n none\n"), ["bash", "-c", 'mount \\\n none "$1"', "mount", "/t"]),
    ],
)
def test_the_commands(monkeypatch: pytest.MonkeyPatch, volume: dict[str, Any], argv: list[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "getegid", lambda: 0)
    asked = read(Volume, volume)
    command = KINDS[asked.mounted_by].command
    assert command(asked, "/t", "/f") == argv
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if asked.mounted_by in ("cifs", "nfs"):
        assert command(asked, "/t", "/f") == ["sudo", "-n", *(word.replace("uid=0", "uid=1000") for word in argv)]


@pytest.mark.parametrize("volume", [cifs_volume(), nfs_volume()])
def test_what_a_node_lacks(monkeypatch: pytest.MonkeyPatch, volume: dict[str, Any]) -> None:
    asked = read(Volume, volume)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"mount.{asked.mounted_by} is not installed there" in str(tools.missing(asked))
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "mounting needs root" in str(tools.missing(asked))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert tools.missing(asked) is None


HOST = "acct.file.core.windows.net"


@pytest.mark.parametrize(
    ("volume", "said", "sentence"),
    [
        (cifs_volume(), "mount error(13): Permission denied", f"{HOST} refused the account key"),
        (cifs_volume(), "mount error(2): No such file or directory", "there is no such share or folder in the account"),
        (cifs_volume(), "mount error(115): Operation now in progress", f"{HOST} can't be reached from there (port 445)"),
        (cifs_volume(), "sudo: a password is required", "mounting needs root"),
        (nfs_volume(), "mount.nfs: access denied by server", "fs does not export the directory"),
        (nfs_volume(), "mount.nfs: Failed to resolve server fs: Name or service not known", "the name fs is not known there"),
        (nfs_volume(), "mount.nfs: Connection refused", "fs can't be reached from there (port 2049)"),
        (nfs_volume(), "odd", ""),
    ],
)
def test_what_commands_say_is_explained(volume: dict[str, Any], said: str, sentence: str) -> None:
    asked = read(Volume, volume)
    explained = KINDS[asked.mounted_by].explain(said, asked)
    assert explained.startswith(sentence) and bool(sentence) == bool(explained)


def test_the_credentials_file(tmp_path: Path) -> None:
    path = tmp_path / "smb"
    write_credentials(str(path), "acct", KEY)
    assert path.read_text() == f"username=acct\npassword={KEY}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_credentials(str(path), "acct", KEY)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_credentials(str(tmp_path / "link"), "acct", KEY)


@needs_root
@needs_smbd
def test_an_smb_server_takes_the_credentials(tmp_path: Path) -> None:
    """Samba, with encryption required and the key as password: its own client reads the file as mount.cifs does."""
    server = tmp_path / "smb"
    server.mkdir(mode=0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    with smb_share(server, "data", KEY) as port:
        good, bad = tmp_path / "good", tmp_path / "bad"
        write_credentials(str(good), USER, KEY)
        write_credentials(str(bad), USER, KEY[:-4] + "abc=")

        def client(file: Path, command: str) -> subprocess.CompletedProcess[str]:
            argv = ["smbclient", "//127.0.0.1/data", "-p", str(port), "-A", str(file), "-c", command]
            return subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=30)

        (tmp_path / "result").write_text("result")
        done = client(good, "put result")
        assert done.returncode == 0, done
        assert (server / "data" / "result").read_text() == "result"
        done = client(bad, "ls")
        assert done.returncode != 0
        assert "NT_STATUS_LOGON_FAILURE" in done.stdout + done.stderr


@pytest.mark.parametrize("scope", ["job", "cluster"])
def test_what_nodes_have_mounted_is_linked(make_node: Any, tmp_path: Path, scope: str) -> None:
    source = tmp_path / "share"
    source.mkdir()
    (source / "file").write_text("precious")
    volume = cifs_volume(how="bind", source=str(source), scope=scope)
    node = make_node([volume])
    node.mounts.mount_all()
    assert (node.targets[0] / "file").read_text() == "precious"
    assert node.targets[0].is_symlink()
    node.close()
    assert not os.path.lexists(node.targets[0])
    assert (source / "file").exists()
    shutil.rmtree(source)
    assert "is not a directory there" in str(make_node([volume]).failure())
    assert str(tools.missing(read(Volume, volume))).startswith(f"{source} is not a directory")


@needs_root
def test_a_mount_command(make_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shell text, the path is none; a process of its own that it leaves lives until all is unmounted."""
    monkeypatch.setattr(runtime, "SPARED_SECONDS", 0.3)
    said = tmp_path / "said"
    node = make_node([command_volume(f"(setsid sleep 300 >/dev/null 2>&1 & echo $! > {said}); mount -t tmpfs none")])
    assert "'" in str(node.targets[0])
    node.mounts.mount_all()
    found = mountpoints.at(str(node.targets[0]))
    assert found is not None
    assert found.kind == "tmpfs"
    (node.targets[0] / "file").write_text("x")
    node.runtime.stop_helpers()
    assert node.runtime.end_everything(cut_short=True) == set()
    daemon = Path("/proc") / said.read_text().strip()
    assert daemon.exists()
    node.close()
    wait_for(lambda: not daemon.exists() or "Z" in (daemon / "stat").read_text().split()[2])


@needs_root
def test_mount_commands_that_fail(make_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = make_node([command_volume("echo no such server >&2; exit 7; mount")]).failure()
    assert (failure.code, failure.exit_code) == ("UnmanagedMountError", 7)
    assert failure.reason().endswith("\nno such server")
    assert "volume 'un managed' (unmanaged file system) can't be mounted on node-0" in str(failure)
    assert "the command exited with code 7; the command was: bash -c echo no such" in str(failure)
    monkeypatch.setattr(commands, "APPEAR_SECONDS", 0.1)
    assert "the command ended well, yet nothing is mounted" in str(make_node([command_volume("true")]).failure())
    monkeypatch.setitem(KINDS, "command", KINDS["command"]._replace(seconds=0.3))
    failure = make_node([command_volume("echo slowly; sleep 300; true")]).failure()
    assert "the command had not ended after 0 s" in str(failure)


@needs_root
@pytest.mark.parametrize("kind", ["command", "link"])
def test_somebody_elses_mount_is_left_alone(make_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nobody looks at the path: its server may hang."""
    link = {"path": "data", "kind": "link", "source": str(tmp_path)}
    node = make_node([{**(command_volume("mount -t tmpfs none") if kind == "command" else link), "scope": "cluster"}])
    node.targets[0].mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "theirs", str(node.targets[0])], check=True)
    looked: list[str] = []
    islink = os.path.islink
    monkeypatch.setattr(os.path, "islink", lambda path: looked.append(str(path)) or islink(path))
    try:
        with pytest.raises(Failure, match=r"is taken: somebody has mounted theirs \(tmpfs\) there; unmount it"):
            node.mounts.mount_all()
        assert node.mounts.unmount_all() == []
        assert mountpoints.at(str(node.targets[0])) and str(node.targets[0]) not in looked
    finally:
        subprocess.run(["umount", str(node.targets[0])], check=True)


@needs_root
def test_what_a_file_system_still_holds_it_may_send(make_node: Any, tmp_path: Path) -> None:
    """One that sends the rest when it was unmounted is not ended before it has."""
    sent = tmp_path / "sent"
    daemon = f"while grep -q {tmp_path} /proc/self/mountinfo; do sleep 0.1; done; sleep 0.5; touch {sent}"
    node = make_node([command_volume(f"setsid sh -c '{daemon}' >/dev/null 2>&1 & sleep 0.2; mount -t tmpfs none")])
    node.mounts.mount_all()
    node.close()
    assert sent.exists()
