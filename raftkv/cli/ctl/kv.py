"""``get``, ``put``, ``del``, ``compaction`` and ``txn``.

Converts flags and arguments to a request, and makes the checks that etcdctl makes before sending anything.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, TypeVar

from raftkv.cli import pflag
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.session import open_session
from raftkv.cli.pflag import quote, text_bytes
from raftkv.cli.program import BAD_ARGUMENTS, BAD_FEATURE, INVALID_INPUT, CommandError, refused
from raftkv.client.admin import interval
from raftkv.client.rpc import methods
from raftkv.client.rpc.core import Client
from raftkv.pb import rpc_pb2

T = TypeVar("T")

_Asked = rpc_pb2.RangeRequest
_ORDERS = {"": _Asked.NONE, "ASCEND": _Asked.ASCEND, "DESCEND": _Asked.DESCEND}
_TARGETS = {"": _Asked.KEY, "CREATE": _Asked.CREATE, "KEY": _Asked.KEY, "MODIFY": _Asked.MOD}
_TARGETS |= {"VALUE": _Asked.VALUE, "VERSION": _Asked.VERSION}
_PUT_USAGE = "put command needs 1 argument and input from stdin or 2 arguments"


def get(invocation: Invocation) -> None:
    """Read keys and print them."""
    request = range_request(invocation)
    session = open_session(invocation, value_only=invocation["print-value-only"])
    metadata = _staleness(invocation)
    if invocation["stream"]:
        response = session.run(partial(_read_stream, request, metadata, session.timeout_s))
    else:
        response = session.call(methods.RANGE, request, metadata=metadata)
    # As in etcdctl, the request is sent before these flags are checked.
    if invocation["count-only"] and session.printer.name != "fields":
        raise CommandError("--count-only is only for `--write-out=fields`", BAD_ARGUMENTS)
    if invocation["print-value-only"] and session.printer.name != "simple":
        raise CommandError("print-value-only is only for `--write-out=simple`", BAD_ARGUMENTS)
    session.printer.show("get", response)


async def _read_stream(
    request: rpc_pb2.RangeRequest, metadata: tuple[tuple[str, str], ...], timeout_s: float, client: Client
) -> rpc_pb2.RangeResponse:
    """Read a range in chunks; return them joined as one answer."""
    stream = await client.stream(methods.RANGE_STREAM, metadata=metadata, timeout_s=timeout_s)
    await stream.send(request)
    stream.half_close()
    response = rpc_pb2.RangeResponse()
    while (chunk := await stream.receive()) is not None:
        response.MergeFrom(chunk.range_response)
    return response


def put(invocation: Invocation) -> None:
    """Write a key."""
    request = put_request(invocation, sys.stdin.buffer.read)
    open_session(invocation).show("put", methods.PUT, request)


def delete(invocation: Invocation) -> None:
    """Delete keys and print their number."""
    request = delete_request(invocation)
    open_session(invocation).show("delete", methods.DELETE_RANGE, request)


def compaction(invocation: Invocation) -> None:
    """Discard the history before a revision."""
    text = invocation.argument("compaction command needs 1 argument")
    with refused(ValueError):
        revision = pflag.parse_int(text, base=10)
    request = rpc_pb2.CompactionRequest(revision=revision, physical=invocation["physical"])
    open_session(invocation).call(methods.COMPACT, request)
    print(f"compacted revision {revision}")


def range_request(invocation: Invocation) -> rpc_pb2.RangeRequest:
    """Return the request of a ``get``.

    Raises:
        CommandError: arguments or flags conflict.
    """
    if not invocation.arguments:
        usage = "get command needs one argument as key and an optional argument as range_end"
        raise CommandError(usage, BAD_ARGUMENTS)
    _exclude(invocation, "prefix", "from-key")
    _exclude(invocation, "keys-only", "count-only")
    serializable = is_serializable(invocation)
    key, end = _interval(invocation, invocation.arguments)
    order = _choice(invocation, "order", "bad sort order", _ORDERS)
    target = _choice(invocation, "sort-by", "bad sort target", _TARGETS)
    if target == rpc_pb2.RangeRequest.KEY and order == rpc_pb2.RangeRequest.ASCEND:
        order = rpc_pb2.RangeRequest.NONE  # the default order anyway, and the limit is then cheap
    _check_bounds(invocation, "CreateRev", "min-create-rev", "max-create-rev")
    _check_bounds(invocation, "ModRev", "min-mod-rev", "max-mod-rev")
    return rpc_pb2.RangeRequest(
        key=key,
        range_end=end,
        limit=invocation["limit"],
        revision=max(invocation["rev"], 0),
        sort_order=order,
        sort_target=target,
        serializable=serializable,
        keys_only=invocation["keys-only"],
        count_only=invocation["count-only"],
        min_create_revision=max(invocation["min-create-rev"], 0),
        max_create_revision=max(invocation["max-create-rev"], 0),
        min_mod_revision=max(invocation["min-mod-rev"], 0),
        max_mod_revision=max(invocation["max-mod-rev"], 0),
    )


def put_request(invocation: Invocation, read_value: Callable[[], bytes]) -> rpc_pb2.PutRequest:
    """Return the request of a ``put``.

    Arguments:
        invocation: the command line.
        read_value: returns the value if it is not an argument; empty: none.

    Raises:
        CommandError: arguments or flags conflict.
    """
    arguments, keep_value = invocation.arguments, invocation["ignore-value"]
    if not arguments:
        raise CommandError(_PUT_USAGE, BAD_ARGUMENTS)
    if keep_value and len(arguments) > 1:
        raise CommandError("put command needs only 1 argument when 'ignore-value' is set", BAD_ARGUMENTS)
    value = b""
    if not keep_value:
        value = text_bytes(arguments[1]) if len(arguments) > 1 else read_value()
        if len(arguments) == 1 and not value:
            raise CommandError(_PUT_USAGE, BAD_ARGUMENTS)
    with refused(ValueError, BAD_ARGUMENTS, "bad lease ID ({}), expecting ID in Hex"):
        lease = pflag.parse_int(invocation["lease"], base=16)
    return rpc_pb2.PutRequest(
        key=text_bytes(arguments[0]),
        value=value,
        lease=lease,
        prev_kv=invocation["prev-kv"],
        ignore_value=keep_value,
        ignore_lease=invocation["ignore-lease"],
    )


def delete_request(invocation: Invocation) -> rpc_pb2.DeleteRangeRequest:
    """Return the request of a ``del``.

    Raises:
        CommandError: arguments or flags conflict.
    """
    if not 1 <= len(invocation.arguments) <= 2:
        usage = "del command needs one argument as key and an optional argument as range_end"
        raise CommandError(usage, BAD_ARGUMENTS)
    _exclude(invocation, "prefix", "from-key")
    key, end = _interval(invocation, invocation.arguments)
    return rpc_pb2.DeleteRangeRequest(key=key, range_end=end, prev_kv=invocation["prev-kv"])


def _staleness(invocation: Invocation) -> tuple[tuple[str, str], ...]:
    """Return the metadata for ``--max-staleness``."""
    if "max-staleness" not in invocation.changed:
        return ()
    try:
        return methods.staleness_metadata(invocation["max-staleness"])
    except ValueError:
        raise CommandError("--max-staleness must not be negative", BAD_ARGUMENTS) from None


def is_serializable(invocation: Invocation) -> bool:
    """Return whether ``--consistency`` requests a serializable read.

    Raises:
        CommandError: the value is neither ``l`` nor ``s``.
    """
    value = invocation["consistency"]
    if value not in ("l", "s"):
        raise CommandError(f"unknown consistency flag {quote(value)}", BAD_FEATURE)
    return bool(value == "s")


def _interval(invocation: Invocation, arguments: list[str]) -> tuple[bytes, bytes]:
    """Return the key and the range end; see section "Key intervals" of etcd's API."""
    key = text_bytes(arguments[0])
    prefix, from_key = invocation["prefix"], invocation["from-key"]
    if len(arguments) > 1:
        if prefix or from_key:
            raise CommandError(
                "too many arguments, only accept one argument when `--prefix` or `--from-key` is set", BAD_ARGUMENTS
            )
        return key, text_bytes(arguments[1])
    return interval(key, prefix=prefix, from_key=from_key)


def _exclude(invocation: Invocation, first: str, second: str) -> None:
    if invocation[first] and invocation[second]:
        raise CommandError(f"`--{first}` and `--{second}` cannot be set at the same time, choose one", BAD_ARGUMENTS)


def _choice(invocation: Invocation, name: str, complaint: str, choices: dict[str, T]) -> T:
    value: str = invocation[name]
    if value.upper() not in choices:
        raise CommandError(f"{complaint} {value}", BAD_FEATURE)
    return choices[value.upper()]


def _check_bounds(invocation: Invocation, name: str, low: str, high: str) -> None:
    if 0 < invocation[high] < invocation[low]:
        text = f"getMin{name}(={invocation[low]}) > getMax{name}(={invocation[high]})"
        raise CommandError(text, BAD_FEATURE)


# -- txn ------------------------------------------------------------------------------------------------------------
#
# ``txn``: read a transaction in etcdctl's small language, commit it, print the outcome.
#
# The language has three parts, each ended by an empty line: comparisons, requests if all hold, requests otherwise.
#
#     mod("key") = "3"
#     <empty>
#     put key "new value"
#     <empty>
#     get key
#     <empty>
#
# A comparison is a target (create or c, mod or m, version or ver, value or val, lease), the key in Go quotes, one of
# ``= != < >`` between blanks, and the value in Go quotes. A request is ``get``, ``put`` or ``del`` with the flags of
# these commands; words may stand in double quotes (with escapes) or single quotes (without).

_BLANKS = " \t\n\v\f\r\u0085\u00a0"  # what Go trims from a line
_WORD = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|[^'"\t\n\f\r ][^\t\n\f\r ]*[^'"\t\n\f\r ]?""")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`')
_OPERATOR = re.compile(rf"\)[{_BLANKS}]+([^{_BLANKS}]+)")
_COMPARED = {
    **dict.fromkeys(("ver", "version"), ("version", rpc_pb2.Compare.VERSION)),
    **dict.fromkeys(("c", "create"), ("create_revision", rpc_pb2.Compare.CREATE)),
    **dict.fromkeys(("m", "mod"), ("mod_revision", rpc_pb2.Compare.MOD)),
    **dict.fromkeys(("val", "value"), ("value", rpc_pb2.Compare.VALUE)),
    "lease": ("lease", rpc_pb2.Compare.LEASE),
}
_Compare = rpc_pb2.Compare
_RESULTS = {"=": _Compare.EQUAL, "!=": _Compare.NOT_EQUAL, ">": _Compare.GREATER, "<": _Compare.LESS}
_PROMPTS = ("compares:", "success requests (get, put, del):", "failure requests (get, put, del):")


def txn(invocation: Invocation) -> None:
    """Read a transaction from standard input and commit it."""
    invocation.refuse_arguments("txn command does not accept argument")
    session = open_session(invocation)
    request = read_txn(sys.stdin.buffer, partial(print, flush=True) if invocation["interactive"] else lambda text: None)
    session.show("txn", methods.TXN, request)


def read_txn(source: BinaryIO, prompt: Callable[[str], None]) -> rpc_pb2.TxnRequest:
    """Read the three parts of a transaction.

    Arguments:
        source: input lines.
        prompt: called with the heading before each part is read.

    Raises:
        CommandError: a line is malformed, or the input ends early (``EOF``).
    """
    prompt(_PROMPTS[0])
    compares = [parse_compare(line) for line in _part(source)]
    prompt(_PROMPTS[1])
    success = [parse_operation(line) for line in _part(source)]
    prompt(_PROMPTS[2])
    failure = [parse_operation(line) for line in _part(source)]
    return rpc_pb2.TxnRequest(compare=compares, success=success, failure=failure)


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
    """Parse one comparison.

    Raises:
        CommandError: the comparison is malformed; the text is etcdctl's.
    """
    target, parenthesis, rest = line.partition("(")
    if not parenthesis:
        raise CommandError(f"malformed comparison: {line}", INVALID_INPUT)
    found = _scan_compare(rest)
    if len(found) < 3:
        key, operator, value = (*found, b"", b"", b"")[:3]
        shown = f"{target}({quote(key)}) {operator.decode('utf-8', 'surrogateescape')} {quote(value)}"
        raise CommandError(f"malformed comparison: {line}; got {shown}", INVALID_INPUT)
    if target not in _COMPARED:
        raise CommandError(f"malformed comparison: {line} (unknown target {target})", INVALID_INPUT)
    field, kind = _COMPARED[target]
    result = _RESULTS.get(found[1].decode("utf-8", "surrogateescape"))
    if result is None:
        raise CommandError(f"malformed comparison: {line} (unknown operator)", INVALID_INPUT)
    compare = rpc_pb2.Compare(key=found[0], target=kind, result=result)
    if field == "value":
        compare.value = found[2]
    else:
        setattr(compare, field, _compared_number(line, field, found[2].decode("utf-8", "replace")))
    return compare


def _compared_number(line: str, field: str, text: str) -> int:
    try:
        # Lease ids are hexadecimal on every command line.
        return pflag.parse_int(text, base=16 if field == "lease" else 10)
    except ValueError:
        raise CommandError(f"invalid txn compare request: {line}", INVALID_INPUT) from None


def _scan_compare(text: str) -> list[bytes]:
    """Parse as much of key, operator and value as there is."""
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
    """Return the words of a request, without quotes.

    Raises:
        CommandError: a bad escape in double quotes.
    """
    words = []
    for word in _WORD.findall(line):
        if word.startswith('"'):
            with refused(ValueError, INVALID_INPUT):
                word = pflag.unquote(word).decode("utf-8", "surrogateescape")
        elif word.startswith("'"):
            word = word[1:-1]
        words.append(word)
    return words


def parse_operation(line: str) -> rpc_pb2.RequestOp:
    """Parse one request.

    Raises:
        CommandError: the request is malformed; the text is etcdctl's.
    """
    words = split_words(line)
    if len(words) < 2:
        raise CommandError(f"invalid txn compare request: {line}", INVALID_INPUT)
    from raftkv.cli.ctl import tree as ctl_tree

    commands = {"put": ctl_tree.PUT_FLAGS, "get": ctl_tree.GET_FLAGS, "del": ctl_tree.DELETE_FLAGS}
    # A prefix of the name is enough.
    names = [name for name in commands if words[0] and name.startswith(words[0])]
    try:
        (name,) = names
        parsed = pflag.parse(commands[name], words[1:])
    except (ValueError, pflag.FlagError, pflag.HelpRequested):
        raise CommandError(f"invalid txn request: {line}", INVALID_INPUT) from None
    if len(parsed.arguments) > 2:  # for put and get, etcdctl ignores the rest
        raise CommandError(f"invalid txn request: {line} (quote a text that has spaces)", INVALID_INPUT)
    invocation = Invocation(parsed.values, parsed.changed, parsed.arguments)
    if name == "put":
        return rpc_pb2.RequestOp(request_put=put_request(invocation, bytes))
    if name == "get":
        return rpc_pb2.RequestOp(request_range=range_request(invocation))
    return rpc_pb2.RequestOp(request_delete_range=delete_request(invocation))
