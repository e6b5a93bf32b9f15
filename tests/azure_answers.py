"""Requests, answers and refusals between the connection and the services of the storage endpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from functools import lru_cache
from xml.sax.saxutils import escape

# (status, message) of the error codes that Microsoft's tables "Common REST API error codes", "Azure Files error codes" and "Blob
# Storage error codes" give, as far as this endpoint answers with them.
CODES: Mapping[str, tuple[int, str]] = {
    "AuthenticationFailed": (
        403,
        "Server failed to authenticate the request. Make sure the value of Authorization header is formed correctly including "
        "the signature.",
    ),
    "AuthorizationFailure": (403, "This request is not authorized to perform this operation."),
    "AuthorizationPermissionMismatch": (403, "This request is not authorized to perform this operation using this permission."),
    "AuthorizationProtocolMismatch": (403, "This request is not authorized to perform this operation using this protocol."),
    "AuthorizationResourceTypeMismatch": (
        403,
        "This request is not authorized to perform this operation using this resource type.",
    ),
    "AuthorizationServiceMismatch": (403, "This request is not authorized to perform this operation using this service."),
    "AuthorizationSourceIPMismatch": (403, "This request is not authorized to perform this operation using this source IP."),
    "BlobAlreadyExists": (409, "The specified blob already exists."),
    "BlobNotFound": (404, "The specified blob does not exist."),
    "ConditionNotMet": (412, "The condition specified using HTTP conditional header(s) is not met."),
    "ContainerAlreadyExists": (409, "The specified container already exists."),
    "ContainerNotFound": (404, "The specified container does not exist."),
    "DirectoryNotEmpty": (409, "The specified directory is not empty."),
    "InternalError": (500, "Server encountered an internal error. Please try again after some time."),
    "InvalidAuthenticationInfo": (
        401,
        "Server failed to authenticate the request. Please refer to the information in the WWW-Authenticate header.",
    ),
    "InvalidBlockList": (400, "The specified block list is invalid."),
    "InvalidHeaderValue": (400, "The value for one of the HTTP headers is not in the correct format."),
    "InvalidMd5": (400, "The MD5 value specified in the request is invalid. MD5 value must be 128 bits and base64-encoded."),
    "InvalidQueryParameterValue": (400, "Value for one of the query parameters specified in the request URI is invalid."),
    "InvalidRange": (416, "The range specified is invalid for the current size of the resource."),
    "InvalidResourceName": (400, "The specified resource name contains invalid characters."),
    "InvalidUri": (400, "The requested URI does not represent any resource on the server."),
    "InvalidXmlDocument": (400, "XML specified is not syntactically valid."),
    "Md5Mismatch": (400, "The MD5 value specified in the request did not match with the MD5 value calculated by the server."),
    "MissingContentLengthHeader": (411, "The Content-Length header was not specified."),
    "MissingRequiredHeader": (400, "An HTTP header that's mandatory for this request is not specified."),
    "NoAuthenticationInformation": (
        401,
        "Server failed to authenticate the request. Please refer to the information in the www-authenticate header.",
    ),
    "OutOfRangeInput": (400, "One of the request inputs is out of range."),
    "OutOfRangeQueryParameterValue": (
        400,
        "One of the query parameters specified in the request URI is outside the permissible range.",
    ),
    "ParentNotFound": (404, "The specified parent path does not exist."),
    "RequestBodyTooLarge": (413, "The request body is too large and exceeds the maximum permissible limit."),
    "ResourceAlreadyExists": (409, "The specified resource already exists."),
    "ResourceNotFound": (404, "The specified resource does not exist."),
    "ResourceTypeMismatch": (409, "The specified resource type does not match the type of the existing resource."),
    "ServerBusy": (503, "The server is busy."),
    "ShareAlreadyExists": (409, "The specified share already exists."),
    "ShareNotFound": (404, "The specified share does not exist."),
    "ShareSizeLimitReached": (403, "The share has reached its size limit. Delete files or increase the share's quota."),
    "TooManyRequests": (429, "The request is being throttled."),
    "UnsupportedHeader": (400, "One of the HTTP headers specified in the request is not supported."),
    "UnsupportedHttpVerb": (405, "The resource doesn't support the specified HTTP verb."),
}


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
        self.status, self.message = CODES[code]
        self.details = details

    def answer(self) -> Answer:
        details = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in self.details.items())
        text = f"{self.message}\nTime:{stamp(time.time())}"
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
