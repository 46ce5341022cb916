"""``txn``: read a transaction in etcdctl's little language, commit it, print the outcome.

Owns the language. Three parts, each ended by an empty line: comparisons, requests if all hold, requests otherwise.

    mod("key") = "3"
    <empty>
    put key "new value"
    <empty>
    get key
    <empty>

A comparison is a target (create or c, mod or m, version or ver, value or val, lease), the key in Go quotes, one of
``= != < >`` between blanks, and the value in Go quotes. A request is ``get``, ``put`` or ``del`` with the flags of
these commands; words may stand in double quotes (with escapes) or single quotes (without).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

from raftkv.cli.ctl.kv import delete_request, put_request, range_request
from raftkv.cli.ctl.session import open_session
from raftkv.cli.goflags import pflag
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.goflags.pflag import quote
from raftkv.cli.program import INVALID_INPUT, CommandError
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2

T = TypeVar("T")

_BLANKS = " \t\n\v\f\r\u0085\u00a0"  # what Go trims from a line
_WORD = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|[^'"\t\n\f\r ][^\t\n\f\r ]*[^'"\t\n\f\r ]?""")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`')
_OPERATOR = re.compile(rf"\)[{_BLANKS}]+([^{_BLANKS}]+)")
_TARGETS = {
    "ver": "version",
    "version": "version",
    "c": "create_revision",
    "create": "create_revision",
    "m": "mod_revision",
    "mod": "mod_revision",
    "val": "value",
    "value": "value",
    "lease": "lease",
}
_TARGET_NUMBERS = {
    "version": rpc_pb2.Compare.VERSION,
    "create_revision": rpc_pb2.Compare.CREATE,
    "mod_revision": rpc_pb2.Compare.MOD,
    "value": rpc_pb2.Compare.VALUE,
    "lease": rpc_pb2.Compare.LEASE,
}
_RESULTS = {
    "=": rpc_pb2.Compare.EQUAL,
    "!=": rpc_pb2.Compare.NOT_EQUAL,
    ">": rpc_pb2.Compare.GREATER,
    "<": rpc_pb2.Compare.LESS,
}
_PROMPTS = ("compares:", "success requests (get, put, del):", "failure requests (get, put, del):")


def txn(invocation: Invocation) -> None:
    """Read a transaction from standard input and commit it."""
    invocation.refuse_arguments("txn command does not accept argument")
    session = open_session(invocation)
    request = read_txn(sys.stdin.buffer, _prompt if invocation["interactive"] else _silent)
    session.printer.txn(session.call(methods.TXN, request))


def read_txn(source: BinaryIO, prompt: Callable[[str], None]) -> rpc_pb2.TxnRequest:
    """Read the three parts.

    Arguments:
        source: the lines.
        prompt: called with the heading before each part is read.

    Raises:
        CommandError: a line cannot be understood, or the input ends early (``EOF``).
    """
    prompt(_PROMPTS[0])
    compares = [parse_compare(line) for line in _part(source)]
    prompt(_PROMPTS[1])
    success = [parse_operation(line) for line in _part(source)]
    prompt(_PROMPTS[2])
    failure = [parse_operation(line) for line in _part(source)]
    return rpc_pb2.TxnRequest(compare=compares, success=success, failure=failure)


def _prompt(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    pass


_CUT = "the transaction ends early: it has three parts, and an empty line ends each (raftkvctl txn --help)"


def _part(source: BinaryIO) -> Iterator[str]:
    while True:
        line = source.readline()
        if not line.endswith(b"\n"):
            raise CommandError("EOF", INVALID_INPUT, [_CUT])
        text = line.decode("utf-8", "surrogateescape").strip(_BLANKS)
        if not text:
            return
        yield text


def parse_compare(line: str) -> rpc_pb2.Compare:
    """Read one comparison.

    Raises:
        CommandError: with etcdctl's words.
    """
    target, parenthesis, rest = line.partition("(")
    if not parenthesis:
        raise CommandError(f"malformed comparison: {line}", INVALID_INPUT)
    found = _scan_compare(rest)
    if len(found) < 3:
        key, operator, value = (*found, b"", b"", b"")[:3]
        shown = f"{target}({quote(key)}) {operator.decode('utf-8', 'surrogateescape')} {quote(value)}"
        raise CommandError(f"malformed comparison: {line}; got {shown}", INVALID_INPUT)
    field = _TARGETS.get(target)
    if field is None:
        raise CommandError(f"malformed comparison: {line} (unknown target {target})", INVALID_INPUT)
    result = _RESULTS.get(found[1].decode("utf-8", "surrogateescape"))
    if result is None:
        raise CommandError(f"malformed comparison: {line} (unknown operator)", INVALID_INPUT)
    compare = rpc_pb2.Compare(key=found[0], target=_TARGET_NUMBERS[field], result=result)
    if field == "value":
        compare.value = found[2]
    else:
        setattr(compare, field, _compared_number(line, field, found[2].decode("utf-8", "replace")))
    return compare


def _compared_number(line: str, field: str, text: str) -> int:
    try:
        # Lease ids are hexadecimal wherever they are typed.
        return pflag.parse_int(text, base=16 if field == "lease" else 10)
    except ValueError:
        raise CommandError(f"invalid txn compare request: {line}", INVALID_INPUT) from None


def _scan_compare(text: str) -> list[bytes]:
    """Read as much of key, operator and value as there is."""
    found: list[bytes] = []
    key, rest = _scan_quoted(text.lstrip(_BLANKS))
    if key is None:
        return found
    found.append(key)
    operator = _OPERATOR.match(rest)
    if not operator:
        return found
    found.append(pflag.text_bytes(operator[1]))
    rest = rest[operator.end() :]
    value, _ = _scan_quoted(rest.lstrip(_BLANKS))
    return found if value is None else [*found, value]


def _scan_quoted(text: str) -> tuple[bytes | None, str]:
    match = _QUOTED.match(text)
    if not match:
        return None, text
    try:
        return pflag.unquote(match[0]), text[match.end() :]
    except ValueError:
        return None, text


def split_words(line: str) -> list[str]:
    """Return the words of a request, quotes taken off.

    Raises:
        CommandError: a bad escape in double quotes.
    """
    words = []
    for word in _WORD.findall(line):
        if word.startswith('"'):
            try:
                word = pflag.unquote(word).decode("utf-8", "surrogateescape")
            except ValueError as error:
                raise CommandError(str(error), INVALID_INPUT) from None
        elif word.startswith("'"):
            word = word[1:-1]
        words.append(word)
    return words


def parse_operation(line: str) -> rpc_pb2.RequestOp:
    """Read one request.

    Raises:
        CommandError: with etcdctl's words.
    """
    words = split_words(line)
    if len(words) < 2:
        raise CommandError(f"invalid txn compare request: {line}", INVALID_INPUT)
    from raftkv.cli.ctl import tree as ctl_tree

    commands = {"put": ctl_tree.PUT_FLAGS, "get": ctl_tree.GET_FLAGS, "del": ctl_tree.DELETE_FLAGS}
    name, rest = _command_word(words, commands)
    try:
        if name is None:
            raise pflag.FlagError("unknown command")
        parsed = pflag.parse(commands[name], rest)
    except (pflag.FlagError, pflag.HelpRequested):
        raise CommandError(f"invalid txn request: {line}", INVALID_INPUT) from None
    if len(parsed.arguments) > 2:  # of put and get, etcdctl drops the rest
        raise CommandError(f"invalid txn request: {line} (quote a text that has spaces)", INVALID_INPUT)
    invocation = Invocation(parsed.values, parsed.changed, parsed.arguments)
    if name == "put":
        return rpc_pb2.RequestOp(request_put=put_request(invocation, bytes))
    if name == "get":
        return rpc_pb2.RequestOp(request_range=range_request(invocation))
    return rpc_pb2.RequestOp(request_delete_range=delete_request(invocation))


def _command_word(words: list[str], commands: dict[str, T]) -> tuple[str | None, list[str]]:
    """Return the command (a beginning of its name is enough) and the other words."""
    matches = [name for name in commands if name.startswith(words[0])] if words[0] else []
    return (matches[0], words[1:]) if len(matches) == 1 else (None, words)
