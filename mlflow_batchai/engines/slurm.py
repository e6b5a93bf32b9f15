"""The engine ``slurm``: nodes that Slurm gives; its commands run on this machine, or on a login node over SSH.

A job is one sbatch script with one step, a task a node, and each task is an agent. Slurm's exit codes don't give the cause of a
failure: the job's verdict stays the truth, and Slurm is asked only what is waiting, running or over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import getpass
import itertools
import json
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mlflow_batchai.agent import protocol, records
from mlflow_batchai.agent.attempt import slurm_end
from mlflow_batchai.documents.cluster import ClusterDocument
from mlflow_batchai.engines import archive
from mlflow_batchai.engines.base import (
    CheckResult,
    Handle,
    Needs,
    NodeCommand,
    Poll,
    PollState,
    StartRequest,
    Terms,
    other_engine,
    unknown_poll,
)
from mlflow_batchai.engines.census import Census, NodeReport, NodeState, Place, Reservation
from mlflow_batchai.engines.machines import Answer, Node
from mlflow_batchai.engines.registry import Site
from mlflow_batchai.engines.shell.connection import Connection, Result
from mlflow_batchai.engines.shell.target import resolve
from mlflow_batchai.engines.slurm_node import Commands, SlurmNode
from mlflow_batchai.engines.slurm_script import BOOT, gpus_of, options_of, script_of, tidy_of
from mlflow_batchai.errors import ClusterError

# An answer that takes longer is none: with the controller away squeue fails after 18 s, sbatch and scancel after 9 s.
POLL_SECONDS, ASK_SECONDS = 8.0, 30.0
# KillWait (30 s where a site has not changed it) and what a node's epilog may take.
CANCEL_SECONDS = 90.0
KIND = "slurm"
# How long ``doctor`` waits for a node, and has it at most.
TAKE_SECONDS, TAKE_MINUTES = 30, 10
# On the control share, for each user: the agent, what Slurm's jobs print, and secrets until a job starts.
FOLDER = ".batchai/slurm-"
KEPT_DAYS = 30
# A job that has not started then never will: its secrets go.
LONGEST_WAIT_DAYS = 90
_MARK = re.compile(r"batchai-\w+-\d+")
# What Slurm's commands say without a controller, or where it ends while they talk to it.
_AWAY = re.compile(
    r"^(?:allocation failure|slurm_\w+|s(?:batch|queue|info|cancel|control|acct|alloc|run))(?: error)?: .*"
    r"(?:ontact slurm controller|timed out|standby mode|missing socket|Zero Bytes were|endpoint is not connected|Broken pipe"
    r"|(?:Message|Communication) \w+ failure|Connection (?:reset|refused)|No route to host|Network is unreachable)",
    re.MULTILINE,
)

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED")
FROZEN = ("SUSPENDED", "STOPPED")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
ENDED = (*OVER, "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED")

# ``Queued``, a line a job.
QUEUE = ("-h", "-o", "%i|%T|%r|%S|%N|%D|%j|%k")

# Writes a file that only its user can read, in a folder that only he can change; its words: folder, name, the agent's name, of
# which it says the SHA-256. Old files go, of agents those that no submit has used since.
_STORE = f"""umask 077
mkdir -p -- "$1" || exit 1
[ -O "$1" ] || {{ echo "$1 belongs to another user" >&2; exit 1; }}
chmod 700 -- "$1" && cat > "$1/$2.$$" && mv -f -- "$1/$2.$$" "$1/$2" || exit 1
touch -c -- "$1/$3"
find "$1" -type f -mtime +{LONGEST_WAIT_DAYS} -delete -o -name "*.out" -mtime +{KEPT_DAYS} -delete
[ ! -e "$1/$3" ] || sha256sum < "$1/$3" || true
"""
# The end of a file, unless somebody else may have put it there, or a link.
_TAIL = 'cd -- "$1" && [ -O . ] && [ ! -L "$2" ] && tail -c 20000 -- "$2"'


class Runner(Protocol):
    """Runs Slurm's commands: this machine, or a login node (``shell.connection.Connection``)."""

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Result:
        """Run a command to its end; ClusterError if it takes longer, or can't be run."""

    def close(self) -> None: ...


class Here:
    """This machine."""

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Result:
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout)
        except FileNotFoundError:
            return Result(127, "", f"{argv[0]}: not found")
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{argv[0]} took longer than {timeout:g} s; is Slurm's controller away?") from error
        except OSError as error:
            raise ClusterError(f"{argv[0]} can't be run: {error.strerror}") from error
        return Result(done.returncode, *(text.decode("utf-8", "backslashreplace") for text in (done.stdout, done.stderr)))

    def close(self) -> None:
        pass


class Queued(NamedTuple):
    """A job in Slurm's queue, or one that has just left it."""

    id: int
    state: str
    reason: str
    start: str
    nodes: str
    node_count: str
    name: str
    comment: str

    @property
    def words(self) -> str:
        """``PENDING (Resources), to start at 2026-11-30T12:00:00``."""
        reason = f" ({self.reason})" if self.reason not in ("None", "") else ""
        start = f", to start at {self.start}" if self.state in WAITING and self.start not in ("N/A", "") else ""
        return f"{self.state}{reason}{start}"


def queued(text: str) -> Iterator[Queued]:
    """The jobs of ``squeue``'s output in ``Queued``'s order; array jobs (``14_[2-3]``) are never ours."""
    for line in text.splitlines():
        fields = line.split("|", 7)
        if len(fields) == 8 and fields[0].isdecimal():
            yield Queued(int(fields[0]), *fields[1:])


def node_report(name: str, state: str, why: str) -> NodeReport:
    """A node as ``sinfo`` has it; ``*`` behind its state: it doesn't answer."""
    word = state.rstrip("*~#!%$@^-+").partition("-")[0].lower()
    states = dict.fromkeys(("idle", "reserved", "planned"), NodeState.IDLE)
    states |= dict.fromkeys(("allocated", "mixed", "completing"), NodeState.RUNNING)
    found = NodeState.UNUSABLE if state.endswith("*") else states.get(word, NodeState.UNUSABLE)
    said = f"Slurm has it {state}" + (f": {why}" if why not in ("none", "") else "")
    return NodeReport(Place(name, name, None), found, None, said if found is NodeState.UNUSABLE else "")


def last_words(text: str) -> tuple[dict[int, Any], str]:
    """What a job's agents have printed: node -> why it gave up the share; and the last line of an agent, else of Slurm.

    Args:
        text: agents' lines begin with their node (``srun --label``).
    """
    failures: dict[int, Any] = {}
    last = ""
    agents = list(re.finditer(r"^ *(\d+): (.*)$", text, re.MULTILINE))
    for match in agents:
        try:
            report = json.loads(match[2])
            if records.has(failure := report.get("failure"), {"code": records.is_text, "message": records.is_text}):
                failures[int(match[1])] = failure
        except (ValueError, AttributeError, RecursionError):
            last = match[2].strip() or last
    return failures, last if agents else _last(text)


def build(site: Site) -> Slurm:
    document = site.document
    runner: Runner = Here()
    user = getpass.getuser()
    if document.login:
        target = resolve(document.login, key_file=document.key_file, known_hosts=document.known_hosts, jump=document.jump_host)
        runner, user = Connection(dataclasses.replace(target, noun="login node")), target.user
    # With its code for this Python, which is often that of the nodes: to compile it takes most of an agent's start.
    agent = functools.cache(lambda: archive.stored(site.home / "agents").read_bytes())
    return Slurm(site.cluster, document, site.nodes, site.share, user, runner, site.identity, agent)


class Slurm:
    """A partition of a Slurm cluster.

    Args:
        nodes: the most that a job may have, whatever the partition has.
        share: the control share's path on the nodes, and where Slurm's commands run.
        user: whose jobs they are in Slurm.
        identity: the control share's: reading it makes what all users have there.
        agent: the archive that nodes run.
    """

    # Each question costs a controller that all users share.
    poll_seconds = 10.0

    def __init__(
        self,
        cluster: str,
        document: ClusterDocument,
        nodes: int,
        share: str,
        user: str,
        runner: Runner,
        identity: Callable[[], str],
        agent: Callable[[], bytes],
    ) -> None:
        self.node_limit = nodes
        self._cluster = cluster
        self._document = document
        self._chosen = ["-p", document.partition] if document.partition else []
        self._share = share
        self._root = document.root or f"/var/tmp/batchai-{user}"
        self._runner = runner
        self._identity = identity
        self._archive = agent
        self._folder = f"{share}/{FOLDER}{user}"
        self._taken: SlurmNode | None = None
        # What Slurm has just said that it would take.
        self._tested: list[str] | None = None

    def check(self, node_count: int, needs: Needs | None = None) -> CheckResult:
        if needs and needs.container and not needs.container.engine:
            raise ClusterError(
                f"cluster '{self._cluster}': the job wants the image {needs.container.image}, and on Slurm only Apptainer runs"
                " images; set containers: apptainer in the cluster document, or containers: ignore and install on the nodes"
                " what the image holds"
            )
        self._test(node_count, needs.terms if needs else Terms())
        usable = sum(node.state is not NodeState.UNUSABLE for node in self._nodes())
        return CheckResult(max(node_count, min(usable, self.node_limit)))

    def _test(self, node_count: int, terms: Terms) -> None:
        """Refuse what Slurm would let wait for ever (more nodes than the partition has), or not take."""
        if node_count > self.node_limit:
            raise ClusterError(f"the job wants {node_count} nodes and the cluster has {self.node_limit}")
        options = options_of(self._document, node_count, terms)
        if options != self._tested:
            self._ask(["sbatch", "--test-only", *options], b"#!/bin/sh\n")
        self._tested = options

    def render(self, request: StartRequest) -> Sequence[NodeCommand]:
        agent = self._agent(request)
        root = f"{self._root}/$SLURM_JOB_ID/$SLURM_NODEID"
        shown = (shlex.join(self._sbatch(request)) + " <<'END'\n" + self._script(request) + "END",)
        return [
            NodeCommand(index, shown if index == 0 else tuple(agent), root, f"{root}/agent.pyz")
            for index in range(request.node_count)
        ]

    def submit(self, request: StartRequest) -> Handle:
        self._test(request.node_count, request.terms)
        self._tested = None
        name = _name(request)
        self._identity()
        # Before there is a job: one whose handle is lost may train to its end.
        where = self._where
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget, name)
            if self._store(name, json.dumps(dict(request.secrets)).encode()) != archive.hash_of(self._archive()):
                self._store_agent()
            said = self._ask(self._sbatch(request), self._script(request).encode())
            # A site may have sbatch say more before.
            number, _, elsewhere = said.strip().rpartition("\n")[2].partition(";")
            if not number.isdecimal():
                raise ClusterError(f"cluster '{self._cluster}': sbatch gave no number of a job: {said.strip()}")
            if elsewhere:
                self._run(["scancel", f"--clusters={elsewhere}", number])
                raise ClusterError(
                    f"cluster '{self._cluster}': sbatch sent the job to Slurm's cluster {elsewhere}, where nobody looks after"
                    " it; unset SBATCH_CLUSTERS and SLURM_CLUSTERS where sbatch runs"
                )
            undo.pop_all()
        return {
            "engine": KIND,
            "host": socket.gethostname(),
            "ticket": int(number),
            "slurm": where,
            "name": name,
            "nodes": [{"name": f"node-{index}", "id": number} for index in range(request.node_count)],
        }

    @functools.cached_property
    def _where(self) -> str:
        return self._cluster_name(ASK_SECONDS)

    def _cluster_name(self, timeout: float) -> str:
        match = re.search(r"^ClusterName\s*=\s*(\S+)", self._ask(["scontrol", "show", "config"], timeout=timeout), re.MULTILINE)
        return match[1] if match else ""

    def poll(self, handle: Handle) -> Poll:
        return self.poll_all([handle])[0]

    def poll_all(self, handles: Sequence[Handle]) -> Sequence[Poll]:
        try:
            known = self._known([handle["ticket"] for handle in handles if not other_engine(handle, KIND)])
        except ClusterError as error:
            return [unknown_poll(handle, str(error)) for handle in handles]
        return [self._poll_of(handle, known.get(handle["ticket"])) for handle in handles]

    def _poll_of(self, handle: Handle, job: Queued | None) -> Poll:
        if reason := other_engine(handle, KIND):
            return unknown_poll(handle, reason)
        nodes = tuple(range(len(handle["nodes"])))
        title = f"Slurm job {handle['ticket']}"
        # Numbers may begin again.
        if job and job.name == _name_in(handle):
            if job.state in WAITING:
                return Poll(PollState.QUEUED, f"{title} is {job.words}", started=False)
            if job.state == "RUNNING" and job.node_count != str(len(nodes)):
                # It goes on for ever (--no-kill) without a node that has died, were it node 0's.
                return unknown_poll(handle, f"{title} has lost a node: of {len(nodes)} it has {job.node_count} ({job.nodes})")
            if job.state in RUNNING:
                return Poll(PollState.ALIVE, frozen=nodes if job.state in FROZEN else ())
            if job.state not in ENDED:
                return unknown_poll(handle, f"{title} is {job.words}, which says nothing of its agents")
            how = f"{title} has ended: {job.words}"
        else:
            try:
                where = self._cluster_name(POLL_SECONDS)
            except ClusterError as error:
                return unknown_poll(handle, str(error))
            if where != handle.get("slurm"):
                return unknown_poll(handle, f"{title} is one of Slurm's cluster {handle.get('slurm')}, and {where} was asked")
            job = self._accounted(handle)
            how = f"{title} has ended, and Slurm remembers no more of it{f' but {job.words}' if job else ''}"
        failures, last = self._printed(handle)
        if job and job.state in slurm_end.ENDS and not failures:
            code, sentence = slurm_end.ENDS[job.state]
            failures = {0: {"code": code, "message": sentence.format(job.id)}}
            if job.state == "CANCELLED":
                # The same where a node's prolog fails. Then no agent has come: srun lets none read until it has all nodes.
                how += ", by scancel or for a prolog that failed"
        elif not last:
            how += f"; it has printed nothing: do Slurm's nodes see {self._folder}?"
        how += f": {last}" if last else ""
        started = not job or job.state != "CANCELLED" or job.nodes != ""
        return Poll(PollState.GONE, how, nodes, (), dict.fromkeys(nodes, how), (), failures, started)

    def _known(self, numbers: Sequence[int]) -> Mapping[int, Queued]:
        """Slurm's own account of jobs by their number, one question for all; those that it has forgotten are missing."""
        if not numbers:
            return {}
        asked = ["squeue", *QUEUE, "-t", "all", "-j", ",".join(map(str, numbers))]
        done = self._run(asked, timeout=POLL_SECONDS)
        # Said of one number; in a list of several a forgotten one is only missing.
        if done.code and "Invalid job id" not in done.err:
            raise self._error(asked, done)
        return {job.id: job for job in queued(done.out)}

    def _accounted(self, handle: Handle) -> Queued | None:
        """What Slurm's accounting knows of a job that the queue has forgotten; many sites have none."""
        asked = ["sacct", "-n", "-X", "-P", "-o", "State,NodeList,JobName%100", "-j", str(handle["ticket"])]
        with contextlib.suppress(ClusterError):
            state, *rest = self._run(asked, timeout=POLL_SECONDS).out.strip().rpartition("\n")[2].split("|")
            if state and rest[1:] == [_name_in(handle)]:
                # "CANCELLED by 1000"
                nodes = rest[0].replace("None assigned", "")
                return Queued(handle["ticket"], state.split()[0], "", "", nodes, "", rest[1], "")
        return None

    def _printed(self, handle: Handle) -> tuple[dict[int, Any], str]:
        with contextlib.suppress(ClusterError):
            asked = ["sh", "-c", _TAIL, "sh", self._folder, f"{_name_in(handle)}.out"]
            return last_words(self._run(asked, timeout=POLL_SECONDS).out)
        return {}, ""

    def cancel(self, handle: Handle) -> None:
        if reason := other_engine(handle, KIND):
            raise ClusterError(f"{reason}; what runs there of the job may go on: end it by hand")
        name = _name_in(handle)
        self._end(handle["ticket"], name)
        self._run(["rm", "-f", "--", f"{self._folder}/{name}"])

    def end_job(self, job: str) -> None:
        self._end_named(f"batchai-{job}-")

    def _forget(self, name: str) -> None:
        """After a submit that failed: Slurm may have the job all the same, if only its answer was lost."""
        # What went wrong first is what a person has to see.
        with contextlib.suppress(ClusterError):
            self._run(["rm", "-f", "--", f"{self._folder}/{name}"])
            self._end_named(name)

    def _end_named(self, start: str) -> None:
        for job in self._ours():
            if job.name.startswith(start):
                self._end(job.id, job.name)

    def _end(self, number: int, name: str) -> None:
        """End a job and wait until none of its processes is left."""
        until = time.monotonic() + CANCEL_SECONDS
        told, pause = False, 0.1
        while job := self._known([number]).get(number):
            if job.name != name or job.state in ENDED:
                return
            if not told:
                self._ask(["scancel", str(job.id)])
                told = True
            if time.monotonic() > until:
                raise ClusterError(
                    f"Slurm job {job.id} is {job.words} {CANCEL_SECONDS:.0f} s after scancel; what runs there may go on: ask"
                    f" the administrator to look at {job.nodes or 'its nodes'}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _ours(self) -> list[Queued]:
        """This user's jobs that wait or run, of any cluster document."""
        return [job for job in queued(self._ask(["squeue", *QUEUE, "--me"])) if _MARK.fullmatch(job.name)]

    def _nodes(self) -> list[NodeReport]:
        """The nodes of the partition, or of Slurm's default one."""
        partition, found = self._document.partition, {}
        for line in self._ask(["sinfo", "-h", "-N", "-o", "%N|%P|%T|%E", *self._chosen]).splitlines():
            # A reason may have several lines, and a node several partitions.
            name, *fields = line.split("|", 3)
            if len(fields) == 3 and (partition or fields[0].endswith("*")):
                found[name] = node_report(name, *fields[1:])
        return list(found.values())

    def census(self) -> Census:
        jobs = self._ours()
        waiting: list[str] = []
        if any(job.state in WAITING for job in jobs):
            waiting = self._ask(["squeue", "-h", "-t", "PENDING", "-S", "-p,i", "-o", "%i", *self._chosen]).split()
        reservations = []
        for job in jobs:
            identity, attempt = job.name.split("-")[1:]
            place = f", {waiting.index(str(job.id)) + 1} of {len(waiting)} in the queue" if str(job.id) in waiting else ""
            why = f"{job.words}{place}" if job.state in WAITING else ""
            reservations.append(
                Reservation(job.id, protocol.job_mark(identity, int(attempt)), job.comment, (), job.state in RUNNING, why)
            )
        return Census(self._nodes(), reservations)

    @property
    def nodes(self) -> Sequence[Node]:
        """One, which Slurm gives when it is asked: no other may be looked into."""
        if self._taken is None:
            self._taken = SlurmNode(self._commands(), take=self._take)
        return [Node("any", self._taken, self._root)]

    def folder_problems(self, places: Sequence[Answer | None]) -> Sequence[str]:
        return [""] * len(places)

    def find(self, name: str, handle: Handle | None = None) -> Node:
        job = handle["ticket"] if handle and handle["engine"] == KIND else None
        if job is None:
            running = queued(self._ask(["squeue", *QUEUE, "--me", "-t", "RUNNING", "-w", name]))
            job = next((one.id for one in running if _MARK.fullmatch(one.name)), None)
        if job is None:
            raise ClusterError(
                f"cluster '{self._cluster}': no job of yours runs on node {name}, and Slurm lets you on no other"
            )
        return Node(name, SlurmNode(self._commands(), name, job), self._root)

    def admit(self, count: int) -> None:
        """All nodes take jobs, as far as Slurm lets them."""

    def close(self) -> None:
        if self._taken:
            # Slurm ends it, too, after some minutes.
            with contextlib.suppress(ClusterError):
                self._taken.close()
        self._runner.close()

    # What is run.

    def _commands(self) -> Commands:
        login = self._runner.target if isinstance(self._runner, Connection) else None
        return Commands(self._ask, self._booted(), tidy_of(self._root, self._document.agent_python), login)

    def _take(self) -> int:
        """Take a node for some minutes, to look at it; the job's number."""
        self._store_agent()
        limits = (f"--immediate={TAKE_SECONDS}", f"--time={TAKE_MINUTES}", "--nodes=1", "--job-name=batchai-doctor")
        asked = ["salloc", "--no-shell", *gpus_of(self._document), *self._document.words, *limits]
        done = self._run(asked, timeout=TAKE_SECONDS + ASK_SECONDS)
        if not done.code and (granted := re.search(r"Granted job allocation (\d+)", done.err)):
            return int(granted[1])
        # As "Connection timed out", or, if the controller has started again meanwhile, as a job that it doesn't know.
        if "queued and waiting" in done.err:
            raise ClusterError(
                f"cluster '{self._cluster}': Slurm gave no node within {TAKE_SECONDS} s; try again when one is free"
            )
        raise self._error(asked, done)

    def _sbatch(self, request: StartRequest) -> list[str]:
        name = _name(request)
        options = options_of(self._document, request.node_count, request.terms)
        return [
            "sbatch",
            "--parsable",
            *options,
            f"--job-name={name}",
            f"--comment={request.folder}",
            "--output=/dev/null",
        ]

    def _script(self, request: StartRequest) -> str:
        secrets = f"{self._folder}/{_name(request)}"
        return script_of(self._agent(request), self._root, self._document.agent_python, secrets, f"{secrets}.out")

    def _agent(self, request: StartRequest) -> list[str]:
        job = (f"--share={self._share}", f"--folder={request.folder}", f"--attempt={request.attempt}")
        return ["--label", *self._booted(), *job]

    def _booted(self) -> list[str]:
        """The command of a task that runs the agent, without the words of a job: it serves, then."""
        data = self._archive()
        path = f"{self._folder}/{archive.name_of(data)}"
        return [self._document.agent_python, "-I", "-S", "-c", BOOT, path, archive.hash_of(data), self._root]

    def _store(self, name: str, data: bytes) -> str:
        """Write a file into our folder on the share; the SHA-256 of the agent there, if there is one."""
        done = self._run(["sh", "-c", _STORE, "sh", self._folder, name, archive.name_of(self._archive())], data)
        if done.code:
            raise ClusterError(
                f"{self._folder}/{name} can't be written: {_last(done.err)}; does share (or shareOnNodes) of cluster"
                f" '{self._cluster}' name a folder that Slurm's nodes see, and may you write there?"
            )
        return done.out.partition(" ")[0]

    def _store_agent(self) -> None:
        agent = self._archive()
        self._store(archive.name_of(agent), agent)

    def _run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = ASK_SECONDS) -> Result:
        return self._runner.run(argv, stdin, timeout)

    def _ask(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = ASK_SECONDS) -> str:
        done = self._run(argv, stdin, timeout)
        if done.code:
            raise self._error(argv, done)
        return done.out

    def _error(self, argv: Sequence[str], done: Result) -> ClusterError:
        """One sentence on a command of Slurm that failed."""
        where = f"login node {self._document.login}" if self._document.login else "this machine"
        # What a task says last stands before what srun says of its end.
        title, said = f"cluster '{self._cluster}'", _last(re.sub(r"(?m)^srun: .*", "", done.err)) or _last(done.err)
        if done.code == 127:
            remedy = "put Slurm's commands on its PATH" + ("" if self._document.login else ", or name a login node (login)")
            return ClusterError(f"{title}: there is no {argv[0]} on {where}; {remedy}")
        if no_step := re.search(r"Task launch for \S+ failed on (node .+)", done.err):
            return ClusterError(f"{title}: {no_step[1]}" + "; is its slurmd up?" * ("ommunication" in no_step[1]))
        if _AWAY.search(done.err):
            return ClusterError(f"{title}: Slurm's controller doesn't answer on {where} ({said}); try again when it does")
        if argv[0] in ("sbatch", "salloc") and done.code > 0:
            asked = shlex.join([argv[0], *itertools.takewhile(lambda word: not word.startswith("--ntasks"), argv[2:])])
            remedy = "correct the cluster document, the job's slurm block or its nodeCount"
            # Said of nodes that are down or drained, too, and of all in the seconds after the controller's start.
            with contextlib.suppress(ClusterError):
                nodes = self._nodes() if "node configuration" in said else ()
                if away := [node for node in nodes if node.state is NodeState.UNUSABLE]:
                    remedy = f"wait for its nodes ({len(away)} away, as {away[0].place.name}: {away[0].why}), or {remedy}"
            return ClusterError(f"{title}: Slurm refuses the job: {said}; {remedy} ({asked})")
        # SIGPIPE, where munge ends while they talk to it: then they say nothing.
        how = f"exit code {done.code}" if done.code > 0 else "a signal ended it; is munge up there? Try again"
        return ClusterError(f"{title}: {argv[0]} failed on {where}: {said or how}")


def _name(request: StartRequest) -> str:
    """A job's name in Slurm, and of its files."""
    return f"batchai-{request.job}-{request.attempt}"


def _name_in(handle: Handle) -> str:
    """The same by a handle, which may be somebody else's work: it becomes a file's name."""
    name = str(handle.get("name"))
    return name if _MARK.fullmatch(name) else "batchai-none-0"


def _last(text: str) -> str:
    """The last line that a command of Slurm's said, without its name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: (error: |fatal: )?", "", lines[-1]).removeprefix("Batch job submission failed: ") if lines else ""
