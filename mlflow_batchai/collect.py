"""What a job leaves behind goes into its MLflow run: logs and outputs as artifacts, and the saved model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mlflow_batchai.errors import ModelError, ShareError
from mlflow_batchai.jobs import Job
from mlflow_batchai.models import logged
from mlflow_batchai.models.facts import ModelFacts
from mlflow_batchai.node.protocol import Record
from mlflow_batchai.places import output_places
from mlflow_batchai.shares import Share
from mlflow_batchai.shares.directory import DirectoryShare

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


def upload_logs(client: MlflowClient, job: Job) -> list[str]:
    """Send the job's log files, as they are now, to the run's artifacts under ``stdouterr``; sentences on what was left out."""
    return _upload(client, job, job.share, job.paths.stdouterr, "stdouterr")


def upload_outputs(client: MlflowClient, job: Job) -> list[str]:
    """Send every output directory, each place once, to the run's artifacts under ``outputs``.

    Returns:
        Sentences on what was left out.
    """
    sent: set[tuple[str, str]] = set()
    notes: list[str] = []
    for place in output_places(job.plan):
        key = (place["share"], place["path"])
        if key in sent:
            continue
        sent.add(key)
        artifact = "outputs/" + place["suffix"] if place["suffix"] else "outputs"
        notes += _upload(client, job, job.share_at(place["share"]), place["path"], artifact)
    return notes


def log_model(client: MlflowClient, job: Job, known: Sequence[Record]) -> tuple[str, ...]:
    """Make the model that batchai.yaml asks for, unless a relay that was cut off after that has made it.

    Args:
        known: what was said of saved models: bodies of ``report`` records, in their order.

    Returns:
        Sentences on what the model lacks.

    Raises:
        ModelError: none was saved where it was to be, or the one that was can't be made an MLflow model.
        ShareError: it lies outside of the output directories.
    """
    wanted = job.plan["model"]
    if wanted is None:
        return ()
    chosen = _choose_model(known, wanted.get("path"))
    if chosen is None:
        raise ModelError(
            f"no saved model was found at '{wanted['path']}' in the output directories"
            if wanted.get("path")
            else "batchai.yaml asks for a model and no .h5 or .keras file was saved in an output directory"
        )
    facts = ModelFacts.from_record(chosen["meta"])
    run_id, job_id, register = str(job.plan["runId"]), str(job.plan["job"]), wanted.get("register")
    # A run that was named with --run-id may lie in another experiment than the command line's.
    experiment_id = client.get_run(run_id).info.experiment_id
    reference = logged.find_logged(
        client, experiment_id=experiment_id, run_id=run_id, job=job_id, facts=facts, register=register
    )
    if reference is None:
        with _local_file(job, chosen["path"]) as file:
            reference = logged.log_model(
                client,
                experiment_id=experiment_id,
                run_id=run_id,
                file=file,
                facts=facts,
                name=wanted.get("name") or "model",
                register=register,
                job=job_id,
            )
    client.set_tag(run_id, "batchai.model", reference.model_uri)
    if reference.version:
        client.set_tag(run_id, "batchai.modelVersion", f"models:/{register}/{reference.version}")
    return reference.notes


def _choose_model(known: Sequence[Record], path: str | None) -> Record | None:
    """The record of the configured file; without one the last that a rank reported, else the last that was found."""
    if path:
        ending = "/" + path.strip("/")
        known = [record for record in known if str(record["path"]).endswith(ending)]
    reported = [record for record in known if not record.get("found")]
    best = reported or known
    return best[-1] if best else None


@contextlib.contextmanager
def _local_file(job: Job, path: str) -> Iterator[Path]:
    """A file that a rank named by its path on the node, as a file here."""
    share, inside = _on_share(job, path)
    if isinstance(share, DirectoryShare):
        file = share.local(inside)
        if _is_astray(file, _bounds(job, share)):
            raise ModelError(f"the saved model {path} is not there, or a link out of the share")
        yield file
        return
    with TemporaryDirectory(prefix="batchai-") as scratch:
        target = Path(scratch) / inside.rpartition("/")[2]
        target.write_bytes(share.read(inside))
        yield target


def _on_share(job: Job, path: str) -> tuple[Share, str]:
    for place in output_places(job.plan):
        marker = place["path"] + "/"
        _, found, inside = path.partition("/" + marker)
        if found:
            return job.share_at(place["share"]), marker + inside
    raise ShareError(f"the saved model {path} lies in no output directory; save it under $AZ_BATCHAI_OUTPUT_<ID>")


def _upload(client: MlflowClient, job: Job, share: Share, path: str, artifact: str) -> list[str]:
    """Send a folder of a share, as it is now, to the run's artifacts; one that isn't there is none."""
    run_id = str(job.plan["runId"])
    if isinstance(share, DirectoryShare):
        folder, bounds = share.local(path), _bounds(job, share)
        if not folder.is_dir():
            return []
        if _is_astray(folder, bounds):
            return [f"{artifact}: not sent: {path} lies behind a link out of the share"]
        astray = sorted(_links_astray(folder, bounds))
        if not astray:
            client.log_artifacts(run_id, str(folder), artifact)
            return []
        left_out = {folder / name for name in astray}
        for parent, _, names in os.walk(folder):
            inside = Path(parent).relative_to(folder).as_posix()
            for name in names:
                if Path(parent, name) not in left_out:
                    client.log_artifact(run_id, str(Path(parent, name)), f"{artifact}/{inside}".removesuffix("/."))
        return [f"{artifact}: not sent: {', '.join(astray)} (links out of the share, or to nothing)"]
    with TemporaryDirectory(prefix="batchai-") as scratch:
        target = Path(scratch) / "folder"
        _download(share, path, target)
        if target.is_dir():
            client.log_artifacts(run_id, str(target), artifact)
    return []


def _bounds(job: Job, share: DirectoryShare) -> Path:
    """What links must not lead out of. A volume on the control share is a folder that nodes can put a link in place of."""
    control = job.share
    if isinstance(control, DirectoryShare) and share.root.is_relative_to(control.root):
        return control.root.resolve()
    return share.root.resolve()


def _links_astray(folder: Path, root: Path) -> Iterator[str]:
    """Links that lead out of the share, where they would name files of this machine, or nowhere."""
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            if path.is_symlink() and _is_astray(path, root):
                yield path.relative_to(folder).as_posix()


def _is_astray(path: Path, root: Path) -> bool:
    return not path.exists() or not path.resolve().is_relative_to(root)


def _download(share: Share, path: str, target: Path) -> None:
    for entry in share.list(path):
        if entry.is_directory:
            _download(share, f"{path}/{entry.name}", target / entry.name)
        else:
            target.mkdir(parents=True, exist_ok=True)
            (target / entry.name).write_bytes(share.read(f"{path}/{entry.name}"))
