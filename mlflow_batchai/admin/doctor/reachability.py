"""Whether nodes reach each other, judged: a pure function from what all of them tried to a finding for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlflow_batchai.admin.doctor.findings import Answer, Finding, failed, named, ok
from mlflow_batchai.agent.meeting import NO_INTERFACE


def judge(answers: Mapping[str, Answer], findings: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, Finding]:
    """Which interface each node would use, or why none would do.

    Args:
        answers: node -> what ``examine.listen`` said.
        findings: node -> other node -> for each of that one's interfaces, empty if it was reached, else why not.
    """
    names = list(answers)
    candidates = {name: answers[name]["interfaces"] for name in names}
    broken = {name: failed(trouble) for name in names if (trouble := _unusable(answers[name]))}
    if len(names) == 1 and not broken:
        first = next(iter(candidates[names[0]]), None)
        return {names[0]: ok(f"no other node to reach{', ' + _shown(first) if first else ''}")}
    if len({answers[name]["machine"] for name in names}) == 1:
        return {name: broken.get(name) or ok("all nodes are on one machine: loopback") for name in names}
    found = {}
    for name in names:
        missed = _missed(name, answers[name], findings)
        best = min(missed, key=lambda index: len(missed[index]), default=None)
        if name in broken:
            found[name] = broken[name]
        elif best is None:
            found[name] = failed(f"it {NO_INTERFACE}")
        elif missed[best]:
            found[name] = failed(
                f"{_shown(candidates[name][best])} is not reached by {named(missed[best])}: open TCP ports"
                f" {answers[name]['ports']} on this node to the other nodes, or name"
                " another interface (networkInterface in the cluster document)"
            )
        else:
            found[name] = ok(f"{_shown(candidates[name][best])}, reached by all other nodes")
    return found


def _unusable(said: Answer) -> str:
    """Why the interface that the cluster document names can't be used on a node, or nothing."""
    return f"it {said['trouble']}: correct networkInterface in the cluster document" if said["trouble"] else ""


def _missed(name: str, said: Answer, findings: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[int, list[str]]:
    """Index of each of a node's interfaces -> the nodes that don't reach it, with the reason."""
    others = [other for other in findings if other != name]
    return {
        index: [f"{other} ({findings[other][name][index]})" for other in others if findings[other][name][index]]
        for index in range(len(said["interfaces"]))
    }


def _shown(interface: Answer) -> str:
    return f"{interface['name']} ({interface['address']})"
