"""Leases: very many, and one with very many keys."""

from __future__ import annotations

import asyncio
import functools

from bench.hostile.attacker import Attacker
from bench.hostile.rows.row import Row
from bench.hostile.users import user_of
from raftkv.pb import rpc_pb2

_LEASE = "/etcdserverpb.Lease/"
_ID = 7_000_000
_TTL_S = 3600


async def _lease_with_keys(attacker: Attacker) -> None:
    await attacker.must(_LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=_ID, TTL=_TTL_S))
    await attacker.fill(attacker.count(50_000, 100), b"leased/", lease=_ID)


async def _revoke(attacker: Attacker) -> None:
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=_ID, keys=True)
    await asyncio.gather(*[attacker.call(_LEASE + "LeaseTimeToLive", request) for _ in range(16)])
    await attacker.call(_LEASE + "LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=_ID))


async def _grant_many(attacker: Attacker) -> None:
    grants = (
        functools.partial(attacker.call, _LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=_ID + number, TTL=_TTL_S))
        for number in range(attacker.count(100_000, 100))
    )
    await attacker.each(grants, in_flight=500)
    listing = (
        functools.partial(attacker.call, _LEASE + "LeaseLeases", rpc_pb2.LeaseLeasesRequest()) for _ in range(20)
    )
    await attacker.each(listing)


async def _mallory(attacker: Attacker) -> None:
    attacker.user_token = await user_of(attacker, "mallory")


async def _grant_as_mallory(attacker: Attacker) -> None:
    """A user without permissions has ever more leases granted that never end; others have one granted now and then."""
    theirs, others = attacker.channel(token=attacker.user_token), attacker.channel()
    request = rpc_pb2.LeaseGrantRequest(TTL=9_000_000_000)

    async def take() -> None:
        left = attacker.count(60_000, 100) // 100
        while left and not attacker.is_over():
            left -= 1
            await attacker.call(_LEASE + "LeaseGrant", request, theirs)

    async def grant() -> bool:
        return await attacker.call(_LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=60), others) is not None

    await asyncio.gather(*[take() for _ in range(100)], attacker.others(grant))


ROWS = (
    Row("share-leases", "60,000 leases without end by a user without permissions, while others have some granted",
        _grant_as_mallory, _mallory, False, users=True),
    Row(
        "lease-50k-keys", "a lease with 50,000 keys asked for its keys, then revoked", _revoke, _lease_with_keys, False
    ),
    Row("leases-100k", "100,000 leases granted, then all listed 20 times", _grant_many, repeats=False),
)  # fmt: skip
