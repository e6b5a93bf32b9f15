"""Identity of a node: its own folder, its id, and whether it can use the control share."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from concurrent.futures import Future
from typing import Any, Callable

from mlflow_batchai.agent import boot
from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import agents, locks
from mlflow_batchai.agent.share import open_control
from mlflow_batchai.agent.share.base import ControlError

Answer = dict[str, Any]

# Someone waits for the answer.
SHARE_SECONDS = 8.0
# A share that hangs: longer than requests over a network are tried again.
HANGS_SECONDS = 20.0

OTHER_QUEUE = "it has jobs of a cluster document whose first host is another, and two queues would block each other"


def own_folder(root: str) -> str:
    """The node's own folder as an absolute path, made if it isn't there; nobody else can write it.

    Raises:
        FolderError: it belongs to someone else, or lies where others could move it away, or can't be made.
    """
    return boot.own_folder(os.path.abspath(os.path.expanduser(root)))


def hello(root: str, share: str, identity: str, python: str, sas: str | None = None) -> Answer:
    """Describe the node to a client that is about to send a job.

    Returns:
        What ``place`` tells; ``share``: of ``share_problem``; ``python``: whether there is such a program.
    """
    there = shutil.which(os.path.expanduser(python)) is not None
    return dict(place(root), share=share_problem(share, identity, sas), python=there)


def place(root: str) -> Answer:
    """The part of ``hello`` that is the node's own, for a node whose share may hang.

    Returns:
        ``root`` (absolute), ``id`` (whatever the node is called: who it is), ``place`` (equal for two roots that are one
        folder), ``filesystem``, ``free`` (bytes), ``keeper`` (the id of the node whose queue was used here last, or
        None), ``busy`` (whether a job has the node or waits for it).
    """
    root = own_folder(root)
    status = os.stat(root)
    return {
        "root": root,
        "id": _identity(root),
        "place": f"{proc.boot_id()} {status.st_dev} {status.st_ino}",
        "filesystem": filesystem(root),
        "free": shutil.disk_usage(root).free,
        "keeper": _read(os.path.join(root, "keeper")),
        "busy": bool(agents.living(root)),
    }


class OtherQueueError(Exception):
    """The node's jobs are in another queue; the message is a sentence without the node's name."""


def set_queue_node(root: str, keeper: str) -> None:
    """Write whose queue the jobs of this node are in.

    Raises:
        OtherQueueError: a job that is in another one has the node, or waits for it: the two would wait for each other.
    """
    path = os.path.join(root, "keeper")
    with locks.held(path + ".lock"):
        known = _read(path)
        if known == keeper:
            return
        if known and agents.living(root):
            raise OtherQueueError(OTHER_QUEUE)
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(keeper)
        os.replace(path + ".new", path)


def identity(root: str) -> str | None:
    return _read(os.path.join(os.path.expanduser(root), "id"))


def _identity(root: str) -> str:
    """The node's id, made once; of two clients that ask at once both get the same."""
    path = os.path.join(root, "id")
    known = _read(path)
    if known:
        return known
    mine = f"{path}.{uuid.uuid4().hex}"
    with open(mine, "w", encoding="ascii") as file:
        file.write(uuid.uuid4().hex)
    with contextlib.suppress(FileExistsError):
        os.link(mine, path)
    os.unlink(mine)
    return _read(path) or ""


def _read(path: str) -> str | None:
    return proc.kernel_text(path).strip() or None


def share_problem(share: str, identity: str, sas: str | None = None) -> str | None:
    """Why a path on this node, or an address, can't be used as the control share; None: it can.

    Returns:
        ``missing``, ``another``, ``read-only``, ``hangs``, or ``unreachable: `` and a sentence.
    """
    found: Future[str | None] = Future()

    def look() -> None:
        try:
            with contextlib.closing(open_control(share, sas, SHARE_SECONDS)) as control:
                found.set_result(control.trouble(identity))
        except ControlError as error:
            found.set_result(f"unreachable: {error}")
        except Exception as error:  # for who waits
            found.set_exception(error)

    looking = threading.Thread(target=look, name="share", daemon=True)
    looking.start()
    looking.join(HANGS_SECONDS)
    return found.result() if found.done() else "hangs"


def filesystem(path: str) -> str:
    """The type of the file system that a path lies on (``ext4``, ``nfs4``, ...), empty if unknown."""
    real = os.path.realpath(path)
    around = [mount for mount in mountpoints.mounts() if real == mount.point or real.startswith(mount.point.rstrip("/") + "/")]
    # Of several at one point the last one is seen.
    return max(reversed(around), key=lambda mount: len(mount.point)).kind if around else ""


VERBS: dict[str, Callable[..., Answer]] = {"hello": hello, "place": place}
