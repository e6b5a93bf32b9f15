"""Sign records with the user's key and check them; trust single jobs of other users on this machine.

A signature stands in a record that directs a client, under ``mac``, or in a run's tag. It is good for one path only, so a
record that was copied to another job, attempt or name is as good as a changed one.

``$BATCHAI_HOME/key`` is made at first use, mode 0600: one key a line, 64 hexadecimal digits each. The first one signs; all of
them are accepted, so that a machine which takes over a key goes on to follow the jobs of its own one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from enum import Enum
from pathlib import Path

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.config import home
from mlflow_batchai.errors import UsageError

BYTES = 32
_KEY = re.compile(r"[0-9a-f]{64}")
_MOST = 64 << 10
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


# Path and time of the file -> its keys: another process may take over a key while this one runs.
_cached: dict[tuple[Path, int], list[bytes]] = {}


class Signature(Enum):
    """Result of checking a record's signature."""

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
    return {**plain, protocol.MAC: mac(path, protocol.digest(plain))}


def examine(path: str, record: Record) -> tuple[Record, Signature]:
    """(the record without its signature, what that says); raises as ``sign`` does."""
    plain = {key: value for key, value in record.items() if key != protocol.MAC}
    found = record.get(protocol.MAC)
    if is_mac(found, path, protocol.digest(plain)):
        return plain, Signature.OWN
    return plain, Signature.WRONG if is_own(found) else Signature.OTHER


def key_path() -> Path:
    """The file that holds the keys."""
    return home() / "key"


def mac(purpose: str, digest: str) -> str:
    """The signature of something: the key's fingerprint, a colon, an HMAC-SHA256.

    Args:
        purpose: what is signed and what it belongs to; a signature is good for nothing else.
        digest: the SHA-256 of its content.

    Raises:
        UsageError: the key can't be read or made.
    """
    return _mac(_keys()[0], purpose, digest)


def is_mac(found: object, purpose: str, digest: str) -> bool:
    """Whether a signature is one of this user's, for that purpose and content; raises as ``mac`` does."""
    if not isinstance(found, str) or not found.isascii():
        return False
    return any(hmac.compare_digest(found, _mac(key, purpose, digest)) for key in _keys())


def is_own(found: object) -> bool:
    """Whether a signature says that it was made with a key of this user, rightly or not; raises as ``mac`` does."""
    return isinstance(found, str) and found.partition(":")[0] in fingerprints()


def fingerprints() -> list[str]:
    """Public names of the keys, the signing one first. Raises as ``mac`` does."""
    return [_fingerprint(key) for key in _keys()]


def exported_key() -> str:
    """The signing key as text; raises as ``mac`` does."""
    return _keys()[0].hex()


def take_key(text: str) -> str:
    """Sign with another key from now on; those that are there are still accepted.

    Args:
        text: what ``exported_key`` gave on another machine.

    Returns:
        Its fingerprint.

    Raises:
        UsageError: it is no key, or it can't be kept.
    """
    text = text.strip()
    if not _KEY.fullmatch(text):
        raise UsageError("this is no key; give the line of 64 hexadecimal digits that `batchai key export` prints")
    known = [key.hex() for key in _read(key_path())] if key_path().exists() else []
    _write([text, *(key for key in known if key != text)])
    _cached.clear()
    return _fingerprint(bytes.fromhex(text))


def _keys() -> list[bytes]:
    where = key_path()
    try:
        changed = os.lstat(where).st_mtime_ns
    except FileNotFoundError:
        _write([secrets.token_hex(BYTES)], new=True)
        changed = os.lstat(where).st_mtime_ns
    except OSError as error:
        raise UsageError(f"the key {where} can't be read: {error.strerror}") from error
    if (where, changed) not in _cached:
        _cached[where, changed] = _read(where)
    return _cached[where, changed]


def _read(where: Path) -> list[bytes]:
    """The keys of a file that nobody else can read or write.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it can't be read or trusted.
    """
    try:
        with os.fdopen(os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise UsageError(f"{where} is not a file of this user; remove it, and take your key along: batchai key import")
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"{where} can be read or written by others; close it with: chmod 600 {where}")
            lines = file.read(_MOST).decode("ascii", "replace").split()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"the key {where} can't be read: {error.strerror}") from error
    if not lines or not all(map(_KEY.fullmatch, lines)):
        raise UsageError(
            f"{where} holds no key (64 hexadecimal digits a line); restore it, or remove it and attach to the jobs that were"
            " submitted with it by: batchai job attach --trust"
        )
    return [bytes.fromhex(line) for line in lines]


def _write(keys: list[str], new: bool = False) -> None:
    """Replace the file, or with ``new`` make it unless another process has."""
    where = key_path()
    mine = where.with_name(f"{where.name}.{secrets.token_hex(8)}")
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        # O_SYNC: no crash of the machine leaves an empty file under the key's name.
        with os.fdopen(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_SYNC, 0o600), "w", encoding="ascii") as file:
            file.write("".join(f"{key}\n" for key in keys))
        try:
            if new:
                with contextlib.suppress(FileExistsError):
                    os.link(mine, where)
            else:
                mine.replace(where)
        finally:
            mine.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"the key {where} can't be kept: {error.strerror}; set BATCHAI_HOME to a folder of yours") from error


def _mac(key: bytes, purpose: str, digest: str) -> str:
    found = hmac.new(key, f"{purpose}\0{digest}".encode("utf-8", "backslashreplace"), hashlib.sha256).hexdigest()
    return f"{_fingerprint(key)}:{found}"


def _fingerprint(key: bytes) -> str:
    return hashlib.sha256(b"mlflow-batchai key\0" + key).hexdigest()[:16]


# Jobs of other keys that are trusted on this machine.


def pin(run_id: str, plan: str, share: str) -> None:
    """Trust a job of another key from now on (``batchai job attach --trust``), as long as its plan is the one that was shown.

    Args:
        plan: the digest of its plan.
        share: the address at which the plan was found.

    Raises:
        UsageError: that can't be kept.
    """
    try:
        path = _pin_path(run_id)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps({"plan": plan, "share": share}), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{home()} can't be written ({error.strerror}), so nobody would know that the job is trusted"
        ) from error


def is_pinned(run_id: object, plan: str) -> bool:
    """Whether a plan is that of a trusted job, unchanged."""
    return isinstance(run_id, str) and _read_pin(run_id).get("plan") == plan


def share_of(run_id: str) -> str | None:
    """Where the plan of a trusted job was found; None for any other job."""
    return _read_pin(run_id).get("share")


def _pin_path(run_id: str) -> Path:
    return home() / "trusted" / f"{run_id}.json"


def _read_pin(run_id: str) -> dict[str, str]:
    if not _RUN_ID.fullmatch(run_id):
        return {}
    try:
        found = json.loads(_pin_path(run_id).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
