"""Files that ignore files leave out of a project, compared with git itself."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest

from mlflow_batchai.storage.objects import scan

FILES = [
    f"{folder}{name}"
    for folder in ("", "a/", "a/b/", "a/b/c/", "build/", "build/keep/", "data set/", "a/build/", "ü/")
    for name in ("x.py", "x.log", "keep.log", "data.csv", "#hash", "!bang", "sp ace")
]
PATTERNS = r"""*.log|!keep.log|build|build/|/build|build/*|!build/keep|!build/keep/|a/b|a/b/|/a/b/*.py|**/c|c/**|a/**/x.py|*.csv
!/data.csv|*|!*/|!*.py|/*|!/a|!/a/|x.?|x.[pl]*|[!k]*.log|\#hash|\!bang|# data|data\ set/|a/*/x.py|ü|!ü/x.py|keep**|/x.py|a/|!a/b
sp\ ace|x.py  |!|x\|**|/**|**/|a**b/*.py|[[:alpha:]].py|[x|[]x].py|[z-a]*|[a-x].py|[^x]*.py|a/**/*.log|/**/c/|[\x].log|a[/]b|a?b
data[[:space:]]set|x.py\ |!**/x.py|!a/**|/a/**/""".replace("\n", "|").split("|")


def listed(root):
    """What git would add."""
    shutil.rmtree(root / ".git", ignore_errors=True)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    command = ["git", "-C", str(root), "-c", "core.excludesFile=/dev/null", "ls-files", "-z", "--others", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return sorted(name for name in found if name)


def project(root, **ignores):
    for name in FILES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    for where, lines in ignores.items():
        (root / where.replace("__", "/") / ".gitignore").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def ours(root):
    return sorted(file.path for file in scan(root))


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("seed", range(12))
def test_as_git_has_it(tmp_path, seed):
    chance = random.Random(seed)
    for turn in range(6):
        pick = [[chance.choice(PATTERNS) for _ in range(chance.randint(1, 6))] for _ in range(3)]
        root = project(tmp_path / str(turn))
        for where, lines in zip(("", "a", "build"), pick, strict=True):
            (root / where / ".gitignore").write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert ours(root) == listed(root), pick


def test_our_own_file_has_the_last_word(tmp_path):
    project(tmp_path)
    (tmp_path / ".gitignore").write_text("*.log\n*.csv\n", encoding="utf-8")
    (tmp_path / ".batchaiignore").write_text("!data.csv\n*.py\n", encoding="utf-8")
    (tmp_path / "a" / ".batchaiignore").write_text("!x.py\n", encoding="utf-8")
    found = ours(tmp_path)
    assert "data.csv" in found and "a/b/data.csv" in found
    assert "x.py" not in found and "a/x.py" in found and "a/b/c/x.py" in found and "build/x.py" not in found
    assert not [name for name in found if name.endswith(".log")]
    assert ".gitignore" in found and ".batchaiignore" in found


def test_what_is_never_part_and_what_is_no_folder(tmp_path):
    """An ignored folder is not looked into, a link is no folder, and what stays out whatever the file says."""
    for folder in ("mlruns", "data", "real"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x").write_bytes(b"")
    (tmp_path / "data" / "out").symlink_to("/etc")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / ".gitignore").write_text("!mlruns\ndata/\nlink/\n", encoding="utf-8")
    assert ours(tmp_path) == [".gitignore", "link", "real/x"]


def test_bytes_that_are_no_text_odd_line_ends_and_lines_that_are_no_pattern(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".gitignore").write_bytes(b"\xef\xbb\xbfa\r\n\xff\xfe\r\nb  \r\n!\nx\\\n\r\n")
    assert ours(tmp_path) == [".gitignore", "c"]
