"""``batchai cluster``: clusters from documents and options; show, list, delete and resize them."""

from __future__ import annotations

import functools
import getpass
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_batchai.cli.file import cluster_file
from mlflow_batchai.cli.lookup import asking, check_workspace, find_cluster
from mlflow_batchai.cli.node import cluster_node
from mlflow_batchai.cli.options import (
    MountOptions,
    Noun,
    Scope,
    ask,
    confirmed,
    mount_options,
    named,
    new_name,
    notice,
    tracking,
)
from mlflow_batchai.cli.output import Column
from mlflow_batchai.cluster import workspaces
from mlflow_batchai.engines import registry
from mlflow_batchai.errors import BatchAIError, ClusterError, ClusterNotFoundError, NotSupportedError, UsageError

if TYPE_CHECKING:
    from mlflow_batchai.cluster.clusters import Cluster
    from mlflow_batchai.documents.cluster import ClusterRecord, ScaleSettings

Document = dict[str, Any]

# az batchai's short names for images.
IMAGES = {
    "ubuntults": "Canonical:UbuntuServer:16.04-LTS:latest",
    "ubuntudsvm": "microsoft-ads:linux-data-science-vm-ubuntu:linuxdsvmubuntu:latest",
}
# Options that have a meaning on Azure's machines only.
UNUSED = ("vm_size", "image", "custom_image", "generate_ssh_keys", "user_name", "ssh_key", "password", "subnet")
AUTO_ACCOUNT = "autostorage"
AUTO_NAME = "batchaishare"
AUTO_SHARE = {
    "accountName": AUTO_ACCOUNT,
    "azureFileUrl": f"https://{AUTO_ACCOUNT}.file.core.windows.net/{AUTO_NAME}",
    "relativeMountPath": "autoafs",
}


def _state(row: Mapping[str, Any]) -> object:
    return row["allocationState"] if row["provisioningState"] == "succeeded" else row["provisioningState"]


COLUMNS: list[Column] = [
    ("Name", "name"),
    ("Resource Group", "resourceGroup"),
    ("Workspace", "workspace"),
    ("VM Size", "vmSize"),
    ("State", _state),
    ("Idle", "nodeStateCounts.idleNodeCount"),
    ("Running", "nodeStateCounts.runningNodeCount"),
    ("Preparing", "nodeStateCounts.preparingNodeCount"),
    ("Leaving", "nodeStateCounts.leavingNodeCount"),
    ("Unusable", "nodeStateCounts.unusableNodeCount"),
]
OPTIONS = ("requeue", "terminate", "waitforjobcompletion")

cluster = Noun("cluster")
_named = named("cluster")


@cluster.verb("create", COLUMNS, example="batchai cluster create -n nc6cluster -t 4")
@_named
@click.option("-f", "--config-file", "file", type=click.Path(path_type=Path), help="Cluster document, JSON or YAML.")
@click.option("-t", "--target", type=click.IntRange(0), metavar="N", help="Nodes that take jobs.  [the document's]")
@click.option("--min", "minimum", type=click.IntRange(0), metavar="N", help="Auto-scale: nodes at least.")
@click.option("--max", "maximum", type=click.IntRange(0), metavar="N", help="Auto-scale: nodes at most.")
@click.option("--host", "hosts", multiple=True, metavar="ADDRESS", help="A node that is reached over SSH; may be repeated.")
@click.option("--python", metavar="PATH", help="The nodes' training interpreter.")
@click.option("--share", metavar="PATH", help="Control share: a folder, or an Azure file share's address.")
@mount_options
@click.option("--use-auto-storage", is_flag=True, help="On this machine: mount a directory as the file share `autoafs`.")
@click.option("--setup-task", metavar="COMMAND", help="Shell line that each node runs before its first job.")
@click.option("--setup-task-output", metavar="PATH", help="Where its logs go.  [$AZ_BATCHAI_MOUNT_ROOT/share]")
@click.option("-u", "--user-name", metavar="NAME", help="The login, over SSH.")
@click.option("-l", "--location", metavar="NAME", help="Shown with the cluster.  [the workspace's]")
@click.option("-s", "--vm-size", metavar="SIZE", help="Kept and shown; has no effect.")
@click.option(
    "--vm-priority",
    type=click.Choice(["dedicated", "lowpriority"], case_sensitive=False),
    help="lowpriority: jobs that lose a node start again.  [dedicated]",
)
@click.option("-i", "--image", metavar="IMAGE", help="UbuntuLTS, UbuntuDSVM or publisher:offer:sku:version; as --vm-size.")
@click.option("--custom-image", metavar="ID", help="Needs --image; as --vm-size.")
@click.option("--subnet", metavar="ID", help="As --vm-size.")
@click.option("-k", "--ssh-key", metavar="KEY", help="A public key, or its file; as --vm-size.")
@click.option("--generate-ssh-keys", is_flag=True, help="Has no effect: nodes are this machine, or have their keys.")
@click.option("-p", "--password", metavar="TEXT", help="Has no effect and is not kept; set BATCHAI_SSH_PASSWORD instead.")
@click.option("--no-wait", is_flag=True, expose_value=False, help="Accepted; there is nothing to wait for.")
def create(
    scope: Scope,
    name: str,
    file: Path | None,
    mounts: MountOptions,
    use_auto_storage: bool,
    **options: Any,
) -> Any:
    """Make a cluster: of nodes on this machine, or of machines that are reached over SSH.

    Options win over the document. Without either it has two nodes on this machine.
    """
    from mlflow_batchai.cluster import scaling, states
    from mlflow_batchai.documents.cluster import ClusterRecord
    from mlflow_batchai.documents.reading import read
    from mlflow_batchai.engines.census import Census
    from mlflow_batchai.plan.volumes import cluster_volumes
    from mlflow_batchai.storage import accounts

    new_name(name, "cluster")
    workspace = workspaces.find(scope.workspace)
    data = read(file) if file else {}
    engine = _overlay(data, options)
    _mount(data, mounts, use_auto_storage, engine)
    _tell_unused(options, engine)
    record = ClusterRecord(
        workspace=scope.workspace,
        resource_group=scope.resource_group,
        location=workspace["location"],
        creation_time=workspaces.timestamp(),
    )
    source = str(file) if file else "batchai cluster create"
    made = scaling.create(name, data, source, record, notice, cluster_volumes)
    if use_auto_storage:
        accounts.open_account(AUTO_ACCOUNT).create(AUTO_NAME)
    try:
        return _shown(made)
    except ClusterError as error:  # it is there, whether or not its nodes can be asked now
        notice(f"cluster '{name}' is made, and its nodes can't be asked yet: {error}")
        return states.show(made, Census((), ()))


@cluster.verb("show", COLUMNS, example="batchai cluster show -n nc6cluster -o table")
@_named
def show(scope: Scope, name: str) -> Any:
    """A cluster: what its document says, and what each of its nodes does just now."""
    return _shown(find_cluster(scope, name))


def _shown(cluster: Cluster) -> dict[str, Any]:
    from mlflow_batchai.cluster import states
    from mlflow_batchai.plan.volumes import cluster_volumes

    why = ""
    try:
        cluster_volumes(cluster)
    except BatchAIError as error:
        why = str(error)
    with asking(cluster):
        return states.show(cluster, cluster.scalable.census(), why)


@cluster.verb("list", COLUMNS, example="batchai cluster list -o table")
def list_clusters(scope: Scope) -> Any:
    """All clusters, or those of a workspace; hand-written documents belong to the default one.

    A cluster that can't be used as its document stands is listed as failed, and `errors` says why.
    """
    from mlflow_batchai.cluster import clusters
    from mlflow_batchai.engines.parallel import at_once

    names = clusters.names()
    if scope.workspace_given:
        workspaces.find(scope.workspace)
        names = [name for name in names if _record(name).workspace == scope.workspace]
    return at_once([functools.partial(_listed, name) for name in names])


def _listed(name: str) -> dict[str, Any]:
    from mlflow_batchai.cluster import clusters, states

    try:
        return _shown(clusters.load(name)[0])
    except BatchAIError as error:
        return states.show_broken(name, _record(name), str(error))


def _record(name: str) -> ClusterRecord:
    """A cluster's record; that of a hand-written document if it can't be read."""
    from mlflow_batchai.cluster import records
    from mlflow_batchai.documents.cluster import ClusterRecord

    try:
        return records.find(name) or ClusterRecord()
    except BatchAIError:
        return ClusterRecord()


@cluster.verb("delete", example="batchai cluster delete -n nc6cluster -y")
@_named
@confirmed
@click.option(
    "--no-wait", is_flag=True, expose_value=False, help="Accepted; deleting waits until the cluster's jobs have ended."
)
def delete(scope: Scope, name: str, yes: bool) -> None:
    """Delete a cluster. Its jobs are terminated; its share stays."""
    from mlflow_batchai.client import resizing

    check_workspace(scope, name)
    jobs = ", ".join(_jobs(name))
    ends = f" Its jobs are terminated: {jobs}." if jobs else ""
    ask(f"Delete cluster {name}?{ends}", yes)
    resizing.delete(name, tracking, notice)


def _jobs(name: str) -> list[str]:
    """Jobs of a cluster, as far as known."""
    from mlflow_batchai.cluster import clusters, scaling

    try:
        cluster, _ = clusters.load(name)
    except ClusterNotFoundError:
        raise
    except BatchAIError:
        return []  # it can't be used as it is, and is deleted for that
    with asking(cluster):
        queue = cluster.scalable.census().reservations
        return [scaling.name_of(cluster.share, each) for each in queue if scaling.sent_to(cluster, each)]


@cluster.verb("resize", COLUMNS, example="batchai cluster resize -n nc6cluster --target 0")
@_named
@click.option("-t", "--target", required=True, type=click.IntRange(0), metavar="N", help="Nodes that take jobs.")
@click.option(
    "--node-deallocation-option",
    "option",
    type=click.Choice(OPTIONS, case_sensitive=False),
    help="What becomes of jobs on nodes that leave.  [as the cluster's document says, else requeue]",
)
@click.option("--no-wait", is_flag=True, expose_value=False, help="Accepted; nodes that are told to leave do so by themselves.")
def resize(scope: Scope, name: str, target: int, option: str | None) -> Any:
    """Have another number of a cluster's nodes take jobs; one that scaled by itself does so no more.

    Jobs on nodes that leave are put back in the queue (requeue), ended (terminate), or waited for (waitforjobcompletion: the
    nodes are `leaving` until then). A local cluster can be made larger than its document says. The machines of a cluster over
    SSH keep running; those that leave only take no jobs.
    """
    from mlflow_batchai.cluster import scaling

    cluster = find_cluster(scope, name)
    settings = scaling.manual(cluster, target, option)
    assert settings.manual
    return _resized(cluster, settings, settings.manual.node_deallocation_option)


@cluster.verb("auto-scale", COLUMNS, example="batchai cluster auto-scale -n nc6cluster --min 0 --max 4")
@_named
@click.option("--min", "minimum", required=True, type=click.IntRange(0), metavar="N", help="Nodes that are always there.")
@click.option("--max", "maximum", required=True, type=click.IntRange(0), metavar="N", help="Nodes at most.")
def auto_scale(scope: Scope, name: str, minimum: int, maximum: int) -> Any:
    """Have a cluster's number of nodes follow its queue, between two limits.

    Nodes of a local cluster cost nothing while they are idle: the maximum is what jobs find, and what is shown as idle follows
    the queue. So it is with machines over SSH, which keep running.
    """
    from mlflow_batchai.cluster import scaling

    cluster = find_cluster(scope, name)
    return _resized(cluster, scaling.automatic(cluster, minimum, maximum), "waitforjobcompletion")


def _resized(cluster: Cluster, settings: ScaleSettings, option: str) -> dict[str, Any]:
    from mlflow_batchai.client import resizing

    try:
        return _shown(resizing.resize(cluster, settings, option, tracking, notice))
    finally:
        cluster.engine.close()


cluster.add_command(cluster_node)
cluster.add_command(cluster_file)


def _overlay(data: Document, options: Mapping[str, Any]) -> str:
    """Put what options say into a document; the engine that it has then."""
    if options["hosts"]:
        _set(data, "hosts", list(options["hosts"]), ours=True)
        _set(data, "engine", "ssh", ours=True)
    for key in ("python", "share"):
        if options[key]:
            # As the person sees it from here; on nodes elsewhere an interpreter may be a name on their PATH.
            as_is = options[key].startswith("~") or "://" in options[key] or (key == "python" and "/" not in options[key])
            _set(data, key, options[key] if as_is else str(Path(options[key]).absolute()), ours=True)
    scale = _scale(_get(data, "scaleSettings"), options["target"], options["minimum"], options["maximum"])
    account = _account(_get(data, "userAccountSettings"), options["user_name"], options["ssh_key"])
    setup = _setup_task(_get(data, "nodeSetup"), options["setup_task"], options["setup_task_output"])
    for key, value in (
        ("location", options["location"]),
        ("vmSize", options["vm_size"]),
        ("vmPriority", options["vm_priority"]),
        ("scaleSettings", scale),
        ("virtualMachineConfiguration", _image(options["image"], options["custom_image"])),
        ("userAccountSettings", account),
        ("nodeSetup", setup),
        ("subnet", {"id": options["subnet"]} if options["subnet"] else None),
    ):
        if value is not None:
            _set(data, key, value)
    return str(_get(data, "engine") or registry.DEFAULT).lower()


def _get(data: Document, key: str) -> Any:
    """Value of a document's key, under ``properties`` or beside it."""
    inner = data.get("properties")
    return data[key] if key in data else inner.get(key) if isinstance(inner, Mapping) else None


def _set(data: Document, key: str, value: object, ours: bool = False) -> None:
    """Say something in a document, where it has such things."""
    inner = data.get("properties")
    if isinstance(inner, dict) and (key in inner or not (ours or key in data)):
        inner[key] = value
    else:
        data[key] = value


def _scale(written: Any, target: int | None, minimum: int | None, maximum: int | None) -> Document | None:
    if target is not None and (minimum is not None or maximum is not None):
        raise UsageError("--target is a fixed number of nodes, --min and --max let it follow the queue; give one or the other")
    if (minimum is None) != (maximum is None):
        raise UsageError("--min and --max belong together; give both")
    if minimum is not None:
        return {"autoScale": {"minimumNodeCount": minimum, "maximumNodeCount": maximum}}
    if target is None:
        return None
    before = written.get("manual") if isinstance(written, Mapping) else None
    return {"manual": {**(before if isinstance(before, Mapping) else {}), "targetNodeCount": target}}


def _image(image: str | None, custom: str | None) -> Document | None:
    if image is None:
        if custom:
            raise UsageError("--custom-image needs --image, which says what it was made from")
        return None
    parts = IMAGES.get(image.lower(), image).split(":")
    if len(parts) != 4 or not all(parts):
        raise UsageError(f"--image '{image}' must be UbuntuLTS, UbuntuDSVM or publisher:offer:sku:version")
    reference = dict(zip(("publisher", "offer", "sku", "version"), parts, strict=True))
    return {"imageReference": {**reference, **({"virtualMachineImageId": custom} if custom else {})}}


def _account(written: Any, user: str | None, key: str | None) -> Document | None:
    if user is None and key is None:
        return None
    before = dict(written) if isinstance(written, Mapping) else {}
    found = {**before, "adminUserName": user or before.get("adminUserName") or getpass.getuser()}
    if key:
        found["adminUserSshPublicKey"] = _public_key(key)
    return found


def _public_key(key: str) -> str:
    """A public key that was given, or its file; a private one must not get into a document, which is shown."""
    path = Path(key).expanduser()
    try:
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else key
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--ssh-key {key} can't be read as a public key: {error}") from error
    if "PRIVATE KEY" in text:
        raise UsageError("--ssh-key is a private key, which is not kept; give the public one (its file ends in .pub)")
    return text


def _setup_task(written: Any, command_line: str | None, output: str | None) -> Document | None:
    from mlflow_batchai.job.places import DEFAULT_PREFIX

    if command_line is None and output is None:
        return None
    before = written if isinstance(written, Mapping) else {}
    task = before.get("setupTask")
    task = dict(task) if isinstance(task, Mapping) else {}
    if command_line is not None:
        task["commandLine"] = command_line
    elif not task:
        raise UsageError("--setup-task-output says where the logs of --setup-task go; give that, too")
    if output is not None or "stdOutErrPathPrefix" not in task:
        task["stdOutErrPathPrefix"] = output or DEFAULT_PREFIX
    return {**before, "setupTask": task}


def _mount(data: Document, mounts: MountOptions, auto_storage: bool, engine: str) -> None:
    """Put the volumes of options into a document; keys of accounts never go there."""
    setup = _get(data, "nodeSetup")
    before = setup if isinstance(setup, Mapping) else {}
    written = before.get("mountVolumes")
    found = mounts.added_to(written if isinstance(written, Mapping) else None)
    if mounts.storage_account_name:
        found = _filled(found, mounts.storage_account_name)
    if mounts.storage_account_key:
        notice(
            "--storage-account-key is not kept, since others can read arguments: set AZURE_BATCHAI_STORAGE_KEY, or shares: in"
            " config.yaml"
        )
    if auto_storage:
        if engine not in registry.ENGINES or not registry.ENGINES[engine].on_this_machine:
            raise NotSupportedError(
                f"--use-auto-storage made a storage account in Azure, which is not done with engine: {engine}; name one of your"
                " own: --storage-account-name"
            )
        found["azureFileShares"] = [*found.get("azureFileShares", ()), dict(AUTO_SHARE)]
        notice(
            f"--use-auto-storage: nothing is made in Azure; autoafs is a directory of this machine, for `batchai storage` the"
            f" file share '{AUTO_NAME}' of the account '{AUTO_ACCOUNT}', and there is no autobfs"
        )
    if found:
        _set(data, "nodeSetup", {**before, "mountVolumes": found})


def _filled(value: Any, account: str) -> Any:
    """A part of ``mountVolumes`` with the account's name for its placeholder, and in blob containers that name none."""
    from mlflow_batchai.plan.volumes import ACCOUNT

    if isinstance(value, Mapping):
        named = {"accountName": account} if "containerName" in value and "accountName" not in value else {}
        return {**{key: _filled(one, account) for key, one in value.items()}, **named}
    if isinstance(value, list):
        return [_filled(one, account) for one in value]
    return value.replace(ACCOUNT, account) if isinstance(value, str) else value


def _tell_unused(options: Mapping[str, Any], engine: str) -> None:
    has_login = engine in registry.ENGINES and "user_account_settings" in registry.ENGINES[engine].uses
    given = [key for key in UNUSED if options[key] and not (key == "user_name" and has_login)]
    if given:
        shown = ", ".join(f"--{key.replace('_', '-')}" for key in given)
        kept = "; a password is not kept: set BATCHAI_SSH_PASSWORD" if options["password"] else ""
        notice(f"{shown} play no part with engine: {engine}{kept}")
