"""What runs first on a node over SSH, given to its Python as text; it sees to it that nobody else can change what runs next.

    python3 -I -S -c TEXT ROOT NAME SHA256 VERB...

The node's folder may lie in one that all can write (/var/tmp), and whoever was there first could have put a program of his own
where our archive should be. Any Python 3 can read this, to say that it is too old.
"""

import hashlib
import os
import stat
import sys


class FolderError(Exception):
    """A folder can't be used; the message is a sentence without its remedy."""


def main() -> None:
    """Check the folder and the archive, then run it."""
    if sys.version_info < (3, 8):  # noqa: UP036 (nodes have the Python that they have)
        sys.exit("%s is Python %s; install 3.8 or newer" % (sys.executable, sys.version.split()[0]))
    root, name, sha256 = sys.argv[1:4]
    try:
        folder = own_folder(os.path.join(own_folder(os.path.expanduser(root)), "agents"))
    except FolderError as error:
        sys.exit(str(error))
    archive = os.path.join(folder, name)
    try:
        with open(archive, "rb") as file:
            ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            found = hashlib.sha256(file.read()).hexdigest() if ours else ""
        os.utime(archive)
    except OSError:
        found = ""
    if found != sha256:
        sys.exit("the archive is to be sent to %s" % archive)
    # Not in this process: who looks at the machine's processes shall see what runs, not this text.
    os.execv(sys.executable, [sys.executable, "-I", "-S", archive, *sys.argv[4:]])


def own_folder(path: str) -> str:
    """A folder that this user alone can write, made if it isn't there.

    Raises:
        FolderError: it belongs to someone else, or can't be made.
    """
    try:
        os.makedirs(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise FolderError("%s can't be made: %s" % (path, error.strerror)) from None
    if not os.path.isdir(path):
        raise FolderError("%s is not a folder" % path)
    status = os.stat(path)
    # lstat: a link that someone else has put there would lead us where he likes.
    if status.st_uid != os.geteuid() or os.lstat(path).st_uid != os.geteuid():
        raise FolderError("%s belongs to another user" % path)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.chmod(path, stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    return path


if __name__ == "__main__":
    main()
