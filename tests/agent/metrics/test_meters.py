"""System metrics from the kernel's texts and nvidia-smi's table, and when the sampler reads them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.metrics import machine
from mlflow_batchai.agent.metrics.gpu import GpuMeter, values
from mlflow_batchai.agent.metrics.machine import JobProcesses, Machine
from mlflow_batchai.agent.metrics.sampler import Sampler, moments
from mlflow_batchai.agent.processes import memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\nBuffers: 1 kB\nHugePages_Total: 0\n"
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 9000000 1 0 0 0 0 0 0 9000000 1 0 0 0 0 0 0
  eth0:{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0
"""
# As nvidia-smi 580 answers for one H200, one whose fields are not supported, and one that has fallen off the bus.
UUID, OTHER = "GPU-185cd8ef-64ab-c410-7da7-6bf94e5acae5", "GPU-285cd8ef-64ab-c410-7da7-6bf94e5acae5"
TABLE = f"""0, {UUID}, 25, 1000, 143771, 350.00, 700.00, 38
Unable to determine the device handle for GPU1: 0000:00:07.0: Unknown Error
2, {OTHER}, [N/A], 11, [Not Supported], [Unknown Error], None, 49
"""


def test_interfaces_count_once(tmp_path: Path) -> None:
    """A bridge, and the half of a card that Azure's accelerated networking shows, repeat what the card has counted."""
    for name in ("eth0", "enP1", "docker0", "lo"):
        (tmp_path / name).mkdir()
    for card in ("eth0", "enP1"):
        (tmp_path / card / "device").mkdir()
    (tmp_path / "enP1" / "master").symlink_to("../eth0")
    names = ["lo", "eth0", "enP1", "docker0"]
    assert machine.counted(names, str(tmp_path)) == ["eth0"]
    assert machine.counted(["lo", "veth1"], str(tmp_path)) == ["veth1"]


def test_a_machine_by_its_texts(tmp_path: Path) -> None:
    def write(stat: str, received: int, sent: int) -> None:
        (tmp_path / "stat").write_text(stat)
        (tmp_path / "meminfo").write_text(MEMINFO)
        (tmp_path / "net" / "dev").write_text(NET.format(received=received, sent=sent))

    (tmp_path / "net").mkdir()
    core = min(os.sched_getaffinity(0))
    write(f"cpu{core} 10 0 0 80 10 0 0 0 50 0\n", 5_000_000, 1_000_000)
    meter = Machine(str(tmp_path), str(tmp_path), str(tmp_path / "links"))
    write(f"cpu{core} 40 0 0 150 10 0 0 0 90 0\n", 7_000_000, 1_500_000)
    found = meter.look()
    assert found["cpu_utilization_percentage"] == 30.0
    assert (found["system_memory_usage_megabytes"], found["system_memory_usage_percentage"]) == (0.4096, 40.0)
    assert (found["network_receive_megabytes"], found["network_transmit_megabytes"]) == (2.0, 0.5)
    assert 0 < found["disk_usage_percentage"] <= 100
    write("", 1_000_000, 1_500_000)
    found = meter.look()
    assert "cpu_utilization_percentage" not in found
    assert found["network_receive_megabytes"] == 3.0, "an interface that was made anew counts from nothing"


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_counts_instead_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    monkeypatch.setattr(memory, "GROUPS", str(tmp_path / "cgroup"))
    files = {
        1: {
            "cpu/box/cpu.cfs_quota_us": "50000",
            "cpu/box/cpu.cfs_period_us": "100000",
            "cpuacct/box/cpuacct.usage": "{nanoseconds}",
            "memory/box/memory.limit_in_bytes": "2000000",
            "memory/box/memory.usage_in_bytes": "1000000",
            "memory/box/memory.stat": "total_inactive_file 500000",
        },
        2: {
            "box/cpu.max": "50000 100000",
            "box/cpu.stat": "usage_usec {microseconds}",
            "box/memory.max": "2000000",
            "box/memory.current": "1000000",
            "box/memory.stat": "inactive_file 500000",
            "cpu.max": "max 100000",
        },
    }[version]

    def write(seconds: float) -> None:
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(nanoseconds=int(seconds * 1e9), microseconds=int(seconds * 1e6)) + "\n")

    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text({1: "4:memory:/box\n2:cpuacct:/box\n1:cpu:/box\n", 2: "0::/box\n"}[version])
    times = iter([0.0, 10.0])
    write(100.0)
    meter = Machine(str(tmp_path), str(tmp_path), clock=lambda: next(times))
    write(102.0)
    found = meter.look()
    assert found["cpu_utilization_percentage"] == pytest.approx(40.0), "2 s of the 5 s that half a core has in 10 s"
    assert (found["system_memory_usage_megabytes"], found["system_memory_usage_percentage"]) == (0.5, 25.0)


def test_the_jobs_own_processes() -> None:
    """A child and what it starts count, a stranger doesn't, unless it is named."""
    meter = JobProcesses(os.getpid())
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'x = bytearray(60_000_000)\\nwhile True: x[0] = 1'])"
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    try:
        wait_for(lambda: meter.look()["process_memory_megabytes"] > 60)
        wait_for(lambda: meter.look()["process_cpu_percentage"] > 5, pause=0.3)
        of_the_child = JobProcesses(process.pid)
        assert of_the_child.look()["process_memory_megabytes"] > 60
        assert JobProcesses(process.pid, lambda: [os.getpid()]).look()["process_memory_megabytes"] > 61
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert of_the_child.look() == {"process_memory_megabytes": 0, "process_cpu_percentage": 0.0}


def test_a_table_of_gpus() -> None:
    found = values(TABLE, ["2", "1", UUID])
    assert found == {
        "gpu_0_memory_usage_megabytes": pytest.approx(11.534336),
        "gpu_0_temperature_celsius": 49.0,
        "gpu_2_utilization_percentage": 25.0,
        "gpu_2_memory_usage_megabytes": 1048.576,
        "gpu_2_memory_usage_percentage": pytest.approx(0.69555),
        "gpu_2_power_usage_watts": 350.0,
        "gpu_2_power_usage_percentage": 50.0,
        "gpu_2_temperature_celsius": 38.0,
    }
    assert values(TABLE, ["7"]) == values("No devices were found\n", ["0"]) == values("", ["0"]) == {}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exec sleep 600", "did not answer within"),
        ("echo 'NVIDIA-SMI has failed' >&2; kill -9 $$", "NVIDIA-SMI has failed"),
        ("exit 9", "it said nothing"),
    ],
)
def test_nvidia_smi_that_hangs_or_dies(tmp_path: Path, script: str, said: str) -> None:
    """It is told of once, and asked again ever less often."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\n{script}\n")
    program.chmod(0o755)
    notes: list[str] = []
    now = [0.0]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    meter = GpuMeter(["0"], environment, notes.append, 0.3, lambda: now[0])
    for now[0] in (0.0, 5.0, 10.0, 25.0, 30.0):
        assert meter.look() == {}
    assert (tmp_path / "asked").read_text().count("asked") == 3
    assert len(notes) == 1 and said in notes[0]
    program.write_text(f"#!/bin/sh\ncat <<END\n{TABLE}END\n")
    now[0] = 100.0
    assert meter.look()["gpu_0_power_usage_watts"] == 350.0


def test_the_interval_grows() -> None:
    first = list(itertools.takewhile(lambda moment: moment <= 3600, moments(10.0)))
    assert first[:4] == [1.0, 10.0, 20.0, 30.0] and len(first) == 361
    week = list(itertools.takewhile(lambda moment: moment <= 7 * 86400, moments(10.0)))
    assert len(week) < 11_000 and week[-1] - week[-2] == 60.0
    assert list(itertools.islice(moments(1.0), 3)) == [1.0, 2.0, 3.0]
    assert list(itertools.islice(moments(300.0), 3)) == [1.0, 300.0, 600.0]


class Taker:
    """What stands for the shipper."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def sample(self, **fields: Any) -> None:
        self.samples.append(fields)

    def note(self, line: str) -> None:
        self.notes.append(line)


def test_a_sampler(make_layout: Callable[..., NodeLayout], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A meter that fails is told of and left out; a short job has one sample at least; nvidia-smi that hangs holds up nothing."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(GpuMeter.__init__, "__defaults__", (0.2, time.monotonic))
    monkeypatch.setattr(machine, "memory_bytes", lambda text: 1 / 0)
    layout = make_layout(1, systemMetrics=10.0)
    taker: Any = Taker()
    sampler = Sampler(layout, taker)
    sampler.start(["0"], {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    begun = time.monotonic()
    sampler.stop()
    assert time.monotonic() - begun < 30
    wait_for(lambda: taker.samples)
    assert [(sample["node"], sample["n"]) for sample in taker.samples] == [(1, 0)]
    assert {name.partition("_")[0] for name in taker.samples[0]["v"]} == {"process"}
    assert any("metrics of the machine are missing: ZeroDivisionError" in note for note in taker.notes), taker.notes
    assert any("did not answer" in note for note in taker.notes), taker.notes
    for plan in ({"systemMetrics": None}, {}):
        silent: Any = Taker()
        sampler = Sampler(make_layout(0, **plan), silent)
        sampler.start(["0"])
        sampler.stop()
        assert (silent.samples, silent.notes) == ([], [])
