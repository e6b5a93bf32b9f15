"""Command lines: fill an MLproject's placeholders, and turn a script's arguments into run parameters.

MLflow puts shell-quoted values into an entry point's command, which fails where the project's author has quoted the
placeholder himself (``--note "{note}"``), and lets a value become shell text. Here a whole number is written out, and any other
``{note}`` becomes a reference to a variable, quoted as its place needs it, in a line that certainly runs no text.
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
    for parameter in parameters:
        name = base = PREFIX + re.sub(r"[^A-Za-z0-9_]", "_", parameter)
        number = 2
        while name in names.values():
            name, number = f"{base}_{number}", number + 1
        names[parameter] = name
    return names


def translate(
    template: str,
    variables: Mapping[str, str],
    source: str,
    numbers: Mapping[str, str] | None = None,
    extras: Collection[str] = (),
) -> str:
    """The shell line of a command template.

    Args:
        template: the MLproject's command: ``{name}`` placeholders, ``{{`` and ``}}`` for braces.
        variables: parameter -> variable.
        numbers: parameter -> its value, of those that were checked to be whole numbers.
        extras: parameters that the template doesn't know: ``--name value`` behind it, as MLflow has it.

    Raises:
        ProjectError: a placeholder without a parameter, or in a line that may run its value; or braces that don't match.
    """
    numbers = numbers or {}
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ProjectError(f"{source}: command: {error}; write {{{{ and }}}} for braces of the shell") from error
    marked = ""
    texts = {variables[name]: name for name in extras}
    for text, name, format_spec, conversion in pieces:
        marked += text
        if name is None:
            continue
        if format_spec or conversion or name not in variables or name in extras:
            known = ", ".join(f"{{{known}}}" for known in variables if known not in extras) or "none"
            raise ProjectError(
                f"{source}: command has the placeholder {{{name}}}, which is no parameter ({known});"
                " write {{ and }} for braces of the shell"
            )
        opened = _OPENED.search(_QUOTED.sub("", marked))
        if (before := _BEFORE.search(marked)) and not (opened and opened[0] == "'"):
            what = "$" if before[0].endswith("$") else "backslash"
            raise ProjectError(f"{source}: command has the placeholder {{{name}}} after a {what}; write it without the {what}")
        if name in numbers:
            number = numbers[name]
            marked += f"\0{number if re.fullmatch(r'[-+]?[0-9]+', number) else int(number)}\0"
        else:
            marked += f"\0{variables[name]}\0"
            texts[variables[name]] = name
    line = _QUOTED.sub(_referring, marked)
    if not texts:
        return line
    # Behind the last line, which may be a comment: then they are no words of the last command.
    words = [word for name in extras for word in (f"--{shlex.quote(name)}", f'"${{{variables[name]}}}"')]
    line = " ".join([line.rstrip() if extras else line, *words])
    last = _Line(line, texts, source, extras).last_words()
    if words and last[-len(words) :] != words:
        raise ProjectError(
            f"{source}: command ends in a comment or a backslash, so parameter '{next(iter(extras))}' has no place in it"
        )
    return line


# What takes the meaning of a placeholder behind it: a backslash that is none itself, a "$" that begins something.
_BEFORE = re.compile(r"(?<!\\)(?:\\\\)*(?:\\|(?<![\\$])\$)\Z")
# The quote that isn't closed, in what is left without those that are.
_OPENED = re.compile(r"\$'|['\"]")
# A value, as the shell quotes it; where a comment begins quotes mean nothing.
_QUOTED = re.compile(r"(?<![^\s;&|])#[^\n]*|'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.#?|(?:\$\w+)?\0[^\0]+\0[<>]?", re.DOTALL)
# A number that would be read as the end of a variable's name, or as a file descriptor.
_JOINED = re.compile(r"(\$\w+)\0([-+]?\d+)\0|\0(\d+)\0(?=[<>])", re.ASCII)


def _referring(found: re.Match[str]) -> str:
    """A piece of a line with numbers and references to variables in place of their marks, as one word or part of one."""
    text, first = found[0], found[0][0]
    if first not in "'#":
        text = _JOINED.sub(r'\1""\2\3', text)
    text = re.sub(r"\0([-+]?\d+)\0", r"\1", text)
    reference = {"'": "'\"${\\1}\"'", '"': "${\\1}", "#": "${\\1}"}.get(first, '"${\\1}"')
    return re.sub(r"\0(\w+)\0", reference, text)


_VARIABLE = r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\}|[0-9@*#?$!-])"
_LAST_ARGUMENT = re.compile(r"\$\{?_(?!\w)", re.ASCII)
# A command of plain words, without a variable and so without a text.
_OUTPUT = r"\$\([\w ./:+,%=@~-]*\)"
# Those that read neither a pipe nor a file.
_CONSTANT = re.compile(r"\$\((?:hostname|nproc|pwd|whoami|date(?: \+[\w.:%-]*)?)\)", re.ASCII)
_PIECE = rf"[^\x00-\x20'\"\\$`;&|<>()]|'[^']*'|\\.|{_VARIABLE}|{_OUTPUT}"
_WORD = re.compile(rf"(?:{_PIECE}|\"(?:[^\"\\$`]|\\.|{_VARIABLE}|{_OUTPUT})*\")+", re.ASCII | re.DOTALL)
_BLANKS = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_OPERATOR = re.compile(r"&&|\|\||\|&|[\n;&|]")
_REDIRECTION = re.compile(r"&>>?|\d*(?:>>|>\||>|<(?![<(&>]))", re.ASCII)
_COPIED = re.compile(r"\d*>&(?:\d+|-)(?=[ \t\n;&|)]|$)", re.ASCII)  # of any other word bash expands the value, too
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=", re.ASCII)
# A program or a script whose last part is there to read.
_PATH = re.compile(r"(\"?)(?!/dev/|/proc/)(?:~/|\$\w+/|\$\{\w+\}/)?[\w./][\w./+-]*\1", re.ASCII)
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


# They change what later words mean, or have a grammar of their own.
_UNPLAIN = _these(
    "alias enable hash builtin declare typeset local case esac select function coproc [[ if then elif else fi for"
    " while until do done"
)
_BUILTINS = _these(
    "[ test printf eval . source trap read mapfile readarray getopts let export readonly set unset wait bind compgen complete"
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


class _Line:
    """A shell line of which it is certain that it runs no text of some variables; anything else is refused.

    This is an allow-list, not bash's grammar. A line is made of words, quotes, ``$NAME``, the output of a plain command
    (``$(nproc)``), lists, pipes, and redirections to files; text stands among the arguments of a command that isn't known to
    evaluate them. Everything else is refused, harmless or not.

    Args:
        texts: variables that hold text -> their parameters.
        extras: parameters that nobody has declared.
    """

    def __init__(self, text: str, texts: Mapping[str, str], source: str, extras: Collection[str]) -> None:
        self._text = text
        self._at = 0
        self._source = source
        self._parameters = texts
        self._extras = extras
        self._texts = re.compile(rf"\b(?:{'|'.join(texts)})\b", re.ASCII)
        # Whether text may have gone into a pipe or a file, from where a command that follows could read it.
        self._flows = False

    def last_words(self) -> list[str]:
        """Check all commands; the words of the last one. Raises ProjectError: a text may be run."""
        if _LAST_ARGUMENT.search(self._text):
            raise self._error((), "in a line with $_")
        while True:
            words = self._command()
            if self._at == len(self._text):
                return words
            operator = self._take(_OPERATOR)
            if not operator:
                rest = self._text[self._at :].split("\n")[0][:12]
                raise self._error((), f"in a line that is more than plain commands, from {rest!r} on")
            self._flows = self._flows or operator in ("|", "|&")

    def _take(self, what: re.Pattern[str]) -> str:
        """Move over a text that comes next; "" if it doesn't."""
        match = what.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match[0] if match else ""

    def _error(self, words: Iterable[str], place: str) -> ProjectError:
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
            f"{self._source}: command has the placeholder {{{name}}} {place}; declare the parameter as int, or have a script of"
            f" the project read the environment variable {variable}"
        )

    def _command(self) -> list[str]:
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
                targets.append(self._take(_WORD))
                if not targets[-1]:
                    raise self._error((), f"in a line with '{operator}' that is followed by no file")
                writes = writes or ">" in operator
                continue
            word = self._take(_WORD).replace("\\\n", "")
            if not word:
                break
            if word in ("!", "time") and not (assignments or words or targets):
                continue
            (assignments if not words and _ASSIGNMENT.match(word) else words).append(word)
        every = [*assignments, *words, *targets]
        if self._flows and any("$(" in _CONSTANT.sub("", word) for word in every):
            raise self._error(every, "in a line with $(...), which may read it")
        self._assigned(assignments, words)
        if words:
            self._named(words, self._flows or self._has(every))
        self._flows = self._flows or (writes and self._has([*words, *targets]))
        return words

    def _has(self, words: Iterable[str]) -> bool:
        return any(self._texts.search(word) for word in words)

    def _assigned(self, assignments: Sequence[str], words: Sequence[str]) -> None:
        for assignment in assignments:
            name = assignment.partition("=")[0].rstrip("+")
            if self._has([assignment]) and (not words or _SPECIAL.fullmatch(name)):
                why = "which programs are found or run by" if words else "which stands alone: put a command behind it"
                raise self._error([assignment], f"in the value of {name}, {why}")

    def _named(self, words: Sequence[str], has_text: bool) -> None:
        """Check a command by its name, which must be there to read, and its arguments if text may reach it."""
        name = _base(words[0])
        if found := _UNPLAIN & {name, *(map(_base, words) if name == "command" else ())}:
            raise self._error(words, f"in a line with '{min(found)}'")
        if name != "[" and not self._is_path(words[0]):
            raise self._error(words, f"in a line with a command whose name is not written out plainly, {words[0]!r}")
        if has_text:
            self._arguments(words)

    def _is_path(self, word: str) -> bool:
        return bool(_PATH.fullmatch(word)) and not self._has([word])

    def _arguments(self, words: Sequence[str]) -> None:
        """Check a command that text may reach."""
        name, arguments = _base(words[0]), list(words[1:])
        if name in _PROGRAMS or name in _BUILTINS:
            raise self._error(words, f"in the words or the input of '{name}', which may run them")
        if name.endswith(_SCRIPTS):
            return
        if flags := interpreter_flags(name):
            while arguments and flags.fullmatch(arguments[0]):
                arguments.pop(0)
            if name.startswith(("python", "pypy")) and arguments[:1] == ["-m"] and arguments[1:2] not in _MODULES:
                arguments.pop(0)
            if not arguments or not self._is_path(arguments[0]):
                raise self._error(words, f"in the words or the input of '{name}' without the plain name of a script behind it")
            return
        if name in _STARTERS:
            while arguments and arguments[0][0].isdigit() and not self._has(arguments[:1]):
                arguments.pop(0)
            if arguments and self._is_path(arguments[0]):
                self._arguments(arguments)
                return
        inner = next((index for index, word in enumerate(words) if index and _is_known(_base(word))), None)
        if name in _STARTERS and (inner is None or self._has(words[:inner])):
            raise self._error(words, f"behind '{name}' without the plain name of a program before it")
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
