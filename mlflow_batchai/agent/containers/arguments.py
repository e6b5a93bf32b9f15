"""What the engine is told, as pure functions: the options of the container, and how a command gets into it.

Options are those that docker and podman share; where they differ, ``engine.kind`` decides. Nothing secret stands among them.
"""

import os
import re
from typing import Collection, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from mlflow_batchai.agent.containers.engines import Engine
from mlflow_batchai.agent.plan import Container

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The container's first process. It lives as long as the agent holds a named pipe open for writing: when the agent is gone,
# however that came, the kernel ends all that runs in the container with it. Its wait collects orphans meanwhile.
KEEPER = 'while read -r _; do :; done <"$0" & wait $!'

# Variables that the engine's client itself heeds: the job's values of these must not reach it.
_CLIENTS_OWN = re.compile(
    r"(LD_|DOCKER_|_?CONTAINER|XDG_|STORAGE_|REGISTRY_|BUILDAH_|PODMAN_|DBUS_|LISTEN_|GO|SSL_CERT_|SSH_)\w*"
    r"|PATH|HOME|TMPDIR|USER|NOTIFY_SOCKET|(?i:(https?|no|all)_proxy)"
)
_CARRIER = "BATCHAI_SET_"


class Mount(NamedTuple):
    """A path of the node that the container sees under the same name."""

    path: str
    propagation: str = "rprivate"
    read_only: bool = False


def qualified(image: str) -> str:
    """The name with its registry in it: docker means Docker Hub where there is none, podman asks its configuration."""
    first, slash, _ = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return image
    return "docker.io/" + (image if slash else "library/" + image)


def outermost(paths: Collection[str]) -> List[str]:
    """The paths without those that lie in another of them, which come along with it."""
    return [path for path in sorted(set(paths)) if not any(path != other and _inside(path, other) for other in paths)]


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def propagation(path: str, mountinfo: str) -> str:
    """How mounts below a path reach the container: ``rslave`` (as they come and go) where the node's own mount there is
    shared, which engines insist on; else ``rprivate``, those that are there when it starts.

    Args:
        path: a real path.
        mountinfo: the text of ``/proc/self/mountinfo``.
    """
    best, shared = "", False
    for line in mountinfo.splitlines():
        before = line.partition(" - ")[0].split()
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), before[4])
        if _inside(path, point) and len(point) >= len(best):
            best, shared = point, any(field.startswith(("shared:", "master:")) for field in before[6:])
    return "rslave" if shared else "rprivate"


def create(
    engine: Engine,
    container: Container,
    image: str,
    name: str,
    labels: Mapping[str, str],
    mounts: Sequence[Mount],
    environment: Mapping[str, str],
    user: str,
    gpus: Sequence[str],
    pipe: str,
) -> List[str]:
    """The whole command that starts the container.

    Args:
        container: the plan's.
        image: name or id of the image that is on the node.
        environment: what all processes in it get besides the image's own; nothing secret.
        user: ``uid:gid``.
        gpus: those that it gets (see ``offered``).
        pipe: the named pipe that the agent holds open.
    """
    argv = [engine.program, "run", "--detach", "--rm", "--name=" + name]
    argv += ["--label=%s=%s" % label for label in labels.items()]
    # The agent ends what runs in it; by then there is nobody left to be asked nicely.
    argv += ["--network=host", "--stop-signal=SIGKILL", "--pids-limit=-1", "--security-opt=label=disable", "--user=" + user]
    if container.shm_size:
        argv.append("--shm-size=" + container.shm_size)
    if gpus:
        argv += _devices(engine, gpus)
    argv += ["--env=%s=%s" % variable for variable in environment.items()]
    argv += ["--mount=" + _mount(mount) for mount in mounts]
    argv += ["--volume=" + volume for volume in container.volumes]
    return [*argv, "--entrypoint=sh", image, "-c", KEEPER, pipe]


def offered(engine: Engine, gpus: Sequence[str], specifications: str) -> Sequence[str]:
    """What a container is given of the node's GPUs: by UUID just those, ``all`` where the engine can't tell them apart.

    Indexes would be others inside. An engine other than docker knows the names of the container device interface (CDI), and
    not every tool that writes its specifications names UUIDs.

    Args:
        specifications: the texts of the machine's CDI specifications.
    """
    known = engine.kind == "docker" or all(name in specifications for name in gpus)
    return ["all"] if gpus and (not known or any(name.isdigit() for name in gpus)) else gpus


def _devices(engine: Engine, gpus: Sequence[str]) -> List[str]:
    if engine.kind != "docker":
        return ["--device=nvidia.com/gpu=" + name for name in gpus]
    # Its value is a line of CSV.
    return ["--gpus=all" if list(gpus) == ["all"] else "--gpus=" + _field("device=" + ",".join(gpus))]


def _mount(mount: Mount) -> str:
    fields = ["type=bind", "source=" + mount.path, "target=" + mount.path, "bind-propagation=" + mount.propagation]
    return ",".join(_field(field) for field in [*fields, *(["readonly"] if mount.read_only else [])])


def _field(text: str) -> str:
    """A field as encoding/csv of Go reads it."""
    return '"%s"' % text.replace('"', '""') if any(mark in text for mark in ',"\n') else text


def enter(
    engine: Engine,
    name: str,
    argv: Sequence[str],
    variables: Mapping[str, str],
    client: Mapping[str, str],
    cwd: str,
    umask: int,
    stdin: bool = False,
) -> Tuple[List[str], Dict[str, str]]:
    """A command in the container, as (argv, environment) of the engine's client.

    Variables are named there and their values stand in the client's environment, for arguments are for all to see. One that
    the client would heed itself goes under another name, and a shell in the container puts that right. It sets the umask, too.

    Args:
        variables: what the command gets besides the container's own environment.
        client: the client's own environment.
    """
    environment = dict(client)
    carried = {name for name, value in variables.items() if client.get(name) != value and _is_clients(name, client)}
    for name_, value in variables.items():
        environment[_CARRIER + name_ if name_ in carried else name_] = value
    names = [_CARRIER + name_ if name_ in carried else name_ for name_ in variables]
    steps = ['export %s="$%s%s"; unset %s%s' % (name_, _CARRIER, name_, _CARRIER, name_) for name_ in sorted(carried)]
    # The shell looks for the program before it leaves, with the PATH that the command will have.
    command = ["/bin/sh", "-c", '%s; exec "$@"' % "; ".join([*steps, "umask %03o" % umask]), "sh", *argv]
    options = [*(["--interactive"] if stdin else []), "--workdir=" + cwd, *("--env=" + name_ for name_ in names)]
    return [engine.program, "exec", *options, name, *command], environment


def _is_clients(name: str, client: Mapping[str, str]) -> bool:
    return name in client or _CLIENTS_OWN.fullmatch(name) is not None


def container_path(image_environment: Mapping[str, str], folder: str) -> str:
    """The image's PATH, with a folder of ours behind it."""
    return image_environment.get("PATH", DEFAULT_PATH) + os.pathsep + folder
