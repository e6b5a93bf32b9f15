"""A file share by SMB 3.1.1: the kernel's own client, with the account key in a file that is there only while it mounts.

Options: Microsoft's documentation "Mount SMB Azure file shares on Linux". ``closetimeo`` is left to the kernel's default (1 s):
older kernels refuse an option that they don't know.
"""

import contextlib
import os
from typing import List
from urllib.parse import urlsplit

from mlflow_batchai.agent.mounts.mount import NEEDS_ROOT, CommandMount, as_root, needs_root
from mlflow_batchai.agent.outcome import Failure

RATHER = "mount: rclone goes over port 443 and needs no root"


def write_credentials(path: str, account: str, key: str) -> None:
    """A credentials file of mount.cifs (and smbclient -A), for its owner only.

    Raises:
        OSError: it is there already, or can't be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write("username=%s\npassword=%s\n" % (account, key))


class CifsMount(CommandMount):
    """``mount -t cifs``; a SAS can't do SMB, an account key is needed."""

    @property
    def _credentials_file(self) -> str:
        return os.path.join(self.folder, "smb")

    def command(self) -> List[str]:
        host = urlsplit(self.volume.endpoint).hostname or ""
        source = "//%s/%s" % (host, "/".join(part for part in (self.volume.container, self.volume.folder.strip("/")) if part))
        options = [
            "vers=3.1.1",
            "credentials=" + self._credentials_file,
            "serverino",
            "nosharesock",
            "mfsymlinks",
            "nobrl",
            "actimeo=30",
            "file_mode=" + (self.volume.file_mode or "0777"),
            "dir_mode=" + (self.volume.directory_mode or "0777"),
            "uid=%d" % os.geteuid(),
            "gid=%d" % os.getegid(),
        ]
        return as_root(["mount", "-t", "cifs", "-o", ",".join(options), "--", source, self.target])

    def start(self) -> None:
        key = self.credentials.get("key", "")
        if not key:
            raise self.failure(
                "SMB needs the account key, and a SAS can't do it: give the key, or mount it by rclone (mount: rclone)"
            )
        if "," in self.folder:
            raise self.failure("mount.cifs can't read a credentials file in %s: its path has a comma" % self.place.layout.root)
        self.make_folder()
        self._forget()
        write_credentials(self._credentials_file, self.volume.account, key)
        try:
            super().start()
        except BaseException:
            self._forget()
            raise

    def poll(self) -> bool:
        try:
            there = super().poll()
        except Failure:
            self._forget()
            raise
        if there:
            self._forget()
        return there

    def undo(self) -> str:
        self._forget()
        return super().undo()

    def _forget(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._credentials_file)

    def explain(self, said: str) -> str:
        host = urlsplit(self.volume.endpoint).hostname
        if needs_root(said):
            return "%s; or %s" % (NEEDS_ROOT, RATHER)
        if "bad option" in said or "need a /sbin/mount" in said or "helper program" in said:
            return "mount.cifs is not installed there; install it (Debian: cifs-utils), or %s" % RATHER
        if "error(19)" in said or "not supported by the system" in said or "unknown filesystem type" in said:
            return "the kernel there knows no SMB; %s" % RATHER
        if "error(13)" in said or "Permission denied" in said:
            return "%s refused the account key (or asks for what this kernel can't do); give the account's own" % host
        if "error(2)" in said or "error(6)" in said:
            return "there is no such share or folder in the account; create it, or correct the address"
        if "error(22)" in said:
            return "the kernel there does not take these options (SMB 3.1.1 needs 4.17 or newer); %s" % RATHER
        if "could not resolve" in said:
            return "the name %s is not known there; correct the account's name, or mend the node's name service" % host
        if any("error(%d)" % number in said for number in (101, 103, 104, 110, 111, 112, 113, 115)):
            return "%s can't be reached on port 445, which many networks close; %s" % (host, RATHER)
        return ""

    def late(self) -> Failure:
        host = urlsplit(self.volume.endpoint).hostname
        why = "%s did not answer on port 445 within %d s, which many networks close; %s" % (host, self.seconds, RATHER)
        return self.failure(why, list(self.task.tail) if self.task else [], self.argv)
