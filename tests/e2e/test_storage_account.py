"""A job on the local cluster whose document mounts a file share of an account that config.yaml opens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from azure_server import AzureServer
from command_line import Cli

pytestmark = pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this machine has no FUSE, which rclone mounts with")

TRAIN = """
    import os, pathlib
    text = pathlib.Path(os.environ["AZ_BATCHAI_INPUT_DATA"], "words.txt").read_text()
    pathlib.Path(os.environ["AZ_BATCHAI_OUTPUT_MODEL"], "m.h5").write_text(text.upper())
"""
CONFIG = """
    properties:
      mountVolumes:
        azureFileShares:
          - azureFileUrl: https://<AZURE_BATCHAI_STORAGE_ACCOUNT>.file.core.windows.net/data
            relativeMountPath: external
            credentials: {accountKey: REDACTED}
      inputDirectories: [{id: DATA, path: $AZ_BATCHAI_JOB_MOUNT_ROOT/external/in}]
      outputDirectories: [{id: MODEL, pathPrefix: $AZ_BATCHAI_JOB_MOUNT_ROOT/external, pathSuffix: m}]
"""


def test_what_is_uploaded_is_trained_with_and_what_comes_of_it_is_downloaded(cli: Cli, azure: AzureServer) -> None:
    world = cli.world
    world.home.mkdir()
    entry = {"accountKey": azure.key, "fileEndpoint": azure.endpoint}
    (world.home / "config.yaml").write_text(json.dumps({"shares": {azure.account: entry}}))
    world.environment["AZURE_BATCHAI_STORAGE_ACCOUNT"] = azure.account
    (world.cwd / "words.txt").write_text("words")
    cli.json("storage", "share", "create", "-n", "data")
    cli.json("storage", "file", "upload", "-s", "data", "--source", "words.txt", "-p", "in/")

    done = world.run(world.project(TRAIN, batchai=CONFIG))
    assert done.returncode == 0, done.stderr
    assert "no key or SAS" not in done.stderr and azure.key not in done.stderr

    (made,) = (azure.root / "file" / "data").rglob("m.h5")
    path = made.relative_to(azure.root / "file" / "data")
    cli.json("storage", "file", "download", "-s", "data", "-p", path)
    assert (world.cwd / "m.h5").read_text() == world.artifact("outputs/MODEL/m.h5") == "WORDS"
    assert not (world.home / "shares").exists()
