"""The part of YAML that a configuration has a use for. The only file that names yaml."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import yaml
from yaml.reader import ReaderError

from podgraph.errors import ConfigError
from podgraph.quoting import key_path, shown

# So that any file is refused within 100 ms or so: the parser takes 40 us for a value and 2 us for a character.
MAX_BYTES = 1 << 15
MAX_VALUES = 2048
MAX_DEPTH = 8
MAX_DIGITS = 18

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
# no two parts that match the same digits one after the other: that takes the square of their number
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[-+]?[0-9]+)?|[-+]?\.inf|\.nan")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def read(data: bytes) -> Any:
    """The content of one document; None where there is none.

    Raises:
        ConfigError: too long, not YAML, or something that is refused: one line with the key, or the line of the file.
    """
    return _Reader(data).document()


class _Scanner(yaml.SafeLoader):
    """YAML's events. `[[[[...` is refused while it is scanned: to look ahead takes the square of the depth."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MAX_DEPTH:
            mark = self.get_mark()
            raise ConfigError(f"line {mark.line + 1}: nested too deeply, allowed: {MAX_DEPTH} levels")
        super().fetch_flow_collection_start(token)


class _Reader:
    """One YAML document as dicts, lists and scalars, without what a configuration has no use for.

    Aliases (a few lines can expand to gigabytes), tags, duplicate keys and further documents are refused. Keys are
    text, whatever they look like. Plain scalars mean what they do in JSON: ``no`` and ``1:30`` are text, ``1e-3`` is a
    number.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) > MAX_BYTES:
            raise ConfigError(f"too long for a configuration, allowed: at most {MAX_BYTES} bytes")
        self._data = data
        self._values = 0

    def document(self) -> Any:
        """The content; None where there is none.

        Raises:
            ConfigError: not YAML, or something that is refused.
        """
        try:
            self._text = self._data.decode("utf-8-sig")
            self._events = _Scanner(self._text)
            self._next()  # the start of the stream
            if isinstance(self._peek(), yaml.StreamEndEvent):
                return None
            self._next()  # the start of the document
            content = self._value(())
            self._next()
            if not isinstance(self._peek(), yaml.StreamEndEvent):
                self._refuse((), "a second document")
            return content
        except UnicodeDecodeError as e:
            raise ConfigError(f"not UTF-8 text (byte {e.start})") from None
        except yaml.YAMLError as e:
            raise ConfigError(self._explain(e)) from None
        except (ValueError, OverflowError):
            line = self._events.get_mark().line + 1
            problem = "an escape that is no character, or a number of too many digits"
            raise ConfigError(f"line {line}: not valid YAML: {problem}") from None

    def _explain(self, error: yaml.YAMLError) -> str:
        mark = getattr(error, "problem_mark", None)
        if mark:
            where = f"line {mark.line + 1}, column {mark.column + 1}: "
        elif isinstance(error, ReaderError):
            where = f"line {self._text.count(chr(10), 0, error.position) + 1}: "
        else:
            where = ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        return f"{where}not valid YAML: {' '.join(str(problem).split())}"

    def _next(self) -> Any:
        return self._events.get_event()  # type: ignore[no-untyped-call]

    def _peek(self) -> Any:
        return self._events.peek_event()  # type: ignore[no-untyped-call]

    def _value(self, path: tuple[int | str, ...]) -> Any:
        event = self._event = self._next()
        self._values += 1
        if self._values > MAX_VALUES:
            self._refuse(path[:1], f"too many values, allowed: at most {MAX_VALUES} in a file")
        if len(path) > MAX_DEPTH:
            self._refuse(path[:2], f"nested too deeply, allowed: {MAX_DEPTH} levels")
        if event.anchor is not None:
            self._refuse(path, "anchors and aliases are not supported")
        if event.tag is not None:
            self._refuse(path, f"tags are not supported, got {shown(event.tag)}")
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(path)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        return event.value if event.style else self._scalar(path, event.value)

    def _list(self, path: tuple[int | str, ...]) -> list[Any]:
        values: list[Any] = []
        while not isinstance(self._peek(), yaml.SequenceEndEvent):
            values.append(self._value((*path, len(values))))
        self._next()
        return values

    def _mapping(self, path: tuple[int | str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := self._peek(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._refuse(path, "a key must be a word")
            self._value(path)
            if event.value in values:
                self._refuse((*path, event.value), "duplicate key")
            values[event.value] = self._value((*path, event.value))
        self._next()
        return values

    def _scalar(self, path: tuple[int | str, ...], text: str) -> object:
        word = text.lower()
        if word in _WORDS:
            return _WORDS[word]
        if _INTEGER.fullmatch(text):
            if len(text) > MAX_DIGITS:
                self._refuse(path, f"too long a number, got {len(text)} digits, allowed: at most {MAX_DIGITS}")
            return int(text)
        if _FLOAT.fullmatch(word):
            return float(word.replace(".inf", "inf").replace(".nan", "nan"))
        return text

    def _refuse(self, path: tuple[int | str, ...], problem: str) -> NoReturn:
        line = self._event.start_mark.line + 1
        raise ConfigError(f"{key_path(path)}{': ' if path else ''}{problem} (line {line})")
