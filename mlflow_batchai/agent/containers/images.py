"""The image of a job's container on this node: pulled, as its registry lets us, or what the node has of it."""

import json
import os
import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from mlflow_batchai.agent.containers import arguments
from mlflow_batchai.agent.containers.engines import Engine, ask, last_line
from mlflow_batchai.agent.plan import Container
from mlflow_batchai.agent.tasks import Task

HUB = "docker.io"
_DIGEST = re.compile(r"@[\w+.-]+:[0-9a-fA-F]+$")

Run = Callable[[Sequence[str], Callable[[str], None]], Task]


class ImageError(Exception):
    """The image can't be had; the message continues a sentence that names it.

    Attributes:
        tail: last lines that the engine said.
    """

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tail = list(tail)


class Puller:
    """Gets one image.

    Args:
        client: environment of the engine's client.
        container: the plan's.
        run: runs a command of the client to its end, and gives its lines to a function.
        say: tells people (True: those who watch, too) what is going on.
    """

    def __init__(
        self,
        engine: Engine,
        client: Mapping[str, str],
        container: Container,
        run: Run,
        say: Callable[[str, bool], None],
    ) -> None:
        self._engine = engine
        self._client = client
        self._image = container.image
        self._server = container.server
        self._run = run
        self._say = say

    def image(self, login: str, credentials: Optional[Mapping[str, str]]) -> Dict[str, Any]:
        """What the engine says of the image (``Id``, ``Config``), pulling it first.

        Its registry is asked each time, since a tag may stand for another image by now; but for a name that can't change (a
        digest) or that no registry has (``localhost/...``) of which the node has the image. If a registry doesn't give it,
        the node's own is used, with a note.

        Args:
            login: a folder for the registry's password, which nobody else can read; the caller removes it.
            credentials: ``username`` and ``password``, or None.

        Raises:
            ImageError: neither gives it.
        """
        own = self._inspect(self._image)
        if own and (_DIGEST.search(self._image) or self._image.startswith("localhost/")):
            return own
        pull = self._logged_in(login, credentials) if credentials else [self._engine.program, "pull"]
        name = arguments.qualified(self._image)
        self._say("pulling the image %s" % self._image, True)
        task = self._run([*pull, name], lambda line: self._note(line, credentials))
        if task.exit_code == 0:
            found = self._inspect(name)
            if found:
                return found
            raise ImageError("%s has pulled it and doesn't know it" % self._engine.kind, list(task.tail))
        why = masked(last_line("\n".join(task.tail)), credentials)
        if own:
            self._say(
                "the image %s can't be pulled (%s); this node has one of that name, which is used" % (self._image, why), True
            )
            return own
        remedy = "correct its name, give its registry's credentials, or pull it on the nodes"
        raise ImageError("it can't be pulled: %s; %s" % (why, remedy), list(task.tail))

    def _note(self, line: str, credentials: Optional[Mapping[str, str]]) -> None:
        if line.strip():
            self._say("%s: %s" % (self._engine.kind, masked(line.strip(), credentials)), False)

    def _logged_in(self, folder: str, credentials: Mapping[str, str]) -> List[str]:
        """Log in to the registry; the command that pulls from it, without the image's name."""
        os.mkdir(folder, 0o700)
        program, server = self._engine.program, self._server or HUB
        login = ["--username=" + credentials["username"], "--password-stdin", server]
        if self._engine.kind == "podman":
            own = ["--authfile=" + os.path.join(folder, "auth.json")]
            argv, pull = [program, "login", *own, *login], [program, "pull", *own]
        else:
            own = ["--config=" + folder, *self._daemon()]
            argv, pull = [program, *own, "login", *login], [program, *own, "pull"]
        code, said = ask(argv, self._client, credentials["password"].encode())
        if code != 0:
            why = masked(last_line(said), credentials)
            remedy = "correct containerSettings.imageSourceRegistry.credentials"
            raise ImageError("%s does not let %s in: %s; %s" % (server, credentials["username"], why, remedy))
        return pull

    def _daemon(self) -> List[str]:
        """docker's option for its daemon: which one that is may stand in the configuration that we leave aside."""
        if self._client.get("DOCKER_HOST"):
            return []
        argv = [self._engine.program, "context", "inspect", "--format={{.Endpoints.docker.Host}}"]
        code, said = ask(argv, self._client)
        return ["--host=" + said.strip()] if code == 0 and said.strip() else []

    def _inspect(self, name: str) -> Optional[Dict[str, Any]]:
        code, said = ask([self._engine.program, "image", "inspect", name], self._client)
        if code != 0:
            return None
        found: List[Dict[str, Any]] = json.loads(said)
        return found[0] if found else None


def masked(text: str, credentials: Optional[Mapping[str, str]]) -> str:
    """The text without the password."""
    password = credentials["password"] if credentials else ""
    return text.replace(password, "***") if password else text
