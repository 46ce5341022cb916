"""Users, roles and tokens: logins that cost a hash each, very many rights, changes of them under many watches."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from bench.hostile.attacker import Attacker
from bench.hostile.rows.row import Row
from bench.hostile.users import AUTH, UserChannel, permission
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

_KV, _LEASE_ID = "/etcdserverpb.KV/", 7_100_000
_PASSWORD = "a password of the bench"


async def _logins(attacker: Attacker) -> None:
    """Wrong and right passwords, of users that are there and that are not."""

    def login(number: int) -> Callable[[], Awaitable[Any]]:
        password = "wrong" if number % 2 else _PASSWORD
        request = rpc_pb2.AuthenticateRequest(name=f"u{number % 20}", password=password)
        return functools.partial(attacker.call, AUTH + "Authenticate", request)

    await attacker.each(map(login, range(attacker.count(10_000, 4))), in_flight=500)


async def _user(attacker: Attacker, name: str, **options: bool) -> None:
    await attacker.call(AUTH + "UserAdd", rpc_pb2.AuthUserAddRequest(name=name, password=_PASSWORD, **options))


async def _two_users(attacker: Attacker) -> None:
    for number in range(2):
        await _user(attacker, f"u{number}")


async def _permissions(attacker: Attacker) -> None:
    """A role that is granted a million keys, each a little from the last, until that is refused; then one of 1 MB."""
    add = rpc_pb2.AuthRoleAddRequest(name="wide")
    await attacker.call(AUTH + "RoleAdd", add)

    def grant(key: bytes) -> Callable[[], Awaitable[Any]]:
        request = rpc_pb2.AuthRoleGrantPermissionRequest(name="wide", perm=permission(key))
        return functools.partial(attacker.call, AUTH + "RoleGrantPermission", request)

    await attacker.each((grant(b"%08d" % (2 * number)) for number in range(attacker.count(11_000, 10))), in_flight=1)
    await attacker.each(grant(b"%02d" % number + b"k" * 1_000_000) for number in range(attacker.count(20, 1)))
    await attacker.each(functools.partial(attacker.call, AUTH + "RoleGet", rpc_pb2.AuthRoleGetRequest(role="wide"))
                        for _ in range(attacker.count(50, 1)))  # fmt: skip


async def _users_of_one_role(attacker: Attacker) -> None:
    """Thousands of users have one role, and each change of it concerns all of them. One at a time: each makes the
    revision of the users by which the others were let in an old one."""
    await attacker.call(AUTH + "RoleAdd", rpc_pb2.AuthRoleAddRequest(name="all"))
    names = [f"all{number}" for number in range(attacker.count(2_000, 5))]
    without = {"no_password": True}
    requests = (rpc_pb2.AuthUserAddRequest(name=name, options=without) for name in names)
    await attacker.each((functools.partial(attacker.call, AUTH + "UserAdd", one) for one in requests), in_flight=1)
    grants = (rpc_pb2.AuthUserGrantRoleRequest(user=name, role="all") for name in names)
    await attacker.each((functools.partial(attacker.call, AUTH + "UserGrantRole", one) for one in grants), 1)


async def _change_role(attacker: Attacker) -> None:
    for key in (b"a", b"b", b"c"):
        request = rpc_pb2.AuthRoleGrantPermissionRequest(name="all", perm=permission(key))
        await attacker.call(AUTH + "RoleGrantPermission", request)
    await attacker.call(AUTH + "UserList", rpc_pb2.AuthUserListRequest())
    await attacker.call(AUTH + "RoleDelete", rpc_pb2.AuthRoleDeleteRequest(role="all"))


async def _lease_of_a_user(attacker: Attacker) -> None:
    """A lease with a million keys, and a user whose permissions lie between them."""
    await attacker.must("/etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=_LEASE_ID, TTL=3600))
    await attacker.fill(attacker.count(1_000_000, 100), b"mine/", lease=_LEASE_ID)
    await attacker.call(AUTH + "RoleAdd", rpc_pb2.AuthRoleAddRequest(name="parts"))
    await _user(attacker, "parts")
    keys, parts = attacker.count(1_000_000, 100), attacker.count(9_000, 10)
    step = keys // parts + 1
    # Each part ends behind its last key, and the next begins at its first: they do not touch.
    intervals = ((b"mine/%08d" % (part * step), b"mine/%08d\0" % (part * step + step - 1)) for part in range(parts))
    grants = (
        rpc_pb2.AuthRoleGrantPermissionRequest(name="parts", perm=permission(low, high)) for low, high in intervals
    )
    await attacker.each((functools.partial(attacker.call, AUTH + "RoleGrantPermission", one) for one in grants), 1)
    await attacker.call(AUTH + "UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user="parts", role="parts"))
    attacker.user_token = await attacker.login("parts", _PASSWORD)


async def _puts_with_the_lease(attacker: Attacker) -> None:
    request = rpc_pb2.PutRequest(key=b"mine/00000000", value=b"x", lease=_LEASE_ID)
    channel = attacker.channel(token=attacker.user_token)
    await attacker.each(functools.partial(attacker.call, _KV + "Put", request, channel)
                        for _ in range(attacker.count(1_000, 5)))  # fmt: skip


async def _watches_and_changes(attacker: Attacker) -> None:
    """Many watches, and a change of rights after the other: each watch has to be looked at again."""
    create = rpc_pb2.WatchCreateRequest(key=b"watched", range_end=b"watchee")
    message = rpc_pb2.WatchRequest(create_request=create).SerializeToString()
    async with attacker.stream("/etcdserverpb.Watch/Watch", attacker.channel()) as stream:
        reading = asyncio.create_task(_drain(stream))
        for _ in range(attacker.count(10_000, 10)):
            await stream.send(message)
        number = 0
        while not attacker.is_over():
            number += 1
            await attacker.call(AUTH + "RoleAdd", rpc_pb2.AuthRoleAddRequest(name=f"change{number}"))
            await attacker.call(AUTH + "RoleDelete", rpc_pb2.AuthRoleDeleteRequest(role=f"change{number}"))
        reading.cancel()
    attacker.notes["changes"] = 2 * number


async def _drain(stream: Any) -> None:
    while await stream.receive() is not None:
        pass


async def _made_up_names(attacker: Attacker) -> None:
    """160 logins in flight, of users that are not there; one that is logs in meanwhile."""
    channels = [attacker.channel(token="") for _ in range(4)]

    async def storm(number: int) -> None:
        count = 0
        while not attacker.is_over():
            count += 1
            request = rpc_pb2.AuthenticateRequest(name=f"made-up-{number}-{count}", password=_PASSWORD)
            await attacker.call(AUTH + "Authenticate", request, channels[number % 4])

    others = attacker.channel(token="")

    async def login() -> bool:
        request = rpc_pb2.AuthenticateRequest(name="u0", password=_PASSWORD)
        return await attacker.call(AUTH + "Authenticate", request, others) is not None

    await asyncio.gather(*[storm(number) for number in range(160)], attacker.others(login))


async def _tokens_ahead(attacker: Attacker) -> None:
    """200 calls with made-up tokens of the future; another client logs in, and shows its token to another member."""
    leader = attacker.channel(token="")
    attacker.target = (attacker.target + 1) % len(attacker.endpoints)
    made_up = attacker.channel(token="y" * 24 + ".99999999999999999999")

    async def storm() -> None:
        while not attacker.is_over():
            await attacker.call(_KV + "Range", rpc_pb2.RangeRequest(key=b"k"), made_up)

    async def show() -> bool:
        request = rpc_pb2.AuthenticateRequest(name="u0", password=_PASSWORD)
        answer = await attacker.call(AUTH + "Authenticate", request, leader)
        if answer is None:
            return False
        token = rpc_pb2.AuthenticateResponse.FromString(answer).token
        async with UserChannel(attacker.endpoint, token) as shown:
            try:
                await shown.unary(_KV + "Range", rpc_pb2.RangeRequest(key=b"k").SerializeToString(), 10.0)
            except RpcError as error:
                return "permission denied" in str(error)  # it is known, and may do nothing
            return True

    await asyncio.gather(*[storm() for _ in range(200)], attacker.others(show))


ROWS = (
    Row("share-logins", "160 logins in flight with made-up names, while a user logs in", _made_up_names, _two_users,
        False, users=True),
    Row("share-tokens-ahead", "200 calls with made-up tokens, while a user shows a new one to a follower",
        _tokens_ahead, _two_users, False, users=True),
    Row("logins-10k", "10,000 logins at once, half of them wrong", _logins, _two_users, False, users=True),
    Row("permissions", "a role of very many, and very long, permissions", _permissions, repeats=False, users=True),
    Row("role-of-2k-users", "a role that 2,000 users have is changed and deleted", _change_role, _users_of_one_role,
        False, users=True),
    Row("lease-1m-keys-of-a-user", "puts with a lease of a million keys by a user of 9,000 permissions",
        _puts_with_the_lease, _lease_of_a_user, False, users=True),
    Row("watches-10k-changes", "roles change while 10,000 watches are open", _watches_and_changes, repeats=False,
        users=True),
)  # fmt: skip
