"""The container of one job on one node by Apptainer: an instance, which commands enter, of a registry's image or a file.

The processes run as the agent's user, who needs no more rights than user namespaces. What they write outside of the node's own
paths (job preparation's packages, ``/tmp``, the home folder) lies in the job's folder on the node, and goes with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow_batchai.agent.containers.container import CARRIER, DEFAULT_PATH, Container, pid_namespace, qualified, shell_command
from mlflow_batchai.agent.containers.engines import ask, csv_field

# The agent's end ends all that runs in the container. Its first process is Apptainer's, which passes SIGTERM on to our own, and
# ends, with the container, where that is gone; setsid leaves our process's group. The agent alone ends it, not a SIGTERM to all
# of a Slurm step. Where Apptainer gives no PID namespace, other processes of the user's are not to be hit.
KEEPER = """trap '' TERM
while read -r _; do :; done <"$0"
read -r first </proc/1/comm
[ "$PPID $first" = "1 appinit" ] || exit
kill -KILL -1
setsid sh -c 'while kill -TERM 1; do sleep 0.1; done' &"""
# Variables that Apptainer does not set as they are given, or heeds. LD_LIBRARY_PATH it makes longer, by its GPU libraries.
_ITS_OWN = re.compile(r"(APPTAINER|SINGULARITY)\w*|PATH|(PRE|AP)PEND_PATH|HOME|PWD|PS1|PROMPT_COMMAND")
# What Apptainer's client has started is killed with it, and Slurm's SIGTERM ends the client; a child of that may still save.
_BELOW = '"$@"; exit $?'
_PREFIX = "APPTAINERENV_"
_ALONE = ("--containall", "--cleanenv", "--no-eval")


class Apptainer(Container):
    """A job's container on this node, as its base says; its arguments are the base's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._folder = os.path.join(self._layout.job, "apptainer")
        self._pid_file = os.path.join(self._folder, "pid")
        # The user's own settings, with his logins at registries.
        self._pulls = dict(self._client)
        # Instances are kept here, with their logs: nothing of them stays in the user's home folder.
        self._client["APPTAINER_CONFIGDIR"] = os.path.join(self._folder, "config")
        self._given: dict[str, str] = {}

    def _fetch(self) -> None:
        """Pull the image into Apptainer's cache, whose file is named after its content; an image's file needs nothing."""
        image = self._container.image
        if image.startswith("/"):
            try:
                self.identity = f"{image} {os.stat(image).st_mtime_ns}"
            except OSError as error:
                raise self._failure(f"{image} can't be read: {error.strerror}; correct its path") from None
            self._image_path = image
            return
        environment = dict(self._pulls)
        if self._credentials:
            environment["APPTAINER_DOCKER_USERNAME"] = self._credentials["username"]
            environment["APPTAINER_DOCKER_PASSWORD"] = self._credentials["password"]
        self._say(f"pulling the image {image}")
        found: list[str] = []

        def hear(line: str) -> None:
            self._shipper.note(f"{self._engine.kind}: {line}")
            if line.startswith("/"):
                found.append(line)

        script = 'echo "$APPTAINER_CONTAINER"'
        argv = [self._engine.program, "--nocolor", "exec", *_ALONE, f"docker://{qualified(image)}", "/bin/sh", "-c", script]
        task = self._run(argv, hear, environment=environment)
        if task.exit_code != 0 or not found:
            remedy = "correct its name, or give its registry's credentials"
            raise self._failure(f"it can't be pulled: {self._cause(task.tail) or task.verdict}; {remedy}", task.tail)
        self.identity = self._image_path = found[-1]

    def _command(self) -> list[str]:
        overlay, work = os.path.join(self._folder, "overlay"), os.path.join(self._folder, "work")
        for path in (overlay, work, self._client["APPTAINER_CONFIGDIR"]):
            os.makedirs(path)
        keeper = os.path.join(self._folder, "keeper")
        with open(keeper, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\nexec sh -c {shlex.quote(KEEPER)} {shlex.quote(self._alive)}\n")
        os.chmod(keeper, 0o700)
        argv = [self._engine.program, "--nocolor", "instance", "start", *_ALONE, f"--overlay={overlay}", f"--workdir={work}"]
        argv += [f"--pid-file={self._pid_file}", *(self._engine.differs.gpus(self._gpus) if self._gpus else ())]
        mounts = [(mount.path, mount.path, mount.read_only) for mount in self._mounts()]
        for source, target, read_only in [*mounts, (keeper, "/.singularity.d/startscript", True)]:
            fields = ["type=bind", f"source={source}", f"destination={target}", *(["ro"] if read_only else [])]
            argv.append("--mount=" + ",".join(csv_field(field) for field in fields))
        argv += [f"--bind={volume}" for volume in self._container.volumes]
        return [*argv, self._image_path, self.name]

    def _first_process(self) -> int:
        first = 0
        with contextlib.suppress(OSError, ValueError), open(self._pid_file, encoding="ascii") as file:
            first = int(file.read())
        if pid_namespace(first) == pid_namespace(os.getpid()):
            why = "Apptainer gives it no PID namespace of its own, with which all that runs in it would end"
            raise self._failure(f"{why}: the nodes' administrator must set 'allow pid ns = yes' in apptainer.conf")
        return first

    def _cause(self, said: Sequence[str]) -> str:
        """The first error is the cause, and others follow from it."""
        errors = [line.partition(":")[2].strip() for line in said if line.startswith(("FATAL", "ERROR"))]
        return errors[0] if errors else super()._cause(said)

    def _look_around(self) -> None:
        code, said = self._ask_inside("cat /proc/self/environ")
        if code == 0:
            self._given = dict(entry.partition("=")[::2] for entry in said.split("\0") if "=" in entry)
        self.base = {**self._given, "PATH": self._given.get("PATH", DEFAULT_PATH) + os.pathsep + self._layout.bin}
        super()._look_around()

    def _ask_inside(self, text: str) -> tuple[int | None, str]:
        return ask([*self._enter("/"), "/bin/sh", "-c", text], self._client)

    def _enter(self, cwd: str) -> list[str]:
        return [self._engine.program, "--silent", "exec", "--cleanenv", "--no-eval", f"--pwd={cwd}", f"instance://{self.name}"]

    def argv_for(
        self, argv: Sequence[str], environment: Mapping[str, str], cwd: str, stdin: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """(argv, environment) of Apptainer that runs a command in the container; no value stands in the argv."""
        variables = {name: value for name, value in environment.items() if self._given.get(name) != value}
        carried = {name for name in variables if _ITS_OWN.fullmatch(name)}
        passed = {_PREFIX + (CARRIER + name if name in carried else name): value for name, value in variables.items()}
        program = self.shell if argv[0] == "bash" else argv[0]
        command = shell_command([program, *argv[1:]], carried, self._layout.umask, _BELOW)
        return [*self._enter(cwd), *command], {**self._client, **passed}
