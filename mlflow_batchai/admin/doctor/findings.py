"""Turn the answers of nodes into findings: pure functions."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mlflow_batchai.agent.attempt.interface_choice import NO_INTERFACE
from mlflow_batchai.engines.ssh_hosts import LEAST_FREE_BYTES, share_sentence
from mlflow_batchai.storage.location import is_web_address

Answer = Mapping[str, Any]

# In the order in which they are shown; a node has those that its engine knows of.
CHECKS = (
    "reachable",
    "host key",
    "python",
    "training",
    "GPUs",
    "containers",
    "share",
    "visible",
    "mounts",
    "network",
    "clock",
    "space",
)

CLOCK_SECONDS = 5.0
CLOCK_SECONDS_SHOWN = 0.1
LITTLE_FREE_BYTES = 2 << 30
# Nodes that a sentence names one by one.
MOST_NAMED = 3

_FRAMEWORKS = {"tensorflow": "TensorFlow", "torch": "PyTorch"}


class State(enum.Enum):
    """Result of a check."""

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


def containers(said: Answer, ignored: bool) -> Finding:
    """Judge ``examine.containers``; ``ignored``: the cluster document has jobs run without their container."""
    if ignored:
        return ok("not needed: the cluster document says containers: ignore")
    if said["kind"]:
        return ok(f"{said['kind']} ({said['program']})")
    why = "; ".join(said["reasons"])
    if said["broken"]:
        return warning(f"none works ({why}): jobs that name a container fail there; mend it, or set containers: ignore")
    return ok(f"none ({why}): jobs that name a container need docker or podman there")


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


def visible(missed: Mapping[str, str], unseen_here: str, others: int, seconds: float) -> Finding:
    """Whether a node sees what the others and this machine wrote, and this machine what it wrote.

    Args:
        missed: who wrote it -> why, of the files that the node doesn't see.
        unseen_here: why this machine doesn't see the node's file, or nothing.
        others: how many other nodes wrote one.
        seconds: how long was looked.
    """
    problems = []
    if missed:
        told = named([f"{who} ({why})" for who, why in missed.items()])
        problems.append(f"doesn't see what others wrote: {told}")
    if unseen_here:
        problems.append(f"this machine doesn't see what it wrote ({unseen_here})")
    if problems:
        return failed(
            f"after {seconds:.0f} s it {' and '.join(problems)}: give the share's users the right to read what others write"
            " (umask, owner), and mount it with a short attribute cache (NFS: actimeo=3)"
        )
    return ok("sees what this machine wrote" + (f", and {others} other node{'s' * (others > 1)}" if others else ""))


def mounts(said: Answer, names: Sequence[str]) -> Finding:
    """Judge the verb ``needs``; ``names`` are of the volumes that every job of the cluster mounts."""
    if said["trouble"]:
        return failed(said["trouble"])
    if said["lacking"]:
        return warning(f"has no {named(said['lacking'])}: each job sends it along; install it there to save that")
    return ok(f"has what it takes to mount {named(names)}")


def clock(offset: float, accuracy: float) -> Finding:
    """Compare a node's clock with this machine's: the difference in seconds, and its uncertainty."""
    at_most = abs(offset) + accuracy
    if at_most < CLOCK_SECONDS_SHOWN:
        return ok(f"as this machine's, within {math.ceil(at_most * 1000)} ms")
    text = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine (±{accuracy:.1f} s)"
    if abs(offset) - accuracy > CLOCK_SECONDS:
        return warning(f"{text}: times that are shown will be off by that; set it by NTP (chrony, systemd-timesyncd)")
    return ok(text)


def space(root: str, free: int, share_free: int | None) -> Finding:
    """Judge the free bytes of the node's folder, and of the control share as the node sees it (None: unknown)."""
    places = [(free, root)] + ([(share_free, "the share")] if share_free is not None else [])
    text = ", ".join(f"{size(amount)} free for {where}" for amount, where in places)
    least = min(amount for amount, _ in places)
    if least < LEAST_FREE_BYTES:
        return failed(f"{text}: jobs need {size(LEAST_FREE_BYTES)} at the very least; free some space there")
    return warning(f"{text}: that is little for a job; free some space there") if least < LITTLE_FREE_BYTES else ok(text)


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


def size(amount: int) -> str:
    """Bytes, for people."""
    value, unit = float(amount), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def named(texts: Sequence[str]) -> str:
    """A list of nodes, the first few by name."""
    more = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
