"""Users for the rows that need some: a cluster that asks for them, and connections that show a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from raftkv.pb import auth_pb2, rpc_pb2
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.framing import Metadata
from raftkv.rpc.limits import ChannelOptions
from raftkv.rpc.status import Headers, RpcError

if TYPE_CHECKING:
    from bench.hostile.attacker import Attacker

AUTH: Final = "/etcdserverpb.Auth/"
ROOT_PASSWORD: Final = "root of the bench"
TIMEOUT_S: Final = 60.0


class UserChannel(Channel):
    """A connection whose every call shows a token; empty: none does."""

    def __init__(self, endpoint: str | list[str], token: str = "", options: ChannelOptions | None = None) -> None:
        super().__init__(endpoint, options=options)
        self._shown: Metadata = (("token", token),) if token else ()

    def _headers(self, path: str, timeout_s: float | None, metadata: Metadata) -> Headers:
        return super()._headers(path, timeout_s, (*metadata, *self._shown))


def permission(key: bytes, range_end: bytes = b"") -> auth_pb2.Permission:
    """Reading and writing an interval."""
    return auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, key=key, range_end=range_end)


async def user_of(attacker: Attacker, name: str, *permissions: auth_pb2.Permission) -> str:
    """Make a user with so many permissions, unless an earlier row has, and return a token of it."""
    try:
        await attacker.must(AUTH + "UserAdd", rpc_pb2.AuthUserAddRequest(name=name, password=ROOT_PASSWORD))
        await attacker.must(AUTH + "RoleAdd", rpc_pb2.AuthRoleAddRequest(name=name))
    except RpcError as error:
        if "already exists" not in str(error):
            raise
    for one in permissions:
        await attacker.must(AUTH + "RoleGrantPermission", rpc_pb2.AuthRoleGrantPermissionRequest(name=name, perm=one))
    await attacker.must(AUTH + "UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user=name, role=name))
    return await attacker.login(name, ROOT_PASSWORD)


async def secure(endpoint: str) -> str:
    """Have a cluster ask for users; a token of root."""
    async with Channel(endpoint) as channel:

        async def call(method: str, request: Any) -> bytes:
            return await channel.unary(AUTH + method, request.SerializeToString(), TIMEOUT_S)

        await call("UserAdd", rpc_pb2.AuthUserAddRequest(name="root", password=ROOT_PASSWORD))
        await call("RoleAdd", rpc_pb2.AuthRoleAddRequest(name="root"))
        await call("UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
        await call("AuthEnable", rpc_pb2.AuthEnableRequest())
        answer = await call("Authenticate", rpc_pb2.AuthenticateRequest(name="root", password=ROOT_PASSWORD))
        return rpc_pb2.AuthenticateResponse.FromString(answer).token
