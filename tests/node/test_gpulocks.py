"""GPUs have one holder: among processes that share nothing but the machine, also when they die, and without a deadlock."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
from waiting import wait_for

from mlflow_batchai.node import gpulocks
from mlflow_batchai.node.gpulocks import Taken


class Machine:
    """Four GPUs that no other test knows, and who took some."""

    def __init__(self) -> None:
        self.ids = [f"GPU-{uuid.uuid4()}" for _ in range(4)]
        self._taken: dict[str, Taken] = {}

    def take(self, job: str, node: int, count: int = 1, nodes: int = 1) -> list[int] | None:
        """Node ``node`` of a job with so many nodes takes GPUs; their places on the machine."""
        first = node * count % 4
        own = (self.ids + self.ids)[first : first + count]
        others = [name for name in self.ids if name not in own]
        gang = {self._node(job, index): count for index in range(nodes)}
        taken = gpulocks.take(own, others, self._node(job, node), gang)
        if taken is None:
            return None
        self._taken[self._node(job, node)] = taken
        return sorted(map(self.ids.index, taken.ids))

    def end(self, *jobs: str) -> None:
        for name in [name for name in self._taken if name.split("/")[1] in jobs or not jobs]:
            for descriptor in self._taken.pop(name).descriptors:
                os.close(descriptor)

    def held(self) -> list[int]:
        return sorted(map(self.ids.index, gpulocks.held(self.ids)))

    def _node(self, job: str, node: int) -> str:
        return f"{self.ids[0]}/{job}/{node}"


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.end()


def test_each_has_its_own(machine: Machine) -> None:
    """One-GPU nodes of four clusters, which all mean the first GPU; then the fifth."""
    assert [machine.take(job, 0) for job in "abcd"] == [[0], [1], [2], [3]]
    assert machine.take("e", 0) is None and machine.held() == [0, 1, 2, 3]
    assert gpulocks.holders(machine.ids) == [f"pid {os.getpid()} of {pwd.getpwuid(os.getuid()).pw_name}"]
    machine.end("c")
    assert machine.held() == [0, 1, 3]
    assert machine.take("e", 0) == [2]
    machine.end()
    assert machine.held() == [] and gpulocks.holders(machine.ids) == []


def test_no_job_has_half_of_what_another_needs(machine: Machine) -> None:
    """Two jobs of two two-GPU nodes: the second waits as a whole, and so does one that would leave the first too few."""
    assert machine.take("a", 1, count=2, nodes=2) == [2, 3]
    assert machine.take("b", 0, count=2, nodes=2) is None
    assert machine.take("a", 0, count=2, nodes=2) == [0, 1]
    machine.end("a")
    assert machine.take("b", 0, count=2, nodes=2) == [0, 1]
    # It fits beside what b has so far; b's second node then waits for it, and it for nobody.
    assert machine.take("c", 3) == [3]
    assert machine.take("b", 1, count=2, nodes=2) is None
    machine.end("c")
    assert machine.take("b", 1, count=2, nodes=2) == [2, 3]


HOLD = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from mlflow_batchai.node import gpulocks
taken = gpulocks.take(sys.argv[2:3], [], "holder/" + sys.argv[2], {"holder/" + sys.argv[2]: 1})
rank = subprocess.Popen(["sleep", "60"], pass_fds=taken.descriptors)
print(rank.pid, flush=True)
sys.stdin.read()
"""


def test_who_is_killed_lets_go(machine: Machine) -> None:
    """With the last of its processes: an agent's rank that outlives it still computes there."""
    root = str(os.path.dirname(os.path.dirname(sys.modules["mlflow_batchai"].__file__ or "")))
    argv = [sys.executable, "-c", HOLD, root, machine.ids[0]]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout
        rank = int(agent.stdout.readline())
        assert machine.held() == [0] and machine.take("a", 0) == [1]
        agent.kill()
    assert machine.held() == [0, 1]
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: machine.held() == [1], 5)
    assert machine.take("b", 0) == [0]
