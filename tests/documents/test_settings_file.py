"""config.yaml: defaults, and what opens storage accounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlflow_batchai import config
from mlflow_batchai.cli.options import OUTPUTS
from mlflow_batchai.documents.model import parse
from mlflow_batchai.documents.settings import SettingsFile
from mlflow_batchai.errors import DocumentError

KEY = "a2V5"


def test_all_of_it() -> None:
    data = {
        "defaults": {"resourceGroup": "rg.1", "workspace": "w", "experiment": "e 1", "cluster": "c", "output": "table"},
        "shares": {"acct": {"accountKey": KEY}, "two": {"fileEndpoint": "https://ACCOUNT.file.example.org"}},
    }
    found, warnings = parse(SettingsFile, data, "config.yaml")
    assert (warnings, found.defaults.resource_group, found.shares["two"].account_key) == ([], "rg.1", None)
    assert KEY not in repr(found)


@pytest.mark.parametrize("output", OUTPUTS)
def test_every_output_can_be_the_default(output: str) -> None:
    assert parse(SettingsFile, {"defaults": {"output": output}}, "x")[0].defaults.output == output


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"default": {}}, "default"),
        ({"defaults": {"output": "xml"}}, "defaults.output"),
        ({"defaults": {"workspace": "a b"}}, "defaults.workspace"),
        ({"shares": {"acct": {}}}, "shares.acct must have either"),
        ({"shares": {"acct": {"accountKey": KEY, "sasToken": "sig=x"}}}, "not both"),
        ({"shares": {"acct": {"fileEndpoint": "files"}}}, "must be an address"),
        ({"shares": {"acct": {"acountKey": KEY}}}, "shares.acct.acountKey is not a known key; did you mean accountKey"),
        ({"shares": {"acct": {"secret": KEY}}}, "known keys: accountKey, sasToken, connectionString, fileEndpoint"),
    ],
)
def test_what_is_wrong_is_said(data: dict[str, Any], words: str) -> None:
    with pytest.raises(DocumentError, match=words) as raised:
        parse(SettingsFile, data, "config.yaml")
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("text", ["", " \n", "# defaults:\n#   output: table\n"])
def test_a_file_that_says_nothing_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text(text)
    assert config.settings() is None
