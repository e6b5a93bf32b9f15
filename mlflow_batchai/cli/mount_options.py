"""Options that mount file systems besides those of a document, as ``az batchai`` had them, for jobs and clusters alike."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

from mlflow_batchai.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


class MountOptions(NamedTuple):
    """What was given of them."""

    storage_account_name: str | None = None
    storage_account_key: str | None = None
    afs_name: str | None = None
    afs_mount_path: str = "afs"
    bfs_name: str | None = None
    bfs_mount_path: str = "bfs"
    nfs: str | None = None
    nfs_mount_path: str = "nfs"

    def __repr__(self) -> str:
        return f"MountOptions({self._replace(storage_account_key=None)[:]!r})"

    def use_account(self) -> None:
        """Have this process, and those that it starts, know the account by Batch AI's variables for it.

        Raises:
            UsageError: a key of no account.
        """
        from mlflow_batchai.plan.placeholders import ACCOUNT_VARIABLE, KEY_VARIABLE

        name, key = self.storage_account_name, self.storage_account_key
        if name and name != os.environ.get(ACCOUNT_VARIABLE):
            os.environ[ACCOUNT_VARIABLE] = name
            # It opens another one.
            os.environ.pop(KEY_VARIABLE, None)
        if key:
            if not os.environ.get(ACCOUNT_VARIABLE):
                raise UsageError(
                    f"--storage-account-key: of which account? give --storage-account-name, or set {ACCOUNT_VARIABLE}"
                )
            os.environ[KEY_VARIABLE] = key

    def added_to(self, mounts: Mapping[str, Any] | None) -> dict[str, Any]:
        """A document's ``mountVolumes``, as plain data, with what the options add."""
        from mlflow_batchai.plan.placeholders import ACCOUNT

        found = dict(mounts or {})
        share = {"azureFileUrl": f"https://{ACCOUNT}.file.core.windows.net/{self.afs_name}"}
        for given, key, entry, path in (
            (self.afs_name, "azureFileShares", share, self.afs_mount_path),
            (self.bfs_name, "azureBlobFileSystems", {"containerName": self.bfs_name}, self.bfs_mount_path),
            (self.nfs, "fileServers", {"fileServer": {"id": self.nfs}}, self.nfs_mount_path),
        ):
            if given:
                found[key] = [*(found.get(key) or ()), {**entry, "relativeMountPath": path}]
        return found


def mount_options(function: F) -> F:
    """The options; the function's argument for all of them is ``mounts``."""

    @functools.wraps(function)
    def run(*arguments: Any, **values: Any) -> Any:
        mounts = MountOptions(**{name: values.pop(name) for name in MountOptions._fields})
        return function(*arguments, **values, mounts=mounts)

    wrapped: Callable[..., Any] = run
    for option in reversed(
        [
            click.option(
                "--storage-account-name",
                metavar="NAME",
                help="The storage account of placeholders and of --afs-name, --bfs-name.",
            ),
            click.option(
                "--storage-account-key", metavar="KEY", help="Its key; AZURE_BATCHAI_STORAGE_KEY keeps it out of `ps`."
            ),
            click.option("--afs-name", metavar="SHARE", help="Azure file share to mount."),
            click.option("--afs-mount-path", metavar="PATH", default="afs", show_default=True, help="Where, relative."),
            click.option("--bfs-name", metavar="CONTAINER", help="Azure blob container to mount."),
            click.option("--bfs-mount-path", metavar="PATH", default="bfs", show_default=True, help="Where, relative."),
            click.option("--nfs", metavar="NAME", help="File server to mount, by name or id."),
            click.option("--nfs-mount-path", metavar="PATH", default="nfs", show_default=True, help="Where, relative."),
        ]
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]
