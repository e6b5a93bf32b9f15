"""Nouns and verbs whose modules are imported only when they are called: ``batchai --help`` costs no more than click."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple, cast

import click


class Verb(NamedTuple):
    """A command.

    Attributes:
        target: ``module:attribute`` of the click command.
        help: one line.
    """

    target: str
    help: str


class Noun(NamedTuple):
    """A group of commands.

    Attributes:
        help: one line.
        entries: name -> what it is; the order is that of the help.
        usual: the verb that is meant where none is named; None: one has to be.
    """

    help: str
    entries: Mapping[str, Noun | Verb]
    usual: str | None = None


class NounGroup(click.Group):
    """A noun as click has it."""

    def __init__(self, name: str, noun: Noun, text: str | None = None) -> None:
        super().__init__(name, help=text or noun.help, context_settings={"help_option_names": ["-h", "--help"]})
        self._noun = noun

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self._noun.usual and args and args[0] not in (*self._noun.entries, *ctx.help_option_names):
            args = [self._noun.usual, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._noun.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._noun.entries.get(cmd_name)
        if entry is None:
            return None
        return NounGroup(cmd_name, entry) if isinstance(entry, Noun) else load(entry)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        unknown = args and not args[0].startswith("-") and args[0] not in self._noun.entries
        # A shell that completes a line wants no errors.
        if unknown and not ctx.resilient_parsing:
            known = ", ".join(self._noun.entries)
            raise click.UsageError(f"there is no command '{args[0]}' here; the commands are: {known}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self._noun.entries.items()])


def load(verb: Verb) -> click.Command:
    """Import a command."""
    module, _, attribute = verb.target.partition(":")
    return cast(click.Command, getattr(importlib.import_module(module), attribute))
