"""Signed records of a job folder: those that direct a client, which obeys what this user has written and nothing else.

A signature stands in the record, under ``mac``. It is good for one path only, so a record that was copied to another job,
attempt or name is as good as a changed one.
"""

from __future__ import annotations

import json
from enum import Enum

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.job import keys


class Signature(Enum):
    """What the signature of a record says."""

    OWN = "own"
    """This user has written it."""
    OTHER = "other"
    """It has none, or one of a key that this user doesn't have on this machine."""
    WRONG = "wrong"
    """It has one of this user's keys that doesn't fit: the record was changed, or belongs elsewhere."""


def sign(path: str, record: Record) -> Record:
    """The record with its signature, as plain JSON.

    Args:
        path: where on the share it is to lie.

    Raises:
        UsageError: the key can't be read or made.
    """
    plain = json.loads(json.dumps(record))
    return {**plain, protocol.MAC: keys.mac(path, protocol.digest(plain))}


def examine(path: str, record: Record) -> tuple[Record, Signature]:
    """(the record without its signature, what that says); raises as ``sign`` does."""
    plain = {key: value for key, value in record.items() if key != protocol.MAC}
    mac = record.get(protocol.MAC)
    if keys.is_mac(mac, path, protocol.digest(plain)):
        return plain, Signature.OWN
    return plain, Signature.WRONG if keys.is_own(mac) else Signature.OTHER
