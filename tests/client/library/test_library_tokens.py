"""Tokens that expire during locks, leases and watches: JSON web tokens by the clock, simple ones by a restart."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from raftkv import errors
from raftkv.aio import connect
from tests.procs import RAFTKV, Cluster

pytestmark = pytest.mark.long
FAST = "--bcrypt-cost=4"


async def ask_for_users(endpoint: str) -> None:
    async with connect(endpoint) as kv:
        await kv.users.add("root", "pw")
        await kv.users.grant_role("root", "root")
        await kv.users.enable_auth()


def jwt_flag(folder: Path, ttl: str) -> str:
    key, public = folder / "key.pem", folder / "public.pem"
    make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    key.chmod(0o600)
    subprocess.run(["openssl", "ec", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    return f"--auth-token=jwt,pub-key={public},priv-key={key},sign-method=ES256,ttl={ttl}"


async def test_a_token_is_renewed_unnoticed_before_it_ends(tmp_path: Path) -> None:
    with Cluster(RAFTKV, flags=(FAST, jwt_flag(tmp_path, "2s"))) as cluster:
        (endpoint,) = cluster.endpoints
        await ask_for_users(endpoint)
        async with connect(endpoint, user="root", password="pw") as kv, kv.watch("k") as watch, kv.lock("l") as lock:
            tokens, number = set(), 0
            while len(tokens) < 3:
                await kv.put("k", str(number), fence=lock)
                assert (await asyncio.wait_for(anext(watch), 90)).value == str(number).encode()
                tokens.add(await kv.scope.core.fetch_token(5))
                number += 1
        await with_one_that_nobody_renews(endpoint, await fresh(endpoint))


async def fresh(endpoint: str) -> str:
    async with connect(endpoint, user="root", password="pw") as kv:
        return await kv.scope.core.fetch_token(5)


async def with_one_that_nobody_renews(endpoint: str, token: str) -> None:
    """Its watch ends with it, and tells its reader why."""
    async with connect(endpoint, token=token) as kv, kv.watch("k") as watch:
        with pytest.raises(errors.InvalidAuthTokenError):
            await asyncio.wait_for(anext(watch), 90)
        with pytest.raises(errors.InvalidAuthTokenError):
            await kv.get("k")


async def test_session_of_write_only_user_restores_its_keys() -> None:
    with Cluster(RAFTKV, flags=(FAST,)) as cluster:
        (endpoint,) = cluster.endpoints
        async with connect(endpoint) as kv:
            await kv.users.add("writer", "pw")
            await kv.roles.add("writers")
            await kv.roles.grant("writers", "write", "nodes/", prefix=True)
            await kv.users.grant_role("writer", "writers")
        await ask_for_users(endpoint)
        async with (
            connect(endpoint, user="root", password="pw") as root,
            connect(endpoint, user="writer", password="pw") as kv,
            asyncio.timeout(90),
        ):
            established = asyncio.Event()
            async with kv.session(ttl=5, on_established=lambda _: established.set()) as session:
                await session.keep("nodes/a", "here")
                await root.revoke(session.lease.id)
                await established.wait()
                found = await root.get("nodes/a")
                assert found is not None
                assert found.lease == session.lease.id


async def test_member_that_forgot_tokens_costs_one_login() -> None:
    with Cluster(RAFTKV, flags=(FAST,)) as cluster:
        (endpoint,) = cluster.endpoints
        await ask_for_users(endpoint)
        async with (
            connect(endpoint, user="root", password="pw", timeout_s=30) as kv,
            kv.watch("k") as watch,
            kv.lease(ttl=30) as lease,
            kv.lock("l", lease=lease) as lock,
        ):
            await kv.put("k", "1", fence=lock)
            first = await kv.scope.core.fetch_token(5)
            # What is in the database is not applied from the log again: with it goes the grant of the token.
            await kv.compact((await kv.get("k")).mod_revision, physical=True)
            await asyncio.to_thread(cluster.members[0].kill)
            await asyncio.to_thread(cluster.members[0].restart)
            await kv.put("k", "2", fence=lock)
            assert await kv.scope.core.fetch_token(5) != first
            assert [(await asyncio.wait_for(anext(watch), 90)).value for _ in range(2)] == [b"1", b"2"]
            assert (await lease.info()).ttl > 0
