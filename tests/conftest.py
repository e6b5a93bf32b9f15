"""Fixtures that all tests share: a world of their own, servers, and nothing that one test leaves to another."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from azure_server import AzureServer
from command_line import Cli
from hypothesis import settings
from mlflow_server import MlflowServer
from slow import SLOW
from slurm_daemons import SlurmDaemons, slurm_daemons
from sshd import SshNodes, ssh_nodes
from torch_python import python_with_horovod, python_with_torch
from world import World, argv, make_store

from mlflow_batchai.storage import credentials

ROOT = Path(__file__).parent.parent

STORAGE_VARIABLES = "ACCOUNT KEY SAS_TOKEN CONNECTION_STRING"

# A follower process that has no job any more ends with its test.
os.environ.setdefault("BATCHAI_FOLLOWER_IDLE", "0.5")

# Machines are slow at times; the examples are the same in every run.
settings.register_profile("batchai", deadline=None, derandomize=True, database=None)
settings.load_profile("batchai")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the marker ``slow``, and time to whoever is the first to need PyTorch, which is downloaded and built for."""
    for item in items:
        if f"{item.path.relative_to(ROOT / 'tests')}::{item.name}".startswith(SLOW):
            item.add_marker("slow")
        if {"torch_python", "torch_horovod_python"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(1800), append=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", help="keep pictures of MLflow's pages there (tests/e2e/test_ui.py)")


@pytest.fixture(scope="session")
def store_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that ``World`` copies."""
    return make_store(tmp_path_factory.mktemp("store") / "mlflow.db")


@pytest.fixture(scope="session")
def agent_pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one file that nodes are sent."""
    from mlflow_batchai.engines import archive

    return archive.stored(tmp_path_factory.mktemp("agents"))


@pytest.fixture(scope="session")
def torch_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with PyTorch for CPUs."""
    return python_with_torch(tmp_path_factory.mktemp("torch") / "venv")


@pytest.fixture(scope="session")
def torch_horovod_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that also has Horovod for its PyTorch."""
    return python_with_horovod(tmp_path_factory.mktemp("torch-horovod") / "venv")


@pytest.fixture(scope="module")
def ssh_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNodes]:
    """Four SSH servers for one test module; a test that stops one starts it again."""
    with ssh_nodes(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmDaemons]:
    """A Slurm of four nodes for one test module; a test that stops a daemon starts it again."""
    with slurm_daemons() as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def _no_key_of_a_person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests that have no client folder of their own sign with a key that is nobody's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHAI_HOME", str(tmp_path_factory.mktemp("batchai-home")))
        yield


@pytest.fixture(autouse=True)
def _no_credentials_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each endpoint has a key of its own for the same account, and a process remembers what documents gave."""
    monkeypatch.setattr("mlflow_batchai.storage.credentials._remembered", {})


@pytest.fixture
def fails_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], list[Any]]:
    """Have the first call of a method of MLflow's client raise; the list holds that call's arguments once it was made."""
    from mlflow.tracking import MlflowClient

    def arm(call: str, error: BaseException) -> list[Any]:
        real, failed = getattr(MlflowClient, call), []

        def method(*arguments: Any, **options: Any) -> Any:
            if not failed:
                failed.append(arguments)
                raise error
            return real(*arguments, **options)

        monkeypatch.setattr(MlflowClient, call, method)
        return failed

    return arm


@pytest.fixture
def no_storage_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of this machine's user either."""
    for name in (f"{of}_{what}" for of in ("AZURE_STORAGE", "AZURE_BATCHAI_STORAGE") for what in STORAGE_VARIABLES.split()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(credentials.VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def _no_store_of_another_test() -> Iterator[None]:
    """``mlflow.set_tracking_uri`` holds for the process, and for those that it starts."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    if before is not None:
        os.environ["MLFLOW_TRACKING_URI"] = before
    if (module := sys.modules.get("mlflow.tracking._tracking_service.utils")) is not None:
        module._tracking_uri = None  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """An Azure Files and blob endpoint for one test module; a test that sets faults, latency or a size limit takes them back."""
    with AzureServer(tmp_path_factory.mktemp("azure")) as server:
        # As a cluster's document does; other processes are told by one, or by config.yaml.
        credentials.name_endpoint(server.endpoint)
        credentials.name_endpoint(server.blob_endpoint)
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, store_template: Path) -> Iterator[MlflowServer]:
    """A real MLflow server for one test module."""
    made = MlflowServer(tmp_path_factory.mktemp("server"), store_template)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def world(tmp_path: Path, store_template: Path) -> Iterator[World]:
    """A fresh World; what a test leaves running makes it fail, unless the test has failed already."""
    made = World(tmp_path, store_template)
    try:
        yield made
        until = time.monotonic() + 30
        while (left := made.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        lines = [" ".join(line) for process in left if (line := argv(process))]
        assert not lines, f"left running: {lines}"
    finally:
        made.close()


@pytest.fixture
def cli(world: World) -> Cli:
    """The command ``batchai`` in a fresh world, in this process."""
    return Cli(world)


@pytest.fixture(scope="module")
def shared_cli(tmp_path_factory: pytest.TempPathFactory, store_template: Path) -> Iterator[Cli]:
    """The same in a world that all tests of a module share, for those that look at one job."""
    made = World(tmp_path_factory.mktemp("shared"), store_template)
    try:
        yield Cli(made)
    finally:
        made.close()
