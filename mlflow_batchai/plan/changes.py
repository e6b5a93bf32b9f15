"""Collect how a job's code differs from its git commit, by reading ``git`` only."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlflow_batchai.plan.secrecy import is_secret
from mlflow_batchai.storage.objects import StagedFile

GIT_SECONDS = 10.0
MOST_DIFF_BYTES = 1 << 20
# Of git's answer: names of changed files, and their changes.
MOST_BYTES = 8 << 20
MOST_NAMES = 1000
_DIFF = (
    *("diff", "HEAD", "-z", "--no-abbrev", "--relative", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=all"),
)
_HEADER = b"diff --git "
_NONE = "0" * 40


class _Change(NamedTuple):
    """One changed file: its path from the project's folder, the hash of its committed content, the text of the change."""

    path: str
    blob: str
    text: bytes


def since_commit(folder: Path, code: Sequence[StagedFile], secret_texts: Collection[str]) -> dict[str, Any] | None:
    """The commit that a project's folder is at, and what the code that is sent differs in; None: it isn't in git.

    Files that are not sent are no part of it, and neither is a file that holds a secret, or has held one when it was committed.

    Args:
        secret_texts: every text that must stand nowhere.

    Returns:
        ``commit``, ``differs``; ``changed``, ``deleted``, ``untracked`` (paths, of each ``MOST_NAMES`` at most), ``withheld``
        (those whose change holds a secret); ``diff`` (text, bytes that are no UTF-8 as lone surrogates; None: nothing to
        show) and ``note`` (what could not be found out, or None).
    """
    git, commit = _Git(folder), None
    try:
        commit = git.ask("rev-parse", "--verify", "--quiet", "HEAD").decode("ascii", "replace").strip()
        if not commit:
            return None
        tracked = {os.fsdecode(name) for name in git.ask("ls-files", "-z").split(b"\0")}
        names = [change.path for change in _changes(git.ask(*_DIFF, "--raw", "--", "."))]
        sent = {file.path for file in code}
        changed = [name for name in names if name in sent]
        wanted = changed[:MOST_NAMES]
        # What isn't sent may be data, and its change huge.
        words = ("--literal-pathspecs", *_DIFF, "--patch-with-raw", "--", *wanted)
        answer = git.ask(*words, most=MOST_BYTES) if wanted else b""
        whole = len(answer) < MOST_BYTES
        shown = [change for change in _changes(answer, whole) if change.path in sent]
        withheld = [change.path for change in shown if _speaks(git, change, secret_texts)]
    except FileNotFoundError:
        return None  # there is no git here
    except subprocess.TimeoutExpired:
        return {"commit": commit, "note": f"git took more than {GIT_SECONDS:.0f} s to say what has changed"}
    untracked = sorted(sent - tracked)
    deleted = [name for name in names if not os.path.lexists(folder / name)]
    diff = b"".join(change.text for change in shown if change.path not in withheld)
    if len(diff) > MOST_DIFF_BYTES or not whole or len(changed) > MOST_NAMES:
        diff = diff[: diff.rfind(b"\n", 0, MOST_DIFF_BYTES) + 1] + b"# cut here: the rest is not kept\n"
    return {
        "commit": commit,
        "differs": bool(changed or deleted or untracked),
        "changed": changed[:MOST_NAMES],
        "deleted": deleted[:MOST_NAMES],
        "untracked": untracked[:MOST_NAMES],
        "withheld": withheld[:MOST_NAMES],
        "diff": diff.decode("utf-8", "surrogateescape") or None,
        "note": None,
    }


def _changes(answer: bytes, whole: bool = True) -> Iterator[_Change]:
    """What git says of changed files first, then may show one after the other; one whose text didn't come has none."""
    names, _, patch = answer.partition(b"\0\0")
    fields = names.split(b"\0")
    # Every other line of a patch begins with another letter, or with a word of git's.
    texts = [_HEADER + text for text in (b"\n" + patch).split(b"\n" + _HEADER)[1:]]
    texts = [text if text.endswith(b"\n") else text + b"\n" for text in texts]
    if whole and len(texts) != len(fields) // 2:
        texts = []  # whose they are can't be told
    for number, (about, name) in enumerate(zip(fields[::2], fields[1::2], strict=False)):
        yield _Change(os.fsdecode(name), about.split()[2].decode(), texts[number] if number < len(texts) else b"")


def _speaks(git: _Git, change: _Change, secret_texts: Collection[str]) -> bool:
    """Whether a change, or the committed content that it shows a part of, holds a secret."""
    if is_secret(change.path, change.text, secret_texts):
        return True
    return change.blob != _NONE and is_secret(change.path, git.ask("cat-file", "blob", change.blob), secret_texts)


class _Git:
    """Asks git about a folder, for ``GIT_SECONDS`` in all.

    Raises (from every method):
        FileNotFoundError: there is no git.
        TimeoutExpired: it takes too long.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._until = time.monotonic() + GIT_SECONDS

    def ask(self, *words: str, most: int = -1) -> bytes:
        """Output of a git command, or the first ``most`` bytes; nothing if it fails."""
        # What has the content that it had is no change, and no program of the repository's configuration is run.
        argv = ["git", "-C", str(self._folder), "-c", "diff.autoRefreshIndex=true", "-c", "core.fsmonitor=false", *words]
        # Nothing is written into the user's repository.
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        nothing = subprocess.DEVNULL
        with subprocess.Popen(argv, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing, env=environment) as process:
            alarm = threading.Timer(max(0.001, self._until - time.monotonic()), process.kill)
            alarm.start()
            assert process.stdout is not None
            answer = process.stdout.read(most)
            if is_cut := len(answer) == most:
                process.kill()
            process.wait()
            alarm.cancel()
        if time.monotonic() >= self._until:
            raise subprocess.TimeoutExpired(argv, GIT_SECONDS)
        return answer if is_cut or process.returncode == 0 else b""
