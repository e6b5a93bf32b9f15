"""Workspaces and experiments: the nouns that everything else stands under."""

from __future__ import annotations

import pytest
from command_line import Cli

from mlflow_batchai.cluster.workspaces import arm_id


def test_a_workspace_from_create_to_delete(cli: Cli) -> None:
    made = cli.json("workspace", "create", "-n", "vision", "-g", "rg.one", "-l", "eastus")
    assert made == cli.json("workspace", "show", "vision")
    assert made == cli.json("workspace", "create", "vision", "-g", "another")  # as it was
    assert made == cli.json("workspace", "show", "-w", "vision")
    assert cli("workspace", "show").code == 2
    assert made["id"] == "/subscriptions/local/resourceGroups/rg.one/providers/Microsoft.BatchAI/workspaces/vision"
    assert (made["location"], made["provisioningState"]) == ("eastus", "succeeded")
    assert made["creationTime"].endswith("+00:00")
    table = cli("workspace", "list", "-o", "table").out.splitlines()
    assert table[0].split("  ")[0] == "Name"
    assert table[0].split() == ["Name", "Resource", "Group", "Location", "State"]
    assert [line.split() for line in table[2:]] == [
        ["default", "batchai", "local", "succeeded"],
        ["vision", "rg.one", "eastus", "succeeded"],
    ]
    assert cli("workspace", "delete", "vision").code == 2  # nobody to ask
    assert cli("workspace", "delete", "vision", "-y") == (0, "", "")
    assert cli("workspace", "show", "vision") == (
        3,
        "",
        "batchai: there is no workspace 'vision'; the workspaces are: default\n",
    )
    assert cli("workspace", "show", "../workspaces/vision").code == cli("workspace", "show", "x" * 300).code == 3


def test_the_default_workspace_stays_with_its_clusters(cli: Cli) -> None:
    cli.json("cluster", "create", "-n", "four", "-t", "4")
    said = cli("workspace", "delete", "default", "-y")
    assert said.code == 2 and "is always there" in said.err
    assert cli("cluster", "show", "four").code == 0


def test_a_record_that_is_none(cli: Cli) -> None:
    cli.json("workspace", "create", "vision")
    record = cli.world.home / "workspaces" / "vision.json"
    for text in ("{}", "[]", "{"):
        record.write_text(text)
        said = cli("workspace", "show", "vision")
        assert said.code == 2 and f"{record}: the workspace's record can't be read" in said.err


@pytest.mark.parametrize("name", ["a b", "a/b", "x" * 65, "../x", "é.x"])
def test_names_outside_the_pattern(cli: Cli, name: str) -> None:
    for noun in ("workspace", "experiment"):
        code, out, err = cli(noun, "create", "-n", name)
        assert (code, out) == (2, "")
        assert err == f"batchai: the {noun} '{name}' must have 1 to 64 letters, digits, '-' or '_'\n"


def test_an_experiment_from_create_to_delete(cli: Cli) -> None:
    cli.json("workspace", "create", "vision")
    made = cli.json("experiment", "create", "-n", "digits", "-w", "vision")
    assert made["id"] == arm_id("batchai", "vision", "experiments", "digits")
    assert made == cli.json("experiment", "show", "digits") == cli.json("experiment", "create", "digits", "-w", "vision")
    assert cli.world.client.get_experiment(made["experimentId"]).name == "digits"
    assert [row["name"] for row in cli.json("experiment", "list")] == ["digits", "Default"]
    assert [row["name"] for row in cli.json("experiment", "list", BATCHAI_WORKSPACE="vision")] == ["digits"]
    assert "in workspace 'vision' already" in cli("experiment", "create", "digits").err
    assert cli("experiment", "show", "nope") == (
        3,
        "",
        "batchai: there is no experiment 'nope'; the experiments are: digits, Default\n",
    )
    assert cli("experiment", "list", "-w", "nope").code == 3
    assert cli("experiment", "create", "x", "-w", "nope").code == 3
    run = cli.world.client.create_run(made["experimentId"], tags={"batchai.job": "toy-1"})
    assert "jobs that have not ended: toy-1" in cli("experiment", "delete", "digits", "-y").err
    cli.world.client.set_terminated(run.info.run_id)
    assert cli("experiment", "delete", "digits", "-y") == (0, "", "")
    assert cli("experiment", "show", "digits").code == 3
    assert "mlflow experiments restore" in cli("experiment", "create", "digits", "-w", "vision").err
    assert (
        "can't be deleted" in cli("experiment", "delete", "Default", "-y").err or cli("experiment", "show", "Default").code == 3
    )


def test_deleting_a_workspace_takes_its_clusters(cli: Cli) -> None:
    cli.json("workspace", "create", "vision")
    cli.json("cluster", "create", "-n", "four", "-w", "vision", "-t", "4")
    cli.json("cluster", "create", "-n", "other", "-t", "1")
    assert cli("workspace", "delete", "vision", "-y").code == 0
    assert cli("cluster", "show", "four").code == 3
    assert cli("cluster", "show", "other").code == 0


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (["-o", "tsv"], "default\n"),
        (["--query", "[].location", "-o", "json"], '[\n  "local"\n]\n'),
        (["--query", "[0].name", "-o", "yaml"], "default\n"),
        (["--query", "[0].name", "-o", "table"], "Result\n-------\ndefault\n"),
        (["--query", "[0].nope"], ""),
        (["-o", "none"], ""),
    ],
)
def test_output_and_query(cli: Cli, arguments: list[str], out: str) -> None:
    said = cli("workspace", "list", *arguments)
    assert (said.code, said.err) == (0, "")
    assert said.out == out or (arguments == ["-o", "tsv"] and said.out.split("\t")[1] == "default")


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--query", "[?"], {}, "batchai: --query '[?' is no JMESPath expression"),
        (["--query", "length(@, @)"], {}, "batchai: --query 'length(@, @)'"),
        (["--query", "[].nope(@)"], {}, "can't be used on this result: Unknown function: nope()"),
        (["--query", "nope(@)"], {}, "'nope(@)' is no JMESPath expression (jmespath.org): Unknown function: nope()"),
        (["-o", "xml"], {}, "Error: Invalid value for '-o' / '--output'"),
        ([], {"BATCHAI_OUTPUT": "xml"}, "batchai: BATCHAI_OUTPUT is 'xml'; it must be one of json,"),
        (["-g", "a/b"], {}, "batchai: the resource group 'a/b' must have"),
    ],
)
def test_options_that_cannot_be_used(cli: Cli, arguments: list[str], environment: dict[str, str], words: str) -> None:
    code, out, err = cli("workspace", "list", *arguments, **environment)
    assert (code, out) == (2, "")
    assert words in err


def test_defaults_from_the_configuration(cli: Cli) -> None:
    cli.world.home.mkdir()
    config = cli.world.home / "config.yaml"
    config.write_text("defaults:\n  workspace: vision\n  resourceGroup: mine\n  output: table\n")
    cli("workspace", "create", "vision")
    assert "resourceGroups/mine/" in cli.json("experiment", "create", "digits", "-o", "json")["id"]
    assert cli("experiment", "list").out.splitlines()[2].split() == ["digits", "mine", "vision", "succeeded"]
    assert [row["name"] for row in cli.json("experiment", "list", "-w", "default", "-o", "json")] == ["Default"]
    config.write_text("defaults:\n  workspac: x\n")
    code, _, err = cli("experiment", "list")
    assert (code, err.count("\n")) == (1, 1)
    assert f"{config}: defaults.workspac" in err
    assert "workspace" in err
