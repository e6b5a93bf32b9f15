"""Making an authenticated connection to a machine: directly, through a jump host that others share, or a ProxyCommand."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeoutError
from dataclasses import dataclass, field
from typing import IO, Any

import paramiko
from paramiko.common import MSG_CHANNEL_CLOSE

from mlflow_batchai.engines.shell import login, sentences
from mlflow_batchai.engines.shell.known_hosts import Entry
from mlflow_batchai.engines.shell.targets import Target
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
    """paramiko's, but the CLOSE of a channel can be held back until whoever writes to it has stopped.

    paramiko answers the server's CLOSE from a thread of its own. What another thread is just sending may then come behind that
    answer, and OpenSSH ends the whole connection for it ("packet referred to nonexistent channel"). The server doesn't give a
    channel's number to another one before it has our CLOSE.
    """

    def __init__(self, sock: Any) -> None:
        super().__init__(sock)
        self._held: dict[int, paramiko.Message | None] = {}
        self._holding = threading.Lock()

    def _send_user_message(self, data: paramiko.Message) -> None:
        text = data.asbytes()
        if text[0] == MSG_CHANNEL_CLOSE:
            number = int.from_bytes(text[1:5], "big")
            with self._holding:
                if number in self._held:
                    self._held[number] = data
                    return
        super()._send_user_message(data)  # type: ignore[misc]

    def hold(self, channel: paramiko.Channel) -> None:
        with self._holding:
            self._held[channel.remote_chanid] = None

    def let_go(self, channel: paramiko.Channel) -> None:
        with self._holding:
            message = self._held.pop(channel.remote_chanid, None)
        if message is not None and self.is_active():
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
                super()._send_user_message(message)  # type: ignore[misc]


def hold(channel: paramiko.Channel) -> None:
    """From here on the channel isn't closed on the wire before ``let_go``: another thread writes to it."""
    transport = channel.get_transport()
    assert isinstance(transport, _Transport)
    transport.hold(channel)


def let_go(channel: paramiko.Channel) -> None:
    """Nobody writes to the channel any more: send its CLOSE if it is due."""
    transport = channel.get_transport()
    assert isinstance(transport, _Transport)
    transport.let_go(channel)


class Link:
    """One authenticated connection, and what it stands on."""

    def __init__(self, transport: paramiko.Transport, host_key: Entry, under: contextlib.ExitStack) -> None:
        self.transport = transport
        self.host_key = host_key
        self._under = under

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        """Close it, and the jump host's if nobody else uses that."""
        self._under.close()


def open_link(target: Target, noun: str) -> Link:
    """Connect, check the host key, log in: at most the target's timeout for the first two, and again for the login.

    Raises:
        ClusterError: one sentence that says why not.
    """
    with contextlib.ExitStack() as stack:
        until = time.monotonic() + target.timeout
        if target.proxy_command:
            transport = _by_command(target, noun, until, stack)
        else:
            sock = _by_jump(target, noun, stack) if target.jump else _by_tcp(target, noun, until, stack)
            if target.jump:
                # Its host's own connecting has taken time that isn't this machine's.
                until = time.monotonic() + target.timeout
            transport = _greet(sock, target, noun, until, stack)
        host_key = login.check_host_key(transport, target, noun)
        try:
            login.log_in(transport, target, noun)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise sentences.hung_up(target, noun, str(error)) from error
        transport.set_keepalive(int(KEEPALIVE))
        transport.channel_timeout = target.timeout
        under = stack.pop_all()
    return Link(transport, host_key, under)


def _greet(sock: Any, target: Target, noun: str, until: float, stack: contextlib.ExitStack) -> paramiko.Transport:
    """Negotiate the encrypted session."""
    transport = _Transport(sock)
    stack.callback(transport.close)
    left = max(0.1, until - time.monotonic())
    transport.banner_timeout = transport.handshake_timeout = left
    login.prefer_known_types(transport, target, noun)
    done = threading.Event()
    transport.start_client(event=done)
    # A little later than paramiko's own timers, which tell more.
    done.wait(left + 0.2)
    if done.is_set() and transport.is_active():
        return transport
    error = transport.get_exception()
    if time.monotonic() >= until:
        raise sentences.silent(target, noun, target.timeout) from error
    if isinstance(error, paramiko.SSHException) and not str(error).startswith("Error reading SSH protocol banner"):
        raise sentences.incompatible(target, noun, str(error)) from error
    raise sentences.hung_up(target, noun, "") from error


def _by_tcp(target: Target, noun: str, until: float, stack: contextlib.ExitStack) -> socket.socket:
    """A socket to the first of its addresses that answers."""
    try:
        found = _within(until, lambda: socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM))
        for number, (family, kind, protocol, _, address) in enumerate(found):
            sock = socket.socket(family, kind, protocol)
            try:
                # An address that swallows packets must not use up the others' time.
                sock.settimeout(max(0.1, (until - time.monotonic()) / (len(found) - number)))
                sock.connect(address)
                # Without this a command on an open connection takes 49 ms instead of 8.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVE_UP * 1000)
            except OSError:
                sock.close()
                if number == len(found) - 1:
                    raise
                continue
            stack.callback(sock.close)
            return sock
        raise socket.gaierror("no address")
    except (OSError, UnicodeError) as error:
        failed = error if isinstance(error, OSError) else socket.gaierror(str(error))
        raise sentences.not_connected(target, noun, failed, target.timeout) from error


def _within(until: float, call: Callable[[], list[Any]]) -> list[Any]:
    """The call's value; TimeoutError if it takes too long (a resolver can't be told how long it may take)."""
    future: Future[list[Any]] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="resolve").start()
    try:
        return future.result(max(0.1, until - time.monotonic()))
    # An alias of TimeoutError from Python 3.11 on only.
    except FuturesTimeoutError as error:
        raise TimeoutError from error


def _by_command(target: Target, noun: str, until: float, stack: contextlib.ExitStack) -> paramiko.Transport:
    """Through the user's own ProxyCommand, which a shell reads, as ssh does it."""
    assert target.proxy_command
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
        return _greet(ours, target, noun, until, stack)
    except ClusterError as error:
        raise sentences.through_proxy_command(target, noun, _last_line(errors)) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode("utf-8", "backslashreplace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@dataclass(eq=False)
class _Shared:
    """A jump host's link, and how many stand on it."""

    link: Future[Link] = field(default_factory=Future)
    users: int = 0

    @property
    def usable(self) -> bool:
        return not self.link.done() or (self.link.exception() is None and self.link.result().alive)


_LOCK = threading.Lock()
_SHARED: dict[Target, _Shared] = {}


def _by_jump(target: Target, noun: str, stack: contextlib.ExitStack) -> paramiko.Channel:
    """A channel from its jump host, whose connection all who go through it share."""
    assert target.jump
    try:
        transport = _lease(target.jump, stack).transport
    except ClusterError as error:
        raise sentences.through_jump(target, noun, error) from error
    try:
        channel = transport.open_channel("direct-tcpip", (target.host, target.port), ("127.0.0.1", 0), timeout=target.timeout)
    except paramiko.ChannelException as error:
        raise sentences.not_forwarded(target, noun, target.jump, error.code, error.text) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        # The jump host itself may be fine, and others stand on it: its connection is left alone.
        raise sentences.not_forwarded(target, noun, target.jump, 0, f"no answer within {target.timeout:g} s") from error
    # The connection inside is written to by its own threads.
    hold(channel)
    stack.callback(let_go, channel)
    stack.callback(channel.close)
    return channel


def _lease(jump: Target, stack: contextlib.ExitStack) -> Link:
    """The jump host's link, for as long as the stack lasts; the first to ask opens it, and all who wait share its failure."""
    with _LOCK:
        shared = _SHARED.get(jump)
        first = shared is None or not shared.usable
        if shared is None or first:
            shared = _SHARED[jump] = _Shared()
        shared.users += 1
    stack.callback(_release, jump, shared)
    if first:
        try:
            shared.link.set_result(open_link(jump, "jump host"))
        except BaseException as error:
            shared.link.set_exception(error)
    return shared.link.result()


def _release(jump: Target, shared: _Shared) -> None:
    with _LOCK:
        shared.users -= 1
        if shared.users:
            return
        if _SHARED.get(jump) is shared:
            del _SHARED[jump]
    if shared.link.exception() is None:
        shared.link.result().close()
