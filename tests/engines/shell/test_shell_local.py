"""Commands on this machine: one result type, no shell, and what can go wrong; the room costs nothing to import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from waiting import wait_for

from mlflow_batchai.engines import shell
from mlflow_batchai.errors import ClusterError


def test_words_reach_the_command_as_they_are():
    words = ["a b", "'", '"', "$HOME", "x\ny", ";", "", "é"]
    code = "import sys; print(sys.argv[1:]); print('no', file=sys.stderr); sys.exit(3)"
    result = shell.run([sys.executable, "-c", code, *words])
    assert result == (3, f"{words}\n", "no\n")


def test_the_environment_can_be_given_whole():
    assert shell.run(["/usr/bin/env"], {"ONLY": "this"}).out == "ONLY=this\n"


def test_a_command_that_is_not_there():
    with pytest.raises(ClusterError, match=r"^no-such-command can't be started: No such file or directory$"):
        shell.run(["no-such-command"])


def test_a_command_that_takes_too_long():
    with pytest.raises(ClusterError, match=r"^sleep took longer than 0 s$"):
        shell.run(["sleep", "5"], timeout=0.1)


def test_a_spawned_command_has_a_session_of_its_own_and_a_private_log(tmp_path):
    log = tmp_path / "logs" / "log"
    pid = shell.spawn(["sh", "-c", "read word || ps -o sid= -p $$; pwd; env"], {"PATH": "/usr/bin:/bin"}, log)
    lines = wait_for(lambda: len(found := log.read_text().split()) > 3 and found)
    assert lines[:2] == [str(pid), "/"]
    assert not any("HOME" in line for line in lines)
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_spawned_command_that_is_not_there(tmp_path):
    with pytest.raises(ClusterError, match=r"^no-such-command can't be started: No such file or directory$"):
        shell.spawn(["no-such-command"], {}, tmp_path / "log")


@pytest.mark.parametrize(
    "module", ["mlflow_batchai.engines.shell", "mlflow_batchai.engines.shell.ssh", "mlflow_batchai.engines.shell.targets"]
)
def test_importing_brings_no_paramiko(module):
    code = f"import {module}, sys; sys.exit(bool({{'paramiko', 'cryptography'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
