"""Install packages into an environment: by uv, which is faster, where it does all that pip's configuration says.

pip stays the measure: what is set for it holds, and where uv can't be had, lacks a counterpart for a setting or fails, pip
does it, so that errors are pip's as well.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

# pip's settings that are an option of uv's, for each of their values.
_OPTIONS = {
    "find-links": "--find-links",
    "constraint": "-c",
    "trusted-host": "--allow-insecure-host",
}
# Those that are a variable: an index may carry a password, which arguments would show.
_VARIABLES = {
    "index-url": "UV_INDEX_URL",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# Those that change neither what is installed nor where it comes from.
_IRRELEVANT = frozenset(
    [
        "config-file",
        "disable-pip-version-check",
        "no-color",
        "no-input",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "verbose",
    ]
)
# The rest of a configuration is for other commands of pip.
_SECTIONS = ("global", "install", ":env:")


def main(arguments: list[str]) -> int:
    """``agent.pyz install PYTHON ...``: what follows is for ``pip install`` and ``uv pip install`` alike."""
    python, *wanted = arguments
    pip = [python, "-m", "pip"]
    listed = subprocess.run([*pip, "config", "list"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    ours = for_uv(settings(listed.stdout), os.environ) if listed.returncode == 0 else None
    if ours is None or _names_hashes(wanted) or not _by_uv(python, wanted, *ours):
        return subprocess.run([*pip, "install", "--progress-bar", "off", *wanted], stdin=subprocess.DEVNULL).returncode
    return 0


def settings(listed: str) -> dict[str, str]:
    """What holds for ``pip install``, from the lines of ``pip config list``: variables over files."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in found:
            found[section][key] = str(ast.literal_eval(value))
    return {key: value for section in _SECTIONS for key, value in found[section].items()}


def for_uv(configured: Mapping[str, str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """(arguments, environment) with which uv does as pip would; None: it can't.

    Args:
        environment: the process's own; what is set for uv itself holds over what is set for pip.
    """
    # pip takes the best version of all indexes; uv's own way is the first index that has the package.
    arguments = ["--index-strategy", "unsafe-best-match"]
    variables = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    if environment.get("REQUESTS_CA_BUNDLE"):
        variables["SSL_CERT_FILE"] = environment["REQUESTS_CA_BUNDLE"]
    for key, value in configured.items():
        if key in _OPTIONS:
            if "@" in value or "?" in value:  # arguments would show what is secret in an address
                return None
            for one in value.split():
                arguments += [_OPTIONS[key], one]
        elif key in _VARIABLES:
            variables[_VARIABLES[key]] = " ".join(value.split())
        elif key == "no-index":
            if value.lower() in ("1", "true", "yes", "on"):
                arguments.append("--no-index")
        elif key not in _IRRELEVANT:
            return None
    return arguments, {**variables, **environment}


def _names_hashes(wanted: list[str]) -> bool:
    """Whether a file of requirements has a hash: pip then refuses what has none."""
    for option, name in zip(wanted, wanted[1:]):
        if option == "-r":
            with open(name, encoding="utf-8") as file:
                if "--hash" in file.read():
                    return True
    return False


def _by_uv(python: str, wanted: list[str], arguments: list[str], environment: dict[str, str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="batchai-uv-") as folder:
        program = shutil.which("uv") or _fetched(python, folder)
        if program is None:
            return False
        command = [program, "pip", "install", "--python", python, *arguments, *wanted]
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError:
            return False
    if done.returncode == 0:
        sys.stdout.buffer.write(done.stdout)
        sys.stdout.flush()
    return done.returncode == 0


def _fetched(python: str, folder: str) -> str | None:
    """uv as pip brings it, for this once (pip keeps what it has downloaded): it is no part of the environment."""
    quick = ["--quiet", "--retries", "0", "--timeout", "15", "--no-deps", "--only-binary", ":all:"]
    command = [python, "-m", "pip", "install", *quick, "--target", folder, "uv<1"]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return shutil.which("uv", path=os.path.join(folder, "bin"))
