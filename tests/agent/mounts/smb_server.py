"""An SMB 3 server as an Azure file share is one: it asks for encryption, and for a user whose password is a storage key."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

needs_smbd = pytest.mark.skipif(
    not (shutil.which("smbd") and shutil.which("smbclient") and shutil.which("smbpasswd")), reason="Samba is not installed"
)

USER = "nobody"  # Samba wants a user that the system has


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def smb_share(folder: Path, name: str, key: str) -> Iterator[int]:
    """The port of a server on 127.0.0.1 with one share, whose directory is ``folder/NAME``."""
    (folder / name).mkdir()
    (folder / name).chmod(0o777)
    for state in ("private", "lock", "state", "cache", "pid", "ncalrpc"):
        (folder / state).mkdir()
    port = free_port()
    settings = {
        "server role": "standalone server",
        "interfaces": "127.0.0.1",
        "bind interfaces only": "yes",
        "smb ports": str(port),
        "server min protocol": "SMB3_11",
        "smb encrypt": "required",
        "disable netbios": "yes",
        "load printers": "no",
        "passdb backend": f"tdbsam:{folder}/private/passdb.tdb",
        "private dir": f"{folder}/private",
        "lock directory": f"{folder}/lock",
        "state directory": f"{folder}/state",
        "cache directory": f"{folder}/cache",
        "pid directory": f"{folder}/pid",
        "ncalrpc dir": f"{folder}/ncalrpc",
        "log file": f"{folder}/log",
    }
    lines = ["[global]", *(f"{key} = {value}" for key, value in settings.items())]
    lines += [f"[{name}]", f"path = {folder / name}", "read only = no", f"valid users = {USER}"]
    configuration = folder / "smb.conf"
    configuration.write_text("\n".join(lines) + "\n")
    subprocess.run(
        ["smbpasswd", "-c", str(configuration), "-s", "-a", USER],
        input=f"{key}\n{key}\n",
        text=True,
        check=True,
        capture_output=True,
    )
    server = subprocess.Popen(
        ["smbd", "--foreground", "--no-process-group", "-s", str(configuration)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it ends its whole group
    )
    try:
        wait_for(lambda: _listens(port), what="smbd")
        yield port
    finally:
        server.terminate()
        server.wait(60)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
