"""Show a job on the terminal while it runs: the ranks' output, and one line of progress.

On a terminal the progress line stays at the bottom and is redrawn (rich); elsewhere each step is one plain line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.agent.records import SKIPPED
from mlflow_batchai.errors import JobDetachedError
from mlflow_batchai.job.metrics import Names, numeric, whole
from mlflow_batchai.terminal import fit, is_quiet, printable, silence, writable

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.status import Status

PROGRESS_SECONDS, REDRAW_SECONDS = 5.0, 0.5


class JobConsole:
    """Shows one job.

    Args:
        ranks: number of ranks; with more than one, each line says whose it is.
        out: for the ranks' standard output.
        err: for their standard error, progress and our own words.
    """

    def __init__(self, ranks: int, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._ranks = ranks
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._rich: RichConsole | None = None
        self._status: Status | None = None
        self._epoch: dict[str, float] = {}
        self._step = -1
        self._names = Names()
        self._sending = ""
        self._progress_told: float | None = None
        if self._err.isatty():
            from rich.console import Console

            self._rich = Console(file=self._err, highlight=False, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """One line of our own; none where a person wants quiet."""
        if not is_quiet():
            self._plain(self._err, f"batchai: {fit(sentence, self._err)}\n")

    def transfer(self, sent: int, total: int) -> None:
        """Show how far the upload of files is; short ones are not shown."""
        if self._progress_told is None or sent == 0:
            self._progress_told = time.monotonic()
        elif sent < total:
            self.sending(f"{sent / 1e6:.1f} of {total / 1e6:.1f} MB")

    def sending(self, text: str) -> None:
        """Show from time to time how far an upload is; empty: show nothing."""
        now, last = time.monotonic(), self._progress_told
        pause = PROGRESS_SECONDS if self._rich is None else REDRAW_SECONDS
        if text and text != self._sending and (last is None or now - last >= pause):
            self._sending, self._progress_told = text, now
            self.state(f"sending {text}")

    def state(self, text: str) -> None:
        """Show the state of the job: as the bottom line of a terminal, else as a line of its own."""
        if is_quiet():
            return
        if self._rich is None:
            self.say(text)
            return
        if self._status is None:
            self._status = self._rich.status("", spinner="dots")
            self._status.start()
        from rich.text import Text

        self._status.update(Text(printable(text), no_wrap=True, overflow="ellipsis"))

    def close(self) -> None:
        """Take the line at the bottom away."""
        self._tell_epoch()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def records(self, records: Iterable[Record]) -> None:
        """Show what ranks wrote and reported."""
        for record in records:
            kind = record["k"]
            if kind == "log":
                self._log(record)
            elif kind == "report" and record["body"].get("type") == "metric" and not record["body"].get("rank"):
                self._metric(record["body"])
            elif kind == "phase" and record["phase"] != "running":
                self.state(f"{record['phase']} on node-{record['node']}")
            elif kind == "dropped":
                self.say(f"{record['lines']} lines were dropped: the share did not take them in time")
            elif kind == SKIPPED:
                self._skipped(record)

    def _skipped(self, record: Record) -> None:
        if record["files"]:
            self.say(f"{record['files']} event files are damaged or missing on the share, and were left out")
        else:
            self.say(f"{record['lines']} lines of what agents and ranks had reported could not be read, and were left out")

    def _log(self, record: Record) -> None:
        stream = self._out if record["s"] == "out" else self._err
        rank = record["r"]
        prefix = "[prep] " if rank is None else f"[{rank}] " if self._ranks > 1 else ""
        self._plain(stream, "".join(f"{prefix}{fit(line, stream)}\n" for line in record["x"].split("\n")[:-1]))

    def _plain(self, stream: TextIO, text: str) -> None:
        if self._status is not None:
            self._status.stop()
        try:
            stream.write(writable(text, stream))
            stream.flush()
        except OSError as error:
            silence(stream)
            raise JobDetachedError(f"the output can't be written ({error.strerror})") from error
        if self._status is not None:
            self._status.start()

    def _metric(self, body: dict[str, Any]) -> None:
        step = whole(body.get("step"))
        if step != self._step:
            self._tell_epoch()
            self._step = step
        values = body.get("values")
        for name, value in values.items() if isinstance(values, dict) else ():
            if (number := numeric(value)) is not None:
                self._epoch[self._names.key(name)] = number
        for notice in self._names.news():
            self.say(notice)
        if self._rich is not None:
            self.state(self._line())

    def _line(self) -> str:
        values = "  ".join(f"{name} {value:.4g}" for name, value in self._epoch.items())
        return f"step {self._step}: {values}"

    def tell_step(self) -> None:
        """Say what is new of a step, where no line at the bottom shows it."""
        if self._rich is None:
            self._tell_epoch()

    def _tell_epoch(self) -> None:
        if self._epoch:
            self.say(self._line())
        self._epoch = {}
