"""What can go wrong with a node that is reached over SSH, for callers that must tell the cases apart."""

from __future__ import annotations

from mlflow_batchai.errors import ClusterError


class ConnectionLostError(ClusterError):
    """An open connection or a remote command has ended before it answered; what was sent may or may not have been done."""


class HostKeyError(ClusterError):
    """The node's host key is unknown, has changed, or is revoked."""


class LoginError(ClusterError):
    """The node was reached and is the right one, but doesn't let us in."""
