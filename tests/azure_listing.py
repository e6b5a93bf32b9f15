"""Listings of the file service: shares, what a directory holds."""

from __future__ import annotations

import base64
import binascii
import os
import re
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from azure_answers import Answer, Call, Refusal, http_date, stamp, xml
from azure_store import Store, refusals

PAGE = 5000
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def page(call: Call, names: list[str]) -> tuple[list[str], str]:
    """The names of one page, in order, and the marker of the next ("" where there is none).

    A marker says after which name to go on, so that names which come and go between two pages lose no other.
    """
    text = call.query.get("maxresults", str(PAGE))
    if not text.isdigit():
        raise Refusal("InvalidQueryParameterValue", QueryParameterName="maxresults", QueryParameterValue=text)
    if not int(text):
        raise Refusal("OutOfRangeQueryParameterValue", QueryParameterName="maxresults", QueryParameterValue=text)
    prefix, after = call.query.get("prefix", ""), ""
    if call.query.get("marker"):
        try:
            after = base64.urlsafe_b64decode(call.query["marker"]).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise Refusal("InvalidQueryParameterValue", QueryParameterName="marker") from None
    names = sorted(name for name in names if name.startswith(prefix) and name > after)
    size = min(int(text), PAGE)
    more = len(names) > size
    names = names[:size]
    return names, base64.urlsafe_b64encode(names[-1].encode()).decode() if more else ""


def encoded(tag: str, name: str) -> str:
    if UNPRINTABLE.search(name):
        return f'<{tag} Encoded="true">{quote(name, errors="surrogatepass")}</{tag}>'
    return f"<{tag}>{escape(name)}</{tag}>"


def frame(call: Call, attributes: str, entries: str, marker: str) -> Answer:
    asked = ""
    for tag, name in (("Prefix", "prefix"), ("Marker", "marker"), ("MaxResults", "maxresults")):
        if call.query.get(name):
            asked += encoded(tag, call.query[name])
    body = f"<EnumerationResults {attributes}>{asked}{entries}<NextMarker>{marker}</NextMarker></EnumerationResults>"
    return Answer(200, {"Content-Type": "application/xml"}, xml(body))


def list_shares(store: Store, call: Call) -> Answer:
    names, marker = page(call, os.listdir(store.root))
    entries = ""
    for name in names:
        path = store.top(name)
        status = os.stat(path)
        quota = store.quotas.get(name)
        extras = store.known(path)
        kept = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in extras.metadata.items())
        entries += (
            f"<Share><Name>{name}</Name><Properties><Last-Modified>{http_date(status.st_ctime)}</Last-Modified>"
            f"<Etag>{escape(store.etag(path, status))}</Etag><Quota>{5120 if quota is None else max(1, quota >> 30)}</Quota>"
            "<AccessTier>TransactionOptimized</AccessTier></Properties>"
            + (f"<Metadata>{kept}</Metadata>" if "metadata" in call.query.get("include", "") else "")
            + "</Share>"
        )
    return frame(call, f'ServiceEndpoint="/{call.account}/"', f"<Shares>{entries}</Shares>", marker)


def list_directory(store: Store, call: Call, path: str) -> Answer:
    """What a directory holds, by name; times only where they are asked for, as the service does."""
    include = call.query.get("include", "").lower()
    extended = bool(include) or call.headers.get("x-ms-file-extended-info", "").lower() == "true"
    with refusals("ResourceNotFound"):
        found = {entry.name: entry for entry in os.scandir(path)}
    names, marker = page(call, list(found))
    entries = []
    for name in names:
        entry = found[name]
        try:
            directory, status = entry.is_dir(), entry.stat()
        except FileNotFoundError:
            continue  # gone since the directory was read
        tag = "Directory" if directory else "File"
        text = f"<{tag}>{encoded('Name', name)}"
        if extended:
            text += f"<FileId>{status.st_ino}</FileId>"
        inside = "" if directory else f"<Content-Length>{status.st_size}</Content-Length>"
        if "timestamps" in include:
            changed = stamp(status.st_ctime)
            inside += (
                f"<CreationTime>{stamp(store.known(entry.path).created or status.st_mtime)}</CreationTime>"
                f"<LastAccessTime>{stamp(status.st_atime)}</LastAccessTime><LastWriteTime>{stamp(status.st_mtime)}</LastWriteTime>"
                f"<ChangeTime>{changed}</ChangeTime><Last-Modified>{http_date(status.st_ctime)}</Last-Modified>"
            )
        text += f"<Properties>{inside}</Properties>"
        entries.append(f"{text}</{tag}>")
    below = quoteattr("/".join(call.path))
    attributes = f'ServiceEndpoint="/{call.account}/" ShareName="{call.share}" DirectoryPath={below}'
    inode = f"<DirectoryId>{os.stat(path).st_ino}</DirectoryId>" if extended else ""
    return frame(call, attributes, f"<Entries>{''.join(entries)}</Entries>{inode}", marker)
