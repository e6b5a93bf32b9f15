"""The randomized run: kill -9 at a step that the seed chooses, or an outage; reattach, and compare MLflow with what ranks say.

    python tests/faults/seeds.py 1-50 [--jobs 2] [--together 5]

One line per seed, and as the last one ``N passed, N failed``. A seed does the same each time, as far as its processes do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from seed_cases import Case, case_of, case_of_several
from seed_checks import is_relayed, wrong
from seed_world import HERE, ROOT, TRAIN, SeedWorld
from world import BIN, make_store

# Until a node that nobody can tell of is given up takes minutes; all else takes seconds.
PATIENCE_SECONDS, TRAINING_PATIENCE_SECONDS = 240.0, 420.0
LEAVE_SECONDS = 40.0
# MLflow checks a store's schema when it opens it, which two threads must not do at once.
_checking = threading.Lock()


class Result(NamedTuple):
    """How a seed ended.

    Attributes:
        said: what was killed.
        troubles: what was wrong.
        notes: what else is worth a word.
    """

    case: Case
    said: str
    troubles: list[str]
    notes: list[str]
    seconds: float
    folder: Path


def run_seed(seed: int, folder: Path, store: Path, together: int = 1) -> Result:
    """Run a seed in a new folder, which is removed if all is well."""
    begun = time.monotonic()
    case = case_of(seed) if together == 1 else case_of_several(seed, together)
    notes: list[str] = []
    troubles, reached = _run(case, folder, store, notes)
    if not reached and not troubles:
        notes.append(f"never came to: {case}")
        shutil.rmtree(folder)
        # Another folder: MLflow remembers a store by its address.
        case, folder = case.by_time(), folder.with_name(f"{folder.name}-by-time")
        troubles, reached = _run(case, folder, store, notes)
        if not reached:
            notes.append("nor was there anybody to kill at that moment")
    if not troubles:
        shutil.rmtree(folder)
    return Result(case, str(case), troubles, notes, time.monotonic() - begun, folder)


def _run(case: Case, folder: Path, store: Path, notes: list[str]) -> tuple[list[str], bool]:
    """What was wrong, and whether every fault has struck; ``notes`` gets what it did not strike."""
    world = SeedWorld(folder, store)
    try:
        world.prepare(case.outage.what if case.outage else "")
        world.arm([dataclasses.asdict(fault) for fault in case.faults])
        try:
            codes, reached = play(world, case) if case.jobs == 1 else play_several(world, case)
        except AssertionError as error:
            return [str(error), *(f"alive: {command}" for command in world.alive().values())], True
        for fault in case.faults if reached else ():
            notes += [f"no {victim} was there when {fault.step} came" for victim in world.spared(fault.id, fault.kills)]
        with _checking:
            return list(wrong(world, case, codes)), reached
    finally:
        world.close()


def play(world: SeedWorld, case: Case) -> tuple[dict[str, int | None], bool]:
    """Run, kill, reattach, and wait until nothing lives.

    Returns:
        Exit codes of the commands that were not killed; whether every fault has struck.
    """
    patience = TRAINING_PATIENCE_SECONDS if case.training else PATIENCE_SECONDS
    main = world.launch("run", BIN / "mlflow", "run", *_project(world, case), "--backend", "batchai")
    reached = True
    if case.outage:
        outage = case.outage
        world.wait(lambda: _ranks_began(world, case) or main.poll() is not None, what="the ranks' start")
        time.sleep(outage.seconds)
        world.take_away(outage.what)
        try:
            world.kill(outage.kills)
            time.sleep(outage.lasts)
        finally:
            world.give_back(outage.what)
    elif case.timed:
        world.wait(lambda: _ranks_began(world, case) or main.poll() is not None, what="the ranks' start")
        time.sleep(case.timed.seconds)
        reached = world.kill(case.timed.kills)
    else:
        # A command that ends by itself has not been struck: then neither will be what it waited for.
        last = max((fault.id for fault in case.faults if fault.after is None), default=0)
        world.wait(lambda: world.struck(last) or main.poll() is not None, patience, "the fault")
    time.sleep(case.attach_seconds)
    codes: dict[str, int | None] = {}
    if (name := world.tag("batchai.job")) is not None:
        attached = [
            (f"attach-{number}", world.launch(f"attach-{number}", BIN / "batchai", "job", "attach", name))
            for number in range(case.attaches)
        ]
        for called, process in attached:
            world.wait(lambda process=process: process.poll() is not None, patience, called)  # type: ignore[misc]
            codes[called] = process.returncode
        if world.tag("batchai.mac") and all("has no job folder" in world.said(called) for called, _ in attached):
            # Nothing of it had been started; the sentence says how to end its run.
            ending = world.launch("terminate", BIN / "batchai", "job", "terminate", name, "-y")
            world.wait(lambda: ending.poll() is not None, what="terminate")
            codes = {"terminate": ending.returncode}
    world.wait(lambda: main.poll() is not None, patience, "mlflow run")
    # Who waits for the results of a run that is deleted is told so, whether or not it comes back.
    if main.returncode != -9 and not (case.outage and case.outage.what == "run deleted"):
        codes["run"] = main.returncode
    with contextlib.suppress(AssertionError):  # told by the checks, with their names
        world.wait(lambda: not world.processes(), LEAVE_SECONDS, "the end of all processes")
    return codes, reached and all(world.struck(fault.id) for fault in case.faults)


def play_several(world: SeedWorld, case: Case) -> tuple[dict[str, int | None], bool]:
    """The same for several jobs, which nobody watches: who attaches to all of them brings them to their ends."""
    world.share.mkdir()
    (world.share / "rank.py").write_text(_train(world, case), encoding="utf-8")
    jobs = [f"job-{number}={world.document(f'job-{number}', case.nodes)}" for number in range(case.jobs)]
    words = [sys.executable, HERE / "crowd_submitter.py", world.root / "report", world.root, *jobs]
    submitting = world.launch("run", *words)
    world.wait(lambda: submitting.poll() is not None, PATIENCE_SECONDS, "the submits")
    reached = True
    if case.timed:
        world.wait(lambda: _ranks_began(world, case), what="the ranks' start")
        time.sleep(case.timed.seconds)
        reached = world.kill(case.timed.kills)
    else:
        world.wait(lambda: world.struck(0) or not world.unended(), PATIENCE_SECONDS, "the fault")
    time.sleep(case.attach_seconds)
    codes = {"run": submitting.returncode, "attach": _attach(world, "attach", "--all", "--wait")}
    # Of one that was killed just after it had ended a run the run is whole; `batchai gc` names such a job, and what to do.
    for folder in world.job_folders():
        if not is_relayed(folder):
            name = folder.parent.name
            codes[f"attach-{name}"] = _attach(world, f"attach-{name}", name)
    with contextlib.suppress(AssertionError):  # told by the checks, with their names
        world.wait(lambda: not world.processes(), LEAVE_SECONDS, "the end of all processes")
    return codes, reached and all(world.struck(fault.id) for fault in case.faults)


def _attach(world: SeedWorld, called: str, *words: str) -> int | None:
    process = world.launch(called, BIN / "batchai", "job", "attach", *words)
    world.wait(lambda: process.poll() is not None, PATIENCE_SECONDS, called)
    return process.returncode


def _ranks_began(world: SeedWorld, case: Case) -> bool:
    word = "Epoch 1/" if case.training else "begun"
    return any(
        word in path.read_text() for path in world.share.glob("workspaces/*/experiments/*/jobs/*/*/stdouterr/stdout.txt")
    )


def _project(world: SeedWorld, case: Case) -> list[str]:
    if case.training:
        values = {"data": "digits", "epochs": "6", "augment": "false"}
        return [str(ROOT / "projects" / "cifar_horovod"), *(f"-P{name}={value}" for name, value in values.items())]
    retries = f"retries: {case.retries}\n" if case.retries else ""
    return [
        str(
            world.project(
                _train(world, case), batchai=f"{retries}properties: {{nodeCount: {case.nodes}, horovodSettings: {{}}}}"
            )
        )
    ]


def _train(world: SeedWorld, case: Case) -> str:
    names = ("steps", "all_ranks", "again", "pause", "dies", "retries")
    return TRAIN.format(counts=str(world.counts), **{name: getattr(case, name) for name in names})


def told(result: Result) -> str:
    """A seed's line, and what was wrong below it."""
    how = "failed" if result.troubles else "passed"
    lines = [f"seed {result.case.seed} [{result.case.kind}]: {result.said}: {how}, {result.seconds:.0f} s"]
    lines += [f"    {note}" for note in result.notes]
    lines += [f"    {trouble}" for trouble in result.troubles]
    if result.troubles:
        together = f" TOGETHER={result.case.jobs}" if result.case.jobs > 1 else ""
        lines.append(f"    repeat it with: make faults SEEDS={result.case.seed}{together}    (kept: {result.folder})")
    return "\n".join(lines)


def run_seeds(seeds: Sequence[int], folder: Path, store: Path, jobs: int, together: int = 1) -> Iterator[Result]:
    """Run seeds below a folder, ``jobs`` at a time; their results in the order given."""
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run_seed, seed, folder / f"seed-{seed}", store, together) for seed in seeds]
        yield from (future.result() for future in running)


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    if not found:
        raise ValueError("no seeds")
    return found


def main() -> int:
    """The command; exit code 1 if any seed failed."""
    parser = argparse.ArgumentParser(
        description="Kill processes of jobs at steps that seeds choose, or take something away; reattach, and compare."
    )
    parser.add_argument("seeds", type=_seeds, help="1-50, 7, or 1-10,25")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    parser.add_argument("--together", type=int, default=1, help="how many jobs the follower has that is killed (default 1)")
    options = parser.parse_args()
    folder = Path(mkdtemp(prefix="batchai-seeds-"))
    counts: Counter[tuple[str, bool]] = Counter()
    for result in run_seeds(options.seeds, folder, make_store(folder / "mlflow.db"), options.jobs, options.together):
        counts[result.case.kind, not result.troubles] += 1
        print(told(result), flush=True)
    for kind in sorted({kind for kind, _ in counts}):
        print(f"{kind}: {counts[kind, True]} passed, {counts[kind, False]} failed")
    failed = sum(count for (_, passed), count in counts.items() if not passed)
    if not failed:
        shutil.rmtree(folder)
    print(f"{sum(counts.values()) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
