"""Cluster documents, their records, and config.yaml: what is read, and which key a refusal names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from whole_documents import AZURE, HIDDEN, SETTINGS, SSH

from mlflow_batchai import config
from mlflow_batchai.cli.options import OUTPUTS
from mlflow_batchai.documents.cluster import ClusterDocument, Engine, parse_cluster
from mlflow_batchai.documents.model import masked, parse
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.documents.settings import SettingsFile
from mlflow_batchai.errors import DocumentError


def test_batch_ai_keys_stand_under_properties_or_at_the_top() -> None:
    wrapped, warnings = parse_cluster({"tags": {}, "properties": {**AZURE, "vmPriority": "LowPriority"}}, "cluster.json")
    flat, none = parse_cluster(AZURE, "cluster.json")
    assert wrapped == flat
    assert warnings == ["cluster.json: tags has no effect and is ignored"]
    assert none == []
    assert (flat.nodes, flat.engine, flat.vm_priority) == (4, Engine.LOCAL, "lowpriority")
    assert masked(parse_cluster(masked(flat), "stored.json")[0]) == masked(flat)


def test_our_keys() -> None:
    data = {"engine": "LOCAL", "nodes": 3, "share": "/mnt/control", "gpusPerNode": 0, "oversubscribe": True}
    document, _ = parse_cluster({**data, "properties": {"vmSize": "D1"}}, "gpu.yaml")
    ours = ClusterDocument(
        engine=Engine.LOCAL, nodes=3, share="/mnt/control", gpus_per_node=0, oversubscribe=True, vm_size="D1"
    )
    assert document == ours
    assert masked(document)["engine"] == "local"
    assert ClusterDocument.local() == parse_cluster({}, "c.yaml")[0]
    assert ClusterDocument.local(nodes=5).nodes == 5


@pytest.mark.parametrize(
    ("data", "nodes"),
    [
        ({}, 2),
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


def test_nodes_over_ssh() -> None:
    document, warnings = parse_cluster({**SSH, "properties": AZURE}, "c.yaml")
    assert (warnings, document.nodes, document.agent_python, document.port) == ([], 2, "python3", None)
    first, second = document.hosts
    assert (first.host, first.user, first.root) == ("10.0.0.4", None, None)
    assert (second.host, second.user, second.port, second.root) == ("gpu2", "me", 2222, "/scratch/batchai")
    assert masked(parse_cluster(masked(document), "stored.json")[0]) == masked(document)
    assert parse_cluster({**SSH, "hosts": ["a"], "root": "~/node"}, "c.yaml")[0].hosts[0].host == "a"


REFUSED = {
    "nodes: 0": "nodes must be at least 1",
    "nodes: 101": "nodes must be at most 100",
    "engine: kubernetes": "engine is 'kubernetes'",
    "engine: {local: {}}": "engine is not an allowed value",
    "vmSise: x": "vmSise is not a known key; did you mean vmSize?",
    "properties: {vmSise: x}": "properties.vmSise is not a known key; did you mean vmSize?",
    "properties: {scaleSettings: {manual: {targetNodeCount: x}}}": "properties.scaleSettings.manual.targetNodeCount must be ",
    "scaleSettings: {}": "scaleSettings must have either manual or autoScale",
    "scaleSettings: {manual: {}, autoScale: {minimumNodeCount: 0, maximumNodeCount: 1}}": "scaleSettings must have either manual or",
    "{vmSize: a, properties: {vmSize: b}}": "vmSize is given both under properties and beside it",
    "properties: []": "properties must be a mapping",
    "hosts: [a]": "has hosts, which needs engine: ssh",
    "mountedAt: {a/b: /c}": "has mountedAt, which needs mount: bind",
    "{share: /x, credentials: {accountKey: a2V5}}": "has credentials, which belong to an Azure share",
    "{engine: ssh, share: /s}": "has engine: ssh and no hosts",
    "{engine: ssh, share: /s, hosts: [a, b, a]}": "hosts gives the host 'a' twice",
    "{engine: ssh, share: /s, hosts: [a, b], nodes: 3}": "says nodes: 3 and names 2 hosts",
    "{engine: ssh, hosts: [a]}": "has engine: ssh and no share",
    "{engine: ssh, hosts: [a], share: 'https://a.file.core.windows.net/s', shareOnNodes: /s}": "has shareOnNodes",
    "{engine: ssh, hosts: [a], share: /s, root: node}": "root is 'node', but must be an absolute path",
    "{engine: ssh, hosts: [a], share: /s, port: 70000}": "port must be at most 65535",
    "{engine: ssh, hosts: [{host: a, keyfile: x}]}": "hosts[0].keyfile is not a known key; did you mean keyFile?",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refusals(text: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_cluster(load_text(text, "c.yaml"), "c.yaml")
    assert str(caught.value).startswith(f"c.yaml: {REFUSED[text]}")


def test_the_settings_file() -> None:
    found, warnings = parse(SettingsFile, SETTINGS, "config.yaml")
    assert (warnings, found.defaults.resource_group, found.shares["two"].account_key) == ([], "rg.1", None)
    assert HIDDEN not in repr(found)
    noted = {"shares": {"acct": {"accountKey": HIDDEN, "comment": "mine"}}}
    assert parse(SettingsFile, noted, "x")[1] == ["x: shares.acct.comment has no effect and is ignored"]
    for output in OUTPUTS:
        assert parse(SettingsFile, {"defaults": {"output": output}}, "x")[0].defaults.output == output


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"default": {}}, "default is not a known key; did you mean defaults?"),
        ({"defaults": {"output": "xml"}}, "defaults.output is 'xml'"),
        ({"defaults": {"workspace": "a b"}}, "defaults.workspace is 'a b'"),
        ({"shares": {"acct": {}}}, "shares.acct must have either"),
        ({"shares": {"acct": {"accountKey": HIDDEN, "sasToken": "sig=x"}}}, "shares.acct must have either"),
        ({"shares": {"acct": {"fileEndpoint": "files"}}}, "shares.acct.fileEndpoint is 'files', but must be an address"),
        ({"shares": {"acct": {"acountKey": HIDDEN}}}, "shares.acct.acountKey is not a known key; did you mean accountKey?"),
        ({"shares": {"acct": {"secret": HIDDEN}}}, "shares.acct.secret is not a known key; known keys: accountKey, sasToken, "),
    ],
)
def test_refusals_of_settings(data: dict[str, Any], words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(SettingsFile, data, "config.yaml")
    assert str(caught.value).startswith(f"config.yaml: {words}")
    assert HIDDEN not in str(caught.value)


@pytest.mark.parametrize("text", ["", " \n", "# defaults:\n#   output: table\n"])
def test_a_settings_file_that_says_nothing_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text(text)
    assert config.settings() is None
