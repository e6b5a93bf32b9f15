"""Asking a mounted rclone how it stands: its remote control over a socket in the mount's own folder."""

import http.client
import json
import os
import socket
from typing import Any, Dict, Optional

SOCKET = "rc"


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket, found by its open folder: an address holds 108 bytes, a job folder's path may have more."""

    def __init__(self, folder: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._folder = folder

    def connect(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self.timeout)
            self.sock.connect("/proc/self/fd/%d/%s" % (folder, SOCKET))
        finally:
            os.close(folder)


class ControlError(Exception):
    """rclone did not do what was asked; the message is what it said."""


def ask(folder: str, command: str, arguments: Optional[Dict[str, Any]] = None, timeout: float = 5.0) -> Dict[str, Any]:
    """One command of rclone's remote control.

    Raises:
        ControlError: rclone says why not.
        OSError: it doesn't listen (yet, or any more), or is too slow.
    """
    connection = _Connection(folder, timeout)
    try:
        body = json.dumps(arguments or {})
        connection.request("POST", "/" + command, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: Dict[str, Any] = json.loads(response.read().decode("utf-8", "replace"))
    except (http.client.HTTPException, ValueError) as error:
        raise OSError("rclone's remote control: %s" % error) from None
    finally:
        connection.close()
    if response.status != 200:
        raise ControlError(str(answer.get("error", answer)))
    return answer
