"""Build the environment of a rank: one pure function, the same on every engine.

The submitter's environment does not leak, nor does the node's: a short allow-list of it, then what the document says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from mlflow_batchai.agent.layout import NodeLayout, expand
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.protocol import MARK_VARIABLE, NODE_VARIABLE

_ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TMPDIR|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)"
    r"|(https?|no|all)_proxy|(HTTPS?|NO|ALL)_PROXY|(LC|CUDA|NVIDIA|NCCL)_\w*"
)

# MLflow in a rank finds no server: nodes have no route to one, and no credentials. What it says becomes records of the job
# (``training/store.py``).
TRACKING_URI = "batchai://job"


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _ALLOWED.fullmatch(name)}


_BUILD = re.compile(r"BATCHAI_HOROVOD_CACHE|XDG_(CACHE|DATA)_HOME|PYENV_ROOT|REQUESTS_CA_BUNDLE|(PIP|UV)_\w*")


def for_builds(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the node that a build of a training environment also sees: package sources and caches."""
    return {name: value for name, value in environment.items() if _BUILD.fullmatch(name)}


_ENGINE = re.compile(
    r"DOCKER_(HOST|CONTEXT|CONFIG|CERT_PATH|TLS|TLS_VERIFY|API_VERSION)|CONTAINER_(HOST|SSHKEY)"
    r"|CONTAINERS_(CONF|CONF_OVERRIDE|STORAGE_CONF|REGISTRIES_CONF)|REGISTRY_AUTH_FILE|XDG_RUNTIME_DIR"
    r"|APPTAINER_(CACHEDIR|CONFIGDIR|NOHTTPS|TMPDIR)|DBUS_SESSION_BUS_ADDRESS"
)


def for_engines(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the node that a container engine's client also sees: its daemon and configuration, no secret."""
    return {name: value for name, value in environment.items() if _ENGINE.fullmatch(name)}


def for_agents(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment in which an agent starts: ranks see ``allowed`` of it."""
    return dict(allowed(environment), **for_builds(environment), **for_engines(environment))


_WAY_OUT = re.compile(r"NCCL_\w+|(?i:(https?|no|all)_proxy)")


def in_container(environment: Mapping[str, str], image: Mapping[str, str]) -> dict[str, str]:
    """Variables of the node that processes in a container see: proxies, and what its network needs.

    All else describes what lies on the node (PATH, libraries, locales): there the image's own counts.
    """
    return {**{name: value for name, value in environment.items() if _WAY_OUT.fullmatch(name)}, **image}


def thread_variables(threads: int) -> dict[str, str]:
    count = str(max(1, threads))
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "TF_NUM_INTRAOP_THREADS": count,
        "TF_NUM_INTEROP_THREADS": count,
    }


# glibc keeps what a process frees, in large pages: TensorFlow frees and takes its buffers in every step.
ALLOCATOR = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296"
    ":glibc.malloc.trim_threshold=4294967296:glibc.malloc.top_pad=268435456"
)
# MLflow's own.
SYSTEM_METRICS_SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
_ALLOCATOR_NAMES = re.compile(r"GLIBC_TUNABLES|LD_PRELOAD|MALLOC_\w+")


def allocator_variables(plan: Plan, *others: Mapping[str, str]) -> dict[str, str]:
    """Settings of the C library's allocator for a rank on CPUs; none where the job chooses its allocator itself.

    Args:
        others: environments that the rank has beside those of the plan: secrets, the image's.
    """
    names = {entry.name for entry in plan.environment_variables}.union(*others)
    if plan.container:
        names.update(plan.container.environment)
    return {} if any(map(_ALLOCATOR_NAMES.fullmatch, names)) else {"GLIBC_TUNABLES": ALLOCATOR}


def job_environment(
    layout: NodeLayout,
    node_environment: Mapping[str, str],
    addresses: Sequence[str],
    gpus: int,
    secrets: Mapping[str, str],
    python: str,
    extra: Mapping[str, str] | None = None,
    image: Mapping[str, str] | None = None,
    below: str = "",
) -> dict[str, str]:
    """Environment of job preparation and, with ``extra``, of a rank.

    Later ones win: the allow-list (in a container the image's own), the service's variables, parameters, constants of
    MLproject's ``docker_env``, the document's variables (expanded in order, each
    may refer to earlier ones), secrets, then ``extra`` for names that the document left alone and the job's mark.

    Args:
        image: in a container, the environment that it gives every process; its PATH is as it should be.
        below: the folder of the interpreter that the training one is made over, if so; it comes next on PATH.
        extra: what the launcher adds. Names that end in ``!`` are never overridden by the document (a rank's number).
    """
    plan: Plan = layout.plan
    environment = allowed(node_environment) if image is None else in_container(node_environment, image)
    folder = os.path.dirname(python)
    if folder and image is None:
        folders = [folder, layout.bin, *filter(None, [below])]
        environment["PATH"] = os.pathsep.join([*folders, environment.get("PATH", os.defpath)])
    service = layout.service_variables(addresses, gpus)
    environment.update(service)
    environment.update(plan.parameters)
    for staged in plan.inputs:
        environment[staged.variable] = layout.input_path(staged)
    if layout.prepared:
        environment["BATCHAI_PREPARATION_DIR"] = layout.prepared
    environment["MLFLOW_TRACKING_URI"] = TRACKING_URI
    environment["MLFLOW_RUN_ID"] = plan.run_id
    environment["MLFLOW_EXPERIMENT_ID"] = plan.experiment_id
    environment["BATCHAI_SPOOL"] = layout.spool
    environment["BATCHAI_ATTEMPT"] = str(layout.paths.attempt)
    environment["PYTHONUNBUFFERED"] = "1"
    environment["GIT_PYTHON_REFRESH"] = "quiet"
    for name, value in (extra or {}).items():
        if not name.endswith("!"):
            environment[name] = value
    own_path = (extra or {}).get("PYTHONPATH", "")
    if image is not None:
        environment.update({name: value for name, value in image.items() if name == "PYTHONPATH"})
        if plan.container:
            environment.update(plan.container.environment)
    for entry in plan.environment_variables:
        environment[entry.name] = expand(entry.value, environment)
    environment.update(secrets)
    if plan.system_metrics:
        environment[SYSTEM_METRICS_SWITCH] = "false"  # the agent samples; MLflow in a rank need not
    theirs = environment.get("PYTHONPATH", "")
    if own_path and theirs != own_path:
        # An empty entry would mean the working directory.
        environment["PYTHONPATH"] = own_path + (os.pathsep + theirs if theirs else "")
    for name, value in (extra or {}).items():
        if name.endswith("!"):
            environment[name[:-1]] = value
    environment[MARK_VARIABLE] = layout.mark
    environment[NODE_VARIABLE] = str(layout.node)
    return environment
