"""Writing a file on a node over SFTP."""

from __future__ import annotations

import contextlib
import posixpath
import secrets
import stat

import paramiko


def write(channel: paramiko.Channel, path: str, data: bytes, mode: int) -> None:
    """Write a file whole: under a temporary name beside it, then renamed over what is there.

    Args:
        channel: a session in which the subsystem sftp has been started; its timeout is the longest silence.
        path: as the server reads it: relative to the home folder unless it begins with ``/``.

    Raises:
        OSError: the server refuses a step, or is silent for too long.
        paramiko.SSHException, EOFError: the connection has ended.
    """
    sftp = paramiko.SFTPClient(channel)
    folder, name = posixpath.split(path)
    temporary = posixpath.join(folder, f".{name}.{secrets.token_hex(4)}.part")
    try:
        file = sftp.open(temporary, "wbx")
    except FileNotFoundError:
        _make_folders(sftp, folder)
        file = sftp.open(temporary, "wbx")
    try:
        with file:
            # Before there is anything to read in it.
            file.chmod(mode)
            # Without waiting for each block's answer; what went wrong is seen at the end.
            file.set_pipelined(True)
            file.write(data)
        size = sftp.stat(temporary).st_size
        if size != len(data):
            raise OSError(f"only {size} of {len(data)} bytes were written")
        sftp.posix_rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            sftp.remove(temporary)
        raise


def _make_folders(sftp: paramiko.SFTPClient, folder: str) -> None:
    if not folder or folder == "/":
        return
    try:
        found = sftp.stat(folder).st_mode
    except FileNotFoundError:
        _make_folders(sftp, posixpath.dirname(folder))
        try:
            sftp.mkdir(folder, 0o700)
        except OSError:
            # Somebody else may have made it meanwhile.
            sftp.stat(folder)
        return
    if found is not None and not stat.S_ISDIR(found):
        raise NotADirectoryError(0, f"{folder} is a file")
