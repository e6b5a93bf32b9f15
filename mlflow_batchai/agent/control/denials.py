"""Sentences on a service that doesn't let us in."""

from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Mapping, Optional
from urllib.parse import parse_qs

_UTC_FORMATS = ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%MZ", "%Y-%m-%d", "%Y-%m-%dT%H:%M:%S.%fZ")


def denial(name: str, sas: str, method: str, code: str, headers: Mapping[str, str]) -> str:
    """Why Azure doesn't let us, as far as the SAS itself tells; the SAS isn't in it.

    Args:
        name: the share's address.
        code: of the error, or the status.
        headers: of the answer: the service's clock is the one that counts.
    """
    said = {field: values[0] for field, values in parse_qs(sas).items()}
    now = _server_time(headers.get("date", ""))
    start, end = _moment(said.get("st", "")), _moment(said.get("se", ""))
    if not sas:
        return "the file share %s asks for a SAS, and there is none: submit with credentials for it" % name
    if end and end <= now:
        return "the SAS of the file share %s has expired (at %s): submit again with a new one" % (name, said["se"])
    if start and start > now:
        return "the SAS of the file share %s is not valid before %s" % (name, said["st"])
    if code == "AuthorizationPermissionMismatch":
        needed = "write" if method == "PUT" else "read and list"
        return "the SAS of the file share %s does not allow to %s (it has sp=%s; rcwdl is needed)" % (
            name,
            needed,
            said.get("sp", ""),
        )
    if code in ("AuthenticationFailed", "InvalidAuthenticationInfo", "401", "403"):
        return "the file share %s does not accept the SAS (%s): the account's key may have been changed" % (name, code)
    return "the file share %s does not let this node in (%s): look at the account's network rules" % (name, code)


def _moment(text: str) -> Optional[datetime]:
    for form in _UTC_FORMATS:
        try:
            return datetime.strptime(text, form).replace(tzinfo=timezone.utc)
        except ValueError:
            continue
    return None


def _server_time(date: str) -> datetime:
    """By the service's clock, which is the one that counts."""
    try:
        return parsedate_to_datetime(date).astimezone(timezone.utc)
    except (TypeError, ValueError, IndexError):
        return datetime.now(timezone.utc)
