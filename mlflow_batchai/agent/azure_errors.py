"""Table of Azure Storage's refusals, their meaning and remedy, for mounts and for requests to a file share.

Codes: https://learn.microsoft.com/rest/api/storageservices/file-service-error-codes and .../common-rest-api-error-codes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import parse_qs

NO_SHARE = ("ShareNotFound", "ContainerNotFound", "ShareBeingDeleted", "ContainerBeingDeleted", "ShareDisabled")
# The share has reached its quota, by any of the ways in which that is said.
FULL = (
    "ShareSizeLimitReached",
    "FileShareSizeLimitReached",
    "ShareUsageBytesReached",
    "InsufficientStorage",
    "AccountLimitReached",
    "ShareFull",
    "QuotaExceeded",
)
# The credential is good, and does not permit this.
NOT_PERMITTED = ("AuthorizationPermissionMismatch", "InsufficientAccountPermissions", "AuthorizationResourceTypeMismatch")
# The credential itself is refused.
NOT_AUTHENTICATED = ("AuthenticationFailed", "NoAuthenticationInformation", "InvalidAuthenticationInfo")


class _Row(NamedTuple):
    """One reason: how it is recognised, whether asking again is of no use, and its sentence."""

    reason: str
    pattern: re.Pattern[str]
    is_final: bool
    sentence: str


def _row(reason: str, said: str | Sequence[str], is_final: bool, sentence: str) -> _Row:
    return _Row(reason, re.compile(said if isinstance(said, str) else "|".join(said), re.I), is_final, sentence)


_ROWS = (
    _row(
        "bad key",
        "illegal base64|decode account key",
        True,
        "the account key is not one (it is base64 text); give the one that the portal shows",
    ),
    _row(
        "address",
        "AuthorizationSourceIPMismatch",
        True,
        "the SAS or the account's firewall does not allow this node's address",
    ),
    _row(
        "protocol",
        "AuthorizationProtocolMismatch",
        True,
        "the SAS is for https only (spr=https), and the address is an http one; correct the address, or make another SAS",
    ),
    _row(
        "permission or address",
        "AuthorizationFailure",
        True,
        "the {credential} lacks a permission{has}, or the account's firewall does not allow this node's address",
    ),
    _row(
        "time",
        "specified time frame|expired|not valid in the",
        True,
        "the SAS {time}; make a new one, or set the node's clock",
    ),
    _row(
        "permission",
        (*NOT_PERMITTED, "AuthorizationServiceMismatch"),
        True,
        "the {credential} does not allow it: it has to permit reading, listing, and for results creating, writing and deleting"
        "{has}",
    ),
    _row(
        "credential",
        (*NOT_AUTHENTICATED, "failed to authenticate"),
        True,
        "{host} refused the {credential}: it is another account's, has been renewed, or the node's clock is wrong",
    ),
    _row("no share", NO_SHARE, True, "there is no such {what} in the account; create it, or correct the address"),
    _row(
        "no folder",
        "ResourceNotFound|directory not found",
        False,
        "there is no folder '{folder}' in the {what}; create it, or correct the address",
    ),
    _row("full", FULL, True, "the {what} is full; free some space, or raise its quota"),
    _row(
        "name",
        "no such host|Name or service not known|server misbehaving|name resolution",
        False,
        "the name {name} is not known there; correct the account's name, or mend the node's name service",
    ),
    _row(
        "certificate",
        "x509|certificate",
        False,
        "the certificate of {host} is not trusted there; set SSL_CERT_FILE on the node to the CA that it needs",
    ),
    _row(
        "network",
        "connection refused|no route to host|network is unreachable|i/o timeout|timed out|dial tcp|deadline exceeded",
        False,
        "{host} can't be reached from there; open its port, or set https_proxy on the node",
    ),
)


def is_refused(said: str) -> bool:
    """Whether the service has refused for good: asking again would bring the same answer."""
    return any(row.is_final and row.pattern.search(said) for row in _ROWS)


def is_missing(said: str) -> bool:
    """Whether what was asked for isn't there. Of a file this may only mean that a lost answer was asked for twice."""
    return any(row.reason in ("no share", "no folder") and row.pattern.search(said) for row in _ROWS)


def explain(said: str, what: str, host: str, sas: str, folder: str = "", date: str = "") -> str:
    """Cause and remedy of an error text, without the SAS; empty if unknown.

    Args:
        said: text with Azure's error codes, or with the words of a program that asked.
        what: ``share`` or ``container``.
        sas: the SAS that was used; empty: an account key.
    """
    permits, ends = (parse_qs(sas).get(name, [""])[0] for name in ("sp", "se"))
    for row in _ROWS:
        if not row.pattern.search(said) or (row.reason == "time" and not sas):
            continue
        if row.reason == "no folder" and not folder:
            return explain(NO_SHARE[0], what, host, sas)
        return row.sentence.format(
            what=what,
            host=host,
            name=host.rpartition(":")[0],
            folder=folder,
            credential="SAS" if sas else "account key",
            has=f" (it has sp={permits}; rcwdl is needed)" if permits else "",
            time=time_trouble(sas, date) or "is not valid now" + (f" (it ends at {ends})" if ends else ""),
        )
    return ""


def time_trouble(sas: str, date: str) -> str:
    """That a SAS has expired or is still to come, as the end of a sentence; empty: it is in time, as far as can be told.

    Args:
        date: of the service's answer: its clock is the one that counts. Without it ours is asked.
    """
    try:
        now = parsedate_to_datetime(date).astimezone(timezone.utc)
    except (TypeError, ValueError, IndexError):
        now = datetime.now(timezone.utc)
    start, end = (parse_qs(sas).get(name, [""])[0] for name in ("st", "se"))
    starts, ends = moment(start), moment(end)
    if ends and ends <= now:
        return f"has expired (it ended at {end})"
    return f"is not valid before {start}" if starts and starts > now else ""


def moment(text: str) -> datetime | None:
    """A time as Azure writes it, in UTC if it names no zone; None: it is none."""
    # Azure's have up to seven digits behind the point; Python before 3.11 reads three or six.
    text = re.sub(r"\.(\d+)", lambda match: f".{match.group(1)[:6]:0<6}", text)
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)
