"""Verbs that clients call on a node: plain data in, plain data out.

On the local cluster the engine calls these functions itself; over SSH it asks a `serve` process that lives as long as its
connection, one JSON line each way. Everything may be asked twice: an answer can be lost with the connection.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from mlflow_batchai.agent import boot, containers, permissions, place, protocol
from mlflow_batchai.agent.environment import for_agents
from mlflow_batchai.agent.layout import archive_path
from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.reservation import agents, queue

Answer = dict[str, Any]

READY = "batchai-agent"
# Followers ask every few seconds.
IDLE_SECONDS = 300


class HostError(Exception):
    """The node can't do what the client asked; the message is one sentence."""


def ended(root: str, asked: Sequence[Sequence[Any]]) -> Answer:
    """Which reservations have ended on this node, and whether it is ``drained``: takes no new ones.

    Args:
        asked: [number, seconds since it was made] each; seconds, since clocks of nodes differ.
    """
    root, now = os.path.expanduser(root), time.time()
    found = [number for number, age in asked if agents.state(root, number, now - age, now) == agents.ENDED]
    return {"ended": found, "drained": agents.is_drained(root)}


def listing(book: str) -> Answer:
    """The reservations of the queue in this folder (see ``queue.listing``)."""
    return {"reservations": queue.listing(os.path.expanduser(book))}


def reserve(
    book: str,
    nodes: Sequence[str],
    job: str,
    count: int,
    ended: Mapping[str, Sequence[int]],
    drained: Sequence[str] = (),
    folder: str = "",
) -> Answer:
    """See ``queue.reserve``; ``folder`` is the job's."""
    return queue.reserve(os.path.expanduser(book), nodes, job, count, ended, drained=drained, job_folder=folder)


def drop(book: str, number: int, job: str) -> Answer:
    """See ``queue.drop``."""
    queue.drop(os.path.expanduser(book), number, job)
    return {}


def drain(root: str, drained: bool) -> Answer:
    """See ``agents.drain``; the node's folder is made if it isn't there."""
    agents.drain(place.own_folder(root), drained)
    return {}


def census(roots: Sequence[str]) -> Answer:
    """Report what some nodes of this machine do now.

    Returns:
        ``nodes``, one a root: ``id`` (None: it has had no job yet), ``drained``, and ``agents``: number of the reservation, as
        text, -> ``waiting``, ``held`` or ``ended``.
    """
    return {
        "nodes": [
            {"id": place.identity(root), "drained": agents.is_drained(root), "agents": agents.states(root)}
            for root in map(os.path.expanduser, roots)
        ],
    }


def start(
    root: str,
    command: Sequence[str] | None,
    arguments: Sequence[str],
    reservation: Mapping[str, Any],
    log: str,
    mark: str,
    secrets: Mapping[str, Any],
    keeper: str,
) -> Answer:
    """Start the agent of a reservation: in a session of its own, its output to a file, its secrets on its standard input.

    Args:
        command: what runs the agent's archive; None: this interpreter and the archive that this is.
        reservation: ``number``, ``age`` (seconds since it was made) and ``after``.
        mark: the job's, by which the agent is known when it is to be ended.
        secrets: what the agent is told (see ``agent.agent.main``).
        keeper: the id of the node that keeps the queue; empty where there can be no other.

    Returns:
        ``pid``, ``started``, ``boot`` (the boot that they belong to), ``root``, ``log``; of the agent that is there if it
        was started already.
    """
    root = place.own_folder(root)
    if keeper:
        place.set_queue_node(root, keeper)
    number = reservation["number"]
    given = {"number": number, "taken": time.time() - reservation["age"], "after": reservation["after"]}
    with agents.locked(root, number):
        known = agents.read(root, number)
        if known and agents.is_alive(known):
            return known
        path = os.path.join(root, log)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        # -I: the submitter's PYTHON* variables and user site don't leak in; -S: no site-packages, a tenth of the start.
        argv = list(command or [sys.executable, "-I", "-S", archive_path()])
        argv += ["agent", *arguments, "--root=" + root, "--reservation=" + json.dumps(given)]
        return agents.write(root, number, _spawn(argv, path, mark, json.dumps(dict(secrets)).encode()), path)


def _spawn(argv: list[str], log: str, mark: str, stdin: bytes) -> int:
    with open(log, "ab") as file:
        os.fchmod(file.fileno(), 0o600)
        process = subprocess.Popen(
            argv,
            env=dict(for_agents(os.environ), **{protocol.AGENT_VARIABLE: mark}),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            start_new_session=True,
            close_fds=True,
        )
    # Nothing waits for its end, but a program that runs for long must not collect the dead.
    threading.Thread(target=process.wait, name="reaper", daemon=True).start()
    assert process.stdin
    try:
        with process.stdin as pipe:
            pipe.write(stdin)
    except BrokenPipeError:
        raise HostError(f"the agent ended before it was told its secrets; its log is {log}") from None
    return process.pid


def poll(root: str, number: int, identity: str) -> Answer:
    """Report the state of a reservation's agent.

    Args:
        identity: the id of the node that is meant; empty where it can be no other.

    Returns:
        ``alive``: None if this is another node than is meant, or knows nothing of the agent;
        ``state``: waiting, held or ended, as its agent said last; ``last``: the last line of its own log; ``failure``: why it
        had to give up the share, as a ``failed`` record, or None; ``frozen``: whether it lives and is stopped (SIGSTOP).
    """
    root = os.path.expanduser(root)
    known = agents.read(root, number)
    if known is None or (identity and place.identity(root) != identity):
        return {"alive": None, "state": "", "last": "", "failure": None, "frozen": False}
    said = agents.last_report(root, number)
    failure = said.get("failure")
    if agents.is_alive(known):
        frozen = proc.is_stopped(known["pid"])
        return {"alive": True, "state": said.get("state", "waiting"), "last": "", "failure": failure, "frozen": frozen}
    return {"alive": False, "state": "ended", "last": _last_line(known["log"]), "failure": failure, "frozen": False}


def polls(root: str, numbers: Sequence[int], identity: str) -> Answer:
    """``poll`` of many reservations of one node: ``polls``, one each."""
    return {"polls": [poll(root, number, identity) for number in numbers]}


def _last_line(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 4096))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def end(mark: str, nodes: Sequence[Sequence[str]], give_up: float) -> Answer:
    """End a job here: its agents with all below them, then all that carries its mark, its containers, and its mounts.

    Agents are known by the mark that they were started with, whatever a file says of their pids.

    Args:
        mark: of the attempt, or of all attempts (``protocol.is_marked``).
        nodes: [root, the node's id or nothing] each.
        give_up: seconds after which what will not go is given up.

    Returns:
        ``left``: pids that would not go.
    """
    for root, identity in nodes:
        if identity and place.identity(root) != identity:
            raise HostError(
                "it is not the node that the job was sent to, or its folder was removed meanwhile"
                f" (the id in {root} is another)"
            )
    # Agents first: they would otherwise see their ranks die and tell a story of their own. Their descendants go with them,
    # since one that has thrown away its environment can't be found later.
    roots = {"--root=" + os.path.abspath(os.path.expanduser(root)) for root, _ in nodes}
    marked = proc.marked(mark, variable=protocol.AGENT_VARIABLE)
    alive = {pid for pid in marked if roots.intersection(proc.command_line(pid))}
    family = {pid: proc.start_time(pid) for agent in alive for pid in (agent, *proc.descendants(agent))}
    if any(containers.has_one(root, mark) for root, _ in nodes):
        # With the agents the containers go; their engine has to see that, and is one of the family.
        proc.send(alive, signal.SIGKILL)
        for root, _ in nodes:
            containers.sweep(root, mark)
    left = proc.sweep(
        lambda: {pid for pid, started in family.items() if started is not None and proc.is_alive(pid, started)},
        grace=0.0,
        give_up=give_up,
    )
    left |= proc.sweep(lambda: proc.marked(mark), grace=3.0, give_up=give_up)
    for root, _ in nodes:
        mountpoints.sweep(os.path.expanduser(root))
    return {"left": sorted(left)}


VERBS: dict[str, Callable[..., Answer]] = {
    **place.VERBS,
    **{function.__name__: function for function in (ended, listing, reserve, drop, drain, census, start, poll, polls, end)},
}


def _verb(name: str) -> Callable[..., Answer]:
    if name in VERBS:
        return VERBS[name]
    # Few clients ask these; the others don't wait for all that this imports.
    from mlflow_batchai.agent import leftovers
    from mlflow_batchai.agent.api import examine

    return {**examine.VERBS, **leftovers.VERBS}[name]


def answer(verb: str, arguments: Mapping[str, Any]) -> Answer:
    """Do what is asked. Raises HostError: it can't be done here, with the reason."""
    try:
        return _verb(verb)(**arguments)
    except boot.FolderError as error:
        raise HostError(f"{error}; mend that, or name another folder (root in the cluster document)") from error
    except (queue.QueueError, place.OtherQueueError) as error:
        raise HostError(str(error)) from error
    except OSError as error:
        what = f": {error.filename}" if error.filename else ""
        raise HostError(f"{error.strerror or error}{what}") from error


def serve() -> int:
    """``serve``: one JSON line asked on standard input, one answered on standard output, until the input ends.

    Nobody says so when a client loses its power or its network: who isn't asked for ``IDLE_SECONDS`` ends, and is started anew.
    """
    os.umask(permissions.PRIVATE)
    sys.stdout.write("{} {}\n".format(READY, json.dumps({"python": platform.python_version()})))
    sys.stdout.flush()
    signal.alarm(IDLE_SECONDS)
    for line in sys.stdin.buffer:
        signal.alarm(0)
        request = json.loads(line.decode("utf-8"))
        try:
            said: Answer = {"ok": answer(request["verb"], request["arguments"])}
        except HostError as error:
            said = {"error": str(error)}
        except Exception as error:
            # A bug: the asker has to hear of it, and the next question is still welcome.
            said = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        signal.alarm(IDLE_SECONDS)
    return 0
