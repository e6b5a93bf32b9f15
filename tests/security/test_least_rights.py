"""Rights of other users on a job's files: none on its node, on its share those that the share's root gives."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from booking import reserve
from other_user import CLIENT, NODE, STRANGER, as_user, needs_root, public_folder
from plans import toy_plan
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.documents.batchai import parse_batchai
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.engines import archive
from mlflow_batchai.errors import DocumentError
from mlflow_batchai.storage.directory import DirectoryShare

OTHERS = stat.S_IRWXG | stat.S_IRWXO
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture
def public() -> Iterator[Path]:
    yield from public_folder()


def open_to_others(folder: Path) -> list[str]:
    """What of a folder's content has a group or world bit; a link's own mode means nothing."""
    return [
        f"{stat.S_IMODE(path.lstat().st_mode):o} {path.relative_to(folder)}"
        for path in sorted(folder.rglob("*"))
        if not path.is_symlink() and path.lstat().st_mode & OTHERS
    ]


TRAIN = """
import os, tempfile, time
before = os.umask(0)
os.umask(before)
print(f"umask {before:03o}", flush=True)
open(os.environ["TMPDIR"] + "/of-a-rank", "w").close()
os.makedirs(os.environ["TMPDIR"] + "/cache/of-a-library")
import mlflow
mlflow.log_text("for the relay", "notes/said.txt")
print("up", flush=True)
while not os.path.exists(os.environ["AZ_BATCHAI_MOUNT_ROOT"] + "/share/go"):
    time.sleep(0.05)
"""


@needs_root
def test_a_share_that_is_open_to_all_opens_nothing_on_a_node(world: Any, public: Path, store_template: Path) -> None:
    """The root of the share is 0777; the node's folder is its owner's own, who lets others look into it."""
    world = type(world)(public, store_template)  # where every user can reach it
    share, root, temporary = world.home / "share", world.home / "nodes" / "local" / "0", public / "tmp"
    for folder, mode in ((share, 0o777), (root, 0o755), (temporary, 0o1777)):
        folder.mkdir(parents=True)
        folder.chmod(mode)
    try:
        process = world.start(world.command(world.project(TRAIN)), TMPDIR=str(temporary))
        world.wait(
            lambda: world.runs() and (world.folder() / "stdouterr" / "stdout.txt").is_file() and "up" in world.log(), 150
        )
        assert "umask 077\n" in world.log()
        site = next(root.glob("jobs/*/site/sitecustomize.py"))
        said = as_user(STRANGER, lambda: site.open("a"))
        assert isinstance(said, PermissionError), said
        assert open_to_others(root) == []
        assert open_to_others(temporary) == []
        # For the relay, though it be another user.
        artifact = next(world.folder().glob("artifacts/run/notes/said.txt"))
        assert as_user(CLIENT, artifact.read_text) == "for the relay"
        assert stat.S_IMODE(artifact.parent.stat().st_mode) & 0o777 == 0o777
        (share / "go").touch()
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        world.wait_gone()
    finally:
        world.close()


WRITES = """
cd "$AZ_BATCHAI_OUTPUT_MODEL"
mkdir -p deep/er run && echo model > deep/er/model.h5 && echo twice > one && ln one two
echo '#!/bin/sh' > run/it && chmod u+x run/it && echo private > "$AZ_BATCHAI_JOB_TEMP/key"
ln -s "$HOME/secret" link && ln -s "$HOME/folder" folder && ln "$HOME/secret" hard
echo shared > "$AZ_BATCHAI_SHARED_JOB_TEMP/state" && echo said && umask
echo more > "$AZ_BATCHAI_STDOUTERR_DIR/trace.json"
while [ ! -e "$AZ_BATCHAI_MOUNT_ROOT/share/go" ]; do sleep 0.05; done
echo later
"""


def start_agent(public: Path, plan: dict[str, Any], home: Path) -> subprocess.Popen[bytes]:
    """An agent of the user NODE, of a job that the user CLIENT has submitted."""
    paths, root, book = protocol.JobPaths(plan["folder"]), public / "nodes" / "0", public / "book"
    share = DirectoryShare(public / "share")
    assert as_user(CLIENT, lambda: share.write(paths.plan, protocol.encode([plan]))) is None
    reservation = reserve(str(book), [str(root)], plan["job"], 1)
    own = {"number": reservation["number"], "taken": time.time() - reservation["age"], "after": reservation["after"]["0"]}
    agent = archive.stored(public / "bin")
    agent.chmod(0o644)
    with (public / "agent.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(SYSTEM_PYTHON, "-I", "-S", str(agent), "agent", f"--share={share.root}", f"--folder={plan['folder']}"),
                *("--attempt=1", "--node=0", f"--root={root}", f"--reservation={json.dumps(own)}"),
            ],
            cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": str(home)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            user=NODE,
            group=NODE,
            extra_groups=[],
            start_new_session=True,
        )
    assert process.stdin
    with process.stdin as told:
        told.write(json.dumps({"plan": protocol.digest(plan)}).encode())
    return process


@needs_root
@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason=f"no {SYSTEM_PYTHON}, which every user can run")
def test_a_client_of_another_user_reads_all_and_removes_it(public: Path) -> None:
    """Agents are one user, who submits and reads is another; neither is root."""
    share, home, root = public / "share", public / "home-of-the-node", public / "nodes" / "0"
    for folder in (share, home / "folder", root):
        folder.mkdir(parents=True)
    share.chmod(0o777)
    for secret in (home / "secret", home / "folder" / "file"):
        secret.write_text("of the node's user alone")
        secret.chmod(0o600)
    for path in (home, home / "folder", root):
        path.chmod(0o700)
    for path in (home, *home.rglob("*"), root.parent, root):
        os.chown(path, NODE, NODE)
    outputs = [{"id": "MODEL", "pathPrefix": "$AZ_BATCHAI_MOUNT_ROOT/share", "pathSuffix": "model"}]
    plan = toy_plan(share, job=f"{os.getpid():x}r", command=WRITES, outputDirectories=outputs)
    agent = start_agent(public, plan, home)
    try:
        folder = share / plan["folder"]
        log = folder / "stdouterr" / "stdout.txt"

        def growing() -> str:
            return str(as_user(CLIENT, lambda: log.read_text() if log.is_file() else ""))

        assert wait_for(lambda: "0077\n" in growing())
        (share / "go").touch()
        assert agent.wait(120) == 0, (public / "agent.log").read_text()
    finally:
        agent.kill()
        agent.wait()
        proc.sweep(lambda: proc.marked(protocol.job_mark(plan["job"], 1)), grace=0.0)

    def read() -> dict[str, str]:
        found = {}
        for parent, _, names in os.walk(folder, onerror=fail):
            for name in names:
                path = Path(parent, name)
                if not path.is_symlink() and name != "hard":
                    found[str(path.relative_to(folder))] = path.read_text(errors="replace")
        return found

    found = as_user(CLIENT, read)
    assert isinstance(found, dict), found
    model = "outputs/model"
    assert found[f"{model}/deep/er/model.h5"] == "model\n" and found[f"{model}/one"] == found[f"{model}/two"] == "twice\n"
    assert found["shared/state"] == "shared\n" and found["stdouterr/trace.json"] == "more\n"
    assert found["stdouterr/stdout.txt"].endswith("later\n")
    assert "batchai/attempts/1/verdict/verdict.json" in found and "stdouterr/execution.log" in found
    bits = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder / model).rglob("*") if not path.is_symlink()}
    assert (bits["model.h5"], bits["er"], bits["it"]) == (0o666, 0o777, 0o777)
    # Links lead to what is not the job's.
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home, home / "folder")] == [0o700, 0o700]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (home / "secret", home / "folder" / "file")] == [0o600, 0o600]
    assert as_user(CLIENT, lambda: DirectoryShare(share).delete(plan["folder"])) is None
    assert not folder.exists()


def fail(error: OSError) -> None:
    raise error


@pytest.mark.parametrize("given", ['"022"', "022", "'077'", "077", 0o022])
def test_the_umask_that_a_document_asks_for(given: Any) -> None:
    document = load_text(f"umask: {given}\n", "batchai.yaml") if isinstance(given, str) else {"umask": given}
    assert parse_batchai(document, "batchai.yaml")[0].umask == ("077" if "077" in str(given) else "022")


@pytest.mark.parametrize("given", ["000", "002", "0", "22", "'0022'", "'0o22'", "rwx", "true", "[]", "18446744073709551616"])
def test_no_other_umask(given: str) -> None:
    with pytest.raises(DocumentError, match="umask"):
        parse_batchai(load_text(f"umask: {given}\n", "batchai.yaml"), "batchai.yaml")
