"""Regular expressions of ``metrics:`` rules, matched by RE2 in linear time.

Apart from `batchai`, since `job.metrics` compiles them as well, from a plan and without pydantic.
"""

from __future__ import annotations

from typing import Any

# What RE2 may take for a rule, so that its longest line costs a fraction of a second.
MOST_MEMORY = 1 << 20
# What Python's ``re`` has and RE2 lacks, as RE2's messages name it.
_LACKS = {
    **dict.fromkeys(("(?=", "(?!"), "RE2 has no look-ahead"),
    **dict.fromkeys(("(?<", "(?<=", "(?<!"), "RE2 has no look-behind"),
    **dict.fromkeys((f"\\{digit}" for digit in range(1, 10)), "RE2 has no back-references"),
    **dict.fromkeys(("++", "*+", "?+", "(?>"), "RE2 has no possessive or atomic groups"),
    "(?(": "RE2 has no conditions",
    "\\Z": "the end of the line is \\z, or $",
}


class RuleError(ValueError):
    """A rule can't be used; the message continues a sentence that begins with the rule."""


def compiled(regex: str, step: str | None) -> Any:
    """The pattern of a rule: like ``re.Pattern``.

    Args:
        step: the group that holds the step, if the rule names one.

    Raises:
        RuleError: RE2 doesn't take it, or it has no group for the value or the step.
    """
    import re2

    options = re2.Options()
    options.max_mem = MOST_MEMORY
    options.log_errors = False
    try:
        # Without its cache, whose patterns might have other limits.
        pattern = re2.compile(regex, options)
    except re2.error as error:
        raise RuleError(f"has a regex that {_refusal(error)}") from None
    except UnicodeError:
        raise RuleError("has a regex with half a character") from None
    groups = pattern.groupindex
    if step and step not in groups:
        raise RuleError(f"has the step {step!r}, but its regex has no group of that name")
    if not set(range(1, pattern.groups + 1)) - {groups.get(step or "step")}:
        raise RuleError("has a regex without a group for the value; put parentheses around the number")
    return pattern


def _refusal(error: Exception) -> str:
    message = error.args[0].decode("utf-8", "replace")
    what = message.partition(": ")[2]
    if message.startswith("pattern too large"):
        return f"needs more than {MOST_MEMORY >> 20} MiB in RE2: make it simpler, or its repetitions smaller"
    lacks = _LACKS.get(what, "")
    return f"RE2 does not take: {message}" + (f" ({lacks})" if lacks else "")
