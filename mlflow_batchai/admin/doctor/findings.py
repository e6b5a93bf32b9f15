"""Turn the answers of nodes into findings: pure functions."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlflow_batchai.agent.attempt.interface_choice import NO_INTERFACE
from mlflow_batchai.engines.ssh_hosts import share_sentence
from mlflow_batchai.storage.location import is_web_address

Answer = Mapping[str, Any]

# In the order in which they are shown; a node has those that its engine knows of.
CHECKS = ("reachable", "host key", "python", "training", "container", "GPUs", "share", "folder", "network")

# Nodes that a sentence names one by one.
MOST_NAMED = 3

_FRAMEWORKS = {"tensorflow": "TensorFlow", "torch": "PyTorch"}


class State(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Finding(NamedTuple):
    """A check's outcome: one line, which says what to do if it isn't fine, and doesn't name the node that it means."""

    state: State
    text: str


class Check(NamedTuple):
    """A finding on a node, by its name in the cluster document; ``name`` is one of ``CHECKS``."""

    node: str
    name: str
    state: State
    text: str


def ok(text: str) -> Finding:
    return Finding(State.OK, text)


def warning(text: str) -> Finding:
    return Finding(State.WARNING, text)


def failed(text: str) -> Finding:
    return Finding(State.FAILED, text)


def training(said: Answer, python: str) -> Finding:
    """Judge ``examine.training``; ``python`` is the interpreter as the cluster document names it."""
    without = "(projects that are run with --env-manager virtualenv need only the agent's python)"
    if said["path"] is None:
        return failed(
            f"there is no program {python} there: install it, or set python: in the cluster document to the interpreter that"
            f" trains {without}"
        )
    mend = f"build a wheel with `batchai horovod build` and install it there {without}"
    if "trouble" in said:
        return failed(f"{said['path']} can't be asked what it trains with: {said['trouble']}; mend it {without}")
    title = f"{said['path']} (Python {said['version']})"
    broken = [f"horovod.{name} fails: {why}" for name, why in said["broken"]]
    for name, version, built in said["works"]:
        if "gloo" not in built:
            broken.append(f"Horovod for {_FRAMEWORKS[name]} {version} has no gloo")
    working = [(name, version, built) for name, version, built in said["works"] if "gloo" in built]
    if working:
        told = ", ".join(f"{_FRAMEWORKS[name]} {version}" for name, version, _ in working)
        built = ", ".join(working[0][2])
        return ok(f"{title}: {told}, Horovod {said['horovod']} ({built})" + "".join(f"; {why}" for why in broken))
    if not broken:
        return failed(f"{title} has neither TensorFlow nor PyTorch: install one, then {mend}")
    return failed(f"{title}: {'; '.join(broken)}: {mend}")


def accelerators(said: Answer, counts: Sequence[int], trains: Answer | None = None) -> Finding:
    """Judge ``examine.accelerators``.

    Args:
        counts: of all nodes of which it is known.
        trains: what ``examine.training`` said of the node, if it did.
    """
    if said["trouble"]:
        return failed(said["trouble"])
    if said["driver"] and not said["count"]:
        return warning(f"nvidia-smi fails there: {said['driver']}; mend the driver, or set gpusPerNode: 0 to train on CPUs")
    if said["count"]:
        kinds = ", ".join(dict.fromkeys(said["names"]))
        text = f"{said['count']}" + (f": {kinds}" if kinds else "")
    else:
        text = f"none: trains on CPUs ({said['note']})"
    if said["driver"]:
        return warning(f"{text}; {said['driver']}: mend or reset that GPU; jobs go on with the others")
    if min(counts) != max(counts):
        mixed = f"nodes of this cluster have from {min(counts)} to {max(counts)}"
        return warning(f"{text}; {mixed}: mend those that miss some, or set gpusPerNode to what all have")
    for framework, version, built in (trains or {}).get("works", []):
        # We build TensorFlow's for CPUs only.
        if said["count"] and framework == "torch" and "+cpu" not in version and "nccl" not in built:
            return warning(
                f"{text}; Horovod for PyTorch {version} was built without NCCL: build one on a node with GPUs (`batchai horovod"
                " build --framework torch`) and install it there"
            )
    return ok(text)


def share(said: Answer, path: str, title: str) -> Finding:
    """Judge ``examine.offer``; ``path`` is the control share's on the node, ``title`` the node's name in sentences."""
    if said["trouble"] == "full":
        return failed(f"{path} is full, or this user's quota is used up: free some space there")
    if said["trouble"] == "failed":
        mend = "" if is_web_address(path) else "; if the machine is fine, mount the share anew"
        return failed(f"{path} can't be written: {said['why']}{mend}")
    if reason := share_sentence(title, path, said["trouble"]):
        return failed(reason.removeprefix(f"{title}: ") + (f" ({said['why']})" if said["why"] else ""))
    return ok(f"{path}, the same as here, writable" + (f" ({said['filesystem']})" if said["filesystem"] else ""))


def network(answers: Mapping[str, Answer], reached: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, Finding]:
    """Judge which interface each node would use, or why it has none.

    Args:
        answers: node -> what ``examine.listen`` said.
        reached: node -> other node -> for each of that one's interfaces, empty if it was reached, else why not.
    """
    one_machine = len({said["machine"] for said in answers.values()}) == 1
    found = {}
    for name, said in answers.items():
        tries = [
            (_shown(each), [f"{other} ({why})" for other in answers if other != name and (why := reached[other][name][index])])
            for index, each in enumerate(said["interfaces"])
        ]
        best, missed = min(tries, key=lambda each: len(each[1]), default=("", []))
        if said["trouble"]:
            found[name] = failed(f"it {said['trouble']}: correct networkInterface in the cluster document")
        elif len(answers) == 1:
            found[name] = ok(f"no other node to reach{', ' if best else ''}{best}")
        elif one_machine:
            found[name] = ok("all nodes are on one machine: loopback")
        elif not best:
            found[name] = failed(f"it {NO_INTERFACE}")
        elif missed:
            found[name] = failed(
                f"{best} is not reached by {named(missed)}: open TCP ports {said['ports']} on this node to the other nodes, or"
                " name another interface (networkInterface in the cluster document)"
            )
        else:
            found[name] = ok(f"{best}, reached by all other nodes")
    return found


def _shown(interface: Answer) -> str:
    return f"{interface['name']} ({interface['address']})"


def named(texts: Sequence[str]) -> str:
    more = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
