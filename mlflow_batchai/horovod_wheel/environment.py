"""The environment variables of a build, and the name under which its result is cached: pure functions."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from .gpus import Target
from .interpreter import Interpreter, search_path
from .source import HOROVOD_VERSION, PATCHES, SDIST_SHA256

# Those that Horovod's build reads; others (HOROVOD_RANK, HOROVOD_TIMELINE, ...) are read when training.
_BUILD_VARIABLE = re.compile(
    r"HOROVOD_(WITH|WITHOUT|GPU|NCCL|CUDA|ROCM|NVTX|BUILD)(_\w+)?$"
    r"|HOROVOD_(ALLOW_MIXED_GPU_IMPL|CPU_OPERATIONS|DEBUG|CMAKE|LOCAL_VERSION|SKIP_COMPILE)$"
)
_COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "CUDACXX", "CUDAFLAGS", "LDFLAGS")

# gcc 13 and newer no longer include these by way of others, and Horovod and its Gloo rely on that.
_HEADERS = ("string", "cstdint", "optional", "stdexcept", "memory", "functional", "algorithm", "limits")
_INCLUDES = " ".join("-include " + header for header in _HEADERS)
_STRIP = "-Wl,-s"  # 2 MB instead of 51 MB for the library

_FEATURE = {"tensorflow": "TENSORFLOW", "torch": "PYTORCH"}  # Horovod's words in HOROVOD_WITH_...


def cache_root(environ: Mapping[str, str]) -> Path:
    """Where wheels are kept: $BATCHAI_HOROVOD_CACHE, or mlflow-batchai/horovod below $XDG_CACHE_HOME or ~/.cache."""
    if environ.get("BATCHAI_HOROVOD_CACHE"):
        return Path(environ["BATCHAI_HOROVOD_CACHE"]).expanduser().absolute()
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    # The XDG rule: a relative path there is to be ignored.
    root = base if base.is_absolute() else Path("~/.cache").expanduser()
    return root / "mlflow-batchai" / "horovod"


def cache_key(interpreter: Interpreter, environ: Mapping[str, str], target: Target | None = None) -> str:
    """One folder name for everything that makes one wheel differ from another.

    That is the interpreter, the platform, the C library, the framework's version, Horovod's source with our
    changes, the flags, and the GPUs; for example ``cp311-linux_x86_64-tensorflow-2.21.0-1f2e3d4c`` or
    ``cp312-linux_x86_64-torch-2.11.0+cu130_cuda13.0_sm90-5e6f7a8b``. It is the same on a machine that has no
    CUDA toolkit and no NCCL to build with: there a wheel that another has built is found.
    """
    made_of = [
        SDIST_SHA256,
        PATCHES[interpreter.framework],
        sorted(flags(interpreter.framework, environ, target).items()),
        interpreter.libc,
    ]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:8]
    gpus = f"_cuda{target.cuda}_sm{'_'.join(target.architectures)}" if target else ""
    version = re.sub(r"[^A-Za-z0-9.+]", "_", interpreter.framework_version) + gpus
    return f"{interpreter.tag}-{interpreter.framework}-{version}-{digest}"


def flags(framework: str, environ: Mapping[str, str], target: Target | None = None) -> dict[str, str]:
    """The variables that decide what is built; ``target``: for which GPUs.

    The user's HOROVOD_* build variables win over ours (HOROVOD_WITH_MPI=1 over our HOROVOD_WITHOUT_MPI=1),
    and our flags for the compiler follow theirs. The framework asked for is built in any case.
    """
    result = {name: value for name, value in environ.items() if _BUILD_VARIABLE.match(name)}
    defaults = {"TENSORFLOW": False, "PYTORCH": False, "MXNET": False, "GLOO": True, "MPI": False}
    defaults[_FEATURE[framework]] = True
    for feature, on in defaults.items():
        with_it, without_it = "HOROVOD_WITH_" + feature, "HOROVOD_WITHOUT_" + feature
        if with_it not in result and without_it not in result:
            result[with_it if on else without_it] = "1"
    result.pop("HOROVOD_WITHOUT_" + _FEATURE[framework], None)
    result["HOROVOD_WITH_" + _FEATURE[framework]] = "1"
    if target:
        if not any(name.startswith("HOROVOD_GPU") for name in result):
            result["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        result.setdefault("HOROVOD_NCCL_LINK", "SHARED")
        result["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(target.architectures)
        # Two wheels of one version would have one name: this is PyTorch's own way to tell them apart.
        result.setdefault("HOROVOD_LOCAL_VERSION", "cu" + target.cuda.replace(".", ""))
    result.update((name, environ[name]) for name in _COMPILER_VARIABLES if environ.get(name))
    result["CXXFLAGS"] = (environ.get("CXXFLAGS", "") + " " + _INCLUDES).strip()
    result["LDFLAGS"] = (environ.get("LDFLAGS", "") + " " + _STRIP).strip()
    return result


def build_environment(
    interpreter: Interpreter,
    environ: Mapping[str, str],
    overlay: str,
    jobs: int,
    target: Target | None = None,
    cuda: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The whole environment of the build: the user's (so pip's configuration holds) and ours on top.

    ``overlay`` is the folder of build tools that goes before the interpreter's own packages; ``jobs`` is how
    many compilers run at once; ``cuda`` are the variables of ``gpus.arrange`` for a build for GPUs.
    """
    result = dict(environ)
    # A generator other than make prints no percentage, and a make above us would hand down its own flags.
    for name in ("CMAKE_GENERATOR", "MAKELEVEL", "MFLAGS"):
        result.pop(name, None)
    result.update(flags(interpreter.framework, environ, target))
    path = search_path(interpreter.path, environ)
    if cuda:
        result.update(cuda)
        path = os.pathsep.join([str(Path(cuda["CUDACXX"]).parent), path])
    result.update(
        PATH=path,
        PYTHONPATH=os.pathsep.join(filter(None, [overlay, environ.get("PYTHONPATH", "")])),
        MAKEFLAGS=f"-j{jobs}",
        CMAKE_POLICY_VERSION_MINIMUM="3.5",  # Gloo asks for less than CMake 4 still accepts
        LANGUAGE="en",  # the log is searched for the word "error"
        # The user's defaults for installing into an environment: --target can't be combined with them.
        PIP_USER="0",
        PIP_REQUIRE_VIRTUALENV="0",
    )
    return result


def wheel_pattern() -> str:
    """Glob pattern of the wheel's file name (a local version may follow the version)."""
    return f"horovod-{HOROVOD_VERSION}*.whl"
