"""The documentation is true: every command and example runs, every setting and error code is named, links resolve."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.agent import protocol
from mlflow_batchai.documents.batchai import BatchaiFile, parse_batchai
from mlflow_batchai.documents.cluster import ClusterDocument, parse_cluster
from mlflow_batchai.documents.model import keys_of, parse
from mlflow_batchai.documents.reading import load_text
from mlflow_batchai.documents.settings import SettingsFile

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/*.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# One page a task, in the order in which their examples are looked at here.
PAGES = ("commands", "project", "failures", "clusters", "azure_share", "containers")
GUIDES = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)


def blocks(language: str, text: str = f"{README}\n{GUIDES}") -> list[str]:
    """The text of every code block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def commands() -> list[str]:
    """Every command line of the shell blocks of README and guides, without comments."""
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line]


# Each command of README and guides, and where it is run: here, or by what CI does itself.
RUN_BY_CI = {"make demo": "make demo", "make test": "make check"}
# The same words against machines of their own, or with another port: tests/examples, tests/cli.
RUN_ELSEWHERE = {
    """mlflow run projects/cifar_horovod --backend batchai --backend-config '{"cluster": "nc6cluster"}'""": "tests/examples",
    "batchai doctor nc6cluster": "tests/examples",
    "sh examples/tutorial/tutorial.sh": "tests/examples",
    "batchai run --nodes 2 -- python train.py --lr 0.1": "tests/cli",
    "mlflow models serve -m models:/digits@champion --env-manager local": "tests/examples",
}
RUN_HERE = {
    "mlflow run projects/cifar_horovod --backend batchai -P data=digits -P epochs=12 -P augment=false": 0,
    "batchai sweep projects/cifar_horovod -P learning_rate=1e-4,3e-4 -P data=digits -P epochs=4": 0,
    "batchai horovod build": 0,
    "batchai horovod build --help": 0,
    "batchai job list --output table": 0,
    "batchai cluster show local --query nodeStateCounts": 0,
    "batchai gc --older-than 30d --dry-run": 0,
}


def test_every_command_is_run() -> None:
    assert set(commands()) == set(RUN_BY_CI) | set(RUN_HERE) | set(RUN_ELSEWHERE)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for part in RUN_BY_CI.values():
        assert part in script
    assert re.search(r"^check:.* test-all ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("command", RUN_HERE)
def test_commands_run(command: str, world: Any) -> None:
    world.cwd = ROOT
    program, *arguments = command.split()
    result = world.call([str(Path(sys.executable).parent / program), *arguments], timeout=1400)
    assert result.returncode == RUN_HERE[command], result.stderr
    if "run" in arguments:
        assert world.last.info.status == "FINISHED" and world.last.data.metrics["test_accuracy"] > 0.9


def test_documents_parse() -> None:
    small, settings, batchai, faults, cluster, over_ssh, on_slurm, on_azure = blocks("yaml")
    document, warnings = parse_batchai(load_text(small, "README"), "README")
    assert warnings == [] and document.properties.node_count == 2
    known, warnings = parse(SettingsFile, load_text(settings, "README"), "README")
    assert warnings == [] and known.defaults.workspace == "vision" and list(known.shares) == ["mystorage"]
    document, warnings = parse_batchai(load_text(batchai, "README"), "README")
    assert warnings == [] and document.properties.node_count == 2
    document, warnings = parse_batchai({"properties": {"nodeCount": 2}, **load_text(faults, "README")}, "README")
    assert warnings == [] and (document.retries, document.min_nodes) == (2, 1)
    found, warnings = parse_cluster(load_text(cluster, "README"), "README")
    assert warnings == [] and found.nodes == 4
    found, warnings = parse_cluster(load_text(over_ssh, "README"), "README")
    assert warnings == [] and found.nodes == 3
    found, warnings = parse_cluster(load_text(on_slurm, "README"), "README")
    assert warnings == [] and found.words == (
        "--partition=gpu",
        "--account=vision",
        "--qos=normal",
        "--gres=gpu:a100:4",
        "--constraint=ib",
    )
    found, warnings = parse_cluster(load_text(on_azure, "README"), "README")
    assert warnings == [] and (found.mount, found.containers) == ("bind", "run")
    named = {key for text in (cluster, over_ssh, on_slurm, on_azure) for key in load_text(text, "README")}
    batch_ais = {key for key, name in keys_of(ClusterDocument).items() if name in BATCH_AIS.split()}
    assert set(keys_of(ClusterDocument)) - batch_ais == named, "our keys of a cluster document stand in the guides"


BATCH_AIS = """
    location vm_size vm_priority scale_settings virtual_machine_configuration node_setup user_account_settings subnet
"""


# Keys of batchai.yaml that the example of docs/project.md leaves to docs/reference.md.
REFERENCE_ONLY = """
    retries minNodes terminateGrace relayDeadline ranks systemMetrics artifacts umask notify slurm
"""


# Variables.
NAMED = """
    BATCHAI_SSH_PASSPHRASE BATCHAI_SSH_PASSWORD AZURE_BATCHAI_STORAGE_ACCOUNT AZURE_BATCHAI_STORAGE_KEY
    AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_SAS_TOKEN BATCHAI_HOME BATCHAI_WORKSPACE BATCHAI_EXPERIMENT
    BATCHAI_CLUSTER BATCHAI_RESOURCE_GROUP BATCHAI_OUTPUT BATCHAI_QUIET BATCHAI_HOROVOD_CACHE BATCHAI_WEIGHT_CHECK
    MLFLOW_TRACKING_URI
"""


def test_every_setting_is_named() -> None:
    example = load_text(blocks("yaml")[2], "project.md")
    keys = {field.alias or name for name, field in BatchaiFile.model_fields.items()} - {
        "name",
        "workspace",
        *REFERENCE_ONLY.split(),
    }
    assert keys == set(example)
    assert "`retries`" in GUIDES
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for name in REFERENCE_ONLY.split():
        assert f"`{name}`" in reference
    for name in NAMED.split():
        assert name in README + GUIDES


def test_every_error_code_is_named() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for code in protocol.MESSAGES:
        assert f"`{code}`" in reference


def test_every_tag_is_named() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    package = ROOT / "mlflow_batchai"
    # What ranks speak of among themselves is no tag.
    files = [path for path in package.rglob("*.py") if path.parent.name != "training"]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    for tag in set(re.findall(r'"(batchai\.[a-zA-Z]+)"', sources)) - {"batchai.yaml", "batchai.run"}:
        assert f"`{tag}`" in reference, tag


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (document.parent / target.split("#")[0]).exists(), target


@pytest.mark.timeout(400)
def test_python_example(world: Any) -> None:
    """The README's example of MLflow's Python API, as it stands there."""
    example = next(block for block in blocks("python") if "mlflow.projects.run" in block)
    world.cwd = ROOT
    result = world.call([sys.executable, "-W", "ignore", "-c", example], timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "FINISHED"
    assert world.last.info.status == "FINISHED"


@pytest.mark.timeout(400)
def test_script_example(world: Any) -> None:
    """The script of docs/project.md, with a network and data in front of it."""
    example = next(block for block in blocks("python") if "DistributedOptimizer" in block)
    before = textwrap.dedent(
        """
        import os
        import keras, numpy as np
        x = np.random.default_rng(0).random((64, 4)); y = x[:, :1]
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        optimizer, loss = keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError()
        path = os.environ["AZ_BATCHAI_OUTPUT_MODEL"] + "/model.keras"
        """
    )
    batchai = """
        properties:
          nodeCount: 2
          horovodSettings: {}
          outputDirectories: [{id: MODEL, pathPrefix: $AZ_BATCHAI_MOUNT_ROOT/share}]
        model: {}
    """
    result = world.run(world.project(before + example, batchai=batchai), timeout=300)
    assert result.returncode == 0, result.stderr
    assert "loss" in world.last.data.metrics and "batchai.model" in world.last.data.tags, world.last.data.tags


def test_the_readme_is_a_page() -> None:
    assert len(README.encode()) <= 9 << 10


def test_make_help() -> None:
    """Every target of the Makefile that a person is told of is explained."""
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "test", "test-all", "check", "bench", "faults", "setup"):
        assert re.search(rf"^{target}\t", shown, re.M), shown


PACKAGE = ROOT / "mlflow_batchai"


def defines(module: Path, names: list[str]) -> bool:
    """Whether a module defines a name, or a class of it the next one, and so on."""
    body = ast.parse(module.read_text(encoding="utf-8")).body
    for name in names:
        found = [node for node in body if name in _names(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))]


def exists(name: str) -> bool:
    """Whether ``package.module.Class.method`` or ``path/module.py:name`` stands for something of this repository."""
    if match := re.fullmatch(r"(\w[\w./]*\.py)(?::(\w+))?", name):
        files = [file for file in (ROOT / match[1], PACKAGE / match[1]) if file.is_file()]
        return bool(files) and (not match[2] or defines(files[0], [match[2]]))
    parts, place = name.removeprefix("mlflow_batchai.").split("."), PACKAGE
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        return defines(place / f"{parts[0]}.py", parts[1:])
    return defines(place / "__init__.py", parts)


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/internals.md", "CONTRIBUTING.md"])
def test_what_is_named_exists(page: str) -> None:
    """Modules, classes and functions are called so today."""
    packages = {path.stem for path in PACKAGE.iterdir()}
    said = set(re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8")))
    files = {name for name in said if re.fullmatch(r"[\w./]+\.py(:\w+)?", name) and not re.search("NAME|NOUN", name)}
    dotted = {name for name in said if re.fullmatch(r"\w+(\.\w+)+", name) and name.split(".")[0] in packages}
    dotted = {name for name in dotted if not name.endswith((".py", ".pyz", ".json", ".yaml"))}
    assert sorted(name for name in files | dotted if not exists(name)) == []
