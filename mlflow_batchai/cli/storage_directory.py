"""``batchai storage directory``: directories of a file share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow_batchai.cli.options import command, named
from mlflow_batchai.cli.storage import in_share, on_account
from mlflow_batchai.errors import ShareError, UsageError

if TYPE_CHECKING:
    from mlflow_batchai.storage.accounts import Account


@command(example="batchai storage directory create -s batchaishare -n hvd --account-name mystorage", scoped=False)
@in_share
@named("directory")
@on_account
def create(account: Account, share: str, name: str) -> Any:
    """Make a directory, and those above it. One that is there already is left as it is: `"created": false`."""
    from mlflow_batchai.storage.accounts import checked_path, find

    if not (path := checked_path(name)):
        raise UsageError("the name of the directory is empty")
    with account.using(share) as opened:
        made = opened.claim(path)
        if not made and not find(opened, path).is_directory:
            raise ShareError(f"there is a file '{path}' on the file share {account.name}/{share}; choose another name")
    return {"created": made}
