"""``batchai completion``: scripts that complete our commands in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from mlflow_batchai.cli.options import EVERYWHERE, HELP


@click.command(context_settings=HELP, epilog='Example: eval "$(batchai completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the lines that make SHELL complete nouns, verbs and options.

    Put the example's line into ~/.bashrc (with zsh: ~/.zshrc); for fish write the output to
    ~/.config/fish/completions/batchai.fish.
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "batchai", "_BATCHAI_COMPLETE").source())


completion.params += EVERYWHERE
