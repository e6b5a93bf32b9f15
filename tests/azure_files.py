"""The file service of the storage endpoint: shares, directories, files; written from Microsoft's "Azure Files REST API"."""

from __future__ import annotations

import os
import shutil
import stat
import time
from urllib.parse import unquote, urlsplit

from azure_answers import Answer, Call, Refusal, http_date, parse_range
from azure_listing import list_directory, list_shares
from azure_signing import check_md5
from azure_store import (
    SHARE_NAME,
    Store,
    checked,
    content,
    content_headers,
    describe,
    metadata,
    named_attributes,
    opened,
    refusals,
    set_times,
)

RANGE_LIMIT = 4 << 20
DATA_VERSION = (
    "2026-10-06"  # the first in which Create File takes data [the newest that Microsoft's client has when this was written]
)


def needs(call: Call) -> tuple[str, str]:
    """(resource type of an account SAS, letters of which a SAS must have one) for a request."""
    method, comp = call.method, call.comp
    if not call.share:
        return "s", "l" if comp == "list" else "w" if method == "PUT" else "r"
    if comp == "list":
        return "c", "l"
    kind = "c" if call.restype == "share" else "o"
    if method in ("GET", "HEAD"):
        return kind, "r"
    if method == "DELETE":
        return kind, "d"
    return kind, "cw" if not comp else "w"


class Files:
    """Answers requests of the file service over a Store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def answer(self, call: Call) -> Answer:
        if not call.share:
            if call.comp == "list":
                return list_shares(self.store, call)
            raise Refusal("InvalidUri")
        if call.restype == "share":
            return share(self.store, call)
        top = self.store.top(call.share)
        if not SHARE_NAME.fullmatch(call.share) or not os.path.isdir(top):
            raise Refusal("ShareNotFound")
        names = checked(call.path, call.headers.get("x-ms-allow-trailing-dot") == "true")
        path = "/".join((top, *names))
        if call.comp == "rename":
            return rename(self.store, call, path)
        if call.restype == "directory":
            return self.directory(call, path)
        if not names:
            raise Refusal("InvalidUri")
        return self.file(call, path)

    # -- directories --------------------------------------------------------------------------------------------------------------

    def directory(self, call: Call, path: str) -> Answer:
        store = self.store
        root = not call.path
        if call.method == "PUT" and not call.comp:
            try:
                with refusals():
                    os.mkdir(path)
            except FileExistsError:
                raise Refusal("ResourceAlreadyExists") from None
            extras = store.touch(path)
            extras.metadata, extras.created = metadata(call), time.time()
            extras.attributes = named_attributes(call)
            set_times(call, path)
            return Answer(201, describe(store, path, os.stat(path), directory=True))
        with refusals("ResourceNotFound", path):
            status = os.stat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise Refusal("ResourceTypeMismatch" if call.comp != "list" else "ResourceNotFound")
        headers = describe(store, path, status, directory=True)
        match call.method, call.comp:
            case "GET", "list":
                return list_directory(store, call, path)
            case (("GET" | "HEAD"), ("" | "metadata")):
                return Answer(200, headers | {f"x-ms-meta-{name}": value for name, value in store.known(path).metadata.items()})
            case "DELETE", "" if not root:
                try:
                    with refusals("ResourceNotFound", path):
                        os.rmdir(path)
                except OSError:
                    raise Refusal("DirectoryNotEmpty") from None
                store.forget(path)
                return Answer(202)
        raise Refusal("UnsupportedHttpVerb")

    # -- files --------------------------------------------------------------------------------------------------------------------

    def file(self, call: Call, path: str) -> Answer:
        if call.method == "PUT" and not call.comp:
            return self.create(call, path)
        if call.method == "PUT" and call.comp == "range":
            return self.put_range(call, path)
        with refusals("ResourceNotFound", path):
            status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise Refusal("ResourceNotFound" if call.method in ("GET", "HEAD") else "ResourceTypeMismatch")
        match call.method, call.comp:
            case "GET", "":
                return content(call, path, "ResourceNotFound", self.headers)
            case (("GET" | "HEAD"), ("" | "metadata")):
                return Answer(200, self.headers(path, status), length=status.st_size if not call.comp else 0)
            case "DELETE", "":
                with self.store.lock:
                    with refusals("ResourceNotFound", path):
                        os.unlink(path)
                    self.store.forget(path)
                return Answer(202)
            case "PUT", "properties":
                return self.set_properties(call, path)
        raise Refusal("UnsupportedHttpVerb")

    def headers(self, path: str, status: os.stat_result) -> dict[str, str]:
        extras = self.store.known(path)
        return {
            "Content-Type": "application/octet-stream",
            **describe(self.store, path, status, directory=False),
            **extras.content,
            "Accept-Ranges": "bytes",
            "x-ms-type": "File",
            "x-ms-server-encrypted": "true",
            **{f"x-ms-meta-{name}": value for name, value in extras.metadata.items()},
        }

    def create(self, call: Call, path: str) -> Answer:
        """Create File: a new file of a size, whole at once; what was there under its name is replaced."""
        if call.headers.get("x-ms-type", "").lower() != "file" or not call.headers.get("x-ms-content-length", "").isdigit():
            raise Refusal("MissingRequiredHeader", HeaderName="x-ms-content-length")
        size = int(call.headers["x-ms-content-length"])
        if "x-ms-structured-body" in call.headers:
            raise Refusal("UnsupportedHeader", HeaderName="x-ms-structured-body")
        if call.body and call.headers.get("x-ms-version", call.query.get("sv", "")) < DATA_VERSION:
            raise Refusal("InvalidHeaderValue", HeaderName="Content-Length", HeaderValue=str(len(call.body)))
        if len(call.body) > RANGE_LIMIT:
            raise Refusal("RequestBodyTooLarge", MaxLimit=str(RANGE_LIMIT))
        if len(call.body) > size:
            raise Refusal("InvalidRange")
        check_md5(call)
        try:
            old = os.stat(path)
        except OSError:
            old = None
        if old is not None and stat.S_ISDIR(old.st_mode):
            raise Refusal("ResourceTypeMismatch")
        if old is not None and "sig" in call.query and "w" not in call.query.get("sp", ""):
            # "Create" lets one make a new file, "Write" is needed to overwrite one.
            raise Refusal("AuthorizationPermissionMismatch")
        self.store.room(call.share, size - (old.st_size if old else 0))
        descriptor, fresh = self.store.new_file()
        try:
            with refusals():
                os.ftruncate(descriptor, size)
                if call.body:
                    os.pwrite(descriptor, call.body, 0)
                set_times(call, descriptor)
                with self.store.lock:
                    os.replace(fresh, path)
                    extras = self.store.touch(path)
                    extras.metadata, extras.content = metadata(call), content_headers(call)
                    extras.attributes, extras.created = named_attributes(call), time.time()
        except BaseException:
            os.unlink(fresh)
            raise
        finally:
            status = os.fstat(descriptor)
            os.close(descriptor)
        return Answer(201, describe(self.store, path, status, directory=False))

    def put_range(self, call: Call, path: str) -> Answer:
        mode = call.headers.get("x-ms-write", "").lower()
        if "x-ms-structured-body" in call.headers or "x-ms-copy-source" in call.headers:
            raise Refusal("UnsupportedHeader")
        first, last = parse_range(call.headers.get("x-ms-range") or call.headers.get("range", ""))
        if mode not in ("update", "clear") or last is None or last < first:
            raise Refusal("InvalidHeaderValue", HeaderName="x-ms-write", HeaderValue=mode)
        length = last - first + 1
        if mode == "update":
            if length > RANGE_LIMIT:
                raise Refusal("RequestBodyTooLarge", MaxLimit=str(RANGE_LIMIT))
            if len(call.body) != length:
                raise Refusal("InvalidHeaderValue", HeaderName="Content-Length", HeaderValue=str(len(call.body)))
            check_md5(call)
        with refusals("ResourceNotFound", path), opened(path, os.O_RDWR) as descriptor:
            before = os.fstat(descriptor)
            if last >= before.st_size:
                raise Refusal("InvalidRange")
            os.pwrite(descriptor, call.body if mode == "update" else bytes(length), first)
            if call.headers.get("x-ms-file-last-write-time", "now").lower() == "preserve":
                os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
            self.store.touch(path)
            return Answer(201, describe(self.store, path, os.fstat(descriptor), directory=False))

    def set_properties(self, call: Call, path: str) -> Answer:
        with self.store.lock, refusals("ResourceNotFound", path):
            if "x-ms-content-length" in call.headers:
                size = int(call.headers["x-ms-content-length"])
                self.store.room(call.share, size - os.stat(path).st_size)
                os.truncate(path, size)
            extras = self.store.touch(path)
            extras.content = content_headers(call)  # what the request doesn't name is cleared
            extras.attributes = named_attributes(call) or extras.attributes
            set_times(call, path)
            return Answer(200, describe(self.store, path, os.stat(path), directory=False))


def share(store: Store, call: Call) -> Answer:
    """Answer what is asked of a share itself."""
    path = store.top(call.share)
    if not SHARE_NAME.fullmatch(call.share):
        raise Refusal("InvalidResourceName")
    if call.method == "PUT" and not call.comp:
        try:
            os.mkdir(path)
        except FileExistsError:
            raise Refusal("ShareAlreadyExists") from None
        set_quota(store, call)
        return Answer(201, share_headers(store, path))
    if call.method == "DELETE":
        with refusals("ShareNotFound"):
            shutil.rmtree(path)
        store.forget_below(path)
        return Answer(202)
    raise Refusal("UnsupportedHttpVerb")


def share_headers(store: Store, path: str) -> dict[str, str]:
    status = os.stat(path)
    return {"ETag": store.etag(path, status), "Last-Modified": http_date(status.st_ctime)}


def set_quota(store: Store, call: Call) -> None:
    if "x-ms-share-quota" in call.headers:
        store.quotas[call.share] = int(call.headers["x-ms-share-quota"]) << 30


def source_path(store: Store, call: Call, header: str) -> str:
    """The path that an address in a header names; it must be on this account."""
    parts = [unquote(part) for part in urlsplit(call.headers[header]).path.strip("/").split("/")]
    if call.service == "file":
        parts = [part for text in parts for part in text.split("/")]
    if len(parts) < 3 or parts[0] != call.account:
        raise Refusal("InvalidHeaderValue", HeaderName=header, HeaderValue=call.headers[header].partition("?")[0])
    return "/".join((store.top(parts[1]), *checked(tuple(parts[2:]), trailing_dots=True)))


def rename(store: Store, call: Call, path: str) -> Answer:
    """Rename File, Rename Directory: one step, over a file that is there only where the request says so."""
    source = source_path(store, call, "x-ms-file-rename-source")
    directory = call.restype == "directory"
    with store.lock:
        with refusals("ResourceNotFound"):
            status = os.stat(source)
        if stat.S_ISDIR(status.st_mode) != directory:
            raise Refusal("ResourceNotFound")
        replaces = call.headers.get("x-ms-file-rename-replace-if-exists", "").lower() == "true"
        if os.path.lexists(path) and path != source and (directory or os.path.isdir(path) or not replaces):
            raise Refusal("ResourceAlreadyExists")
        with refusals():
            os.rename(source, path)
        store.forget(path)
        store.move(source, path)
        extras = store.touch(path)
        extras.metadata = metadata(call) or extras.metadata
        if "x-ms-content-type" in call.headers:
            extras.content["Content-Type"] = call.headers["x-ms-content-type"]
    return Answer(200, describe(store, path, os.stat(path), directory))
