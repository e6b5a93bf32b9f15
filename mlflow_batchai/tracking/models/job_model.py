"""Choose the model that batchai.yaml asks for, make it an MLflow model, register and promote it."""

from __future__ import annotations

import contextlib
import functools
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mlflow_batchai.agent.plan import Model
from mlflow_batchai.agent.protocol import Record
from mlflow_batchai.errors import ModelError
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.places import output_places
from mlflow_batchai.storage import Share, spelling
from mlflow_batchai.storage.directory import DirectoryShare
from mlflow_batchai.storage.within import Found, Within
from mlflow_batchai.tracking.artifacts import at_once, bounds_of, files_below
from mlflow_batchai.tracking.models import directory
from mlflow_batchai.tracking.models.facts import ModelFacts
from mlflow_batchai.tracking.models.logged import TAG_JOB, find_logged, last_of_scripts, publish, register
from mlflow_batchai.tracking.models.promotion import promote
from mlflow_batchai.training.saved_models import FAILED, MLFLOW, PASSED, TORCH, choose

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.tracking import MlflowClient

TAG_PROMOTION = "batchai.promotion"
BLOCK = 16 << 20


def log_model(client: MlflowClient, job: Job, known: Sequence[Record]) -> list[str]:
    """Make the model that batchai.yaml asks for, unless a relay that was cut off after that has made it.

    Where no file was saved it is the last one that a script has logged by MLflow itself.

    Args:
        known: what was said of saved models: bodies of ``report`` records, in their order.

    Returns:
        Sentences on what the model lacks.

    Raises:
        ModelError: none was saved where it was to be, or the one that was can't be made an MLflow model or be registered.
        ShareError: it can't be read.
    """
    wanted = job.plan.model
    if wanted is None:
        return []
    run_id, notes = job.plan.run_id, list[str]()
    chosen = choose(known, wanted.path)
    if chosen is not None:
        model, notes = _logged(client, job, wanted, chosen)
    elif wanted.path:
        raise ModelError(f"no saved model was found at '{wanted.path}' in the output directories")
    elif (own := last_of_scripts(client, run_id)) is not None:
        model = own
    else:
        raise ModelError(
            "batchai.yaml asks for a model and none was saved in an output directory (a .h5 or .keras file, a SavedModel,"
            " an MLflow model)"
        )
    client.set_tag(run_id, "batchai.model", f"models:/{model.model_id}")
    if wanted.register:
        version = register(client, wanted.register, model, run_id)
        client.set_tag(run_id, "batchai.modelVersion", f"models:/{wanted.register}/{version}")
        _promote(client, run_id, wanted, version)
    return notes


def _logged(client: MlflowClient, job: Job, wanted: Model, chosen: Mapping[str, Any]) -> tuple[LoggedModel, list[str]]:
    """(the logged model of a saved one, made if it isn't there; sentences on it)"""
    path, meta = str(chosen["path"]), chosen["meta"]
    check, notes = judge(path, chosen.get("check"), meta)
    run_id = job.plan.run_id
    facts = None if meta.get("format") == MLFLOW else ModelFacts.from_record(meta)
    if facts is not None:
        notes += directory.notes(facts)
    model = find_logged(client, run_id, TAG_JOB, job.plan.job)
    if model is None:
        with local_copy(job, path) as file:
            build: Callable[[Path, str], object]
            if facts is None:
                build = functools.partial(directory.mirror, file, directory.check_folder(file), run_id)
            else:
                directory.check_file(file, facts)
                build = functools.partial(directory.build_directory, file, facts, run_id)
            model = publish(
                client, build, what=str(file), run_id=run_id, job=job.plan.job, name=wanted.name or "model", check=check
            )
    return model, notes


def judge(path: str, check: object, meta: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """(how a model was checked, in a few words, or None; sentences on what a person should know of it)

    Args:
        path: of the model, on the node.
        check: the check's record; None: it wasn't asked for.

    Raises:
        ModelError: the model is not one that could be served.
    """
    if meta.get("format") == TORCH:
        raise ModelError(
            f"{path} is a PyTorch file (a state dict, say), which can't be served without the script's own classes: it is kept"
            " with the outputs, and no model is made of it; save an MLflow model (mlflow.pytorch.save_model) for one"
        )
    if not isinstance(check, Mapping):
        return None, []
    outcome, why = check.get("outcome"), str(check.get("why") or "")
    if outcome == FAILED:
        raise ModelError(f"the model {path} did not pass its check, and nothing was made of it: {why}")
    if outcome != PASSED:
        return None, [f"the model {path} was not checked: {why}"]
    versions = ", ".join(f"{name} {meta[name]}" for name in ("keras", "tensorflow", "python") if meta.get(name))
    by = f" by {versions}" if versions else ""
    if why:
        return f"{why}{by}", [f"the model {path}: {why}"]
    return f"loaded and tried in {check.get('seconds')} s{by}", []


def _promote(client: MlflowClient, run_id: str, wanted: Model, version: str) -> None:
    """Have the aliases point to the new version, if it is good enough; the run's tag and the version's description say why."""
    name = wanted.register
    if not wanted.alias or name is None or TAG_PROMOTION in client.get_run(run_id).data.tags:
        return
    made = [promote(client, name, version, alias, wanted.promote_if) for alias in wanted.alias]
    said = "; ".join(map(str, made))
    # The page of a registered model shows descriptions as a whole, and little of a tag. This one is read when others are the
    # champion: it doesn't say who is.
    if not client.get_model_version(name, version).description:
        client.update_model_version(name, version, said)
    client.set_tag(run_id, TAG_PROMOTION, said)


@contextlib.contextmanager
def local_copy(job: Job, path: str) -> Iterator[Path]:
    """A file or folder that is named by its path on the node, as one here."""
    share, inside = _on_share(job, path)
    with TemporaryDirectory(prefix="batchai-") as scratch:
        target = Path(scratch) / inside.rpartition("/")[2]
        if isinstance(share, DirectoryShare):
            _copy_here(share, bounds_of(job, share, inside), inside, path, target)
            yield target
            return
        files, astray = files_below(share, inside)
        if astray:
            raise ModelError(f"the saved model {path} can't be fetched: {astray[0]}")
        sizes = {name: stamp.size for name, stamp in files.items()}
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
