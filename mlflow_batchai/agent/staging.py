"""Prepare a node's folders, code and staged inputs for a job, and remove them afterwards."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping

from mlflow_batchai.agent import permissions
from mlflow_batchai.agent.layout import NodeLayout
from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.plan import CodeFile
from mlflow_batchai.agent.protocol import OBJECTS, TREES, now_ms, object_path
from mlflow_batchai.agent.share.base import ControlShare


class SetupError(Exception):
    """The node can't be made ready; the message is one sentence."""


def disk_error(layout: NodeLayout, error: OSError) -> str:
    node = f"{layout.node_id} ({socket.gethostname()})"
    path = error.filename or layout.root
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{node}: no space is left for {path}; free some there, or name another folder (root in its document)"
    return f"{node} can't use {path}: {error.strerror or error}"


def prepare_folders(layout: NodeLayout) -> list[str]:
    """Fresh folders of this job on the node's own disk; what earlier jobs left is unmounted and wiped, as Batch AI did.

    Returns:
        What could not be wiped, a sentence for each job.
    """
    mountpoints.sweep(layout.root, ours=True)
    jobs = os.path.dirname(layout.job)
    names = os.listdir(jobs) if os.path.isdir(jobs) else []
    left = [remove_job_folder(os.path.join(jobs, name)) for name in names]
    for folder in (layout.job_mounts, layout.temp, layout.inputs, layout.spool, layout.site):
        os.makedirs(folder, exist_ok=True)
    return [sentence for sentence in left if sentence]


def remove_job_folder(folder: str) -> str:
    """Remove a job's folder. Nothing that is linked or mounted there is touched: a mount that will not go stays.

    Returns:
        A sentence on what stays; empty: nothing.
    """
    for mounted in mountpoints.below(folder):
        mountpoints.unmount(mounted.point)
    left = mountpoints.remove_tree(folder)
    return f"{folder} can't be removed ({left})" if left else ""


def main(arguments: list[str]) -> int:
    """``remove FOLDER``: of a job that Slurm ran on this node."""
    (folder,) = arguments
    left = remove_job_folder(folder)
    with contextlib.suppress(OSError):  # another node of the job has its folder there too
        os.rmdir(os.path.dirname(folder))
    sys.stderr.write(f"{left}\n" if left else "")
    return 0


def fetch_code(layout: NodeLayout) -> None:
    """Copy the project's files from the share's objects to the node, each checked against its hash.

    Raises:
        SetupError: an object is missing or not what its name says.
    """
    os.makedirs(layout.code, exist_ok=True)
    files: list[tuple[CodeFile, str]] = []
    for entry in layout.plan.code:
        target = os.path.join(layout.code, *entry.path.split("/"))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if entry.link is not None:
            os.symlink(entry.link, target)
            continue
        files.append((entry, target))
    if layout.control.at_once == 1:
        for entry, target in files:
            _fetch(layout.control, entry, target, layout.umask)
        return
    # Only here: most agents start no thread for it.
    from concurrent import futures

    # Of many small files most of the time is the way to the share and back.
    with futures.ThreadPoolExecutor(layout.control.at_once) as pool:
        for _ in pool.map(lambda file: _fetch(layout.control, file[0], file[1], layout.umask), files):
            pass


def _fetch(control: ControlShare, entry: CodeFile, target: str, umask: int) -> None:
    source = object_path(entry.sha256)
    try:
        found = control.fetch(source, target)
    except FileNotFoundError:
        raise _missing(f"'{entry.path}' of the project", control) from None
    if found != entry.sha256:
        raise _damaged(f"'{entry.path}' of the project", control.where(source), control)
    os.chmod(target, entry.mode & ~umask)


def _missing(what: str, control: ControlShare) -> SetupError:
    # The next submit looks for each object itself if nothing says that all are there.
    forget = "" if control.at_once == 1 else f"delete the folder {TREES} there, and "
    return SetupError(f"{what} is missing on the share ({OBJECTS}): {forget}submit again")


def _damaged(what: str, where: str, control: ControlShare) -> SetupError:
    forget = "" if control.at_once == 1 else f"the folder {TREES} there, and "
    return SetupError(f"{what} is damaged on the share ({where}): delete the object and {forget}submit again")


def link_inputs(layout: NodeLayout) -> None:
    """Put staged parameters under ``$AZ_BATCHAI_JOB_TEMP/inputs/<parameter>/``, as links into the share: no second copy.

    Their size is checked, not their hash: every node would have to read all of them before it may begin.

    Raises:
        SetupError: an object is missing or not as long as what was sent.
    """
    for staged in layout.plan.inputs:
        for entry in staged.files:
            target = os.path.join(layout.inputs, staged.variable, *entry.path.split("/"))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            source = layout.on_mount(object_path(entry.sha256))
            name = f"'{entry.path}' of parameter '{staged.parameter}'"
            try:
                size = os.stat(source).st_size
            except FileNotFoundError:
                raise _missing(name, layout.control) from None
            if size != entry.size:
                raise _damaged(name, f"{source} has {size} bytes instead of {entry.size}", layout.control)
            os.symlink(source, target)


def make_directories(layout: NodeLayout) -> None:
    """Create the output directories and the log folder (idempotent; every node does it).

    Raises:
        OSError: it can't be done, or the control share isn't mounted any more: they would lie below its mount point.
    """
    for path in (*layout.directories().values(), layout.shared_temp):
        if path.startswith((layout.cluster_mounts, layout.job_mounts)):
            root = layout.volume_root(path)
            if root == layout.mounted_share and not os.path.isdir(layout.on_mount(layout.paths.folder)):
                raise layout.control.gone(layout.paths.folder)
            bits = permissions.bits_of(root or "")
            permissions.patiently(lambda path=path, bits=bits: permissions.make_folders(path, bits))  # type: ignore[misc]


def open_up(layout: NodeLayout) -> list[str]:
    """Have whoever may use a share's root use what ranks have left in the job's folders there; why that failed, if it did."""
    written = [path for name, path in sorted(layout.directories().items()) if not name.startswith("AZ_BATCHAI_INPUT_")]
    errors = []
    for path in dict.fromkeys([*written, layout.shared_temp, layout.artifacts]):
        root = layout.volume_root(path)
        if root:
            try:
                permissions.open_up_tree(root, os.path.relpath(path, root).split(os.sep))
            except FileNotFoundError:
                continue
            except OSError as error:
                errors.append(f"what ranks have left in {path} can't be opened up to other users: {error.strerror}")
    return errors


def write_run(layout: NodeLayout, facts: str, distribution: Mapping[str, str]) -> None:
    """Tell the ranks, and MLflow in them, of the job's run, and of the plugins that it finds it by (``training/store.py``).

    Args:
        distribution: path below the ranks' first folder on PYTHONPATH -> content.
    """
    plan = layout.plan
    told = {
        "runId": plan.run_id,
        "runName": plan.run_name,
        "experimentId": plan.experiment_id,
        "experiment": plan.experiment,
        "params": plan.run_parameters,
        "allRanks": plan.all_ranks,
        "started": now_ms(),
        "artifacts": layout.artifacts,
        "bits": permissions.bits_of(layout.mounted_share),
        # What rank 0 has tried before it ends (``training/model_trial.py``).
        "model": {"path": plan.model.path, "seconds": plan.model.check_seconds}
        if plan.model and plan.model.check_seconds
        else None,
    }
    with open(os.path.join(layout.spool, facts), "w", encoding="utf-8") as file:
        json.dump(told, file)
    for name, text in distribution.items():
        path = os.path.join(layout.site, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def write_python(layout: NodeLayout, python: str) -> None:
    """A program ``python`` for jobs whose interpreter has no such name beside it, as Debian's python3 has none.

    A script and no link: an interpreter finds its environment by the path that it was started with.
    """
    if os.path.exists(os.path.join(os.path.dirname(python), "python")):
        return
    os.makedirs(layout.bin, exist_ok=True)
    path = os.path.join(layout.bin, "python")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n')
    os.chmod(path, 0o700)


def copy_logs(layout: NodeLayout) -> None:
    """Copy the logs to stdOutErrPathPrefix at the end, if that lies on another volume than the job folder."""
    prefix = layout.plan.log_copy_prefix
    if prefix is None or prefix.volume is None:
        return
    volume = layout.mount_path(layout.plan.volumes[prefix.volume])
    target = os.path.join(volume, *prefix.path.split("/"), layout.plan.segment, *layout.paths.log_folder.split("/"))
    errors: list[OSError] = []
    root = layout.volume_root(target)
    permissions.make_folders(target, permissions.bits_of(root or ""))
    _copy_tree(layout.control, layout.paths.stdouterr, target, errors)
    if root:
        permissions.open_up_tree(root, os.path.relpath(target, root).split(os.sep))
    if errors:
        raise errors[0]


def _copy_tree(control: ControlShare, path: str, target: str, errors: list[OSError]) -> None:
    os.makedirs(target, exist_ok=True)
    for entry in control.entries(path):
        source, copy = f"{path}/{entry.name}", os.path.join(target, entry.name)
        try:
            if entry.is_directory:
                _copy_tree(control, source, copy, errors)
            else:
                control.fetch(source, copy)
        except OSError as error:
            errors.append(error)
