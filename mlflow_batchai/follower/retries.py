"""Begin the next attempt of a job that goes on by itself, once, after the attempt before has ended.

Only the holder of the job's lease does that (``job.lease``), so what it finds begun and not started was begun by one that is
dead: that attempt gets a verdict of its own, and the next one is begun in its place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlflow_batchai.agent import protocol
from mlflow_batchai.agent.attempt import overrides
from mlflow_batchai.agent.plan import Plan
from mlflow_batchai.cluster import clusters
from mlflow_batchai.cluster.clusters import Cluster
from mlflow_batchai.engines.base import Engine
from mlflow_batchai.errors import BatchAIError, ClusterError, JobError, ShareError
from mlflow_batchai.follower.credentials import MissingSecretError, check_here, for_next_attempt
from mlflow_batchai.follower.detached import WAITS_FOR_ATTACH
from mlflow_batchai.follower.starting import start_agents
from mlflow_batchai.follower.watch import Watch
from mlflow_batchai.job.jobs import Job
from mlflow_batchai.job.lease import LeaseLostError
from mlflow_batchai.job.states import failed_verdict
from mlflow_batchai.plan.planning import WAITING_SECONDS
from mlflow_batchai.plan.prepared import needs_of

LOOK_SECONDS = 1.0
# How often nodes that are away are looked for.
FIRST_NODES_SECONDS, LONGEST_NODES_SECONDS = 15.0, 120.0
# How often what opens a job's volumes may fail to be had, over five minutes.
MOST_REFUSALS = 4
# An attempt that ended sooner than this failed at once; the pause before the next one grows with each that did.
QUICK_SECONDS = 60.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0
# Who puts a job back in the queue begins its next attempt at once; after so long he is dead, or his share is away.
REQUESTER_SECONDS = 30.0
# What agents take to end ranks that won't (``processes.sweep``), and clocks that run unevenly.
ENDING_SECONDS, FENCE_MARGIN_SECONDS = 30.0, 15.0
WRITER = "follower"


class NotHereError(JobError):
    """The next attempt of a job can't be started from here, and could from elsewhere or with more in the environment."""


class Leaving(Exception):
    """The follower was asked to leave meanwhile."""


def pause_before(quick: int) -> float:
    """Seconds before an attempt, after so many in a row that failed at once: 0, 0, 5, 10, 20, 40, 60, 60, ..."""
    return 0.0 if quick < 2 else min(FIRST_PAUSE_SECONDS * 2.0 ** (quick - 2), LONGEST_PAUSE_SECONDS)


def fence_seconds(plan: Plan) -> float:
    """Seconds after which a node that can't be asked does no harm any more: its agent has seen the verdict and ended its ranks.

    One that can't see the verdict can't write to the share either, and its ranks have nobody left to train with.
    """
    return plan.loss_seconds + plan.terminate_seconds + ENDING_SECONDS + FENCE_MARGIN_SECONDS


def check_can_start(job: Job) -> None:
    """Whether the attempt that a job waits for can be started from here, as far as that needs no node.

    Raises:
        NotHereError: it can't be; the message says what is needed.
    """
    cluster = _cluster(job)
    try:
        _secrets(job, cluster, {"environment": os.environ})
    finally:
        cluster.engine.close()


class Retries:
    """Begins the attempts that a job goes on with by itself.

    Args:
        kept: what agents of an earlier attempt were told; ``environment`` in it is the part of the submitter's environment that
            may have its secrets: our own is another submitter's. It is held in memory only, and may change meanwhile.
        check: raises LeaseLostError unless we hold the job's lease; called just before an attempt is begun.
        wait: waits so many seconds, or less; raises ``Leaving`` if told to leave.
        say: told in a sentence what the next attempt waits for; an empty one: for nothing any more.
        clock: seconds.
    """

    def __init__(
        self,
        kept: Mapping[str, Any],
        check: Callable[[], None],
        wait: Callable[[float], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = kept
        self._check = check
        self._wait = wait
        self._say = say
        self._clock = clock
        self._since = clock()
        self._attempt = self._quick = 0

    def bring(self, job: Job, engine: Engine) -> None:
        """See to it that a job's attempt is started, or has its verdict, unless it is for somebody else to start.

        Args:
            job: at that attempt.
            engine: what the attempt before ran on.

        Raises:
            NotHereError: it can't be started from here.
            LeaseLostError: another process follows the job.
            Leaving: told to leave.
            ShareError: the share is away: call it again.
        """
        if job.attempt != self._attempt:
            # The first one of a new follower is none that failed.
            failed = self._attempt > 0 and self._clock() - self._since < QUICK_SECONDS
            self._attempt, self._quick = job.attempt, self._quick + 1 if failed else 0
        if job.attempt > 1 and job.handle() is None and not _is_over(job):
            self._bring(job, engine)
        self._since = self._clock()

    def _bring(self, job: Job, engine: Engine) -> None:
        before = job.at(job.attempt - 1)
        state = before.state(ending=False)
        if state.next_attempt != job.attempt or (state.retries_left is None and not self._nobody_begins(before, job)):
            return
        before.snapshot()  # with its overrides
        # Ranks can write a verdict; how often the job starts again its document says. Attempts that nobody started cost none.
        most = before.plan.retries_left
        left = most if state.retries_left is None else min(most, state.retries_left)
        claims = state.retries_left is not None and before.handle() is not None
        if (claims and most <= 0 and not before.plan.low_priority) or job.attempt > overrides.MOST_ATTEMPTS:
            sentence = f"attempt {before.attempt} says that the job starts again, and it has no retries left"
            job.claim_verdict(failed_verdict(protocol.NODE_SETUP_FAILED, sentence, WRITER))
            return
        if job.is_begun():
            sentence = f"its starter died before attempt {job.attempt} was started"
            self._unstarted(job, sentence, left)
            return
        try:
            _look_for_cancel(before, job)
            _check_here(job, self._kept)
            self._pause(before, job)
            self._fence(before, job, engine)
            self._start(before, job, left, state.reason)
        except _Cancelled as wanted:
            job.claim_verdict(protocol.terminated_record(WRITER, running=False, wish=wanted.wish))
        finally:
            self._say("")

    def _unstarted(self, job: Job, sentence: str, left: int) -> None:
        """The verdict on an attempt that was begun and could not be started: that costs no retry."""
        failed = failed_verdict(protocol.NODE_SETUP_FAILED, sentence, WRITER)
        job.claim_verdict(failed if job.attempt >= overrides.MOST_ATTEMPTS else overrides.again(failed, job.attempt, left))

    def _nobody_begins(self, before: Job, job: Job) -> bool:
        """Whether the process that put the job back in the queue fails to begin the next attempt in time."""
        until = self._clock() + REQUESTER_SECONDS
        while not job.is_begun():
            if self._clock() > until:
                return True
            self._rest(before, job, LOOK_SECONDS)
        return False

    def _rest(self, before: Job, job: Job, seconds: float) -> None:
        """Wait; raises _Cancelled if somebody wants the job's end."""
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            _look_for_cancel(before, job)
            self._wait(min(left, LOOK_SECONDS))
        _look_for_cancel(before, job)

    def _pause(self, before: Job, job: Job) -> None:
        """An attempt that fails at once is not followed by the next one at once, again and again."""
        if pause := pause_before(self._quick):
            self._say(f"attempt {job.attempt} begins in {pause:.0f} s, as {self._quick} in a row failed at once")
        self._rest(before, job, pause)

    def _fence(self, before: Job, job: Job, engine: Engine) -> None:
        """Wait until nothing of the attempt before can run any more."""
        watch, until = Watch(before, engine), self._clock() + fence_seconds(before.plan)
        while not _is_free(before, watch):
            left = until - self._clock()
            if left <= 0:
                return
            self._say(f"attempt {job.attempt} waits until nodes that don't answer have ended attempt {before.attempt}")
            self._rest(before, job, min(left, FIRST_NODES_SECONDS))

    def _start(self, before: Job, job: Job, left: int, why: str) -> None:
        look, refused = FIRST_NODES_SECONDS, 0
        while True:
            cluster = _cluster(job)
            try:
                secrets = _secrets(job, cluster, self._kept)
                self._begin(before, job, left, why, cluster, _nodes(job, cluster), secrets)
                return
            except (NotHereError, LeaseLostError):
                raise
            except ClusterError as error:
                self._say(f"attempt {job.attempt} waits for {job.plan.least_nodes} nodes: {error}")
            except JobError as error:  # what opens its volumes can't be had, maybe for now: Azure may not answer
                refused += 1
                if refused > MOST_REFUSALS:
                    raise NotHereError(f"{WAITS_FOR_ATTACH} ({error})") from error
                self._say(f"attempt {job.attempt} waits: {error}")
            finally:
                cluster.engine.close()
            self._rest(before, job, look)
            look = min(look * 2, LONGEST_NODES_SECONDS)

    def _begin(
        self, before: Job, job: Job, left: int, why: str, cluster: Cluster, count: int, secrets: Mapping[str, Any]
    ) -> None:
        self._check()
        begun = job.begin(
            job.attempt, overrides.record(left, overrides.RETRY, why.partition("\n")[0], overrides.counts_on(job.plan, count))
        )
        if begun is None:
            return  # someone has given it up, or begins it: its verdict or its agents are to be seen
        # Who asks for the end writes that first and looks for the next attempt then: see ``Job.request_cancel``.
        _look_for_cancel(before, job)
        try:
            start_agents(begun, cluster, secrets)
        except ClusterError as error:
            self._unstarted(begun, f"attempt {begun.attempt} could not be started: {error}", left)


class _Cancelled(Exception):
    """Somebody wants the job's end."""

    def __init__(self, wish: protocol.Record) -> None:
        super().__init__()
        self.wish = wish


def _is_over(job: Job) -> bool:
    state = job.state(ending=False)
    return state.ended or state.next_attempt is not None


def _look_for_cancel(before: Job, job: Job) -> None:
    for at in (before, job):
        wish = protocol.wish(at.requests(), at.attempt)
        if wish and wish["kind"] == protocol.CANCEL:
            raise _Cancelled(wish)


def _is_free(before: Job, watch: Watch) -> bool:
    """Whether no process of an ended attempt can run any more: its nodes say so or said so, or it never started."""
    try:
        watch.clean_up()
        if before.handle() is not None:
            return True
    except ClusterError:
        pass
    snapshot = before.snapshot()
    came = range(before.node_count) if before.handle() is not None else snapshot.announces
    return all(node in snapshot.exits and not snapshot.exits[node].get("left") for node in came)


def _cluster(job: Job) -> Cluster:
    try:
        cluster, _ = clusters.load(job.plan.cluster)
        check_here(job, cluster)
    except ShareError:
        raise
    except BatchAIError as error:
        raise NotHereError(f"{WAITS_FOR_ATTACH} where the job's cluster can be used ({error})") from error
    return cluster


def _check_here(job: Job, kept: Mapping[str, Any]) -> None:
    """Raise NotHereError if it is certain that an attempt can't be started from here: there is nothing to wait for."""
    cluster = _cluster(job)
    try:
        _secrets(job, cluster, kept)
    except NotHereError:
        raise
    except JobError:
        pass  # maybe for now
    finally:
        cluster.engine.close()


def _secrets(job: Job, cluster: Cluster, kept: Mapping[str, Any]) -> dict[str, Any]:
    try:
        seconds = float(job.plan.max_wall_clock_seconds + WAITING_SECONDS)
        return for_next_attempt(job, cluster, seconds, kept.get("environment", {}), kept)
    except MissingSecretError as error:
        raise NotHereError(f"{WAITS_FOR_ATTACH} (needs {', '.join(error.variables)})") from error


def _nodes(job: Job, cluster: Cluster) -> int:
    """Number of nodes of the next attempt: those that answer and take jobs, enough and no more than at first.

    Raises:
        ClusterError: too few can be used.
    """
    checked = cluster.engine.check(job.plan.least_nodes, needs_of(job.plan))
    if missing := sorted(set(checked.missing) - set(job.plan.tools)):
        raise ClusterError(f"nodes of cluster '{cluster.name}' have no {missing[0]} now; install it there")
    return fitting_nodes(job.plan, cluster, checked.usable)


def fitting_nodes(plan: Plan, cluster: Cluster, usable: int) -> int:
    """Number of nodes of the next attempt, given how many can be used (``Plan.least_nodes`` at least)."""
    return max(plan.least_nodes, min(plan.node_count, usable, cluster.open_nodes))
