"""What a job leaves behind goes into its MLflow run: logs as artifacts, and the saved model."""

from __future__ import annotations

import contextlib
import shutil
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent.models import MLFLOW, choose
from mlflow_batchai.agent.plan import Model
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.errors import ModelError, ShareNotFoundError
from mlflow_batchai.job import streams
from mlflow_batchai.job.completeness import MISSING
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.places import output_places
from mlflow_batchai.job.sent import Stamp
from mlflow_batchai.storage import Share, spelling
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.within import Found, Within
from mlflow_batchai.tracking.artifacts import Folder, at_once, bounds_of, files_below, log_file
from mlflow_batchai.tracking.models import checks, directory, logged, registry
from mlflow_batchai.tracking.models.facts import ModelFacts
from mlflow_batchai.tracking.models.folder import log_folder
from mlflow_batchai.tracking.models.promotion import promote
from mlflow_batchai.tracking.tracked.models import last_ready

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

BLOCK = 16 << 20
LOGS = "logs"
TAG_PROMOTION = "batchai.promotion"


class Logs:
    """An attempt's log files on their way to the run's artifacts, under ``logs`` as in the job folder's ``stdouterr``.

    Where the share is not a directory of this machine, each byte is fetched once: log files only grow.
    """

    def __init__(self, client: MlflowClient, job: Job) -> None:
        self._client = client
        self._job = job
        self._sent: dict[str, int] = {}
        self._stamps: dict[str, Stamp] = {}
        self._copies: Path | None = None

    def send(self, complete: bool = False) -> list[str]:
        """Send the files that have grown since the last call, whole, as artifacts are sent; one listing a folder tells which.

        Args:
            complete: nothing more will be written to them.

        Returns:
            Sentences on what was left out.
        """
        share, path = self._job.share, self._job.paths.stdouterr
        artifact = LOGS + self._job.paths.log_folder.removeprefix("stdouterr")
        if isinstance(share, DirectoryShare):
            folder = Folder(self._client, self._job, share, path, artifact)
            files = folder.look()
            # What a file server's client says of a file may be a minute old: at the end all are opened.
            grown_here = {name: stamp for name, stamp in files.items() if complete or stamp != self._stamps.get(name)}
            for name in folder.send(grown_here):
                self._stamps[name] = files[name]
            return folder.notes
        sizes, astray = _sizes_below(share, path)
        notes = [f"{artifact}: {note}" for note in astray]
        grown = {name: size for name, size in sizes.items() if complete or size != self._sent.get(name)}
        if not grown:
            return notes
        copies = self._folder()
        fetched = at_once(share, lambda name: _follow(share, f"{path}/{name}", copies / name, grown[name], complete), grown)
        for name, length in zip(grown, fetched, strict=True):
            sends = length != self._sent.get(name)
            if sends and (why := log_file(self._client, self._job, copies / name, f"{artifact}/{name}")):
                notes.append(f"{artifact}: not sent: {name} ({why})")
            else:
                self._sent[name] = length
        return notes

    def mend(self, expected: Mapping[str, tuple[int, int]]) -> list[str]:
        """Send what was written of files that are shorter on the share than their agents know; after ``send``.

        Args:
            expected: of each file how many bytes and lines its agent has given it.

        Returns:
            Sentences on lines that are missing all the same.
        """
        sizes = {name: stamp.size for name, stamp in self._stamps.items()}
        sizes |= {name: _written_bytes(self._folder() / name) for name in self._sent}
        share, path = self._job.share, self._job.paths.stdouterr
        shorter = {name: lines for name, (size, lines) in expected.items() if sizes.get(name, 0) < size}
        # What a file server's client says of a length may be a minute old.
        there = {name: _lines_of(share, f"{path}/{name}") for name in shorter}
        short = {name: lines for name, lines in shorter.items() if there[name] < lines}
        if not short:
            return []
        missing = []
        artifact = LOGS + self._job.paths.log_folder.removeprefix("stdouterr")
        with TemporaryDirectory(prefix="batchai-") as scratch:
            written = streams.write_anew(self._job, short, Path(scratch))
            for name, lines in short.items():
                again = written.get(name, 0)
                if again > there[name] and (
                    why := log_file(self._client, self._job, Path(scratch) / name, f"{artifact}/{name}")
                ):
                    missing.append(f"{MISSING}{artifact}/{name} ({why})")
                elif max(there[name], again) < lines:
                    missing.append(f"{MISSING}{lines - max(there[name], again)} of {lines} lines of {artifact}/{name}")
        return missing

    def _folder(self) -> Path:
        if self._copies is None:
            self._copies = Path(mkdtemp(prefix="batchai-logs-"))
            weakref.finalize(self, shutil.rmtree, self._copies, ignore_errors=True)
        return self._copies


def _written_bytes(copy: Path) -> int:
    """The length of a file without what it was made longer for and that never came."""
    size = copy.stat().st_size
    with copy.open("rb") as file:
        file.seek(max(0, size - BLOCK))
        end = file.read()
    return size - len(end) + len(end.rstrip(b"\0"))


def _lines_of(share: Share, path: str) -> int:
    """The whole lines of a file; 0 if it isn't there."""
    lines = start = 0
    with contextlib.suppress(ShareNotFoundError):
        while data := share.read(path, start, BLOCK):
            lines += data.count(b"\n")
            start += len(data)
    return lines


def _sizes_below(share: Share, path: str) -> tuple[dict[str, int], list[str]]:
    files, astray = files_below(share, path)
    return {name: stamp.size for name, stamp in files.items()}, astray


def _follow(share: Share, path: str, copy: Path, size: int, complete: bool) -> int:
    """Append what a file has more than its copy here; the copy's length.

    A file that was made longer ends in NULs until it is written there: they wait for the next time, unless nothing will come.
    """
    have = copy.stat().st_size if copy.exists() else 0
    if have > size:
        # Not a log that grows: another file took its place.
        have = 0
    copy.parent.mkdir(parents=True, exist_ok=True)
    with copy.open("r+b" if have else "wb") as file:
        file.seek(have)
        while have < size:
            data = share.read(path, have, min(BLOCK, size - have))
            kept = data if complete else data.rstrip(b"\0")
            file.write(kept)
            have += len(kept)
            if len(kept) < len(data) or not data:
                break
    return have


def log_model(client: MlflowClient, job: Job, known: Sequence[Record]) -> tuple[str, ...]:
    """Make the model that batchai.yaml asks for, unless a relay that was cut off after that has made it.

    Where no file was saved it is the last one that a script has logged by MLflow itself.

    Args:
        known: what was said of saved models: bodies of ``report`` records, in their order.

    Returns:
        Sentences on what the model lacks.

    Raises:
        ModelError: none was saved where it was to be, or the one that was can't be made an MLflow model.
        ShareError: it can't be read.
    """
    wanted = job.plan.model
    if wanted is None:
        return ()
    run_id, register = job.plan.run_id, wanted.register
    chosen = choose(known, wanted.path)
    if chosen is None and not wanted.path and (made := last_ready(client, run_id)):
        version = registry.version_of(client, register, made, run_id) if register else None
        reference = logged.LoggedModelRef(made.model_id, f"models:/{made.model_id}", version)
    elif chosen is None:
        raise ModelError(
            f"no saved model was found at '{wanted.path}' in the output directories"
            if wanted.path
            else "batchai.yaml asks for a model and none was saved in an output directory (a .h5 or .keras file, a SavedModel,"
            " an MLflow model)"
        )
    else:
        reference = _logged(client, job, wanted, chosen)
    client.set_tag(run_id, "batchai.model", reference.model_uri)
    if register and reference.version:
        client.set_tag(run_id, "batchai.modelVersion", f"models:/{register}/{reference.version}")
        _promote(client, run_id, wanted, reference.version)
    return reference.notes


def _logged(client: MlflowClient, job: Job, wanted: Model, chosen: Mapping[str, Any]) -> logged.LoggedModelRef:
    """The logged model of a saved one, made if it isn't there."""
    path, meta = str(chosen["path"]), chosen["meta"]
    check, notes = checks.judge(path, chosen.get("check"), meta)
    run_id, job_id, register = job.plan.run_id, job.plan.job, wanted.register
    # A run that was named with --run-id may lie in another experiment than the command line's.
    experiment_id = client.get_run(run_id).info.experiment_id
    name = wanted.name or "model"
    if meta.get("format") == MLFLOW:
        with _local_copy(job, path) as folder:
            return log_folder(
                client,
                experiment_id=experiment_id,
                run_id=run_id,
                folder=folder,
                job=job_id,
                name=name,
                register=register,
                check=check,
                found=notes,
            )
    facts = ModelFacts.from_record(meta, check)
    found = (*notes, *directory.notes(facts))
    reference = logged.find_logged(
        client, experiment_id=experiment_id, run_id=run_id, job=job_id, register=register, found=found
    )
    if reference is not None:
        return reference
    with _local_copy(job, path) as file:
        return logged.log_model(
            client,
            experiment_id=experiment_id,
            run_id=run_id,
            file=file,
            facts=facts,
            name=name,
            register=register,
            job=job_id,
            found=found,
        )


def _promote(client: MlflowClient, run_id: str, wanted: Model, version: str) -> None:
    """Have the aliases point to the new version, unless it is not good enough; tags of the run and of the version say why."""
    told = client.get_run(run_id).data.tags.get(TAG_PROMOTION)
    name = wanted.register
    if told or not wanted.alias or name is None:
        return
    made = [promote(client, name, version, alias, wanted.promote_if) for alias in wanted.alias]
    # The page of a registered model shows descriptions as a whole, and little of a tag. This one is read when others are the
    # champion: it doesn't say who is.
    if not client.get_model_version(name, version).description:
        description = "; ".join(f"{one.alias}: {one.why}" for one in made)
        client.update_model_version(name, version, description)
    client.set_tag(run_id, TAG_PROMOTION, "; ".join(map(str, made)))


@contextlib.contextmanager
def _local_copy(job: Job, path: str) -> Iterator[Path]:
    """A file or folder that is named by its path on the node, as one here."""
    share, inside = _on_share(job, path)
    with TemporaryDirectory(prefix="batchai-") as scratch:
        target = Path(scratch) / inside.rpartition("/")[2]
        if isinstance(share, DirectoryShare):
            _copy_here(share, bounds_of(job, share, inside), inside, path, target)
            yield target
            return
        sizes, astray = _sizes_below(share, inside)
        if astray:
            raise ModelError(f"the saved model {path} can't be fetched: {astray[0]}")
        for name in sizes:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        at_once(share, lambda name: share.download(f"{inside}/{name}", target / name), sizes)
        if not sizes:
            share.download(inside, target)
        yield target


def _copy_here(share: DirectoryShare, bounds: Within, inside: str, path: str, target: Path) -> None:
    """Copy a file or folder of a directory: while it is looked at, whoever can write there may change it."""
    real = bounds.real(inside)
    status = None if real is None else share.look(real)
    if real is None or status is None or not stat.S_ISDIR(status.st_mode):
        if not _copied(bounds, inside, target):
            raise ModelError(f"the saved model {path} is not there, or a link out of the share")
        return
    # What a model consists of lies in its own folder.
    own = Within(share, real)
    found = own.find(real) or Found()
    odd = [*found.astray, *found.closed, *found.deep, *found.foreign]
    odd += [name for name, (file, _, _) in found.files.items() if not odd and not _copied(own, file, target / name)]
    if odd:
        raise ModelError(
            f"the saved model {path} can't be used: {odd[0]} in it is a link out of it or to nothing, or can't be read"
        )
    target.mkdir(exist_ok=True)


def _copied(bounds: Within, path: str, target: Path) -> bool:
    """Copy a file; False if it is none that may be read."""
    file = bounds.open(path)
    if file is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with file, target.open("xb") as copy:
        shutil.copyfileobj(file, copy, BLOCK)
    return True


def _on_share(job: Job, path: str) -> tuple[Share, str]:
    for place in output_places(job.plan):
        marker = place["path"] + "/"
        _, found, inside = path.partition("/" + marker)
        if found:
            named = marker + inside
            return job.place(place["share"], spelling.on_share(named) if place["rclone"] else named)
    raise ModelError(f"the saved model {path} lies in no output directory; save it under $AZ_BATCHAI_OUTPUT_<ID>")
