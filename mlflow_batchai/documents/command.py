"""Command lines: turn an MLproject's placeholders into shell variables, and a script's arguments into run parameters.

MLflow puts shell-quoted values into an entry point's command, which fails where the project's author has quoted the
placeholder himself (``--note "{note}"``). Here ``{note}`` becomes a reference to a variable, quoted as the place where it
stands needs it: values never become shell text.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import string
from collections.abc import Collection, Iterable, Mapping, Sequence

from mlflow_batchai.errors import ProjectError

PREFIX = "BATCHAI_PARAM_"


def variable_names(parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> variable, distinct even where two names differ only in characters that no variable may have."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for parameter in parameters:
        name = base = PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", parameter)
        number = 2
        while name in taken:
            name, number = f"{base}_{number}", number + 1
        taken.add(name)
        names[parameter] = name
    return names


def translate(
    template: str, variables: Mapping[str, str], source: str, numbers: Collection[str] = (), extras: Collection[str] = ()
) -> str:
    """The shell line of a command template.

    Args:
        template: the MLproject's command: ``{name}`` placeholders, ``{{`` and ``}}`` for braces.
        variables: parameter -> variable.
        source: names the entry point in messages.
        numbers: parameters that were checked to be numbers, and so may stand in arithmetic.
        extras: parameters that the template doesn't know: ``--name value`` behind it, as MLflow has it.

    Raises:
        ProjectError: a placeholder without a parameter, one where no value can be put, or braces that don't match.
    """
    if extras:
        template = template.rstrip()  # they stand on its last line, which may be a comment
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ProjectError(f"{source}: command: {error}; write {{{{ and }}}} for braces of the shell") from error
    quoting = _Quoting()
    parts: list[str] = []
    texts: dict[str, str] = {}
    for text, name, format_spec, conversion in pieces:
        parts.append(text)
        quoting.feed(text)
        if name is None:
            continue
        if format_spec or conversion or name not in variables or name in extras:
            known = ", ".join(f"{{{known}}}" for known in variables if known not in extras) or "none"
            raise ProjectError(
                f"{source}: command has the placeholder {{{name}}}, which is no parameter ({known});"
                " write {{ and }} for braces of the shell"
            )
        if fault := quoting.fault(variables[name]):
            raise ProjectError(f"{source}: command has the placeholder {{{name}}} {fault}")
        parts.append(quoting.reference(variables[name]))
        if name not in numbers:
            texts[variables[name]] = name
    if extras and not quoting.is_open:
        raise ProjectError(
            f"{source}: command ends in a comment, a quote or a backslash, so parameter '{next(iter(extras))}' has no place"
            " in it"
        )
    line = "".join(parts)
    if extras:
        line = " ".join([line, *(f'--{shlex.quote(name)} "${{{variables[name]}}}"' for name in extras)])
        texts.update((variables[name], name) for name in extras)
    _check(line, texts, source, extras)
    return line


class _Quoting:
    """Follows a shell line to know how a place is quoted: a stack, since ``"$(..."...")"`` nests."""

    def __init__(self) -> None:
        self._stack = ["plain"]
        self._escaped = False
        self._previous = ""
        self._angles = 0
        self._escape_in_backquotes = False
        self._here_document = False

    def feed(self, text: str) -> None:
        for character in text:
            if self._escaped:
                # It begins nothing: it stands there as a letter would.
                self._escaped, self._previous = False, "x"
                continue
            self._one(character)
            # So does the second of "$$".
            self._previous = "x" if character == "$" == self._previous else character

    def _one(self, character: str) -> None:
        stack, state = self._stack, self._stack[-1]
        if state == "comment":
            if character == "\n":
                stack.pop()
            if character != "`" or "backquote" not in stack:
                return
            # A backquote ends a comment, too, and then what it ends in any other place.
            stack.pop()
            state = stack[-1]
        if state == "single":
            if character == "'":
                stack.pop()
        elif character == "\\":
            self._escaped = True
            self._escape_in_backquotes |= "backquote" in stack
        elif state == "ansi":
            if character == "'":
                stack.pop()
        elif character == "(" and self._previous == "$":
            stack.append("plain")
        elif character == "`" and "backquote" in stack:
            del stack[len(stack) - 1 - stack[::-1].index("backquote") :]
            self._escape_in_backquotes = False
        elif character == "`":
            stack.append("backquote")
        elif character == '"' and state == "double":
            stack.pop()
        elif character == '"':
            stack.append("double")
        elif state == "double":
            return
        elif character == "'":
            stack.append("ansi" if self._previous == "$" else "single")
        elif character == "(":
            stack.append("arithmetic" if self._previous == "(" or state == "arithmetic" else "plain")
        elif character == ")" and state in ("plain", "arithmetic") and len(stack) > 1:
            stack.pop()
        elif character == "#" and (not self._previous or self._previous in " \t\n;&|(`"):
            stack.append("comment")
        elif character == "<":
            # Two begin a here-document; three a here-string: one word, quoted like any other.
            self._angles = self._angles + 1 if self._previous == "<" else 1
            self._here_document = self._angles == 2 or (self._here_document and self._angles != 3)

    @property
    def is_open(self) -> bool:
        """Whether another word of the command can stand at this place."""
        return self._stack == ["plain"] and not self._escaped

    def fault(self, variable: str) -> str | None:
        """Why no value can be put at this place, or None."""
        if self._here_document:
            return f"in a here-document; use ${variable} there"
        if self._escaped:
            return "after a backslash; drop the backslash"
        if self._previous == "$" and self._stack[-1] not in ("single", "ansi", "comment"):
            return "after a $; write it without the $"
        if self._escape_in_backquotes:
            return "in backquotes that hold a backslash; write $(...) instead"
        return None

    def reference(self, variable: str) -> str:
        """The text that gives the variable's value as one word, or part of one, at this place."""
        self._previous = "x"
        state = self._stack[-1]
        if state == "double":
            return f"${{{variable}}}"
        if state in ("single", "ansi"):
            opening = "$'" if state == "ansi" else "'"
            return f'\'"${{{variable}}}"{opening}'
        return f'"${{{variable}}}"'


_VARIABLE = r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\}|[0-9@*#?$!-])"
_LAST_ARGUMENT = re.compile(r"\$\{?_(?!\w)", re.ASCII)
_PIECE = re.compile(rf"[^\x00-\x20'\"\\$`;&|<>()]+|'[^']*'|\\.|{_VARIABLE}", re.ASCII | re.DOTALL)
_QUOTED_PIECE = re.compile(rf"[^\"\\$`]+|\\.|{_VARIABLE}", re.ASCII | re.DOTALL)
_BLANKS = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_OPERATOR = re.compile(r"&&|\|\||\|&|[\n;&|]")
_REDIRECTION = re.compile(r"&>>?|\d*(?:>>|>\||>|<(?![<(&>]))", re.ASCII)
_COPIED = re.compile(r"\d*>&(?:\d+|-)(?=[ \t\n;&|)]|$)", re.ASCII)  # of any other word bash expands the value, too
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=", re.ASCII)
# A program or a script whose last part is there to read.
_PATH = re.compile(r"(\"?)(?!/dev/|/proc/)(?:~/|\$\w+/|\$\{\w+\}/)?[\w./][\w./+-]*\1", re.ASCII)
# Arguments, one a line, with which these pass text on.
_TEST = re.compile(r"(?:!\n)?(?:-[nzdefs]\n.+|.+\n(?:!=|==?)\n.+)(?:\n\])?")
_FORMAT = re.compile(r"['\"]?[%\w\\<(\[{=:#.][^$\n]*(?:\n.*)?", re.DOTALL)
_FORMS = {"[": _TEST, "test": _TEST, "printf": _FORMAT, "for": re.compile(r"(?!)")}
# Interpreters, and options that may precede their scripts.
_FLAGS = {
    re.compile(r"(?:ba|da|a|k|z)?sh"): re.compile(r"-[euxvl]+"),
    re.compile(r"(?:python|pypy)[\d.]*"): re.compile(r"-[uOBEIsS]+"),
    re.compile(r"(?:perl|ruby|node|lua|php)[\d.]*|Rscript|julia|nodejs"): re.compile(r"-w"),
}
_MODULES = (["pdb"], ["timeit"], ["IPython"])  # modules of Python that run what they are given
_SCRIPTS = (".py", ".sh")  # what follows one is its own
# Variables by which bash, or what it starts, finds programs or runs text; and those that bash reads as numbers.
_SPECIAL = re.compile(
    r"BASH\w*|PS[0-4]|PROMPT_\w+|ENV|IFS|PATH|HOME|CDPATH|FPATH|LD_\w+|SHELL\w*|FCEDIT|HIST\w*|COMP_?\w*|DIRSTACK|FUNC\w+|GROUPS"
    r"|S?RANDOM|SECONDS|EPOCH\w+|OPT\w+|LINENO|E?UID|PPID|TMOUT|MAPFILE|EXECIGNORE|GLOBIGNORE|POSIXLY_CORRECT|PERL\w*|RUBY\w*"
    r"|NODE_\w+|PYTHON\w+|_?JAVA_\w*OPTIONS|EDITOR|VISUAL|\w*PAGER|LESS\w*|BROWSER|GIT_\w+|SSH_\w+|RSYNC_\w+|TAR_OPTIONS|MAKEFLAGS"
    r"|MFLAGS|R_\w+|LUA_\w+|AWK\w*|GCONV_PATH|OPENSSL_CONF",
    re.ASCII,
)


def _these(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RESERVED = _these("if then elif else fi while until do done ! { } time")
# They change what later words mean, or have a grammar of their own.
_UNPLAIN = _these("alias enable hash builtin declare typeset local case esac select function coproc [[")
_BUILTINS = _these(
    "eval . source trap read mapfile readarray getopts let export readonly set unset wait bind compgen complete"
    " compopt fc history jobs unalias"
)
# They run what their arguments or their input say, or start what these name.
_PROGRAMS = _these(
    "R octave matlab deno bun ipython guile racket sbcl clisp swipl ghc runghc elixir erl ocaml scala groovy gst"
    " pwsh powershell fish csh tcsh mksh rbash littler luajit awk gawk mawk nawk sed gsed tclsh wish expect m4 dc"
    " gnuplot make gmake bmake ninja git tar bsdtar rsync scp sftp find zip split xargs parallel su runuser sg newgrp"
    " ssh slogin rsh pdsh dsh clush ansible parallel-ssh pssh watch script scriptreplay at batch crontab bsub sbatch"
    " tmux screen xterm socat nc ncat netcat telnet vi vim view nvim ex ed emacs emacsclient nano gdb lldb sqlite3"
    " psql mysql strace ltrace entr start-stop-daemon chroot flock setarch cgexec"
)
# They start the program that comes next, or behind their options, where only one of _FLAGS is found.
_STARTERS = _these(
    "command exec env nice nohup timeout stdbuf setsid unbuffer linux32 linux64 setpriv unshare nsenter ionice"
    " taskset chrt numactl sudo doas systemd-run catchsegv"
)


def _check(line: str, texts: Mapping[str, str], source: str, extras: Collection[str]) -> None:
    """Raise ProjectError unless a shell line certainly runs no text of these variables.

    This is an allow-list, not bash's grammar: the few forms in which text is certainly handed on. A line that holds text
    is made of words, quotes, ``$NAME``, ``$(...)``, lists, pipes, redirections to files, ``if``, ``for`` and ``while``; the
    text stands among the arguments of a command that isn't known to evaluate them. Everything else is refused, harmless
    or not.

    Args:
        line: what ``bash -c`` is given.
        texts: variables that hold text -> their parameters; without any, every line passes.
        source: names the entry point in the message.
        extras: parameters that nobody has declared.
    """
    if not texts:
        return
    checked = _Line(line, texts, source, extras)
    if _LAST_ARGUMENT.search(line):
        raise checked.error((), "in a line with $_")
    try:
        checked.commands()
    except RecursionError:
        raise checked.error((), "in a line whose brackets are nested too deep") from None


class _Line:
    """Reads a line from left to right, and checks each command where it ends."""

    def __init__(self, text: str, texts: Mapping[str, str], source: str, extras: Collection[str]) -> None:
        self._text = text
        self._at = 0
        self._source = source
        self._parameters = texts
        self._extras = extras
        self._texts = re.compile(rf"\b(?:{'|'.join(texts)})\b", re.ASCII)
        # Whether text may have gone into a pipe or a file, from where a command that follows could read it.
        self._flows = False

    def commands(self, nested: bool = False) -> None:
        """Check the commands up to the end, or to the bracket that ends these."""
        while True:
            self._command()
            if nested and self._take(")"):
                return
            if self._at == len(self._text) and not nested:
                return
            operator = self._take(_OPERATOR)
            if not operator:
                raise self._unplain()
            self._flows = self._flows or operator in ("|", "|&")

    def _take(self, what: str | re.Pattern[str]) -> str:
        """Move over a text that comes next; "" if it doesn't."""
        if isinstance(what, str):
            found = what if self._text.startswith(what, self._at) else ""
        else:
            match = what.match(self._text, self._at)
            found = match[0] if match else ""
        self._at += len(found)
        return found

    def _unplain(self) -> ProjectError:
        rest = self._text[self._at :].split("\n")[0][:12]
        return self.error(
            (), f"in a line that is more than plain commands, from {rest!r} on" if rest else "in a line without its end"
        )

    def error(self, words: Iterable[str], place: str) -> ProjectError:
        """The refusal of a text: of the one in these words, or else of the line's first."""
        found = self._texts.search(" ".join(words)) or self._texts.search(self._text)
        variable = found[0] if found else next(iter(self._parameters))
        name = self._parameters[variable]
        if name in self._extras:
            return ProjectError(
                f"{self._source}: parameter '{name}' is not declared, and can't be put behind this command; declare it in the"
                " MLproject"
            )
        return ProjectError(
            f"{self._source}: command has the placeholder {{{name}}} {place}; declare the parameter as"
            f" int, or have the program read the environment variable {variable}"
        )

    def _command(self) -> None:
        assignments: list[str] = []
        words: list[str] = []
        targets: list[str] = []
        writes = False
        while True:
            self._take(_BLANKS)
            if self._take(_COPIED):
                continue
            if operator := self._take(_REDIRECTION):
                self._take(_BLANKS)
                targets.append(self._word())
                if not targets[-1]:
                    raise self._unplain()
                writes = writes or ">" in operator
                continue
            if not (assignments or words or targets) and not self._text.startswith("((", self._at) and self._take("("):
                self.commands(nested=True)
                continue
            word = self._word()
            if not word:
                break
            if word in _RESERVED and not (assignments or words or targets):
                continue
            (assignments if not words and _ASSIGNMENT.match(word) else words).append(word)
        self._assigned(assignments, words)
        if words:
            self._named(words, self._flows or self._has([*assignments, *words, *targets]))
        self._flows = self._flows or (writes and self._has([*words, *targets]))

    def _word(self) -> str:
        """The text of the word that comes next, with its quotes; "" if none does."""
        begun = self._at
        while self._take(_PIECE) or self._quoted() or self._substituted():
            pass
        return self._text[begun : self._at].replace("\\\n", "")

    def _quoted(self) -> bool:
        if not self._take('"'):
            return False
        while not self._take('"'):
            if not (self._take(_QUOTED_PIECE) or self._substituted()):
                raise self._unplain()
        return True

    def _substituted(self) -> bool:
        if self._text.startswith("$((", self._at) or not self._take("$("):
            return False
        self.commands(nested=True)
        return True

    def _has(self, words: Iterable[str]) -> bool:
        return any(self._texts.search(word) for word in words)

    def _assigned(self, assignments: Sequence[str], words: Sequence[str]) -> None:
        for assignment in assignments:
            name = assignment.partition("=")[0].rstrip("+")
            if self._has([assignment]) and (not words or _SPECIAL.fullmatch(name)):
                why = "which programs are found or run by" if words else "which stands alone: put a command behind it"
                raise self.error([assignment], f"in the value of {name}, {why}")

    def _named(self, words: Sequence[str], has_text: bool) -> None:
        """Check a command by its name, which must be there to read, and its arguments if text may reach it."""
        name = _base(words[0])
        if found := _UNPLAIN & {name, *(map(_base, words) if name == "command" else ())}:
            raise self.error(words, f"in a line with '{min(found)}'")
        if name != "[" and not self._is_path(words[0]):
            raise self.error(words, f"in a line with a command whose name is not written out plainly, {words[0]!r}")
        if has_text:
            self._arguments(words)

    def _is_path(self, word: str) -> bool:
        return bool(_PATH.fullmatch(word)) and not self._has([word])

    def _arguments(self, words: Sequence[str]) -> None:
        """Check a command that text may reach."""
        name, arguments = _base(words[0]), list(words[1:])
        form = _FORMS.get(name) if self._has(words) else None
        if name in _PROGRAMS or name in _BUILTINS or (form and not form.fullmatch("\n".join(arguments))):
            raise self.error(words, f"in the words or the input of '{name}', which may run them")
        if name.endswith(_SCRIPTS):
            return
        if flags := interpreter_flags(name):
            while arguments and flags.fullmatch(arguments[0]):
                arguments.pop(0)
            if name.startswith(("python", "pypy")) and arguments[:1] == ["-m"] and arguments[1:2] not in _MODULES:
                arguments.pop(0)
            if not arguments or not self._is_path(arguments[0]):
                raise self.error(words, f"in the words or the input of '{name}' without the plain name of a script behind it")
            return
        if name in _STARTERS:
            while arguments and arguments[0][0].isdigit() and not self._has(arguments[:1]):
                arguments.pop(0)
            if arguments and self._is_path(arguments[0]):
                self._arguments(arguments)
                return
        inner = next((index for index, word in enumerate(words) if index and _is_known(_base(word))), None)
        if name in _STARTERS and (inner is None or self._has(words[:inner])):
            raise self.error(words, f"behind '{name}' without the plain name of a program before it")
        if inner is not None:
            self._arguments(words[inner:])


def _base(word: str) -> str:
    """A word without quotes, or the last part of a path."""
    text = re.sub(r"['\"\\]", "", word)
    return text.rpartition("/")[2] or text


def interpreter_flags(name: str) -> re.Pattern[str] | None:
    """The options that may stand before the script of an interpreter; None: the name is none's."""
    return next((flags for names, flags in _FLAGS.items() if names.fullmatch(name)), None)


def _is_known(name: str) -> bool:
    return name in _PROGRAMS or name in _STARTERS or name.endswith(_SCRIPTS) or interpreter_flags(name) is not None


# MLflow 3 (``mlflow/utils/validation.py``): what a parameter's name may hold, and how long name and value may be.
UNFIT = re.compile(r"[^/\w.\- :]")
LONGEST_NAME, LONGEST_VALUE = 250, 6000

WHOLE = "commandLineArgs"

# Shell text: what ends a command, blanks, and words, of which quotes, $(...) and `...` are parts.
_ARGUMENT_PIECE = re.compile(
    r"""(?P<end> \d*[<>] | [;&|()\#] | \s*\n )
    | \s+
    | (?P<word> (?: \\. | '[^']*' | "(?:\\.|[^"\\])*" | \$\([^()]*\) | `[^`]*` | \$(?!\() | [^\s\\'"`;&|()<>$] )+ )""",
    re.VERBOSE | re.DOTALL,
)
_NEGATIVE = re.compile(r"-\.?\d")


def parameters(text: str) -> dict[str, str]:
    """Parameter -> value of a line of arguments: ``--lr 0.1``, ``--lr=0.1``, ``-x 3``, flags (``true``), and others in their
    order (``arg1``, ``arg2``, ...).

    Variables stay as they are written. A name that is given several times has all values, joined. What comes behind the first
    ``;``, ``|`` or redirection is no argument. A line that can't be taken apart is one parameter, ``commandLineArgs``.
    """
    words = _argument_words(text)
    if words is None:
        return {WHOLE: text.strip()[:LONGEST_VALUE]}
    found: dict[str, list[str]] = {}
    positional, only_positional = 0, False
    while words:
        word = words.pop(0)
        if word == "--" and not only_positional:
            only_positional = True
        elif only_positional or not word.startswith("-") or word == "-" or _NEGATIVE.match(word):
            positional += 1
            found.setdefault(f"arg{positional}", []).append(word)
        else:
            name, equals, value = word.lstrip("-").partition("=")
            if not equals:
                value = words.pop(0) if words and (not words[0].startswith("-") or _NEGATIVE.match(words[0])) else "true"
            found.setdefault(_fit(name), []).append(value)
    return {name: ", ".join(values)[:LONGEST_VALUE] for name, values in found.items()}


def _argument_words(text: str) -> list[str] | None:
    """The words of the first command in a line of shell text, without their quotes; None if unknown."""
    words: list[str] = []
    position = 0
    # Lines may be continued.
    text = text.strip().replace("\\\n", " ")
    while position < len(text):
        piece = _ARGUMENT_PIECE.match(text, position)
        if piece is None:
            return None
        if piece["end"]:
            break
        if piece["word"]:
            words.append(_unquoted(piece["word"]))
        position = piece.end()
    return words


def _unquoted(word: str) -> str:
    """A word without its quotes; one with a command in it stays as it is."""
    if "$(" in word or "`" in word:
        return word
    return "".join(shlex.split(word))


def _fit(name: str) -> str:
    """A name that MLflow takes: as a path it must be one already, and lead nowhere else."""
    name = UNFIT.sub("_", name)[:LONGEST_NAME] or "_"
    if name != posixpath.normpath(name) or name == "." or name.startswith(("/", "..")):
        name = name.replace("/", "_").strip(".") or "_"
    return name
