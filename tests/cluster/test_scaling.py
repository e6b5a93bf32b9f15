"""A cluster that grows and shrinks, with real agents: the queue by names, and what becomes of jobs on nodes that leave."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plans import toy_plan
from waiting import wait_for

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.processes import proc
from mlflow_batchai.client import resizing, runner
from mlflow_batchai.client.console import JobConsole
from mlflow_batchai.client.signals import Signals
from mlflow_batchai.cluster import clusters, records, scaling
from mlflow_batchai.cluster import states as cluster_states
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.engines.base import Handle, StartRequest
from mlflow_batchai.engines.census import Census, NodeReport, NodeState, Place, Reservation
from mlflow_batchai.errors import ClusterError, ClusterNotFoundError, UsageError
from mlflow_batchai.follower.detached import Submitted
from mlflow_batchai.job.events import EventReader
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import Lease
from mlflow_batchai.tracking.runs import Tracking

HOLD = 'until [ -e "$AZ_BATCHAI_SHARED_JOB_TEMP/end" ]; do sleep 0.05; done'


def no_store() -> Any:
    raise ClusterError("no store was to be asked for")


class Site:
    """A local cluster of two nodes, and the jobs that were sent to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: list[str] = []
        self._handles: list[Handle] = []

    @property
    def cluster(self) -> Cluster:
        """As whoever asks just now finds it."""
        return clusters.load("c")[0]

    def submit(self, name: str, command: str = HOLD, nodes: int = 1, followed: bool = True) -> Job:
        share = self.root / "share"
        job = f"{os.getpid():x}{len(self._handles)}s"
        folder = f"jobs/{name}"
        plan = toy_plan(
            share,
            job=job,
            name=name,
            folder=folder,
            segment=folder,
            nodeCount=nodes,
            command=command,
            cluster="c",
            coresPerNode=1,
        )
        cluster = self.cluster
        cluster.share.write(protocol.JobPaths(folder).plan, protocol.encode([plan]))
        request = StartRequest(job, protocol.job_mark(job, 1), folder, 1, nodes, {"plan": protocol.digest(plan)})
        self._handles.append(cluster.engine.submit(request))
        found = Job(cluster.share, folder)
        if followed:
            assert Lease(found).acquire()
        return found

    def resize(self, target: int, option: str = "requeue") -> Cluster:
        settings = scaling.manual(self.cluster, target, option)
        return resizing.resize(self.cluster, settings, option, no_store, self.said.append)

    def resize_in_turn(self, target: int) -> None:
        """What ``resize`` does to the cluster once nobody else does it."""
        scaling.apply(self.cluster, scaling.manual(self.cluster, target))

    def shown(self) -> tuple[str, str]:
        """Allocation state, and the nodes' states by their counts: ``idle running preparing leaving``."""
        shown = cluster_states.show(self.cluster, self.cluster.scalable.census())
        counts = shown["nodeStateCounts"]
        assert shown["currentNodeCount"] == sum(counts.values())
        return shown["allocationState"], " ".join(
            str(counts[f"{state}NodeCount"]) for state in ("idle", "running", "preparing", "leaving")
        )

    def end(self, job: Job) -> None:
        path = self.root / "share" / job.folder / "shared" / "end"
        path.parent.mkdir(exist_ok=True)
        path.touch()

    def close(self) -> None:
        for handle in self._handles:
            self.cluster_or_nothing(handle)
            assert proc.marked(handle["mark"]) == set()

    def cluster_or_nothing(self, handle: Handle) -> None:
        try:
            self.cluster.engine.cancel(handle)
        except ClusterNotFoundError:
            pass


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("BATCHAI_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "clusters").mkdir(parents=True)
    (tmp_path / "home" / "clusters" / "c.yaml").write_text(f"nodes: 2\nshare: {tmp_path}/share\n", encoding="utf-8")
    made = Site(tmp_path)
    yield made
    made.close()


def running(*jobs: Job) -> None:
    wait_for(lambda: all(job.state().execution_state == "running" for job in jobs))


def test_the_queue_by_names(site: Site) -> None:
    first, second, third = site.submit("a"), site.submit("b"), site.submit("c", nodes=2)
    running(first, second)
    fourth = site.submit("d")
    queue = site.cluster.scalable.census().reservations
    assert [(scaling.name_of(site.cluster.share, each), each.nodes, each.started) for each in queue] == [
        ("a", (0,), True),
        ("b", (1,), True),
        ("c", (0, 1), False),
        ("d", (0,), False),
    ]
    assert [scaling.waits(job).behind for job in (third, fourth, first)] == [("a", "b"), ("a", "c"), ()]
    assert scaling.waits(third).why == "queued behind a, b"
    now = [0.0]
    waiting = scaling.WhyQueued(third, lambda: now[0])
    assert waiting.news() == ""
    now[0] = 1.0
    assert wait_for(waiting.news) == "queued behind a, b"
    site.end(first)
    wait_for(lambda: first.state().ended)
    wait_for(lambda: scaling.waits(third).behind == ("b",))
    now[0] = 20.0
    assert waiting.news() == ""
    now[0] = 40.0
    assert wait_for(waiting.news) == "queued behind b"
    # The name of a job whose folder is gone is its id.
    site.cluster.share.delete(protocol.JobPaths(first.folder).plan)
    reservation = site.cluster.scalable.census().reservations[0]
    assert scaling.name_of(site.cluster.share, reservation) == "b"
    assert scaling.name_of(site.cluster.share, reservation._replace(folder=first.folder)) == second.plan.job


def test_who_watches_a_queued_job_is_told_behind_whom_it_is(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    first = site.submit("a", nodes=2)
    running(first)
    second = site.submit("b", "echo done")

    class Console(JobConsole):
        def state(self, text: str) -> None:
            super().state(text)
            if text == "queued behind a":
                site.end(first)

    watched = Submitted(second, second.plan.run_id, Tracking("sqlite://", {}))
    state = runner._watch_attempts(watched, Console(1), EventReader(second), Signals(cancels=False))
    assert state.execution_state == "succeeded"
    said = capsys.readouterr().err
    assert said.index("queued: waiting for nodes") < said.index("queued behind a")


def test_a_smaller_cluster_waits_for_jobs_that_run(site: Site) -> None:
    """waitforjobcompletion: nodes are leaving until then, and the cluster is resizing."""
    first, second = site.submit("a"), site.submit("b")
    running(first, second)
    assert site.shown() == ("steady", "0 2 0 0")
    site.resize(0, "waitforjobcompletion")
    assert site.said == ["job a goes on; its nodes leave when it has ended", "job b goes on; its nodes leave when it has ended"]
    assert site.shown() == ("resizing", "0 0 0 2")
    site.end(first)
    wait_for(lambda: site.shown() == ("resizing", "0 0 0 1"))
    site.end(second)
    wait_for(lambda: site.shown() == ("steady", "0 0 0 0"))
    third = site.submit("c", "true", nodes=2)
    assert scaling.waits(third).why == (
        "queued: 0 of the 2 nodes of cluster 'c' take jobs; it starts after: batchai cluster resize -n c -t 2"
    )
    site.resize(1)
    assert site.shown() == ("steady", "0 0 1 0")
    assert site.said[-1].startswith("job c waits: 1 of the 2 nodes")
    site.resize(2)
    wait_for(lambda: third.state().execution_state == "succeeded")
    wait_for(lambda: site.shown() == ("steady", "2 0 0 0"))


def test_a_smaller_cluster_ends_jobs(site: Site) -> None:
    first, second = site.submit("a", nodes=1), site.submit("b", nodes=1)
    running(first, second)
    site.resize(1, "terminate")
    assert (first.state().execution_state, second.state().terminated) == ("running", True)
    assert second.state().reason.endswith(": cluster c was resized")
    assert (site.said, site.shown()) == (["job b is terminated"], ("steady", "0 1 0 0"))
    # One that can't be put back in the queue is left alone, and that is said.
    site.resize(0, "requeue")
    assert site.said[-1].startswith("job a goes on; its nodes leave when it has ended: it can't be put back in the queue: ")
    assert site.shown() == ("resizing", "0 0 0 1")


@pytest.mark.parametrize(
    ("states", "reservations", "decisions"),
    [
        # (nodes, started) each. Nothing changes for who runs on an open node, or takes one just now.
        ("running idle", [([0], True)], []),
        ("idle idle", [([0], False)], []),
        ("running leaving", [([0], True), ([1], True)], [(1, "terminate")]),
        ("running leaving", [([0, 1], True)], [(0, "terminate")]),
        # It fits where it would have to wait its turn, or not at all.
        ("running closed", [([0], True), ([1], False)], [(1, "requeue")]),
        ("running closed", [([0], True), ([0, 1], False)], [(1, "grow")]),
        ("closed closed", [([0], False)], [(0, "grow")]),
        # Free nodes have come: the first in the queue gets them.
        ("running idle", [([0], True), ([0], False), ([0], False)], [(1, "requeue")]),
        ("running idle idle", [([0], True), ([0, 1], False), ([0], False)], [(1, "requeue")]),
        ("running idle running", [([0], True), ([2], True), ([0, 2], False), ([0], False)], [(3, "requeue")]),
        ("running idle idle idle", [([0], True), ([0, 1], False)], [(1, "requeue")]),
        ("running unusable", [([0], True), ([0], False)], []),
    ],
)
def test_what_becomes_of_jobs(
    states: str, reservations: list[tuple[list[int], bool]], decisions: list[tuple[int, str]]
) -> None:
    nodes = [NodeReport(Place(str(index), "", None), NodeState(state)) for index, state in enumerate(states.split())]
    queue = [Reservation(number, "", "", tuple(where), started) for number, (where, started) in enumerate(reservations)]
    assert [
        (reservation.number, decision) for reservation, decision in resizing.decisions(Census(nodes, queue), "terminate")
    ] == decisions


def test_a_larger_cluster_has_nodes_for_who_waits(site: Site) -> None:
    site.resize(1)
    first, second = site.submit("a"), site.submit("b")
    running(first)
    site.resize(2)
    [said] = site.said
    assert said.startswith("job b waits for its nodes: it can't be put back in the queue: ")
    assert second.state().execution_state == "queued"


def test_a_larger_cluster_than_its_document(site: Site) -> None:
    site.resize(3)
    assert (site.cluster.engine.node_limit, site.shown()) == (3, ("steady", "3 0 0 0"))
    job = site.submit("a", "true", nodes=3)
    wait_for(lambda: job.state().execution_state == "succeeded")
    assert [command.argv[-2] for command in site.cluster.engine.render(StartRequest("j", "j/1", "f", 1, 3, {}))] == [
        "--part=0/3/2",
        "--part=1/3/2",
        "--part=2/3/2",
    ]
    # Its agents may still be there for a moment.
    site.resize(2)
    assert (site.cluster.engine.node_limit, site.cluster.open_nodes, site.said) == (3, 2, [])
    wait_for(lambda: site.shown() == ("steady", "2 0 0 0"))
    with pytest.raises(UsageError, match="at most 100 nodes"):
        site.resize(101)


def test_a_size_that_follows_the_queue(site: Site) -> None:
    def auto(minimum: int, maximum: int) -> None:
        settings = scaling.automatic(site.cluster, minimum, maximum)
        resizing.resize(site.cluster, settings, "waitforjobcompletion", lambda: None, site.said.append)  # type: ignore[arg-type,return-value]

    auto(0, 3)
    assert site.shown() == ("steady", "0 0 0 0")
    auto(1, 3)
    assert site.shown() == ("steady", "1 0 0 0")
    job = site.submit("a", nodes=2)
    running(job)
    assert site.shown() == ("steady", "0 2 0 0")
    site.end(job)
    wait_for(lambda: site.shown() == ("steady", "1 0 0 0"))
    site.resize(2)
    assert site.cluster.scale.auto_scale is None and site.shown() == ("steady", "2 0 0 0")
    with pytest.raises(UsageError, match="--min 2 is more than --max 1"):
        auto(2, 1)


def test_deleting_a_cluster_ends_its_jobs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resizing, "RELAY_SECONDS", 0.2)  # nobody relays them
    job, queued = site.submit("a", nodes=2), site.submit("b", followed=False)
    running(job)
    share = site.cluster.share
    resizing.delete("c", no_store, site.said.append)
    attach = f"batchai job attach {queued.plan.run_id}"
    unrelayed = f"job b ends, and nobody relays that into its run (no store was to be asked for); later: {attach}"
    assert site.said == ["job a is terminated", "job b is terminated", unrelayed]
    for folder in (job.folder, queued.folder):
        state = Job(share, folder).state()
        assert (state.terminated, state.reason.partition(": ")[2]) == (True, "cluster c was deleted")
    assert not (site.root / "home" / "nodes" / "c").exists()
    assert list((site.root / "home" / "clusters").iterdir()) == []
    with pytest.raises(ClusterNotFoundError, match="the clusters are: local"):
        resizing.delete("c", no_store, site.said.append)


def test_nodes_are_not_removed_under_a_job(site: Site) -> None:
    """One that can't be told to end: its reservation names no folder."""
    job = site.submit("a")
    running(job)
    book = site.root / "home" / "nodes" / "c" / "book" / "book.json"
    book.write_text(book.read_text().replace(job.folder, ""), encoding="utf-8")
    with pytest.raises(ClusterError, match=f"cluster 'c' still has jobs: {job.plan.job}; delete it again when they have"):
        resizing.delete("c", no_store, site.said.append)
    assert site.said[0].startswith(f"job {job.plan.job} can't be ended: its reservation names no folder")
    assert not (site.root / "share" / "batchai").exists()
    assert records.document_path("c").is_file() and site.shown() == ("steady", "1 1 0 0")


def test_jobs_of_other_documents_with_the_same_machines_stay(site: Site) -> None:
    job, said = site.submit("a", "true"), site.said.append
    ssh: Any = SimpleNamespace(name="c", on_this_machine=False, share=job.share)
    (reservation,) = site.cluster.scalable.census().reservations
    assert scaling.sent_to(ssh, reservation) and scaling.sent_to(ssh, reservation._replace(folder=""))
    assert not scaling.sent_to(ssh, reservation._replace(folder="jobs/on/another/share"))
    ssh.name, ssh.scalable = "d", SimpleNamespace(census=lambda: Census([], [reservation], "node gpu1 is away"))
    assert not scaling.sent_to(ssh, reservation)
    resizing._end_jobs(ssh, no_store, said)
    assert site.said == ["node gpu1 is away; jobs that may run there were not ended"]
    assert job.requests() == []


@pytest.mark.parametrize("option", ["terminate", "requeue"])
def test_an_attempt_that_another_has_followed_is_let_go(site: Site, option: str) -> None:
    """Its agents leave by themselves; the job waits elsewhere by now, and is not to be ended for them."""
    job = site.submit("a")
    running(job)
    job.claim_verdict(protocol.requeued_record("it makes room", "agent-0", 1))
    job.begin(2, {})
    site.resize(0, option)
    assert (site.said, job.requests(), job.at(2).requests()) == ([], [], [])


def test_a_node_that_cant_be_told(site: Site) -> None:
    """It is named at once, and jobs are seen to all the same."""
    job = site.submit("a", nodes=2)
    running(job)
    mark = site.root / "home" / "nodes" / "c" / "0" / "closed"
    mark.mkdir()
    with pytest.raises(ClusterError, match=r"not all nodes of cluster 'c' could be told .*; resize it again"):
        site.resize(0, "terminate")
    assert (site.said, job.state().terminated) == ([f"Is a directory: {mark}", "job a is terminated"], True)


def test_of_two_who_resize_at_once_one_waits(site: Site) -> None:
    with records.locked("c", site.said.append):
        other = threading.Thread(target=site.resize, args=[1])
        other.start()
        wait_for(lambda: site.said)
        site.resize_in_turn(3)
    other.join()
    assert site.said == ["cluster 'c' is just being changed by another command; waiting for it"]
    # The first one's larger size is not forgotten.
    assert (site.cluster.engine.node_limit, site.shown()) == (3, ("steady", "1 0 0 0"))


@pytest.mark.parametrize("text", ["engine: slurm\n", "nodes: many\n", "{"])
def test_a_cluster_that_cant_be_used_can_be_deleted(site: Site, text: str) -> None:
    path = records.document_path("c")
    path.write_text(text, encoding="utf-8")
    resizing.delete("c", no_store, site.said.append)
    assert not path.exists() and str(path) in site.said[0]


def test_a_record_that_cant_be_read(site: Site) -> None:
    records.record_path("c").write_text('{"nodes": 0}', encoding="utf-8")
    with pytest.raises(Exception, match=r"c\.state\.json: nodes must be at least 1"):
        clusters.load("c")
