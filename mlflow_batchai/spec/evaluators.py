"""Where a shell line has the text of a variable evaluated: by bash itself, or by a program that takes programs.

A value may be (part of) an argument of a plainly named command that only passes it on, the value of a variable that nothing
evaluates, a pattern, or where output goes. Everything else is refused, and so is what can't be followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mlflow_batchai.spec.bash import (
    EXPANSION,
    POSITIONAL,
    Assignment,
    Command,
    Script,
    UnknownSyntaxError,
    Word,
    commands,
    parse,
)

# Variables by which bash, or what it starts, finds programs, or runs text; and those that bash reads as numbers.
_SPECIAL = re.compile(
    r"BASH\w*|PS[0-4]|PROMPT_\w+|ENV|IFS|PATH|CDPATH|FPATH|LD_\w+|SHELL\w*|FCEDIT|HIST\w*|COMP_?\w*|DIRSTACK|FUNC\w+|GROUPS"
    r"|RANDOM|SRANDOM|SECONDS|EPOCH\w+|OPT\w+|LINENO|E?UID|PPID|TMOUT|MAPFILE|EXECIGNORE|GLOBIGNORE|POSIXLY_CORRECT"
    r"|PERL5\w*|PERLLIB|RUBY\w+|NODE_\w+|PYTHON(?:STARTUP|HOME|BREAKPOINT|INSPECT|WARNINGS)|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS"
    r"|EDITOR|VISUAL|PAGER|\w+_PAGER|LESS\w+|BROWSER|GIT_\w+|SSH_ASKPASS|RSYNC_\w+|TAR_OPTIONS|MAKEFLAGS|MFLAGS"
    r"|R_PROFILE\w*|LUA_\w+|AWK\w*|GCONV_PATH|OPENSSL_CONF",
    re.ASCII,
)


_LONG = frozenset(
    ["rcfile", "init-file", "norc", "noprofile", "login", "posix", "restricted", "verbose", "noediting", "debugger"]
)


def _these(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHELLS = _these("sh bash rbash dash ash ksh ksh93 mksh zsh fish csh tcsh busybox")
# Programs that take a program: options that it follows (those of one letter also in clusters such as -ne), and after "/" others
# that take a word. Without such an option, and without a file, they read one from standard input.
_INTERPRETERS = {
    r"(?:python|pypy)[\d.]*|ipython\d*": "c / W X",
    r"perl[\d.]*": "e E M m I",
    r"ruby[\d.]*": "e r I / C",
    r"node|nodejs|bun": "e p r eval print require import loader",
    r"deno": "e eval",
    r"lua[\d.]*|luajit": "e l",
    r"php[\d.]*": "r R B E d / c z",
    r"R|Rscript|littler|r": "e / g",
    r"julia": "e E L eval print load / p t J C",
    r"octave(?:-cli)?": "eval",
    r"matlab": "r batch",
    r"guile[\d.]*|racket|sbcl|clisp|swipl|ghc|runghc|elixir|erl|ocaml|scala|groovy|gst": "c e g l x eval load",
    r"pwsh|powershell": "c Command EncodedCommand",
}


class _Language(NamedTuple):
    """Options of an interpreter: those that a program follows, and others that take a word."""

    programs: frozenset[str]
    words: frozenset[str]


_LANGUAGES = [
    (re.compile(names), _Language(*(frozenset(part.split()) for part in f"{options} / ".split("/")[:2])))
    for names, options in _INTERPRETERS.items()
]
# Programs that evaluate their arguments, or hand them to a shell.
_EVALUATORS = _these(
    "eval alias bind compgen complete compopt enable fc getopts history jobs let mapfile read readarray trap unset unalias"
    " builtin su runuser sg newgrp ssh slogin rsh pdsh dsh clush ansible parallel parallel-ssh pssh watch script scriptreplay"
    " at batch crontab bsub tmux screen xterm socat nc ncat netcat telnet expect tclsh wish make gmake bmake ninja vi vim view"
    " nvim ex ed emacs emacsclient nano gdb lldb sqlite3 psql mysql m4 dc gnuplot strace ltrace entr start-stop-daemon"
)
# Programs that do so with what follows some of their options only.
_OPTIONS = {
    "git": "-c --config --config-env -x --exec --exec-path -u --upload-pack --receive-pack -O --open-files-in-pager"
    " foreach run filter-branch alias --extcmd --ext-diff",
    "tar": "--checkpoint-action --to-command -I --use-compress-program -F --info-script --new-volume-script --rsh-command",
    "bsdtar": "--use-compress-program",
    "rsync": "-e --rsh --rsync-path",
    "scp": "-S -o",
    "sftp": "-S -o -D",
    "find": "-exec -execdir -ok -okdir",
    "zip": "-TT --unzip-command",
    "sort": "--compress-program",
    "split": "--filter",
    "flock": "-c --command",
    "env": "-S --split-string",
    "sbatch": "--wrap",
    "srun": "--prolog --epilog --task-prolog --task-epilog",
    "wget": "--use-askpass",
    "wait": "-p",
    "hash": "-p",
}
# They start the program that their arguments name: letters of options that take a word, and how many words precede the name.
_PLAIN = "command nohup setsid time unbuffer catchsegv setarch linux32 linux64 setpriv unshare nsenter"
_STARTERS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(_these(_PLAIN), ("", 0)),
    "exec": ("a", 0),
    "env": ("uC", 0),
    "nice": ("n", 0),
    "timeout": ("sk", 1),
    "stdbuf": ("ioe", 0),
    "ionice": ("cnpPu", 0),
    "taskset": ("p", 1),
    "chrt": ("TPD", 1),
    "chroot": ("", 1),
    "numactl": ("iNmCP", 0),
    "sudo": ("ugphCrtTUDR", 0),
    "doas": ("uC", 0),
    "xargs": ("adEeIiLlnPs", 0),
    "systemd-run": ("pEHMu", 0),
    "cgexec": ("g", 0),
}
_DECLARING = ("export", "readonly", "local", "declare", "typeset")
_NAMES = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_UNARY = re.compile(r"-[a-zA-Z]")
_BINARY = frozenset(["=", "==", "!=", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef"])
_ARITHMETIC = frozenset(["-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-v", "-R"])

_IN_SCRIPT = "use the value in the script instead"


class EvaluatedError(Exception):
    """A value would be evaluated.

    Attributes:
        variable: the one of those asked for whose value it is.
        place: where, and what to do instead.
    """

    def __init__(self, variable: str, place: str) -> None:
        super().__init__(place)
        self.variable = variable
        self.place = place


def check(line: str, variables: Iterable[str]) -> None:
    """Raise EvaluatedError if a shell line has the text of one of these variables evaluated, or can't be followed.

    Args:
        line: what ``bash -c`` is given.
        variables: those that hold text.
    """
    origins = {name: name for name in variables}
    if origins:
        _check(line, {**origins, POSITIONAL: next(iter(origins))}, ())


def _check(line: str, origins: dict[str, str], before: tuple[str, ...]) -> None:
    """The same, with what each variable's value comes from.

    Args:
        before: texts that this one lies in.
    """
    try:
        script = parse(line)
    except (UnknownSyntaxError, RecursionError) as error:
        raise EvaluatedError(
            next(iter(origins.values())), f"in a command that can't be followed ({error}); {_IN_SCRIPT}"
        ) from None
    _Check(script, origins, (*before, line)).run()


class _Check:
    """One text. ``origins`` gets what is assigned in it, too."""

    def __init__(self, script: Script, origins: dict[str, str], texts: tuple[str, ...]) -> None:
        self._script = script
        self._texts = texts
        self._origins = origins
        self._commands = list(commands(script.pipelines))

    def run(self) -> None:
        self._spread()
        for assignment in self._assignments():
            self._assignment(assignment)
        self._refuse(
            self._script.arithmetic,
            "in arithmetic, a subscript or an offset, where bash would evaluate its text; declare the parameter as int, or "
            + _IN_SCRIPT,
        )
        self._refuse(self._script.indirect, "where bash takes it for a variable's name or a prompt; " + _IN_SCRIPT)
        self._numbers()
        for command in self._commands:
            self._command(command)
        self._pipelines(self._script.pipelines, set())

    def _numbers(self) -> None:
        """Of a variable that is declared to be a number, or another one's name, bash evaluates all that it is given."""
        for name in {found for command in self._commands for found in _declared(command, "in")}:
            for made in self._assignments():
                if made.name == name:
                    named = set(_NAMES.findall(made.value.text.partition("=")[2] or made.value.text))
                    self._refuse(made.value.names | named, f"as the value of {name}, which bash evaluates; {_IN_SCRIPT}")

    def _refuse(self, names: Iterable[str], place: str) -> None:
        for name in sorted(names):
            if name in self._origins:
                raise EvaluatedError(self._origins[name], place)

    def _assignments(self) -> list[Assignment]:
        found = [*self._script.loops, *self._script.assigned]
        for command in self._commands:
            found += command.assignments
            if command.words and (command.words[0].literal in _DECLARING or command.words[0].literal in _STARTERS):
                found += [made for word in command.words[1:] if (made := _assigned(word))]
        return found

    def _spread(self) -> None:
        """Variables that are given such a value have one from then on."""
        for command in self._commands:
            for word in _read_into(command):
                self._origins.setdefault(word, self._origins[POSITIONAL])
        known = -1
        while known != len(self._origins):
            known = len(self._origins)
            for assignment in self._assignments():
                if found := self._found(assignment.value):
                    self._origins.setdefault(assignment.name, self._origins[found])

    def _found(self, word: Word) -> str | None:
        """The first variable with such a value that goes into a word."""
        return min((name for name in word.names if name in self._origins), default=None)

    def _assignment(self, assignment: Assignment) -> None:
        if _SPECIAL.fullmatch(assignment.name):
            self._refuse(
                assignment.value.names,
                f"as the value of {assignment.name}, by which programs are found or run; give the variable another name",
            )

    # Commands.

    def _command(self, command: Command) -> None:
        words = command.words
        if not words:
            return
        if words[0].text == "[[":
            self._compared(words)
            return
        name = _name_of(words[0])
        if name is None or self._found(words[0]):
            place = "as, or after, a command's name that only running it tells; write the name itself"
            self._refuse({name for word in words for name in word.names}, place)
        else:
            self._named(name, words)

    def _named(self, name: str, words: Sequence[Word]) -> None:
        """A command and its words, the name the first."""
        rest, text = words[1:], words[0].text
        is_own = "/" in text and not text.startswith("/")
        if rule := self._rule(name):
            rule(name, words)
        elif name in ("alias", "enable"):
            self._refuse(self._origins, f"in a line with {name}, which changes what names of commands mean; {_IN_SCRIPT}")
        elif name in _EVALUATORS and not is_own:
            place = f"in the words of {name}, which evaluates them; {_IN_SCRIPT}"
            self._refuse_words(rest, place)
            if name == "let":
                self._refuse({found for word in rest for found in _NAMES.findall(word.text)}, place)
            if name in ("eval", "trap") and all(word.literal is not None for word in rest):
                self._inner(" ".join(str(word.literal) for word in (rest if name == "eval" else rest[:1])))
        if name in _OPTIONS:
            self._after_options(name, rest)
        if name in _STARTERS:
            self._started(name, rest)
        else:
            self._hidden(rest)

    def _rule(self, name: str) -> Callable[[str, Sequence[Word]], None] | None:
        if name in _SHELLS:
            return self._shell
        if name in _DECLARING:
            return self._declaring
        if name in ("awk", "gawk", "mawk", "nawk", "sed", "gsed"):
            return self._filter
        if _language(name):
            return self._language
        return {
            "printf": self._printf,
            "test": self._tested,
            "[": self._tested,
            "source": self._sourced,
            ".": self._sourced,
            "set": self._set,
        }.get(name)

    def _refuse_words(self, words: Iterable[Word], place: str) -> None:
        for word in words:
            self._refuse(word.names, place)

    def _started(self, name: str, words: Sequence[Word]) -> None:
        """What a command that starts another one is given."""
        letters, before = _STARTERS[name]
        rest = list(words)
        while rest:
            text = rest[0].text
            if text.startswith("-") and len(text) > 1:
                # A long option's own word can't be told from a name: what follows is looked through for shells.
                taken = 2 if text[-1] in letters and not text.startswith("--") else 1
                self._refuse_split(rest[:taken], name)
                rest = rest[taken:]
                continue
            self._refuse_split(rest[:1], name)
            if name in ("env", "sudo") and _assigned(rest[0]):
                rest = rest[1:]
            elif before:
                before, rest = before - 1, rest[1:]
            else:
                break
        if rest:
            self._command(Command(rest))
            self._hidden(rest[1:])

    def _refuse_split(self, words: Iterable[Word], name: str) -> None:
        self._refuse_words(
            (word for word in words if not word.is_quoted),
            f"without quotes among the arguments of {name}, where a part of it may become a command; put quotes around it",
        )

    def _hidden(self, words: Sequence[Word]) -> None:
        """Shells and languages that a command is told to start, with a text of a program."""
        for index, word in enumerate(words):
            text = word.literal
            if not text:
                continue
            name = text.rpartition("/")[2]
            program = _program_of(name, words[index + 1 :])
            if program is not None:
                self._program(name, program)

    def _program(self, name: str, word: Word) -> None:
        place = f"in the text of a program of {name}; "
        if name in _SHELLS:
            place = f"in the text of another shell; pass it behind that text: {name} -c '... \"$1\"' _ {{parameter}}; or "
        self._refuse_words([word], place + _IN_SCRIPT)
        if name in _SHELLS and word.literal is not None:
            self._inner(word.literal)

    def _inner(self, text: str) -> None:
        """A text that a shell runs, with the same variables."""
        if len(self._texts) < 5:
            _check(text, self._origins, self._texts)
        else:
            self._refuse(self._origins, f"in a line of shells in shells; {_IN_SCRIPT}")

    def _shell(self, name: str, words: Sequence[Word]) -> None:
        program = _program_of(name, words[1:])
        if program is not None:
            self._program(name, program)
            if program is not words[-1]:
                before = words[1 : list(map(id, words)).index(id(program))]
                self._refuse_words(before, f"among the options of {name}; {_IN_SCRIPT}")
            return
        for word in words[1:]:
            if not word.text.startswith(("-", "+")) and _name_of(word) is not None and not self._found(word):
                return
            # What isn't a value may be an option all the same, after which a text is one.
            self._refuse_words([word], f"where {name} takes its options or its script; write the script's name there")

    def _language(self, name: str, words: Sequence[Word]) -> None:
        program = _program_of(name, words[1:])
        if program is not None:
            self._program(name, program)

    def _filter(self, name: str, words: Sequence[Word]) -> None:
        """awk and sed: the first argument is a program, unless an option has it."""
        self._refuse_split(words, name)
        place = f"in a program of {name}; {_IN_SCRIPT}"
        values, programs = ("l", "ef") if "sed" in name else ("Fv", "efEil")
        rest, given = list(words[1:]), False
        while rest and rest[0].text.startswith("-") and rest[0].text != "-":
            word = rest.pop(0)
            text = word.text
            if text == "--":
                break
            if text.startswith("--"):
                given = given or text.startswith(("--expression", "--file", "--source", "--exec"))
                self._refuse_words([word] if "=" in text else [word, *rest[:1]], place)
                rest = rest[0 if "=" in text or not given else 1 :]
                continue
            letter = next((letter for letter in text[1:] if letter in values + programs or not letter.isalnum()), "")
            following = [rest.pop(0)] if text.endswith(letter) and letter and letter.isalnum() and rest else []
            given = given or letter in programs[:3]
            if letter == "v" and _assigned(Word(following[0].text if following else text.partition("v")[2])):
                continue
            if letter != "F":
                self._refuse_words([word, *following], place)
        if not given:
            self._refuse_words(rest[:1], place)

    def _declaring(self, name: str, words: Sequence[Word]) -> None:
        """What declares a variable takes the value of an array apart, quoted or not."""
        arrays = {found for command in self._commands for found in _declared(command, "aA")}
        arrays |= {made.name for made in self._assignments() if made.value.elements is not None}
        for word in words[1:]:
            made = _assigned(word)
            if not made or made.name in arrays:
                self._refuse(word.names, f"in the words of {name}, which evaluates them; write NAME=VALUE without {name}")

    def _printf(self, name: str, words: Sequence[Word]) -> None:
        first = words[1] if len(words) > 1 else None
        if first is None:
            return
        text = first.literal
        if text == "--" or (first.text and first.text[0] not in ("-", EXPANSION)):
            return
        place = "in the words of printf, whose -v takes a name that bash evaluates; write the format first: printf '%s' ..."
        self._refuse_words(words[1:], place)

    def _tested(self, name: str, words: Sequence[Word]) -> None:
        """``[ ... ]``: operators must be there to read, or a value could become one."""
        rest = list(words[1:-1] if name == "[" else words[1:])
        place = f"in a test whose form only running it tells; write {name} -n, -z, or with = between two quoted values"
        if any(not word.is_quoted for word in rest):
            self._refuse_words(rest, place)
        while len(rest) > 1 and rest[0].literal == "!":
            rest.pop(0)
        texts = [word.literal for word in rest]
        if len(rest) == 1:
            return
        if len(rest) == 2 and texts[0] and _UNARY.fullmatch(texts[0]) and texts[0] not in _ARITHMETIC:
            return
        if len(rest) == 3 and texts[1] in _BINARY:
            return
        self._refuse_words(rest, place)

    def _compared(self, words: Sequence[Word]) -> None:
        if not any(word.literal in _ARITHMETIC for word in words):
            return
        place = "in a numeric test of bash, which evaluates it; declare the parameter as int"
        self._refuse_words(words, place)
        self._refuse({name for word in words for name in _NAMES.findall(word.text)}, place)

    def _sourced(self, name: str, words: Sequence[Word]) -> None:
        if len(words) > 1 and (words[1].literal is None or words[1].literal.startswith("-")):
            self._refuse_words(
                words[1:], f"in the words of '{name}', which runs a file of that name; write the file's name there"
            )

    def _set(self, name: str, words: Sequence[Word]) -> None:
        if len(words) > 1 and words[1].literal != "--":
            self._refuse_words(words[1:], "in the words of set, which may take it for an option; write set -- first")

    def _after_options(self, name: str, words: Sequence[Word]) -> None:
        self._refuse_split(words, name)
        place = f"where {name} takes a command; {_IN_SCRIPT}"
        options = _OPTIONS[name].split()
        letters = "".join(option[1] for option in options if len(option) == 2)
        cluster = re.compile(rf"-[a-zA-Z0-9]*[{letters}].*") if letters else re.compile("(?!)")
        for index, word in enumerate(words):
            before = words[index - 1].text if index else ""
            own = word.text.partition("=")[0]
            if before in options or own in options or cluster.fullmatch(before) or cluster.fullmatch(word.text):
                self._refuse_words([word], place)
            if name == "find" and before in options:
                self._command(Command(list(words[index:])))
            if name == "git" and before in ("foreach", "run", "filter-branch"):
                self._refuse_words(words[index:], place)
        if name == "tar" and words and re.fullmatch(r"[a-zA-Z]*[IF][a-zA-Z]*", words[0].text):
            self._refuse_words(words, place)

    # What reads a program from standard input.

    def _pipelines(self, pipelines: list[list[Command]], before: set[str]) -> None:
        """Refuse values that go into a program by a pipe or a redirection.

        Args:
            before: what comes on the standard input of all of them.
        """
        for pipeline in pipelines:
            coming = set(before)
            for command in pipeline:
                given = coming | {name for operator, target in command.redirections if "<" in operator for name in target.names}
                written = [target for operator, target in command.redirections if operator.startswith("<<")]
                if _reads_program(command):
                    place = f"in what {command.words[0].text} reads as a program; {_IN_SCRIPT}"
                    self._refuse(given, place)
                    for document in written:
                        if document.literal is not None:
                            self._inner(document.literal)
                self._pipelines(command.body, given)
                coming = coming | given | _all_names([command])


def _all_names(found: list[Command]) -> set[str]:
    names: set[str] = set()
    for command in commands([found]):
        for word in (
            *command.words,
            *(made.value for made in command.assignments),
            *(word for _, word in command.redirections),
        ):
            names |= word.names
    return names


# They run what comes on their standard input, in whatever form they are called.
_READERS = _these(
    "eval parallel at batch crontab ssh su bsub sbatch sqlite3 psql mysql gdb lldb m4 tclsh expect ed ex vi vim make gnuplot dc"
    " socat nc ncat"
)


def _reads_program(command: Command) -> bool:
    """Whether a command takes a program from its standard input."""
    for index, word in enumerate(command.words):
        name = _name_of(word) or ""
        rest = command.words[index + 1 :]
        if index == 0 and name in _READERS:
            return True
        if index == 0 and name in ("source", ".") and rest:
            return rest[0].text.startswith(("/dev/", "/proc/"))
        if (
            index == 0
            and name in ("awk", "gawk", "mawk", "nawk", "sed")
            and any(each.text in ("-", "/dev/stdin") for each in rest)
        ):
            return True
        if name == "xargs":
            return _hands_on(rest)
        if name in _SHELLS or _language(name):
            if _program_of(name, rest) is not None:
                return False
            operand = next((each.text for each in rest if each.text == "-" or not each.text.startswith(("-", "+"))), "-")
            read = name in _SHELLS and any(re.fullmatch(r"-[a-zA-Z]*s[a-zA-Z]*", each.text) for each in rest)
            if read or operand == "-" or operand.startswith(("/dev/", "/proc/")):
                return index == 0 or command.words[0].literal in _STARTERS
            return False
    return False


def _hands_on(words: Sequence[Word]) -> bool:
    """Whether what comes to xargs with these arguments gets into a program."""
    replaces = any(word.text.startswith(("-I", "-i", "--replace")) for word in words)
    for index, word in enumerate(words):
        name = _name_of(word) or ""
        rest = words[index + 1 :]
        if name in _EVALUATORS:
            return True
        if name in _SHELLS or _language(name):
            has_script = any(not each.text.startswith(("-", "+")) for each in rest)
            return (replaces and _program_of(name, rest) is not None) or not has_script
    return False


def _name_of(word: Word) -> str | None:
    """The name of the program at a path, or a command's; None: only running it tells.

    Of a path whose last part is there to read the rest plays no part: it is no command of bash.
    """
    if word.literal is not None:
        return word.literal.rpartition("/")[2] or word.literal
    _, slash, last = word.text.rpartition("/")
    return last if slash and re.fullmatch(r"[\w.+-]+", last, re.ASCII) else None


def _language(name: str) -> _Language | None:
    """Of a language's interpreter."""
    return next((language for pattern, language in _LANGUAGES if pattern.fullmatch(name)), None)


def _program_of(name: str, words: Sequence[Word]) -> Word | None:
    """The word that is a program's text in the arguments of a shell or of a language; None: there is none, or it is neither."""
    if name in _SHELLS:
        return _shell_text(words)
    language = _language(name)
    rest = list(words) if language else []
    while language and rest:
        text = rest[0].text
        if not text.startswith("-") or text in ("-", "--"):
            return None
        long = text.lstrip("-").partition("=")[0]
        if len(long) > 1 and long in language.programs:
            return rest[0] if "=" in text else _at(rest, 1)
        taken = 1
        for position, letter in enumerate(text[1:] if not text.startswith("--") else "", 1):
            # The first letter that takes something takes what follows it, too: -ne 'text', -e'text'.
            if letter in language.programs:
                return rest[0] if position + 1 < len(text) else _at(rest, 1)
            if letter in language.words:
                taken = 1 if position + 1 < len(text) else 2
            if letter == "m" or letter in language.words or not letter.isalnum():
                break
        if text.startswith("-m") or (text.endswith("m") and not text.startswith("--")):
            return None
        rest = rest[taken:]
    return None


def _shell_text(words: Sequence[Word]) -> Word | None:
    """What follows -c, in whatever form it is given, behind all options."""
    is_text, skip = False, 0
    for word in words:
        text = word.text
        if skip:
            skip -= 1
            continue
        if text in ("-", "--"):
            if is_text:
                continue
            return None
        # bash takes its long options with one hyphen, too.
        if text.startswith(("--", "++")) or text[1:] in _LONG:
            is_text = is_text or text == "--command"
            skip = text.lstrip("-") in ("rcfile", "init-file")
            continue
        if text.startswith(("-", "+")) and len(text) > 1:
            is_text = is_text or (text[0] == "-" and "c" in text)
            skip = text.count("o") + text.count("O")
            continue
        return word if is_text else None
    return None


def _at(words: Sequence[Word], index: int) -> Word | None:
    return words[index] if index < len(words) else None


def _assigned(word: Word) -> Assignment | None:
    """``NAME=value`` as an argument."""
    match = re.match(r"([A-Za-z_]\w*)\+?=", word.text, re.ASCII)
    return Assignment(match[1], word) if match else None


def _read_into(command: Command) -> list[str]:
    """Variables that a command reads from elsewhere."""
    literals = [word.literal or "" for word in command.words]
    if not literals or literals[0] not in ("read", "mapfile", "readarray", "getopts", "printf", "wait"):
        return []
    found = [text for text in literals[1:] if re.fullmatch(r"[A-Za-z_]\w*", text)]
    return [*found, "REPLY", "MAPFILE"] if literals[0] != "printf" or "-v" in literals else []


def _declared(command: Command, letters: str) -> list[str]:
    """Variables that a command declares with one of these options."""
    texts = [word.text for word in command.words]
    if not texts or texts[0] not in (*_DECLARING, "mapfile", "readarray", "read"):
        return []
    lists = "a" in letters and texts[0] in ("mapfile", "readarray")
    if not (lists or any(set(text) & set(letters) for text in texts[1:] if text.startswith("-"))):
        return []
    return [match[0] for text in texts[1:] if (match := _NAMES.match(text))]
