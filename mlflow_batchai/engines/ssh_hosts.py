"""The engine ``ssh``: N machines that share a folder."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlflow_batchai.agent.place import OTHER_QUEUE
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.engines.base import CheckResult, Handle, Needs
from mlflow_batchai.engines.census import Known, Place
from mlflow_batchai.engines.hosts import Hosts
from mlflow_batchai.engines.machines import Answer, Node, SshMachine
from mlflow_batchai.engines.registry import Site
from mlflow_batchai.engines.shell.connection import open_all
from mlflow_batchai.engines.shell.target import Target, resolve
from mlflow_batchai.errors import ClusterError, ShareError

LEAST_FREE_BYTES = 64 << 20
LOOK_AGAIN_SECONDS = 60.0
# Where locks between processes of one machine can't be trusted; so can't those of FUSE (but for disks, fuseblk).
NETWORK_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "beegfs", "afs", "gpfs", "panfs")
) | frozenset(("wekafs", "pvfs2", "orangefs", "ocfs2", "gfs2", "virtiofs", "vboxsf", "prl_fs", "acfs"))


class SshNode(NamedTuple):
    """A node over SSH.

    Attributes:
        target: where and how it is reached (``shell.target``).
        root: its own folder on it; ``~/`` is the login's home.
    """

    name: str
    target: Target
    root: str


class _Look(NamedTuple):
    """What a look at all nodes has found."""

    usable: list[Node]
    problems: list[str]
    missing: dict[str, set[str]]


def build(site: Site) -> SshHosts:
    nodes = _nodes(site.document)
    return SshHosts(nodes, site.share, site.document.agent_python, site.python, site.identity, site.secret)


def _nodes(document: ClusterDocument) -> list[SshNode]:
    account = document.user_account_settings
    password = account.admin_user_password if account else None
    nodes = []
    for entry in document.hosts:
        target = resolve(
            entry.host,
            user=entry.user or document.user or (account.admin_user_name if account else None),
            port=entry.port or document.port,
            key_file=entry.key_file or document.key_file,
            known_hosts=document.known_hosts,
            jump=document.jump_host,
            password=password.get_secret_value() if password else None,
        )
        nodes.append(SshNode(entry.host, target, entry.root or document.root or f"/var/tmp/batchai-{target.user}"))
    return nodes


class SshHosts(Hosts):
    """N machines, reached over SSH.

    Args:
        nodes: the first one keeps the book.
        python: what runs the agent there.
        trainer: the training interpreter there.
        identity: the control share's identity, read when it is needed.
        secret: what opens the control share for nodes, made when it is needed; None where it is a path.
    """

    kind = "ssh"
    poll_seconds = 5.0

    def __init__(
        self,
        nodes: Sequence[SshNode],
        share: str,
        python: str,
        trainer: str,
        identity: Callable[[], str],
        secret: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._machines = [SshMachine(node.name, node.target, node.root, python) for node in nodes]
        made = [Node(node.name, machine, node.root) for node, machine in zip(nodes, self._machines, strict=True)]
        super().__init__(made, f"{nodes[0].root}/book", share)
        self._identity = identity
        self._secret = secret
        self._trainer = trainer
        self._needs: Needs | None = None
        self._checked: _Look | None = None
        self._looked = 0.0
        self._looking = threading.Lock()

    def _called(self, handle: Handle, index: int) -> str:
        return f"node-{index} ({handle['nodes'][index]['name']})"

    def check(self, node_count: int, needs: Needs | None = None) -> CheckResult:
        if needs != self._needs:
            self._needs, self._checked = needs, None
        usable = self._usable(node_count)
        assert self._checked
        warnings = tuple(f"{problem}; going on without it" for problem in self._checked.problems)
        return CheckResult(len(usable), self._checked.missing, warnings)

    def _usable(self, node_count: int) -> Sequence[Node]:
        super()._usable(node_count)
        if self._checked is None:
            self._checked = self._look()
        usable, problems, _ = self._checked
        if len(usable) < node_count or usable[0].name != self._nodes[0].name:
            more = f" (and {len(problems) - 1} more of the {self.node_limit} nodes can't be used)" if len(problems) > 1 else ""
            note = "; it keeps the cluster's queue" if len(usable) >= node_count else ""
            self._checked = None
            self.close()
            raise ClusterError(f"{problems[0]}{note}{more}")
        return usable

    def _queue_node(self) -> str:
        assert self._checked
        return self._checked.usable[0].id

    def _expected(self, entry: Handle) -> str:
        return str(entry["id"])

    def _node(self, entry: Handle) -> Node | None:
        found = super()._node(entry)
        if found is None:
            # Another client's document may call it otherwise.
            with self._looking:
                if self._checked is None or time.monotonic() - self._looked > LOOK_AGAIN_SECONDS:
                    self._checked, self._looked = self._look(), time.monotonic()
                usable = self._checked.usable
            found = next((node for node in usable if node.id == entry["id"]), None)
        return found

    def _look(self) -> _Look:
        seen = self._inspect()
        missing: dict[str, set[str]] = {}
        for _, _, tools in seen:
            for tool, machines in tools.items():
                missing.setdefault(tool, set()).update(machines)
        usable = [node for node, problem, _ in seen if not problem]
        return _Look(usable, [str(problem) for _, problem, _ in seen if problem], missing)

    def _known(self) -> Sequence[Known]:
        targets = [machine.connection.target for machine in self._machines]
        places = [Place(node.name, target.host, target.port) for node, target in zip(self._nodes, targets, strict=True)]
        try:
            seen = self._inspect()
        except ShareError as error:
            # No job can be sent to any; what runs there they can say all the same.
            return [Known(place, None, str(error)) for place in places]
        return [
            Known(place, *((problem, "") if isinstance(problem, ClusterError) else (None, problem)))
            for place, (_, problem, _) in zip(places, seen, strict=True)
        ]

    def _inspect(self) -> list[tuple[Node, ClusterError | str, dict[str, set[str]]]]:
        """All nodes; why no job can be sent to them, or nothing; and the tools that they lack and that can be sent.

        An error says that the node could not be asked.
        """
        opened = open_all(machine.connection for machine in self._machines)
        identity, secret = self._identity(), self._secret()
        answers: dict[str, Answer | ClusterError] = {}
        up = []
        for node, machine in zip(self._nodes, self._machines, strict=True):
            error = opened[machine.connection.target.name]
            if error is None:
                up.append(node)
            else:
                answers[node.name] = error
        calls = [functools.partial(self._hello, node, identity, secret) for node in up]
        answers.update(zip((node.name for node in up), self._each(calls), strict=True))
        answered = [answers[node.name] for node in self._nodes]
        folders = self.folder_problems([None if isinstance(said, ClusterError) else said for said in answered])
        return [
            (node, said, {})
            if isinstance(said, ClusterError)
            else (node._replace(id=said["id"]), reason or self._problem(node, said), said["missing"])
            for node, said, reason in zip(self._nodes, answered, folders, strict=True)
        ]

    def _hello(self, node: Node, identity: str, secret: str | None) -> Answer:
        share = self._share
        said = node.machine.ask("hello", root=node.root, share=share, identity=identity, python=self._trainer, sas=secret)
        lack, missing = self._lack(node, self._needs)
        return {**said, "lack": lack, "missing": missing}

    def folder_problems(self, places: Sequence[Answer | None]) -> Sequence[str]:
        found = []
        names: dict[str, str] = {}
        ids: dict[str, str] = {}
        for node, said in zip(self._nodes, places, strict=True):
            if said is None:
                found.append("")
                continue
            title = node.machine.title
            found.append(
                twin_sentence(title, names.setdefault(said["place"], node.name), node.name, said["root"])
                or root_sentence(title, said)
                or (places[0] and other_queue_sentence(title, said, places[0]))
                or copy_sentence(title, ids.setdefault(said["id"], node.name), node.name, said["root"])
                or ""
            )
        return found

    def _problem(self, node: Node, said: Answer) -> str:
        """Why a node that answers, and whose own folder is fine, can't be used, or nothing."""
        title = node.machine.title
        if reason := share_sentence(title, self._share, said["share"]) or str(said["lack"]):
            return reason
        if not said["python"] and not (self._needs and self._needs.container):
            return f"{title}: there is no program {self._trainer} there; correct python in the cluster document"
        return ""


def twin_sentence(title: str, twin: str, name: str, root: str) -> str:
    """A node that is another one under a second name; nothing if it is none."""
    if twin == name:
        return ""
    return f"{title} is node {twin} again: the same machine and folder {root}; name it once, or name a root on its own disk"


def copy_sentence(title: str, first: str, name: str, root: str) -> str:
    """A node that has another one's id, since its disk was copied from it; nothing if it has its own."""
    if first == name:
        return ""
    return f"{title} has the id of node {first}: its disk was copied from it; remove {root}/id there"


def other_queue_sentence(title: str, said: Answer, first: Answer) -> str:
    """A node whose jobs are in another queue than the first one's, as ``place.place`` tells of both, or nothing."""
    if not said["busy"] or said["keeper"] in (None, first["id"]):
        return ""
    if first["keeper"] is None:
        # No job was ever sent to the folder that the book is to lie in.
        return (
            f"{title}: it has jobs whose queue is not in the first host's folder {first['root']}, which is new: if that"
            " was removed while they ran, end them (batchai job terminate) or wait for their end; if another host was first in"
            " the cluster document, name that one first"
        )
    return f"{title}: {OTHER_QUEUE}; name the same host first in all documents"


def root_sentence(title: str, said: Answer) -> str:
    """Why a node's own folder, as ``host.place`` tells of it, can't be used, and what to do, or nothing."""
    kind = said["filesystem"]
    if kind in NETWORK_FILESYSTEMS or kind == "fuse" or kind.startswith("fuse."):
        return (
            f"{title}: its folder {said['root']} lies on {kind}, which can't be trusted with locks;"
            " name one on its own disk (root in the cluster document)"
        )
    if said["free"] < LEAST_FREE_BYTES:
        return f"{title}: only {said['free'] >> 20} MiB are free for {said['root']}; free some space there"
    return ""


_ADDRESS_SENTENCES = {
    "hangs": "it does not answer",
    "missing": "there is no such file share; make it, or correct share in the cluster document",
    "another": "what it finds at the control share's address is not what this machine has there; is there a proxy in between?",
    "read-only": "it may not write on the control share; give credentials that may",
}


def share_sentence(title: str, path: str, reason: str | None) -> str:
    """Sentence and remedy for a word of ``place.share_problem``; nothing for None."""
    if reason and path.startswith(("https://", "http://")):
        return f"{title}: {_ADDRESS_SENTENCES.get(reason, reason)} ({path})"
    sentences = {
        "hangs": f"{title}: the share at its {path} hangs; see whether what serves it answers",
        "missing": f"{title}: there is no folder {path} there; mount the share, or say where it lies (shareOnNodes)",
        "another": f"{title}: its {path} is not the share that this machine has; mount the same one, or say where it lies"
        " (shareOnNodes)",
        "read-only": f"{title}: its login may not write in {path}; give it the right to, or mount the share for it",
    }
    return sentences[reason] if reason else ""
