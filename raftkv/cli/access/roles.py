"""``role add|delete|get|list|grant-permission|revoke-permission``, with the words and exit codes of etcdctl."""

from __future__ import annotations

from typing import Final

from raftkv.cli.ctl.session import open_session
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.client.rpc import methods
from raftkv.client.users import KINDS, interval
from raftkv.pb import auth_pb2, rpc_pb2

_GRANT: Final = "role grant command requires role name, permission type, and key [endkey] as its argument"
_REVOKE: Final = "role revoke-permission command requires role name and key [endkey] as its argument"


def role_add(invocation: Invocation) -> None:
    """Add a role."""
    role = _role(invocation, "add")
    session = open_session(invocation)
    answer = session.call(methods.ROLE_ADD, rpc_pb2.AuthRoleAddRequest(name=role))
    session.printer.user_changed(f"Role {role} created", answer)


def role_delete(invocation: Invocation) -> None:
    """Delete a role."""
    role = _role(invocation, "delete")
    session = open_session(invocation)
    answer = session.call(methods.ROLE_DELETE, rpc_pb2.AuthRoleDeleteRequest(role=role))
    session.printer.user_changed(f"Role {role} deleted", answer)


def role_get(invocation: Invocation) -> None:
    """Print what a role may do."""
    role = _role(invocation, "get")
    session = open_session(invocation)
    session.printer.role_get(role, session.call(methods.ROLE_GET, rpc_pb2.AuthRoleGetRequest(role=role)))


def role_list(invocation: Invocation) -> None:
    """Print the names of all roles."""
    if invocation.arguments:
        raise CommandError("role list command requires no arguments", BAD_ARGUMENTS)
    session = open_session(invocation)
    session.printer.role_list(session.call(methods.ROLE_LIST, rpc_pb2.AuthRoleListRequest()))


def role_grant_permission(invocation: Invocation) -> None:
    """Let a role do something with keys."""
    if len(invocation.arguments) < 3:
        raise CommandError(_GRANT, BAD_ARGUMENTS)
    role, kind = invocation.arguments[:2]
    if kind.lower() not in KINDS:
        raise CommandError(f"invalid permission type: {kind}", BAD_ARGUMENTS)
    key, range_end = _interval(invocation, invocation.arguments[2:])
    permission = auth_pb2.Permission(permType=kind.upper(), key=key, range_end=range_end)
    session = open_session(invocation)
    request = rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission)
    session.printer.user_changed(f"Role {role} updated", session.call(methods.ROLE_GRANT_PERMISSION, request))


def role_revoke_permission(invocation: Invocation) -> None:
    """Take a permission from a role."""
    if len(invocation.arguments) < 2:
        raise CommandError(_REVOKE, BAD_ARGUMENTS)
    role, words = invocation.arguments[0], invocation.arguments[1:]
    key, range_end = _interval(invocation, words)
    session = open_session(invocation)
    request = rpc_pb2.AuthRoleRevokePermissionRequest(role=role, key=key, range_end=range_end)
    answer = session.call(methods.ROLE_REVOKE_PERMISSION, request)
    session.printer.user_changed(
        f"Permission of {_shown(_bytes(words[0]), range_end)} is revoked from role {role}", answer
    )


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
    return interval(_bytes(words[0]), _bytes(end), prefix=prefix, from_key=from_key)


def _bytes(word: str) -> bytes:
    return word.encode("utf-8", "surrogateescape")


def _role(invocation: Invocation, word: str) -> str:
    if len(invocation.arguments) != 1:
        raise CommandError(f"role {word} command requires role name as its argument", BAD_ARGUMENTS)
    return invocation.arguments[0]
