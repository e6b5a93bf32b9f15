"""Report metrics and saved models from a training script; outside a job it does nothing.

    from mlflow_batchai.training import report

    report.log(step=epoch, loss=0.31, val_loss=0.4)
    model.fit(..., callbacks=[report.keras_callback()])
    report.model("outputs/model.h5", model)

A record is one JSON line, appended in one write to a file of this process in the node-local folder
that the agent names in BATCHAI_SPOOL (``Spool``). Nothing that a disk refuses stops the training. Standard library only.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import errno
import itertools
import json
import logging
import math
import operator
import os
import reprlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

_log = logging.getLogger("mlflow_batchai.training.report")

HEAD = '{"type":"count","records":%12d,"points":%12d}\n'
# Records that are kept in memory: those that wait, and the last ones that were written, for a file that somebody removes.
MOST_BYTES = 8 << 20
AGAIN_SECONDS = 1.0
# How long a process that ends waits for a disk that is full.
LAST_SECONDS = 5.0

# A line, and the names of the points in it.
_Line = tuple[bytes, Sequence[str]]
# Names in one record of what was dropped.
_MOST_NAMES = 1000

_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"))

_LONGEST_EXAMPLE = 128 << 10
_RANK_VARIABLES = ("BATCHAI_RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")


def _encoded(text: str, more: str = "") -> bytes:
    return (text[:-1] + more + "}\n").encode("ascii")


class Spool:
    """The file of this process.

    Records are numbered (``n``, from 1): a file that is written anew, since somebody removed it, has some of them again.

    Args:
        folder: made if it isn't there.
    """

    def __init__(self, folder: str, rank: int) -> None:
        # A program that was started in a process's place has its number.
        name = f"report-{rank}-{os.getpid()}-{time.time_ns():x}.jsonl"
        self.path = os.path.join(folder, name)
        self.lock = threading.Lock()
        self._descriptor: int | None = None
        self._size = 0
        self._records = self._points = 0
        # What was handed in, and what is numbered and waits for the disk.
        self._incoming: collections.deque[tuple[str, Sequence[str]]] = collections.deque()
        self._waiting: collections.deque[_Line] = collections.deque()
        self._written: collections.deque[_Line] = collections.deque()
        self._bytes = 0
        self._lost: dict[str, int] = {}
        self._retrying = self._complained = False
        atexit.register(self.finish)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, or keep it until it can be written. Raises TypeError, ValueError: JSON can't say it."""
        names = list(record["values"]) if record["type"] == "metric" else []
        self._incoming.append((_encoder.encode(record), names))
        self._work()

    def _work(self) -> None:
        """Write what was handed in. Whoever holds the lock looks once more when it is free: it may be this very thread, that a
        signal has interrupted, and must not be waited for."""
        while self._incoming and self.lock.acquire(blocking=False):
            try:
                self._try()
            finally:
                self.lock.release()

    def finish(self) -> None:
        """The process ends: wait a while for a disk that is full."""
        until = time.monotonic() + LAST_SECONDS
        with self.lock:
            self._retrying = True  # no thread can be started any more
            while (self._waiting or self._incoming) and not self._try() and time.monotonic() < until:
                time.sleep(0.1)

    def forget(self) -> None:
        """In a child process, which has a file of its own: what waits is written by its parent."""
        atexit.unregister(self.finish)
        self._close()

    def _take(self) -> None:
        """Number what was handed in; past ``MOST_BYTES`` the oldest is dropped and counted."""
        while self._incoming:
            text, names = self._incoming.popleft()
            self._records += 1
            self._points += len(names)
            data = _encoded(text, f',"n":{self._records}')
            self._waiting.append((data, names))
            self._bytes += len(data)
        while self._bytes > MOST_BYTES and (self._written or len(self._waiting) > 1):
            if self._written:
                self._bytes -= len(self._written.popleft()[0])
                continue
            dropped, of = self._waiting.popleft()
            self._bytes -= len(dropped)
            for name in of or ("",):
                self._lost[name] = self._lost.get(name, 0) + 1

    def _try(self) -> bool:
        """Write what waits; whether all of it could be written. If not, it is tried again from time to time."""
        self._take()
        try:
            self._flush()
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("records wait in memory, as %s can't be written: %s", self.path, error.strerror or error)
            self._try_again()
            return False
        return True

    def _try_again(self) -> None:
        if self._retrying:
            return
        timer = threading.Timer(AGAIN_SECONDS, self._again)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started now: the next record tries
            timer.start()
            self._retrying = True

    def _again(self) -> None:
        with self.lock:
            self._retrying = False
            self._try()
        self._work()

    def _flush(self) -> None:
        if self._descriptor is None or os.fstat(self._descriptor).st_nlink == 0:
            try:
                self._open()
            except OSError:
                if self._descriptor is None:
                    raise
                # The agent has the file open that was removed: it reads on.
        try:
            while self._waiting:
                self._put(self._waiting[0][0])
                self._written.append(self._waiting.popleft())
            while self._lost:
                some = dict(itertools.islice(self._lost.items(), _MOST_NAMES))
                self._put(_encoded(_encoder.encode({"type": "lost", "values": some})))
                for name in some:
                    del self._lost[name]
        finally:
            if self._descriptor is not None and self._size:
                os.pwrite(self._descriptor, self._head(), 0)

    def _open(self) -> None:
        """Make the file, anew if it was removed (cleaners of old files take the folder, too), with all that is still known."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o644)
        self._close()
        self._descriptor, self._size = descriptor, 0
        self._waiting.extendleft(reversed(self._written))
        self._written.clear()

    def _head(self) -> bytes:
        return (HEAD % (self._records, self._points)).encode("ascii")

    def _put(self, data: bytes) -> None:
        assert self._descriptor is not None
        if not self._size:
            data = self._head() + data
        if os.pwrite(self._descriptor, data, self._size) < len(data):
            os.ftruncate(self._descriptor, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        self._size += len(data)

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def log(metrics: Mapping[str, Any] | None = None, step: int = 0, all_ranks: bool = False, **values: Any) -> None:
    """Report metrics of one step (usually the epoch, from 0), as keywords or as a mapping, or both.

    Values are anything ``float()`` takes but text: numbers, NumPy scalars, tensors of one element. Only rank
    0's are kept, unless ``all_ranks``: then each rank's are stored as ``rank_<n>/<name>``. A name that MLflow
    would refuse is stored as another (``_`` for other characters than letters, digits and ``_-. :/``, at most 250), and
    the run's notes say so.

    A wrong value or step raises TypeError at the first call, on every rank, job or not. Later calls never raise: a value that
    is no number is left out, a step that is not whole takes the whole call with it, and the run's notes count them.
    """
    numbers: dict[str, Any] = {}
    whole = _whole(step)
    wrong = None if whole is not None else f"step must be a whole number of 64 bits, not {_shown(step)}"
    if metrics is not None and not isinstance(metrics, Mapping):
        wrong, metrics = f"metrics must be a mapping of names to numbers, not {_shown(metrics)}", {"metrics": None}
    for name, value in dict(metrics or {}, **values).items():
        numbers[str(name)] = number = None if whole is None else _number(value)
        if number is None and not wrong:
            what = f"the value of {name!r} must be one number (what float() takes, but no text)"
            wrong = f"{what}, not {_shown(value)}"
    if wrong and not _Process.has_logged:
        raise TypeError(f"report.log: {wrong}.")
    if wrong and not _Process.warned:
        _Process.warned = True
        _log.warning("report.log: %s; it is left out, as are those that follow.", wrong)
    _Process.has_logged = True
    own = rank()
    if not numbers or (own != 0 and not all_ranks):
        return
    prefix = f"rank_{own}/" if all_ranks else ""
    append(
        {
            "type": "metric",
            "ts": int(time.time() * 1000),
            "rank": own,
            "step": whole or 0,
            "values": {f"{prefix}{name}": value for name, value in numbers.items()},
        }
    )


def model(path: Any, model: Any = None, example: Any = None) -> None:
    """Report a saved model file, with what is known only here: versions, and with ``model`` its inputs and outputs.

    Relative paths are taken from the working directory. Only rank 0's reports are kept. Of ``example``, a batch of inputs (an
    array, or a mapping of the inputs' names to arrays), the first one is kept, if it is no more than 128 KiB of text.
    Raises TypeError if ``path`` is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"report.model: path must be a path, not {path!r}.")
    if rank() != 0:
        return
    where = os.path.abspath(os.fspath(path))
    try:
        meta = model_meta(where, model)
    except Exception as error:  # facts are a help to the submitter, not worth a training run
        _log.warning("report.model: %s is reported without its facts: %r", where, error)
        meta = {}
    if example is not None:
        meta["example"] = _first_of(example)
    record = {"type": "model", "path": where, "ts": int(time.time() * 1000), "meta": meta}
    _Process.models.pop(where, None)
    _Process.models[where] = record
    append(record)


def models() -> Mapping[str, Any]:
    """The records of saved models that this process has reported, the last of each path, in their order."""
    return _Process.models


def _first_of(example: Any) -> Any:
    """A batch of one as nested lists, or None for what is none, or too large."""
    try:
        named = isinstance(example, Mapping)
        parts = {str(name): _lists(value) for name, value in (example.items() if named else [("", example)])}
        text = json.dumps(parts, allow_nan=False)
    except (TypeError, ValueError) as error:
        _log.warning("report.model: the example is left out: %s", error)
        return None
    if len(text) > _LONGEST_EXAMPLE:
        _log.warning(
            "report.model: the example is left out: it is %d letters of text, more than %d", len(text), _LONGEST_EXAMPLE
        )
        return None
    return parts if named else parts[""]


def _lists(value: Any) -> Any:
    first = value[:1]
    first = first.numpy() if hasattr(first, "numpy") else first
    return first.tolist() if hasattr(first, "tolist") else list(first)


def keras_callback(images_per_epoch: int | None = None) -> Any:
    """Return a Keras callback that reports every epoch's logs and the learning rate, with step = epoch from 0.

    With ``images_per_epoch`` (of all ranks together) it reports ``images_per_second`` too, over the whole epoch with
    its validation. Put it after MetricAverageCallback, so that the averages are reported.
    """
    import keras

    class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._began = time.monotonic()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            values = dict(logs or {})
            rate = getattr(self.model.optimizer, "learning_rate", None)
            if rate is not None and "learning_rate" not in values:
                values["learning_rate"] = keras.ops.convert_to_numpy(rate)
            if images_per_epoch is not None:
                values["images_per_second"] = images_per_epoch / max(time.monotonic() - self._began, 1e-9)
            log(values, step=epoch)

    return ReportCallback()


def model_meta(path: str, model: Any = None) -> dict[str, Any]:
    """Return the facts about a saved model that the submitting machine can't know without loading it.

    ``format`` ("h5", "keras" or the suffix), ``keras`` and ``backend`` (of what is imported now), what
    ``saved_models.environment`` tells of this interpreter, and with ``model`` ``inputs`` and ``outputs``: lists of name,
    shape (-1 where it varies) and dtype.
    """
    from mlflow_batchai.training import saved_models

    suffix = os.path.splitext(path)[1].lower().lstrip(".")
    keras = sys.modules.get("keras")
    meta: dict[str, Any] = {
        "format": {"hdf5": "h5"}.get(suffix, suffix),
        **saved_models.environment(keras.backend.backend() if keras else ""),
    }
    if keras is None:
        del meta["backend"]
    else:
        meta["keras"] = str(keras.__version__)
    if model is not None:
        for key in ("inputs", "outputs"):
            tensors = getattr(model, key, None)
            if tensors:
                meta[key] = [_tensor_facts(tensor) for tensor in tensors]
        names = getattr(model, "output_names", None)
        if names and len(names) == len(meta.get("outputs", [])):
            for fact, name in zip(meta["outputs"], names):
                fact["name"] = name
    return meta


def _tensor_facts(tensor: Any) -> dict[str, Any]:
    shape = [-1 if length is None else int(length) for length in tensor.shape]
    return {"name": str(tensor.name), "shape": shape, "dtype": str(tensor.dtype)}


def _shown(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # a number of thousands of digits, or what a framework's tensor raises
        return f"one of type {type(value).__name__}"


def _whole(step: Any) -> int | None:
    """A step as a number; None if it is none. Arrays and tensors look like one until they are asked."""
    try:
        number = operator.index(step)
    except Exception:
        return None
    return number if not isinstance(step, bool) and -(2**63) <= number < 2**63 else None


def _number(value: Any) -> Any:
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return spelled(float(value))
    except Exception:  # whatever a framework's tensor raises
        return None


def spelled(number: float) -> Any:
    """Return the number as a record has it: "nan", "inf" and "-inf" as text, since JSON has no word for them."""
    return number if math.isfinite(number) else str(number)


def rank() -> int:
    """Return this process's rank, 0 if nothing says which."""
    for variable in _RANK_VARIABLES:
        text = os.environ.get(variable, "")
        if text.isdigit():
            return int(text)
    return 0


class _Process:
    """The file that this process reports in, made at its first record."""

    lock = threading.Lock()
    spool: Spool | None = None
    folder = ""
    # Whether a call of ``log`` was right: from then on none raises.
    has_logged = False
    warned = False
    models: ClassVar[dict[str, Any]] = {}

    @classmethod
    def renew(cls) -> None:
        """In a child process: another thread may have held the lock when it was made."""
        cls.lock = threading.Lock()
        if cls.spool is not None:
            cls.spool.forget()
            cls.spool = None


os.register_at_fork(after_in_child=_Process.renew)


def append(record: Mapping[str, Any]) -> None:
    """Append a record to this process's file, or keep it until its disk has room; outside a job it is lost."""
    folder = os.environ.get("BATCHAI_SPOOL")
    if not folder:
        _log.debug("not in a job (BATCHAI_SPOOL is not set), not reported: %s", record)
        return
    spool = _Process.spool
    if spool is None or _Process.folder != folder:
        with _Process.lock:
            if _Process.spool is None or _Process.folder != folder:
                _Process.spool, _Process.folder = Spool(folder, rank()), folder
            spool = _Process.spool
    spool.append(record)
