"""A process that outlives its starter has a session and a private log of its own."""

from __future__ import annotations

import socket

import pytest
from waiting import wait_for

from mlflow_batchai.errors import ClusterError
from mlflow_batchai.follower.spawning import detach


def test_a_session_of_its_own_and_a_private_log(tmp_path):
    log = tmp_path / "logs" / "log"
    theirs, ours = socket.socketpair()
    with ours, theirs:
        command = ["sh", "-c", "read word; echo $word; ps -o sid= -p $$; pwd; env"]
        pid = detach(command, {"PATH": "/usr/bin:/bin"}, log, theirs)
        ours.sendall(b"told\n")
        lines = wait_for(lambda: len(found := log.read_text().split()) > 4 and found)
    assert lines[:3] == ["told", str(pid), "/"]
    assert not any("HOME" in line for line in lines)
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(ClusterError, match=r"^no-such-command can't be started: No such file or directory$"):
        detach(["no-such-command"], {}, tmp_path / "log")
