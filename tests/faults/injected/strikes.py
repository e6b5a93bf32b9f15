"""Kills a process of a job at a step of the protocol, from inside of it; the product knows nothing of it.

Client processes load it as their ``sitecustomize``, agents from the ``__main__`` of an archive that was changed for that
(agents are started without any site). Standard library only.

A step is a call that leaves something behind: a file of the job folder, a claim, a call of MLflow's store, a question to a node.
A fault says which call of a step it waits for, and whether it strikes before it, half-way through it, or after it.
"""

import functools
import importlib.abc
import importlib.util
import io
import json
import os
import signal
import sys
import time
import zipfile

VARIABLE = "SEED_FAULTS"
FOLLOWER, SUBMITTER, AGENT = "follower", "submitter", "agent-"
BEFORE, HALF, AFTER = "before", "half", "after"


def arm(path):
    """Have this process strike as the file says, if it is of a kind that the file speaks of."""
    words = _command(os.getpid())
    role = role_of(words)
    if role is None:
        return
    with open(path, encoding="utf-8") as file:
        faults = json.load(file)
    attempt = next((int(word[10:]) for word in words if word.startswith("--attempt=")), None)
    struck = _Strikes(os.path.dirname(path), role, faults, attempt)
    if role.startswith(AGENT):
        _in_agent(struck)
    else:
        sys.meta_path.insert(0, _Patches(_client_patches(struck, path)))


def role_of(words):
    """What a process is for a job, by its command line; None: nothing that faults are meant for."""
    if "mlflow_batchai.follower" in words:
        return FOLLOWER
    if any(word.endswith("/mlflow") for word in words[:2]) and "run" in words:
        return SUBMITTER
    if "agent" in words:
        return next((AGENT + word[7:] for word in words if word.startswith("--node=")), None)
    return None


def pids_of(role, root):
    """Processes of that role whose command line or environment names something below a folder."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if role_of(_command(pid)) == role and root in " ".join(_command(pid) + _read(pid, "environ"))]


def _command(pid):
    return _read(pid, "cmdline")


def _read(pid, name):
    """What the kernel tells of a process as words that end in NUL; nothing of one that is gone."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return os.fsdecode(file.read()).split("\0")
    except OSError:
        return []


class _Strikes:
    """The faults of this process, and how often each step was reached.

    Args:
        folder: where it is noted that a fault has struck: it strikes once, whatever process comes first.
    """

    def __init__(self, folder, role, faults, attempt):
        self.folder = folder
        self.role = role
        self.counts = {}
        self.faults = [
            fault
            for fault in faults
            if fault["role"] == role
            and attempt in (None, fault["attempt"])
            and not os.path.exists(self._note(fault["id"]))
            and (fault["after"] is None or os.path.exists(self._note(fault["after"])))
        ]

    def _note(self, number):
        return os.path.join(self.folder, f"struck-{number}")

    def wrap(self, owner, name, step_of, half=None):
        """Make a function a step; ``half`` does a part of what it does."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def stepped(*args, **kwargs):
            step = step_of(*args, **kwargs)
            count = self.counts[step] = self.counts.get(step, 0) + 1
            due = {fault["when"]: fault for fault in self.faults if (fault["step"], fault["count"]) == (step, count)}
            if BEFORE in due:
                self._strike(due[BEFORE])
            if HALF in due:
                half(*args, **kwargs)
                self._strike(due[HALF])
            result = original(*args, **kwargs)
            if AFTER in due:
                self._strike(due[AFTER])
            return result

        setattr(owner, name, stepped)

    def _strike(self, fault):
        try:
            note = os.open(self._note(fault["id"]), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        for victim in fault["kills"]:
            for pid in pids_of(victim, os.path.dirname(self.folder)) if victim != self.role else []:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                os.write(note, f"{victim}\n".encode())
        if self.role in fault["kills"]:
            os.write(note, f"{self.role}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


class _Patches(importlib.abc.MetaPathFinder):
    """Changes modules as soon as they are loaded."""

    def __init__(self, patches):
        self._patches = patches

    def find_spec(self, name, path, target=None):
        patch = self._patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            patch(module)

        spec.loader.exec_module = loaded
        return spec


def _client_patches(struck, path):
    def share(module):
        struck.wrap(module.DirectoryShare, "write", _written, _half_on_share)
        struck.wrap(module.DirectoryShare, "claim", lambda share, path: _claimed(path))

    def tracking(module):
        client = module.MlflowClient
        for name in ("create_run", "set_terminated", "update_run", "set_tag", "log_artifact"):
            struck.wrap(client, name, lambda *args, step=name, **kwargs: step)
        struck.wrap(client, "log_artifacts", lambda *args, **kwargs: "log_artifacts", _half_of_artifacts)
        struck.wrap(client, "log_batch", lambda *args, **kwargs: "log_batch" if kwargs.get("metrics") else "log_tags")

    return {
        "mlflow_batchai.storage.directory": share,
        "mlflow.tracking.client": tracking,
        "mlflow_batchai.agent.api.host": lambda module: struck.wrap(module, "answer", lambda verb, arguments: "ask " + verb),
        "mlflow_batchai.follower.spawning": lambda module: struck.wrap(module, "detach", lambda *args, **kwargs: "spawn"),
        "mlflow_batchai.engines.archive": lambda module: _change_archive(module, path),
    }


def _written(share, path, data):
    """``write NAME`` of a file on the share; the last cursor of a job says that it is finished."""
    name = path.rpartition("/")[2]
    return "write finished" if name == "cursor.json" and b'"finished":true' in data else "write " + name


def _claimed(path):
    above, _, name = path.rpartition("/")
    return "claim lease" if above.endswith("/relay") else "claim " + name


def _half_on_share(share, path, data):
    """What a writer leaves that dies before it renames its file."""
    target = share.local(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    (target.parent / ".new-half").write_bytes(data[: len(data) // 2])


def _half_of_artifacts(client, run_id, folder, artifact_path=None):
    for name in sorted(os.listdir(folder))[:1]:
        if os.path.isfile(os.path.join(folder, name)):
            client.log_artifact(run_id, os.path.join(folder, name), artifact_path)


def _change_archive(module, path):
    """Have agents load this file too. The same sources give the same bytes still."""
    build = module.build
    main = f"import sys\nif sys.argv[1:2] == ['agent']:\n    import strikes\n    strikes.arm({path!r})\n"

    @functools.cache
    def changed():
        with open(__file__, "rb") as file:
            contents = {"strikes.py": file.read()}
        with zipfile.ZipFile(io.BytesIO(build())) as before:
            contents.update((name, before.read(name)) for name in before.namelist())
        contents["__main__.py"] = main.encode() + contents["__main__.py"]
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as after:
            for name in sorted(contents):
                after.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), contents[name])
        return buffer.getvalue()

    module.build = changed


def _in_agent(struck):
    from mlflow_batchai.agent import protocol
    from mlflow_batchai.agent.reservation import agents, reservations
    from mlflow_batchai.agent.share import mounted, mountfiles

    def written(root, path, *more):
        name = os.path.basename(path)
        return "write segment" if name.endswith(".jsonl") else "write " + name

    def half(root, path, records, within):
        data = protocol.encode(records)
        os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
        with open(os.path.join(root, path), "wb") as file:
            file.write(data[: len(data) // 2])

    struck.wrap(mountfiles, "write_closed", written, half)
    struck.wrap(mounted.MountedShare, "claim", lambda share, path: _claimed(path))
    struck.wrap(mounted.MountedLogFile, "flush", lambda *args, **kwargs: "write log")
    struck.wrap(agents, "claim", lambda *args, **kwargs: "reservation")
    struck.wrap(reservations, "set_owner", lambda *args, **kwargs: "owner")
    struck.wrap(agents, "sign", lambda *args, **kwargs: "sign")
