"""The GPUs of a node: which there are, which of them are its own, and what its processes are let see of them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from mlflow_batchai.node.staging import SetupError

LISTING_SECONDS = 10.0

# One GPU of ``nvidia-smi -L``; its MIG instances stand on indented lines below it.
_LINE = re.compile(r"^GPU (?P<index>\d+): .*\(UUID: (?P<uuid>GPU-[^)\s]+)\)")

# (exit code or None for a program that did not end in time, what it said)
Run = Callable[[List[str], Mapping[str, str]], Tuple[Optional[int], str]]
Part = Tuple[int, int]


class Gpus(NamedTuple):
    """The GPUs of a node.

    Attributes:
        ids: as CUDA_VISIBLE_DEVICES takes them, indexes or UUIDs.
        hidden: whether its processes must be kept from GPUs that the machine may have and that are not this node's.
        note: where the list comes from, for people.
    """

    ids: List[str]
    hidden: bool
    note: str


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


def visible(environment: Mapping[str, str], run: Run = ask) -> Tuple[List[str], str]:
    """(ids of the GPUs that a process with this environment could use, where that comes from or why there are none).

    They are those of ``nvidia-smi -L``, in its order; CUDA_VISIBLE_DEVICES, where it is set, chooses among them as CUDA does:
    by index or UUID, in its own order, up to the first that isn't there.
    """
    program = nvidia_smi(environment)
    if program is None:
        return [], "no nvidia-smi on PATH"
    code, text = run([program, "-L"], environment)
    if code != 0:
        return [], ([line.strip() for line in text.splitlines() if line.strip()] or ["nvidia-smi -L failed"])[-1]
    uuids = {match.group("index"): match.group("uuid") for match in map(_LINE.match, text.splitlines()) if match}
    chosen = _chosen(environment)
    if chosen is None:
        return list(uuids), "nvidia-smi -L"
    ids: List[str] = []
    for name in chosen:
        found = name if name in uuids else next((uuid for uuid in uuids.values() if _is_uuid(name, uuid)), None)
        if found is None:
            return ids, "CUDA_VISIBLE_DEVICES=%s, of which %s is no GPU of nvidia-smi -L" % (",".join(chosen), name)
        if ids and ids[0].isdigit() != found.isdigit():
            return ids, "CUDA_VISIBLE_DEVICES=%s, which CUDA reads only as far as it is indexes, or UUIDs" % ",".join(chosen)
        if found not in ids:
            ids.append(found)
    return ids, "CUDA_VISIBLE_DEVICES=%s" % ",".join(chosen)


def busy(ids: Sequence[str], environment: Mapping[str, str], run: Run = ask) -> int:
    """How many of these GPUs (of ``visible``) some process computes on, whoever's it is; 0 where nvidia-smi can't say."""
    program = nvidia_smi(environment)
    if program is None:
        return 0
    listed, indexes = run([program, "--query-gpu=index,uuid", "--format=csv,noheader"], environment)
    asked, used = run([program, "--query-compute-apps=gpu_uuid", "--format=csv,noheader"], environment)
    if listed != 0 or asked != 0:
        return 0
    uuids = {index.strip(): uuid.strip() for index, _, uuid in (line.partition(",") for line in indexes.splitlines())}
    return len({uuids.get(name, name) for name in ids} & {line.strip() for line in used.splitlines()})


def of_node(environment: Mapping[str, str], part: Part, wanted: Optional[int], node: str, run: Run = ask) -> Gpus:
    """The GPUs of one node.

    Args:
        part: (i, n): the node is the i-th of n on its machine, and has the i-th n-th of its GPUs. Where there are fewer GPUs
            than parts none is used: a job over all parts could not train on them.
        wanted: ``gpusPerNode`` of the cluster document: None asks the machine, 0 trains on CPUs. A machine without nvidia-smi
            is taken to have them.
        node: the node's name in a message.

    Raises:
        SetupError: the node has fewer than are wanted.
    """
    if wanted == 0:
        return Gpus([], True, "gpusPerNode is 0")
    index, parts = part
    if wanted and nvidia_smi(environment) is None:
        chosen = _chosen(environment)
        machine, note = [str(number) for number in range(wanted * parts)] if chosen is None else chosen, "gpusPerNode"
    else:
        machine, note = visible(environment, run)
    if not wanted and 0 < len(machine) < parts:
        few = "%d GPU(s) for the %d nodes of this machine, so none is used; set nodes: %d in the cluster document to use them"
        return Gpus([], True, few % (len(machine), parts, len(machine)))
    least, more = divmod(len(machine), parts)
    first = index * least + min(index, more)
    ids = machine[first : first + least + (1 if index < more else 0)]
    if wanted:
        if len(ids) < wanted:
            raise SetupError(
                "gpusPerNode is %d and %s has %d GPU(s) (%s): mend its driver, or lower gpusPerNode in the cluster document"
                % (wanted, node, len(ids), note)
            )
        ids = ids[:wanted]
    return Gpus(ids, bool(machine) and not ids, note)


def variables(gpus: Gpus, local_rank: Optional[int] = None) -> Dict[str, str]:
    """What a process is told of its GPUs: a Horovod rank of one, in turn where ranks share them; others of all."""
    if not gpus.ids:
        return {"CUDA_VISIBLE_DEVICES": ""} if gpus.hidden else {}
    ids = gpus.ids if local_rank is None else [gpus.ids[local_rank % len(gpus.ids)]]
    found = {"CUDA_VISIBLE_DEVICES": ",".join(ids)}
    if any(name.isdigit() for name in ids):
        # nvidia-smi counts in this order, CUDA otherwise by speed.
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return found


def nvidia_smi(environment: Mapping[str, str]) -> Optional[str]:
    """The program on a node's PATH, None if there is none."""
    return shutil.which("nvidia-smi", path=environment.get("PATH", os.defpath))


def _chosen(environment: Mapping[str, str]) -> Optional[List[str]]:
    text = environment.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _is_uuid(name: str, uuid: str) -> bool:
    """Whether a name is a GPU's UUID, which may be cut short after ``GPU-``."""
    return len(name) > len("GPU-") and uuid.startswith(name)
