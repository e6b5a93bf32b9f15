"""Service variables in text are filled in once, and missing ones are listed."""

from __future__ import annotations

import pytest

from mlflow_batchai.agent.layout import expand, undefined

KNOWN = {"AZ_BATCHAI_MOUNT_ROOT": "/mnt/a b", "AZ_BATCHAI_OUTPUT_MODEL": "/out/$HOME", "A": "", "_x1": "y"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", ""),
        ("plain", "plain"),
        ("$AZ_BATCHAI_MOUNT_ROOT/x", "/mnt/a b/x"),
        ("${AZ_BATCHAI_MOUNT_ROOT}x", "/mnt/a bx"),
        ("$AZ_BATCHAI_MOUNT_ROOTS", "$AZ_BATCHAI_MOUNT_ROOTS"),
        ("--out=$AZ_BATCHAI_OUTPUT_MODEL,$AZ_BATCHAI_OUTPUT_MODEL", "--out=/out/$HOME,/out/$HOME"),
        ("$A$_x1", "y"),
        ("$HOME ${HOME} $1 $$ $ ${ ${A-b} $(A)", "$HOME ${HOME} $1 $$ $ ${ ${A-b} $(A)"),
        ("$AZ_BATCHAI_MOUNT_ROOTé", "/mnt/a bé"),
    ],
)
def test_expand(text: str, result: str) -> None:
    assert expand(text, KNOWN) == result


def test_undefined_lists_service_variables_once_in_order() -> None:
    text = "$AZ_BATCHAI_INPUT_B ${AZ_BATCHAI_INPUT_A} $AZ_BATCHAI_INPUT_B $AZ_BATCHAI_MOUNT_ROOT $HOME"
    assert undefined(text, KNOWN) == ["AZ_BATCHAI_INPUT_B", "AZ_BATCHAI_INPUT_A"]
    assert undefined("nothing", {}) == []
