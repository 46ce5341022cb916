"""Flags as etcd's command line tool takes them: long, short, anywhere between the arguments.

Owns the grammar, without any command: ``parse`` turns words into flag values and arguments. The rules are those of
the POSIX-style Go library that etcdctl is built on, which differ from Python's own parsers in what scripts rely on:

- flags may stand before, between and after the arguments; ``--`` ends them;
- ``--name=value``, ``--name value``, ``-w json``, ``-w=json``, ``-wjson``;
- a boolean takes a value only after ``=`` (``--hex=false``), never the next word;
- names are never abbreviated; a list flag given twice adds up.

>>> parsed = parse([Flag("rev", INT), Flag("prefix", BOOL)], ["foo", "--rev=3", "--prefix"])
>>> parsed.values["rev"], parsed.values["prefix"], parsed.arguments
(3, True, ['foo'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from raftkv.cli.goflags import values as govalues

STRING: Final = "string"
BOOL: Final = "bool"
INT: Final = "int"
UINT: Final = "uint"
DURATION: Final = "duration"
LIST: Final = "strings"


@dataclass(frozen=True)
class Flag:
    """One flag: its name, kind, default (in the parsed form; a duration in seconds), one line of help, short name,
    the words that it may be, the environment variable that sets it too (empty: none), and whether it is raftkv's own:
    then a value that it cannot be is refused in plain words instead of etcdctl's."""

    name: str
    kind: str = STRING
    default: Any = None
    usage: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    variable: str = ""
    ours: bool = False

    @property
    def shown_default(self) -> str:
        """The default as a user would write it; empty: there is none worth telling."""
        value = self.initial()
        if self.kind == BOOL:
            return "true" if value else ""
        if self.kind == DURATION:
            return govalues.format_duration(round(value * 1e9))
        return ",".join(value) if self.kind == LIST else str(value)

    def initial(self) -> Any:
        """Return the value when the flag is not given."""
        if self.default is not None:
            return self.default
        return {STRING: "", BOOL: False, INT: 0, UINT: 0, DURATION: 0.0, LIST: ()}[self.kind]


class FlagError(Exception):
    """A word that is not a flag, or a value that is not of the flag's kind; the text is etcdctl's."""


class HelpRequested(Exception):
    """``--help`` or ``-h`` was given."""


@dataclass
class Parsed:
    """What the words said: every flag's value, the names given explicitly, the arguments.

    ``before_dash`` is how many of the arguments stand before ``--``; None without one.
    """

    values: dict[str, Any]
    changed: set[str] = field(default_factory=set)
    arguments: list[str] = field(default_factory=list)
    before_dash: int | None = None


def parse_list(text: str) -> tuple[str, ...]:
    """Split one comma-separated value; double quotes protect commas.

    Raises:
        ValueError: a line ends between the quotes and the next comma, or a part is longer than 128 KiB.
    """
    if not text:
        return ()
    if '"' not in text:
        return tuple(text.split(","))
    import csv

    try:
        return tuple(next(csv.reader([text])))
    except csv.Error as error:
        raise ValueError(f"parsing {text[:64]!r}: {error}") from None


_CONVERT: dict[str, Callable[[str], Any]] = {
    STRING: str,
    BOOL: govalues.parse_bool,
    INT: govalues.parse_int,
    UINT: partial(govalues.parse_int, signed=False),
    DURATION: govalues.parse_duration_s,
    LIST: parse_list,
}


def assign(parsed: Parsed, flag: Flag, text: str) -> None:
    """Give a flag a value.

    Arguments:
        parsed: what is known so far.
        flag: which.
        text: its value as given.

    Raises:
        ValueError: the text is not of the flag's kind.
    """
    value = _CONVERT[flag.kind](text)
    if flag.kind == LIST and flag.name in parsed.changed:
        value = parsed.values[flag.name] + value
    parsed.values[flag.name] = value
    parsed.changed.add(flag.name)


def parse(flags: Iterable[Flag], words: Sequence[str]) -> Parsed:
    """Read the words of one command.

    Arguments:
        flags: those of the command.
        words: behind the command's name.

    Raises:
        FlagError: an unknown flag, a flag without its value, a value of the wrong kind.
        HelpRequested: ``-h`` or ``--help`` stands before any such error.
    """
    return _Parser(flags).run(words)


def did_you_mean(word: str, known: Iterable[str], dashes: str = "") -> str:
    """Return the end of a refusal of an unknown word: the known one that it is likely meant for, or nothing.

    Arguments:
        word: what was given.
        known: what would have been taken.
        dashes: what stands before such a word.
    """
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" (did you mean {dashes}{near[0]}?)" if near else ""


_KINDS: dict[str, str] = {
    BOOL: "true or false",
    INT: "a whole number",
    UINT: "a whole number, 0 or more",
    DURATION: "a duration such as 300ms, 1.5s or 2m",
    LIST: "a list separated by commas",
}


class _Parser:
    def __init__(self, flags: Iterable[Flag]) -> None:
        self.long = {flag.name: flag for flag in flags}
        self.short = {flag.short: flag for flag in self.long.values() if flag.short}
        self.parsed = Parsed({flag.name: flag.initial() for flag in self.long.values()})
        self.words: list[str] = []

    def run(self, words: Sequence[str]) -> Parsed:
        self.words = list(reversed(words))  # a stack: the next word is last
        while self.words:
            word = self.words.pop()
            if word == "--":
                self.parsed.before_dash = len(self.parsed.arguments)
                self.parsed.arguments += reversed(self.words)
                break
            if word.startswith("--"):
                self._long(word)
            elif word.startswith("-") and word != "-":
                self._short(word)
            else:
                self.parsed.arguments.append(word)
        return self.parsed

    def _long(self, word: str) -> None:
        name, separator, value = word[2:].partition("=")
        if not name or name.startswith("-"):
            raise FlagError(f"bad flag syntax: {word}")
        flag = self.long.get(name)
        if flag is None:
            if name == "help":
                raise HelpRequested
            raise FlagError(f"unknown flag: --{name}" + did_you_mean(name, self.long, "--"))
        if not separator:
            value = "true" if flag.kind == BOOL else self._next(f"flag needs an argument: --{name}")
        self._set(flag, value)

    def _short(self, word: str) -> None:
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            flag = self.short.get(letter)
            if flag is None:
                if letter == "h":
                    raise HelpRequested
                raise FlagError(f"unknown shorthand flag: '{letter}' in -{letter}{letters}")
            if len(letters) > 1 and letters[0] == "=":
                value, letters = letters[1:], ""
            elif flag.kind == BOOL:
                value = "true"
            elif letters:
                value, letters = letters, ""
            else:
                value = self._next(f"flag needs an argument: '{letter}' in -{letter}")
            self._set(flag, value)

    def _next(self, complaint: str) -> str:
        if not self.words:
            raise FlagError(complaint)
        return self.words.pop()

    def _set(self, flag: Flag, value: str) -> None:
        try:
            assign(self.parsed, flag, value)
        except ValueError as error:
            if flag.ours:
                raise FlagError(f"--{flag.name} must be {_KINDS[flag.kind]} (set to {value!r})") from None
            name = f"-{flag.short}, --{flag.name}" if flag.short else f"--{flag.name}"
            raise FlagError(f'invalid argument {govalues.quote(value)} for "{name}" flag: {error}') from None
