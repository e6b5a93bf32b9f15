"""The log files that an agent writes into ``stdouterr/``: its own ranks', its own, and on node 0 the joined ``stdout.txt``."""

from typing import Dict, List

from mlflow_batchai.node.control.base import LogFile
from mlflow_batchai.node.layout import NodeLayout
from mlflow_batchai.node.protocol import Record
from mlflow_batchai.node.tasks import readable

EXECUTION = "execution"


class LogFiles:
    """The files of one agent, each opened when it has something to say.

    What a method takes as an entry has ``r`` (the rank; None: job preparation), ``s`` (``out``, ``err``, ``EXECUTION``), ``b``
    (whole lines, as they were written) and ``t`` (milliseconds).
    """

    def __init__(self, layout: NodeLayout) -> None:
        self._layout = layout
        self._files: Dict[str, LogFile] = {}

    def add(self, entry: Record) -> None:
        """Lines of this node; they are written by ``flush``."""
        plan, node = self._layout.plan, self._layout.node
        if entry["s"] == EXECUTION:
            self._append(self._layout.log_name(EXECUTION), entry["b"])
        elif entry["r"] is None:
            self._append(self._layout.log_name("std%s-job_prep" % entry["s"]), entry["b"])
        elif plan["ranks"] == 1 and node == 0:
            self._append("std%s.txt" % entry["s"], entry["b"])
        else:
            self._append("std%s-%d.txt" % (entry["s"], entry["r"]), entry["b"])
            if node == 0:
                self.join(log_record(entry))

    def join(self, record: Record) -> None:
        """Node 0 joins the ranks' output; with more than one rank each line says whose it is."""
        if record["r"] is None:
            return
        text = record["x"]
        if self._layout.plan["ranks"] > 1:
            prefix = "[%d] " % record["r"]
            text = "".join(prefix + line + "\n" for line in text.split("\n")[:-1])
        self._append("std%s.txt" % record["s"], text.encode("utf-8", "backslashreplace"))

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
        errors: List[OSError] = []
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
            self._files[name] = self._layout.control.log_file("%s/%s" % (self._layout.paths.stdouterr, name))
        self._files[name].append(data)


def log_record(entry: Record) -> Record:
    """An entry as readers of events have it: text, and of a progress line that was overwritten the last state."""
    text = readable(entry["b"].decode("utf-8", "backslashreplace"))
    return {"k": "log", "t": entry["t"], "r": entry["r"], "s": entry["s"], "x": text}
