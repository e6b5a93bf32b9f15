"""Text to data: JSON and YAML, with place and name in every refusal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai.documents.batchai import parse_batchai, read_batchai
from mlflow_batchai.documents.cluster import load_cluster, parse_cluster
from mlflow_batchai.documents.job import parse_job
from mlflow_batchai.documents.mlproject import load_project
from mlflow_batchai.documents.reading import load_list, load_text, read
from mlflow_batchai.errors import DocumentError

NUMBERS = {"a": "0777", "b": "1.10", "c": "1:30:00", "d": "2019-03-31", "e": -4}
WORDS = {"a": "no", "b": "on", "c": True, "d": None, "e": None, "f": "true"}


@pytest.mark.parametrize(
    ("text", "source", "data"),
    [
        ('{"a": [1, "x", null, true]}', "job.json", {"a": [1, "x", None, True]}),
        ('\ufeff{"a": 1}', "job.json", {"a": 1}),
        ('{\n\t"a": 1\n}', "job.json", {"a": 1}),
        ('{\n\t"a": 1\n}', "job.yaml", {"a": 1}),
        ('{"a": 1.10}', "job.json", {"a": "1.10"}),
        ("{a: 1, b: [c]} # note", "job.yaml", {"a": 1, "b": ["c"]}),
        ('{"a": 1}', "standard input", {"a": 1}),
        ("a: 1", "standard input", {"a": 1}),
        (
            "a: 0777\nb: 1.10\nc: 1:30:00\nd: 2019-03-31\ne: -4",
            "x.yaml",
            NUMBERS,
        ),
        ("a: no\nb: on\nc: true\nd: ~\ne:\nf: 'true'", "x.yaml", WORDS),
        ("base: &b {x: 1}\nnext:\n  <<: *b\n  y: 2", "x.yaml", {"base": {"x": 1}, "next": {"x": 1, "y": 2}}),
        ("base: &b {x: 1}\nnext:\n  <<: *b\n  x: 2", "x.yaml", {"base": {"x": 1}, "next": {"x": 2}}),
        ("a: |\n  one\n  two\n", "x.yaml", {"a": "one\ntwo\n"}),
    ],
)
def test_read(text: str, source: str, data: dict[str, Any]) -> None:
    assert load_text(text, source) == data


@pytest.mark.parametrize(
    ("text", "source", "words"),
    [
        ("", "job.json", ": the file is empty"),
        ("# only a note\n", "batchai.yaml", ": the file has no content"),
        ("null", "job.json", ": the file has no content"),
        ("[1]", "job.json", ": must hold a mapping"),
        ("just words", "x.yaml", ": must hold a mapping"),
        ('{"a": 1,\n "b": }', "job.json", ", line 2, column 7: not valid JSON"),
        ('{"a": 1 // one\n}', "job.json", ", line 1, column 9: not valid JSON"),
        ('{"a": 1,}', "job.json", ", line 1, column "),
        ('{"a": NaN}', "job.json", ": not valid JSON: NaN"),
        (
            '{\n"nodeCount": 1,\n"nodeCount": 2}',
            "job.json",
            ": the key 'nodeCount' is given twice in one mapping (lines 2 and 3)",
        ),
        ('{"x": {"id": 1}, "y": {"id": 1, "id": 2}}', "job.json", ": the key 'id' is given twice in one mapping;"),
        (
            "a: 1\nb:\n  c: 1\n  c: 2\n",
            "b.yaml",
            ", line 4, column 3: not valid YAML: the key 'c' is given twice (first on line 3)",
        ),
        ("a:\n\t- b", "b.yaml", ", line 2, column 1: not valid YAML"),
        ("a: b: c", "b.yaml", ", line 1, column 5: not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "b.yaml", ", line 1, column 4: not valid YAML"),
        ("? [a, b]\n: c", "b.yaml", ", line 1, column 3: not valid YAML: a key must be text"),
        ("a: &x [*x]", "b.yaml", ", line 1, column "),
        ("a: 1\n---\nb: 2", "b.yaml", ", line 2, column 1: "),
        ("a: \x01", "b.yaml", ", line 1: not valid YAML: a character"),
        ("[" * 5_000, "b.yaml", ": not valid YAML: nested too deeply"),
        ("[" * 100_000, "job.json", ": not valid JSON: nested too deeply"),
    ],
)
def test_refused(text: str, source: str, words: str) -> None:
    """An empty or broken document is a sentence with its place, where `az batchai` had a traceback (azure-docs 18849)."""
    with pytest.raises(DocumentError) as caught:
        load_text(text, source)
    assert str(caught.value).startswith(source + words)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{\n  // note\n  "a": 1}', "JSON has no comments"),
        ('{"a": 1 # one\n}', "JSON has no comments"),
        ('{"a": "say "hi""}', 'a quote inside text is written \\"'),
    ],
)
def test_hints(text: str, hint: str) -> None:
    with pytest.raises(DocumentError) as caught:
        load_text(text, "job.json")
    assert str(caught.value).endswith(f"; {hint}")


def test_a_list() -> None:
    assert load_list("- {a: 1}\n- 0.10", "x.yaml") == [{"a": 1}, "0.10"]
    with pytest.raises(DocumentError, match=r"^x\.yaml: must hold a list, not a mapping$"):
        load_list("a: 1", "x.yaml")


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    folder = tmp_path / "a b'é"
    folder.mkdir()
    return folder


def test_files(nasty: Path) -> None:
    job, cluster = nasty / "job.json", nasty / "c.yaml"
    job.write_bytes(b'\xef\xbb\xbf{"properties": {"nodeCount": 2}}')
    assert parse_job(read(job), str(job))[0].properties.node_count == 2
    cluster.write_text("nodes: 3\n")
    assert load_cluster(str(cluster))[0].nodes == 3
    with pytest.raises(DocumentError, match=r"missing\.json: can't be read: No such file or directory$"):
        read(nasty / "missing.json")
    job.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DocumentError, match=r"job\.json: not UTF-8 text \(byte 7\)"):
        read(job)


def test_batchai_yaml_or_a_block_of_the_mlproject(nasty: Path) -> None:
    own, project = nasty / "batchai.yaml", nasty / "MLproject"
    own.write_text("cluster: gpu\n")
    project.write_text("name: x\nbatchai:\n  cluster: gpu\n")
    assert read_batchai(own) == read_batchai(project) == {"cluster": "gpu"}
    project.write_text("name: x\n")
    assert parse_batchai(read_batchai(project), "MLproject")[0].cluster is None
    project.write_text("name: x\nbatchai: [1]\n")
    with pytest.raises(DocumentError, match="MLproject: batchai must be a mapping, not a list"):
        read_batchai(project)


UNFIT = {"a\0b": "holds a NUL byte", "x" * 131072: "is 131072 bytes long", "a\ud800": "holds half a letter"}


@pytest.mark.parametrize(("text", "why"), UNFIT.items(), ids=["nul", "long", "half a letter"])
def test_a_text_that_no_program_can_be_given_is_refused_with_its_key(text: str, why: str, tmp_path: Path) -> None:
    """Wherever it comes from: documents, the backend's configuration, options that go into a document, an MLproject."""
    toolkit = {"customToolkitSettings": {"commandLine": text}}
    secrets = {"secrets": [{"name": "A", "value": "ok"}, {"name": "B", "value": text}]}
    for parse, document, key in (
        (parse_job, {"properties": toolkit}, "properties.customToolkitSettings.commandLine"),
        (parse_job, {"properties": secrets}, "properties.secrets[1].value"),
        (parse_batchai, {"properties": secrets}, "properties.secrets[1].value"),
        (parse_batchai, {"metrics": [{"name": "a", "regex": text}]}, "metrics[0].regex"),
        (parse_cluster, {"properties": {"nodeSetup": {"setupTask": {"commandLine": text}}}}, "setupTask.commandLine"),
        (parse_cluster, {"fileServers": {text: "h:/f"}}, "fileServers."),
    ):
        with pytest.raises(DocumentError) as error:
            parse(document, "d.json")  # type: ignore[operator]
        assert str(error.value).startswith("d.json: ")
        assert key in str(error.value)
        assert why in str(error.value)
        assert len(str(error.value)) < 2000
    (tmp_path / "MLproject").write_text(json.dumps({"entry_points": {"main": {"command": text}}}), encoding="utf-8")
    with pytest.raises(DocumentError, match=rf"entry_points\.main\.command {why}"):
        load_project(tmp_path)


def test_a_pipe_or_device_is_no_document(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "MLproject")
    for path in (tmp_path / "MLproject", Path("/dev/zero")):
        with pytest.raises(DocumentError, match="is a pipe or a device"):
            read(path)
    with pytest.raises(DocumentError, match="is a pipe or a device"):
        load_project(tmp_path)
