"""Run commands on nodes over SSH: one kept-open connection a node. paramiko is imported when the first is opened."""

from __future__ import annotations

import contextlib
import functools
import posixpath
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mlflow_batchai.engines.shell import sentences
from mlflow_batchai.engines.shell.errors import ConnectionLostError, HostKeyError, LoginError
from mlflow_batchai.engines.shell.local import Result
from mlflow_batchai.engines.shell.streams import Stream, broken, dead
from mlflow_batchai.engines.shell.targets import Target
from mlflow_batchai.engines.shell.together import at_once
from mlflow_batchai.errors import ClusterError

if TYPE_CHECKING:
    import paramiko

    from mlflow_batchai.engines.shell.links import Link

__all__ = ["Connection", "ConnectionLostError", "HostKeyError", "LoginError", "Stream", "open_all"]

# Seconds without any answer while a file is written.
SILENCE = 60.0


class Connection:
    """A node, connected to when first needed and kept so; may be used by several threads.

    Promises:
        1. A command's words reach the node's command as they are: quoted once, no terminal, no environment of ours.
        2. Nothing is sent twice: an operation on a connection that has died connects again (once) before it sends anything;
           one that dies under way raises ConnectionLostError.
        3. The host key is checked, whatever any config says.
        4. Every failure is a ClusterError of one sentence that begins with the node's name and address.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.label = sentences.label(target)
        self._lock = threading.RLock()
        self._link: Link | None = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it is open, as far as can be known without asking the node."""
        link = self._link
        return link is not None and link.alive

    def open(self) -> None:
        """Connect and log in, if it isn't open; takes at most twice the target's timeout (jump hosts have their own).

        Raises:
            HostKeyError: the host key is unknown, another one, or revoked.
            LoginError: the node doesn't let us in, or a key can't be used.
            ClusterError: the node can't be reached.
        """
        self._ready()

    def host_key(self) -> str:
        """The key that it has shown, as ``ED25519 SHA256:... (FILE, line 3)``: opened first if it isn't; raises as ``open``."""
        link, _ = self._ready()
        return sentences.known_host_key(link.host_key)

    def close(self) -> None:
        """Close it; commands that run on the node go on."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Result:
        """Run a command to its end.

        Args:
            stdin: sent to it, then closed; the place for secrets.
            timeout: seconds; a command that takes longer is left alone on the node.

        Returns:
            Exit code (-1: ended by a signal), standard output and error.

        Raises:
            ConnectionLostError: the connection broke while it ran; it may or may not have done its work.
            ClusterError: the node can't be reached, or the command takes too long.
        """
        until = time.monotonic() + timeout
        with self._executing(argv) as channel:
            output: list[bytes] = []
            errors: list[bytes] = []
            channel.settimeout(_left(until))
            reader = threading.Thread(target=_read_all, args=(channel.recv_stderr, errors), daemon=True)
            writer = threading.Thread(target=_send_all, args=(channel, stdin), daemon=True)
            reader.start()
            writer.start()
            try:
                while data := channel.recv(65536):
                    output.append(data)
                    channel.settimeout(_left(until))
                if not channel.status_event.wait(_left(until)):
                    raise TimeoutError
                reader.join(_left(until))
            except TimeoutError as error:
                raise ClusterError(
                    f"{self.label}: {argv[0]} took longer than {timeout:g} s; check that the machine is not overloaded"
                ) from error
            finally:
                # Wakes the writer, if the command has left it something to write.
                channel.close()
                writer.join(1)
            if broken(channel):
                raise self._lost(f"while {argv[0]} ran")
        return Result(channel.exit_status, _text(output), _text(errors))

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file on the node: whole under its name, or not at all; missing folders are made, for this user only.

        Args:
            path: relative to the user's home unless it begins with ``/``.

        Raises:
            ConnectionLostError: the connection broke; the file may or may not be there.
            ClusterError: the node can't be reached, or the file can't be written (a full disk, no permission).
        """
        import paramiko

        from mlflow_batchai.engines.shell import upload

        with contextlib.closing(self._session()) as channel:
            channel.settimeout(SILENCE)
            try:
                with self._answering(channel):
                    channel.invoke_subsystem("sftp")
            except (paramiko.SSHException, EOFError, OSError) as error:
                if dead(channel):
                    raise self._lost("before a file was sent") from error
                raise ClusterError(
                    f"{self.label} takes no files; set Subsystem sftp internal-sftp in its sshd_config"
                ) from error
            try:
                upload.write(channel, path, data, mode)
                return
            except paramiko.SFTPError as error:
                raise ClusterError(
                    f"{self.label}: no file can be sent ({error}): its login prints text, which SFTP can't stand; silence it"
                    " for shells without a terminal (~/.bashrc there), or set Subsystem sftp internal-sftp in its sshd_config"
                ) from error
            except (OSError, paramiko.SSHException, EOFError) as error:
                if dead(channel):
                    raise self._lost(f"while {path} was written") from error
                failed = error
        raise ClusterError(self._not_written(path, len(data), failed)) from failed

    def _not_written(self, path: str, size: int, error: Exception) -> str:
        """Why a file could not be written, with the free space where it should be."""
        what = f"{self.label}: {path} can't be written"
        if isinstance(error, TimeoutError):
            return f"{what}: no answer within {SILENCE:g} s; check that its disk answers"
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        folder = posixpath.dirname(path) or "."
        free = None
        with contextlib.suppress(ClusterError):
            # The column before the percentage; the names around them may hold blanks.
            shown = re.search(r"\s(\d+)\s+\d+%\s", self.run(["df", "-Pk", "--", folder], timeout=self.target.timeout).out)
            free = int(shown[1]) * 1024 if shown else None
        if free is not None and free < size:
            return f"{what}: the disk there is full ({free / 1e6:.1f} MB free, {size / 1e6:.1f} MB needed); free some space"
        space = "" if free is None else f"; {free / 1e6:.1f} MB are free there"
        return f"{what}: {reason}{space}; check that {self.target.user} may write there"

    def stream(self, argv: Sequence[str]) -> Stream:
        """Start a command that is spoken to line by line.

        Raises:
            ClusterError: the node can't be reached.
        """
        # Closed by the stream.
        stack = contextlib.ExitStack()
        channel = stack.enter_context(self._executing(argv))
        return Stream(channel, self.label, argv[0], stack.close)

    def _ready(self) -> tuple[Link, bool]:
        """An open link, and whether it was opened just now."""
        from mlflow_batchai.engines.shell import links

        with self._lock:
            if self._link is not None and self._link.alive:
                return self._link, False
            self.close()
            self._link = links.open_link(self.target, "node")
            return self._link, True

    def _session(self) -> paramiko.Channel:
        """A new session channel; nothing has been asked of the node yet, so a dead connection is replaced here."""
        import paramiko

        while True:
            link, new = self._ready()
            try:
                return link.transport.open_session(timeout=self.target.timeout)
            except paramiko.ChannelException as error:
                raise ClusterError(
                    f"{self.label} refused one more session on this connection ({error.text}); raise MaxSessions in its "
                    "sshd_config"
                ) from error
            except (paramiko.SSHException, EOFError, OSError) as error:
                link.close()
                if new:
                    raise self._lost("right after the login") from error

    @contextlib.contextmanager
    def _executing(self, argv: Sequence[str]) -> Iterator[paramiko.Channel]:
        """The channel of a command, closed at the end; who writes to it from another thread must have stopped then."""
        import paramiko

        from mlflow_batchai.engines.shell import links

        channel = self._session()
        links.hold(channel)
        try:
            try:
                with self._answering(channel):
                    channel.exec_command(shlex.join(argv))
            except (paramiko.SSHException, EOFError, OSError) as error:
                raise self._lost(f"while {argv[0]} was started") from error
            yield channel
        finally:
            channel.close()
            links.let_go(channel)

    @contextlib.contextmanager
    def _answering(self, channel: paramiko.Channel) -> Iterator[None]:
        """Inside, a request is answered within the target's timeout, or the connection closed: paramiko would wait for ever."""
        transport = channel.get_transport()
        timer = threading.Timer(self.target.timeout, transport.close)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _lost(self, when: str) -> ConnectionLostError:
        return ConnectionLostError(
            f"{self.label}: the connection was lost {when}; check that the machine is up, then try again"
        )


def _left(until: float) -> float:
    """Seconds to a moment, never 0 (which would mean: don't wait at all)."""
    return max(0.001, until - time.monotonic())


def _read_all(receive: Callable[[int], bytes], into: list[bytes]) -> None:
    # The reader of the output finds out that there is no more time.
    with contextlib.suppress(TimeoutError):
        while data := receive(65536):
            into.append(data)


def _send_all(channel: paramiko.Channel, data: bytes) -> None:
    # A command that ends without reading its input is no error.
    with contextlib.suppress(OSError):
        channel.sendall(data)
        channel.shutdown_write()


def _text(parts: list[bytes]) -> str:
    return b"".join(parts).decode("utf-8", "backslashreplace")


def open_all(connections: Iterable[Connection]) -> dict[str, ClusterError | None]:
    """Open several connections at once, up to 64 at a time.

    Returns:
        For each target's name, why it could not be opened, or None.
    """
    wanted = list(connections)

    def attempt(connection: Connection) -> ClusterError | None:
        try:
            connection.open()
        except ClusterError as error:
            return error
        return None

    errors = at_once([functools.partial(attempt, connection) for connection in wanted])
    return dict(zip((connection.target.name for connection in wanted), errors, strict=True))
