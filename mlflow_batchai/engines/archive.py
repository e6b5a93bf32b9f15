"""Build ``agent.pyz``, the part of this package that travels to nodes, as one deterministic file."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import marshal
import uuid
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

# Packages that need nothing but a Python.
PACKAGES = ("agent", "training", "horovod_wheel")
_MAIN = "import sys\nfrom mlflow_batchai.agent.__main__ import main\n\nsys.exit(main(sys.argv[1:]))\n"


def boot() -> str:
    """The first program on a node over SSH (``agent/boot.py``) as one line of Python: csh ends a quoted word at a newline."""
    text = files("mlflow_batchai").joinpath("agent").joinpath("boot.py").read_bytes()
    return f"import base64; exec(base64.b64decode('{base64.b64encode(text).decode()}').decode())"


@functools.cache
def build() -> bytes:
    """The archive's bytes, made once a process, however many nodes it goes to.

    The same sources give the same bytes on any machine (so nothing is compressed: zlibs differ).
    """
    package = files("mlflow_batchai")
    contents = {"__main__.py": _MAIN.encode(), "mlflow_batchai/__init__.py": package.joinpath("__init__.py").read_bytes()}
    for part in PACKAGES:
        contents.update(_sources(package.joinpath(part), f"mlflow_batchai/{part}"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(contents):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, contents[name])
    return buffer.getvalue()


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry, f"{name}/{entry.name}")
        elif entry.name.endswith(".py"):
            yield f"{name}/{entry.name}", entry.read_bytes()


@functools.lru_cache(maxsize=4)
def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def name_of(data: bytes) -> str:
    return f"agent-{hash_of(data)[:16]}.pyz"


def stored(folder: Path) -> Path:
    """The archive as a file in this folder, named by its hash; written if it isn't there.

    Beside each module lies its code for this Python, which other Pythons pass over: to compile them all takes an agent most of
    its start.
    """
    data = build()
    target = folder / name_of(data)
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{uuid.uuid4().hex}.new")
        temporary.write_bytes(data)
        with zipfile.ZipFile(temporary, "a") as archive:
            for name in archive.namelist():
                source = archive.read(name)
                code = marshal.dumps(compile(source, str(target / name), "exec", dont_inherit=True))
                # Bit 0: it goes by the source's hash, not by its time; nobody checks it, for both come in one file.
                archive.writestr(f"{name}c", MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(source) + code)
        temporary.replace(target)
    return target
