"""Make a job's own virtual environment over the interpreter that trains: what a preparation installs changes no other one.

Apart from `trainenv`, since it is run by that interpreter, which may be older than the agent's.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shlex
import site
import sys
import sysconfig


def main(arguments: list[str]) -> int:
    """``agent.pyz overlay FOLDER``, run by the interpreter below: it has all of its packages, and pip installs into FOLDER."""
    import venv

    [folder] = arguments
    # A virtual environment hides the system's packages from its users, or doesn't; so does this one.
    venv.EnvBuilder(sys.base_prefix in site.PREFIXES, clear=True, symlinks=True).create(folder)
    below, own = os.path.dirname(sys.executable), os.path.join(folder, "bin")
    python = shlex.quote(os.path.join(own, "python"))
    if sys.prefix != sys.base_prefix:
        paths = {"base": folder, "platbase": folder}
        with open(os.path.join(sysconfig.get_path("purelib", "posix_prefix", paths), "below.pth"), "w") as file:
            for path in dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
                file.write(f"import site; site.addsitedir({path!r})\n")
    # Programs of its packages, which would start it alone. Conda takes the interpreter's environment for its own.
    scripts = sysconfig.get_path("scripts")
    for path in [] if scripts in ("/bin", "/usr/bin") else glob.glob(os.path.join(glob.escape(scripts), "*")):
        name = os.path.basename(path)
        if _is_started_by(path, below) and not name.startswith(("conda", "mamba")):
            _write(own, name, f"{python} {shlex.quote(path)}")
    # Unpacking pip takes seconds: where there is none it is done when it is wanted.
    unpack = (
        ""
        if importlib.util.find_spec("pip")
        else f"{python} -c 'import pip' 2> /dev/null || {python} -m ensurepip > /dev/null\n"
    )
    for name in ("pip", "pip3", f"pip{sys.version_info[0]}.{sys.version_info[1]}"):
        _write(own, name, f"{python} -m pip", unpack)
    return 0


def _is_started_by(path: str, folder: str) -> bool:
    try:
        with open(path, "rb") as file:
            first, second = file.readline(1024), file.readline(1024)
    except OSError:
        return False
    return first.startswith(b"#!") and os.fsencode(f"{folder}/python") in first + second


def _write(folder: str, name: str, command: str, first: str = "") -> None:
    path = os.path.join(folder, name)
    if not os.path.islink(path):  # the interpreter's own names
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f'#!/bin/sh\n{first}exec {command} "$@"\n')
        os.chmod(path, 0o755)
