"""Plan a sweep, and prepare and submit its jobs: one project, read once, with many sets of parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlflow_batchai import terminal
from mlflow_batchai.agent.plan import Notify, plain
from mlflow_batchai.client import submitting
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.documents.batchai import settings_from
from mlflow_batchai.documents.model import secret_values
from mlflow_batchai.errors import JobError, ParameterError, UsageError
from mlflow_batchai.follower import notify
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job.places import slug
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.sweep import search, sweeps
from mlflow_batchai.sweep.parameters import Combination, examples, shown
from mlflow_batchai.sweep.results import comparison
from mlflow_batchai.sweep.sweeps import Sweep, SweepPlan
from mlflow_batchai.tracking import runs

# The most letters that MLflow's tables take.
LONGEST_NAME = 250

Say = Callable[[str], None]


def plan_sweep(
    project: str, combinations: Sequence[Combination], say: Say, backend_config: str | None, cluster: str | None, **fields: Any
) -> tuple[SweepPlan, submitting.Ready]:
    """Plan a new sweep; all that can be checked before anything exists is. Also returns its first job.

    Args:
        project: its address, as the user wrote it.
        fields: those of the plan that the user has given; None: they follow from the project.

    Raises:
        UsageError: what would be kept with the sweep's run holds a secret, or the name can't be used.
    """
    settings = {**settings_from(backend_config), **({"cluster": cluster} if cluster else {})}
    plan = SweepPlan(
        **fields, uri=_address(project), settings=settings, cwd=str(Path.cwd()), combinations=combinations, code=""
    )
    ready = check(plan, _tried(plan), say)
    source, text = ready.source, json.dumps(settings, ensure_ascii=False)
    if any(json.dumps(secret, ensure_ascii=False)[1:-1] in text for secret in secret_values(source.config) if secret):
        raise UsageError(
            "--backend-config holds a secret, and would be kept with the sweep's run; put it into a file: --backend-config FILE"
        )
    name = plan.name or source.config.name or f"{slug(source.project.name, 30)}-sweep-{uuid.uuid4().hex[:6]}"
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME or set("'\"") <= set(name):
        raise UsageError(
            f"the sweep's name '{terminal.printable(name[:LONGEST_NAME])}' should be one line of 1 to {LONGEST_NAME}"
            " letters, without both kinds of quotes: --run-name NAME"
        )
    parallel = plan.parallel or _fitting(source.cluster, ready.prepared) + 1
    metric, mode = comparison(plan.metric, plan.mode, source.config)
    if metric is None and (plan.asks or plan.stop):
        raise UsageError("--sampler tpe and --stop need to know what jobs are compared by: --metric val_accuracy")
    told = list(ready.prepared.plan.notify.on) if ready.prepared.plan.notify else None
    plan = dataclasses.replace(plan, name=name, parallel=parallel, metric=metric, mode=mode, code=code_hash(ready), told=told)
    return plan, ready


def _fitting(cluster: Cluster, prepared: Prepared) -> int:
    """Jobs that have nodes at once, if nobody else has any."""
    count = prepared.plan.node_count
    return max(1, min(cluster.engine.check(count, prepared.needs).usable, cluster.open_nodes) // count)


def _tried(plan: SweepPlan) -> Sequence[Combination]:
    """The combinations that are checked: all, or examples of those that Optuna will choose."""
    return [{**plan.combinations[0], **each} for each in examples(plan.space)] if plan.asks else plan.combinations


def check(plan: SweepPlan, combinations: Sequence[Combination], say: Say) -> submitting.Ready:
    """Read the project, prepare jobs of it, and ask the nodes about the first: all jobs need the same of them.

    Raises:
        ParameterError: a combination can't be used; the message says which.
        BatchAIError: no job of the project could run.
    """
    source = submitting.read(plan.uri, plan.entry_point, plan.version, plan.settings, say)
    first: submitting.Ready | None = None
    for number, parameters in enumerate(combinations, 1):
        try:
            ready = submitting.prepare(source, parameters, plan.env_manager, say, Path(plan.cwd), first)
        except ParameterError as error:
            which = f"combination {number} of {len(combinations)}: {shown(parameters)}"
            raise ParameterError(f"{error} ({which})") from error
        first = first or ready
    assert first is not None
    return submitting.check(first, say)


class JobStarter:
    """Submits jobs of a sweep. All of them have the code that the project has when this is made, and had when the sweep began.

    Raises:
        JobError: the project has changed, or another user began the sweep.
    """

    def __init__(self, sweep: Sweep, say: Say) -> None:
        self._sweep, self._say = sweep, say
        plan = sweep.plan
        if not sweep.is_own:
            raise JobError(
                f"the plan of sweep {plan.name} is not signed with this user's key, so no job is started as it says: take the"
                " key of who began it along (batchai key export, batchai key import), or start a sweep of your own"
            )
        self._first = check(plan, _tried(plan)[:1], say)
        if code_hash(self._first) != plan.code:
            raise JobError(
                f"the project {terminal.shown(plan.uri)} has changed since sweep {plan.name} was started, and jobs of other"
                " code can't be compared with those that ran: bring it back as it was and attach again, or end the sweep"
                f" (batchai sweep terminate {plan.name}) and start another"
            )

    def submit(self, number: int) -> Submitted:
        """Start a job. Raises ``BatchAIError`` if it can't be started."""
        sweep, plan, first = self._sweep, self._sweep.plan, self._first
        # Prepared again: credentials of storage are made for the time that a job may take.
        parameters = plan.combinations[number - 1]
        if plan.asks:
            seen = sweeps.look(runs.client(sweep.tracking), sweep)
            parameters = {**parameters, **search.ask(plan, seen.jobs, number)}
        ready = submitting.prepare(first.source, parameters, plan.env_manager, self._say, Path(plan.cwd), first)
        ready = submitting.check(ready, self._say)
        name = plan.job_name(number)
        # The sweep's end is told, not that of each job.
        quiet = dataclasses.replace(ready.prepared.plan, name=name, notify=Notify())
        ready = dataclasses.replace(ready, prepared=dataclasses.replace(ready.prepared, plan=quiet))
        experiment = runs.client(sweep.tracking).get_experiment(sweep.experiment_id)
        return submitting.submit(ready, sweep.tracking, experiment, name, tags=sweep.job_tags(number))

    def tell(self, state: str, reason: str) -> None:
        """Tell those whom the project's ``notify`` names that the sweep has ended."""
        sweep, prepared = self._sweep, self._first.prepared
        page = runs.page(sweep.tracking.uri, sweep.experiment_id, sweep.run_id) or ""
        event = {"job": sweep.plan.name, "runId": sweep.run_id, "state": state, "reason": reason, "runUrl": page}
        planned = prepared.plan.notify
        secrets = notify.secrets(planned, {**prepared.secrets, **prepared.told})
        notify.send(planned, f"sweep {sweep.plan.name}", event, secrets, self._say)


def code_hash(ready: submitting.Ready) -> str:
    """The hash of the project's files, as a job's plan lists them."""
    return hashlib.sha256(json.dumps(plain(ready.prepared.plan.code), sort_keys=True).encode()).hexdigest()


def _address(project: str) -> str:
    """The project's address, the same from any folder.

    Raises:
        UsageError: it holds a password, which must not be kept with the sweep.
    """
    path, mark, inside = project.partition("#")
    folder = Path(path).expanduser().absolute()
    if "://" not in path and folder.exists():
        return f"{folder}{mark}{inside}"
    if terminal.shown(project) != project:
        raise UsageError(
            f"{terminal.shown(project)}: the address is kept with the sweep, and can't hold a password; leave that to git"
            " (git help credentials)"
        )
    return project
