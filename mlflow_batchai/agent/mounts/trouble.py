"""What a node lacks for a kind of volume: asked before anything of a job exists."""

import contextlib
import os
import shutil
import subprocess
from typing import Mapping, Optional

from mlflow_batchai.agent.mounts import tools
from mlflow_batchai.agent.mounts.cifs import RATHER
from mlflow_batchai.agent.mounts.mount import NEEDS_ROOT
from mlflow_batchai.agent.plan import Tool, Volume


def trouble(volume: Volume, python: Optional[str] = None, sent: Optional[Mapping[str, Tool]] = None) -> Optional[str]:
    """Why a volume of the plan can't be mounted on this node, as far as that can be seen at once; None: it may well be.

    Args:
        python: the cluster's training interpreter: an rclone may lie beside it.
        sent: the plan's ``tools``: what nodes are given by the client.
    """
    how = volume.mounted_by
    if how == "rclone":
        return tools.fuse_trouble() or _rclone_trouble(python, sent or {})
    if how == "cifs":
        if not (shutil.which("mount.cifs") or os.path.exists("/sbin/mount.cifs")):
            return "mount.cifs is not installed; install it (Debian: cifs-utils), or %s" % RATHER
        if not _kernel_knows("cifs"):
            return "the kernel there knows no SMB (cifs); %s" % RATHER
        return _root_trouble() and "%s; or %s" % (NEEDS_ROOT, RATHER)
    if how == "nfs":
        if not (shutil.which("mount.nfs") or os.path.exists("/sbin/mount.nfs")):
            return "mount.nfs is not installed; install it (Debian: nfs-common)"
        if not _kernel_knows("nfs"):
            return "the kernel there knows no NFS"
        return _root_trouble()
    if how == "blobfuse2":
        if shutil.which("blobfuse2") is None:
            return "blobfuse2 is not installed; install it, or mount the container by rclone (mount: rclone)"
        return tools.fuse_trouble()
    if how in ("bind", "link") and not os.path.isdir(volume.source):
        return "%s is not a directory; mount the share at it, or correct the path" % volume.source
    return None


def _kernel_knows(kind: str) -> bool:
    """Whether the kernel mounts such file systems: now, or with a module that lies there to be loaded. If in doubt, it may."""
    try:
        with open("/proc/filesystems", encoding="ascii", errors="replace") as file:
            known = any(line.split()[-1:] == [kind] for line in file)
    except OSError:
        return True
    modules = os.path.join("/lib/modules", os.uname().release)
    if known or not os.path.isdir(modules):
        # No modules for it to load: what it knows now is all.
        return known
    for name in ("modules.dep", "modules.builtin"):
        with contextlib.suppress(OSError), open(os.path.join(modules, name), encoding="ascii", errors="replace") as file:
            if any("/%s.ko" % kind in line for line in file):
                return True
    return False


def _rclone_trouble(python: Optional[str], sent: Mapping[str, Tool]) -> Optional[str]:
    if tools.installed_rclone(python) or tools.machine_of(sent):
        return None
    other = sent.get("rclone")
    if other:
        return "%s (the client's own is for %s, the node is %s)" % (tools.NO_RCLONE, other.machine, os.uname().machine)
    return tools.NO_RCLONE


def _root_trouble() -> Optional[str]:
    if os.geteuid() == 0:
        return None
    try:
        done = subprocess.run(
            ["sudo", "-n", "-l", "mount"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return NEEDS_ROOT
    return NEEDS_ROOT if done.returncode else None
