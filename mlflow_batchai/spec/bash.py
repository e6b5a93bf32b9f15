"""Bash text as a tree of commands and words: as much of the grammar as it takes to tell where the value of a variable goes.

What the parser doesn't know it refuses (``UnknownSyntaxError``); it never guesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# In the text of a word: what only running it would tell, and an unquoted character that bash expands (* ? [ { ~).
EXPANSION, PATTERN = "\ue000", "\ue001"
POSITIONAL = "@"
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[|\+?=)", re.ASCII)
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(&>>|&>|<<<|<<-|<<|<&|<>|<(?!\()|>>|>&|>\||>(?!\())", re.ASCII)
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_ENDS_WORD = frozenset(" \t\n;&|<>()")
_CLOSERS = frozenset(["then", "do", "done", "fi", "elif", "else", "esac", "}"])


class UnknownSyntaxError(Exception):
    """Text that the parser can't follow; the message says what."""


@dataclass
class Word:
    """One word.

    Attributes:
        text: with quotes taken off, ``EXPANSION`` and ``PATTERN`` where it isn't known.
        names: variables whose values go into it, however deep; ``@`` stands for the positional parameters.
        is_quoted: whether no value of a variable in it is split into more words.
        elements: of ``name=(...)``; else None.
    """

    text: str = ""
    names: set[str] = field(default_factory=set)
    is_quoted: bool = True
    elements: list[Word] | None = None

    @property
    def literal(self) -> str | None:
        """Its text if that is known before it runs, else None."""
        return None if EXPANSION in self.text or PATTERN in self.text or self.elements is not None else self.text


@dataclass
class Assignment:
    """``name=value``, ``name+=value``, ``name=(...)``, or ``${name:=value}``."""

    name: str
    value: Word


@dataclass
class Command:
    """A simple command, or ``[[ ... ]]``, whose first word is that, or another compound command, which has no words.

    Attributes:
        redirections: operator and target, or the text of a here-document.
        body: pipelines of a compound command.
        function: the name, of a function's definition.
    """

    words: list[Word] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    redirections: list[tuple[str, Word]] = field(default_factory=list)
    body: list[list[Command]] = field(default_factory=list)
    function: str = ""


@dataclass
class Script:
    """What a text does.

    Attributes:
        pipelines: in order; those of substitutions first.
        loops: a variable, and the words that it runs over.
        arithmetic: names that bash reads as numbers: in ``$((...))``, subscripts, offsets.
        indirect: variables whose values bash takes for names (``${!x}``) or for prompts (``${x@P}``).
    """

    pipelines: list[list[Command]] = field(default_factory=list)
    loops: list[Assignment] = field(default_factory=list)
    arithmetic: set[str] = field(default_factory=set)
    indirect: set[str] = field(default_factory=set)
    assigned: list[Assignment] = field(default_factory=list)


def parse(text: str) -> Script:
    """Take a text apart.

    Raises:
        UnknownSyntaxError: it can't be followed.
    """
    script = Script()
    _Parser(text, script).whole()
    return script


def commands(pipelines: list[list[Command]]) -> Iterator[Command]:
    """All of them, with those inside of compound ones."""
    for pipeline in pipelines:
        for command in pipeline:
            yield command
            yield from commands(command.body)


class _Parser:
    """Recursive descent; ``_at`` is the next character."""

    def __init__(self, text: str, script: Script) -> None:
        self._text = text
        self._at = 0
        self._script = script
        self._here: list[tuple[Word, str, bool, bool]] = []

    def whole(self) -> None:
        self._script.pipelines += self._list()
        if self._at < len(self._text):
            raise UnknownSyntaxError(f"'{self._text[self._at]}' without its beginning")

    # What comes next.

    def _next(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if not self._next(text):
            return False
        self._at += len(text)
        return True

    def _after_blanks(self, text: str) -> bool:
        self._blanks()
        return self._take(text)

    def _need(self, text: str) -> None:
        if not self._take(text):
            raise UnknownSyntaxError(f"no '{text}' where one belongs")

    def _one(self) -> str:
        if self._at >= len(self._text):
            raise UnknownSyntaxError("a quote or bracket that is not closed")
        self._at += 1
        return self._text[self._at - 1]

    def _blanks(self) -> None:
        if match := _BLANKS.match(self._text, self._at):
            self._at = match.end()
        if self._next("#"):
            self._at = (self._text + "\n").find("\n", self._at)

    def _lines(self) -> None:
        """Blanks and newlines, with the here-documents that begin after one."""
        while True:
            self._blanks()
            if not self._take("\n"):
                return
            self._here_documents()

    def _keyword(self) -> str:
        """The word that comes next if it is unquoted text, without taking it."""
        match = re.compile(r"[^\s;&|<>()'\"\\$`]+").match(self._text, self._at)
        if not match or self._text[match.end() : match.end() + 1] in ("'", '"', "\\", "$", "`"):
            return ""
        return match[0]

    def _word_is(self, *words: str) -> bool:
        return self._keyword() in words

    def _need_word(self, word: str) -> None:
        self._lines()
        if self._keyword() != word:
            raise UnknownSyntaxError(f"no '{word}' where one belongs")
        self._at += len(word)

    # Lists, pipelines, commands.

    def _list(self) -> list[list[Command]]:
        """Pipelines up to what closes them."""
        found: list[list[Command]] = []
        while True:
            self._lines()
            if self._at >= len(self._text) or self._next(")") or self._next(";;") or self._next(";&"):
                return found
            if self._keyword() in _CLOSERS:
                return found
            found.append(self._pipeline())
            self._blanks()
            if self._take("&&") or self._take("||"):
                continue
            if self._next(";;") or self._next(";&"):
                return found
            if not (self._take(";") or self._take("&")) and self._at < len(self._text) and self._text[self._at] not in "\n)":
                raise UnknownSyntaxError(f"'{self._text[self._at]}' after a command")

    def _pipeline(self) -> list[Command]:
        found: list[Command] = []
        while True:
            self._lines()
            while self._word_is("!", "time", "coproc"):
                self._at += len(self._keyword())
                self._blanks()
                if self._word_is("-p"):
                    self._at += 2
                    self._blanks()
            found.append(self._command())
            self._blanks()
            if self._next("||") or not (self._take("|&") or self._take("|")):
                return found

    def _command(self) -> Command:
        word = self._keyword()
        if self._next("(("):
            self._at += 2
            self._arithmetic("))")
            return self._redirected(Command())
        if self._take("("):
            return self._redirected(Command(body=self._closed(")")))
        compound = {
            "{": self._group,
            "if": self._if,
            "while": self._while,
            "until": self._while,
            "for": self._for,
            "select": self._for,
            "case": self._case,
            "function": self._function,
        }.get(word)
        if compound:
            self._at += len(word)
            return self._redirected(compound())
        if word == "[[":
            return self._redirected(self._test())
        return self._simple()

    def _closed(self, end: str) -> list[list[Command]]:
        found = self._list()
        self._need(end)
        return found

    def _group(self) -> Command:
        found = self._list()
        self._need_word("}")
        return Command(body=found)

    def _if(self) -> Command:
        found = self._list()
        self._need_word("then")
        found += self._list()
        while self._word_is("elif", "else"):
            otherwise = self._word_is("else")
            self._at += 4
            found += self._list()
            if not otherwise:
                self._need_word("then")
                found += self._list()
        self._need_word("fi")
        return Command(body=found)

    def _while(self) -> Command:
        return Command(body=self._list() + self._do())

    def _do(self) -> list[list[Command]]:
        self._need_word("do")
        found = self._list()
        self._need_word("done")
        return found

    def _for(self) -> Command:
        self._blanks()
        if self._take("(("):
            self._arithmetic("))")
        else:
            name = self._keyword()
            if not _NAME.fullmatch(name):
                raise UnknownSyntaxError("a loop without a variable's name")
            self._at += len(name)
            self._lines()
            over = Word(EXPANSION, {POSITIONAL})
            if self._word_is("in"):
                self._at += 2
                over = Word(EXPANSION)
                self._blanks()
                while self._at < len(self._text) and self._text[self._at] not in ";\n":
                    over.names |= self._word().names
                    self._blanks()
            self._script.loops.append(Assignment(name, over))
        self._blanks()
        self._take(";")
        self._lines()
        return Command(body=self._do())

    def _case(self) -> Command:
        self._blanks()
        self._word()
        self._need_word("in")
        found: list[list[Command]] = []
        while True:
            self._lines()
            if self._word_is("esac"):
                self._at += 4
                return Command(body=found)
            self._take("(")
            while not self._after_blanks(")"):
                if not self._take("|"):
                    self._word()
            found += self._list()
            self._lines()
            if not (self._take(";;&") or self._take(";;") or self._take(";&")) and not self._word_is("esac"):
                raise UnknownSyntaxError("a case without its end")

    def _function(self) -> Command:
        self._blanks()
        name = self._keyword()
        self._at += len(name)
        self._blanks()
        if self._take("("):
            self._need(")")
        return self._defined(name)

    def _defined(self, name: str) -> Command:
        self._lines()
        command = self._command()
        if command.words or command.assignments or command.function:
            raise UnknownSyntaxError("a function whose body is no group")
        command.function = name
        return command

    def _test(self) -> Command:
        """``[[ ... ]]``: its operators are syntax, which no value can become."""
        command = Command()
        while True:
            while self._after_blanks("\n"):
                pass
            for operator in ("&&", "||", "(", ")", "<", ">"):
                if self._take(operator):
                    break
            else:
                command.words.append(self._word(ends=_ENDS_WORD if not self._is_pattern(command) else frozenset(" \t\n")))
                if command.words[-1].text == "]]":
                    return command

    @staticmethod
    def _is_pattern(command: Command) -> bool:
        return bool(command.words) and command.words[-1].text in ("=~", "==", "=", "!=")

    def _redirected(self, command: Command) -> Command:
        self._blanks()
        while self._redirection(command):
            self._blanks()
        return command

    def _simple(self) -> Command:
        command = Command()
        while True:
            self._blanks()
            if self._at >= len(self._text):
                return command
            if self._redirection(command):
                continue
            character = self._text[self._at]
            if character == "(" and len(command.words) == 1 and not command.assignments:
                self._at += 1
                self._blanks()
                self._need(")")
                return self._defined(command.words[0].text)
            if character in "\n;&|)":
                if not (command.words or command.assignments or command.redirections):
                    raise UnknownSyntaxError(f"'{character}' where a command belongs")
                return command
            if character == "(":
                raise UnknownSyntaxError("'(' among a command's words")
            if not command.words and (found := self._assignment()):
                command.assignments.append(found)
            else:
                command.words.append(self._word())

    def _assignment(self) -> Assignment | None:
        match = _ASSIGNED.match(self._text, self._at)
        if not match:
            return None
        begun, name = self._at, match[1]
        self._at = match.end()
        subscript: set[str] = set()
        if match[2] == "[":
            subscript = self._until("]")
            if not (self._take("+=") or self._take("=")):
                self._at = begun
                return None
            self._script.arithmetic |= subscript
        value = self._array() if self._next("(") else self._word(may_be_empty=True)
        return Assignment(name, value)

    def _array(self) -> Word:
        self._need("(")
        array = Word(EXPANSION, elements=[])
        assert array.elements is not None
        while True:
            self._lines()
            if self._take(")"):
                return array
            if self._take("["):
                self._script.arithmetic |= self._until("]")
                self._take("+")
                self._need("=")
            array.elements.append(self._word(may_be_empty=True))
            array.names |= array.elements[-1].names

    def _redirection(self, command: Command) -> bool:
        match = _REDIRECTION.match(self._text, self._at)
        if not match:
            return False
        self._at = match.end()
        self._blanks()
        target = self._word()
        if match[1] in ("<<", "<<-"):
            document = Word()
            quoted = self._text[match.end() : self._at].strip() != target.text
            self._here.append((document, target.text, quoted, match[1] == "<<-"))
            target = document
        command.redirections.append((match[1], target))
        return True

    def _here_documents(self) -> None:
        waiting, self._here = self._here, []
        for document, end, quoted, tabs in waiting:
            lines = []
            while True:
                if self._at >= len(self._text):
                    break
                line, _, _ = self._text[self._at :].partition("\n")
                self._at = min(self._at + len(line) + 1, len(self._text))
                if (line.lstrip("\t") if tabs else line) == end:
                    break
                lines.append(line)
            text = "\n".join(lines) + "\n"
            if quoted:
                document.text = text
                continue
            inner = _Parser(text, self._script)
            while inner._at < len(text):
                inner._double_part(document)

    # Words.

    def _word(self, ends: frozenset[str] = _ENDS_WORD, may_be_empty: bool = False) -> Word:
        word = Word()
        begun = self._at
        while self._at < len(self._text):
            character = self._text[self._at]
            if self._next("<(") or self._next(">("):
                self._at += 2
                self._substituted(word)
            elif character in ends:
                if character == "(" and word.text.endswith("=") and _ASSIGNED.fullmatch(word.text):
                    # As declaring builtins take it.
                    array = self._array()
                    return Word(word.text + EXPANSION, word.names | array.names, elements=array.elements)
                break
            else:
                self._part(word)
        if self._text[begun : self._at] in ("[", "[["):
            word.text = self._text[begun : self._at]
        if self._at == begun and not may_be_empty:
            raise UnknownSyntaxError("no word where one belongs")
        return word

    def _part(self, word: Word) -> None:
        character = self._one()
        if character == "\\":
            if not self._take("\n"):
                word.text += self._one()
        elif character == "'":
            word.text += self._single()
        elif character == '"':
            self._double(word)
        elif character == "$" and self._next("'"):
            self._at += 1
            word.text += self._ansi()
        elif character == "$" and self._next('"'):
            self._at += 1
            self._double(word)
        elif character == "$":
            self._dollar(word, quoted=False)
        elif character == "`":
            self._backquotes(word)
        else:
            word.text += PATTERN if character in "*?[{" or (character == "~" and not word.text) else character

    def _single(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise UnknownSyntaxError("a quote that is not closed")
        text, self._at = self._text[self._at : end], end + 1
        return text

    def _ansi(self) -> str:
        found = ""
        while (character := self._one()) != "'":
            if character == "\\":
                self._at += 1
                character = EXPANSION
            found += character
        return found

    def _double(self, word: Word) -> None:
        while not self._take('"'):
            self._double_part(word)

    def _double_part(self, word: Word) -> None:
        character = self._one()
        if character == "\\":
            following = self._text[self._at : self._at + 1]
            if following in ("$", "`", '"', "\\", "\n") and following:
                self._at += 1
                character = "" if following == "\n" else following
            word.text += character
        elif character == "$":
            self._dollar(word, quoted=True)
        elif character == "`":
            self._backquotes(word)
        else:
            word.text += character

    def _substituted(self, word: Word) -> None:
        """The commands after ``$(``; their values go into the word."""
        found = self._closed(")")
        self._into(word, found)

    def _into(self, word: Word, found: list[list[Command]]) -> None:
        self._script.pipelines += found
        word.text += EXPANSION
        word.is_quoted = False
        for command in commands(found):
            for part in _words_of(command):
                word.names |= part.names

    def _backquotes(self, word: Word) -> None:
        inner = ""
        while (character := self._one()) != "`":
            if character == "\\" and self._text[self._at : self._at + 1] in ("`", "\\", "$"):
                character = self._one()
            inner += character
        parser = _Parser(inner, self._script)
        found = parser._list()
        if parser._at < len(inner):
            raise UnknownSyntaxError(f"'{inner[parser._at]}' without its beginning")
        self._into(word, found)

    def _dollar(self, word: Word, quoted: bool) -> None:
        if self._take("(("):
            self._script.arithmetic |= self._within(word, "))")
        elif self._take("("):
            self._substituted(word)
            word.is_quoted = quoted and word.is_quoted
        elif self._take("["):
            self._script.arithmetic |= self._within(word, "]")
        elif self._take("{"):
            self._parameter(word, quoted)
        elif match := _NAME.match(self._text, self._at):
            self._at = match.end()
            self._refer(word, match[0], quoted)
        elif (character := self._text[self._at : self._at + 1]) and character in "0123456789@*#?$!-":
            self._at += 1
            self._refer(word, _special(character), quoted)
        else:
            word.text += "$"

    def _refer(self, word: Word, name: str, quoted: bool) -> None:
        word.text += EXPANSION
        if name:
            word.names.add(name)
            word.is_quoted = word.is_quoted and quoted

    def _within(self, word: Word, end: str) -> set[str]:
        word.text += EXPANSION
        return self._arithmetic(end)

    def _parameter(self, word: Word, quoted: bool) -> None:
        """What follows ``${``."""
        if self._next("#") and not self._next("#}"):
            self._at += 1
            self._until("}")
            word.text += EXPANSION
            return
        indirect = self._next("!") and not self._next("!}")
        self._at += indirect
        match = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]", re.ASCII).match(self._text, self._at)
        if not match:
            raise UnknownSyntaxError("an expansion without a name")
        self._at = match.end()
        name = match[0] if _NAME.fullmatch(match[0]) else _special(match[0])
        self._refer(word, name, quoted)
        if self._take("["):
            self._script.arithmetic |= self._until("]") - {POSITIONAL}
        if indirect and name:
            self._script.indirect.add(name)
        if self._take("}"):
            return
        if self._take("@"):
            if not re.compile(r"[QUuLAaKk]\}").match(self._text, self._at):
                self._script.indirect.add(name)
        elif self._next(":") and self._text[self._at + 1 : self._at + 2] not in ("-", "=", "?", "+"):
            self._script.arithmetic |= self._until("}")
            return
        assigns = self._next("=") or self._next(":=")
        value = Word()
        while not self._take("}"):
            self._double_nested(value) if quoted else self._part(value)
        word.names |= value.names
        word.is_quoted = word.is_quoted and value.is_quoted
        if assigns and name:
            self._script.assigned.append(Assignment(name, value))

    def _double_nested(self, word: Word) -> None:
        """Text of an expansion inside of double quotes, where double quotes nest."""
        if self._take('"'):
            self._double(word)
        else:
            self._double_part(word)

    def _arithmetic(self, end: str) -> set[str]:
        found = self._until(end)
        self._script.arithmetic |= found
        return found

    def _until(self, end: str) -> set[str]:
        """Names in an expression, with those that are expanded in it, up to what closes it."""
        word, text, depth = Word(), "", 0
        while depth or not self._next(end):
            character = self._text[self._at : self._at + 1]
            if character in ("'", '"', "\\", "$", "`"):
                self._part(word)
                continue
            self._one()
            depth += (character in "([") - (character in ")]")
            if depth < 0:
                raise UnknownSyntaxError(f"'{character}' without its beginning")
            text += character
        self._at += len(end)
        return word.names | set(_NAME.findall(f"{text} {word.text}")) | ({POSITIONAL} if text.strip() in ("@", "*") else set())


def _special(character: str) -> str:
    """The positional parameters hold what a function or another shell was given; the rest is bash's own."""
    return POSITIONAL if character.isdigit() or character in "@*" else ""


def _words_of(command: Command) -> Iterator[Word]:
    """All words whose values a command may print."""
    yield from command.words
    for assignment in command.assignments:
        yield assignment.value
    for _, target in command.redirections:
        yield target
