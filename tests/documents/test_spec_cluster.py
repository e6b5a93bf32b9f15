"""The cluster document: Batch AI's properties in both places, our engine keys, and the number of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from mlflow_batchai.documents.cluster import ClusterDocument, Engine
from mlflow_batchai.documents.model import masked
from mlflow_batchai.documents.reading import parse_cluster
from mlflow_batchai.errors import DocumentError

AZURE: dict[str, Any] = {
    "vmSize": "STANDARD_NC6",
    "vmPriority": "LowPriority",
    "scaleSettings": {"manual": {"targetNodeCount": 4, "nodeDeallocationOption": "terminate"}},
    "virtualMachineConfiguration": {"imageReference": {"publisher": "p", "offer": "o", "sku": "16.04-LTS"}},
    "userAccountSettings": {"adminUserName": "demo", "adminUserSshPublicKey": "ssh-rsa AAAA"},
    "subnet": {"id": "/subscriptions/s/subnets/default"},
    "nodeSetup": {
        "setupTask": {
            "commandLine": "cd /tmp; pip install x",
            "stdOutErrPathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/afs",
            "environmentVariables": [{"name": "A", "value": "1"}],
        },
        "mountVolumes": {"unmanagedFileSystems": [{"mountCommand": "mount -t nfs 10.0.0.4:/v", "relativeMountPath": "v"}]},
    },
}


def test_batch_ai_keys_stand_under_properties_or_at_the_top() -> None:
    wrapped, warnings = parse_cluster({"location": "eastus", "properties": AZURE}, "cluster.json")
    flat, none = parse_cluster(AZURE, "cluster.json")
    assert wrapped == flat
    assert warnings == ["cluster.json: location has no effect and is ignored"]
    assert none == []
    assert (flat.nodes, flat.engine, flat.vm_priority) == (4, Engine.LOCAL, "lowpriority")
    assert parse_cluster(masked(flat), "stored.json")[0] == flat


def test_our_keys() -> None:
    data = {
        "engine": "azurebatch",
        "nodes": 3,
        "python": "/opt/py/bin/python",
        "share": "/mnt/control",
        "gpusPerNode": 0,
        "oversubscribe": True,
        "networkInterface": "eth0",
    }
    document, _ = parse_cluster({**data, "properties": {"vmSize": "D1"}}, "gpu.yaml")
    assert document == ClusterDocument(
        engine=Engine.AZURE_BATCH,
        nodes=3,
        python="/opt/py/bin/python",
        share="/mnt/control",
        gpus_per_node=0,
        oversubscribe=True,
        network_interface="eth0",
        vm_size="D1",
    )
    assert masked(document)["engine"] == "azureBatch"


@pytest.mark.parametrize(
    ("data", "nodes"),
    [
        ({}, 2),
        ({"nodes": 1}, 1),
        ({"nodes": "100"}, 100),
        ({"nodes": 5, "scaleSettings": {"manual": {"targetNodeCount": 3}}}, 5),
        ({"scaleSettings": {"manual": {"targetNodeCount": 0}}}, 2),
        ({"scaleSettings": {"manual": {}}}, 2),
        ({"scaleSettings": {"autoScale": {"minimumNodeCount": 0, "maximumNodeCount": 7}}}, 7),
        ({"properties": None}, 2),
    ],
)
def test_number_of_nodes(data: dict[str, Any], nodes: int) -> None:
    assert parse_cluster(data, "c.yaml")[0].nodes == nodes


SSH: dict[str, Any] = {
    "engine": "ssh",
    "hosts": ["10.0.0.4", {"host": "gpu2", "user": "me", "port": 2222, "keyFile": "~/.ssh/two", "root": "/scratch/batchai"}],
    "user": "azbatch",
    "knownHosts": "~/.ssh/known_hosts",
    "jumpHost": "me@gateway",
    "share": "/mnt/share",
    "shareOnNodes": "/srv/share",
}


def test_nodes_over_ssh() -> None:
    document, warnings = parse_cluster({**SSH, "properties": AZURE}, "c.yaml")
    assert warnings == []
    assert (document.nodes, document.agent_python, document.port) == (2, "python3", None)
    first, second = document.hosts
    assert (first.host, first.user, first.root) == ("10.0.0.4", None, None)
    assert (second.host, second.user, second.port, second.root) == ("gpu2", "me", 2222, "/scratch/batchai")
    assert parse_cluster(masked(document), "stored.json")[0] == document
    assert parse_cluster({**SSH, "root": "~/node"}, "c.yaml")[0].root == "~/node"


def test_the_default_cluster() -> None:
    assert ClusterDocument.local() == parse_cluster({}, "c.yaml")[0]
    assert ClusterDocument.local(nodes=5).nodes == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"nodes": 101}, "nodes must be at most 100"),
        ({"engine": "kubernetes"}, "engine is 'kubernetes'; allowed: 'local', 'ssh', 'slurm', 'azureBatch'"),
        (
            {"engine": {"local": {}}},
            "engine is not an allowed value; allowed: 'local', 'ssh', 'slurm', 'azureBatch'",
        ),
        ({"vmSise": "x"}, "vmSise is not a known key; did you mean vmSize?"),
        ({"properties": {"vmSise": "x"}}, "properties.vmSise is not a known key; did you mean vmSize?"),
        (
            {"properties": {"scaleSettings": {"manual": {"targetNodeCount": "x"}}}},
            "properties.scaleSettings.manual.targetNodeCount must be a whole number",
        ),
        ({"scaleSettings": {}}, "scaleSettings must have either manual or autoScale"),
        (
            {"scaleSettings": {"manual": {}, "autoScale": {"minimumNodeCount": 0, "maximumNodeCount": 1}}},
            "scaleSettings must have either manual or autoScale, not both",
        ),
        (
            {"vmSize": "a", "properties": {"vmSize": "b"}},
            "vmSize is given both under properties and beside it; keep one",
        ),
        ({"properties": []}, "properties must be a mapping, not a list"),
        ({"hosts": ["a"]}, "has hosts, which needs engine: ssh"),
        ({**SSH, "hosts": []}, "has engine: ssh and no hosts; name the nodes: hosts: [10.0.0.4, 10.0.0.5]"),
        ({**SSH, "hosts": ["a", "b", "a"]}, "gives the host 'a' twice"),
        ({**SSH, "nodes": 3}, "says nodes: 3 and names 2 hosts; drop nodes"),
        (
            {**SSH, "share": None},
            "has engine: ssh and no share; name the folder that this machine and the nodes share, or an Azure file share",
        ),
        ({**SSH, "root": "node"}, "root is 'node', but must be an absolute path, or begin with ~/ (the login's home)"),
        ({**SSH, "port": 70000}, "port must be at most 65535"),
        ({**SSH, "hosts": [{"host": "a", "keyfile": "x"}]}, "hosts[0].keyfile is not a known key; did you mean keyFile?"),
        ({**SSH, "knownhost": "x"}, "knownhost is not a known key; did you mean knownHosts?"),
    ],
)
def test_refusals(data: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_cluster(data, "c.yaml")
    assert str(caught.value) == f"c.yaml: {message}"
