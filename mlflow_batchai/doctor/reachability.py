"""Whether nodes reach each other, judged: a pure function from what all of them tried to a finding for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlflow_batchai.doctor.findings import Answer, Finding, State, failed, named, ok
from mlflow_batchai.node import reach


def judge(answers: Mapping[str, Answer], findings: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, Finding]:
    """Which interface each node would use, or why none would do.

    Args:
        answers: node -> what ``examine.listen`` said.
        findings: node -> other node -> for each of that one's interfaces, empty if it was reached, else why not.
    """
    names = list(answers)
    candidates = [answers[name]["interfaces"] for name in names]
    broken = {name: failed(trouble) for name in names if (trouble := _unusable(answers[name]))}
    if len(names) == 1 and not broken:
        first = candidates[0][0] if candidates[0] else None
        return {names[0]: ok(f"no other node to reach{', ' + _shown(first) if first else ''}")}
    if len({answers[name]["machine"] for name in names}) == 1:
        return {name: broken.get(name) or ok("all nodes are on one machine: loopback") for name in names}
    table = {
        one: {other: findings[name][peer] for other, peer in enumerate(names) if peer != name} for one, name in enumerate(names)
    }
    chosen = reach.choose(candidates, table)
    found = {}
    for node, name in enumerate(names):
        trouble = _unreached(name, answers[name], findings)
        if trouble:
            found[name] = failed(trouble)
        elif chosen:
            found[name] = ok(f"{_shown(chosen[node])}, reached by all other nodes")
    if not chosen and not any(finding.state is State.FAILED for finding in found.values()):
        why = reach.explain(names, candidates, table, [answers[name]["ports"] for name in names])
        return {name: failed(why) for name in names}
    # Those without fault: which interface they would use follows from what the others get.
    return {name: found.get(name) or ok("reached by all other nodes") for name in names}


def _unusable(said: Answer) -> str:
    """Why the interface that the cluster document names can't be used on a node, or nothing."""
    return f"it {said['trouble']}: correct networkInterface in the cluster document" if said["trouble"] else ""


def _unreached(name: str, said: Answer, findings: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Why no interface of a node would do, or nothing."""
    if trouble := _unusable(said):
        return trouble
    if not said["interfaces"]:
        return "it has no network interface that other nodes could reach: connect it to their network"
    others = [other for other in findings if other != name]
    missed = [
        [(other, findings[other][name][index]) for other in others if findings[other][name][index]]
        for index in range(len(said["interfaces"]))
    ]
    best = min(range(len(missed)), key=lambda index: len(missed[index]))
    if not missed[best]:
        return ""
    who = named([f"{other} ({why})" for other, why in missed[best]])
    return (
        f"{_shown(said['interfaces'][best])} is not reached by {who}: open TCP ports {said['ports']} on this node to the"
        " other nodes, or name another interface (networkInterface in the cluster document)"
    )


def _shown(interface: Answer) -> str:
    return f"{interface['name']} ({interface['address']})"
