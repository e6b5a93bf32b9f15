"""``batchai completion``: what a shell needs to complete our commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from mlflow_batchai.cli.nouns import NounGroup
from mlflow_batchai.cli.tree import TREE


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Example: eval "$(batchai completion bash)"',
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the lines that make SHELL complete nouns, verbs and options.

    Put the example's line into ~/.bashrc (with zsh: ~/.zshrc); for fish write the output to
    ~/.config/fish/completions/batchai.fish.
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(NounGroup("batchai", TREE), {}, "batchai", "_BATCHAI_COMPLETE").source())
