"""Real Batch AI files, where they are at hand: valid JSON parses, the rest is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlflow_batchai.documents.cluster import parse_cluster
from mlflow_batchai.documents.job import JobDocument, parse_job, require_complete
from mlflow_batchai.documents.model import masked
from mlflow_batchai.documents.reading import read
from mlflow_batchai.errors import DocumentError

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
FILES = sorted(CORPUS.rglob("*.json"))

pytestmark = pytest.mark.skipif(not FILES, reason=f"the corpus of real Batch AI files is not at {CORPUS}")


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(CORPUS)) for path in FILES])
def test_file(path: Path) -> None:
    parse = parse_cluster if "cluster" in path.name else parse_job
    text = path.read_text()
    try:
        json.loads(text)
        refusal = None
    except ValueError:
        refusal = r"\.json, line \d+, column \d+: not valid JSON: "
    if refusal:
        with pytest.raises(DocumentError, match=refusal):
            parse(read(path), str(path))
        return
    document, warnings = parse(read(path), str(path))
    assert all(warning.startswith(str(path)) for warning in warnings)
    assert "REDACTED" not in json.dumps(masked(document))
    if isinstance(document, JobDocument) and "_documentation" not in path.parts:
        require_complete(document.properties, str(path))
