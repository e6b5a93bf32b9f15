"""Open an authenticated connection to a machine: directly, through a shared jump host, or by a ProxyCommand."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from dataclasses import dataclass, field
from typing import Any

import paramiko
from paramiko.common import MSG_CHANNEL_CLOSE

from mlflow_batchai.engines.parallel import in_background
from mlflow_batchai.engines.shell import host_keys, login
from mlflow_batchai.engines.shell.target import Target
from mlflow_batchai.errors import ClusterError

KEEPALIVE = 15.0
# Seconds until the kernel gives up on a peer that acknowledges nothing: keepalives are sent, so a dead machine is noticed.
GIVE_UP = 45

# paramiko logs tracebacks of what it also raises; whoever wants them sets the level of its logger.
_logger = logging.getLogger("paramiko")
_logger.addHandler(logging.NullHandler())
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.CRITICAL)


class _Transport(paramiko.Transport):
    """paramiko's transport, with two changes in how it sends, and one in which error a failed request raises.

    The CLOSE of a channel can be held back until whoever writes to it has stopped: paramiko answers the server's CLOSE from a
    thread of its own. What another thread is just sending may then come behind that answer, and OpenSSH ends the whole
    connection for it ("packet referred to nonexistent channel"). The server doesn't give a channel's number to another one
    before it has our CLOSE.

    A message that can't be sent ends the connection, which wakes all who wait for answers; paramiko raises EOFError or (after a
    change of keys without an answer) SSHException in the thread that sends, from ``close`` as well.
    """

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self.held: dict[int, paramiko.Message | None] = {}
        self.holding = threading.Lock()

    def get_exception(self) -> Exception | None:
        """Why the last request has failed, or the connection has ended; paramiko takes an EOFError for a refused login.

        A refused channel is told to all who ask: several may have been refused, and paramiko keeps the last reason only.
        """
        refused = isinstance(self.saved_exception, paramiko.ChannelException)
        if refused and self.is_active():
            return self.saved_exception
        error = super().get_exception()
        if error is None or refused:
            return None
        if isinstance(error, EOFError | OSError):
            return ConnectionResetError(str(error))
        return error if isinstance(error, paramiko.SSHException) else paramiko.SSHException(f"{type(error).__name__}: {error}")

    def _send_user_message(self, data: paramiko.Message) -> None:
        text = data.asbytes()
        if text[0] == MSG_CHANNEL_CLOSE:
            number = int.from_bytes(text[1:5], "big")
            with self.holding:
                if number in self.held:
                    self.held[number] = data
                    return
        try:
            super()._send_user_message(data)  # type: ignore[misc]
        except (EOFError, paramiko.SSHException):
            self.close()


@contextlib.contextmanager
def closing(channel: paramiko.Channel) -> Iterator[None]:
    """Close a channel at the end; inside, other threads may write to it: its CLOSE is not sent before."""
    transport = channel.get_transport()
    assert isinstance(transport, _Transport)
    number = channel.remote_chanid
    with transport.holding:
        transport.held[number] = None
    try:
        yield
    finally:
        channel.close()
        with transport.holding:
            message = transport.held.pop(number, None)
        if message is not None and transport.is_active():
            transport._send_user_message(message)


@dataclass
class Link:
    """One authenticated connection, and what it stands on."""

    transport: paramiko.Transport
    host_key: host_keys.KnownKey
    _under: contextlib.ExitStack

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        """Close it, and the jump host's if nobody else uses that."""
        self._under.close()


def open_link(target: Target) -> Link:
    """Connect, check the host key, log in; each takes the target's timeout at most, and jump hosts have their own.

    Raises:
        ClusterError: one sentence that says why not.
    """
    with contextlib.ExitStack() as stack:
        if target.jump:
            transport = _negotiated(_through_jump(target, target.jump, stack), target, stack)
        elif target.proxy_command:
            transport = _through_command(target, stack)
        else:
            transport = _negotiated(_socket(target, stack), target, stack)
        try:
            host_key = host_keys.check(transport, target)
            login.log_in(transport, target)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _hung_up(target, f" ({error})" if str(error) else "") from error
        transport.set_keepalive(int(KEEPALIVE))
        transport.channel_timeout = target.timeout
        return Link(transport, host_key, stack.pop_all())


def _negotiated(sock: Any, target: Target, stack: contextlib.ExitStack) -> paramiko.Transport:
    transport = _Transport(sock)
    stack.callback(transport.close)
    transport.banner_timeout = transport.handshake_timeout = target.timeout
    host_keys.prefer_known(transport, target)
    until = time.monotonic() + target.timeout
    failed: Exception | None = None
    try:
        # A little later than paramiko's own timers, which tell more.
        transport.start_client(timeout=target.timeout + 0.2)
    except (paramiko.SSHException, EOFError, OSError) as error:
        failed = error
    if time.monotonic() >= until:
        raise ClusterError(
            f"{target.label} takes connections but did not answer as an SSH server within {target.timeout:g} s; check that "
            f"port {target.port} is sshd's and that the machine is not overloaded"
        ) from failed
    if isinstance(failed, paramiko.SSHException) and not str(failed).startswith("Error reading SSH protocol banner"):
        raise ClusterError(
            f"{target.label} can't be talked to: {failed}; check that port {target.port} is sshd's and that OpenSSH there is "
            "not older than 7.2"
        ) from failed
    if failed:
        raise _hung_up(target) from failed
    return transport


def _hung_up(target: Target, said: str = "") -> ClusterError:
    return ClusterError(
        f"{target.label} closed the connection before the login{said}; check that port {target.port} is sshd's, and its log "
        "there (MaxStartups, a deny list)"
    )


def _socket(target: Target, stack: contextlib.ExitStack) -> socket.socket:
    """A socket to the first of its addresses that answers; the target's timeout is for all of them, and finding them."""
    until = time.monotonic() + target.timeout
    try:
        # A resolver can't be told how long it may take.
        finding = in_background(lambda: socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
        sock = stack.enter_context(_first(finding.result(target.timeout), until))
        # Without this a command on an open connection takes 49 ms instead of 8.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVE_UP * 1000)
        return sock
    except (OSError, UnicodeError, FuturesTimeoutError) as error:
        raise _not_connected(target, error) from error


def _first(found: Sequence[tuple[Any, ...]], until: float) -> socket.socket:
    """A socket to the first address that answers; each gets its share of the time, as one may swallow packets."""
    trouble: OSError = socket.gaierror("no address")
    for number, (family, kind, protocol, _, address) in enumerate(found):
        try:
            with contextlib.ExitStack() as stack:
                sock = stack.enter_context(socket.socket(family, kind, protocol))
                sock.settimeout(max(0.1, (until - time.monotonic()) / (len(found) - number)))
                sock.connect(address)
                stack.pop_all()
                return sock
        except OSError as error:
            trouble = error
    raise trouble


def _not_connected(target: Target, error: Exception) -> ClusterError:
    code = getattr(error, "errno", None)
    up = f"check that the machine is up and port {target.port} is open"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        what = f": the name {target.host} can't be resolved; correct it, or give it an address with HostName in ~/.ssh/config"
    elif isinstance(error, (TimeoutError, FuturesTimeoutError)) or code == errno.ETIMEDOUT:
        what = f" did not answer within {target.timeout:g} s; {up}"
    elif code == errno.ECONNREFUSED:
        what = f" refused the connection; check that sshd runs there and listens on port {target.port}"
    elif code in (errno.ECONNRESET, errno.EPIPE):
        return _hung_up(target)
    else:
        what = f" can't be reached: {getattr(error, 'strerror', None) or error}; {up}"
    return ClusterError(f"{target.label}{what}")


def _through_command(target: Target, stack: contextlib.ExitStack) -> paramiko.Transport:
    """Through the user's own ProxyCommand, which a shell reads, as ssh does it."""
    errors = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    ours, theirs = socket.socketpair()
    stack.callback(ours.close)
    with theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {target.proxy_command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=errors.fileno(),
            start_new_session=True,
        )
    stack.callback(_end, process)
    try:
        return _negotiated(ours, target, stack)
    except ClusterError as error:
        errors.seek(0)
        lines = errors.read().decode("utf-8", "backslashreplace").split("\n")
        said = next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")
        raise ClusterError(
            f"{target.label} can't be reached through its ProxyCommand{said}; try that command by hand: {target.proxy_command}"
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _through_jump(target: Target, jump: Target, stack: contextlib.ExitStack) -> paramiko.Channel:
    """A channel from its jump host, whose connection is shared by all that go through it."""
    try:
        transport = _shared(jump, stack).transport
    except ClusterError as error:
        raise type(error)(f"{target.label} can't be reached: {error}") from error
    try:
        channel = transport.open_channel("direct-tcpip", (target.host, target.port), ("127.0.0.1", 0), timeout=target.timeout)
    except (paramiko.SSHException, EOFError, OSError) as error:
        # The jump host itself may be fine, and others stand on it: its connection is left alone.
        if not transport.is_active():
            what = "the connection was lost; check that the machine is up, then try again"
        elif isinstance(error, paramiko.ChannelException) and error.code == 1:
            what = "it doesn't forward connections; set AllowTcpForwarding yes in its sshd_config"
        else:
            said = error.text if isinstance(error, paramiko.ChannelException) else f"no answer within {target.timeout:g} s"
            what = f"{said}; check that {target.host} is right as seen from there, is up and has port {target.port} open"
        raise ClusterError(f"{target.label} can't be reached from {jump.label}: {what}") from error
    # The connection inside is written to by its own threads.
    stack.enter_context(closing(channel))
    return channel


@dataclass(eq=False)
class _Jump:
    """The connection to a jump host, and how many stand on it."""

    link: Future[Link] = field(default_factory=Future)
    users: int = 0

    @property
    def usable(self) -> bool:
        return not self.link.done() or (self.link.exception() is None and self.link.result().alive)


_LOCK = threading.Lock()
_JUMPS: dict[Target, _Jump] = {}


def _shared(target: Target, stack: contextlib.ExitStack) -> Link:
    """A jump host's link while the stack lasts; the first caller opens it, and all who wait share its failure."""
    with _LOCK:
        jump = _JUMPS.get(target)
        first = jump is None or not jump.usable
        if jump is None or first:
            jump = _JUMPS[target] = _Jump()
        jump.users += 1
    stack.callback(_leave, target, jump)
    if first:
        try:
            jump.link.set_result(open_link(target))
        except BaseException as error:
            jump.link.set_exception(error)
    return jump.link.result()


def _leave(target: Target, jump: _Jump) -> None:
    with _LOCK:
        jump.users -= 1
        if jump.users:
            return
        if _JUMPS.get(target) is jump:
            del _JUMPS[target]
    if jump.link.exception() is None:
        jump.link.result().close()
