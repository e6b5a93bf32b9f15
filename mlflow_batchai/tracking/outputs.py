"""Select what ranks have left in output directories, and upload each file once into the run's artifacts."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mlflow_batchai.errors import ShareError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.places import output_places
from mlflow_batchai.job.sent import SentFiles, Stamp
from mlflow_batchai.storage.ignore import parse
from mlflow_batchai.tracking.artifacts import Folder

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# What ``training.checkpoints`` calls its files, and what it notes of each in the small one.
_NAME = re.compile(r"((?:.*/)?epoch-\d{4,}(?:-batch-\d{6,})?)(\.[^/]+)")
_KEYS = frozenset({"epochs_done", "batches", "sha256", "settings", "state"})
_LONGEST_NOTE = 1 << 20


# What has fewer bytes and takes less time isn't worth a word.
LARGE, SHORT_SECONDS = 64 << 20, 5.0
# How often the next relay is told what it needn't send.
SAVE_SECONDS = 10.0


class Selected(NamedTuple):
    """The files of one output directory, divided.

    Attributes:
        checkpoints: how many checkpoints stay.
        excluded: how many files a pattern keeps from going.
    """

    wanted: dict[str, Stamp]
    checkpoints: int
    excluded: int


def select(
    files: Mapping[str, Stamp], read: Callable[[str], bytes], checkpoints: bool = False, exclude: Sequence[str] = ()
) -> Selected:
    """Divide files.

    Args:
        files: by their paths in the output directory.
        read: a small file's content; empty if it has gone.
        exclude: patterns as in a ``.gitignore`` there.
    """
    rules = [rule for rule in map(parse, exclude) if rule is not None]

    def excluded(path: str) -> bool:
        """A folder that stays keeps all in it."""
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            whole, is_file = "/".join(parts[:count]), count == len(parts)
            spoken = [
                rule
                for rule in rules
                if not (rule.folders_only and is_file) and rule.regex.fullmatch(whole if rule.whole else parts[count - 1])
            ]
            if spoken and spoken[-1].leaves_out:
                return True
        return False

    left = {path: stamp for path, stamp in files.items() if not excluded(path)}
    pairs = [] if checkpoints else _checkpoints(left, read)
    held = {path for pair in pairs for path in pair}
    return Selected({path: stamp for path, stamp in left.items() if path not in held}, len(pairs), len(files) - len(left))


def _checkpoints(files: Mapping[str, Stamp], read: Callable[[str], bytes]) -> list[tuple[str, str]]:
    """(large file, small file) of each checkpoint. Where more than one file could be the large one, it counts as none."""
    suffixes: dict[str, list[str]] = defaultdict(list)
    for path in files:
        if match := _NAME.fullmatch(path):
            suffixes[match[1]].append(match[2])
    pairs = []
    for stem, found in suffixes.items():
        small = stem + ".json"
        if len(found) == 2 and ".json" in found and files[small].size <= _LONGEST_NOTE and _is_note(small, read):
            large = next(suffix for suffix in found if suffix != ".json")
            pairs.append((stem + large, small))
    return pairs


def _is_note(path: str, read: Callable[[str], bytes]) -> bool:
    try:
        note = json.loads(read(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(note, dict) and note.keys() >= _KEYS


class Outputs:
    """Upload the job's output directories into the run's artifacts: ``outputs/<id>/...``.

    Attributes:
        checkpoints: a sentence on those that stay on the share, since nobody asked for them; empty: none do.
        excluded: the same of files that a pattern of batchai.yaml leaves out.
    """

    def __init__(self, client: MlflowClient, job: Job, sent: SentFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._job = job
        self._sent = sent
        self._clock = clock
        # What shares that can't be read have said.
        self._away: list[str] = []
        self.checkpoints = ""
        self.excluded = ""

    def send(self, tell: Callable[[str], None] = lambda text: None) -> list[str]:
        """Send what isn't there; if that fails, call it again, and it goes on where it was.

        Args:
            tell: told how far it has come, after each file, if there is much to send.

        Returns:
            Sentences on what was left out against our will.

        Raises:
            ShareError: not all shares could be read; what lies on others was sent.
        """
        self._away = []
        folders, waiting = [], []
        checkpoints = excluded = 0
        for folder, selected in self._selected():
            checkpoints += selected.checkpoints
            excluded += selected.excluded
            folders.append(folder)
            wanted = selected.wanted.items()
            new = {name: stamp for name, stamp in wanted if not self._sent.has(f"{folder.artifact}/{name}", stamp)}
            waiting.append((folder, new))
        if checkpoints:
            them = "it" if checkpoints == 1 else "them"
            self.checkpoints = f"{_counted(checkpoints, 'checkpoint')} on the share (artifacts.checkpoints: true sends {them})"
        if excluded:
            self.excluded = f"{_counted(excluded, 'file')} on the share (artifacts.exclude)"
        try:
            self._send_all(waiting, tell)
        except Exception:
            with contextlib.suppress(ShareError):  # what was sent is known to the next relay, if the share takes that
                self._sent.save()
            raise
        self._sent.save()
        if self._away:
            raise ShareError("; ".join(dict.fromkeys(self._away)))
        return [note for folder in folders for note in folder.notes]

    def _selected(self) -> Iterator[tuple[Folder, Selected]]:
        """Each output directory with its files; one that lies in another one has its own."""
        places = {(place["share"], place["path"]): place for place in reversed(output_places(self._job.plan))}
        settings = self._job.plan.artifacts
        for (address, path), place in reversed(places.items()):
            inner = tuple(
                other.removeprefix(f"{path}/" if path else "") + "/"
                for share, other in places
                if share == address and other != path and other.startswith(f"{path}/" if path else "")
            )
            try:
                where = self._job.place(address, path)
                folder = Folder(self._client, self._job, *where, f"outputs/{place['id']}", place["rclone"])
                files = {name: stamp for name, stamp in folder.look().items() if not name.startswith(inner)}
                selected = select(files, folder.read, settings.checkpoints, settings.exclude)
            except ShareError as error:
                self._away.append(str(error))
            else:
                yield folder, selected

    def _send_all(self, waiting: Sequence[tuple[Folder, Mapping[str, Stamp]]], tell: Callable[[str], None]) -> None:
        count = sum(len(files) for _, files in waiting)
        total = sum(stamp.size for _, files in waiting for stamp in files.values())
        number = size = 0
        begun = saved = self._clock()
        for folder, files in waiting:
            sending = folder.send(files)
            while True:
                if number < count and (total >= LARGE or self._clock() - begun >= SHORT_SECONDS):
                    tell(f"outputs: file {number + 1} of {count}, {size / 1e6:.0f} of {total / 1e6:.0f} MB")
                try:
                    name = next(sending, None)
                except ShareError as error:
                    self._away.append(str(error))
                    break
                if name is None:
                    break
                self._sent.add(f"{folder.artifact}/{name}", files[name])
                number += 1
                size += files[name].size
                if self._clock() - saved >= SAVE_SECONDS:
                    self._sent.save()
                    saved = self._clock()


def _counted(number: int, what: str) -> str:
    return f"1 {what} stays" if number == 1 else f"{number} {what}s stay"
