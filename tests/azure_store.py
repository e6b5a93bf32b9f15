"""Metadata of a share beside its directory: names and paths, HTTP headers, the share's size limit.

The directory is the truth: a file that something else makes there (a bind mount, a test) is served at once. Only what a directory can't
hold is in memory, by path.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from azure_answers import Answer, Call, Part, Refusal, http_date, parse_range, parse_time, stamp

BAD_NAME = re.compile(r'["\\:|<>*?\x00-\x1f]')
SHARE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9]|-(?=[a-z0-9])){2,62}")
CONTENT = ("type", "encoding", "language", "disposition", "md5")


@dataclass(slots=True)
class Extras:
    """What is known of a file, directory, share or blob beside what its inode says."""

    metadata: dict[str, str] = field(default_factory=dict)
    content: dict[str, str] = field(default_factory=dict)  # response headers by name: Content-Type, ...
    attributes: str = ""
    created: float = 0.0
    version: int = 0  # counts changes: inode times alone are too coarse for an ETag


class Store:
    """The directories of one service and what is kept beside them."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.scratch = (
            f"{root}.new"  # beside, so that a half-written file is in no listing, and a rename stays in one file system
        )
        os.makedirs(self.root, exist_ok=True)
        os.makedirs(self.scratch, exist_ok=True)
        self.extras: dict[str, Extras] = {}
        self.quotas: dict[str, int] = {}
        self.lock = threading.RLock()

    def top(self, name: str) -> str:
        return f"{self.root}/{name}"

    def known(self, path: str) -> Extras:
        return self.extras.get(path) or Extras()

    def touch(self, path: str) -> Extras:
        """The extras of a path that changes."""
        extras = self.extras.setdefault(path, Extras())
        extras.version += 1
        return extras

    def forget(self, path: str) -> None:
        self.extras.pop(path, None)

    def forget_below(self, path: str) -> None:
        for name in [name for name in self.extras if name == path or name.startswith(path + "/")]:
            self.extras.pop(name, None)

    def move(self, source: str, target: str) -> None:
        for name in [name for name in list(self.extras) if name == source or name.startswith(source + "/")]:
            self.extras[target + name[len(source) :]] = self.extras.pop(name)

    def etag(self, path: str, status: os.stat_result) -> str:
        return f'"0x8{status.st_ctime_ns % (1 << 52):013X}{self.known(path).version:X}"'

    def new_file(self) -> tuple[int, str]:
        """A new empty file outside every listing: (descriptor, path)."""
        path = f"{self.scratch}/{uuid.uuid4().hex}"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), path

    def room(self, share: str, more: int) -> None:
        """Refuse what would make a share bigger than its limit."""
        limit = self.quotas.get(share)
        if limit is None or more <= 0:
            return
        used = sum(os.lstat(f"{folder}/{name}").st_size for folder, _, names in os.walk(self.top(share)) for name in names)
        if used + more > limit:
            raise Refusal("ShareSizeLimitReached")


def checked(segments: tuple[str, ...], trailing_dots: bool) -> tuple[str, ...]:
    """Names that a share may hold; Refusal for others. Dots at a name's end are dropped unless the client asks to keep them."""
    names = []
    for segment in segments:
        name = segment if trailing_dots else segment.rstrip(". ")
        if not name or name in (".", "..") or len(name) > 255 or BAD_NAME.search(name) or len(name.encode()) > 255:
            raise Refusal("InvalidResourceName")
        names.append(name)
    return tuple(names)


@contextmanager
def refusals(missing: str = "ParentNotFound", path: str = "") -> Iterator[None]:
    """What the file system says, in the service's words: ``missing``, or ParentNotFound where ``path`` has no folder to be in."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise Refusal("ParentNotFound" if path and not os.path.isdir(os.path.dirname(path)) else missing) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Refusal("ShareSizeLimitReached") from None
        raise


def metadata(call: Call) -> dict[str, str]:
    """``x-ms-meta-NAME`` headers; a bare ``x-ms-meta``, which Microsoft's Python client adds, is none."""
    return {name[10:]: value for name, value in call.headers.items() if name.startswith("x-ms-meta-") and len(name) > 10}


def content_headers(call: Call) -> dict[str, str]:
    """``x-ms-content-type`` and its like, as the headers that they become in answers."""
    found = {}
    for name in CONTENT:
        value = call.headers.get(f"x-ms-content-{name}")
        if value:
            found["Content-MD5" if name == "md5" else f"Content-{name.title()}"] = value
    if call.headers.get("x-ms-cache-control"):
        found["Cache-Control"] = call.headers["x-ms-cache-control"]
    return found


def named_attributes(call: Call) -> str:
    """The file attributes that a request sets, or ""."""
    text = call.headers.get("x-ms-file-attributes", "")
    return "" if text.lower() in ("none", "preserve") else text


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def set_times(call: Call, target: int | str) -> None:
    """Give a file the last write time that the request names: a time, "now" or "preserve"."""
    text = call.headers.get("x-ms-file-last-write-time", "preserve").lower()
    if text == "preserve":
        return
    try:
        moment = time.time() if text == "now" else parse_time(text.upper())
    except ValueError:
        raise Refusal("InvalidHeaderValue", HeaderName="x-ms-file-last-write-time", HeaderValue=text) from None
    os.utime(target, (moment, moment))


def content(call: Call, path: str, missing: str, headers: Callable[[str, os.stat_result], dict[str, str]]) -> Answer:
    """Get File, Get Blob: the content of a file, or the range of it that is asked for."""
    text = call.headers.get("x-ms-range") or call.headers.get("range")
    with refusals(missing, path if missing == "ResourceNotFound" else ""):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        found = headers(path, status)
        if call.headers.get("if-match", found["ETag"]) not in (found["ETag"], "*"):
            raise Refusal("ConditionNotMet")
        if text is None:
            return Answer(200, found, Part(descriptor, 0, status.st_size))
        first, last = parse_range(text)
        if first >= status.st_size:
            raise Refusal("InvalidRange")
        last = status.st_size - 1 if last is None else min(last, status.st_size - 1)
        length = last - first + 1
        found["Content-Range"] = f"bytes {first}-{last}/{status.st_size}"
        if "Content-MD5" in found:
            found["x-ms-blob-content-md5" if call.service == "blob" else "x-ms-content-md5"] = found.pop("Content-MD5")
        return Answer(206, found, Part(descriptor, first, length))
    except BaseException:
        os.close(descriptor)
        raise


def describe(store: Store, path: str, status: os.stat_result, directory: bool) -> dict[str, str]:
    """The headers that every answer about a file or directory has."""
    extras = store.known(path)
    return {
        "ETag": store.etag(path, status),
        "Last-Modified": http_date(status.st_ctime),
        "x-ms-file-attributes": extras.attributes or ("Directory" if directory else "Archive"),
        "x-ms-file-creation-time": stamp(extras.created or min(status.st_mtime, status.st_ctime)),
        "x-ms-file-last-write-time": stamp(status.st_mtime),
        "x-ms-file-change-time": stamp(status.st_ctime),
        "x-ms-file-id": str(status.st_ino),
        "x-ms-file-parent-id": "0",
        "x-ms-file-permission-key": "0*0",
        "x-ms-request-server-encrypted": "true",
    }
