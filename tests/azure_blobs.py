"""A minimal blob service of the storage endpoint: containers and block blobs, as far as rclone's azureblob backend needs them.

A container is a directory, a blob ``a/b`` the file ``a/b`` in it; so a blob can't have the name of another one's folder. Directories are no
blobs: one that a test makes is seen by the blobs in it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import stat
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from urllib.parse import unquote
from xml.sax.saxutils import escape

from azure_answers import Answer, Call, Refusal, http_date, xml
from azure_listing import encoded, frame, page
from azure_signing import check_md5
from azure_store import SHARE_NAME, Store, content, metadata, refusals

HEADERS = re.compile("x-ms-blob-(cache-control|content-(?:type|encoding|language|disposition|md5))")


def blob_needs(call: Call) -> tuple[str, str]:
    """(resource type of an account SAS, letters of which a SAS must have one) for a request."""
    if not call.share:
        return "s", "l" if call.comp == "list" else "w" if call.method == "PUT" else "r"
    if call.comp == "list":
        return "c", "l"
    kind = "o" if call.path else "c"
    if call.method in ("GET", "HEAD"):
        return kind, "r"
    if call.method == "DELETE":
        return kind, "d"
    return kind, "w" if call.comp in ("metadata", "properties", "tier") else "cw"


class Blobs:
    """Answers requests of the blob service over a Store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.blocks: dict[str, dict[str, str]] = {}  # of a blob: the files of its blocks that aren't committed, by id

    def answer(self, call: Call) -> Answer:
        if not call.share:
            raise Refusal("InvalidUri")
        top = self.store.top(call.share)
        if not SHARE_NAME.fullmatch(call.share):
            raise Refusal("InvalidResourceName")
        if not call.path:
            if call.method == "GET" and call.comp == "list" and os.path.isdir(top):
                return self.list_blobs(call, top)
            raise Refusal("ContainerNotFound")
        if not os.path.isdir(top):
            raise Refusal("ContainerNotFound")
        if any(name in ("", ".", "..") or "\0" in name or len(name.encode()) > 255 for name in call.path):
            raise Refusal("InvalidResourceName")
        return self.blob(call, "/".join((top, *call.path)), top)

    def list_blobs(self, call: Call, top: str) -> Answer:
        delimiter, prefix = call.query.get("delimiter", ""), call.query.get("prefix", "")
        names = list(blob_names(top, prefix))
        if delimiter:
            cut = len(prefix)
            names = list({name[: name.index(delimiter, cut) + 1] if delimiter in name[cut:] else name for name in names})
        names, marker = page(call, names)
        entries = []
        for name in names:
            if delimiter and name.endswith(delimiter):
                entries.append(f"<BlobPrefix>{encoded('Name', name)}</BlobPrefix>")
                continue
            try:
                status = os.stat(f"{top}/{name}")
            except FileNotFoundError:
                continue
            headers = self.headers(f"{top}/{name}", status)
            kept = "".join(
                f"<{key[10:]}>{escape(value)}</{key[10:]}>" for key, value in headers.items() if key.startswith("x-ms-meta-")
            )
            tags = ("Last-Modified", "Content-Type", "Content-MD5", "Content-Encoding", "Cache-Control")
            inside = "".join(f"<{tag}>{escape(headers[tag])}</{tag}>" for tag in tags if tag in headers)
            entries.append(
                f"<Blob>{encoded('Name', name)}<Properties>{inside}<Content-Length>{status.st_size}</Content-Length><Etag>{escape(headers['ETag'])}</Etag><BlobType>BlockBlob</BlobType>"
                "<AccessTier>Hot</AccessTier><LeaseStatus>unlocked</LeaseStatus></Properties>"
                + (f"<Metadata>{kept}</Metadata>" if "metadata" in call.query.get("include", "").lower() else "")
                + "</Blob>"
            )
        attributes = f'ServiceEndpoint="/{call.account}/" ContainerName="{call.share}"'
        return frame(call, attributes, f"<Blobs>{''.join(entries)}</Blobs>", marker)

    # -- blobs --------------------------------------------------------------------------------------------------------------------

    def blob(self, call: Call, path: str, top: str) -> Answer:
        if call.method == "PUT" and call.comp in ("", "block", "blocklist"):
            return self.write(call, path)
        with refusals("BlobNotFound"):
            status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise Refusal("BlobNotFound")
        headers = self.headers(path, status)
        match call.method, call.comp:
            case "GET", "":
                return content(call, path, "BlobNotFound", self.headers)
            case "GET", "blocklist":
                return Answer(
                    200,
                    {"ETag": headers["ETag"], "Content-Type": "application/xml"},
                    xml("<BlockList><CommittedBlocks /></BlockList>"),
                )
            case (("GET" | "HEAD"), ("" | "metadata")):
                return Answer(200, headers, length=status.st_size)
        raise Refusal("UnsupportedHttpVerb")

    def headers(self, path: str, status: os.stat_result) -> dict[str, str]:
        extras = self.store.known(path)
        return {
            "Content-Type": "application/octet-stream",
            "ETag": self.store.etag(path, status),
            "Last-Modified": http_date(status.st_ctime),
            "Accept-Ranges": "bytes",
            "x-ms-blob-type": "BlockBlob",
            "x-ms-access-tier": "Hot",
            "x-ms-server-encrypted": "true",
            **extras.content,
            **{f"x-ms-meta-{name}": value for name, value in extras.metadata.items()},
        }

    def write(self, call: Call, path: str) -> Answer:
        """Put Blob, Put Block, Put Block List."""
        check_md5(call)
        if call.comp == "block":
            block = call.query.get("blockid", "")
            try:
                base64.b64decode(block, validate=True)
            except binascii.Error:
                raise Refusal("InvalidQueryParameterValue", QueryParameterName="blockid") from None
            descriptor, fresh = self.store.new_file()
            with os.fdopen(descriptor, "wb") as file:
                file.write(call.body)
            with self.store.lock:
                old = self.blocks.setdefault(path, {}).get(block)
                self.blocks[path][block] = fresh
            if old is not None:
                os.unlink(old)
            return Answer(201, {"x-ms-request-server-encrypted": "true"})
        exists = os.path.isfile(path)
        if call.headers.get("if-none-match") == "*" and exists:
            raise Refusal("BlobAlreadyExists")
        if exists and "sig" in call.query and "w" not in call.query.get("sp", ""):
            raise Refusal("AuthorizationPermissionMismatch")
        pieces: list[str] = []
        descriptor, fresh = self.store.new_file()
        try:
            with os.fdopen(descriptor, "wb") as file:
                if call.comp == "blocklist":
                    pieces = self.listed(call, path)
                    for piece in pieces:
                        with open(piece, "rb") as source:
                            shutil.copyfileobj(source, file, 1 << 20)
                elif call.headers.get("x-ms-blob-type") == "BlockBlob":
                    file.write(call.body)
                else:
                    raise Refusal("InvalidHeaderValue", HeaderName="x-ms-blob-type")
            self.place(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
        for piece in set(pieces):
            os.unlink(piece)
        extras = self.store.touch(path)
        extras.metadata, extras.content, extras.created = metadata(call), blob_headers(call), time.time()
        status = os.stat(path)
        headers = {"ETag": self.store.etag(path, status), "Last-Modified": http_date(status.st_ctime)}
        return Answer(201, headers | {"x-ms-request-server-encrypted": "true"})

    def listed(self, call: Call, path: str) -> list[str]:
        """The files of the blocks that a block list names, in its order; they are no longer waiting then."""
        try:
            wanted = [element.text or "" for element in ElementTree.fromstring(bytes(call.body))]
        except ElementTree.ParseError:
            raise Refusal("InvalidXmlDocument") from None
        with self.store.lock:
            waiting = self.blocks.get(path, {})
            if any(block not in waiting for block in wanted):
                raise Refusal("InvalidBlockList")
            del self.blocks[path]
        for block in waiting.keys() - set(wanted):
            os.unlink(waiting[block])
        return [waiting[block] for block in wanted]

    def place(self, fresh: str, path: str) -> None:
        """Give a finished file its name; its folders are made."""
        for _ in range(10):
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.replace(fresh, path)
                return
            except FileNotFoundError:
                continue  # the folder's last blob was deleted in between
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise Refusal("BlobAlreadyExists") from None
        raise Refusal("InternalError")


def blob_names(top: str, prefix: str) -> Iterator[str]:
    """The names of a container's blobs that begin with a prefix."""
    below = prefix.rpartition("/")[0]
    start = f"{top}/{below}" if below and ".." not in below.split("/") else top
    for folder, _, files in os.walk(start):
        for name in files:
            blob = f"{folder}/{name}"[len(top) + 1 :]
            if blob.startswith(prefix):
                yield blob


def blob_headers(call: Call) -> dict[str, str]:
    found = {}
    for name, value in call.headers.items():
        match = HEADERS.fullmatch(name)
        if match and value:
            found[match[1].title().replace("Md5", "MD5")] = unquote(value) if match[1] == "content-disposition" else value
    if "Content-Type" not in found and call.comp == "" and call.headers.get("content-type"):
        found["Content-Type"] = call.headers["content-type"]
    return found
