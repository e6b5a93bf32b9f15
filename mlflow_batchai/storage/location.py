"""Parse and build the address of an Azure file share, without secrets in it."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn
from urllib.parse import SplitResult, quote, unquote, urlsplit

from mlflow_batchai.agent.share import is_web_address as is_web_address
from mlflow_batchai.agent.share.base import is_numbered
from mlflow_batchai.errors import ShareError

_HOST = re.compile(r"(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::\d+)?", re.ASCII)
# Newer accounts lie in zones: https://ACCOUNT.z12.file.storage.azure.net
_ZONE = re.compile(r"\.z\d{1,2}$", re.ASCII)
FORM = "https://ACCOUNT.file.core.windows.net/SHARE[/FOLDER]"


class AzureLocation(NamedTuple):
    """A folder of an Azure file share.

    Attributes:
        endpoint: the account's file service, without a slash at its end: ``https://acct.file.core.windows.net``, and for a
            server that is named by its IP address (or localhost) with the account: ``http://127.0.0.1:10004/acct``.
        folder: a path in it, with ``/``; empty for all of it.
    """

    endpoint: str
    account: str
    share: str
    folder: str = ""

    @property
    def url(self) -> str:
        return f"{self.root}/{quote(self.folder)}" if self.folder else self.root

    @property
    def root(self) -> str:
        return f"{self.endpoint}/{self.share}"

    def served_by(self, endpoint: str | None) -> AzureLocation:
        """The same share of a public address where another file service has the account.

        Args:
            endpoint: that service, ``ACCOUNT`` in it standing for the account's name; None: it is where its address says.
        """
        if endpoint is None or self.endpoint != f"https://{self.account}.file.core.windows.net":
            return self
        return self._replace(endpoint=endpoint.replace("ACCOUNT", self.account).rstrip("/"))

    def below(self, path: str) -> AzureLocation:
        """A folder of this one. Raises ShareError for a path that leads out of it."""
        return self._replace(folder="/".join(part for part in (self.folder, *_parts(path, self.url)) if part))


def parse(url: str, account: str | None = None) -> AzureLocation:
    """The location that an address names.

    Args:
        url: https://ACCOUNT.file.core.windows.net/SHARE[/FOLDER], %XX decoded in the folder; the account is the first part of
            the path where the host is an IP address or localhost, and only there http is taken.
        account: the account that it has to be of, if a document names one beside the address.

    Raises:
        ShareError: it is no such address, or holds what doesn't belong there (a SAS, a password); one sentence without it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ShareError(f"a file share's address can't be read; it has the form {FORM}") from None
    host = (parts.hostname or "").lower()
    # What stands after "?" or before "@" may be a secret: no sentence shows it.
    shown = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"
    if "@" in parts.netloc:
        _wrong(shown, "holds a user or password; credentials have a key of their own")
    if parts.query or parts.fragment:
        _wrong(shown, "goes on with '?' or '#'; take that off, and give a SAS as credentials or in AZURE_STORAGE_SAS_TOKEN")
    numbered = is_numbered(host)
    if parts.scheme != "https" and not (parts.scheme == "http" and numbered):
        _wrong(shown, "is not an https address")
    if not _HOST.fullmatch(parts.netloc.lower()):
        _wrong(shown, "has characters that no host's name has")
    found, endpoint, rest = _account(parts, host, numbered, shown)
    if not re.fullmatch(r"[a-z0-9-]+", found):
        _wrong(shown, "names no storage account")
    if account and account.lower() != found:
        _wrong(shown, f"is of the storage account '{found}', not of '{account}'")
    share, _, folder = rest.partition("/")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", share) or len(share) > 63:
        _wrong(shown, "names no file share (small letters, digits and hyphens)")
    return AzureLocation(endpoint, found, share, "/".join(_parts(unquote(folder), shown)))


def account_of(endpoint: str, service: str = "file") -> str | None:
    """The account that an endpoint is of, None if it is no endpoint of one; ``service``: ``file`` or ``blob``."""
    try:
        location = parse(f"{endpoint}/share".replace(f".{service}.", ".file.", 1))
    except ShareError:
        return None
    return location.account if location.endpoint.replace(".file.", f".{service}.", 1) == endpoint else None


def _account(parts: SplitResult, host: str, numbered: bool, shown: str) -> tuple[str, str, str]:
    """(account, endpoint, rest of the path)."""
    path = parts.path.strip("/")
    base = f"{parts.scheme}://{parts.netloc.lower()}"
    if numbered:
        account, _, rest = path.partition("/")
        return account, f"{base}/{account}", rest
    account, found, _ = host.partition(".file.")
    if not found:
        _wrong(shown, f"is not of the form {FORM}")
    return _ZONE.sub("", account), base, path


def _parts(path: str, shown: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts or "." in parts or "\0" in path:
        _wrong(shown, f"can't go on with {path!r}: a path on a share has no '.', '..' or NUL")
    return parts


def _wrong(shown: str, what: str) -> NoReturn:
    raise ShareError(f"file share address {shown} {what}")
