"""From a cluster's name to its engine and share; what is wrong with its document is one sentence."""

from __future__ import annotations

import pytest

from mlflow_batchai.cluster import clusters
from mlflow_batchai.engines.absent import AbsentEngine
from mlflow_batchai.engines.base import PollState
from mlflow_batchai.engines.local_hosts import LocalHosts
from mlflow_batchai.engines.ssh_hosts import SshHosts
from mlflow_batchai.errors import ClusterError, DocumentError, NotSupportedError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "home" / "clusters").mkdir(parents=True)
    (tmp_path / "share").mkdir()
    return tmp_path


def write(home, text):
    (home / "home" / "clusters" / "c.yaml").write_text(text.replace("SHARE", str(home / "share")), encoding="utf-8")


def test_without_a_document(home):
    cluster, warnings = clusters.load(None)
    assert isinstance(cluster.engine, LocalHosts)
    assert (cluster.name, cluster.engine.node_limit, warnings) == ("local", 2, [])
    assert cluster.share_on_nodes == str(home / "home" / "share")
    assert cluster.environments == str(home / "home" / "envs")


def test_nodes_over_ssh_are_not_asked_yet(home):
    write(home, "engine: ssh\nhosts: [203.0.113.1, {host: 203.0.113.2, root: /scratch/b}]\nuser: me\nshare: SHARE\n")
    cluster, warnings = clusters.load("c")
    assert isinstance(cluster.engine, SshHosts)
    assert (cluster.engine.node_limit, warnings, cluster.python, cluster.environments) == (2, [], "python3", None)
    assert cluster.share_on_nodes == str(home / "share")
    shown = [" ".join(command.argv) for command in cluster.engine.render(request())]
    assert shown[0].startswith("ssh ssh://me@203.0.113.1:22 ")
    assert "/var/tmp/batchai-me/agents/agent-" in shown[0]
    assert shown[1].endswith("--root=/scratch/b")


def request():
    from mlflow_batchai.engines.base import StartRequest

    return StartRequest("j", "j/1", "jobs/j", 1, 2, {"variables": {"TOKEN": "hush-hush"}})


def test_batch_ais_account_is_the_login(home):
    write(
        home,
        "engine: ssh\nhosts: [203.0.113.1]\nshare: SHARE\nshareOnNodes: /srv/s\npython: /opt/py/bin/python\n"
        "properties: {vmSize: NC6, userAccountSettings: {adminUserName: demo, adminUserPassword: hush-hush}}\n",
    )
    cluster, warnings = clusters.load("c")
    assert [warning.split(": ", 1)[1] for warning in warnings] == ["vmSize plays no part with engine: ssh"]
    argv = cluster.engine.render(request()._replace(node_count=1))[0].argv
    assert argv[1] == "ssh://demo@203.0.113.1:22"
    assert "hush-hush" not in repr((cluster, argv))
    assert (cluster.share_on_nodes, cluster.python) == ("/srv/s", "/opt/py/bin/python")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "nodeSetup: {performanceCountersSettings: {appInsightsReference: {component: {id: x}, instrumentationKey: y}}}",
            NotSupportedError,
            "nodeSetup.performanceCountersSettings is not supported yet; remove it",
        ),
        (
            "nodeSetup: {setupTask: {commandLine: x, stdOutErrPathPrefix: $AZ_BATCHAI_JOB_MOUNT_ROOT/y}}",
            DocumentError,
            "c.yaml: nodeSetup.setupTask.stdOutErrPathPrefix is .* on no mounted volume; the mounts are: .AZ_BATCHAI_MOUNT_ROOT/sh",
        ),
        (
            "nodeSetup: {setupTask: {commandLine: x, stdOutErrPathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share,"
            " secrets: [{name: T, valueSecretReference: {sourceVault: {id: v}, secretUrl: u}}]}}",
            NotSupportedError,
            "setupTask.secrets 'T': valueSecretReference .Azure Key Vault. is not supported yet; give value",
        ),
        ("share: https://acc.blob.core.windows.net/s", ClusterError, "share: file share address https://acc.blob.* form https"),
        (
            "share: https://acc.file.core.windows.net/s\nmount: folder",
            DocumentError,
            "mount is folder, and an Azure share has no",
        ),
        ("python: /nope", ClusterError, "python: /nope is not a program"),
        ("engine: ssh\nhosts: [a]\nshare: share", DocumentError, "share is 'share', but must be an absolute path"),
        ("engine: ssh\nhosts: [a]\nshare: SHARE/none", ClusterError, "share: there is no folder .*/none on this machine"),
        ("engine: ssh\nhosts: ['a:b']\nshare: SHARE", ClusterError, "the port must be a number"),
        ("engine: ssh\nshare: SHARE", DocumentError, "has engine: ssh and no hosts"),
    ],
)
def test_refusals(home, text, error, message):
    write(home, text)
    with pytest.raises(error, match=message) as caught:
        clusters.load("c")
    assert "\n" not in str(caught.value)


def test_a_cluster_that_this_machine_doesnt_know():
    engine = AbsentEngine("there is no cluster 'c'")
    poll = engine.poll({"nodes": [{}, {}]})
    assert (poll.state, poll.detail, poll.unknown) == (PollState.UNKNOWN, "there is no cluster 'c'", (0, 1))
    for call in (
        lambda: engine.check(1),
        lambda: engine.submit(request()),
        lambda: engine.cancel({}),
        lambda: engine.render(None),
    ):
        with pytest.raises(ClusterError, match="there is no cluster 'c'"):
            call()
    engine.close()
