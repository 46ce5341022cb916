"""``alarm``, ``defrag``, ``move-leader``, ``downgrade`` and ``snapshot``, as etcdctl has them.

``snapshot status`` and ``restore`` are raftkvutl's own, with the output of etcdctl 3.5, which scripts call; 3.6 moved
them to etcdutl.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raftkv.cli.ctl.members import details_of, endpoints_of
from raftkv.cli.ctl.session import failed, open_session, unanswered
from raftkv.cli.goflags import pflag
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.goflags.pflag import text_bytes
from raftkv.cli.output import table
from raftkv.cli.output.printer import write_line
from raftkv.cli.output.table import printable, progress_bar
from raftkv.cli.program import BAD_ARGUMENTS, BAD_FEATURE, ERROR, INTERRUPTED, CommandError
from raftkv.client import Client
from raftkv.client.errors import explain_failures
from raftkv.client.rpc import methods
from raftkv.client.snapshot import SavedSnapshot, save
from raftkv.errors import ConfigError, ContextDeadlineExceededError, RaftKVError, StatusError, StorageError
from raftkv.pb import admin_pb2, rpc_pb2

_Action = rpc_pb2.DowngradeRequest


def alarm_list(invocation: Invocation) -> None:
    """Print the alarms that are on."""
    invocation.refuse_arguments("alarm list command accepts no arguments")
    session = open_session(invocation)
    session.printer.alarms(session.call(methods.ALARM, rpc_pb2.AlarmRequest()))


def alarm_disarm(invocation: Invocation) -> None:
    """Turn all alarms off and print which were on."""
    invocation.refuse_arguments("alarm disarm command accepts no arguments")
    session = open_session(invocation)

    async def disarm(client: Client) -> rpc_pb2.AlarmResponse:
        listed = await client.call(methods.ALARM, rpc_pb2.AlarmRequest(), timeout_s=session.timeout_s)
        gone = rpc_pb2.AlarmResponse()
        for alarm in listed.alarms:
            request = rpc_pb2.AlarmRequest(
                action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=alarm.memberID, alarm=alarm.alarm
            )
            answer = await client.call(methods.ALARM, request, timeout_s=session.timeout_s)
            gone.alarms.extend(answer.alarms)
        return gone

    session.printer.alarms(session.run(disarm))


def defrag(invocation: Invocation) -> None:
    """Defragment each member in turn, going on after one that fails; or, with --data-dir, one that does not run."""
    if invocation["data-dir"]:
        from raftkv.cli.utl import files

        files.defrag(invocation)
        return
    session = open_session(invocation)
    endpoints = endpoints_of(session, invocation)

    async def defragment(client: Client) -> int:
        failures = 0
        for endpoint in endpoints:
            request = rpc_pb2.DefragmentRequest()
            try:
                await client.call_at(endpoint, methods.DEFRAGMENT, request, timeout_s=session.timeout_s)
            except (StatusError, ConfigError) as error:
                failures += 1
                print(f"Failed to defragment etcd member[{endpoint}] ({error})", file=sys.stderr)
                for line in details_of(error):
                    print(f"raftkvctl: {line}", file=sys.stderr)
            else:
                print(f"Finished defragmenting etcd member[{endpoint}]", flush=True)
        return failures

    if session.run(defragment):
        raise CommandError("", ERROR)


def move_leader(invocation: Invocation) -> None:
    """Have the leader, which must be among the endpoints, hand over to another member."""
    member = invocation.argument("move-leader command needs 1 argument")
    try:
        target = pflag.parse_int(member, base=16, signed=False)
    except ValueError as error:
        raise CommandError(str(error), BAD_ARGUMENTS) from None
    session = open_session(invocation)

    async def move(client: Client) -> tuple[int, rpc_pb2.MoveLeaderResponse]:
        for endpoint in session.endpoints:
            status = await client.call_at(
                endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=session.timeout_s
            )
            if status.header.member_id == status.leader:
                request = rpc_pb2.MoveLeaderRequest(targetID=target)
                answer = await client.call_at(endpoint, methods.MOVE_LEADER, request, timeout_s=session.timeout_s)
                return status.leader, answer
        endpoints = " ".join(session.endpoints)
        raise CommandError(f"no leader endpoint given at [{endpoints}]", BAD_ARGUMENTS)

    leader, answer = session.run(move)
    session.printer.move_leader(leader, target, answer)


def downgrade_validate(invocation: Invocation) -> None:
    """Ask whether the cluster could be downgraded to a version."""
    _downgrade(invocation, "validate", _Action.VALIDATE, _target(invocation))


def downgrade_enable(invocation: Invocation) -> None:
    """Begin a downgrade."""
    _downgrade(invocation, "enable", _Action.ENABLE, _target(invocation))


def downgrade_cancel(invocation: Invocation) -> None:
    """Cancel the downgrade under way; words after the command are ignored, as by etcdctl."""
    _downgrade(invocation, "cancel", _Action.CANCEL, "")


def _target(invocation: Invocation) -> str:
    if not invocation.arguments:
        raise CommandError("TARGET_VERSION not provided", BAD_ARGUMENTS)
    if len(invocation.arguments) > 1:
        raise CommandError("too many arguments", BAD_ARGUMENTS)
    if not invocation.arguments[0]:
        raise CommandError("target version not provided", BAD_ARGUMENTS)
    return invocation.arguments[0]


def _downgrade(
    invocation: Invocation, what: str, action: rpc_pb2.DowngradeRequest.DowngradeAction, version: str
) -> None:
    session = open_session(invocation)
    answer = session.call(methods.DOWNGRADE, rpc_pb2.DowngradeRequest(action=action, version=version))
    session.printer.downgrade(what, answer)


def snapshot_save(invocation: Invocation) -> None:
    """Save the state of the endpoint's member to a file."""
    path = invocation.argument("snapshot save expects one argument")
    session = open_session(invocation)
    if len(session.endpoints) != 1:
        many = " ".join(session.endpoints)
        raise CommandError(f"snapshot must be requested to one selected node, not multiple [{many}]", INTERRUPTED)
    # Without the flag there is no limit: how long it takes depends on how much there is.
    timeout_s = session.timeout_s if "command-timeout" in invocation.changed else None

    async def fetch(client: Client) -> SavedSnapshot:
        with progress_bar("", ("Download", "TransferSpeed", "TimeRemaining")) as update:
            async with await client.stream(methods.SNAPSHOT, timeout_s=timeout_s) as stream:
                await stream.send(rpc_pb2.SnapshotRequest())
                stream.half_close()
                try:
                    return await save(stream, path, lambda received, total: update(completed=received, total=total))
                except StatusError as error:
                    raise _failed(error, session.endpoints[0]) from None
                except StorageError as error:
                    raise CommandError(str(error), INTERRUPTED) from None

    saved = session.run(fetch)
    print(f"Snapshot saved at {path}")
    if saved.version:
        print(f"Server version {saved.version}")


def _failed(error: StatusError, endpoint: str) -> CommandError:
    """Make the error of a stream that has failed: where there was no connection, etcdctl's line and before it why."""
    if "desc = connection error: " not in str(error):
        return failed(error, INTERRUPTED)
    reasons = unanswered(explain_failures({endpoint: str(error)}))
    return CommandError(ContextDeadlineExceededError.text, INTERRUPTED, reasons)


def status(invocation: Invocation) -> None:
    """Print hash, revision, keys and size of a snapshot file."""
    from raftkv.cli.utl import files

    with _files_refused():
        files.status(invocation, with_version=False)


def restore_directory(invocation: Invocation) -> None:
    """Make the data directory of a member out of a snapshot file."""
    from raftkv.cli.utl import files

    with _files_refused():
        files.restore_directory(invocation)


@contextmanager
def _files_refused() -> Iterator[None]:
    try:
        yield
    except RaftKVError as error:  # an error text about a file is written for users
        raise CommandError(str(error), ERROR) from None


# -- quota ----------------------------------------------------------------------------------------------------------
#
# ``quota set|remove|list``: limits of what may exist below a prefix; ``quota limit|unlimit|limits``: of how fast
# requests come. etcdctl has no such commands.
#
# Owns the words of sizes: ``--bytes 512MiB``, and the table.

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
    invocation.refuse_arguments("quota list accepts no arguments")
    session, as_json = open_session(invocation), _is_json(invocation)
    _print(session.call(methods.QUOTA_LIST, admin_pb2.QuotaListRequest()).quotas, as_json)


def quota_limit(invocation: Invocation) -> None:
    """Limit how fast requests come."""
    names = ("requests", "requests-burst", "bytes", "bytes-burst", "watches")
    if not invocation.changed.intersection(names):
        raise CommandError("quota limit needs --requests, --bytes, --watches or more of them", BAD_ARGUMENTS)
    limit = _limit(invocation, "limit")
    limit.requests_per_s, limit.requests_burst = invocation["requests"], invocation["requests-burst"]
    limit.bytes_per_s = parse_size(invocation["bytes"])
    limit.bytes_burst = parse_size(invocation["bytes-burst"], "--bytes-burst")
    limit.watches_max = invocation["watches"]
    session, as_json = open_session(invocation), _is_json(invocation)
    session.call(methods.LIMIT_SET, admin_pb2.LimitSetRequest(limit=limit))
    _print_limits([limit], as_json)


def quota_unlimit(invocation: Invocation) -> None:
    """Lift such a limit."""
    request = admin_pb2.LimitSetRequest(limit=_limit(invocation, "unlimit"))
    session, as_json = open_session(invocation), _is_json(invocation)
    session.call(methods.LIMIT_SET, request)
    _print_limits([], as_json)


def quota_limits(invocation: Invocation) -> None:
    """Print all such limits."""
    invocation.refuse_arguments("quota limits accepts no arguments")
    session, as_json = open_session(invocation), _is_json(invocation)
    _print_limits(session.call(methods.LIMIT_LIST, admin_pb2.LimitListRequest()).limits, as_json)


_LIMIT_HEADER = ["of", "requests/s", "burst", "bytes/s", "burst", "watches"]
_LIMIT_NAMES = ("requests_per_s", "requests_burst", "bytes_per_s", "bytes_burst", "watches_max")


def _limit(invocation: Invocation, command: str) -> admin_pb2.Limit:
    kind, *name = [text_bytes(one) for one in invocation.arguments] or [b""]
    if len(name) > 1:
        raise CommandError(f"quota {command} takes a kind and a name: user alice, prefix jobs/, or each", BAD_ARGUMENTS)
    return admin_pb2.Limit(kind=kind.decode("utf-8", "replace"), name=b"".join(name))


def _print_limits(limits: Any, as_json: bool) -> None:
    if as_json:
        plain = [{name: getattr(one, name) for name in _LIMIT_NAMES} for one in limits]
        named = [{"kind": one.kind, "name": _text(one.name), **each} for one, each in zip(limits, plain, strict=True)]
        write_line(json.dumps(named))
    elif limits:
        subjects = (printable(f"{one.kind} {_text(one.name)}".rstrip()) for one in limits)
        numbers = ([str(getattr(one, name) or "-") for name in _LIMIT_NAMES] for one in limits)
        write_line(
            table.render(_LIMIT_HEADER, [[subject, *row] for subject, row in zip(subjects, numbers, strict=True)])
        )


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
    return text_bytes(invocation.argument(f"quota {command} takes one prefix; '' means all keys"))


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
