"""The command ``batchai`` in this process: MLflow is imported once, not once a command."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlflow_batchai.cli import main, options

if TYPE_CHECKING:
    from world import World


class Said(NamedTuple):
    """What a command left.

    Attributes:
        code: its exit code.
    """

    code: int
    out: str
    err: str


class Cli:
    """One user's commands, in his world: ``cli("job", "list")``."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __call__(self, *arguments: str | Path, **environment: str) -> Said:
        """Run a command to its end, given as words or as one line; standard input is no terminal."""
        words = shlex.split(str(arguments[0])) if len(arguments) == 1 else map(str, arguments)
        out, err = io.StringIO(), io.StringIO()
        options._noticed.clear()
        before, cwd, argv = dict(os.environ), Path.cwd(), sys.argv
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            os.environ.clear()
            os.environ.update({**self.world.environment, **environment})
            os.chdir(self.world.cwd)
            sys.argv = ["batchai", *words]
            try:
                main()
            except SystemExit as ended:
                code = ended.code
            finally:
                os.environ.clear()
                os.environ.update(before)
                os.chdir(cwd)
                sys.argv = argv
        assert isinstance(code, int), code
        assert "Traceback" not in err.getvalue(), err.getvalue()
        return Said(code, out.getvalue(), err.getvalue())

    def json(self, *arguments: str | Path, **environment: str) -> Any:
        """The result of a command that succeeds."""
        said = self(*arguments, **environment)
        assert said.code == 0, said
        return json.loads(said.out) if said.out else None
