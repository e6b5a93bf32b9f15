"""Plan what nodes need before training: the Python environment, wheels, the cache of a job preparation.

Whoever can write the share can put a wheel there, and what a node installs runs as its user. So the plan names wheels with
their hashes, and a node installs no other. A wheel is named if it belongs to this user or root and nobody else can write it, or
if this user has built the same one here (``batchai horovod build``).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import posixpath
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow_batchai.agent import boot
from mlflow_batchai.agent.environments import trainenv
from mlflow_batchai.agent.environments.wheels import MOST_BYTES, WHEEL, WHEELS
from mlflow_batchai.agent.plan import Plan, PythonEnvironment, plain
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.mlproject import MLProject
from mlflow_batchai.documents.model import refuse_unfit
from mlflow_batchai.documents.reading import read, read_text
from mlflow_batchai.errors import DocumentError, NotSupportedError, ProjectError
from mlflow_batchai.horovod_wheel.environment import cache_root
from mlflow_batchai.storage.base import Share
from mlflow_batchai.storage.directory import DirectoryShare

# ``wheels/KEY/NAME.whl``, and a folder more for people's own order.
DEPTH = 3
BLOCK = 1 << 20
# As MLflow has it (``mlflow/utils/environment.py``), and what conda writes besides: a channel, a star.
_VERSION = r"\d+(?:\.\d+)*"
_CONDA = re.compile(
    r"(?:[\w./-]+::)?(?P<package>python|pip|setuptools|wheel)\s*"
    rf"(?:(?P<operator>[<>=!]=?|~=)\s*(?P<version>{_VERSION})(?:\.?\*)?(?P<more>(?:\s*,\s*(?:[<>=!~]=|[<>])\s*{_VERSION})*))?"
)
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def choose_wheels(environment: PythonEnvironment | None, project: Path, share: Share) -> tuple[dict[str, str], list[str]]:
    """(path on the share -> SHA-256 of the wheels that nodes may install, sentences to print).

    Args:
        project: the folder that files named in it lie in.

    Raises:
        ShareError: the share can't be asked.
    """
    if environment is None or not _wants_horovod(environment, str(project)):
        return {}, []
    found = _in_directory(share.root) if isinstance(share, DirectoryShare) else _in_service(share)
    named = {path: digest for path, digest in found.items() if digest}
    others = sorted(found.keys() - named.keys())
    if not others:
        return named, []
    shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return named, [
        f"nodes don't use Horovod wheels of the share that others may have written ({shown}); to use one, put it there as this"
        " user, writable for nobody else, or also into this user's cache of wheels (BATCHAI_HOROVOD_CACHE)"
    ]


def _wants_horovod(environment: PythonEnvironment, project: str) -> bool:
    try:
        return bool(trainenv.split_horovod(environment.dependencies, project)[1])
    except (OSError, ValueError):  # a file of requirements can't be read: pip will say so
        return False


def _in_directory(root: Path) -> dict[str, str]:
    """Path -> hash of all wheels; empty for one that nobody here can vouch for. What can't be read is no wheel."""
    found: dict[str, str] = {}
    ours = _Cache()
    with contextlib.suppress(OSError), _opened(str(root / WHEELS), os.O_DIRECTORY) as folder:
        for parent, path in _below(folder, WHEELS):
            name = path.rpartition("/")[2]
            with contextlib.suppress(OSError), _opened(name, dir_fd=parent) as file:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
                    continue
                safe = is_ours(status)
                digest = _hash(file) if safe or ours.may_have(name, status.st_size) else ""
                found[path] = digest if safe or ours.has(digest) else ""
    return found


def is_ours(status: os.stat_result) -> bool:
    """Whether nobody but this user and root can have written a file, under whatever name."""
    return status.st_uid in (0, os.geteuid()) and status.st_nlink == 1 and not boot.others_write(status)


def _below(folder: int, path: str, depth: int = DEPTH) -> Iterator[tuple[int, str]]:
    """(descriptor of its folder, path) of each name of a wheel; no link is followed."""
    for name in sorted(os.listdir(folder)):
        if WHEEL.match(name):
            yield folder, f"{path}/{name}"
        elif depth > 1:
            with contextlib.suppress(OSError), _opened(name, os.O_DIRECTORY, folder) as below:
                yield from _below(below, f"{path}/{name}", depth - 1)


def _in_service(share: Share) -> dict[str, str]:
    """The same of a share that doesn't tell whose a file is: only those that this user has built are vouched for."""
    found: dict[str, str] = {}
    ours = _Cache()
    folders = [(WHEELS, DEPTH)]
    while folders:
        folder, depth = folders.pop()
        for entry in share.list(folder):
            path = f"{folder}/{entry.name}"
            if entry.is_directory and depth > 1:
                folders.append((path, depth - 1))
            elif not entry.is_directory and WHEEL.match(entry.name):
                found[path] = ""
                if ours.may_have(entry.name, entry.size):
                    digests = (hashlib.sha256(data).hexdigest() for _, data in share.read_many([path], entry.size))
                    found[path] = next(filter(ours.has, digests), "")
    return found


class _Cache:
    """The wheels that this user has built on this machine; they are hashed when one of the same name and size is met."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, int], list[Path]] = {}
        self._hashes: set[str] = set()
        for path in cache_root(os.environ).glob("*/*.whl"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and is_ours(status):
                    self._files.setdefault((path.name, status.st_size), []).append(path)

    def may_have(self, name: str, size: int) -> bool:
        """Whether there may be the same."""
        for path in self._files.get((name, size), []):
            with contextlib.suppress(OSError), _opened(str(path)) as file:
                self._hashes.add(_hash(file))
                os.utime(file)  # it is used, for `batchai gc`
        return (name, size) in self._files

    def has(self, digest: str) -> bool:
        """Whether there is the same, after ``may_have``."""
        return digest in self._hashes


@contextlib.contextmanager
def _opened(path: str, flags: int = 0, dir_fd: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, _FLAGS | flags, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _hash(file: int) -> str:
    digest, left = hashlib.sha256(), MOST_BYTES
    while left > 0 and (block := os.read(file, BLOCK)):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def training_environment(project: MLProject, manager: str | None, cluster: Cluster) -> PythonEnvironment | None:
    """``python_env.yaml``, or of ``conda.yaml`` its Python and its pip part, or None where the cluster's interpreter trains.

    Raises:
        BatchAIError: another manager than local, virtualenv and uv, or a file that is missing or wrong.
    """
    if manager in (None, "local"):
        return None
    if manager not in ("virtualenv", "uv"):
        raise NotSupportedError(f"--env-manager {manager} is not supported; use local, virtualenv or uv")
    file = project.python_env or project.conda_env
    if file is None:
        raise ProjectError(f"{project.source}: --env-manager {manager} needs a python_env.yaml or a conda.yaml in the project")
    data: Mapping[str, Any] = read(file) if read_text(file).strip() else {}
    refuse_unfit(data, str(file))
    if project.python_env is None:
        data = _pip_part(data, str(file))
    lists = [data.get(key) or [] for key in ("build_dependencies", "dependencies")]
    if not all(isinstance(entries, list) and all(isinstance(entry, str) for entry in entries) for entries in lists):
        raise DocumentError(f"{file}: dependencies should be a list of requirements")
    python = data.get("python")
    named = [project.directory / line.split(maxsplit=1)[1] for line in lists[1] if line.startswith("-r ")]
    for path in named:
        if not path.is_file():
            raise DocumentError(f"{file}: dependencies name '-r {path.name}', which is not in the project")
    content = [manager, python, lists, [path.read_text(encoding="utf-8") for path in named], cluster.python]
    return PythonEnvironment(
        manager,
        hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16],
        None if python is None else str(python),
        tuple(lists[0]),
        tuple(lists[1]),
        cluster.environments,
    )


def unused_environment(project: MLProject, manager: str | None, cluster: Cluster, image: str | None) -> list[str]:
    """A sentence on an environment file of the project that nobody has asked for, if there is one.

    Args:
        manager: MLflow's ``--env-manager``; with ``local`` a user has chosen.
        image: the job's, if it trains in one.
    """
    file = project.python_env or project.conda_env
    if file is None or manager is not None:
        return []
    if image:
        return [f"{file.name} plays no part: the job trains in the image {image}"]
    built = "it" if project.python_env else "its Python and its pip part"
    return [f"{file.name} plays no part: the job trains with {cluster.python}; --env-manager virtualenv (or uv) builds {built}"]


def _pip_part(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What MLflow takes of a ``conda.yaml`` where there is no conda: Python's version, pip and what builds, the pip part.

    Raises:
        DocumentError: packages that only conda has, or something else than a list of packages.
    """
    entries = data.get("dependencies") or []
    if not isinstance(entries, list):
        raise DocumentError(f"{source}: dependencies should be a list of packages")
    found: dict[str, Any] = {"build_dependencies": [], "dependencies": []}
    others = []
    for entry in entries:
        match = _CONDA.fullmatch(entry) if isinstance(entry, str) else None
        if isinstance(entry, Mapping) and set(entry) == {"pip"}:
            found["dependencies"] = entry["pip"]
        elif match is None:
            others.append(str(entry))
        elif match["package"] == "python":
            if match["more"] or match["operator"] in ("<", ">", "!=", "~="):
                raise DocumentError(f"{source}: {entry}: write one version, such as python=3.11")
            found["python"] = match["version"]
        else:
            operator = "==" if match["operator"] == "=" else match["operator"] or ""
            found["build_dependencies"].append(match["package"] + operator + (match["version"] or "") + (match["more"] or ""))
    if others:
        raise DocumentError(
            f"{source}: {', '.join(others)}: without conda only python=VERSION, pip, setuptools and wheel can be had here; name"
            " others under pip:, or train in an image (docker_env)"
        )
    return found


def preparation_cache(plan: Plan, cache: bool | Collection[str], source: str) -> str | None:
    """Name of the folder in which nodes keep a job preparation's results: a hash over everything it depends on.

    Those are its command with the parameters that it names, the document's variables, the training interpreter or the
    image, and the files of the project that ``cache`` lists (true: all). Of a secret only the name counts.

    Returns:
        16 hexadecimal digits, or None where preparation runs for every job.

    Raises:
        DocumentError: a file is listed that isn't in the project.
    """
    files = {entry.path: plain(entry) for entry in plan.code}
    chosen = sorted(files) if cache is True else [posixpath.normpath(name) for name in cache or ()]
    for name in chosen:
        if name not in files:
            near = difflib.get_close_matches(name, files, 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise DocumentError(f"{source}: cachePreparation names '{name}', which is no file of the project{hint}")
    command = plan.preparation
    if cache is False or not command:
        return None
    values = [*plan.parameters.items(), *((entry.variable, plain(entry.files)) for entry in plan.inputs)]
    content = [
        command,
        [[variable, value] for variable, value in values if variable in command],
        plain(plan.environment_variables),
        plan.secret_names,
        [plan.python, plan.environment and plan.environment.hash, plan.container and plan.container.image],
        [files[name] for name in sorted(chosen)],
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
