"""Rename and copy in the file service."""

from __future__ import annotations

import os
import shutil
import stat
import time
import uuid
from urllib.parse import unquote, urlsplit

from azure_answers import Answer, Call, Refusal
from azure_store import Store, checked, describe, metadata, opened, refusals


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


def copy(store: Store, call: Call, path: str) -> Answer:
    """Copy File within the account; it has ended when this answers."""
    source = source_path(store, call, "x-ms-copy-source")
    with refusals("ResourceNotFound"):
        size = os.stat(source).st_size
    store.room(call.share, size)
    descriptor, fresh = store.new_file()
    os.close(descriptor)
    try:
        with refusals():
            shutil.copyfile(source, fresh)
            with store.lock:
                os.replace(fresh, path)
                extras, old = store.touch(path), store.known(source)
                extras.metadata, extras.content = metadata(call) or dict(old.metadata), dict(old.content)
                extras.created = time.time()
    except BaseException:
        if os.path.exists(fresh):
            os.unlink(fresh)
        raise
    with opened(path, os.O_RDONLY) as descriptor:
        headers = describe(store, path, os.fstat(descriptor), directory=False)
    return Answer(202, headers | {"x-ms-copy-id": str(uuid.uuid4()), "x-ms-copy-status": "success"})
