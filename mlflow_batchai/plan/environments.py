"""What nodes need before they train: the training environment, and the name under which a job preparation is kept."""

from __future__ import annotations

import difflib
import hashlib
import json
import posixpath
from collections.abc import Collection, Mapping

import yaml

from mlflow_batchai.agent.plan import Plan, PythonEnvironment, plain
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.mlproject import MLProject
from mlflow_batchai.errors import DocumentError, NotSupportedError, ProjectError


def training_environment(project: MLProject, manager: str | None, cluster: Cluster) -> PythonEnvironment | None:
    """``python_env.yaml`` as it stands in a plan, or None where the cluster's interpreter trains.

    Args:
        manager: MLflow's ``--env-manager``.

    Raises:
        BatchAIError: another manager than local, virtualenv and uv, or a file that is missing or wrong.
    """
    if manager in (None, "local"):
        return None
    if manager not in ("virtualenv", "uv"):
        raise NotSupportedError(f"--env-manager {manager} is not supported; use local, virtualenv or uv")
    if project.python_env is None:
        raise ProjectError(f"{project.source}: --env-manager {manager} needs a python_env.yaml in the project")
    try:
        data = yaml.safe_load(project.python_env.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise DocumentError(f"{project.python_env}: {' '.join(str(error).split())}") from error
    if not isinstance(data, Mapping):
        raise DocumentError(f"{project.python_env}: it should map keys to values")
    lists = [data.get(key) or [] for key in ("build_dependencies", "dependencies")]
    if not all(isinstance(entries, list) and all(isinstance(entry, str) for entry in entries) for entries in lists):
        raise DocumentError(f"{project.python_env}: dependencies should be a list of requirements")
    python = data.get("python")
    named = [project.directory / line.split(maxsplit=1)[1] for line in lists[1] if line.startswith("-r ")]
    for path in named:
        if not path.is_file():
            raise DocumentError(f"{project.python_env}: dependencies name '-r {path.name}', which is not in the project")
    content = [manager, python, lists, [path.read_text(encoding="utf-8") for path in named], cluster.python]
    return PythonEnvironment(
        manager,
        hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16],
        None if python is None else str(python),
        tuple(lists[0]),
        tuple(lists[1]),
        cluster.environments,
    )


def preparation_cache(plan: Plan, cache: bool | Collection[str], source: str) -> str | None:
    """What names the folder in which nodes keep what job preparation made: a hash over all that it is said to depend on.

    Those are its command with the parameters that it names, the document's variables, the training interpreter or the
    image, and the files of the project that ``cache`` lists (true: all). Of a secret only the name counts.

    Args:
        cache: ``cachePreparation``.

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
