"""The results as a page: one table a part, what was not run said so."""

from __future__ import annotations

from typing import Any


def markdown(results: dict[str, Any]) -> str:
    """The whole page. A part that failed shows why; one that has no results isn't there."""
    machine = results["machine"]
    cards = ", ".join(f"{machine['gpus'].count(name)} x {name}" for name in dict.fromkeys(machine["gpus"])) or "no GPU"
    notes = [word for word in ("smoke", "cpu") if machine[word]]
    lines = [f"{cards}, {machine['cores']} cores" + (f" ({', '.join(notes)}: no figures for people)" if notes else ""), ""]
    tables = {"build": _build, "exact": _exact, "cifar": _cifar, "speed": _speed, "scaling": _scaling, "kill": _kill}
    for part, rows in tables.items():
        if part not in results:
            continue
        lines += [f"### {part} ({results[part].get('took', 0):.0f} s)", ""]
        if "error" in results[part]:
            lines += ["It failed: " + results[part]["error"].splitlines()[0], ""]
        else:
            lines += [*rows(results[part]), ""]
    if len(machine["gpus"]) == 1:
        lines += ["Not run, for want of a second GPU: NCCL between ranks, scaling, bus bandwidth, a rank killed in NCCL.", ""]
    return "\n".join(lines)


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        if abs(value) >= 100:
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"
    return str(value)


def _build(found: dict[str, Any]) -> list[str]:
    rows = [[name, found["seconds"][name], wheel["name"], wheel["bytes"]] for name, wheel in found["wheels"].items()]
    return [*_table(["Horovod for", "seconds", "wheel", "bytes"], rows), "", f"NCCL built in: {_version(found['nccl'])}."]


def _version(code: str) -> str:
    """NCCL's version from the number that nccl.h has for it: 22809 is 2.28.9."""
    number = int(code)
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}" if number else "none"


def _cifar(found: dict[str, Any]) -> list[str]:
    head = ["ranks", "exchange", "images a rank and step", "epochs", "validation accuracy", "test accuracy", "seconds"]
    keys = ["ranks", "exchange", "batch_size", "epochs", "val_accuracy", "test_accuracy", "seconds"]
    keys += ["images_per_second", "weights_equal"]
    rows = [[run[key] for key in keys] for run in found["runs"]]
    table = _table([*head, "images/s", "weights equal every epoch"], rows)
    return [f"Images: {found['images']}, {found['precision']}.", "", *table]


def _exact(found: dict[str, Any]) -> list[str]:
    rows = [[run["ranks"], run["recordings"], *run["differences"].values()] for run in found["runs"]]
    head = ["ranks", "recordings", *found["runs"][0]["differences"]]
    return ["The largest difference of a weight after recorded and after plain steps.", "", *_table(head, rows)]


def _speed(found: dict[str, Any]) -> list[str]:
    rows = [
        [row["network"], row["keras_on"], row["way"], row["bare"], row["backend"], row["backend"] / row["bare"]]
        for row in found["rows"]
    ]
    table = _table(["network", "Keras on", "way", "bare, images/s", "through the backend, images/s", "ratio"], rows)
    return [f"One rank, {found['batch_size']} images a step.", "", *table]


def _scaling(found: dict[str, Any]) -> list[str]:
    head = ["ranks", "images/s", "efficiency", "weights equal", "allreduce, GB/s of the bus"]
    rows = []
    for run in found["runs"]:
        several = run["ranks"] > 1
        equal = run["weights_equal"] if several else None
        bandwidth = run["bus_gigabytes_per_second"] if several else None
        rows.append([run["ranks"], run["images_per_second"], run["efficiency"] if several else None, equal, bandwidth])
    shape = f"{found['batch_size']} images of {found['pixels']}x{found['pixels']} a rank and step, {found['precision']}"
    return [f"ResNet-50, {shape}; allreduce of {found['megabytes']} MiB.", "", *_table(head, rows)]


def _kill(found: dict[str, Any]) -> list[str]:
    head = [
        "ranks",
        "exchange",
        "all ranks gone, s",
        "job failed, s",
        "exit code",
        "within 60 s",
        "MiB before",
        "during",
        "after",
    ]
    keys = ["ranks", "exchange", "all_ranks_gone_after", "job_failed_after", "exit_code", "within_limit"]
    keys += ["memory_before", "memory_during", "memory_after"]
    rows = [[*(run[key] for key in keys), run["nothing_left"]] for run in found["runs"]]
    return _table([*head, "nothing left"], rows)
