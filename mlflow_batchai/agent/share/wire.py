"""HTTP connections to an Azure file share: kept open, retried where errors may pass, without showing the SAS.

Written from Microsoft's description of the Azure Files REST API. What failed is tried again while there is hope: no answer,
429, 500, 502, 503, 504; everything that is sent here may arrive twice.
"""

from __future__ import annotations

import base64
import errno
import http.client
import random
import ssl
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from mlflow_batchai.agent import azure_errors
from mlflow_batchai.agent.share.base import ControlError, is_numbered

VERSION = "2022-11-02"
# A service that hangs: longer than any that is only slow takes for 4 MiB.
ANSWER_SECONDS = 20.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.3, 8.0
_PASSING = frozenset([408, 429, 500, 502, 503, 504])
# 409 that pass by themselves: https://learn.microsoft.com/rest/api/storageservices/file-service-error-codes
_PASSING_CODES = frozenset(
    ["DeletePending", "SharingViolation", "FileLockConflict", "ShareBeingDeleted", "ShareSnapshotInProgress"]
)


class Answer(NamedTuple):
    """An answer that says something final.

    Attributes:
        status: 2xx, or 400, 404, 409, 411, 413, 416, which mean something to who asked.
        code: Azure's error code, or empty.
        tries: how often it was asked: an earlier one may have arrived.
    """

    status: int
    code: str
    headers: Mapping[str, str]
    body: bytes
    tries: int

    @property
    def good(self) -> bool:
        return self.status < 300


class Denied(NamedTuple):
    """The service refuses all requests: no permission, or no such share.

    Attributes:
        since: when that began (``time.monotonic``).
        gone: whether the share isn't there: nobody will give it back with what lay on it.
    """

    since: float
    sentence: str
    gone: bool = False


_ASKERS_OWN = frozenset([400, 404, 409, 411, 413, 416])


class Wire:
    """Requests to one file share, by any number of threads; connections are kept open for the next request.

    Args:
        address: ``scheme://host[:port]/[account/]share[/folder]``.
        sas: a shared access signature without ``?``; None: without one.
        patience: seconds for which a request is tried again.

    Attributes:
        denied: whether we are not let in now, and since when.

    Raises:
        ControlError: the address, the SAS or the proxy's address is none.
    """

    def __init__(self, address: str, sas: str | None, patience: float) -> None:
        no_address = f"'{address.partition('?')[0].rpartition('@')[2]}' is no address of a file share"
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError:
            raise ControlError(no_address) from None
        names = [unquote(part) for part in parts.path.split("/") if part]
        if not parts.hostname or not names or parts.query or parts.fragment or "@" in parts.netloc:
            raise ControlError(no_address)
        if parts.scheme.lower() == "http" and not is_numbered(parts.hostname):
            raise ControlError(f"{address} would be asked without encryption: write https")
        self.name = address.rstrip("/")
        # The text itself is not repeated: http.client would show it with the address.
        if sas is not None and (not sas.isascii() or any(letter <= " " or letter == "\x7f" for letter in sas)):
            raise ControlError(f"the SAS of {self.name} has characters that no SAS has")
        self._secure = parts.scheme.lower() == "https"
        self._host, self._port = parts.hostname, port or (443 if self._secure else 80)
        self._names = names
        self._sas = (sas or "").lstrip("?")
        self._context: ssl.SSLContext | None = None
        self._proxy = proxy_for(parts.scheme.lower(), self._host)
        self._patience = patience
        self._timeout = min(ANSWER_SECONDS, patience)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self.denied: Denied | None = None

    def hasty(self, patience: float) -> None:
        """The calling thread asks again by itself: from now on it gives up after so many seconds."""
        self._local.patience = patience

    def close(self) -> None:
        while True:
            connection = self._kept()
            if connection is None:
                return
            connection.close()

    def ask(
        self,
        method: str,
        path: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        """Ask until there is an answer that says something.

        Args:
            query: without the SAS.

        Raises:
            ControlError: there is none in time, or it says that we may not.
        """
        target = "/" + "/".join(quote(name, safe="") for name in self._names + [part for part in path.split("/") if part])
        more = "&".join(part for part in (query, self._sas) if part)
        sent = {
            "x-ms-version": VERSION,
            "Content-Length": str(len(body)),
            "User-Agent": "mlflow-batchai-agent",
            **(headers or {}),
        }
        if method != "PUT":
            del sent["Content-Length"]
        asked = (method, target + ("?" + more if more else ""), body, sent)
        until = time.monotonic() + getattr(self._local, "patience", self._patience)
        pause = FIRST_PAUSE_SECONDS
        tries = 0
        while True:
            tries += 1
            wait = 0.0
            try:
                status, answered, content, again = self._exchange(*asked)
                tries += again
            except (OSError, http.client.HTTPException) as error:
                why = f"can't be reached: {_words(error, self._timeout)}"
                number = error.errno if isinstance(error, OSError) else None
            else:
                code = answered.get("x-ms-error-code", "")
                if status < 300 or (status in _ASKERS_OWN and code not in _PASSING_CODES):
                    if code == "ShareNotFound":
                        refusal = self.refusal(method, path, status, code, answered)
                        self.denied = self.denied or Denied(time.monotonic(), str(refusal), gone=True)
                        raise refusal
                    self.denied = None
                    return Answer(status, code, answered, content, tries)
                if status not in _PASSING and code not in _PASSING_CODES:
                    refusal = self.refusal(method, path, status, code, answered)
                    if status in (401, 403):
                        self.denied = self.denied or Denied(time.monotonic(), str(refusal))
                    raise refusal
                why, number = f"takes no requests now ({status} {code or 'without a reason'})", errno.EBUSY
                wait = _seconds(answered.get("retry-after", ""))
            # Agents of one job must not come again all at the same moment.
            wait = max(wait, pause * random.uniform(0.7, 1.3))
            if time.monotonic() + wait > until:
                raise ControlError(f"the file share {self.name} {why}", number)
            time.sleep(wait)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def _exchange(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes, int]:
        """One request; (status, headers, content, whether it was sent twice, since the kept connection had been closed)."""
        connection = self._kept()
        again = 0
        if connection is not None:
            try:
                return (*self._on(connection, method, target, body, headers), again)
            except (OSError, http.client.HTTPException) as error:
                if "timed out" in str(error):  # socket.timeout is an OSError of its own before 3.10
                    self.close()  # a router that has forgotten one connection has forgotten the others as well
                    raise
                again = 1
        return (*self._on(self._connect(), method, target, body, headers), again)

    def _on(
        self, connection: http.client.HTTPConnection, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        try:
            connection.request(method, target, body or None, dict(headers))
            response = connection.getresponse()
            content = response.read()
            if response.status < 300 and response.length is None and not response.chunked:
                raise http.client.IncompleteRead(content)  # http.client takes it for whole where it was cut in its headers
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return response.status, {name.lower(): value for name, value in response.getheaders()}, content

    def _kept(self) -> http.client.HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _connect(self) -> http.client.HTTPConnection:
        host, port = (self._proxy.hostname or "", self._proxy.port or 80) if self._proxy else (self._host, self._port)
        connection: http.client.HTTPConnection
        if self._secure:
            self._context = self._context or ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout)
        if self._proxy:
            connection.set_tunnel(self._host, self._port, _proxy_headers(self._proxy))
        return connection

    def refusal(self, method: str, path: str, status: int, code: str, headers: Mapping[str, str]) -> ControlError:
        """Describe an unexpected answer, without the SAS."""
        what = f"the file share {self.name}"
        if code == "ShareNotFound":
            return ControlError(f"there is no file share {self.name}", errno.ENOENT)
        if code in azure_errors.FULL or status == 507:
            return ControlError(f"{what} is full: delete files there, or raise its quota", errno.ENOSPC)
        if status not in (401, 403):
            return ControlError(f"{what} refuses {method} of {path or 'its root'}: {status} {code}", errno.EIO)
        if not self._sas:
            return ControlError(f"{what} asks for a SAS, and there is none: submit with credentials for it", errno.EACCES)
        said, date = code or azure_errors.NOT_AUTHENTICATED[0], headers.get("date", "")
        if azure_errors.time_trouble(self._sas, date):
            said = "not valid in the specified time frame"
        why = azure_errors.explain(said, "share", f"{self._host}:{self._port}", self._sas, date=date)
        why = why or "look at the account's network rules"
        return ControlError(f"{what} does not let this node in ({code or status}): {why}", errno.EACCES)


def proxy_for(scheme: str, host: str) -> SplitResult | None:
    """The proxy that the node's variables name for a host, as other programs heed them; ControlError if they name none."""
    named = getproxies().get("https", "")
    if scheme != "https" or not named or proxy_bypass(host):
        return None
    try:
        proxy = urlsplit(named if "//" in named else "http://" + named)
        if proxy.hostname and proxy.port != 0:
            return proxy
    except ValueError:
        pass
    raise ControlError("https_proxy of this node names no proxy; write it as http://HOST:PORT")


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _words(error: BaseException, timeout: float) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    if "timed out" in str(error):
        return f"no answer within {timeout:.0f} s"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection was closed without an answer"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"the connection was cut ({type(error).__name__})"


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0
