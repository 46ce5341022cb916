"""``alarm``, ``defrag``, ``move-leader``, ``downgrade``, ``snapshot``, users and roles, as in etcdctl; and ``quota``.

``snapshot status`` and ``snapshot restore`` run raftkvutl's code with the output of etcdctl 3.5, because scripts use
them; etcd 3.6 moved them to etcdutl.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, Final

from raftkv.cli import pflag, table
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.members import ask_each, find_leader
from raftkv.cli.ctl.session import REFUSED_PATIENCE_S, ask_password, failed, open_library, open_session, unanswered
from raftkv.cli.pflag import text_bytes
from raftkv.cli.printer import write_line
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, INTERRUPTED, CommandError
from raftkv.cli.table import progress_bar
from raftkv.client import Client, Method
from raftkv.client.admin import KINDS, SavedSnapshot, interval, save
from raftkv.client.errors import explain_failures
from raftkv.client.rpc import methods
from raftkv.errors import ContextDeadlineExceededError, RootRoleNotExistError, StatusError, StorageError, printable
from raftkv.pb import admin_pb2, auth_pb2, rpc_pb2

_Action = rpc_pb2.DowngradeRequest


def alarm_list(invocation: Invocation) -> None:
    """Print the active alarms."""
    invocation.refuse_arguments("alarm list command accepts no arguments")
    open_session(invocation).show("alarms", methods.ALARM, rpc_pb2.AlarmRequest())


def alarm_disarm(invocation: Invocation) -> None:
    """Disarm all alarms and print those that were active."""
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

    session.printer.show("alarms", session.run(disarm))


def defrag(invocation: Invocation) -> None:
    """Defragment each member in turn, continuing after a failure; with --data-dir, the database of a stopped member."""
    if invocation["data-dir"]:
        from raftkv.cli.utl import files

        files.defrag(invocation)
        return
    session = open_session(invocation, refused_patience_s=REFUSED_PATIENCE_S)

    def done(endpoint: str) -> None:
        print(f"Finished defragmenting etcd member[{endpoint}]", flush=True)

    request, failure = rpc_pb2.DefragmentRequest(), "Failed to defragment etcd member[{}]"
    if ask_each(session, invocation, methods.DEFRAGMENT, request, failure, in_turn=done)[1]:
        raise CommandError("", ERROR)


def move_leader(invocation: Invocation) -> None:
    """Transfer leadership from the leader, which must be among the endpoints, to another member."""
    member = invocation.argument("move-leader command needs 1 argument")
    try:
        target = pflag.parse_int(member, base=16, signed=False)
    except ValueError as error:
        raise CommandError(str(error), BAD_ARGUMENTS) from None
    session = open_session(invocation, refused_patience_s=REFUSED_PATIENCE_S)

    async def move(client: Client) -> tuple[int, rpc_pb2.MoveLeaderResponse]:
        found = await find_leader(client, session.endpoints, session.timeout_s)
        if found is None:
            raise CommandError(f"no leader endpoint given at [{' '.join(session.endpoints)}]", BAD_ARGUMENTS)
        endpoint, status = found
        request = rpc_pb2.MoveLeaderRequest(targetID=target)
        answer = await client.call_at(endpoint, methods.MOVE_LEADER, request, timeout_s=session.timeout_s)
        return status.leader, answer

    leader, answer = session.run(move)
    session.printer.show("done", answer, f"Leadership transferred from {leader:x} to {target:x}")


def downgrade_validate(invocation: Invocation) -> None:
    """Check whether the cluster could be downgraded to a version."""
    _downgrade(invocation, "validate", _Action.VALIDATE, _target(invocation))


def downgrade_enable(invocation: Invocation) -> None:
    """Start a downgrade."""
    _downgrade(invocation, "enable", _Action.ENABLE, _target(invocation))


def downgrade_cancel(invocation: Invocation) -> None:
    """Cancel the downgrade in progress; further arguments are ignored, as in etcdctl."""
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
    session.printer.show("done", answer, f"Downgrade {what} success, cluster version {answer.version}")


def snapshot_save(invocation: Invocation) -> None:
    """Save a snapshot of the endpoint's member to a file."""
    path = invocation.argument("snapshot save expects one argument")
    session = open_session(invocation)
    if len(session.endpoints) != 1:
        many = " ".join(session.endpoints)
        raise CommandError(f"snapshot must be requested to one selected node, not multiple [{many}]", INTERRUPTED)
    # Without the flag there is no limit, because the duration depends on the size of the database.
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
    """Return the error for a failed stream; without a connection, etcdctl's line, preceded by the reason."""
    if "desc = connection error: " not in str(error):
        return failed(error, INTERRUPTED)
    reasons = unanswered(explain_failures({endpoint: str(error)}))
    return CommandError(ContextDeadlineExceededError.text, INTERRUPTED, reasons)


def status(invocation: Invocation) -> None:
    """Print hash, revision, keys and size of a snapshot file."""
    from raftkv.cli.utl import files

    files.status(invocation, with_version=False)


def restore_directory(invocation: Invocation) -> None:
    """Create the data directory of a member from a snapshot file."""
    from raftkv.cli.utl import files

    files.restore_directory(invocation)


# -- quota ----------------------------------------------------------------------------------------------------------
#
# ``quota set|remove|list``: limits of the data below a prefix; ``quota limit|unlimit|limits``: limits of the rate of
# requests. etcdctl has no such commands.
#
# Includes the parsing of sizes (``--bytes 512MiB``), and the table.

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
    _show_quotas(invocation, methods.QUOTA_SET, request)


def quota_remove(invocation: Invocation) -> None:
    """Remove the quota of a prefix."""
    request = admin_pb2.QuotaRemoveRequest(prefix=_prefix(invocation, "remove"))
    _show_quotas(invocation, methods.QUOTA_REMOVE, request)


def quota_list(invocation: Invocation) -> None:
    """Print all quotas."""
    _show_quotas(invocation, methods.QUOTA_LIST, admin_pb2.QuotaListRequest())


def quota_limit(invocation: Invocation) -> None:
    """Set a limit on the rate of requests."""
    names = ("requests", "requests-burst", "bytes", "bytes-burst", "watches", "weight")
    if not invocation.changed.intersection(names):
        raise CommandError("quota limit needs --requests, --bytes, --watches, --weight or more of them", BAD_ARGUMENTS)
    limit = _limit(invocation, "limit")
    limit.requests_per_s, limit.requests_burst = invocation["requests"], invocation["requests-burst"]
    limit.bytes_per_s = parse_size(invocation["bytes"])
    limit.bytes_burst = parse_size(invocation["bytes-burst"], "--bytes-burst")
    limit.watches_max = invocation["watches"]
    limit.weight = invocation["weight"] if "weight" in invocation.changed else 0
    _show_limits(invocation, methods.LIMIT_SET, admin_pb2.LimitSetRequest(limit=limit), [limit])


def quota_unlimit(invocation: Invocation) -> None:
    """Remove a rate limit."""
    request = admin_pb2.LimitSetRequest(limit=_limit(invocation, "unlimit"))
    _show_limits(invocation, methods.LIMIT_SET, request)


def quota_limits(invocation: Invocation) -> None:
    """Print all rate limits."""
    _show_limits(invocation, methods.LIMIT_LIST, admin_pb2.LimitListRequest())


_LIMIT_HEADER = ["of", "requests/s", "burst", "bytes/s", "burst", "watches", "weight"]
_LIMIT_NAMES = ("requests_per_s", "requests_burst", "bytes_per_s", "bytes_burst", "watches_max", "weight")


def _limit(invocation: Invocation, command: str) -> admin_pb2.Limit:
    kind, *name = [text_bytes(one) for one in invocation.arguments] or [b""]
    if len(name) > 1:
        raise CommandError(f"quota {command} takes a kind and a name: user alice, prefix jobs/, or each", BAD_ARGUMENTS)
    return admin_pb2.Limit(kind=kind.decode("utf-8", "replace"), name=b"".join(name))


def _show_limits(
    invocation: Invocation, method: Method[Any], request: Any, limits: Sequence[admin_pb2.Limit] = ()
) -> None:
    """Make a call, and print limits: the given ones, or those in the answer."""
    session, as_json = open_library(invocation)
    answer = session.call(method, request)
    plain = [
        {"kind": one.kind, "name": _text(one.name), **{name: getattr(one, name) for name in _LIMIT_NAMES}}
        for one in limits or getattr(answer, "limits", ())
    ]
    rows = [
        [printable(f"{one['kind']} {one['name']}".rstrip()), *(str(one[name] or "-") for name in _LIMIT_NAMES)]
        for one in plain
    ]
    _show(as_json, plain, _LIMIT_HEADER, rows)


def _show(as_json: bool, plain: list[dict[str, Any]], header: list[str], rows: list[list[str]]) -> None:
    """Print JSON, or a table if it has rows."""
    if as_json or rows:
        table.tell(as_json, plain, table.render(header, rows))


def parse_size(text: str, flag: str = "--bytes") -> int:
    """Parse a size such as ``1000``, ``64KiB`` or ``2GB``: units with an i are powers of 1024, others powers of 1000.

    Arguments:
        text: value of the flag.
        flag: name of the flag, for errors.

    Raises:
        CommandError: the text is not a size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise CommandError(f"{flag} {text!r} is not a size: write 1000, 64KiB or 2GB", BAD_ARGUMENTS)
    unit = (found[2] or "").lower()
    size_bytes: int = int(found[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit.removesuffix("i")]
    if size_bytes >= 1 << 63:
        raise CommandError(f"{flag} {text!r} is too large", BAD_ARGUMENTS)
    return size_bytes


def _prefix(invocation: Invocation, command: str) -> bytes:
    return text_bytes(invocation.argument(f"quota {command} takes one prefix; '' means all keys"))


def _show_quotas(invocation: Invocation, method: Method[Any], request: Any) -> None:
    """Make a call, and print the quotas in its answer."""
    session, as_json = open_library(invocation)
    answer = session.call(method, request)
    quotas = [answer.quota] if hasattr(answer, "quota") else getattr(answer, "quotas", ())
    names = ("bytes_used", "bytes_max", "bytes_history", "keys_used", "keys_max", "is_counting")
    plain = [{"prefix": _text(one.prefix), **{name: getattr(one, name) for name in names}} for one in quotas]
    _show(as_json, plain, _HEADER, [_row(one) for one in quotas])


def _text(prefix: bytes) -> str:
    return prefix.decode("utf-8", "backslashreplace")


def _row(quota: admin_pb2.PrefixQuota) -> list[str]:
    return [
        printable(_text(quota.prefix)),
        str(quota.bytes_used),
        str(quota.bytes_max or "-"),
        str(quota.bytes_history) + " (counting)" * quota.is_counting,
        str(quota.keys_used),
        str(quota.keys_max or "-"),
    ]


# -- users ----------------------------------------------------------------------------------------------------------
#
# ``auth enable|disable|status``, ``user`` and ``role``, with the words and exit codes of etcdctl.
#
# Includes the password prompt: twice on the terminal, without echo; without a terminal, or with
# ``--interactive=false``, as lines of standard input. A password on the command line is accepted as in etcdctl,
# although all users of the machine can read it there. For ``run grant`` see ``cli.runs``.


def auth_enable(invocation: Invocation) -> None:
    """Enable authentication; grant the role root to the user root if it is missing."""
    invocation.refuse_arguments("auth enable command does not accept any arguments")
    session = open_session(invocation)

    async def enable(client: Client) -> None:
        async def call(method: Any, request: Any) -> None:
            await client.call(method, request, timeout_s=session.timeout_s)

        try:
            await call(methods.AUTH_ENABLE, rpc_pb2.AuthEnableRequest())
        except RootRoleNotExistError:
            await call(methods.ROLE_ADD, rpc_pb2.AuthRoleAddRequest(name="root"))
            await call(methods.USER_GRANT_ROLE, rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
            await call(methods.AUTH_ENABLE, rpc_pb2.AuthEnableRequest())

    session.run(enable)
    write_line("Authentication Enabled")


def auth_disable(invocation: Invocation) -> None:
    """Disable authentication."""
    invocation.refuse_arguments("auth disable command does not accept any arguments")
    open_session(invocation).call(methods.AUTH_DISABLE, rpc_pb2.AuthDisableRequest())
    write_line("Authentication Disabled")


def auth_status(invocation: Invocation) -> None:
    """Print whether authentication is enabled."""
    invocation.refuse_arguments("auth status command does not accept any arguments")
    open_session(invocation).show("auth_status", methods.AUTH_STATUS, rpc_pb2.AuthStatusRequest())


def user_add(invocation: Invocation) -> None:
    """Add a user."""
    name = invocation.argument("user add command requires user name as its argument")
    session = open_session(invocation)
    request = rpc_pb2.AuthUserAddRequest(name=name)
    if invocation["no-password"]:
        request.options.no_password = True
    elif invocation["new-user-password"]:
        request.password = invocation["new-user-password"]
    else:
        request.name, separator, inline = name.partition(":")
        if separator and not request.name:
            raise CommandError("empty user name is not allowed", BAD_ARGUMENTS)
        request.password = inline if separator else _new_password(invocation, name)
    session.show("changed", methods.USER_ADD, request, f"User {request.name} created")


def user_delete(invocation: Invocation) -> None:
    """Delete a user."""
    name = invocation.argument("user delete command requires user name as its argument")
    _change(invocation, methods.USER_DELETE, rpc_pb2.AuthUserDeleteRequest(name=name), f"User {name} deleted")


def user_get(invocation: Invocation) -> None:
    """Print the roles of a user; with ``--detail`` also their permissions."""
    name = invocation.argument("user get command requires user name as its argument")
    session = open_session(invocation)
    answer = session.call(methods.USER_GET, rpc_pb2.AuthUserGetRequest(name=name))
    if not invocation["detail"]:
        session.printer.show("user_get", answer, name)
        return
    write_line(f"User: {name}")
    for role in answer.roles:
        write_line("")
        session.show("role_get", methods.ROLE_GET, rpc_pb2.AuthRoleGetRequest(role=role), role)


def user_list(invocation: Invocation) -> None:
    """Print the names of all users."""
    invocation.refuse_arguments("user list command requires no arguments")
    open_session(invocation).show("user_list", methods.USER_LIST, rpc_pb2.AuthUserListRequest())


def user_passwd(invocation: Invocation) -> None:
    """Change a user's password."""
    name = invocation.argument("user passwd command requires user name as its argument")
    session = open_session(invocation)
    request = rpc_pb2.AuthUserChangePasswordRequest(name=name, password=_new_password(invocation, name))
    session.show("changed", methods.USER_CHANGE_PASSWORD, request, "Password updated")


def user_grant_role(invocation: Invocation) -> None:
    """Grant a role to a user."""
    user, role = _user_and_role(invocation, "user grant command requires user name and role name as its argument")
    request = rpc_pb2.AuthUserGrantRoleRequest(user=user, role=role)
    _change(invocation, methods.USER_GRANT_ROLE, request, f"Role {role} is granted to user {user}")


def user_revoke_role(invocation: Invocation) -> None:
    """Revoke a role from a user."""
    user, role = _user_and_role(invocation, "user revoke-role requires user name and role name as its argument")
    request = rpc_pb2.AuthUserRevokeRoleRequest(name=user, role=role)
    _change(invocation, methods.USER_REVOKE_ROLE, request, f"Role {role} is revoked from user {user}")


def _change(invocation: Invocation, method: Method[Any], request: Any, told: str) -> None:
    """Make a change and print that it was made."""
    open_session(invocation).show("changed", method, request, told)


def _new_password(invocation: Invocation, name: str) -> str:
    if not invocation["interactive"]:
        return sys.stdin.readline().rstrip("\n")
    password = ask_password(f"Password of {name}: ")
    if not password:
        raise CommandError("empty password", BAD_ARGUMENTS)
    if ask_password(f"Type password of {name} again for confirmation: ") != password:
        raise CommandError("given passwords are different", BAD_ARGUMENTS)
    return password


def _user_and_role(invocation: Invocation, text: str) -> tuple[str, str]:
    if len(invocation.arguments) != 2:
        raise CommandError(text, BAD_ARGUMENTS)
    return invocation.arguments[0], invocation.arguments[1]


_GRANT: Final = "role grant command requires role name, permission type, and key [endkey] as its argument"
_REVOKE: Final = "role revoke-permission command requires role name and key [endkey] as its argument"


def role_add(invocation: Invocation) -> None:
    """Add a role."""
    role = invocation.argument("role add command requires role name as its argument")
    _change(invocation, methods.ROLE_ADD, rpc_pb2.AuthRoleAddRequest(name=role), f"Role {role} created")


def role_delete(invocation: Invocation) -> None:
    """Delete a role."""
    role = invocation.argument("role delete command requires role name as its argument")
    _change(invocation, methods.ROLE_DELETE, rpc_pb2.AuthRoleDeleteRequest(role=role), f"Role {role} deleted")


def role_get(invocation: Invocation) -> None:
    """Print the permissions of a role."""
    role = invocation.argument("role get command requires role name as its argument")
    request = rpc_pb2.AuthRoleGetRequest(role=role)
    open_session(invocation).show("role_get", methods.ROLE_GET, request, role)


def role_list(invocation: Invocation) -> None:
    """Print the names of all roles."""
    invocation.refuse_arguments("role list command requires no arguments")
    open_session(invocation).show("role_list", methods.ROLE_LIST, rpc_pb2.AuthRoleListRequest())


def role_grant_permission(invocation: Invocation) -> None:
    """Grant a role a permission on keys."""
    if len(invocation.arguments) < 3:
        raise CommandError(_GRANT, BAD_ARGUMENTS)
    role, kind = invocation.arguments[:2]
    if kind.lower() not in KINDS:
        raise CommandError(f"invalid permission type: {kind}", BAD_ARGUMENTS)
    key, range_end = _interval(invocation, invocation.arguments[2:])
    permission = auth_pb2.Permission(permType=kind.upper(), key=key, range_end=range_end)
    request = rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission)
    _change(invocation, methods.ROLE_GRANT_PERMISSION, request, f"Role {role} updated")


def role_revoke_permission(invocation: Invocation) -> None:
    """Revoke a role's permission."""
    if len(invocation.arguments) < 2:
        raise CommandError(_REVOKE, BAD_ARGUMENTS)
    role, words = invocation.arguments[0], invocation.arguments[1:]
    key, range_end = _interval(invocation, words)
    request = rpc_pb2.AuthRoleRevokePermissionRequest(role=role, key=key, range_end=range_end)
    told = f"Permission of {_shown(text_bytes(words[0]), range_end)} is revoked from role {role}"
    _change(invocation, methods.ROLE_REVOKE_PERMISSION, request, told)


def _shown(key: bytes, range_end: bytes) -> str:
    first, last = (part.decode("utf-8", "surrogateescape") for part in (key, range_end))
    if not last:
        return f"key {first}"
    return f"range [{first}, <open ended>" if last == "\0" else f"range [{first}, {last})"


def _interval(invocation: Invocation, words: list[str]) -> tuple[bytes, bytes]:
    prefix, from_key = invocation["prefix"], invocation["from-key"]
    if prefix and from_key:
        raise CommandError("--from-key and --prefix flags are mutually exclusive", BAD_ARGUMENTS)
    for flag in ("prefix", "from-key"):
        if invocation[flag] and len(words) > 1:
            raise CommandError(f"unexpected endkey argument with --{flag} flag", BAD_ARGUMENTS)
    end = words[1] if len(words) > 1 else ""
    return interval(text_bytes(words[0]), text_bytes(end), prefix=prefix, from_key=from_key)
