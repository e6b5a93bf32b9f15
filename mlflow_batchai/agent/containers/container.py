"""The container of one job on one node: pull its image, start it, run commands in it, remove it with the agent.

What the engine is told are pure functions; nothing secret stands among arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mlflow_batchai.agent import plan, protocol
from mlflow_batchai.agent.containers import engines
from mlflow_batchai.agent.containers.engines import Engine, ask, csv_field, last_line, registry
from mlflow_batchai.agent.layout import NodeLayout, archive_path
from mlflow_batchai.agent.mounts import mountpoints
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.agent.processes.tasks import Task
from mlflow_batchai.agent.runtime import HELPER_VARIABLE, Runtime
from mlflow_batchai.agent.transport.shipper import Shipper

# From an image that is there, on a node that is busy.
START_SECONDS = 120
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HUB = "docker.io"
_DIGEST = re.compile(r"@[\w+.-]+:[0-9a-fA-F]+$")

# Where the image has the programs that we start, a line each; an empty one: nowhere.
_PROBE = 'for name in python3 python bash; do command -v "$name" || echo; done'
# The container's first process. It lives as long as the agent holds a named pipe open for writing: when the agent is gone,
# however that came, the kernel ends all that runs in the container with it. Its wait collects orphans meanwhile.
KEEPER = 'while read -r _; do :; done <"$0" & wait $!'

# Variables that the engine's client itself heeds: the job's values of these must not reach it.
_CLIENTS_OWN = re.compile(
    r"(LD_|DOCKER_|_?CONTAINER|XDG_|STORAGE_|REGISTRY_|BUILDAH_|PODMAN_|DBUS_|LISTEN_|GO|SSL_CERT_|SSH_)\w*"
    r"|PATH|HOME|TMPDIR|USER|NOTIFY_SOCKET|(?i:(https?|no|all)_proxy)"
)
CARRIER = "BATCHAI_SET_"


class Mount(NamedTuple):
    """A path of the node that the container sees under the same name."""

    path: str
    propagation: str = "rprivate"
    read_only: bool = False


def qualified(image: str) -> str:
    """The name with its registry in it: docker means Docker Hub where there is none, podman asks its configuration."""
    if registry(image):
        return image
    return f"{HUB}/{image}" if "/" in image else f"{HUB}/library/{image}"


def outermost(paths: Collection[str]) -> list[str]:
    """The paths without those that lie in another of them, which come along with it."""
    return [path for path in sorted(set(paths)) if not any(path != other and _inside(path, other) for other in paths)]


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def propagation(path: str, mounted: Sequence[mountpoints.Mounted]) -> str:
    """Mount propagation of a real path into the container.

    ``rslave`` (mounts come and go) where the node's own mount there is shared, which engines insist on; else ``rprivate``
    (the mounts that are there when it starts).
    """
    around = [mount for mount in reversed(mounted) if _inside(path, mount.point)]
    return "rslave" if around and max(around, key=lambda mount: len(mount.point)).shared else "rprivate"


def create(
    engine: Engine,
    container: plan.Container,
    image: str,
    name: str,
    labels: Mapping[str, str],
    mounts: Sequence[Mount],
    environment: Mapping[str, str],
    user: str,
    gpus: Sequence[str],
    pipe: str,
) -> list[str]:
    """The whole command that starts the container.

    Args:
        image: name or id of the image that is on the node.
        environment: what all processes in it get besides the image's own; nothing secret.
        user: ``uid:gid``.
        gpus: those that it gets (see ``offered``).
        pipe: the named pipe that the agent holds open.
    """
    argv = [engine.program, "run", "--detach", "--rm", f"--name={name}"]
    argv += [f"--label={label}={value}" for label, value in labels.items()]
    # The agent ends what runs in it; by then there is nobody left to be asked nicely.
    argv += ["--network=host", "--stop-signal=SIGKILL", "--pids-limit=-1", "--security-opt=label=disable", f"--user={user}"]
    if container.shm_size:
        argv.append(f"--shm-size={container.shm_size}")
    if gpus:
        argv += engine.differs.gpus(gpus)
    argv += [f"--env={variable}={value}" for variable, value in environment.items()]
    for mount in mounts:
        fields = ["type=bind", f"source={mount.path}", f"target={mount.path}", f"bind-propagation={mount.propagation}"]
        argv.append("--mount=" + ",".join(csv_field(field) for field in [*fields, *(["readonly"] if mount.read_only else [])]))
    argv += [f"--volume={volume}" for volume in container.volumes]
    return [*argv, "--entrypoint=sh", image, "-c", KEEPER, pipe]


def offered(engine: Engine, gpus: Sequence[str]) -> Sequence[str]:
    """The GPU option of a container: by UUID just its own, ``all`` where the engine can't tell them apart.

    Indexes would be others inside. An engine without a daemon knows the names of the container device interface, and not every
    tool that writes them has UUIDs; of all GPUs a rank sees its own, as without a container.
    """
    return ["all"] if gpus and (not engine.differs.by_daemon or any(name.isdigit() for name in gpus)) else gpus


def shell_command(argv: Sequence[str], carried: Collection[str], umask: int, run: str = 'exec "$@"') -> list[str]:
    """The command of a shell in the container that sets the umask and the variables that came under another name."""
    steps = [f'export {name}="${CARRIER}{name}"; unset {CARRIER}{name}' for name in sorted(carried)]
    # The shell looks for the program before it leaves, with the PATH that the command will have.
    return ["/bin/sh", "-c", "; ".join([*steps, f"umask {umask:03o}", run]), "sh", *argv]


def enter(
    engine: Engine,
    name: str,
    argv: Sequence[str],
    variables: Mapping[str, str],
    client: Mapping[str, str],
    cwd: str,
    umask: int,
    stdin: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """A command in the container, as (argv, environment) of the engine's client.

    Variables are named there and their values stand in the client's environment, for arguments are for all to see. One that
    the client would heed itself goes under another name, and a shell in the container puts that right.

    Args:
        variables: what the command gets besides the container's own environment.
        client: the client's own environment.
    """
    theirs = {name for name in variables if name in client or _CLIENTS_OWN.fullmatch(name)}
    carried = {name for name in theirs if client.get(name) != variables[name]}
    under = {name: CARRIER + name if name in carried else name for name in variables}
    options = [*(["--interactive"] if stdin else []), f"--workdir={cwd}", *(f"--env={name}" for name in under.values())]
    environment = {**client, **{under[name]: value for name, value in variables.items()}}
    return [engine.program, "exec", *options, name, *shell_command(argv, carried, umask)], environment


class Container:
    """The container of a job on this node.

    All processes of the job run in it, as root where that is no more than the node's own user may (the agent is root, or the
    engine has no more rights than its user): Batch AI ran them as root, and preparations install packages. Under a docker
    daemon that is root's, where the agent is not, they run as the node's user, who could not clear the node else.

    Args:
        credentials: ``username`` and ``password`` of the registry, or None.
        check: raises if the attempt is to end.

    Attributes:
        base: the environment that every process in it has: the image's, and our folder behind its PATH.
        python: the image's interpreter, empty if it has none.
        shell: ``bash``, or ``sh`` where the image has none.
        first: pid, on the node, of what keeps it alive; 0 if that isn't known.
    """

    def __init__(
        self,
        layout: NodeLayout,
        shipper: Shipper,
        runtime: Runtime,
        container: plan.Container,
        credentials: Mapping[str, str] | None,
        engine: Engine,
        gpus: Sequence[str],
        check: Callable[[], None],
    ) -> None:
        # Each attempt has its own: what another one has left on this machine may still be there, and be removed by its name.
        self.name = f"batchai-{layout.mark.replace('/', '-')}-{layout.node}"
        self.base: dict[str, str] = {}
        self.python = ""
        self.shell = "bash"
        self.identity = ""
        self.first = 0
        self._alive = os.path.join(layout.job, "alive")
        self._layout = layout
        self._shipper = shipper
        self._runtime = runtime
        self._container = container
        self._credentials = credentials
        self._engine = engine
        self._gpus = gpus
        self._check = check
        self._client = engines.own_environment(os.environ)
        self._login = os.path.join(layout.job, "registry")
        self._pipe: int | None = None
        self._namespace: str | None = None
        self._began: int | None = None

    # Its beginning.

    def start(self) -> None:
        """Pull the image and start the container; nothing of it is left if that fails.

        Raises:
            Failure: the image can't be had, or the container can't be started; and whatever ``check`` raises.
        """
        engines.remember(self._layout.root, self._engine, self.name, self._layout.mark, self._login, self._client)
        try:
            try:
                self._fetch()
            finally:
                # Ranks see the job's folder; they are not to see the password.
                shutil.rmtree(self._login, ignore_errors=True)
            self._create()
            self._look_around()
        except BaseException:
            self.remove()
            raise

    def _fetch(self) -> None:
        """Have the image on this node, and know its identity and environment."""
        image = self._image()
        self.identity = image["Id"]
        self.base = dict(entry.partition("=")[::2] for entry in (image.get("Config") or {}).get("Env") or ())

    def _image(self) -> dict[str, Any]:
        """Pull the image and return the engine's description of it (``Id``, ``Config``).

        Its registry is asked each time, since a tag may stand for another image by now; but for a name that can't change (a
        digest) or that no registry has (``localhost/...``) of which the node has the image. If a registry doesn't give it,
        the node's own is used, with a note.
        """
        image = self._container.image
        own = self._inspect(image)
        if own and (_DIGEST.search(image) or image.startswith("localhost/")):
            return own
        pull = self._with_login(self._credentials) if self._credentials else [self._engine.program, "pull"]
        self._say(f"pulling the image {image}")
        task = self._run([*pull, qualified(image)], lambda line: self._shipper.note(f"{self._engine.kind}: {line}"))
        if task.exit_code == 0:
            found = self._inspect(qualified(image))
            if found:
                return found
            raise self._failure(f"{self._engine.kind} has pulled it and doesn't know it", task.tail)
        why = last_line("\n".join(task.tail))
        if own:
            why = self._masked(why)
            self._say(f"the image {image} can't be pulled ({why}); this node has one of that name, which is used")
            return own
        remedy = "correct its name, give its registry's credentials, or pull it on the nodes"
        raise self._failure(f"it can't be pulled: {why}; {remedy}", task.tail)

    def _with_login(self, credentials: Mapping[str, str]) -> list[str]:
        """Log in to the registry, in a folder of our own; the command that pulls from it, without the image's name."""
        os.mkdir(self._login, 0o700)
        program, server, differs = self._engine.program, self._container.server or HUB, self._engine.differs
        config = [differs.config.format(folder=self._login)]
        before, after = ([*config, *self._daemon()], []) if differs.config_is_first else ([], config)
        user = credentials["username"]
        argv = [program, *before, "login", *after, f"--username={user}", "--password-stdin", server]
        code, said = ask(argv, self._client, credentials["password"].encode())
        if code != 0:
            remedy = "correct containerSettings.imageSourceRegistry.credentials"
            raise self._failure(f"{server} does not let {user} in: {last_line(said)}; {remedy}")
        return [program, *before, "pull", *after]

    def _daemon(self) -> list[str]:
        """docker's option for its daemon: which one that is may stand in the configuration that we leave aside."""
        if self._client.get("DOCKER_HOST"):
            return []
        code, said = self._ask("context", "inspect", "--format={{.Endpoints.docker.Host}}")
        return [f"--host={said.strip()}"] if code == 0 and said.strip() else []

    def _inspect(self, image: str) -> dict[str, Any] | None:
        code, said = self._ask("image", "inspect", image)
        found: list[dict[str, Any]] = json.loads(said) if code == 0 else []
        return found[0] if found else None

    def _user(self) -> str:
        if os.geteuid() == 0 or not self._engine.differs.by_daemon:
            return "0:0"
        _, said = self._ask("info", "--format={{.SecurityOptions}}")
        return "0:0" if "rootless" in said else f"{os.geteuid()}:{os.getegid()}"

    def _create(self) -> None:
        for volume in self._container.volumes:
            source = volume.partition(":")[0]
            if not os.path.exists(source):
                raise self._failure(f"the volume '{volume}' of docker_env: there is no {source}; create it on the nodes")
        os.mkfifo(self._alive, 0o600)
        # For writing too: so it neither waits for a reader nor ends before we do.
        self._pipe = os.open(self._alive, os.O_RDWR)
        argv = self._command()
        # Not to be broken off: its container could come when nobody looks for it any more.
        until = time.monotonic() + START_SECONDS
        task = self._run(argv, lambda line: None, lambda: self._in_time(until))
        if task.exit_code != 0:
            why = self._cause(task.tail) or f"it {task.verdict}"
            remedy = "mend that, or set containers: ignore in the cluster document to run the job without it"
            raise self._failure(f"{self._engine.kind} can't start it: {why}; {remedy}", task.tail)
        self._shipper.note(f"container {self.name}: image {self._container.image} ({self.identity})")
        first = self._first_process()
        namespace = pid_namespace(first)
        if namespace != pid_namespace(os.getpid()):
            self.first, self._namespace, self._began = first, namespace, proc.start_time(first)

    def _command(self) -> list[str]:
        """The command that starts the container."""
        user = self._user()
        ours = {"PATH": self.base.get("PATH", DEFAULT_PATH) + os.pathsep + self._layout.bin}
        if user != "0:0":
            # An account that the image doesn't know has no home, and programs want one.
            ours["HOME"] = self._layout.temp
        self.base.update(ours)
        labels = {protocol.MARK_VARIABLE: self._layout.mark, protocol.NODE_VARIABLE: str(self._layout.node)}
        gpus, mounts = offered(self._engine, self._gpus), self._mounts()
        return create(self._engine, self._container, self.identity, self.name, labels, mounts, ours, user, gpus, self._alive)

    def _first_process(self) -> int:
        """Pid, on the node, of the container's first process; a daemon elsewhere would tell us one of another machine."""
        code, said = self._ask("inspect", "--format={{.State.Pid}}", self.name)
        first = int(said) if code == 0 and said.strip().isdigit() else 0
        return first if self._keeps(first) else 0

    def _keeps(self, pid: int) -> bool:
        """Whether a process is the one that keeps the container alive, or its child."""
        return os.fsencode(self._alive) in _file(pid, "cmdline").split(b"\0")

    def _cause(self, said: Sequence[str]) -> str:
        """What the engine's client said of a failure."""
        return said[-1] if said else ""

    def _mounts(self) -> list[Mount]:
        layout = self._layout
        own = [layout.cluster_mounts, layout.job, *([os.path.dirname(layout.prepared)] if layout.prepared else [])]
        for path in own:
            os.makedirs(path, exist_ok=True)
        # Staged inputs are links to objects of the share.
        paths = [*own, layout.share]
        for volume in layout.plan.volumes:
            point = layout.mount_path(volume)
            if os.path.islink(point):
                paths.append(os.path.normpath(os.path.join(os.path.dirname(point), os.readlink(point))))
        mounted = mountpoints.mounts()
        there = outermost([path for path in paths if os.path.isdir(path)])
        found = [Mount(path, propagation(os.path.realpath(path), mounted)) for path in there]
        return [*found, Mount(archive_path(), read_only=True)]

    def _look_around(self) -> None:
        """Find the programs that we start in the image, and give a ``python`` to those that have only a python3."""
        code, said = self._ask_inside(_PROBE)
        if code != 0:
            raise self._failure(f"nothing can be run in it: {last_line(said)}")
        python3, python, bash = (said.splitlines() + [""] * 3)[:3]
        self.python = python3 or python
        self.shell = "bash" if bash else "sh"
        if not bash:
            self._shipper.note("the image has no bash; commands are run by sh")
        if not self.python and self._layout.plan.framework == plan.HOROVOD:
            raise self._failure("it has neither python3 nor python on its PATH, and Horovod's ranks need one")
        if self.python and not python:
            os.makedirs(self._layout.bin, exist_ok=True)
            path = os.path.join(self._layout.bin, "python")
            with open(path, "w", encoding="utf-8") as file:
                file.write(f'#!/bin/sh\nexec {python3} "$@"\n')
            os.chmod(path, 0o700)

    def _in_time(self, until: float) -> None:
        if time.monotonic() > until:
            raise self._failure(f"{self._engine.kind} has not started it within {START_SECONDS} s")

    def _ask_inside(self, text: str) -> tuple[int | None, str]:
        return self._ask("exec", self.name, "sh", "-c", text)

    def _ask(self, *arguments: str) -> tuple[int | None, str]:
        return ask([self._engine.program, *arguments], self._client)

    def _run(
        self,
        argv: list[str],
        say: Callable[[str], None],
        check: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Task:
        """A command of the engine's client, to its end.

        Args:
            say: takes each line that it says, without the password.
            check: raises what is to end it; default: when the attempt is to end.
            environment: default: that of all its commands.
        """

        def heard(task: Task, stream: str, lines: bytes) -> None:
            for line in lines.decode("utf-8", "replace").splitlines():
                if line.strip():
                    say(self._masked(line.strip()))

        task = Task(self._engine.kind, None, heard)
        self._runtime.start(task, argv, environment or self._client, cwd="/", inside=False)
        self._runtime.run_to_end(task, check or self._check)
        return task

    def _say(self, text: str) -> None:
        """Tell those who watch the job, and the execution log."""
        self._shipper.record("phase", urgent=True, phase=text, node=self._layout.node)
        self._shipper.note(text)

    def _masked(self, text: str) -> str:
        """The text without the registry's password."""
        password = self._credentials["password"] if self._credentials else ""
        return text.replace(password, "***") if password else text

    def _failure(self, why: str, tail: Collection[str] = ()) -> Failure:
        image = self._container.image
        return Failure(
            protocol.CONTAINER_FAILED,
            f"the container of image {image} on {self._layout.node_id}: {self._masked(why)}",
            node=self._layout.node,
            tail=[self._masked(line) for line in tail],
            details=[("imageName", image)],
        )

    # Its life.

    def argv_for(
        self, argv: Sequence[str], environment: Mapping[str, str], cwd: str, stdin: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """(argv, environment) of the engine's client that runs a command in the container; no value stands in the argv."""
        variables = {name: value for name, value in environment.items() if self.base.get(name) != value}
        program = self.shell if argv[0] == "bash" else argv[0]
        umask = self._layout.umask
        return enter(self._engine, self.name, [program, *argv[1:]], variables, self._client, cwd, umask, stdin)

    def members(self) -> set[int]:
        """Pids, on the node, of what runs in the container, but for helpers and for what keeps it alive."""
        helper = f"{HELPER_VARIABLE}=1".encode()
        found = {pid for pid in self._all() if pid != self.first and not self._keeps(pid)}
        return {pid for pid in found if helper not in _file(pid, "environ").split(b"\0")}

    def machinery(self) -> set[int]:
        """Pids of all in the container and of what the engine runs around it, below us."""
        found = self._all()
        below = proc.descendants(os.getpid())
        for pid in list(found):
            parent = proc.parent(pid)
            while parent in below and parent not in found:
                found.add(parent)
                parent = proc.parent(parent)
        return found

    def _all(self) -> set[int]:
        # With its first process all others have gone, and the kernel gives the namespace's number to the next container.
        if self._namespace is None or proc.start_time(self.first) != self._began:
            return set()
        return {pid for pid in proc.pids() if pid_namespace(pid) == self._namespace and proc.start_time(pid) is not None}

    # Its end.

    def remove(self) -> str | None:
        """End all that runs in it and remove it.

        Returns:
            Why it is still there, as a sentence, or None.
        """
        why = engines.sweep(self._layout.root, self._layout.mark)
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        return why


def pid_namespace(pid: int) -> str | None:
    """The PID namespace of a process, or None if it is gone or not ours to look at."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


def _file(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""
