"""``batchai key``: export and import the key that signs this user's jobs."""

from __future__ import annotations

import sys

import click

from mlflow_batchai.cli.options import Noun, notice
from mlflow_batchai.errors import UsageError
from mlflow_batchai.job import signing

key = Noun("key")


@key.plain_verb("export", "batchai key export | ssh me@elsewhere batchai key import")
def export() -> None:
    """Print your key, which is a secret.

    Jobs are signed with it, so that only what you have submitted is followed, ended or started again in your name. Another
    machine of yours that is to do that needs the same key.
    """
    click.echo(signing.exported_key())


@key.plain_verb("import", "batchai key import")
def import_() -> None:
    """Take over the key on standard input, as `batchai key export` prints it.

    Jobs are signed with it from now on. A key that this machine has already is kept, for the jobs that were signed with it.
    """
    if sys.stdin.isatty():
        raise UsageError("the key is read from standard input: batchai key export | ssh me@elsewhere batchai key import")
    notice(f"key {signing.take_key(sys.stdin.read())} signs your jobs now ({signing.key_path()})")
