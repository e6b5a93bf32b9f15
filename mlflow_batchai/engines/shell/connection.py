"""One kept-open connection to a machine: commands, files, and line-by-line conversations.

paramiko is imported when the first connection is opened.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FuturesTimeoutError
from typing import TYPE_CHECKING, NamedTuple

from mlflow_batchai.engines.parallel import at_once, in_background
from mlflow_batchai.engines.shell.target import Target
from mlflow_batchai.errors import ClusterError, ConnectionLostError

if TYPE_CHECKING:
    import paramiko

    from mlflow_batchai.engines.shell.transport import Link

# Bytes per second at which a file is sent at least.
SLOWEST = 20_000
# Seconds without output after which a command that has its exit code is done: more than a packet or two that was lost takes.
SILENCE = 3.0
# Bytes of standard input sent at a time.
PIECE = 1 << 16
# Bytes of a command's standard error that are kept.
KEPT_ERRORS = 8000
# Writes a file whole under its name, or not at all; its words: folder, temporary name, name, size, mode.
_PUT = (
    'umask 077; mkdir -p -- "$1" && cat > "$2" && chmod "$5" "$2" && [ "$(wc -c < "$2")" -eq "$4" ] && mv -f -- "$2" "$3"'
    ' || { rm -f -- "$2"; exit 1; }'
)


class Result(NamedTuple):
    code: int
    out: str
    err: str


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

    def open(self) -> str:
        """Connect and log in, if it isn't open; takes at most three times the target's timeout (jump hosts have their own).

        Returns:
            The key that the node has shown, and where it is known from: ``ED25519 SHA256:... (FILE, line 3)``.

        Raises:
            HostKeyError: the host key is unknown, another one, or revoked.
            LoginError: the node doesn't let us in, or a key can't be used.
            ClusterError: the node can't be reached.
        """
        return str(self._ready()[0].host_key)

    def close(self) -> None:
        """Close it; commands that run on the node go on."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Result:
        """Run a command to its end.

        What it leaves running may hold its output open: three seconds without any after its exit code are the end, too.

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
            errors = in_background(functools.partial(_read_all, channel, channel.recv_stderr, until))
            sent = in_background(functools.partial(_send_all, channel, stdin, until))
            try:
                output = _read_all(channel, channel.recv, until)
                if not channel.status_event.wait(_left(until)):
                    raise TimeoutError
                error_output = errors.result(_left(until))
            # Two classes before Python 3.11.
            except (TimeoutError, FuturesTimeoutError) as error:
                raise ClusterError(
                    f"{self.target.label}: {argv[0]} took longer than {timeout:g} s; check that the machine is not overloaded"
                ) from error
            finally:
                # Wakes the writer, if the command has left it something to write.
                channel.close()
                with contextlib.suppress(FuturesTimeoutError):
                    sent.exception(1)
            if _broken(channel):
                raise self._lost(f"while {argv[0]} ran")
        return Result(channel.exit_status, output, error_output)

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file on the node: whole under its name, or not at all; missing folders are made, for this user only.

        Args:
            path: absolute, or below the login's home folder.

        Raises:
            ConnectionLostError: the connection broke under way; the file is there or not.
            ClusterError: the node can't be reached or refuses the file.
        """
        folder, name = posixpath.split(path)
        temporary = posixpath.join(folder, f".{name}.{secrets.token_hex(4)}.part")
        words = ["sh", "-c", _PUT, "sh", folder or ".", temporary, path, str(len(data)), f"{mode:o}"]
        done = self.run(words, data, timeout=60 + len(data) / SLOWEST)
        if done.code:
            said = (done.err.strip() or f"the command ended with exit code {done.code}").splitlines()[-1]
            raise ClusterError(
                f"{self.target.label}: {path} can't be written: {said}; check that {self.target.user} may write there and that "
                "the disk has room"
            )

    def stream(self, argv: Sequence[str]) -> Stream:
        """Start a command that is spoken to line by line. Raises ClusterError: the node can't be reached."""
        # Closed by the stream.
        stack = contextlib.ExitStack()
        channel = stack.enter_context(self._executing(argv))
        return Stream(channel, self.target.label, argv[0], stack.close)

    def _ready(self) -> tuple[Link, bool]:
        """An open link, and whether it was opened just now."""
        from mlflow_batchai.engines.shell import transport

        with self._lock:
            if self._link is not None and self._link.alive:
                return self._link, False
            self.close()
            self._link = transport.open_link(self.target)
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
                    f"{self.target.label} refused one more session on this connection ({error.text}); raise MaxSessions in its "
                    "sshd_config"
                ) from error
            except (paramiko.SSHException, EOFError, OSError) as error:
                link.close()
                if new:
                    raise self._lost("right after the login") from error

    @contextlib.contextmanager
    def _executing(self, argv: Sequence[str]) -> Iterator[paramiko.Channel]:
        """The channel of a command, closed at the end; threads that write to it must have stopped then."""
        import paramiko

        from mlflow_batchai.engines.shell import transport

        channel = self._session()
        with transport.closing(channel):

            def give_up() -> None:
                channel.get_transport().close()
                # A connection that ended just before paramiko began to wait has woken nobody.
                channel.event.set()

            # paramiko would wait for the answer for ever.
            timer = threading.Timer(self.target.timeout, give_up)
            timer.daemon = True
            timer.start()
            try:
                channel.exec_command(shlex.join(argv))
            except (paramiko.SSHException, EOFError, OSError) as error:
                raise self._lost(f"while {argv[0]} was started") from error
            finally:
                timer.cancel()
            yield channel

    def _lost(self, when: str) -> ConnectionLostError:
        return ConnectionLostError(
            f"{self.target.label}: the connection was lost {when}; check that the machine is up, then try again"
        )


class Stream:
    """A running remote command; one thread at a time speaks to it.

    Its standard error is read all the time, so that it can't block on it.
    """

    def __init__(self, channel: paramiko.Channel, label: str, command: str, release: Callable[[], None]) -> None:
        """``release`` gives the channel back, when nobody writes to it any more."""
        self._channel = channel
        self._release = release
        self._label = label
        self._command = command
        self._lock = threading.RLock()
        self._lines = channel.makefile("rb")
        self._errors = b""
        self._drained = in_background(self._read_errors)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, line: bytes, timeout: float) -> bytes:
        """Write a line and return the next line of its standard output; raises as ``read_line``."""
        with self._lock:
            try:
                self._channel.settimeout(timeout)
                self._channel.sendall(line.removesuffix(b"\n") + b"\n")
            except TimeoutError as error:
                raise self._late(timeout) from error
            except OSError as error:
                raise self._ended() from error
            return self.read_line(timeout)

    def read_line(self, timeout: float) -> bytes:
        """The next line of its standard output, without the line's end.

        Raises:
            ConnectionLostError: the command has ended or the connection is gone; the last line of its standard error is told.
            ClusterError: nothing came within ``timeout`` seconds; the stream is closed then: the answer must not be
                taken for that to another question.
        """
        with self._lock:
            try:
                self._channel.settimeout(timeout)
                line: bytes = self._lines.readline()
            except TimeoutError as error:
                raise self._late(timeout) from error
            except OSError as error:
                raise self._ended() from error
            if not line.endswith(b"\n"):
                raise self._ended()
            return line[:-1]

    def close(self) -> None:
        """Close its standard input and stop listening; what the command makes of that is its own affair."""
        # Wakes whoever waits for an answer.
        self._channel.close()
        with self._lock:
            self._release()

    @property
    def last_error(self) -> str:
        lines = self._errors.decode("utf-8", "backslashreplace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _late(self, timeout: float) -> ClusterError:
        self.close()
        return ClusterError(
            f"{self._label}: {self._command} did not answer within {timeout:g} s; check that the machine is up and not "
            "overloaded"
        )

    def _ended(self) -> ConnectionLostError:
        # The exit code comes right behind the end of the output.
        self._channel.status_event.wait(1)
        code = self._channel.exit_status
        with contextlib.suppress(FuturesTimeoutError):
            self._drained.exception(1)
        last = f": {self.last_error}" if self.last_error else ""
        self.close()
        if code >= 0:
            return ConnectionLostError(f"{self._label}: {self._command} has ended with exit code {code}{last}")
        if not _broken(self._channel):
            return ConnectionLostError(f"{self._label}: {self._command} was ended{last}")
        return ConnectionLostError(
            f"{self._label}: the connection was lost while {self._command} ran{last}; check that the machine is up"
        )

    def _read_errors(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(65536)
            except TimeoutError:
                # A question's deadline, which the channel's other reader gets too.
                continue
            if not data:
                return
            self._errors = (self._errors + data)[-KEPT_ERRORS:]


def _broken(channel: paramiko.Channel) -> bool:
    """Whether a command's channel ended because its connection did; one that a signal ended has no exit code either.

    The exit code may come before the last of the output.
    """
    coded = channel.exit_status >= 0
    if coded and channel.eof_received:
        return False
    transport = channel.get_transport()
    # A dying connection closes its channels a moment before it calls itself dead.
    transport.join(0.2)
    return not ((coded or channel.eof_received) and transport.is_active())


def _left(until: float) -> float:
    """Seconds to a moment, never 0 (which would mean: don't wait at all)."""
    return max(0.001, until - time.monotonic())


def _read_all(channel: paramiko.Channel, receive: Callable[[int], bytes], until: float) -> str:
    """All that comes, as text: to the end, or until the command has its exit code and then nothing comes for a while.

    Raises:
        TimeoutError: neither in time.
    """
    parts: list[bytes] = []
    while True:
        ended = channel.status_event.is_set()
        channel.settimeout(min(SILENCE, _left(until)))
        try:
            parts.append(receive(65536))
            done = not parts[-1]
        except TimeoutError:
            if time.monotonic() >= until and not ended:
                raise
            done = ended
        if done:
            return b"".join(parts).decode("utf-8", "backslashreplace")


def _send_all(channel: paramiko.Channel, data: bytes, until: float) -> None:
    # A command that ends without reading its input is no error.
    with contextlib.suppress(OSError):
        sent = 0
        while sent < len(data):
            # The node may take nothing for a while (a slow link, a busy machine), and readers have set a short timeout.
            with contextlib.suppress(TimeoutError):
                sent += channel.send(data[sent : sent + PIECE])
            if channel.closed or time.monotonic() >= until:
                return
        channel.shutdown_write()


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
