"""A rank that needs more memory than there is: the kernel kills it, and the reason says why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_world import Cluster
from waiting import wait_for

LIMIT = 128 << 20
GROUPS = Path("/sys/fs/cgroup")
# bash, so that the shell and not the program is what the agent waits for.
EATS = """
if [ $BATCHAI_RANK = 0 ]; then sleep 600; fi
python3 -c '
held = []
while True:
    held.append(bytearray(8 << 20))
'
exit $?
"""


def _set_limit(group: Path) -> None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        if (group / name).exists():
            (group / name).write_text(str(LIMIT))
            return
    raise OSError("its control group has no limit of memory")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 128 MiB, of version 1 or 2, removed at the end."""
    made = next((root for root in (GROUPS / "memory", GROUPS) if root.is_dir()), GROUPS) / f"batchai-test-{os.getpid()}"
    try:
        made.mkdir()
        _set_limit(made)
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    yield made
    wait_for(lambda: not (made / "cgroup.procs").read_text())
    made.rmdir()


def test_a_rank_that_the_kernel_killed_for_its_memory_is_told_of(agents: Callable[..., Cluster], group: Path) -> None:
    enter = ["bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "enter"]
    job = agents().submit(EATS, nodes=2, enter=[["env"], enter])
    verdict = job.wait()
    assert verdict["exitCode"] == 137, job.said()
    assert verdict["errors"][0]["code"] == "JobFailed"
    assert verdict["reason"].startswith(
        "rank 1 on node-1 was killed by SIGKILL (exit code 137): the memory limit of its control group was reached (128 MiB);"
        " raise it, or lower the batch size"
    )
    assert job.exit(0)["ranks"][0]["exitCode"] == 143, "the other rank was asked to end"
    assert not job.processes()
