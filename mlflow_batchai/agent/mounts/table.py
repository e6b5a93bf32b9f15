"""What is mounted on this node, as the kernel says it."""

import os
import re
from typing import List, NamedTuple, Optional

_OCTAL = re.compile(r"\\([0-7]{3})")


class Mounted(NamedTuple):
    """One mount.

    Attributes:
        point: absolute path of the mount point, links resolved.
        kind: the file system's type (``fuse.rclone``, ``cifs``, ``ext4``).
        source: what is mounted, in the words of who mounted it.
    """

    point: str
    kind: str
    source: str


def unescape(text: str) -> str:
    """A path of mountinfo as it is: blanks, tabs, newlines and backslashes stand there as octal numbers (proc(5))."""
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)


def parse(text: str) -> List[Mounted]:
    """The mounts that the text of a mountinfo file tells of, in the order in which they were made."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) > 4 and len(right) > 1:
            found.append(Mounted(unescape(left[4]), right[0], unescape(right[1])))
    return found


def mounts() -> List[Mounted]:
    """All mounts that this process sees; none where the kernel has no such table.

    Raises:
        OSError: it can't be read just now (no descriptor is free). That nothing is mounted must not be believed then.
    """
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return parse(file.read())
    except FileNotFoundError:
        return []


def real(path: str) -> str:
    """A path as mountinfo would name it. Its last part is not looked at: it may be a mount whose server is gone."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)


def at(path: str) -> Optional[Mounted]:
    """What is mounted at a path (the last one, if several are stacked), or None."""
    point = real(path)
    return next((mount for mount in reversed(mounts()) if mount.point == point), None)


def below(folder: str) -> List[Mounted]:
    """The mounts at and below a folder, in the order in which they have to be undone."""
    top = real(folder)
    return [mount for mount in reversed(mounts()) if mount.point == top or mount.point.startswith(top.rstrip("/") + "/")]
