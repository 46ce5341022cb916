"""``auth enable|disable|status``, ``user`` and ``role``, with the words and exit codes of etcdctl.

Owns how passwords are asked for: twice on the terminal, not shown; without a terminal, or with
``--interactive=false``, as lines of standard input. All users of the machine can read a password on the command line;
etcdctl takes one there, and so does raftkvctl. Leaves out ``run grant`` (``cli.runs.access``).
"""

from __future__ import annotations

import sys
from typing import Any, Final

from raftkv.cli.ctl.session import ask_password, open_session
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.goflags.pflag import text_bytes
from raftkv.cli.output.printer import write_line
from raftkv.cli.program import BAD_ARGUMENTS, CommandError
from raftkv.client import Client, Method
from raftkv.client.admin import KINDS, interval
from raftkv.client.rpc import methods
from raftkv.errors import RootRoleNotExistError
from raftkv.pb import auth_pb2, rpc_pb2


def auth_enable(invocation: Invocation) -> None:
    """Ask for users from now on; the user root is given the role root if it lacks it."""
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
    """Ask for users no longer."""
    invocation.refuse_arguments("auth disable command does not accept any arguments")
    open_session(invocation).call(methods.AUTH_DISABLE, rpc_pb2.AuthDisableRequest())
    write_line("Authentication Disabled")


def auth_status(invocation: Invocation) -> None:
    """Print whether users are asked for."""
    invocation.refuse_arguments("auth status command does not accept any arguments")
    session = open_session(invocation)
    session.printer.auth_status(session.call(methods.AUTH_STATUS, rpc_pb2.AuthStatusRequest()))


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
    session.printer.user_changed(f"User {request.name} created", session.call(methods.USER_ADD, request))


def user_delete(invocation: Invocation) -> None:
    """Delete a user."""
    name = invocation.argument("user delete command requires user name as its argument")
    _change(invocation, methods.USER_DELETE, rpc_pb2.AuthUserDeleteRequest(name=name), f"User {name} deleted")


def user_get(invocation: Invocation) -> None:
    """Print the roles of a user, with ``--detail`` what they may do."""
    name = invocation.argument("user get command requires user name as its argument")
    session = open_session(invocation)
    answer = session.call(methods.USER_GET, rpc_pb2.AuthUserGetRequest(name=name))
    if not invocation["detail"]:
        session.printer.user_get(name, answer)
        return
    write_line(f"User: {name}")
    for role in answer.roles:
        write_line("")
        session.printer.role_get(role, session.call(methods.ROLE_GET, rpc_pb2.AuthRoleGetRequest(role=role)))


def user_list(invocation: Invocation) -> None:
    """Print the names of all users."""
    invocation.refuse_arguments("user list command requires no arguments")
    session = open_session(invocation)
    session.printer.user_list(session.call(methods.USER_LIST, rpc_pb2.AuthUserListRequest()))


def user_passwd(invocation: Invocation) -> None:
    """Give a user another password."""
    name = invocation.argument("user passwd command requires user name as its argument")
    session = open_session(invocation)
    request = rpc_pb2.AuthUserChangePasswordRequest(name=name, password=_new_password(invocation, name))
    session.printer.user_changed("Password updated", session.call(methods.USER_CHANGE_PASSWORD, request))


def user_grant_role(invocation: Invocation) -> None:
    """Give a user a role."""
    user, role = _user_and_role(invocation, "user grant command requires user name and role name as its argument")
    request = rpc_pb2.AuthUserGrantRoleRequest(user=user, role=role)
    _change(invocation, methods.USER_GRANT_ROLE, request, f"Role {role} is granted to user {user}")


def user_revoke_role(invocation: Invocation) -> None:
    """Take a role from a user."""
    user, role = _user_and_role(invocation, "user revoke-role requires user name and role name as its argument")
    request = rpc_pb2.AuthUserRevokeRoleRequest(name=user, role=role)
    _change(invocation, methods.USER_REVOKE_ROLE, request, f"Role {role} is revoked from user {user}")


def _change(invocation: Invocation, method: Method[Any], request: Any, told: str) -> None:
    """Make a change and tell that it is made."""
    session = open_session(invocation)
    session.printer.user_changed(told, session.call(method, request))


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
    """Print what a role may do."""
    role = invocation.argument("role get command requires role name as its argument")
    session = open_session(invocation)
    session.printer.role_get(role, session.call(methods.ROLE_GET, rpc_pb2.AuthRoleGetRequest(role=role)))


def role_list(invocation: Invocation) -> None:
    """Print the names of all roles."""
    invocation.refuse_arguments("role list command requires no arguments")
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
    request = rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission)
    _change(invocation, methods.ROLE_GRANT_PERMISSION, request, f"Role {role} updated")


def role_revoke_permission(invocation: Invocation) -> None:
    """Take a permission from a role."""
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
