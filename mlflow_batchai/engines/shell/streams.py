"""A remote command that goes on, spoken to line by line."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlflow_batchai.engines.shell.errors import ConnectionLostError
from mlflow_batchai.errors import ClusterError

if TYPE_CHECKING:
    import paramiko

# Lines of standard error that are kept.
KEPT = 20
# Bytes of one such line that are kept.
LONGEST = 2000


def broken(channel: paramiko.Channel) -> bool:
    """Whether a command's channel ended because its connection did; one that a signal ended has no exit code either."""
    return channel.exit_status < 0 and (not channel.eof_received or dead(channel))


def dead(channel: paramiko.Channel) -> bool:
    """Whether a channel's connection has ended, asked after the channel failed."""
    transport = channel.get_transport()
    # A dying connection closes its channels a moment before it calls itself dead.
    transport.join(0.2)
    return not transport.is_active()


class Stream:
    """A running remote command; one thread at a time speaks to it.

    Its standard error is read all the time and its last lines are kept, so that it can't block on it.
    """

    def __init__(self, channel: paramiko.Channel, label: str, command: str, release: Callable[[], None]) -> None:
        """``release`` gives the channel back, when nobody writes to it any more."""
        self._channel = channel
        self._release = release
        self._label = label
        self._command = command
        self._lock = threading.RLock()
        self._rest = b""
        self._errors: deque[str] = deque(maxlen=KEPT)
        self._drain = threading.Thread(target=self._read_errors, daemon=True, name=f"stderr of {label}")
        self._drain.start()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, line: bytes, timeout: float) -> bytes:
        """Write a line and return the next line of its standard output, without the line's end.

        An answer that doesn't come in time closes the stream: else the next question would get it.

        Raises:
            ConnectionLostError: the command has ended or the connection is gone; the last line of its standard error is told.
            ClusterError: no answer within ``timeout`` seconds.
        """
        with self._lock:
            try:
                self._channel.settimeout(timeout)
                self._channel.sendall(line.removesuffix(b"\n") + b"\n")
            except TimeoutError as error:
                self.close()
                raise self._late(timeout) from error
            except OSError as error:
                raise self._ended() from error
            try:
                return self._next_line(timeout)
            except ConnectionLostError:
                raise
            except ClusterError:
                self.close()
                raise

    def read_line(self, timeout: float) -> bytes:
        """The next line of its standard output, without the line's end.

        Raises:
            ConnectionLostError: as for ``ask``.
            ClusterError: none within ``timeout`` seconds; it may still come.
        """
        with self._lock:
            return self._next_line(timeout)

    def close(self) -> None:
        """Close its standard input and stop listening; what the command makes of that is its own affair."""
        # Wakes whoever waits for an answer.
        self._channel.close()
        with self._lock:
            self._release()

    @property
    def last_error(self) -> str:
        """The last line of its standard error, or nothing."""
        return self._errors[-1] if self._errors else ""

    def _next_line(self, timeout: float) -> bytes:
        until = time.monotonic() + timeout
        parts = [self._rest]
        try:
            while b"\n" not in parts[-1]:
                self._channel.settimeout(max(0.001, until - time.monotonic()))
                data = self._channel.recv(65536)
                if not data:
                    raise self._ended()
                parts.append(data)
        except TimeoutError as error:
            self._rest = b"".join(parts)
            raise self._late(timeout) from error
        finally:
            # The reader of standard error has no deadline.
            self._channel.settimeout(None)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _late(self, timeout: float) -> ClusterError:
        return ClusterError(
            f"{self._label}: {self._command} did not answer within {timeout:g} s; check that the machine is up and not "
            "overloaded"
        )

    def _ended(self) -> ConnectionLostError:
        """Why nothing more comes."""
        # The exit code comes right behind the end of the output.
        self._channel.status_event.wait(1)
        code = self._channel.exit_status
        self._drain.join(1)
        last = f": {self._errors[-1]}" if self._errors else ""
        self.close()
        if code >= 0:
            return ConnectionLostError(f"{self._label}: {self._command} has ended with exit code {code}{last}")
        if not broken(self._channel):
            return ConnectionLostError(f"{self._label}: {self._command} was ended{last}")
        return ConnectionLostError(
            f"{self._label}: the connection was lost while {self._command} ran{last}; check that the machine is up"
        )

    def _read_errors(self) -> None:
        rest = b""
        while True:
            try:
                data = self._channel.recv_stderr(65536)
            except TimeoutError:
                # A question's deadline, which the channel's other reader gets too.
                continue
            *lines, rest = (rest + (data or b"\n")).split(b"\n")
            rest = rest[-LONGEST:]
            texts = (line[-LONGEST:].decode("utf-8", "backslashreplace").strip() for line in lines)
            self._errors.extend(text for text in texts if text)
            if not data:
                return
