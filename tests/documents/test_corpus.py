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
MISSPELT = "credentialsInfo is not a known key; did you mean credentials?"

pytestmark = pytest.mark.skipif(not FILES, reason=f"the corpus of real Batch AI files is not at {CORPUS}")


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(CORPUS)) for path in FILES])
def test_file(path: Path) -> None:
    parse = parse_cluster if "cluster" in path.name else parse_job
    if not is_json(path):
        with pytest.raises(DocumentError, match=r"\.json, line \d+, column \d+: not valid JSON: "):
            parse(read(path), str(path))
        return
    if "credentialsInfo" in path.read_text():
        with pytest.raises(DocumentError) as caught:
            parse(read(path), str(path))
        assert str(caught.value).endswith(MISSPELT)
        return
    document, warnings = parse(read(path), str(path))
    assert all(warning.startswith(str(path)) for warning in warnings)
    assert "REDACTED" not in json.dumps(masked(document))
    if isinstance(document, JobDocument) and "_documentation" not in path.parts:
        require_complete(document.properties, str(path))
