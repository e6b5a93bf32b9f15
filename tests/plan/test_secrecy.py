"""Project files that stay on the client, and refusals, so that no secret comes to lie on the share."""

from __future__ import annotations

import pytest

from mlflow_batchai.errors import DocumentError
from mlflow_batchai.plan.secrecy import refuse_secrets, without_secrets
from mlflow_batchai.storage.objects import scan

SECRET = "hunter2hunter2"


@pytest.fixture
def project(tmp_path):
    def make(**files):
        folder = tmp_path / "project"
        folder.mkdir()
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
        return folder

    return make


def split(folder, secrets=(), documents=()):
    kept, withheld = without_secrets(scan(folder), secrets, documents)
    return sorted(file.path for file in kept), withheld


def test_files_that_hold_a_secret_stay(project):
    folder = project(train__py="print(1)", notes__txt=f"it is {SECRET}!", mine__yaml="x: 1")
    assert split(folder, [SECRET], [folder / "mine.yaml"]) == (["train.py"], ["notes.txt"])
    assert split(folder) == (["mine.yaml", "notes.txt", "train.py"], [])


@pytest.mark.parametrize(
    "text",
    [
        "properties: {secrets: [{name: TOKEN, value: x1}]}",
        "secrets: [{name: TOKEN, value: x1}]",
        "nodeSetup: {setupTask: {secrets: [{name: TOKEN, value: x1}]}}",
        "properties: {nodeSetup: {setupTask: {secrets: [{name: TOKEN, value: x1}]}}}",
        '{"batchai": {"properties": {"secrets": [{"name": "TOKEN", "value": "x1"}]}}}',
        '{"properties": {"mountVolumes": {"azureFileShares": [{"credentials": {"accountKey": "a2V5"}}]}}}',
        "share: https://a.file.core.windows.net/s\ncredentials: {sasToken: sig=x}",
        "notify: {url: https://hooks/x1}",
        "notify: {url: 'https://hooks/x1?x=${X}'}",
    ],
)
def test_documents_with_secrets_of_other_jobs_stay(project, text):
    folder = project(train__py="print(1)", other__yaml=text)
    assert split(folder) == (["train.py"], ["other.yaml"])


@pytest.mark.parametrize(
    "text",
    [
        "credentials: {accountKey: <AZURE_BATCHAI_STORAGE_KEY>}",
        "secrets: [a, b]",
        "secrets: {",
        "nodeSetup: {setupTask: secrets}",
        "secrets:",
        "- secrets",
        "properties: {secrets: [{name: A}]}",
        "# secrets\nx: 1",
        "notify: {url: '${SLACK}'}",
        "notify: https://hooks/x1",
    ],
)
def test_other_documents_go(project, text):
    folder = project(other__yaml=text, data__json='{"secrets": 3}')
    assert split(folder) == (["data.json", "other.yaml"], [])


def test_a_large_file_is_not_read_at_once(project, monkeypatch):
    monkeypatch.setattr("mlflow_batchai.plan.secrecy.BLOCK", 64)
    folder = project(clean__bin="x" * 1000, **{f"at{start}__bin": "x" * start + SECRET + "y" * 100 for start in range(45, 70)})
    kept, withheld = split(folder, [SECRET, "another"])
    assert (kept, len(withheld)) == (["clean.bin"], 25)


def test_a_few_letters_are_no_secret(project):
    """They stand everywhere."""
    folder = project(train__py="print('a')")
    assert split(folder, ["a", "print"]) == (["train.py"], [])


@pytest.mark.parametrize(
    ("plan", "place"),
    [
        ({"environmentVariables": [{"name": "URL", "value": f"http://me:{SECRET}@h"}]}, "properties.environmentVariables"),
        ({"name": f"job-{SECRET}"}, "the job's name"),
        ({"preparation": f"login {SECRET}"}, "properties.jobPreparation.commandLine"),
        ({"command": f"python train.py --token {SECRET}"}, "the entry point's command"),
        ({"parameters": {"BATCHAI_PARAM_token": SECRET}}, "a parameter"),
        ({"command": f"python train.py {SECRET}", "parameters": {"BATCHAI_PARAM_pin": SECRET}}, "a parameter"),
        ({"setupTask": {"command": f"login {SECRET}"}}, "nodeSetup.setupTask of the cluster document"),
        ({"outputDirectories": [{"pathSuffix": SECRET}]}, "outputDirectories"),
    ],
)
def test_a_plan_that_says_it_aloud_is_refused(plan, place):
    with pytest.raises(DocumentError) as caught:
        refuse_secrets({"ranks": 2, **plan}, [SECRET], "batchai.yaml", "the entry point's command")
    assert str(caught.value).startswith(f"batchai.yaml: {place} holds the text of a secret")
    assert SECRET not in str(caught.value)
    refuse_secrets({**plan, "secretNames": [SECRET]}, ["another-secret"], "batchai.yaml", "the command")
