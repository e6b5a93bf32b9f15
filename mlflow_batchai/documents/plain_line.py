"""Plain shell lines: the few forms in which a variable's text is certainly handed on and never run.

This is an allow-list, not bash's grammar. A line that holds text is made of words, quotes, ``$NAME``, ``$(...)``, lists, pipes,
redirections to files, ``if``, ``for`` and ``while``; the text stands among the arguments of a command that isn't known to
evaluate them. Everything else is refused, harmless or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
_FORMAT = re.compile(r"['\"]?[%\w\\][^$\n]*(?:\n.*)?", re.DOTALL)
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


class NotPlainError(Exception):
    """A value might be evaluated.

    Attributes:
        variable: the one of those asked for whose value it is.
        place: where.
    """

    def __init__(self, variable: str, place: str) -> None:
        super().__init__(place)
        self.variable = variable
        self.place = place


def check(line: str, variables: Sequence[str]) -> None:
    """Raise NotPlainError unless a shell line certainly runs no text of these variables.

    Args:
        line: what ``bash -c`` is given.
        variables: those that hold text; without any, every line passes.
    """
    if variables and _LAST_ARGUMENT.search(line):
        raise NotPlainError(variables[0], "in a line with $_")
    try:
        if variables:
            _Line(line, variables).commands()
    except RecursionError:
        raise NotPlainError(variables[0], "in a line whose brackets are nested too deep") from None


class _Line:
    """Reads a line from left to right, and checks each command where it ends."""

    def __init__(self, text: str, variables: Sequence[str]) -> None:
        self._text = text
        self._at = 0
        self._variables = variables
        self._texts = re.compile(rf"\b(?:{'|'.join(variables)})\b", re.ASCII)
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

    def _unplain(self) -> NotPlainError:
        rest = self._text[self._at :].split("\n")[0][:12]
        return self._error(
            (), f"in a line that is more than plain commands, from {rest!r} on" if rest else "in a line without its end"
        )

    def _error(self, words: Iterable[str], place: str) -> NotPlainError:
        found = self._texts.search(" ".join(words)) or self._texts.search(self._text)
        return NotPlainError(found[0] if found else self._variables[0], place)

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
        form = _FORMS.get(name) if self._has(words) else None
        if name in _PROGRAMS or name in _BUILTINS or (form and not form.fullmatch("\n".join(arguments))):
            raise self._error(words, f"in the words or the input of '{name}', which may run them")
        if name.endswith(_SCRIPTS):
            return
        if flags := _flags(name):
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


def _flags(name: str) -> re.Pattern[str] | None:
    """The options that may stand before the script of an interpreter; None: the name is none's."""
    return next((flags for names, flags in _FLAGS.items() if names.fullmatch(name)), None)


def _is_known(name: str) -> bool:
    return name in _PROGRAMS or name in _STARTERS or name.endswith(_SCRIPTS) or _flags(name) is not None
