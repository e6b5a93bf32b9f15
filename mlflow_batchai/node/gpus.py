"""The GPUs of a node: which there are, which of them are its own, and what its processes are let see of them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from mlflow_batchai.node.staging import SetupError

# Where no driver is kept loaded, the first nvidia-smi loads it and looks at every GPU: 20 s with eight of them.
LISTING_SECONDS = 40.0

# One GPU of ``nvidia-smi -L``; its MIG instances stand on indented lines below it.
_LINE = re.compile(r"(?:GPU (?P<index>\d+):|\s+MIG ).*\(UUID: (?P<uuid>(?:GPU|MIG)-[^)\s]+)\)")

# (exit code or None for a program that did not end in time, what it said)
Run = Callable[[List[str], Mapping[str, str]], Tuple[Optional[int], str]]
Part = Tuple[int, int]


class Gpus(NamedTuple):
    """The GPUs of a node.

    Attributes:
        ids: as CUDA_VISIBLE_DEVICES takes them: UUIDs of GPUs or of MIG instances; indexes where no nvidia-smi tells more.
        hidden: whether its processes must be kept from GPUs that the machine may have and that are not this node's.
        note: where the list comes from, for people.
        others: the machine's other GPUs, which it may have instead where somebody else uses its own.
        trouble: what the job's user has to be told of GPUs that are missing, or nothing.
    """

    ids: List[str]
    hidden: bool
    note: str
    others: Sequence[str] = ()
    trouble: str = ""


class Found(NamedTuple):
    """GPUs that a process could use: ids and note as in ``Gpus``, and what is wrong with others, if something is."""

    ids: List[str]
    note: str
    trouble: str = ""


def ask(argv: List[str], environment: Mapping[str, str], seconds: float = LISTING_SECONDS) -> Tuple[Optional[int], str]:
    """Run a program that may hang, for a driver that is broken can hold its processes for ever.

    Returns:
        Its exit code (None: it was killed after ``seconds``, or can't be started), and its output of both kinds.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return None, "%s can't be run: %s" % (argv[0], error.strerror)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):  # it has just ended, and was collected with the agent's other children
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            pass  # it hangs in the kernel; waiting for it would hang us too
        assert process.stdout
        process.stdout.close()
        return None, "%s did not answer within %.0f s" % (" ".join([os.path.basename(argv[0]), *argv[1:]]), seconds)
    return process.returncode, output.decode("utf-8", "replace")


def visible(environment: Mapping[str, str], run: Run = ask) -> Found:
    """The GPUs that a process with this environment could use, and where that comes from or why there are none.

    They are those of ``nvidia-smi -L``, in its order, of a GPU that is cut up its MIG instances; CUDA_VISIBLE_DEVICES, where it
    is set, chooses among them as CUDA does: by index or UUID, in its own order, up to the first that isn't there. One that
    nvidia-smi can't reach any more is left out.
    """
    program = nvidia_smi(environment)
    if program is None:
        return Found([], "no nvidia-smi on PATH")
    code, text = run([program, "-L"], environment)
    last = ([line.strip() for line in text.splitlines() if line.strip() and not _LINE.match(line)] or [""])[-1]
    if code is None:
        return Found([], last, "no GPU is used: %s" % last)
    # The exit code says nothing: with one GPU of eight lost it is not 0.
    cards = _cards(text)
    if not cards:
        return Found([], last or "nvidia-smi -L failed")
    trouble = "nvidia-smi -L says: %s" % last if last else ""
    chosen = _chosen(environment)
    if chosen is None:
        return Found([name for card in cards.values() for name in card], "nvidia-smi -L", trouble)
    return _choose(chosen, cards)._replace(trouble=trouble)


def _cards(text: str) -> Dict[str, List[str]]:
    """Index of a GPU -> what CUDA has of it: its UUID, or those of its MIG instances."""
    cards: Dict[str, List[str]] = {}
    uuid = ""
    for match in filter(None, map(_LINE.match, text.splitlines())):
        if match.group("index"):
            uuid = match.group("uuid")
            cards[match.group("index")] = [uuid]
        elif cards:
            last = next(reversed(list(cards.values())))
            last[:] = [*(name for name in last if name != uuid), match.group("uuid")]
    return cards


def _choose(chosen: Sequence[str], cards: Mapping[str, Sequence[str]]) -> Found:
    """What CUDA_VISIBLE_DEVICES chooses."""
    known = [name for card in cards.values() for name in card]
    note = "CUDA_VISIBLE_DEVICES=%s" % ",".join(chosen)
    ids: List[str] = []
    for name in chosen:
        found = cards[name][0] if name in cards else next((uuid for uuid in known if _is_uuid(name, uuid)), None)
        if found is None:
            return Found(ids, "%s, of which %s is no GPU of nvidia-smi -L" % (note, name))
        if name.isdigit() != chosen[0].isdigit():
            return Found(ids, note + ", which CUDA reads only as far as it is indexes, or UUIDs")
        if found not in ids:
            ids.append(found)
    return Found(ids, note)


def busy(ids: Sequence[str], environment: Mapping[str, str], run: Run = ask) -> Set[str]:
    """Those of some GPUs (of ``visible``) that some process computes on, whoever's it is; none where nvidia-smi can't say."""
    program = nvidia_smi(environment)
    if program is None:
        return set()
    _, used = run([program, "--query-compute-apps=gpu_uuid", "--format=csv,noheader"], environment)
    return set(ids) & {line.strip() for line in used.splitlines()}


def of_node(environment: Mapping[str, str], part: Part, wanted: Optional[int], node: str, run: Run = ask) -> Gpus:
    """The GPUs of one node.

    Args:
        part: (i, n): the node is the i-th of n on its machine, and has the i-th n-th of its GPUs. Where there are fewer GPUs
            than parts none is used: a job over all parts could not train on them.
        wanted: ``gpusPerNode`` of the cluster document: None asks the machine, 0 trains on CPUs. A machine without nvidia-smi
            is taken to have them. Where the node's part is too small, it has some of others' parts.
        node: the node's name in a message.

    Raises:
        SetupError: the machine has fewer than are wanted.
    """
    if wanted == 0:
        return Gpus([], True, "gpusPerNode is 0")
    index, parts = part
    if wanted and nvidia_smi(environment) is None:
        chosen = _chosen(environment)
        found = Found([str(number) for number in range(wanted * parts)] if chosen is None else chosen, "gpusPerNode")
    else:
        found = visible(environment, run)
    machine = found.ids
    if not wanted and 0 < len(machine) < parts:
        few = "%d GPU(s) for the %d nodes of this machine, so none is used; set nodes: %d in the cluster document to use them"
        few %= (len(machine), parts, len(machine))
        return Gpus([], True, few, trouble="; ".join(filter(None, [few, found.trouble])))
    least, more = divmod(len(machine), parts)
    first = index * least + min(index, more)
    ids = machine[first : first + least + (1 if index < more else 0)]
    if wanted:
        if len(machine) < wanted:
            raise SetupError(
                "gpusPerNode is %d and %s has %d GPU(s) (%s): mend its driver, or lower gpusPerNode in the cluster document"
                % (wanted, node, len(machine), found.trouble or found.note)
            )
        ids = [*ids, *(name for name in machine if name not in ids)][:wanted]
    others = [name for name in machine if name not in ids]
    return Gpus(ids, bool(machine) and not ids, found.note, others, found.trouble)


def variables(gpus: Gpus, local_rank: Optional[int] = None) -> Dict[str, str]:
    """What a process is told of its GPUs: a Horovod rank of one, in turn where ranks share them; others of all.

    ``BATCHAI_NODE_GPUS`` has all of the node's, for ranks that choose their own by their local rank.
    """
    if not gpus.ids:
        return {"CUDA_VISIBLE_DEVICES": ""} if gpus.hidden else {}
    ids = gpus.ids if local_rank is None else [gpus.ids[local_rank % len(gpus.ids)]]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(ids),
        # nvidia-smi counts in this order, CUDA otherwise by speed.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "BATCHAI_NODE_GPUS": ",".join(gpus.ids),
    }


def nvidia_smi(environment: Mapping[str, str]) -> Optional[str]:
    """The program on a node's PATH, None if there is none."""
    return shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))


def _chosen(environment: Mapping[str, str]) -> Optional[List[str]]:
    text = environment.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _is_uuid(name: str, uuid: str) -> bool:
    """Whether a name is this UUID, which may be cut short after ``GPU-`` or ``MIG-``."""
    return len(name) > len("GPU-") and uuid.startswith(name)
