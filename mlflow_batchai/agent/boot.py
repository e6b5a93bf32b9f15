"""First program on a node over SSH, passed to its Python as text: store the archive where no other user can change it.

    python3 -I -S -c TEXT ROOT NAME SHA256 VERB...

The node's folder may lie in one that all can write (/var/tmp), and whoever was there first could have put a program of his own
where our archive should be. Any Python 3 can read this, to say that it is too old.
"""

import errno
import grp
import hashlib
import os
import pwd
import stat
import sys

# As many as the kernel follows.
MOST_LINKS = 40


class FolderError(Exception):
    """A folder can't be used; the message is a sentence without its remedy."""


def main() -> None:
    """Check the folder and the archive, then run it."""
    _check_python()
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


def in_slurm(data: bytes, root: str, *arguments: str) -> None:
    """Run the agent as a task of a Slurm step, in a folder below ``root`` that only this job has on this node.

    Args:
        data: the archive, checked.
        arguments: the agent's; none: it answers verbs.
    """
    _check_python()
    number = os.environ["SLURM_NODEID"]
    try:
        own = os.path.join(own_folder(os.path.expanduser(root)), os.environ["SLURM_JOB_ID"], number)
        archive = os.path.join(own_folder(own), "agent.pyz")
        with open(archive, "wb") as file:
            file.write(data)
    except (FolderError, OSError) as error:
        sys.exit(str(error))
    # Slurm sets it where it gave the job GPUs; others of the node are not ours, even if nothing hides them.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    words = ["--granted", "--node=" + number, "--name=" + os.environ.get("SLURMD_NODENAME", ""), "--root=" + own]
    verb = ["agent", *arguments, *words] if arguments else ["serve"]
    os.execv(sys.executable, [sys.executable, "-I", "-S", archive, *verb])


def _check_python() -> None:
    if sys.version_info < (3, 9):
        sys.exit("%s is Python %s; install 3.9 or newer" % (sys.executable, sys.version.split()[0]))


def own_folder(path: str) -> str:
    """A folder that this user alone can write, nor put another in its place; made if it isn't there.

    Raises:
        FolderError: it belongs to someone else, or lies where others could move it away, or can't be made.
    """
    try:
        status = walk(path, make=True)
        if not stat.S_ISDIR(status.st_mode):
            raise FolderError("%s is not a folder" % path)
        if status.st_uid != os.geteuid():
            raise FolderError("%s belongs to another user" % path)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.chmod(path, stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    except OSError as error:
        raise FolderError("%s can't be made: %s" % (path, error.strerror)) from None
    return path


def walk(path: str, make: bool = False) -> os.stat_result:
    """Status of a path; refuse it if other users than this one and root can change a folder or link on the way.

    Args:
        make: whether folders that aren't there are made, the last one for this user alone.

    Raises:
        FolderError: another user could have put something else there.
        OSError: there is no such thing, or it can't be made.
    """
    names = os.path.abspath(path).split(os.sep)[:0:-1]
    folder, status, links = os.sep, os.stat(os.sep), 0
    while True:
        while names and names[-1] in ("", "."):
            names.pop()
        if not names:
            return status
        if stat.S_ISDIR(status.st_mode):
            _refuse_others(path, folder, status)
        name = names.pop()
        if name == os.pardir:  # of a link's target
            folder = os.path.dirname(folder)
            status = os.stat(folder)
            continue
        inside, below = status, os.path.join(folder, name)
        try:
            status = os.lstat(below)
        except FileNotFoundError:
            if not make:
                raise
            try:
                os.mkdir(below, 0o755 if names else 0o700)
            except FileExistsError:  # since a moment ago
                pass
            status = os.lstat(below)
        shared = inside.st_mode & stat.S_ISVTX or stat.S_ISLNK(status.st_mode)
        if shared and not _is_root_or_us(status.st_uid):
            raise FolderError("%s belongs to another user" % (below if names else path))
        if not stat.S_ISLNK(status.st_mode):
            folder = below
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(below)
        names += target.split(os.sep)[::-1]
        folder = os.sep if target.startswith(os.sep) else folder
        status = os.stat(folder)


def _refuse_others(path: str, folder: str, status: os.stat_result) -> None:
    """Raise unless what lies in a folder stays what it is for all but this user and root."""
    if not _is_root_or_us(status.st_uid):
        raise FolderError("%s lies in %s, which belongs to another user" % (path, folder))
    if others_write(status) and not status.st_mode & stat.S_ISVTX:
        raise FolderError("%s lies in %s, which other users can write" % (path, folder))


def _is_root_or_us(user: int) -> bool:
    return user in (0, os.geteuid()) or user == _unmapped_root()


def _unmapped_root() -> int:
    """Owner that root's files show in a user namespace without root (Apptainer's, say); -1 elsewhere."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as mapped:
            if any(line.split()[0] == "0" for line in mapped):
                return -1
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as other:
            return int(other.read())
    except (OSError, ValueError):
        return -1


def others_write(status: os.stat_result) -> bool:
    """Whether users other than the owner may write a file or folder.

    A group that is one user's alone is no other: Debian and Red Hat give each user one of his own name, and then let new
    folders be writable for it (umask 002).
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid, status.st_uid)


def _is_private(group: int, user: int) -> bool:
    try:
        account, known = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return account.pw_gid == group and known.gr_name == account.pw_name and set(known.gr_mem) <= {account.pw_name}


if __name__ == "__main__":
    main()
