"""Users and roles of the blocking client: ``kv.users`` and ``kv.roles``, as in ``raftkv.client.users``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftkv.client import users
from raftkv.client.sync.blocking import blocking
from raftkv.client.sync.loop import LoopThread

if TYPE_CHECKING:
    from raftkv.client.sync.library import Client


class _Of:
    """Methods that are those of a part of a client.

    Arguments:
        client: whose they are.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def target(self) -> tuple[LoopThread, Any]:
        """Return the loop and the client, for a call."""
        loop, kv = self._client.target()
        return loop, kv


class Users(_Of):
    """Users, and whether they are asked for."""

    enable_auth = blocking(users.Users.enable_auth, "users")
    disable_auth = blocking(users.Users.disable_auth, "users")
    auth_status = blocking(users.Users.auth_status, "users")
    add = blocking(users.Users.add, "users")
    delete = blocking(users.Users.delete, "users")
    get = blocking(users.Users.get, "users")
    list = blocking(users.Users.list, "users")
    change_password = blocking(users.Users.change_password, "users")
    grant_role = blocking(users.Users.grant_role, "users")
    revoke_role = blocking(users.Users.revoke_role, "users")


class Roles(_Of):
    """Roles and their permissions."""

    add = blocking(users.Roles.add, "roles")
    delete = blocking(users.Roles.delete, "roles")
    get = blocking(users.Roles.get, "roles")
    list = blocking(users.Roles.list, "roles")
    grant = blocking(users.Roles.grant, "roles")
    revoke = blocking(users.Roles.revoke, "roles")
