"""The ticket book: which job has which nodes of a cluster, in one order for all.

A cluster run by ``hosts`` has no daemon. A job takes its N tickets in one step under one lock, with one number that only
rises, so all nodes serve jobs in the same order and two gangs can't wait for each other. A node's ticket is a file that the
node's agent keeps locked while it lives: the kernel lets go of it however the agent ends. Node roots are folders on the
node's own disk (never on a share: flock is not to be trusted there).
"""

import contextlib
import fcntl
import json
import os
import time
from typing import IO, Any, Callable, Collection, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

# A ticket whose agent hasn't come within this many seconds is given up: its submitter died between two steps.
ARRIVAL_SECONDS = 60.0
# Others give it up this much later: between machines an age is known no better than a question and its answer take.
MARGIN_SECONDS = 15.0
# A ticket of nodes that left the cluster long ago.
FORGET_SECONDS = 30 * 86400.0


class LateError(Exception):
    """The agent came when its ticket had been given up: others may have the node before it, on this node but not on others."""


class TwinError(Exception):
    """The ticket has its agent already: whoever comes second must not say a word in its name."""


class BookError(Exception):
    """The ticket book can't be read, or can't give what is asked; the message is one sentence."""


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, "book.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _load(folder: str, moment: float) -> Dict[str, Any]:
    """The book; a new one begins with a number that no lost one before it has come to."""
    try:
        with open(os.path.join(folder, "book.json"), encoding="utf-8") as file:
            book: Dict[str, Any] = json.load(file)
            return book
    except FileNotFoundError:
        return {"next": int(moment * 1000), "tickets": []}
    except ValueError:
        path = os.path.join(folder, "book.json")
        raise BookError("the ticket book %s is damaged; remove it when no job of the cluster runs" % path) from None


def _store(folder: str, book: Dict[str, Any]) -> None:
    path = os.path.join(folder, "book.json")
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(book, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def ticket_path(root: str, number: int) -> str:
    """The file that the agent with this ticket keeps locked on its node."""
    return os.path.join(root, "tickets", str(number))


def listing(folder: str, now: Optional[float] = None) -> List[Dict[str, Any]]:
    """The book's tickets: ``number``, ``job``, ``folder``, ``nodes`` and ``age``, the seconds since it was taken."""
    moment = time.time() if now is None else now
    return [_aged(entry, moment) for entry in _load(folder, moment)["tickets"]]


def _aged(entry: Dict[str, Any], moment: float) -> Dict[str, Any]:
    return {
        "number": entry["number"],
        "job": entry["job"],
        # Books of versions before this one have none.
        "folder": entry.get("folder", ""),
        "nodes": entry["nodes"],
        "age": moment - entry["taken"],
    }


def take(
    folder: str,
    nodes: Sequence[str],
    job: str,
    count: int,
    ended: Mapping[str, Sequence[int]],
    now: Optional[float] = None,
    closed: Collection[str] = (),
    job_folder: str = "",
) -> Dict[str, Any]:
    """Take ``count`` nodes for a job, in one step.

    The nodes with the fewest jobs before them are chosen, earlier names first, and only then those that take no jobs now.
    Asked again for a job that has its ticket already, it gives that ticket.

    Args:
        folder: the book's folder, on the disk of the cluster's first node.
        nodes: names of the nodes that can be had, in the cluster's order.
        job: the job's mark.
        count: nodes wanted, at most ``len(nodes)``.
        ended: name -> numbers of tickets that have ended there. What has ended stays so: it doesn't matter when that was seen.
        closed: names of those that take no jobs for now.
        job_folder: on the control share, for who wants to know whose ticket it is.

    Returns:
        As ``listing`` gives it, and ``after``: name -> earlier numbers, of its nodes.
    """
    moment = time.time() if now is None else now
    if len(set(nodes)) < max(count, len(nodes)):
        raise BookError("%d nodes are wanted of %d that have different ids" % (count, len(set(nodes))))
    with _locked(folder):
        book = _load(folder, moment)
        live = [entry for entry in book["tickets"] if not _over(entry, nodes, ended, moment)]
        entry = next((entry for entry in live if entry["job"] == job), None)
        if entry is None:
            waiting = _waiting(live, nodes, ended)
            order = sorted(range(len(nodes)), key=lambda index: (nodes[index] in closed, len(waiting[nodes[index]]), index))
            chosen = [nodes[index] for index in sorted(order[:count])]
            entry = {"number": book["next"], "job": job, "folder": job_folder, "nodes": chosen, "taken": moment}
            _store(folder, {"next": book["next"] + 1, "tickets": [*live, entry]})
    earlier = _waiting([other for other in live if other["number"] < entry["number"]], entry["nodes"], ended)
    return dict(_aged(entry, moment), after=earlier)


def _waiting(live: Sequence[Dict[str, Any]], nodes: Sequence[str], ended: Mapping[str, Sequence[int]]) -> Dict[str, List[int]]:
    """Name -> numbers of the tickets that stand for that node."""
    found: Dict[str, List[int]] = {name: [] for name in nodes}
    for entry in live:
        for name in entry["nodes"]:
            if name in found and entry["number"] not in ended.get(name, ()):
                found[name].append(entry["number"])
    return found


def _over(entry: Dict[str, Any], nodes: Sequence[str], ended: Mapping[str, Sequence[int]], moment: float) -> bool:
    """Whether a ticket can be forgotten; one of nodes that nobody can ask any more is, in time."""
    asked = entry["nodes"] if moment - entry["taken"] <= FORGET_SECONDS else [name for name in entry["nodes"] if name in nodes]
    return all(entry["number"] in ended.get(name, ()) for name in asked)


def drop(folder: str, number: int, job: str) -> None:
    """Forget a job's ticket; one that isn't there is fine."""
    with _locked(folder):
        book = _load(folder, time.time())
        book["tickets"] = [entry for entry in book["tickets"] if (entry["number"], entry["job"]) != (number, job)]
        _store(folder, book)


def state(root: str, number: int, taken: float, now: float) -> str:
    """``waiting`` (its agent hasn't come), ``held`` (its agent lives) or ``ended``, as seen on that node."""
    try:
        with open(ticket_path(root, number)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return "held"
            return "ended"
    except FileNotFoundError:
        # A clock that was set back a little since must not end it either.
        return "waiting" if abs(now - taken) < ARRIVAL_SECONDS + MARGIN_SECONDS else "ended"


def claim(root: str, number: int, taken: float, clock: Callable[[], float] = time.time) -> IO[str]:
    """Called by the agent at its start: its ticket file, open and locked; it must stay open.

    Raises:
        TwinError: another agent has it, or had it.
        LateError: the ticket has been given up (and gang order would be lost if we went on).
    """
    path = ticket_path(root, number)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    # Locked before it has its name: nobody may see it there and free.
    new = "%s.%d" % (path, os.getpid())
    file = open(new, "a")  # noqa: SIM115 (it lives as long as the agent)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        os.link(new, path)
    except FileExistsError:
        file.close()
        raise TwinError("the ticket %d has its agent already" % number) from None
    finally:
        os.unlink(new)
    # Asked last: who looked in time saw the file, and who looks later sees it.
    if abs(clock() - taken) >= ARRIVAL_SECONDS:
        file.close()
        raise LateError("its agent came more than %d s after its ticket was taken; submit again" % ARRIVAL_SECONDS)
    return file


def predecessors(root: str, after: Sequence[int], taken: float, now: float) -> List[int]:
    """Those of the earlier tickets that still stand before us on this node."""
    return [number for number in after if state(root, number, taken, now) != "ended"]


def lock_path(root: str) -> str:
    """The file whose lock means: this node is taken."""
    return os.path.join(root, "lock")


def open_node_lock(root: str) -> int:
    """The node's own lock, as a file descriptor that ranks inherit: free only when the last of them is gone."""
    descriptor = _open(lock_path(root))
    os.set_inheritable(descriptor, True)
    return descriptor


def open_agent_lock(root: str) -> int:
    """The lock of the one agent that may take the node, as a file descriptor that nobody inherits.

    Whoever has it knows that what still holds the node's lock was left by an agent that is gone, and may be ended. Tickets
    alone don't say so: a book that was deleted begins anew.
    """
    return _open(os.path.join(root, "agent.lock"))


def _open(path: str) -> int:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int) -> bool:
    """Take a lock if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Let go of a lock; the descriptor can take it again."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def owner(root: str) -> Optional[Tuple[str, int]]:
    """(mark, index of the node in that job) of the job that last had the node."""
    try:
        with open(os.path.join(root, "owner"), encoding="utf-8") as file:
            mark, _, node = file.read().strip().rpartition(" ")
    except FileNotFoundError:
        return None
    return (mark, int(node)) if mark and node.isdigit() else None


def set_owner(root: str, mark: str, node: int) -> None:
    """Write which job has the node now."""
    _replace(os.path.join(root, "owner"), "%s %d\n" % (mark, node))


def set_state(root: str, number: int, text: str) -> None:
    """Write what the engine's poll can say of this node without the share."""
    _replace(ticket_path(root, number) + ".state", text)


def told(root: str, number: int) -> Dict[str, Any]:
    """What a ticket's agent wrote last; empty if nothing."""
    try:
        with open(ticket_path(root, number) + ".state", encoding="utf-8") as file:
            found = json.load(file)
            return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def said(root: str, number: int) -> Optional[str]:
    """The state that a ticket's agent wrote last, or None."""
    state = told(root, number).get("state")
    return None if state is None else str(state)


def _replace(path: str, text: str) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def forget_ended(root: str, now: float) -> None:
    """Remove ticket files of jobs that have ended (called by an agent that holds the node)."""
    folder = os.path.join(root, "tickets")
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        # A day: a waiting agent may still look for a file that has just become free, and finding it gone reads as ended too.
        if name.isdigit() and now - os.stat(path).st_mtime > 86400 and state(root, int(name), 0, now) == "ended":
            for ending in ("", ".state", ".agent", ".agent.lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + ending)
