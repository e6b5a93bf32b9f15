"""The machines that tests make of namespaces are as separate as real ones, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from netns import BIN, HOME, SHARE, Machine, Machines, Network, Setup, unavailable
from waiting import wait_for

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

SERVE = """
import socket
server, held = socket.create_server(("::", 5000), family=socket.AF_INET6, dualstack_ipv6=True), []
while True:
    held.append(server.accept())
"""
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 5000), 0.5)"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    root = tmp_path_factory.mktemp("netns")
    (root / "share").mkdir()
    (root / "other").mkdir()
    shared = Setup(share=root / "share")
    odd = [Setup(share=root / "other", var_tmp=1 << 20), Setup(without=("python3",), hosts="10.9.9.9 elsewhere\n")]
    with Machines(root, [shared, shared, *odd]) as made:
        yield made


def ssh(machines: Machines, address: str, command: str) -> str:
    options = ["-F", "none", "-i", machines.key_file, "-o", f"UserKnownHostsFile={machines.known_hosts}", "-o", "BatchMode=yes"]
    argv = ["ssh", *options, "-o", "GlobalKnownHostsFile=none", f"{machines.user}@{address}", command]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20).stdout


def serve(machine: Machine) -> None:
    """Accept on port 5000 until the power goes."""
    log = subprocess.DEVNULL
    subprocess.Popen(machine.inside(["setsid", "-f", "python3", "-c", SERVE]), stdin=log, stdout=log, stderr=log).wait()
    wait_for(lambda: machine.run(["python3", "-c", CALL, "127.0.0.1"]).returncode == 0)


def reaches(machine: Machine, address: str) -> bool:
    return machine.run(["python3", "-c", CALL, address]).returncode == 0


def test_each_has_its_own_name_addresses_and_processes(machines: Machines) -> None:
    assert [machine.run(["hostname"]).stdout for machine in machines] == [f"bnode{number}\n" for number in (1, 2, 3, 4)]
    assert len({machine.address for machine in machines} | {machine.address6 for machine in machines}) == 8
    first = machines[0]
    assert first.run(["getent", "ahostsv4", "bnode1"]).stdout.startswith("127.0.1.1 ")
    assert first.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
    assert machines[3].run(["getent", "hosts", "elsewhere"]).stdout.startswith("10.9.9.9")
    with subprocess.Popen(first.inside(["sleep", "60"])) as sleeper:
        # What enters a machine is there a moment before the program that it starts.
        wait_for(lambda: [process.cmdline() for process in first.processes()] == [["sleep", "60"]])
        [process] = first.processes()
        assert machines[1].processes() == []
        assert len(machines[1].run(["sh", "-c", "ls -d /proc/[0-9]*"]).stdout.split()) <= 4
        process.kill()
    assert sleeper.returncode
    first.run(["sh", "-c", "sleep 0 & sleep 0 &"], check=True)
    wait_for(lambda: len(psutil.Process(first.pid).children()) == 1, what="the first process reaps orphans; its sshd stays")


def test_a_login_has_a_clean_home_and_nothing_of_the_client(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "of-the-client")
    for machine in machines:
        for address in (machine.address, machine.address6):
            lines = ssh(machines, address, "hostname; pwd; ls -A; env").splitlines()
            assert lines[:2] == [machine.hostname, HOME]
            assert f"HOME={HOME}" in lines and f"PATH={BIN}:/usr/sbin:/usr/bin:/sbin:/bin" in lines
            assert not [line for line in lines if "CANARY" in line or "=/root" in line]
        assert "CANARY" not in machine.run(["env"]).stdout
        assert b"CANARY" not in Path(f"/proc/{machine.pid}/environ").read_bytes()


def test_mounts_are_private_and_the_share_is_shared(machines: Machines) -> None:
    one, two, odd, none = machines
    assert one.run(["sh", "-c", f"echo hello > {SHARE}/file && touch ~/mine /var/tmp/mine /dev/shm/mine"], check=True)
    assert two.run(["cat", f"{SHARE}/file"]).stdout == "hello\n"
    assert [machine.run(["ls", SHARE]).stdout for machine in (odd, none)] == ["", ""]
    assert none.run(["ls", "-d", SHARE]).returncode
    assert not two.run(["find", HOME, "/var/tmp", "/dev/shm", "-name", "mine"]).stdout
    assert not Path("/var/tmp/mine").exists() and not Path(SHARE).exists()
    full = odd.run(["dd", "if=/dev/zero", "of=/var/tmp/big", "bs=1M", "count=2"])
    assert full.returncode == 1 and "No space left on device" in full.stderr


def test_programs_come_and_lack(machines: Machines) -> None:
    machines[1].install("nvidia-smi", "#!/bin/sh\necho 'GPU 0: a stand-in'\n")
    assert ssh(machines, machines[1].address, "nvidia-smi -L") == "GPU 0: a stand-in\n"
    assert machines[0].run(["sh", "-c", "command -v nvidia-smi"]).returncode
    assert machines[0].run(["sh", "-c", "command -v python3"]).stdout == "/usr/bin/python3\n"
    assert ssh(machines, machines[3].address, "command -v python3 || ls /usr/bin/python3 2>&1 || true").startswith(
        "ls: cannot access"
    )
    assert machines[0].run([sys.executable, "-c", "import sys; print(sys.version_info[0])"]).stdout == "3\n"


def test_network(machines: Machines) -> None:
    one, two, three, _ = machines
    serve(one)
    assert reaches(two, one.address) and reaches(two, one.address6)

    one.block(two)
    assert not reaches(two, one.address) and not reaches(two, one.address6)
    assert reaches(three, one.address)
    one.unblock(two)
    assert reaches(two, one.address)

    one.unplug()
    assert not reaches(two, one.address)
    one.plug()
    assert reaches(two, one.address)

    fast = machines.add_network()
    for machine in (one, two):
        machine.add_interface("ib0", fast)
    address = fast.address(11)
    assert reaches(two, address) and not reaches(three, address)
    one.unplug("ib0")
    assert reaches(two, one.address) and not reaches(two, address)
    one.plug("ib0")

    one.freeze()
    with socket.create_connection((one.address, one.port), 2) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        one.thaw()
        connection.settimeout(5)
        assert connection.recv(4) == b"SSH-"


def test_power(machines: Machines) -> None:
    machine = machines[1]
    machine.run(["sh", "-c", "echo kept > /var/tmp/file; echo kept > ~/file"], check=True)
    serve(machine)
    processes = machine.processes()
    with socket.create_connection((machine.address, 5000), 2) as connection:
        machine.power_off()
        assert not [process for process in processes if process.is_running()]
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):  # nobody says goodbye
            connection.recv(1)
    machine.power_off()
    with pytest.raises(OSError), socket.create_connection((machine.address, machine.port), 0.3):
        pass
    machine.power_on()
    assert ssh(machines, machine.address, "hostname; cat /var/tmp/file ~/file") == "bnode2\nkept\nkept\n"
    assert machine.processes() == []
    odd = machines[2]
    odd.run(["touch", "/var/tmp/file"], check=True)
    odd.power_off()
    odd.power_on()
    assert odd.run(["ls", "/var/tmp"]).stdout == ""


def bridges() -> set[str]:
    return {name for name in os.listdir("/sys/class/net") if name.startswith("bn")}


def test_nothing_is_left(tmp_path: Path) -> None:
    mounts, before = Path("/proc/self/mounts").read_text(), set(psutil.Process().children(recursive=True))
    with pytest.raises(ZeroDivisionError), Machines(tmp_path) as machines:
        made = [machines.network, machines.add_network()]
        serve(machines[0])
        machines[1].freeze()
        machines[2].power_off()
        tree = set(psutil.Process().children(recursive=True)) - before
        assert len(tree) >= 7
        raise ZeroDivisionError
    assert not [process for process in tree if process.is_running()]
    # Other tests have theirs at the same time: bn23 is no part of bn233.
    assert not {name.partition("p")[0] for name in bridges()} & {network.bridge for network in made}
    assert Path("/proc/self/mounts").read_text() == mounts

    share = tmp_path / "missing"
    with pytest.raises(RuntimeError, match=r"bnode1 did not start: .*missing"), Machines(tmp_path / "2", [Setup(share=share)]):
        pass
    assert set(psutil.Process().children(recursive=True)) <= before


def test_machines_end_with_killed_tests(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from netns import Machines
        with Machines(Path(sys.argv[1])) as machines:
            machines[0].freeze()
            print(machines.network.bridge, *(machine.pid for machine in machines), flush=True)
            time.sleep(60)
    """
    argv = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(argv, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        bridge, *pids = tests.stdout.readline().split()
        tests.send_signal(signal.SIGKILL)
    wait_for(lambda: not [pid for pid in pids if psutil.pid_exists(int(pid))], 5)
    assert bridge in bridges()
    Network().remove()
    assert bridge not in bridges()
