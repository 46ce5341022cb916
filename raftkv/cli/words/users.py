"""The words of ``auth``, ``user`` and ``role``: commands, flags, help and examples."""

from __future__ import annotations

from collections.abc import Sequence

from raftkv.cli.goflags.command import Branch, Leaf, MakeLeaf
from raftkv.cli.goflags.pflag import BOOL, Flag

_INTERACTIVE = Flag("interactive", BOOL, True, "ask for the password on the terminal; else it is a line of input")
_INTERVAL = (
    Flag("prefix", BOOL, usage="of all keys that begin with KEY"),
    Flag("from-key", BOOL, usage="of all keys from KEY on, in byte order"),
)
_ENABLE = """There must be a user root; it is given the role root if it lacks it. Whoever comes without a user, or
without a right to what it asks for, is refused from then on."""
_ADD = """Asks for the password, unless NAME:PASSWORD or --new-user-password has it, which everybody on the machine can
read. A user without password is known by the common name of its certificate alone."""
_GRANT = """KIND is read, write or readwrite. Without END and flags it is of KEY alone."""


def auth_commands(leaf: MakeLeaf, shared: Sequence[Flag]) -> list[Branch]:
    """Make the commands about users.

    Arguments:
        leaf: makes a command that only lacks its examples.
        shared: flags that all commands have.
    """
    auth = [
        leaf("enable", "ctl.users:auth_enable", "", "Ask for users from now on", (), _ENABLE)("auth enable"),
        leaf("disable", "ctl.users:auth_disable", "", "Ask for users no longer")("auth disable --user root"),
        leaf("status", "ctl.users:auth_status", "", "Print whether users are asked for")("auth status --user root"),
    ]
    return [
        Branch("auth", "Ask for users, or do not", auth, shared),
        Branch("user", "Add, change and delete users", _user_commands(leaf), shared),
        Branch("role", "Say what users may do", _role_commands(leaf), shared),
    ]


def _user_commands(leaf: MakeLeaf) -> list[Leaf]:
    add = (
        _INTERACTIVE,
        Flag("new-user-password", usage="the password; everybody on the machine can read it here"),
        Flag("no-password", BOOL, usage="the user has no password: its certificate says who it is"),
    )
    detail = Flag("detail", BOOL, usage="print what its roles may do")
    at = "ctl.users"
    return [
        leaf("add", f"{at}:user_add", "NAME[:PASSWORD]", "Add a user", add, _ADD)(
            "user add alice", "user add agent7 --no-password"
        ),
        leaf("delete", f"{at}:user_delete", "NAME", "Delete a user")("user delete alice"),
        leaf("get", f"{at}:user_get", "NAME", "Print the roles of a user", (detail,))("user get alice --detail"),
        leaf("list", f"{at}:user_list", "", "List all users")("user list"),
        leaf("passwd", f"{at}:user_passwd", "NAME", "Change the password of a user", (_INTERACTIVE,))(
            "user passwd alice", "user passwd alice --interactive=false < password.txt"
        ),
        leaf("grant-role", f"{at}:user_grant_role", "NAME ROLE", "Give a user a role")("user grant-role alice jobs"),
        leaf("revoke-role", f"{at}:user_revoke_role", "NAME ROLE", "Take a role from a user")(
            "user revoke-role alice jobs"
        ),
    ]


def _role_commands(leaf: MakeLeaf) -> list[Leaf]:
    at = "ctl.users"
    return [
        leaf("add", f"{at}:role_add", "ROLE", "Add a role")("role add jobs"),
        leaf("delete", f"{at}:role_delete", "ROLE", "Delete a role, also from its users")("role delete jobs"),
        leaf("get", f"{at}:role_get", "ROLE", "Print what a role may do")("role get jobs"),
        leaf("list", f"{at}:role_list", "", "List all roles")("role list"),
        leaf(
            "grant-permission",
            f"{at}:role_grant_permission",
            "ROLE KIND KEY [END]",
            "Let a role read or write keys",
            _INTERVAL,
            _GRANT,
        )("role grant-permission jobs readwrite jobs/ --prefix", "role grant-permission jobs read config"),
        leaf(
            "revoke-permission",
            f"{at}:role_revoke_permission",
            "ROLE KEY [END]",
            "Take the permission of just this interval from a role",
            _INTERVAL,
        )("role revoke-permission jobs jobs/ --prefix"),
    ]
