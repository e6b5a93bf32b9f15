"""The control share as agents see it: a directory of this node, or an Azure file share by REST."""

from __future__ import annotations

from mlflow_batchai.agent.share.base import ControlShare
from mlflow_batchai.agent.share.mounted import MountedShare

# For how long a request is tried again while the share can't be reached or is busy.
PATIENCE_SECONDS = 45.0


def is_web_address(share: str) -> bool:
    """Whether a control share is named by its address on the network; else it is a directory of the node."""
    return share.lower().startswith(("https://", "http://"))


def open_control(share: str, sas: str | None = None, patience: float = PATIENCE_SECONDS) -> ControlShare:
    """The control share.

    Args:
        share: a directory of this node, ``https://ACCOUNT.file.core.windows.net/SHARE[/FOLDER]``, or, for a test endpoint,
            ``http://ADDRESS:PORT/ACCOUNT/SHARE[/FOLDER]``.
        sas: a shared access signature for an address, without ``?``.
        patience: seconds for which a request over the network is tried again.

    Raises:
        ControlError: that is no address of a file share, or no SAS, or https_proxy names no proxy.
    """
    if not is_web_address(share):
        return MountedShare(share)
    # Only here: most agents need no HTTP, TLS and XML.
    from mlflow_batchai.agent.share.rest import RestShare

    return RestShare(share, sas, patience)
