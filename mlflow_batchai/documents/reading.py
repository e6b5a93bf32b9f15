"""Read a document's JSON or YAML text to plain data; errors name the line and column."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path, PurePath
from typing import Any, NoReturn

import yaml

from mlflow_batchai.errors import DocumentError


def read(path: str | Path) -> dict[str, Any]:
    """The plain data of a JSON or YAML file. Raises DocumentError if it can't be read or parsed."""
    return load_text(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """The text of a file. Raises DocumentError if it can't be read, is no regular file, or is not UTF-8."""
    try:
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise DocumentError(f"{path}: is a pipe or a device; write the document into a file, and name that")
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise DocumentError(f"{path}: can't be read: {error.strerror}") from error


def load_text(text: str, source: str) -> dict[str, Any]:
    """The mapping that a JSON or YAML document holds; ``source`` is the file's name, used in messages.

    ``*.json`` is JSON; other text that starts with ``{`` is JSON if it can be, and the rest is YAML with the
    plain types of YAML 1.2 (``no`` and ``1:30:00`` are text). Numbers with a fraction or leading zeros stay
    text, so that ``1.10`` and ``0777`` keep their spelling: no key takes a fraction.

    Raises DocumentError for text that can't be parsed, a key given twice, an empty file, or no mapping.
    """
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise DocumentError(f"{source}: the file is empty")
    data = _parsed(text, source)
    if data is None:
        raise DocumentError(f"{source}: the file has no content")
    if not isinstance(data, dict):
        raise DocumentError(f"{source}: must hold a mapping of keys to values, not {kind(data)}")
    return data


def load_list(text: str, source: str) -> list[Any]:
    """The list that a JSON or YAML document holds, read as ``load_text`` does.

    Raises DocumentError for text that can't be parsed, or is no list.
    """
    data = _parsed(text, source)
    if not isinstance(data, list):
        raise DocumentError(f"{source}: must hold a list, not {kind(data)}")
    return data


def kind(value: object) -> str:
    """Name of a value's type for people: 'a list', 'text', ..."""
    names = {dict: "a mapping", list: "a list", tuple: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "an empty value")


def _parsed(text: str, source: str) -> Any:
    ending = PurePath(source).suffix.lower()
    if ending != ".json" and not text.lstrip().startswith("{"):
        return _parsed_yaml(text, source)
    try:
        return json.loads(
            text,
            object_pairs_hook=lambda pairs: _unique(pairs, text, source),
            parse_float=str,
            parse_constant=lambda name: _refuse_constant(name, source),
        )
    except json.JSONDecodeError as error:
        if ending in (".yaml", ".yml"):
            return _parsed_yaml(text, source)
        raise DocumentError(
            f"{source}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}{_hint(error)}"
        ) from None
    except RecursionError:
        raise DocumentError(f"{source}: not valid JSON: nested too deeply") from None
    except ValueError:  # Python reads no number of more than some thousand digits
        raise DocumentError(f"{source}: not valid JSON: a number has too many digits") from None


def _unique(pairs: list[tuple[str, Any]], text: str, source: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            found = [text.count("\n", 0, hit.start()) + 1 for hit in re.finditer(f'"{re.escape(key)}"\\s*:', text)]
            where = f" (lines {found[0]} and {found[1]})" if len(found) == 2 else ""
            raise DocumentError(f"{source}: the key {key!r} is given twice in one mapping{where}; keep one")
        result[key] = value
    return result


def _refuse_constant(name: str, source: str) -> NoReturn:
    raise DocumentError(f"{source}: not valid JSON: {name} is not a JSON value")


def _hint(error: json.JSONDecodeError) -> str:
    """Most likely cause of a JSON error."""
    here = error.doc[error.pos : error.pos + 1]
    if here and here in "/#":
        return "; JSON has no comments"
    if here and here in "]}" and error.doc[: error.pos].rstrip().endswith(","):
        return "; is there a comma after the last entry?"
    if error.msg.startswith("Expecting ',' delimiter"):
        return '; a quote inside text is written \\"'
    return ""


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.2's plain types, no key given twice, no mapping or list that contains itself."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own class attribute)

    def mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            name = (key.tag, key.value)
            if name in seen:
                problem = f"the key {key.value!r} is given twice (first on line {seen[name].line + 1}); keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[name] = key.start_mark
        self.flatten_mapping(node)
        return self.construct_mapping(node, deep=True)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError):  # whatever PyYAML's constructors meet
            given = str(node.value)[:40]
            problem = f"{given!r} can't be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        return self.construct_sequence(node, deep=True)


_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"(?:<<)$"), ["<"])
_YamlLoader.add_constructor("tag:yaml.org,2002:map", _YamlLoader.mapping)
_YamlLoader.add_constructor("tag:yaml.org,2002:seq", _YamlLoader.sequence)


def _parsed_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_YamlLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise DocumentError(f"{source}{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise DocumentError(f"{source}, line {line}: not valid YAML: a character that YAML does not allow") from None
    except RecursionError:
        raise DocumentError(f"{source}: not valid YAML: nested too deeply") from None
