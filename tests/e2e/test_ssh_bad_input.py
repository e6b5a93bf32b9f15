"""Clusters over SSH that can't be used: one sentence that names the node and the remedy, exit code 1, and nothing left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from netns import Machines, Setup, unavailable
from ssh_world import HereClient, config, describe, ended, on_machines

from mlflow_batchai.engines import ssh_hosts

on_namespaces = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

GOOD, OTHER_SHARE, FULL, READ_ONLY = range(4)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A good one, and one for each thing that can be wrong with a machine."""
    root = tmp_path_factory.mktemp("netns")
    for name in ("share", "other"):
        (root / name).mkdir()
    share = Setup(share=root / "share")
    with Machines(root, [share, Setup(share=root / "other"), Setup(share=share.share, var_tmp=80 << 20), share]) as made:
        assert made[READ_ONLY].run(["mount", "-o", "remount,ro,bind", made[READ_ONLY].share]).returncode == 0
        yield made


@on_namespaces
def test_machines(world: Any, machines: Machines, here: HereClient) -> None:
    for odd, pattern in (
        (OTHER_SHARE, r": its /mnt/share is not the share that this machine has; mount the same one"),
        (READ_ONLY, r": its login may not write in /mnt/share; give it the right to"),
    ):
        describe(world, on_machines(machines, world, [GOOD, odd]), share=str(machines[GOOD].setup.share))
        said = here.refused(2)
        assert said.startswith(f"node {machines[odd].address}") and re.search(pattern, said), said
    world.wait_gone()


@on_namespaces
def test_a_root_on_a_network_file_system(
    world: Any, machines: Machines, here: HereClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tmpfs stands for NFS."""
    describe(world, on_machines(machines, world, [GOOD, FULL]), share=str(machines[GOOD].setup.share))
    monkeypatch.setattr(ssh_hosts, "NETWORK_FILESYSTEMS", {"tmpfs"})
    said = here.refused(2)
    assert re.search(rf"node {machines[FULL].address}: its folder .* lies on tmpfs, which can't be trusted with locks", said)


@on_namespaces
def test_a_disk_that_is_full(world: Any, machines: Machines, here: HereClient, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of a job: it fails with the reason and leaves nothing; then the node is refused, and left out."""
    describe(world, on_machines(machines, world, [GOOD, FULL]), share=str(machines[GOOD].setup.share))
    fills = """
        import os
        from mlflow_batchai.training import report
        with open("/var/tmp/filler", "ab", 0) as file:
            try:
                while os.environ["HOROVOD_RANK"] == "1":
                    file.write(bytes(1 << 20))
            except OSError:
                pass
        for step in range(2000):
            report.log(step=step, loss=1.0)
        with open("result", "ab", 0) as file:
            file.write(bytes(1 << 20))
    """
    run = ended(world, here.submit(world.project(fills, batchai=config(2))))
    assert run.info.status == "FAILED"
    assert "rank 1 on node-1" in run.data.tags["batchai.reason"] and "No space left" in run.data.tags["batchai.reason"]
    world.wait_gone()
    said = here.refused(2)
    assert re.search(
        rf"node {machines[FULL].address}.* only 0 MiB are free for /var/tmp/batchai-root; free some space there", said
    ), said
    run = here.submit(world.project("print('mine')", name="next", batchai=config(1)))
    assert ended(world, run).info.status == "FINISHED"
    assert f"node {machines[FULL].address}" in capsys.readouterr().err
    assert machines[FULL].run(["rm", "/var/tmp/filler"]).returncode == 0
