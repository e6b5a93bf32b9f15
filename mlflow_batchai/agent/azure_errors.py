"""Table of Azure Storage's refusals, their meaning and remedy, for mounts and for requests to a file share.

Codes: https://learn.microsoft.com/rest/api/storageservices/file-service-error-codes and .../common-rest-api-error-codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
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


# Reason -> how it is recognised, and its sentence. The first that fits counts.
_REASONS = {
    "bad key": (
        "illegal base64|decode account key",
        "the account key is not one (it is base64 text); give the one that the portal shows",
    ),
    "address": ("AuthorizationSourceIPMismatch", "the SAS or the account's firewall does not allow this node's address"),
    "protocol": (
        "AuthorizationProtocolMismatch",
        "the SAS is for https only (spr=https), and the address is an http one; correct the address, or make another SAS",
    ),
    "permission or address": (
        "AuthorizationFailure",
        "the {credential} lacks a permission{has}, or the account's firewall does not allow this node's address",
    ),
    "time": ("specified time frame|expired|not valid in the", "the SAS {time}; make a new one, or set the node's clock"),
    "permission": (
        "|".join((*NOT_PERMITTED, "AuthorizationServiceMismatch")),
        "the {credential} does not allow it: it has to permit reading, listing, and for results creating, writing and deleting"
        "{has}",
    ),
    "credential": (
        "|".join((*NOT_AUTHENTICATED, "failed to authenticate")),
        "{host} refused the {credential}: it is another account's, has been renewed, or the node's clock is wrong",
    ),
    "no share": ("|".join(NO_SHARE), "there is no such {what} in the account; create it, or correct the address"),
    "no folder": (
        "ResourceNotFound|directory not found",
        "there is no folder '{folder}' in the {what}; create it, or correct the address",
    ),
    "full": ("|".join(FULL), "the {what} is full; free some space, or raise its quota"),
    "name": (
        "no such host|Name or service not known|server misbehaving|name resolution",
        "the name {name} is not known there; correct the account's name, or mend the node's name service",
    ),
    "certificate": (
        "x509|certificate",
        "the certificate of {host} is not trusted there; set SSL_CERT_FILE on the node to the CA that it needs",
    ),
    "network": (
        "connection refused|no route to host|network is unreachable|i/o timeout|timed out|dial tcp|deadline exceeded",
        "{host} can't be reached from there; open its port, or set https_proxy on the node",
    ),
}
# Those for which it may help to ask again.
_PASSING = ("no folder", "name", "certificate", "network")


def _reasons(said: str) -> Iterator[str]:
    return (reason for reason, (pattern, _) in _REASONS.items() if re.search(pattern, said, re.I))


def is_refused(said: str) -> bool:
    """Whether the service has refused for good: asking again would bring the same answer."""
    return any(reason not in _PASSING for reason in _reasons(said))


def is_missing(said: str) -> bool:
    """Whether what was asked for isn't there. Of a file this may only mean that a lost answer was asked for twice."""
    return any(reason in ("no share", "no folder") for reason in _reasons(said))


def explain(said: str, what: str, host: str, sas: str, folder: str = "", date: str = "") -> str:
    """Cause and remedy of an error text, without the SAS; empty if unknown.

    Args:
        said: text with Azure's error codes, or with the words of a program that asked.
        what: ``share`` or ``container``.
        sas: the SAS that was used; empty: an account key.
    """
    permits, ends = (parse_qs(sas).get(name, [""])[0] for name in ("sp", "se"))
    for reason in _reasons(said):
        if reason == "time" and not sas:
            continue
        if reason == "no folder" and not folder:
            return explain(NO_SHARE[0], what, host, sas)
        return _REASONS[reason][1].format(
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
