"""One container for one job on one node: its image is pulled, it is started, commands enter it, and it goes with the agent."""

import contextlib
import glob
import os
import shutil
import time
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, Set, Tuple

from mlflow_batchai.agent import plan, processes, protocol
from mlflow_batchai.agent.containers import arguments, images, leftovers
from mlflow_batchai.agent.containers.engines import Engine, ask, own_environment
from mlflow_batchai.agent.layout import NodeLayout, archive_path
from mlflow_batchai.agent.outcome import Failure
from mlflow_batchai.agent.runtime import HELPER_VARIABLE, Runtime
from mlflow_batchai.agent.shipper import Shipper
from mlflow_batchai.agent.tasks import Task

# From an image that is there, on a node that is busy.
START_SECONDS = 120

# Where the image has the programs that we start, a line each; an empty one: nowhere.
_PROBE = 'for name in python3 python bash; do command -v "$name" || echo; done'


class Container:
    """The container of a job on this node.

    All processes of the job run in it, as root where that is no more than the node's own user may (the agent is root, or the
    engine has no more rights than its user): Batch AI ran them as root, and preparations install packages. Under a docker
    daemon that is root's, where the agent is not, they run as the node's user, who could not clear the node else.

    Args:
        container: the plan's.
        credentials: ``username`` and ``password`` of the registry, or None.
        gpus: the node's.
        check: raises if the attempt is to end.

    Attributes:
        base: the environment that every process in it has: the image's, and our folder behind its PATH.
        python: the image's interpreter, empty if it has none.
        shell: ``bash``, or ``sh`` where the image has none.
        identity: the image's id.
    """

    def __init__(
        self,
        layout: NodeLayout,
        shipper: Shipper,
        runtime: Runtime,
        container: plan.Container,
        credentials: Optional[Mapping[str, str]],
        engine: Engine,
        gpus: Sequence[str],
        check: Callable[[], None],
    ) -> None:
        # Each attempt has its own: what another one has left on this machine may still be there, and be removed by its name.
        self.name = "batchai-%s-%d" % (layout.mark.replace("/", "-"), layout.node)
        self.base: Dict[str, str] = {}
        self.python = ""
        self.shell = "bash"
        self.identity = ""
        self._layout = layout
        self._shipper = shipper
        self._runtime = runtime
        self._container = container
        self._credentials = credentials
        self._engine = engine
        self._gpus = gpus
        self._check = check
        self._client = own_environment(os.environ)
        self._pipe: Optional[int] = None
        self._namespace: Optional[str] = None
        self._first = 0
        self._began: Optional[int] = None

    # Its beginning.

    def start(self) -> None:
        """Pull the image and start the container; nothing of it is left if that fails.

        Raises:
            Failure: the image can't be had, or the container can't be started; and whatever ``check`` raises.
        """
        login = os.path.join(self._layout.job, "registry")
        leftovers.remember(self._layout.root, self._engine, self.name, self._layout.mark, login)
        try:
            found = self._image(login)
            self.identity = found["Id"]
            config = found.get("Config") or {}
            self.base = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
            user = self._user()
            ours = {"PATH": arguments.container_path(self.base, self._layout.bin)}
            if user != "0:0":
                # An account that the image doesn't know has no home, and programs want one.
                ours["HOME"] = self._layout.temp
            self.base.update(ours)
            self._create(found["Id"], ours, user)
            self._look_around()
        except BaseException:
            self.remove()
            raise

    def _image(self, login: str) -> Mapping[str, Any]:
        puller = images.Puller(self._engine, self._client, self._container, self._run, self._say)
        try:
            return puller.image(login, self._credentials)
        except images.ImageError as error:
            self._fail(str(error), error.tail)
        finally:
            # Ranks see the job's folder; they are not to see the password.
            shutil.rmtree(login, ignore_errors=True)

    def _user(self) -> str:
        if os.geteuid() == 0 or self._engine.kind == "podman":
            return "0:0"
        _, said = ask([self._engine.program, "info", "--format={{.SecurityOptions}}"], self._client)
        return "0:0" if "rootless" in said else "%d:%d" % (os.geteuid(), os.getegid())

    def _create(self, image: str, environment: Mapping[str, str], user: str) -> None:
        for volume in self._container.volumes:
            source = volume.partition(":")[0]
            if not os.path.exists(source):
                self._fail("the volume '%s' of docker_env: there is no %s; create it on the nodes" % (volume, source))
        pipe = os.path.join(self._layout.job, "alive")
        os.mkfifo(pipe, 0o600)
        # For writing too: so it neither waits for a reader nor ends before we do.
        self._pipe = os.open(pipe, os.O_RDWR)
        labels = {protocol.MARK_VARIABLE: self._layout.mark, protocol.NODE_VARIABLE: str(self._layout.node)}
        argv = arguments.create(
            self._engine,
            self._container,
            image,
            self.name,
            labels,
            self._mounts(),
            environment,
            user,
            arguments.offered(self._engine, self._gpus, _device_specifications()),
            pipe,
        )
        # Not to be broken off: its container could come when nobody looks for it any more.
        until = time.monotonic() + START_SECONDS
        task = self._run(argv, lambda line: None, lambda: self._in_time(until))
        if task.exit_code != 0:
            remedy = "mend that, or set containers: ignore in the cluster document to run the job without it"
            self._fail("%s can't start it: %s; %s" % (self._engine.kind, _last(task), remedy), list(task.tail))
        self._shipper.note("container %s: image %s (%s)" % (self.name, self._container.image, image))
        self._find_first(pipe)

    def _find_first(self, pipe: str) -> None:
        """The container's first process as the node sees it; a daemon elsewhere would tell us a pid of another machine."""
        code, said = ask([self._engine.program, "inspect", "--format={{.State.Pid}}", self.name], self._client)
        first = int(said) if code == 0 and said.strip().isdigit() else 0
        namespace = _namespace(first)
        ours = os.fsencode(pipe) in _file(first, "cmdline").split(b"\0") and namespace != _namespace(os.getpid())
        if ours:
            self._first, self._namespace, self._began = first, namespace, processes.start_time(first)

    def _mounts(self) -> List[arguments.Mount]:
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
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mountinfo = file.read()
        there = arguments.outermost([path for path in paths if os.path.isdir(path)])
        found = [arguments.Mount(path, arguments.propagation(os.path.realpath(path), mountinfo)) for path in there]
        return [*found, arguments.Mount(archive_path(), read_only=True)]

    def _look_around(self) -> None:
        """What the image has of the programs that we start, and a ``python`` for those that have only a python3."""
        code, said = ask([self._engine.program, "exec", self.name, "sh", "-c", _PROBE], self._client)
        if code != 0:
            self._fail("nothing can be run in it: %s" % (said.strip().splitlines() or ["no reason is given"])[-1])
        python3, python, bash = (said.splitlines() + [""] * 3)[:3]
        self.python = python3 or python
        self.shell = "bash" if bash else "sh"
        if not bash:
            self._shipper.note("the image has no bash; commands are run by sh")
        if not self.python and self._layout.plan.is_horovod:
            self._fail("it has neither python3 nor python on its PATH, and Horovod's ranks need one")
        if self.python and not python:
            os.makedirs(self._layout.bin, exist_ok=True)
            path = os.path.join(self._layout.bin, "python")
            with open(path, "w", encoding="utf-8") as file:
                file.write('#!/bin/sh\nexec %s "$@"\n' % python3)
            os.chmod(path, 0o700)

    def _in_time(self, until: float) -> None:
        if time.monotonic() > until:
            self._fail("%s has not started it within %d s" % (self._engine.kind, START_SECONDS))

    def _run(self, argv: Sequence[str], output: Callable[[str], None], check: Optional[Callable[[], None]] = None) -> Task:
        """A command of the engine's client, to its end.

        Args:
            output: takes each line that it says.
            check: raises what is to end it; default: when the attempt is to end.
        """

        def heard(task: Task, stream: str, lines: bytes) -> None:
            for line in lines.decode("utf-8", "replace").splitlines():
                output(line)

        task = Task(self._engine.kind, None, heard)
        self._runtime.start(task, list(argv), self._client, cwd="/", inside=False)
        self._runtime.run_to_end(task, check or self._check)
        return task

    def _say(self, text: str, phase: bool) -> None:
        if phase:
            self._shipper.record("phase", urgent=True, phase=text, node=self._layout.node)
        self._shipper.note(text)

    def _fail(self, why: str, tail: Sequence[str] = ()) -> NoReturn:
        image = self._container.image
        raise Failure(
            protocol.CONTAINER_FAILED,
            "the container of image %s on %s: %s" % (image, self._layout.node_id, why),
            node=self._layout.node,
            tail=[images.masked(line, self._credentials) for line in tail],
            details=[("imageName", image)],
        )

    # Its life.

    def argv_for(
        self, argv: Sequence[str], environment: Mapping[str, str], cwd: str, stdin: bool = False
    ) -> Tuple[List[str], Dict[str, str]]:
        """(argv, environment) of the engine's client that runs a command in the container; no value stands in the argv."""
        variables = {name: value for name, value in environment.items() if self.base.get(name) != value}
        program = self.shell if argv[0] == "bash" else argv[0]
        umask = self._layout.umask
        return arguments.enter(self._engine, self.name, [program, *argv[1:]], variables, self._client, cwd, umask, stdin)

    @property
    def first(self) -> int:
        """Pid, on the node, of what keeps it alive; 0 if that isn't known."""
        return self._first

    def members(self) -> Set[int]:
        """Pids, on the node, of what runs in the container, but for helpers and for what keeps it alive."""
        keeper = _file(self._first, "cmdline")
        helper = ("%s=1" % HELPER_VARIABLE).encode()
        found = {pid for pid in self._all() if pid != self._first and _file(pid, "cmdline") != keeper}
        return {pid for pid in found if helper not in _file(pid, "environ").split(b"\0")}

    def machinery(self) -> Set[int]:
        """Pids of all in the container and of what the engine runs around it, below us."""
        found = set(self._all())
        below = processes.descendants(os.getpid())
        for pid in list(found):
            parent = processes.parent(pid)
            while parent in below and parent not in found:
                found.add(parent)
                parent = processes.parent(parent)
        return found

    def _all(self) -> Set[int]:
        # With its first process all others have gone, and the kernel gives the namespace's number to the next container.
        if self._namespace is None or processes.start_time(self._first) != self._began:
            return set()
        return {pid for pid in processes.pids() if _namespace(pid) == self._namespace and processes.start_time(pid) is not None}

    # Its end.

    def remove(self) -> Optional[str]:
        """End all that runs in it and remove it.

        Returns:
            Why it is still there, as a sentence, or None.
        """
        trouble = leftovers.sweep(self._layout.root, self._layout.mark)
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        return trouble


def _device_specifications() -> str:
    found = []
    for path in sorted(glob.glob("/etc/cdi/*") + glob.glob("/var/run/cdi/*")):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            found.append(file.read())
    return "\n".join(found)


def _last(task: Task) -> str:
    return task.tail[-1] if task.tail else "it %s" % task.verdict


def _namespace(pid: int) -> Optional[str]:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/%d/ns/pid" % pid)
    return None


def _file(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError), open("/proc/%d/%s" % (pid, name), "rb") as file:
        return file.read()
    return b""
