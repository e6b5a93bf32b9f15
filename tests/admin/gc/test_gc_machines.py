"""Nodes and this machine: what nothing uses goes, and one search covers all clusters."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from aged_files import DAY, HASH, put

from mlflow_batchai.admin.gc import Age, Item, find
from mlflow_batchai.agent.environments import kept
from mlflow_batchai.storage.directory import DirectoryShare


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("BATCHAI_HOROVOD_CACHE", raising=False)
    return tmp_path / "home"


def look(days: float = 30, cluster: str | None = None, said: list[str] | None = None) -> dict[str, Item]:
    return {item.path: item for item in find(Age(days * DAY), (said if said is not None else []).append, cluster)}


def test_local_nodes(home: Path) -> None:
    """What all nodes of this machine share is listed once; of a cluster, only its own nodes are looked at."""
    marker = put(home / "envs" / HASH / kept.MARKER, 31)
    agent = put(home / "agents" / "agent-0123456789abcdef.pyz", 31)
    logs = [put(home / "nodes" / cluster / node / "logs" / "abc-1.log", 31) for cluster, node in (("local", "0"), ("old", "1"))]
    put(home / "nodes" / "local" / "1" / "logs" / "young.log", 3)
    found = look()
    assert {path: item.kind for path, item in found.items()} == {
        str(marker.parent): "environment",
        str(agent): "agent",
        str(logs[0]): "log",
        str(logs[1]): "log",
    }
    assert str(logs[1]) not in look(cluster="local")
    assert all(item.remove() for item in found.values())
    assert not any(path.exists() for path in (marker.parent, agent, *logs))
    assert look() == {}


def test_followers_logs(home: Path) -> None:
    """However short a time was asked for: one that lives may have nothing to write for days."""
    over = put(home / "followers" / "over0123.log", 31)
    put(home / "followers" / "young0123.log", 29)
    found = look(days=0)
    assert list(found) == [str(over)]
    # One that is written again stays.
    os.utime(over)
    assert not found[str(over)].remove() and over.exists()
    os.utime(over, (0, 0))
    assert found[str(over)].remove() and not over.exists()


def test_wheels(home: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "mlflow-batchai" / "horovod"

    def wheel(key: str, days: float) -> Path:
        put(cache / f"{key}.lock", 400, b"")
        path = put(cache / key / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl", days, b"x" * 99)
        os.utime(path.parent, (time.time() - days * DAY,) * 2)
        return path

    old, young = wheel("cp311-linux_x86_64-tensorflow-2.20.0-1f2e3d4c", 31), wheel("cp311-linux_x86_64-torch-2.5-1f2e3d4c", 3)
    put(cache / "mine" / "notes.txt", 400)
    found = look()
    assert [(path, item.kind, item.size) for path, item in found.items()] == [(str(old.parent), "wheel", 99)]
    (item,) = found.values()
    with (cache / f"{old.parent.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not item.remove() and old.exists()
    assert item.remove() and not old.exists() and young.exists()
    # Whoever frees all that this client folder has leaves what another one may use.
    assert look(days=0) == {}


def test_ssh_nodes(home: Path, tmp_path: Path, ssh_servers: Any) -> None:
    """Each says what it has; one that is off is told of, and the others' is found."""
    roots = [tmp_path / f"root{number}" for number in range(2)]
    share = tmp_path / "share"
    share.mkdir()
    hosts = [{"host": server.address, "root": str(root)} for server, root in zip(ssh_servers, roots, strict=False)]
    document = {
        "engine": "ssh",
        "share": str(share),
        "port": ssh_servers.port,
        "keyFile": str(ssh_servers.key_file),
        "knownHosts": str(ssh_servers.known_hosts),
        "hosts": [*hosts, {"host": "127.0.0.99", "root": str(tmp_path / "off")}],
    }
    (home / "clusters").mkdir(parents=True)
    (home / "clusters" / "c.yaml").write_text(yaml.safe_dump(document))
    marker = put(roots[1] / "envs" / HASH / kept.MARKER, 31)
    put(roots[0] / "envs" / HASH / kept.MARKER, 29)
    said: list[str] = []
    found = look(cluster="c", said=said)
    name = hosts[1]["host"]
    assert {path: item.kind for path, item in found.items()} == {f"{name}:{marker.parent}": "environment"}
    assert len(said) == 1 and said[0].startswith("cluster c: node 127.0.0.99") and said[0].endswith("what it has stays")
    assert all(item.remove() for item in found.values())
    assert not marker.parent.exists()


def test_a_cluster_that_cant_be_used_holds_up_nothing(home: Path, tmp_path: Path) -> None:
    (home / "clusters").mkdir(parents=True)
    (home / "clusters" / "odd.yaml").write_text("engine: ssh\nhosts: [a]\nshare: /no/such/folder\n")
    log = put(home / "nodes" / "local" / "0" / "logs" / "abc-1.log", 31)
    said: list[str] = []
    assert list(look(said=said)) == [str(log)]
    assert len(said) == 1 and said[0].startswith("cluster odd is left alone: ") and "/no/such/folder" in said[0]


def test_a_share_of_two_clusters_is_looked_at_once(home: Path, on_directory: Any) -> None:
    (home / "clusters").mkdir(parents=True)
    for name in ("one", "two"):
        (home / "clusters" / f"{name}.yaml").write_text(yaml.safe_dump({"share": str(on_directory.root)}))
    folder = on_directory.job("old", ended=31, code=(sha256 := on_directory.staged("aa1", 31),))
    found = find(Age(30 * DAY), print)
    assert [item.kind for item in found] == ["job", "staged files"]
    assert all(item.remove() for item in found)
    assert not on_directory.there(folder)
    assert DirectoryShare(on_directory.root).list(f".batchai/objects/{sha256[:2]}") == []
