"""What a seed of the randomized run does: which process is killed at which step of the protocol, or what is taken away from a
job for a while, and what comes then."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

FOLLOWER, SUBMITTER = "follower", "submitter"
BEFORE, HALF, AFTER = "before", "half", "after"

# (step, moments, the highest count that a job of some seconds is sure to reach): see ``injected/strikes.py``.
Step = tuple[str, Sequence[str], int]
RELAYING: Sequence[Step] = (
    ("claim lease", (BEFORE, AFTER), 1),
    ("write cursor.json", (BEFORE, HALF, AFTER), 6),
    ("log_batch", (BEFORE, AFTER), 4),
    ("log_batch", (BEFORE, AFTER), 4),
    ("update_run", (BEFORE, AFTER), 1),
    ("set_tag", (BEFORE, AFTER), 1),
    ("ask poll", (BEFORE, AFTER), 4),
)
# The last second of a job, as its follower sees it: from its verdict to the end of its run.
ENDING: Sequence[Step] = (
    ("ask end", (BEFORE, AFTER), 1),
    ("log_artifacts", (BEFORE, HALF, AFTER), 1),
    ("log_tags", (BEFORE, AFTER), 1),
    ("set_terminated", (BEFORE, AFTER), 1),
    ("write finished", (BEFORE, HALF, AFTER), 1),
)
FIRST_AGENT: Sequence[Step] = (
    ("reservation", (AFTER,), 1),
    ("owner", (BEFORE, AFTER), 1),
    ("write announce.json", (BEFORE, HALF, AFTER), 1),
    ("write rendezvous.json", (BEFORE, HALF, AFTER), 1),
    ("write segment", (BEFORE, HALF, AFTER), 7),
    ("write segment", (BEFORE, HALF, AFTER), 7),
    ("write log", (BEFORE, AFTER), 4),
)
LAST_OF_FIRST_AGENT: Sequence[Step] = (
    ("write exit.json", (BEFORE, HALF, AFTER), 1),
    ("claim verdict", (BEFORE, AFTER), 1),
    ("write verdict.json", (BEFORE, HALF, AFTER), 1),
)
OTHER_AGENT: Sequence[Step] = (
    ("reservation", (AFTER,), 1),
    ("owner", (BEFORE, AFTER), 1),
    ("write announce.json", (BEFORE, HALF, AFTER), 1),
    ("write segment", (BEFORE, HALF, AFTER), 7),
    ("write exit.json", (BEFORE, HALF, AFTER), 1),
)
# All agents are started after these, or none was: see ``HALF_STARTED``.
SUBMITTING: Sequence[Step] = (
    ("create_run", (BEFORE, AFTER), 1),
    ("write spec.json", (BEFORE, HALF, AFTER), 1),
    ("write plan.json", (BEFORE, HALF), 1),
    ("write submitted.json", (BEFORE, HALF, AFTER), 1),
    ("spawn", (BEFORE, AFTER), 1),
)
# Those agents that came wait for the others, or nobody comes at all: minutes until that is certain.
HALF_STARTED: Sequence[Step] = (
    ("write plan.json", (AFTER,), 1),
    ("ask reserve", (AFTER,), 1),
    ("ask start", (AFTER,), 1),
)
# Between the verdict of attempt 1 and the start of attempt 2, as the follower of then sees it.
BETWEEN: Sequence[Step] = (
    ("claim begun", (BEFORE, AFTER), 1),
    ("write attempt.json", (BEFORE, HALF, AFTER), 1),
    ("ask reserve", (BEFORE, AFTER), 1),
    ("ask start", (BEFORE, AFTER), 2),
    ("write submitted.json", (BEFORE, HALF, AFTER), 1),
)

KINDS = (
    "follower",
    "agent",
    "mlflow run",
    "submitting",
    "follower and mlflow run",
    "follower, then the next one",
    "last second",
    "agent and follower",
    "by time",
    "agent, at its end",
    "retry",
    "spool removed",
    "node disk full",
    "logs removed",
    "share unmounted",
    "run deleted",
)
# (seconds at least, at most) that it lasts. ShareFailed comes after half a minute only of a share that says why it fails.
LASTS = {
    "spool removed": (0.0, 0.0),
    "node disk full": (0.5, 6.0),
    "logs removed": (0.0, 0.0),
    "share unmounted": (1.0, 15.0),
    "run deleted": (0.5, 8.0),
}
TRAINING = "training"
TRAINING_EVERY = 25


@dataclass(frozen=True)
class Fault:
    """A kill at a step.

    Attributes:
        id: from 0.
        role: the process that comes to the step.
        step: what it does there, the ``count``-th time.
        when: before, half-way or after.
        kills: roles of the processes that are killed then.
        after: the fault that must have struck before this process began, or None.
        attempt: of the job, if an agent comes to the step.
    """

    id: int
    role: str
    step: str
    when: str
    count: int
    kills: tuple[str, ...]
    after: int | None = None
    attempt: int = 1

    def __str__(self) -> str:
        victims = " and ".join(_called(victim) for victim in self.kills)
        of = "" if self.kills == (self.role,) else f" of {_called(self.role)}"
        when = "half-way through" if self.when == HALF else self.when
        return f"{victims} killed {when} {self.step}{f' {self.count}' if self.count > 1 else ''}{of}"


@dataclass(frozen=True)
class Timed:
    """A kill at a moment: so many seconds after the ranks have begun."""

    seconds: float
    kills: tuple[str, ...]

    def __str__(self) -> str:
        return f"{' and '.join(_called(victim) for victim in self.kills)} killed {self.seconds:.1f} s after the ranks' start"


@dataclass(frozen=True)
class Outage:
    """Something is taken away from a job.

    Attributes:
        what: one of ``LASTS``.
        seconds: after the ranks have begun.
        lasts: seconds until it is there again.
        kills: roles of the processes that are killed meanwhile.
    """

    what: str
    seconds: float
    lasts: float
    kills: tuple[str, ...] = ()

    def __str__(self) -> str:
        killed = f", and {' and '.join(_called(victim) for victim in self.kills)} killed" if self.kills else ""
        return f"{self.what} {self.seconds:.1f} s after the ranks' start, for {self.lasts:.1f} s{killed}"


@dataclass(frozen=True)
class Case:
    """One seed.

    Attributes:
        nodes: of the job, with one rank each.
        steps: that each rank trains.
        pause: seconds between them.
        all_ranks: whether each rank reports numbers of its own.
        again: whether some steps are reported twice, as after a restart from a checkpoint.
        attaches: how many ``batchai job attach`` run at once, the first so many seconds after the last kill.
        training: whether TensorFlow and Horovod train, instead of toy ranks.
        retries: of the job.
        jobs: how many there are at once, all in one follower.
        dies: the step at which a rank of the first attempt kills itself, or None.
    """

    seed: int
    kind: str
    nodes: int
    steps: int
    pause: float
    all_ranks: bool
    again: bool
    faults: tuple[Fault, ...]
    timed: Timed | None
    attaches: int
    attach_seconds: float
    training: bool = False
    retries: int = 0
    dies: int | None = None
    outage: Outage | None = None
    jobs: int = 1

    @property
    def kills_agents(self) -> bool:
        """Whether the job may fail."""
        return not self.retries and any(
            victim.startswith("agent-") for fault in (*self.faults, self.timed) if fault for victim in fault.kills
        )

    @property
    def kills_submitter(self) -> bool:
        """Whether ``mlflow run`` is meant to die."""
        return any(SUBMITTER in fault.kills for fault in (*self.faults, self.timed, self.outage) if fault)

    def __str__(self) -> str:
        rank = None if self.dies is None else f"a rank killed at its step {self.dies}"
        said = ", then ".join(str(fault) for fault in (rank, *self.faults, self.timed, self.outage) if fault)
        return f"{said}; attach{' twice' if self.attaches > 1 else ''} after {self.attach_seconds:.1f} s"

    def by_time(self) -> Case:
        """The same with a kill at a moment, for a seed whose step was never reached."""
        chance = random.Random(f"{self.seed} by time")
        victims = self.faults[0].kills if self.faults else (FOLLOWER,)
        return dataclasses.replace(self, faults=(), timed=Timed(chance.uniform(0.0, self.steps * self.pause), victims))


def case_of(seed: int) -> Case:
    """What a seed does: always the same."""
    chance = random.Random(seed)
    training = seed % TRAINING_EVERY == 0
    kind = KINDS[seed % len(KINDS)]
    nodes = 2 if training else chance.choice((2, 2, 3))
    faults: Sequence[Fault] = ()
    timed: Timed | None = None
    steps, pause = chance.randint(20, 40), chance.uniform(0.08, 0.16)
    if training:
        kind = TRAINING
        role, step, when = chance.choice(((FOLLOWER, "log_batch", AFTER), ("agent-1", "write segment", HALF)))
        both = (role, SUBMITTER) if role == FOLLOWER else (role, FOLLOWER)
        faults = [Fault(0, role, step, when, chance.randint(1, 2) if role == FOLLOWER else chance.randint(6, 9), both)]
    elif kind == "follower":
        faults = [_fault(chance, 0, FOLLOWER, RELAYING, (FOLLOWER,))]
    elif kind == "agent":
        faults = [_of_agent(chance, 0, nodes)]
    elif kind == "mlflow run":
        watched = chance.choice((FOLLOWER, "agent-0"))
        steps_of = RELAYING if watched == FOLLOWER else FIRST_AGENT
        faults = [_fault(chance, 0, watched, steps_of, (SUBMITTER,))]
    elif kind == "submitting":
        faults = [_fault(chance, 0, SUBMITTER, chance.choice((*(SUBMITTING,) * 4, HALF_STARTED)), (SUBMITTER,))]
    elif kind == "follower and mlflow run":
        watched = chance.choice((FOLLOWER, "agent-0", "agent-1"))
        steps_of = {FOLLOWER: RELAYING, "agent-0": FIRST_AGENT[2:], "agent-1": OTHER_AGENT[2:]}[watched]
        faults = [_fault(chance, 0, watched, steps_of, (FOLLOWER, SUBMITTER))]
    elif kind == "follower, then the next one":
        first = _fault(chance, 0, FOLLOWER, RELAYING[:4], (FOLLOWER,))
        second = _fault(chance, 1, FOLLOWER, (*RELAYING[:2], *ENDING), (FOLLOWER,))
        faults = [dataclasses.replace(first, count=1), dataclasses.replace(second, after=0, count=1)]
    elif kind == "last second":
        watched = chance.choice((FOLLOWER, FOLLOWER, "agent-0"))
        steps_of = ENDING if watched == FOLLOWER else LAST_OF_FIRST_AGENT
        kills = chance.choice(((FOLLOWER,), (FOLLOWER, SUBMITTER)))
        faults = [_fault(chance, 0, watched, steps_of, kills)]
    elif kind == "agent and follower":
        fault = _of_agent(chance, 0, nodes)
        faults = [dataclasses.replace(fault, kills=(fault.role, FOLLOWER))]
    elif kind == "by time":
        victims = chance.choice(
            ((FOLLOWER,), (SUBMITTER,), (FOLLOWER, SUBMITTER), ("agent-0",), ("agent-1", FOLLOWER, SUBMITTER))
        )
        timed = Timed(chance.uniform(0.0, steps * pause + 1.0), victims)
    elif kind == "retry":
        return _retry(chance, seed, nodes)
    elif kind in LASTS:
        return _outage(chance, seed, kind, nodes)
    else:
        faults = [_fault(chance, 0, "agent-0", LAST_OF_FIRST_AGENT, chance.choice((("agent-0",), ("agent-0", FOLLOWER))))]
    return Case(
        seed,
        kind,
        nodes,
        steps,
        pause,
        all_ranks=chance.random() < 0.5,
        again=chance.random() < 0.5,
        faults=tuple(faults),
        timed=timed,
        attaches=chance.choice((1, 1, 2)),
        attach_seconds=chance.choice((0.0, chance.uniform(0.0, 2.0), chance.uniform(2.0, 8.0))),
        training=training,
    )


def case_of_several(seed: int, jobs: int) -> Case:
    """What a seed does to a follower that has several jobs: it is killed at a step for any of them, in half the cases twice."""
    chance = random.Random(f"{seed} of {jobs}")
    first = _fault(chance, 0, FOLLOWER, (*RELAYING, *ENDING), (FOLLOWER,))
    faults = [dataclasses.replace(first, count=first.count * chance.randint(1, jobs))]
    if chance.random() < 0.5:
        second = _fault(chance, 1, FOLLOWER, (*RELAYING[:2], *ENDING), (FOLLOWER,))
        faults.append(dataclasses.replace(second, after=0, count=1))
    return Case(
        seed,
        f"follower of {jobs}",
        nodes=1,
        steps=chance.randint(20, 40),
        pause=chance.uniform(0.08, 0.16),
        all_ranks=chance.random() < 0.5,
        again=chance.random() < 0.5,
        faults=tuple(faults),
        timed=None,
        attaches=1,
        attach_seconds=chance.choice((0.0, chance.uniform(0.0, 8.0))),
        jobs=jobs,
    )


def _retry(chance: random.Random, seed: int, nodes: int) -> Case:
    """An agent or a rank of the first attempt is killed, and followers before the second one has begun."""
    faults: list[Fault] = []
    if by_rank := chance.random() < 0.5:
        victims = chance.choice(((FOLLOWER,), (FOLLOWER, SUBMITTER)))
    else:
        node = chance.randrange(nodes)
        agent = f"agent-{node}"
        victims = chance.choice(((agent,), (agent, FOLLOWER)))
        faults.append(Fault(0, agent, "write segment", chance.choice((BEFORE, HALF, AFTER)), chance.randint(3, 6), victims))
        victims = (FOLLOWER,)
    faults.append(_fault(chance, len(faults), FOLLOWER, BETWEEN, victims))
    return Case(
        seed,
        "retry",
        nodes,
        steps=chance.randint(20, 30),
        pause=chance.uniform(0.08, 0.12),
        all_ranks=chance.random() < 0.5,
        again=False,
        faults=tuple(faults),
        timed=None,
        attaches=chance.choice((1, 2)),
        attach_seconds=chance.uniform(0.0, 4.0),
        retries=1,
        dies=chance.randint(6, 15) if by_rank else None,
    )


def _outage(chance: random.Random, seed: int, kind: str, nodes: int) -> Case:
    """Something is taken away while ranks train, and is there again before the end or after it; some lose their follower too."""
    steps, pause = chance.randint(30, 60), chance.uniform(0.08, 0.16)
    kills = chance.choice(((), (), (FOLLOWER,), (FOLLOWER, SUBMITTER)))
    outage = Outage(kind, chance.uniform(0.0, steps * pause), chance.uniform(*LASTS[kind]), kills)
    return Case(
        seed,
        kind,
        nodes,
        steps,
        pause,
        all_ranks=chance.random() < 0.7,
        again=False,
        faults=(),
        timed=None,
        attaches=chance.choice((1, 1, 2)),
        attach_seconds=chance.uniform(0.0, 2.0),
        outage=outage,
    )


def _fault(chance: random.Random, number: int, role: str, steps: Sequence[Step], kills: tuple[str, ...]) -> Fault:
    step, moments, highest = chance.choice(steps)
    return Fault(number, role, step, chance.choice(moments), chance.randint(1, highest), kills)


def _of_agent(chance: random.Random, number: int, nodes: int) -> Fault:
    node = chance.randrange(nodes)
    steps = FIRST_AGENT if node == 0 else OTHER_AGENT
    return _fault(chance, number, f"agent-{node}", steps, (f"agent-{node}",))


def _called(role: str) -> str:
    return {SUBMITTER: "mlflow run"}.get(role, role.replace("-", " "))
