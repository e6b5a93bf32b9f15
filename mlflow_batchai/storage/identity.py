"""Which share this is: a mark on it that tells it from any other folder that is mounted at the same path elsewhere."""

from __future__ import annotations

import uuid

from mlflow_batchai.agent.protocol import identity_path
from mlflow_batchai.storage.base import Share


def identify(share: Share) -> str:
    """The share's identity, made at the first call. Two clients at once may make two: each that lies there is true."""
    folder = identity_path("x").rpartition("/")[0]
    known = [entry.name for entry in share.list(folder)]
    if known:
        return known[0]
    made = uuid.uuid4().hex
    share.claim(identity_path(made))
    return made
