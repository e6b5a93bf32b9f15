"""Verbs that examine a node for `batchai doctor` (what it has, what it reaches), and what it lacks for a job.

Each may be asked twice. None needs a job; none leaves anything behind but a file in a folder that the asker removes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

from mlflow_batchai.agent import containers, gpus, network, place
from mlflow_batchai.agent.environment import allowed
from mlflow_batchai.agent.environments import trainenv
from mlflow_batchai.agent.mounts import tools
from mlflow_batchai.agent.plan import Container, Tool, Volume, read
from mlflow_batchai.agent.share import is_web_address, open_control
from mlflow_batchai.agent.staging import SetupError

Answer = dict[str, Any]

_WRITE_REASONS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "full"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "read-only"),
}
# Connections that are tried at a time.
MOST_PROBES = 256
_GPU_NAME = re.compile(r"^GPU (\d+): (.*) \(UUID: (GPU-[^)\s]+)\)")
_MARK = "batchai-training "
# Run by the training interpreter, as a rank would: what it prints besides stands on other lines.
_TRAINING = """
import sys
if sys.path and not sys.path[0]:
    del sys.path[0]
import importlib, importlib.util, json, platform
said = {"version": platform.python_version(), "horovod": None, "works": [], "missing": [], "broken": []}
for framework in ("tensorflow", "torch"):
    if importlib.util.find_spec(framework) is None:
        said["missing"].append(framework)
        continue
    try:
        hvd = importlib.import_module("horovod." + framework)
        built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, name + "_built")()]
        said["works"].append([framework, str(sys.modules[framework].__version__), built])
        said["horovod"] = str(sys.modules["horovod"].__version__)
    except Exception as error:
        said["broken"].append([framework, " ".join(("%s: %s" % (type(error).__name__, error)).split())[:300]])
print("\\n" + MARK + json.dumps(said))
"""


def facts() -> Answer:
    """``python`` (version), ``executable`` and ``host`` of what answers here."""
    return {"python": platform.python_version(), "executable": sys.executable, "host": socket.gethostname()}


def training(python: str, seconds: float) -> Answer:
    """Examine the training interpreter by importing Horovod in it, in a rank's environment.

    Returns:
        ``path`` (None: there is no such program) and either ``trouble``, a few words on why it said nothing, or
        ``version``; ``horovod`` (its version, None where it can't be used); ``works``: [framework, version, what Horovod has:
        gloo, mpi, nccl] each; ``missing``: frameworks that aren't there; ``broken``: [framework, why Horovod fails with it].
    """
    path = trainenv.find(python, os.environ)
    if path is None:
        return {"path": None}
    environment = allowed(os.environ)
    environment["PATH"] = os.path.dirname(path) + os.pathsep + environment.get("PATH", os.defpath)
    code = _TRAINING.replace("MARK", repr(_MARK))
    status, text = gpus.ask([path, "-c", code], environment, seconds)
    for line in text.splitlines():
        if line.startswith(_MARK):
            return dict(json.loads(line[len(_MARK) :]), path=path)
    if status is None:
        reason = text.replace(code, "...")
    elif status < 0:
        reason = f"it was ended by signal {-status} while it imported them (a CPU too old for this build?)"
    else:
        last = ([line.strip() for line in text.splitlines() if line.strip()] or ["nothing"])[-1]
        reason = f"it exits with {status} and says: {last[:300]}"
    return {"path": path, "trouble": reason}


def accelerators(part: str, wanted: int | None) -> Answer:
    """The GPUs that a job would find on this node.

    Args:
        part: ``I/N/M``, as an agent is told it; ``0/1/1`` is the whole machine.

    Returns:
        ``names``: one each (empty where only their number is known); ``count``; ``note``: where that comes from;
        ``driver``: what a nvidia-smi that fails, or misses some, says, else empty; ``trouble``: why a job could not have them,
        else empty.
    """
    said: list[tuple[int | None, str]] = []

    def run(argv: list[str], environment: Any) -> tuple[int | None, str]:
        said.append(gpus.ask(argv, environment))
        return said[-1]

    index, _, parts = part.split("/")
    try:
        found = gpus.of_node(allowed(os.environ), (int(index), int(parts)), wanted, "this node", run)
    except SetupError as error:
        return {"names": [], "count": 0, "note": "", "driver": "", "trouble": str(error)}
    lines = [match for _, text in said for match in map(_GPU_NAME.match, text.splitlines()) if match]
    known = {key: match.group(2) for match in lines for key in (match.group(1), match.group(3))}
    return {
        "names": [known[name] for name in found.ids if name in known],
        "count": len(found.ids),
        "note": found.note,
        "driver": found.trouble if found.ids else found.note if any(status != 0 for status, _ in said) else "",
        "trouble": "",
    }


def offer(share: str, identity: str, path: str, sas: str | None = None) -> Answer:
    """Write a file on the control share.

    Returns:
        ``trouble``: None, or what ``place.share_problem`` says, or ``full``, or ``failed``; ``why``: what the system says of a
        write that failed, else empty; ``filesystem`` (``nfs4``, ...; ``Azure Files`` for an address; empty if it
        hangs).
    """
    reason, why = place.share_problem(share, identity, sas), ""
    if reason is None:
        try:
            with contextlib.closing(open_control(share, sas, place.SHARE_SECONDS)) as control:
                control.write_closed(path, [{"host": socket.gethostname()}])
        except OSError as error:
            # Whatever the permissions say, a server may map this user to nobody.
            reason, why = _WRITE_REASONS.get(error.errno or 0, "failed"), error.strerror or str(error)
    found = "Azure Files" if is_web_address(share) else "" if reason == "hangs" else place.filesystem(share)
    return {"trouble": reason, "why": why, "filesystem": found}


def listen(token: str, interface: str | None, seconds: float) -> Answer:
    """Answer peers with a token, for some seconds.

    Returns:
        ``interfaces``, ``port``, ``ports`` (the range that ranks listen in), ``machine`` (the same for nodes that meet on
        loopback), ``trouble``: why the named interface can't be used, else empty.
    """
    reason = ""
    try:
        own = network.interfaces(interface)
    except network.InterfaceError as error:
        own, reason = [], str(error)
    listener = network.Listener(token)
    timer = threading.Timer(seconds, listener.close)
    timer.daemon = True
    timer.start()
    return {
        "interfaces": own,
        "port": listener.port,
        "ports": network.port_range(),
        "machine": network.machine(),
        "trouble": reason,
    }


def probe(targets: Sequence[Sequence[Any]], seconds: float) -> Answer:
    """``results``: for each [address, port, token], in this order, empty if it answers, else a few words why not."""
    with ThreadPoolExecutor(MOST_PROBES) as pool:
        tries = [pool.submit(network.connect, address, port, token, seconds) for address, port, token in targets]
    return {"results": [each.result()[0] for each in tries]}


def needs(volumes: Sequence[Any], container: Any, python: str) -> Answer:
    """List what this node lacks for a job.

    Args:
        volumes: those of the plan that have to be mounted, as plain data.
        python: the training interpreter, as the plan names it: rclone may be installed beside it.

    Returns:
        ``trouble``: a sentence, None: nothing is missing; ``lacking``: tools that a client can send; ``machine``: the kind of
        machine that they have to run on (``uname -m``).
    """
    mounts = [read(Volume, volume) for volume in volumes]
    machine = os.uname().machine
    # A tool that is missing may be sent: the client knows whether it has one.
    sent = {"rclone": Tool(machine, "", 0)}
    wrong: str | None = containers.missing(read(Container, container)) if container else None
    for volume in mounts:
        wrong = wrong or tools.missing(volume, python, sent)
    lacking: list[str] = []
    by_rclone = any(volume.by_rclone for volume in mounts)
    if by_rclone and not wrong and tools.installed_rclone(python) is None:
        lacking.append("rclone")
    return {"trouble": wrong, "lacking": lacking, "machine": machine}


VERBS: dict[str, Callable[..., Answer]] = {
    function.__name__: function for function in (facts, training, accelerators, offer, listen, probe, needs)
}
