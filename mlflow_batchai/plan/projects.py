"""Prepare a job from an MLproject: its command, parameters, files and environment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow_batchai.agent.plan import Artifacts, Condition, InputFile, MetricRule, Model, Rerun, StagedInput
from mlflow_batchai.agent.protocol import digest
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.config import database_file, home
from mlflow_batchai.documents.batchai import MOST_CODE_BYTES, BatchaiFile, ModelSettings
from mlflow_batchai.documents.command import translate, variable_names
from mlflow_batchai.documents.job import forbid_program
from mlflow_batchai.documents.mlproject import EntryPoint, MLProject, Value
from mlflow_batchai.documents.model import masked
from mlflow_batchai.errors import DocumentError, NotSupportedError, ParameterError, ProjectError
from mlflow_batchai.job.metrics import metric_key
from mlflow_batchai.job.places import slug
from mlflow_batchai.plan.changes import since_commit
from mlflow_batchai.plan.environments import choose_wheels, preparation_cache, training_environment, unused_environment
from mlflow_batchai.plan.images import choose_container, copied_variables
from mlflow_batchai.plan.planning import Program, plan_job
from mlflow_batchai.plan.prepared import Prepared
from mlflow_batchai.plan.secrecy import refuse_secrets, without_secrets
from mlflow_batchai.storage.objects import StagedFile, scan, scan_input

_SCRIPT = re.compile(r"\s*(?:python[\d.]*|bash|sh)\s+(?:-u\s+)?(?P<script>[\w.-][\w./-]*\.(?:py|sh))(?=\s|$)")


def choose_inputs(
    values: Sequence[Value], variables: Mapping[str, str], stage: Collection[str], cwd: Path, skip: Collection[Path]
) -> tuple[list[StagedFile], list[StagedInput], dict[str, str]]:
    """Tell the parameters that have to be sent as files from the others.

    Args:
        variables: parameter -> variable that ranks find it in.
        stage: parameters that are sent if they name a file, and passed on as they are if not.
        cwd: where relative paths start from.
        skip: files and folders that are not sent.

    Returns:
        (files to send, staged entries of the plan, variable -> value for the others).

    Raises:
        BatchAIError: a file isn't there or can't be sent, or ``stage`` names no parameter.
    """
    unknown = [name for name in stage if name not in {value.parameter.name for value in values}]
    if unknown:
        raise DocumentError(f"batchai.yaml: stage names '{unknown[0]}', which is no parameter of this entry point")
    files: list[StagedFile] = []
    staged: list[StagedInput] = []
    given: dict[str, str] = {}
    for value in values:
        name, variable = value.parameter.name, variables[value.parameter.name]
        path = _local_path(value, stage, cwd)
        if path is None:
            given[variable] = value.text
            continue
        found = scan_input(path, skip)
        if not found:
            never = "MLflow's store, $BATCHAI_HOME and the control share are not sent"
            raise ParameterError(f"parameter '{name}': {path} holds no file to send ({never})")
        files += found
        entries = tuple(InputFile(file.path, file.sha256, file.size) for file in found)
        staged.append(StagedInput(name, variable, path.name, entries))
    return files, staged, given


def _local_path(value: Value, stage: Collection[str], cwd: Path) -> Path | None:
    """The local file or folder that a value names and that has to travel with the job, or None."""
    text, name, kind = value.text, value.parameter.name, value.parameter.type
    is_path = kind == "path" or name in stage
    if text.startswith("file:/") or (text.startswith("file:") and (is_path or kind == "uri")):
        path, is_path = Path(unquote(urlsplit(text).path)), True
    elif kind == "path" and "://" in text:
        raise NotSupportedError(
            f"parameter '{name}': {text.split('://')[0]}:// can't be fetched yet; download it and give the local path"
        )
    elif is_path and text:
        path = Path(os.path.expanduser(text))  # noqa: PTH111 (Path's own raises for a ~name that is no user)
        is_path = kind == "path"
    else:
        return None
    # Without "..": the last part is the name that it gets on the node.
    path = Path(os.path.abspath(cwd / path))  # noqa: PTH100
    if not os.path.exists(path):  # noqa: PTH110 (Path's own raises for a text that is too long to be a name)
        if is_path:
            raise ParameterError(f"parameter '{name}': there is no file or folder {path}")
        return None
    if not path.name:
        raise ParameterError(f"parameter '{name}': {path} can't be sent to the nodes as a whole")
    return path


def prepare(
    project: MLProject,
    entry: EntryPoint,
    values: Sequence[Value],
    config: BatchaiFile,
    cluster: Cluster,
    cwd: Path,
    env_manager: str | None,
    source: str,
    documents: Collection[Path] = (),
    like: Prepared | None = None,
) -> Prepared:
    """Work out the whole job.

    Args:
        config: batchai.yaml with ``--backend-config`` merged over it.
        like: a job of the same project and configuration, with other values, whose code is taken, whatever has changed since.

    Raises:
        BatchAIError: anything that would keep the job from running and can be seen from here.
    """
    properties = config.properties
    forbid_program(properties, source)
    command = _command(entry, values, source)
    if not properties.job_preparation:
        _check_script(project, entry.command)
    variables = variable_names(value.parameter.name for value in values)
    inputs, staged, given = choose_inputs(values, variables, config.stage, cwd, _ours(cluster))
    container, registry, notices = choose_container(project, properties, cluster.document, source)
    if container and env_manager not in (None, "local"):
        raise NotSupportedError(
            f"--env-manager {env_manager}: the job trains in the image {container.image}, with what that has; drop the"
            " option, or the container"
        )
    program = Program(
        command,
        "the entry point's command",
        given,
        staged,
        container,
        registry,
        training_environment(project, env_manager, cluster),
        system_seconds=None if config.system_metrics is None else config.system_metrics.total_seconds(),
    )
    prepared, secret_texts = plan_job(program, properties, config, cluster, source)
    plan = replace(
        prepared.plan,
        name=config.name or f"{slug(project.name)}-{prepared.plan.job[:6]}",
        metrics=tuple(MetricRule(rule.name, rule.regex, rule.step) for rule in config.metrics),
        model=_model(config.model) if config.model else None,
        retries=config.retries,
        min_nodes=config.min_nodes,
        terminate_seconds=config.terminate_grace.total_seconds(),
        relay_seconds=config.relay_deadline.total_seconds(),
        all_ranks=config.ranks == "all",
        artifacts=Artifacts(config.artifacts.checkpoints, config.artifacts.exclude),
        umask=config.umask,
        notify=config.notify.planned if config.notify else None,
        scheduler_options=config.slurm.words,
    )
    # Without its quotes an argument may say what the command line, as it is written, doesn't.
    spoken = {**plan.record(), "command": [plan.command, *entry.arguments.values()]}
    refuse_secrets(spoken, secret_texts, source, program.where)
    image = container.image if container else None
    warnings = [*unused_environment(project, env_manager, cluster, image), *notices, *prepared.warnings]
    if like is None:
        code, notices = _code(project, entry, cluster, secret_texts, documents)
        warnings += notices
        changes = since_commit(project.directory, code, secret_texts)
        wheels, notices = choose_wheels(program.environment, project.directory, cluster.share)
        warnings += notices
    else:
        code, changes = list(like.code), like.changes
        wheels = dict(like.plan.wheels)
    plan = replace(plan, wheels=wheels, code=tuple(file.entry() for file in code))
    plan = replace(plan, preparation_cache=preparation_cache(plan, config.cache_preparation, source))
    if config.cache_preparation is not False and not plan.preparation:
        warnings.append(f"{source}: cachePreparation plays no part without properties.jobPreparation")
    document = masked(config)
    rerun = Rerun(
        digest(document),
        project.name,
        entry.name,
        entry.command,
        entry.arguments,
        env_manager,
        sum(file.size for file in code),
    )
    plan = replace(plan, rerun=replace(rerun, lacks=_lacks(project, code, rerun.size, config.artifacts.code)))
    return replace(
        prepared,
        plan=plan,
        document=document,
        parameters={**entry.arguments, **{value.parameter.name: value.text for value in values}},
        secrets={**copied_variables(project, cluster.document), **prepared.secrets},
        code=code,
        inputs=inputs,
        warnings=warnings,
        changes=changes,
        told=config.notify.written_out if config.notify else {},
    )


def _lacks(project: MLProject, code: Sequence[StagedFile], size: int, most: int) -> str:
    """Why the code is not kept with the run, a sentence; empty: it is."""
    if size > most:
        advice = f"; artifacts: {{code: {-(-size // 10**6)}MB}} in batchai.yaml keeps that of later jobs"
        said = f"it has {size:,} bytes, more than artifacts.code allows ({most:,})"
        return said + (advice if size <= MOST_CODE_BYTES else "")
    file = Path(project.source)
    if not file.is_dir() and file.name not in {staged.path for staged in code}:
        return f"{file.name} holds secrets, or an ignore file leaves it out, so it was not sent"
    return ""


def _model(settings: ModelSettings) -> Model:
    """The model's part of the plan."""
    promotion = settings.promote_if
    return Model(
        settings.path,
        settings.register_as,
        settings.name,
        tuple(settings.alias),
        Condition(metric_key(promotion.metric), promotion.better) if promotion else None,
        settings.check_timeout.total_seconds() if settings.check else None,
    )


def _code(
    project: MLProject, entry: EntryPoint, cluster: Cluster, secret_texts: Collection[str], documents: Collection[Path]
) -> tuple[list[StagedFile], list[str]]:
    """(the project's files that go to the nodes, sentences on those that stay here).

    Raises:
        ProjectError: a file can't be read, or the command's own holds a secret.
    """
    left_out: Counter[str] = Counter()
    files = scan(project.directory, _ours(cluster), lambda file: left_out.update([file]))
    code, withheld = without_secrets(files, secret_texts, documents)
    if (script := _script(entry.command)) in withheld:
        raise ProjectError(
            f"{project.source}: the command runs '{script}', which holds the text of a secret and can't be sent to the nodes;"
            " take it out of there"
        )
    warnings = [f"'{path}' is not sent to the nodes: it holds a secret" for path in withheld]
    if count := left_out.total():
        what = "1 file or folder is" if count == 1 else f"{count} files and folders are"
        warnings.insert(0, f"{what} not sent to the nodes ({', '.join(sorted(left_out, reverse=True))})")
    return code, warnings


def _command(entry: EntryPoint, values: Sequence[Value], source: str) -> str:
    """The shell line of the entry point; values that are no whole numbers are referred to by their variables."""
    variables = variable_names(value.parameter.name for value in values)
    numbers = {value.parameter.name: value.text for value in values if value.parameter.type == "int"}
    return translate(entry.command, variables, source, numbers, [value.parameter.name for value in values if value.extra])


def _script(command: str) -> str | None:
    """The project's file that a command begins with, if it is plain to see."""
    match = _SCRIPT.match(command)
    return match["script"] if match else None


def _check_script(project: MLProject, command: str) -> None:
    """A script that the command begins with and that isn't in the project fails here, not minutes later on a node.

    Later ones, and all if there is a job preparation, may have been made by what ran before.
    """
    script = _script(command)
    if script and not (project.directory / script).exists():
        raise ProjectError(f"{project.source}: the command runs '{script}', which is not in the project ({project.directory})")


def _ours(cluster: Cluster) -> list[Path]:
    """Folders of ours that a user may have put into his project or a parameter's folder, and a sqlite store of MLflow's.

    Jobs that run change the store; and reading it drops the locks that other threads of this process hold on it.
    """
    share, store = cluster.share.url, database_file(os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db")
    stores = [Path(store + ending) for ending in ("", "-journal", "-wal", "-shm")] if store else []
    return [home(), *stores, *([Path(unquote(urlsplit(share).path))] if share.startswith("file:") else [])]
