"""Horovod's last release, and the exact replacements that make it build and work today."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import NamedTuple

from .interpreter import HorovodBuildError

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


class Patch(NamedTuple):
    """Replace ``old``, which stands exactly once in ``file`` (relative to the source's root), by ``new``."""

    file: str
    old: str
    new: str


def _together(file: str, target: str, name: str) -> Patch:
    """Compile twelve files at once, for most of the time goes into the same headers (CMake 3.16 and newer does that).

    Not with parts for which this wasn't tried: their files may have names in common.
    """
    old = f'set_target_properties(${{{target}}} PROPERTIES OUTPUT_NAME "{name}")\n'
    return Patch(
        file,
        old,
        old + "if(NOT HAVE_MPI AND NOT HAVE_CUDA AND NOT HAVE_ROCM AND NOT HAVE_NVTX AND NOT HAVE_CCL)\n"
        f"  set_target_properties(${{{target}}} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)\nendif()\n",
    )


_COMMON = (
    # Contexts of process sets ignore HOROVOD_GLOO_IFACE and use the host name's address: on Debian 127.0.1.1.
    Patch(
        "horovod/common/gloo/gloo_context.cc",
        "  assert(global_context.IsEnabled());\n",
        "  assert(global_context.IsEnabled());\n  gloo_iface_ = global_context.gloo_iface_;\n",
    ),
    # Python 3.12 has no distutils, and importing anything of horovod.runner imports this file.
    Patch(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
    ),
    # What the linker strips is not made first: a quarter of the compiler's time.
    Patch(
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO ',
        'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO ',
    ),
    # For TensorFlow Gloo is compiled again, as C++17, and this one links to nothing.
    Patch("CMakeLists.txt", "add_subdirectory(third_party/gloo)\n", "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)\n"),
)

_TENSORFLOW = (
    _together("horovod/tensorflow/CMakeLists.txt", "TF_TARGET_LIB", "mpi_lib"),
    # The block is all GPU code, and includes headers that TensorFlow 2.19 and newer no longer ship.
    Patch(
        "horovod/tensorflow/xla_mpi_ops.cc",
        "#if TENSORFLOW_VERSION >= 2006000000\n",
        "#if TENSORFLOW_VERSION >= 2006000000 && HAVE_GPU\n",
    ),
    # With TF_USE_LEGACY_KERAS=1 the package `keras` is not the Keras that TensorFlow uses.
    Patch(
        "horovod/tensorflow/keras/__init__.py",
        "    from keras import backend as K\n",
        "    K = keras.backend\n",
    ),
    Patch(
        "horovod/tensorflow/keras/callbacks.py",
        "    from keras import backend as K\n",
        "    K = keras.backend\n",
    ),
)

_TORCH = (
    _together("horovod/torch/CMakeLists.txt", "PYTORCH_TARGET_LIB", "mpi_lib_v2"),
    # PyTorch's headers need C++17.
    Patch("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)\n", "set(CMAKE_CXX_STANDARD 17)\n"),
    Patch("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)\n", "set(CMAKE_CXX_STANDARD 17)\n"),
    Patch(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)\n",
        "set(CMAKE_CUDA_STANDARD 17)\n",
    ),
    # Python 3.12 has no distutils.
    Patch(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
    # GPUs only where they are asked for: else a PyTorch for CUDA would need CUDA's toolkit to train on CPUs. HOROVOD_GPU=CUDA
    # without operations for GPUs has their tensors exchanged through the main memory.
    Patch(
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
        'if(NOT HAVE_CUDA AND NOT "$ENV{HOROVOD_GPU}" STREQUAL "CUDA")\n  set(Pytorch_CUDA FALSE)\nendif()\n',
    ),
    # The library would look for others in the folders of this machine, and of the build; PyTorch has loaded them before.
    Patch("CMakeLists.txt", "project(horovod CXX)\n", "project(horovod CXX)\nset(CMAKE_SKIP_RPATH ON)\n"),
)

PATCHES = {"tensorflow": _COMMON + _TENSORFLOW, "torch": _COMMON + _TORCH}


def apply_patches(root: Path, patches: tuple[Patch, ...]) -> None:
    """Change the source tree at ``root`` in place.

    Raises:
        HorovodBuildError: a file is missing, or a text doesn't stand exactly once in it; names the file.
    """
    for patch in patches:
        path = root / patch.file
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unexpected(f"{patch.file} can't be read") from error
        count = text.count(patch.old)
        if count != 1:
            raise _unexpected(f"the text to change in {patch.file} occurs {count} times instead of once")
        path.write_bytes(text.replace(patch.old, patch.new).encode("utf-8"))


def _unexpected(what: str) -> HorovodBuildError:
    return HorovodBuildError(
        f"Horovod's source is not the one expected: {what}; let pip fetch horovod {HOROVOD_VERSION} from PyPI."
    )


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the source archive below ``folder`` and return the source's root.

    Raises:
        HorovodBuildError: the archive can't be read or isn't PyPI's (by SHA-256, so what is in it is known).
    """
    try:
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    except OSError as error:
        raise HorovodBuildError(f"Horovod's source {sdist} can't be read: {error.strerror}.") from error
    if digest != SDIST_SHA256:
        raise HorovodBuildError(
            f"{sdist.name} is not the horovod {HOROVOD_VERSION} of PyPI (its SHA-256 is {digest}): get it with `pip download "
            f"--no-deps --no-binary horovod horovod=={HOROVOD_VERSION}`, or remove it from the index or cache that pip took it "
            "from."
        )
    with tarfile.open(str(sdist), "r:gz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(str(folder))
    return folder / f"horovod-{HOROVOD_VERSION}"
