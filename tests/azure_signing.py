"""Authorization at the storage endpoint: SharedKey and shared access signatures, from Microsoft's description.

Nothing of an SDK is used, so that a client and this endpoint can't share an error.

* "Authorize with Shared Key": the string to sign of version 2009-09-19 and later; Content-Length is empty where it is 0 (2015-02-21).
* "Create an account SAS" (with the line for the encryption scope from 2020-12-06) and "Create a service SAS".
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from email.utils import parsedate_to_datetime
from urllib.parse import quote, unquote_plus

from azure_answers import Call, Refusal, http_date, parse_time

SKEW = 15 * 60  # seconds that a request's date may be away from the server's
VERSION = "2026-04-06"  # of the signatures made here
SIGNED = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)
OVERRIDES = ("rscc", "rscd", "rsce", "rscl", "rsct")


def sign(key: str, text: str) -> str:
    """The base64 HMAC-SHA256 of a text by a base64 key."""
    return base64.b64encode(hmac.digest(base64.b64decode(key), text.encode(), hashlib.sha256)).decode()


def same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())


def authorize(call: Call, account: str, key: str, needs: tuple[str, str]) -> None:
    """Return if the request may do what needs ``needs``: (resource type, letters of which one is enough); Refusal otherwise.

    The resource type counts for an account SAS: "s" for the account, "c" for a share or container itself, "o" for what is in it.
    """
    scheme, _, credential = call.headers.get("authorization", "").partition(" ")
    if scheme == "SharedKey":
        shared_key(call, account, key, credential)
    elif scheme:
        raise failed(f"Authentication scheme {scheme} is not supported.")
    elif "sig" in call.query:
        shared_access(call, account, key, needs)
    else:
        raise Refusal("NoAuthenticationInformation")


def failed(detail: str) -> Refusal:
    return Refusal("AuthenticationFailed", AuthenticationErrorDetail=detail)


def shared_key(call: Call, account: str, key: str, credential: str) -> None:
    name, _, signature = credential.partition(":")
    date = call.headers.get("x-ms-date") or call.headers.get("date", "")
    try:
        moment = parsedate_to_datetime(date).timestamp()
    except ValueError:
        raise failed("Neither x-ms-date nor Date holds a valid date.") from None
    if abs(moment - time.time()) > SKEW:
        raise failed("Request date header too old: '" + date + "'.")
    if name != account:
        raise failed(f"The account {name} is unknown.")
    names = [header for header in call.headers if header.startswith("x-ms-")]
    # The service's documentation says "lexicographically"; Microsoft's own clients differ for names with hyphens and underscores.
    # Which one the service wants could not be tried: both are taken.
    plain = string_to_sign(call, account, sorted(names))
    if same(sign(key, plain), signature):
        return
    cultural = string_to_sign(call, account, sorted(names, key=lambda header: header.replace("-", "").replace("_", "!")))
    if cultural == plain or not same(sign(key, cultural), signature):
        raise failed(f"The MAC signature found in the HTTP request '{signature}' is not the same as any computed signature.")


def string_to_sign(call: Call, account: str, names: list[str]) -> str:
    headers = call.headers
    lines = [call.method]
    for name in SIGNED:
        value = headers.get(name, "")
        if (name == "content-length" and value == "0") or (name == "date" and "x-ms-date" in headers):
            value = ""
        lines.append(value)
    lines += [f"{name}:{headers[name]}" for name in names]
    lines.append(f"/{account}{call.raw_path}")
    lines += [f"{name}:{call.query[name]}" for name in sorted(call.query)]
    return "\n".join(lines)


def shared_access(call: Call, account: str, key: str, needs: tuple[str, str]) -> None:
    query = call.query
    kind, letters = needs
    expected = sign(key, account_text(query, account) if "ss" in query else service_text(call, account))
    if not same(expected, query["sig"]):
        raise failed("Signature did not match.")
    try:
        starts = parse_time(query["st"]) if "st" in query else 0.0
        expires = parse_time(query["se"])
    except (ValueError, KeyError):
        raise failed("The signed times are missing or not valid.") from None
    now = time.time()
    if not starts <= now < expires:
        span = f"Start [{http_date(starts)}] - Expiry [{http_date(expires)}] - Current [{http_date(now)}]"
        raise failed(f"Signature not valid in the specified time frame: {span}")
    if "ss" in query:
        if call.service[0] not in query["ss"]:
            raise Refusal("AuthorizationServiceMismatch")
        if kind not in query.get("srt", ""):
            raise Refusal("AuthorizationResourceTypeMismatch")
    elif kind == "s" or (kind == "c" and letters != "l"):
        # By the documentation of the service SAS: what a share (container) itself is can't be read or changed with one.
        raise Refusal("AuthorizationFailure")
    if not set(letters) & set(query.get("sp", "")):
        raise Refusal("AuthorizationPermissionMismatch")


def account_text(query: dict[str, str], account: str) -> str:
    names = ["sp", "ss", "srt", "st", "se", "sip", "spr", "sv"]
    if query.get("sv", "") >= "2020-12-06":
        names.append("ses")
    return "".join(line + "\n" for line in (account, *(query.get(name, "") for name in names)))


def service_text(call: Call, account: str) -> str:
    """The string to sign of a service SAS, for the resource that this request is about."""
    kind = call.query.get("sr", "")
    if kind not in ({"file": "sf", "blob": "cb"}[call.service]):
        raise failed(f"The signed resource {kind!r} is not one of this service.")
    path = call.path if kind in "fb" else ()
    return service_lines(call.query, call.service, account, "/".join((call.share, *path)))


def service_lines(query: dict[str, str], service: str, account: str, resource: str) -> str:
    lines = [query.get(name, "") for name in ("sp", "st", "se")]
    lines.append(f"/{service}/{account}/{resource}")
    lines += [query.get(name, "") for name in ("si", "sip", "spr", "sv")]
    if service == "blob":
        lines += [query.get("sr", ""), query.get("snapshot", "")]
        if query.get("sv", "") >= "2020-12-06":
            lines.append(query.get("ses", ""))
    lines += [query.get(name, "") for name in OVERRIDES]
    return "\n".join(lines)


def make_sas(
    account: str,
    key: str,
    service: str,
    resource: str | None,
    permissions: str,
    seconds: float,
    starts: float,
    **fields: str,
) -> str:
    """A SAS without "?": for a share or container (a file or blob where ``resource`` has a path), or for the account.

    ``seconds`` and ``starts`` count from now. ``fields`` replace or add fields before signing, as ``ss="b"``.
    """
    now = time.time()
    form = "%Y-%m-%dT%H:%M:%SZ"
    query = {
        "sv": VERSION,
        "st": time.strftime(form, time.gmtime(now + starts)),
        "se": time.strftime(form, time.gmtime(now + seconds)),
        "sp": permissions,
    }
    if resource is None:
        query.update({"ss": "bf", "srt": "sco", **fields})
        text = account_text(query, account)
    else:
        deep = "/" in resource
        query.update({"sr": ("f" if deep else "s") if service == "file" else ("b" if deep else "c"), **fields})
        text = service_lines(query, service, account, resource)
    query["sig"] = sign(key, text)
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())


def parse_query(text: str) -> dict[str, str]:
    """Decoded parameters by lower-case name; repeated ones are joined with commas, as a signature covers them."""
    query: dict[str, str] = {}
    for pair in text.split("&") if text else ():
        name, _, value = pair.partition("=")
        name, value = unquote_plus(name).lower(), unquote_plus(value) if "%" in value or "+" in value else value
        query[name] = f"{query[name]},{value}" if name in query else value
    return query


def check_md5(call: Call) -> None:
    """Compare Content-MD5 with the body; Refusal where they differ."""
    given = call.headers.get("content-md5")
    if given is None:
        return
    try:
        digest = base64.b64decode(given, validate=True)
    except binascii.Error:
        digest = b""
    if len(digest) != 16:
        raise Refusal("InvalidMd5")
    if digest != hashlib.md5(call.body).digest():
        raise Refusal("Md5Mismatch")
