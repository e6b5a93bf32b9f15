"""A build's log as a few words of progress, and as the lines that say why it failed."""

import re
from typing import Iterable, Iterator, List, Optional

_PERCENT = re.compile(r"\s*\[\s*(\d+)%\]")
_ERROR = re.compile(r"\berror\b|\bfatal\b|undefined reference|no space left|cannot find|killed", re.IGNORECASE)
_NOISE = re.compile(
    r"-Werror|\berror\.(cc|h|py)\b|^\s*(copying|adding|creating) |\bfound$"
    r"|subprocess-exited-with-error|This error originates|with status 'error'|^\s*ERROR: Failed (building|to build) ",
    re.IGNORECASE,
)


def progress_text(line: str) -> Optional[str]:
    """What one line of the log of ``pip wheel -v`` says about progress, or None: most lines say nothing."""
    match = _PERCENT.match(line)
    if match:
        return f"compiling {int(match.group(1))} %"
    if "Running CMake in" in line:
        return "configuring"
    if line.strip().startswith("installing to build/bdist"):
        return "packing the wheel"
    return None


def progress_texts(lines: Iterable[str]) -> Iterator[str]:
    """Progress worth telling: no text twice in a row, no percentage that falls (make -j mixes them)."""
    highest = -1
    last = None
    for line in lines:
        text = progress_text(line)
        match = _PERCENT.match(line)
        if text is None or text == last or (match and int(match.group(1)) <= highest):
            continue
        highest = int(match.group(1)) if match else highest
        last = text
        yield text


def error_lines(log: str, count: int = 15) -> List[str]:
    """The last ``count`` lines that speak of an error; if none does, the last ``count`` lines.

    CMake says what is wrong in the lines after its "CMake Error at ...": two of them count as speaking of it.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = []
    follow = 0
    for line in lines:
        if _ERROR.search(line) and not _NOISE.search(line):
            errors.append(line)
            follow = 2 if line.startswith("CMake Error") else 0
        elif follow:
            errors.append(line)
            follow -= 1
    return [line[:300] for line in (errors or lines)[-count:]]
