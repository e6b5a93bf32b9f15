"""The control share as an Azure file share, by REST with a SAS: few requests, each byte sent once."""

from __future__ import annotations

import errno
import hashlib
import posixpath
import time
import uuid
from collections.abc import Sequence
from urllib.parse import quote, unquote
from xml.etree import ElementTree

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.protocol import JobPaths, Record, identity_path
from mlflow_batchai.agent.share.base import ControlError, ControlShare, Entry, LogFile
from mlflow_batchai.agent.share.index import IndexedFiles
from mlflow_batchai.agent.share.wire import Answer, Wire

# What one request may carry: https://learn.microsoft.com/rest/api/storageservices/put-range
BLOCK_BYTES = 4 << 20
# The first version in which Create File takes the data as well (the SDK's create_file(data=)).
DATA_VERSION = "2026-10-06"
LOG_SECONDS, LOG_BYTES = 4.0, 1 << 20

# A share that isn't there any more is given up sooner than one that doesn't let us in: a SAS can be wrong for a while (clocks).
GONE_SECONDS = 120.0


class RestShare(ControlShare):
    """Requests to the Azure Files REST API; ``address``: see ``wire.Wire``, as for ``sas`` and ``patience``."""

    at_once = 8

    def __init__(self, address: str, sas: str | None, patience: float) -> None:
        super().__init__()
        self.wire = Wire(address, sas, patience)
        # Whether a file can be created with its data in one request; None: not tried yet.
        self._in_one: bool | None = None
        # The folder of the job, if any.
        self._job = ""

    def close(self) -> None:
        self.wire.close()

    def refused(self, seconds: float) -> str | None:
        denied = self.wire.denied
        if denied is None:
            return None
        wait = min(seconds, GONE_SECONDS) if denied.gone else seconds
        return denied.sentence if time.monotonic() - denied.since >= wait else None

    def where(self, path: str) -> str:
        return f"{self.wire.name}/{path}" if path else self.wire.name

    def trouble(self, identity: str) -> str | None:
        path = identity_path(identity)
        try:
            if not self._is_folder(path):
                return "another" if self._is_folder("") else "missing"
        except ControlError as error:
            return "missing" if error.errno == errno.ENOENT else f"unreachable: {error}"
        try:
            # It is there, so nothing is made; who may not make anything hears of that first.
            self._create_folder(path)
        except ControlError as error:
            return "read-only" if error.errno == errno.EACCES else f"unreachable: {error}"
        return None

    def _is_folder(self, path: str) -> bool:
        answer = self.wire.ask("GET", path, "restype=directory")
        if answer.status != 404:
            self._must("GET", path, answer)
        return answer.good

    def content(self, path: str) -> bytes | None:
        most = protocol.longest(path)
        answer = self.wire.ask("GET", path, "", {"x-ms-range": f"bytes=0-{most}"})
        if answer.status == 404:
            return None
        if answer.status == 416:
            return b""  # it is empty
        self._must("GET", path, answer)
        return answer.body if len(answer.body) <= most else b""

    def write_closed(self, path: str, records: Sequence[Record]) -> None:
        self.write(path, protocol.encode(records))

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file; until all of it is there, it holds zeros."""
        tried = bool(data) and len(data) <= BLOCK_BYTES and self._in_one is not False
        if tried:
            answer = self._create(path, len(data), data)
            # A service that knows nothing of it may drop the data without a word: the first is looked at.
            if answer.good and (self._in_one or self.wire.ask("GET", path).body == data):
                self._in_one = True
                return
            if not answer.good and answer.status not in (400, 411, 413):
                raise self._unexpected("PUT", path, answer)
        self._must("PUT", path, self._create(path, len(data)))
        self.put(path, 0, data)
        if tried:
            self._in_one = False

    def mark(self, path: str, number: int) -> None:
        """Make a file that says a number by its size."""
        self._must("PUT", path, self._create(path, number))

    def put(self, path: str, start: int, data: bytes) -> None:
        """Write into a file that is as long as that needs."""
        for offset in range(0, len(data), BLOCK_BYTES):
            block = data[offset : offset + BLOCK_BYTES]
            first = start + offset
            headers = {"x-ms-write": "update", "x-ms-range": f"bytes={first}-{first + len(block) - 1}"}
            self._must("PUT", path, self.wire.ask("PUT", path, "comp=range", headers, block))

    def resize(self, path: str, size: int) -> bool:
        """Cut a file, or make it longer with zeros; False if it isn't there."""
        answer = self.wire.ask("PUT", path, "comp=properties", {"x-ms-content-length": str(size)})
        if answer.status == 404:
            return False
        self._must("PUT", path, answer)
        return True

    def size(self, path: str) -> int | None:
        answer = self.wire.ask("HEAD", path)
        if answer.status == 404:
            return None
        self._must("HEAD", path, answer)
        return int(answer.headers["content-length"])

    def claim(self, path: str) -> bool:
        # An answer that was lost leaves a directory behind that is ours.
        owner = uuid.uuid4().hex
        answer = self._create_folder(path, {"x-ms-meta-owner": owner})
        if answer.status == 409 and answer.tries > 1:
            there = self.wire.ask("GET", path, "restype=directory")
            return there.headers.get("x-ms-meta-owner") == owner
        return answer.good

    def entries(self, path: str) -> list[Entry]:
        found: list[Entry] = []
        marker = ""
        while True:
            query = "restype=directory&comp=list" + ("&marker=" + quote(marker, safe="") if marker else "")
            answer = self.wire.ask("GET", path, query)
            if answer.status == 404:
                return found
            self._must("GET", path, answer)
            try:
                listing = ElementTree.fromstring(answer.body)
            except ElementTree.ParseError:
                raise ControlError(f"the file share {self.wire.name} answers with what is no listing") from None
            found += [_entry(node) for node in listing.iterfind("Entries/*") if node.tag in ("File", "Directory")]
            marker = listing.findtext("NextMarker") or ""
            if not marker:
                return found

    def fetch(self, path: str, target: str) -> str:
        digest = hashlib.sha256()
        with open(target, "wb") as file:
            start, total = 0, 1
            while start < total:
                headers = {"x-ms-range": f"bytes={start}-{start + BLOCK_BYTES - 1}"}
                answer = self.wire.ask("GET", path, "", headers)
                if answer.status == 404:
                    raise FileNotFoundError(errno.ENOENT, "No such file on the share", self.where(path))
                if answer.status == 416 and start == 0:
                    break  # it is empty
                self._must("GET", path, answer)
                block = answer.body
                total = int(answer.headers.get("content-range", "").rpartition("/")[2] or len(block))
                if not block:
                    raise ControlError(f"the file share {self.wire.name} sends nothing of {path}")
                digest.update(block)
                file.write(block)
                start += len(block)
        return digest.hexdigest()

    def log_file(self, path: str) -> RestLogFile:
        return RestLogFile(self, path)

    def attempt(self, paths: JobPaths, node: int, nodes: int) -> IndexedFiles:
        self._job = paths.folder
        return IndexedFiles(self, paths, node, nodes)

    def _create(self, path: str, size: int, data: bytes = b"") -> Answer:
        """Create File; one that is there is replaced."""
        headers = {"x-ms-type": "file", "x-ms-content-length": str(size)}
        if data:
            headers["x-ms-version"] = DATA_VERSION
        answer = self.wire.ask("PUT", path, "", headers, data)
        if answer.status == 404:
            self._make_folder(posixpath.dirname(path))
            answer = self.wire.ask("PUT", path, "", headers, data)
        return answer

    def _create_folder(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        """Create Directory, with its parents: 201 if it was made, 409 if it was there."""
        answer = self.wire.ask("PUT", path, "restype=directory", headers)
        if answer.status == 404:
            self._make_folder(posixpath.dirname(path))
            answer = self.wire.ask("PUT", path, "restype=directory", headers)
        if not answer.good and answer.code != "ResourceAlreadyExists":
            raise self._unexpected("PUT", path, answer)
        return answer

    def _make_folder(self, path: str) -> None:
        """Make a folder in the job's; the submitter makes that one and the share's root."""
        if not path or (self._job + "/").startswith(path + "/"):
            raise ControlError(f"there is no folder {self.where(path)}", errno.ENOENT)
        self._create_folder(path)

    def _must(self, method: str, path: str, answer: Answer) -> None:
        if not answer.good:
            raise self._unexpected(method, path, answer)

    def _unexpected(self, method: str, path: str, answer: Answer) -> ControlError:
        return self.wire.refusal(method, path, answer.status, answer.code, answer.headers)


def _entry(node: ElementTree.Element) -> Entry:
    name = node.find("Name")
    text = "" if name is None else name.text or ""
    # Names that XML can't hold come percent-encoded.
    if name is not None and name.get("Encoded") == "true":
        text = unquote(text)
    size = node.findtext("Properties/Content-Length") or "0"
    return Entry(text, int(size), node.tag == "Directory")


class RestLogFile(LogFile):
    """A file that grows by ranges at known offsets: what is sent again changes nothing. Readers stop at the first NUL."""

    def __init__(self, share: RestShare, path: str) -> None:
        super().__init__()
        self._share = share
        self._path = path
        self._size: int | None = None
        self._is_new = False
        # What is being written stays as it is until the share has it.
        self._sending = b""
        self._since: float | None = None

    def append(self, data: bytes) -> None:
        if self._since is None:
            self._since = time.monotonic()
        super().append(data)

    def flush(self, last: bool = False) -> None:
        while True:
            if not self._sending and not self._is_time(last):
                if last and self._size is None:  # a file of which nothing was written
                    self._size = self._share.size(self._path)
                    if self._size is None:
                        self._share.write(self._path, b"")
                        self._size = 0
                return
            if not self._sending:
                self._sending = bytes(self._data[:BLOCK_BYTES])
                del self._data[:BLOCK_BYTES]
                self._since = time.monotonic() if self._data else None
            self._send(self._sending)
            self._sending = b""

    def _is_time(self, last: bool) -> bool:
        if self._since is None or not self._data:
            return False
        return last or len(self._data) >= LOG_BYTES or time.monotonic() - self._since >= LOG_SECONDS

    def _send(self, data: bytes) -> None:
        if self._size is None:
            there = self._share.size(self._path)
            self._size, self._is_new = there or 0, there is None
        # Someone may have removed it: then it begins anew.
        if not self._is_new and not self._share.resize(self._path, self._size + len(data)):
            self._size, self._is_new = 0, True
        if self._is_new:
            self._share.write(self._path, data)
            self._is_new = False
        else:
            self._share.put(self._path, self._size, data)
        self._size += len(data)
