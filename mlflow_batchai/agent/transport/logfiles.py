"""The log files that an agent writes into ``stdouterr/``: its ranks', its own, and on node 0 the joined ``stdout.txt``."""

from __future__ import annotations

from mlflow_batchai.agent.layout import NodeLayout, log_name
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.agent.processes.tasks import readable
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.share.base import LogFile

EXECUTION = "execution"

# The kind of a record that has lines of a node's execution log.
NOTE = "note"


class LogFiles:
    """The files of one agent, each opened when it has something to say.

    What a method takes as an entry has ``r`` (the rank; None: job preparation), ``s`` (``out``, ``err``, ``EXECUTION``), ``b``
    (whole lines, as they were written) and ``t`` (milliseconds).

    Attributes:
        totals: of each file how many bytes and lines it was given.
    """

    def __init__(self, layout: NodeLayout) -> None:
        self._layout = layout
        self._files: dict[str, LogFile] = {}
        self.totals: dict[str, list[int]] = {}

    def add(self, entry: Record) -> None:
        """Lines of this node; they are written by ``flush``."""
        plan, node = self._layout.plan, self._layout.node
        self._append(own_file(plan, node, entry["s"], entry["r"]), entry["b"])
        if node == 0 and entry["r"] is not None and plan.ranks > 1:
            self.join(log_record(entry))

    def join(self, record: Record) -> None:
        """Node 0 joins the ranks' output; with more than one rank each line says whose it is."""
        text = joined(self._layout.plan, record)
        if text is not None:
            self._append(joined_file(record["s"]), encoded(text))

    def flush(self, last: bool) -> None:
        """Write what is due, of every file.

        Args:
            last: whether nothing more will come.

        Raises:
            OSError: one can't be written now (the others are).
        """
        if last and self._layout.node == 0:
            # Whoever looks for a job's output finds it, though it be nothing (Batch AI had both files for every job).
            self._append("stdout.txt", b"")
            self._append("stderr.txt", b"")
        errors: list[OSError] = []
        for file in self._files.values():
            try:
                file.flush(last)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _append(self, name: str, data: bytes) -> None:
        if name not in self._files:
            self._files[name] = self._layout.control.log_file(f"{self._layout.paths.stdouterr}/{name}")
            self.totals.setdefault(name, [0, 0])
        self.totals[name][0] += len(data)
        self.totals[name][1] += data.count(b"\n")
        self._files[name].append(data)


def own_file(plan: Plan, node: int, stream: str, rank: int | None) -> str:
    """The name of the file that lines of a node go into, its own or a rank's."""
    if stream == EXECUTION:
        return log_name(plan, node, EXECUTION)
    if rank is None:
        return log_name(plan, node, f"std{stream}-job_prep")
    return joined_file(stream) if plan.ranks == 1 else f"std{stream}-{rank}.txt"


def joined_file(stream: str) -> str:
    return f"std{stream}.txt"


def joined(plan: Plan, record: Record) -> str | None:
    """A record's text as the file of all ranks has it; None if it isn't a rank's, or theirs is the only one."""
    if record["r"] is None or plan.ranks == 1:
        return None
    prefix = f"[{record['r']}] "
    return "".join(prefix + line + "\n" for line in record["x"].split("\n")[:-1])


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def log_record(entry: Record) -> Record:
    """An entry as readers of events have it: text, and of a progress line that was overwritten the last state."""
    text = readable(entry["b"].decode("utf-8", "backslashreplace"))
    if entry["s"] == EXECUTION:
        return {"k": NOTE, "t": entry["t"], "x": text}
    return {"k": "log", "t": entry["t"], "r": entry["r"], "s": entry["s"], "x": text}
