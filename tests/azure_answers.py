"""Requests, answers and refusals between the connection and the services of the storage endpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from functools import lru_cache
from xml.sax.saxutils import escape

# The error codes by status, of Microsoft's tables "Common REST API error codes", "Azure Files error codes" and "Blob Storage error
# codes", as far as this endpoint answers with them.
_CODES = {
    400: (
        "InvalidBlockList InvalidHeaderValue InvalidMd5 InvalidQueryParameterValue InvalidResourceName InvalidUri "
        "InvalidXmlDocument Md5Mismatch MissingRequiredHeader OutOfRangeInput OutOfRangeQueryParameterValue "
        "UnsupportedHeader"
    ),
    401: "InvalidAuthenticationInfo NoAuthenticationInformation",
    403: (
        "AuthenticationFailed AuthorizationFailure AuthorizationPermissionMismatch "
        "AuthorizationResourceTypeMismatch AuthorizationServiceMismatch "
        "ShareSizeLimitReached"
    ),
    404: "BlobNotFound ContainerNotFound ParentNotFound ResourceNotFound ShareNotFound",
    405: "UnsupportedHttpVerb",
    409: (
        "BlobAlreadyExists ContainerAlreadyExists DirectoryNotEmpty ResourceAlreadyExists ResourceTypeMismatch "
        "ShareAlreadyExists"
    ),
    411: "MissingContentLengthHeader",
    412: "ConditionNotMet",
    413: "RequestBodyTooLarge",
    416: "InvalidRange",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServerBusy",
}
CODES = {code: status for status, codes in _CODES.items() for code in codes.split()}


@dataclass(slots=True)
class Call:
    """One request as the services see it.

    Attributes:
        raw_path: the path as it was sent, still percent-encoded: what a signature covers.
        query: decoded parameters; names in lower case.
        headers: names in lower case, values stripped.
        service: ``file`` or ``blob``.
        account, share, path: the decoded path; ``share`` is a container in the blob service; ``path`` holds the segments below.
    """

    method: str
    raw_path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes | bytearray
    service: str
    account: str
    share: str
    path: tuple[str, ...]
    secure: bool
    peer: str

    @property
    def comp(self) -> str:
        return self.query.get("comp", "")

    @property
    def restype(self) -> str:
        return self.query.get("restype", "")

    @property
    def logical(self) -> str:
        """``/share/path``, without the account."""
        return "/" + "/".join((self.share, *self.path) if self.share else ())


@dataclass(slots=True)
class Part:
    """A part of an open file, sent without a copy; closed by who sends it."""

    descriptor: int
    offset: int
    length: int


@dataclass(slots=True)
class Answer:
    """An answer; ``Date``, ``Content-Length`` and the service's own headers are added when it is sent.

    For HEAD ``length`` is the Content-Length of what isn't sent.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Part = b""
    length: int | None = None


class Refusal(Exception):
    """An error as the service answers it: a code of Microsoft's tables, and details that become elements beside it."""

    def __init__(self, code: str, **details: str) -> None:
        super().__init__(code)
        self.code = code
        self.status = CODES[code]
        self.details = details

    def answer(self) -> Answer:
        details = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in self.details.items())
        said = "Server failed to authenticate the request." if self.code == "AuthenticationFailed" else self.code
        text = f"{said}\nTime:{stamp(time.time())}"
        body = f"<Error><Code>{self.code}</Code><Message>{escape(text)}</Message>{details}</Error>"
        headers = {"x-ms-error-code": self.code, "Content-Type": "application/xml"}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer authorization_uri=https://login.microsoftonline.com/common/oauth2/authorize"
        return Answer(self.status, headers, xml(body))


def xml(text: str) -> bytes:
    """A document of Azure's: a byte order mark, a declaration, the text."""
    return ('\ufeff<?xml version="1.0" encoding="utf-8"?>' + text).encode()


def stamp(seconds: float) -> str:
    """A time as Azure Files writes it in ``x-ms-file-*`` headers: UTC with seven digits after the point."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1e7):07d}Z"


def http_date(seconds: float) -> str:
    return whole_date(int(seconds))


@lru_cache(1024)
def whole_date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


@lru_cache(1024)
def parse_time(text: str) -> float:
    """Seconds since 1970 of an ISO time as SAS fields and ``x-ms-file-*`` headers have it; ValueError where it is none."""
    body = text.removesuffix("Z").partition("+")[0]
    whole, _, fraction = body.partition(".")
    for form in ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d"):
        try:
            moment = datetime.strptime(whole, form).replace(tzinfo=timezone.utc)
        except ValueError:
            continue
        return (moment + timedelta(seconds=float(f"0.{fraction or 0}"))).timestamp()
    raise ValueError(text)


def parse_range(text: str) -> tuple[int, int | None]:
    """``bytes=a-b`` or ``bytes=a-`` as (first, last or None); Refusal otherwise."""
    unit, _, span = text.partition("=")
    first, dash, last = span.partition("-")
    if unit.strip() != "bytes" or not dash or not first.isdigit() or (last and not last.isdigit()):
        raise Refusal("InvalidHeaderValue", HeaderName="x-ms-range", HeaderValue=text)
    return int(first), int(last) if last else None
