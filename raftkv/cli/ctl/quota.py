"""``quota set|remove|list``: limits of what may exist below a prefix. etcdctl has no such command.

Owns the words of sizes: ``--bytes 512MiB``, and the table.
"""

from __future__ import annotations

import json
import re
from typing import Any

from raftkv.cli.ctl.session import open_session
from raftkv.cli.exits import BAD_ARGUMENTS, BAD_FEATURE, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output import table
from raftkv.cli.output.printer import write_line
from raftkv.cli.output.rows import printable
from raftkv.client.rpc import methods
from raftkv.pb import admin_pb2

_SIZE = re.compile(r"(\d{1,18})(?:([KMGT]i?)?B?)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_HEADER = ["prefix", "bytes", "of", "history", "keys", "of"]


def quota_set(invocation: Invocation) -> None:
    """Set the limits of a prefix."""
    prefix = _prefix(invocation, "set")
    request = admin_pb2.QuotaSetRequest(
        prefix=prefix, bytes_max=parse_size(invocation["bytes"]), keys_max=invocation["keys"]
    )
    if "bytes" not in invocation.changed and "keys" not in invocation.changed:
        raise CommandError("quota set needs --bytes, --keys or both; 0 is no limit", BAD_ARGUMENTS)
    session, as_json = open_session(invocation), _is_json(invocation)
    quota = session.call(methods.QUOTA_SET, request).quota
    _print([quota], as_json)


def quota_remove(invocation: Invocation) -> None:
    """Lift the limits of a prefix."""
    request = admin_pb2.QuotaRemoveRequest(prefix=_prefix(invocation, "remove"))
    session, as_json = open_session(invocation), _is_json(invocation)
    session.call(methods.QUOTA_REMOVE, request)
    _print([], as_json)


def quota_list(invocation: Invocation) -> None:
    """Print all quotas."""
    if invocation.arguments:
        raise CommandError("quota list accepts no arguments", BAD_ARGUMENTS)
    session, as_json = open_session(invocation), _is_json(invocation)
    _print(session.call(methods.QUOTA_LIST, admin_pb2.QuotaListRequest()).quotas, as_json)


def parse_size(text: str, flag: str = "--bytes") -> int:
    """Return the bytes of ``1000``, ``64KiB``, ``2GB``: with an i powers of 1024, without powers of 1000.

    Arguments:
        text: of the flag.
        flag: its name, for errors.

    Raises:
        CommandError: it is no size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise CommandError(f"{flag} {text!r} is no size: write 1000, 64KiB or 2GB", BAD_ARGUMENTS)
    unit = (found[2] or "").lower()
    size_bytes: int = int(found[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")]
    if size_bytes >= 1 << 63:
        raise CommandError(f"{flag} {text!r} is too large", BAD_ARGUMENTS)
    return size_bytes


def _prefix(invocation: Invocation, command: str) -> bytes:
    if len(invocation.arguments) != 1:
        raise CommandError(f"quota {command} takes one prefix; '' means all keys", BAD_ARGUMENTS)
    return invocation.arguments[0].encode("utf-8", "surrogateescape")


def _is_json(invocation: Invocation) -> bool:
    form = invocation["write-out"]
    if form not in ("simple", "table", "json"):
        raise CommandError(f"{form} not supported as output format", BAD_FEATURE)
    return bool(invocation["json"]) or form == "json"


def _print(quotas: Any, as_json: bool) -> None:
    if as_json:
        write_line(json.dumps([_plain(quota) for quota in quotas]))
    elif quotas:
        write_line(table.render(_HEADER, [_row(quota) for quota in quotas]))


def _text(prefix: bytes) -> str:
    return prefix.decode("utf-8", "backslashreplace")


def _plain(quota: admin_pb2.PrefixQuota) -> dict[str, Any]:
    names = ("bytes_used", "bytes_max", "bytes_history", "keys_used", "keys_max", "is_counting")
    return {"prefix": _text(quota.prefix), **{name: getattr(quota, name) for name in names}}


def _row(quota: admin_pb2.PrefixQuota) -> list[str]:
    return [
        printable(_text(quota.prefix)),
        str(quota.bytes_used),
        str(quota.bytes_max or "-"),
        "-" if quota.bytes_history < 0 else str(quota.bytes_history) + " (counting)" * quota.is_counting,
        str(quota.keys_used),
        str(quota.keys_max or "-"),
    ]
