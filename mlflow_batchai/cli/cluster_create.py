"""``batchai cluster create``: a cluster from a document, from options, or from both."""

from __future__ import annotations

import getpass
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlflow_batchai.cli.cluster import COLUMNS
from mlflow_batchai.cli.mount_options import MountOptions, mount_options
from mlflow_batchai.cli.options import Scope, command, named, new_name, notice
from mlflow_batchai.engines import registry
from mlflow_batchai.errors import NotSupportedError, UsageError

Document = dict[str, Any]

# az batchai's short names for images.
IMAGES = {
    "ubuntults": "Canonical:UbuntuServer:16.04-LTS:latest",
    "ubuntudsvm": "microsoft-ads:linux-data-science-vm-ubuntu:linuxdsvmubuntu:latest",
}
# What has a meaning on Azure's machines only, by its option.
UNUSED = {
    "vm_size": "--vm-size",
    "image": "--image",
    "custom_image": "--custom-image",
    "generate_ssh_keys": "--generate-ssh-keys",
    "user_name": "--user-name",
    "ssh_key": "--ssh-key",
    "password": "--password",
    "subnet": "--subnet",
}
AUTO_ACCOUNT = "autostorage"
AUTO_NAME = "batchaishare"
AUTO_SHARE = {
    "accountName": AUTO_ACCOUNT,
    "azureFileUrl": f"https://{AUTO_ACCOUNT}.file.core.windows.net/{AUTO_NAME}",
    "relativeMountPath": "autoafs",
}


@command(COLUMNS, example="batchai cluster create -n nc6cluster -t 4")
@named("cluster")
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
    location: str | None,
    **options: Any,
) -> Any:
    """Make a cluster: of nodes on this machine, or of machines that are reached over SSH.

    Options win over the document. Without either it has two nodes on this machine.
    """
    from mlflow_batchai.cluster import creation, states, workspaces
    from mlflow_batchai.documents.cluster import ClusterRecord
    from mlflow_batchai.documents.reading import read
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
        location=location or workspace["location"],
        creation_time=workspaces.timestamp(),
    )
    made = creation.create(name, data, str(file) if file else "batchai cluster create", record, notice)
    if use_auto_storage:
        accounts.open_account(AUTO_ACCOUNT).create(AUTO_NAME)
    # As Batch AI answered: the cluster is accepted, and nobody has asked its nodes yet.
    return states.show(made, None)


def _overlay(data: Document, options: Mapping[str, Any]) -> str:
    """Put what options say into a document; the engine that it has then."""
    if options["hosts"]:
        _set(data, "hosts", list(options["hosts"]), ours=True)
        _set(data, "engine", "ssh", ours=True)
    for key in ("python", "share"):
        if options[key]:
            # As the person sees it from here; on nodes elsewhere an interpreter may be a name on their PATH.
            text = (
                options[key]
                if "://" in options[key] or (key == "python" and "/" not in options[key])
                else _absolute(options[key])
            )
            _set(data, key, text, ours=True)
    scale = _scale(_get(data, "scaleSettings"), options["target"], options["minimum"], options["maximum"])
    account = _account(_get(data, "userAccountSettings"), options["user_name"], options["ssh_key"])
    setup = _setup_task(_get(data, "nodeSetup"), options["setup_task"], options["setup_task_output"])
    for key, value in (
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


def _absolute(path: str) -> str:
    return path if path.startswith("~") else str(Path(path).absolute())


def _get(data: Document, key: str) -> Any:
    """What a document says, under ``properties`` or beside it."""
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
    from mlflow_batchai.plan.placeholders import ACCOUNT

    setup = _get(data, "nodeSetup")
    before = setup if isinstance(setup, Mapping) else {}
    written = before.get("mountVolumes")
    found = mounts.added_to(written if isinstance(written, Mapping) else None)
    if mounts.storage_account_name:
        found = _filled(found, ACCOUNT, mounts.storage_account_name)
        for entry in found.get("azureBlobFileSystems", ()):
            entry.setdefault("accountName", mounts.storage_account_name)
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


def _filled(value: Any, placeholder: str, text: str) -> Any:
    """Plain data with a placeholder filled in."""
    if isinstance(value, Mapping):
        return {key: _filled(entry, placeholder, text) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_filled(entry, placeholder, text) for entry in value]
    return value.replace(placeholder, text) if isinstance(value, str) else value


def _tell_unused(options: Mapping[str, Any], engine: str) -> None:
    has_login = engine in registry.ENGINES and "user_account_settings" in registry.ENGINES[engine].uses
    given = [shown for key, shown in UNUSED.items() if options[key] and not (key == "user_name" and has_login)]
    if given:
        kept = "; a password is not kept: set BATCHAI_SSH_PASSWORD" if options["password"] else ""
        notice(f"{', '.join(given)} play no part with engine: {engine}{kept}")
