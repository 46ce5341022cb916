"""Revoked certificates are turned away, on every listener, and lists that are forged are not used."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest

from raftkv.errors import ConfigError
from raftkv.rpc import Channel
from raftkv.server.tls.issue import Pair
from raftkv.server.tls.ports import CHECKED_A_TURN
from tests.rpc.loop import failure, until
from tests.server.tls.room import QUICK, WHO, Room, Serving, asked, serving


@pytest.mark.parametrize("der", [False, True])
async def test_a_revoked_certificate_is_turned_away_from_the_moment_that_the_list_has_it(room: Room, der: bool) -> None:
    bad = room.issue("bad")
    room.issue("good")
    security = room.security("server", crl_file=room.revoke("crl", der=der))
    async with serving(security) as served:
        assert await asked(served.target, room.security("bad").dialing) == "bad"
        room.revoke("crl", bad, der=der)
        await failure(asked(served.target, room.security("bad").dialing))
        assert await asked(served.target, room.security("good").dialing) == "good"
        ((key, _),) = security.rejected._seen.items()
        assert key[1] == f"certificate {bad.certificate.serial_number:x} is revoked"
        assert len(served.certificates) == 2, "the revoked one never reached a handler"


async def test_the_serial_number_of_another_authority_is_not_revoked(room: Room) -> None:
    theirs = room.issue("theirs", by="other")
    ours = room.issue("ours")
    list_of_other = room.revoke("crl", ours, by="other")
    both = room.put("both.crt", room.read("ca.crt", "other.crt"))
    async with serving(room.security("server", ca="", trusted_ca_file=both, crl_file=list_of_other)) as served:
        assert await asked(served.target, room.security("ours").dialing) == "ours"
        assert await asked(served.target, room.security("theirs").dialing) == "theirs"
        room.revoke("crl", theirs, by="other")
        await failure(asked(served.target, room.security("theirs").dialing))
        assert await asked(served.target, room.security("ours").dialing) == "ours"


async def test_a_client_refuses_a_revoked_server(room: Room) -> None:
    pair = room.issue("server")
    async with serving(room.security("server")) as served:
        error = await failure(asked(served.target, room.security("server", crl_file=room.revoke("crl", pair)).dialing))
        assert error.text.endswith(f'certificate {pair.certificate.serial_number:x} is revoked"')


def test_a_forged_or_damaged_list_is_refused(room: Room) -> None:
    forged = room.revoke("crl", signed_by="other")
    with pytest.raises(ConfigError, match="has not signed them"):
        room.security("server", crl_file=forged)
    room.put("crl", b"x")
    with pytest.raises(ConfigError, match="no list of revoked certificates, in PEM or DER"):
        room.security("server", crl_file=room.path("crl"))
    with pytest.raises(ConfigError, match="No such file"):
        room.security("server", crl_file=room.path("nothing"))


class _Kept:
    """A server, three connections that are open to it, and what may happen to one of them."""

    def __init__(self, room: Room, served: Serving, now: list[float]) -> None:
        self.room = room
        self.served = served
        self.now = now

    def revoke(self, pair: Pair) -> None:
        self.room.revoke("crl", pair)
        self.served.security.refresh()

    def expire(self, pair: Pair) -> None:
        self.now[0] = pair.certificate.not_valid_after_utc.timestamp()
        self.served.security.connections.look()

    def distrust(self, _pair: Pair) -> None:
        self.room.put("both.crt", self.room.read("ca.crt"))
        self.room.revoke("crl")
        self.served.security.refresh()


@pytest.mark.parametrize("speaks", ["h2", "http/1.1"])
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (_Kept.revoke, "certificate {serial:x} is revoked"),
        (_Kept.expire, "its certificate has expired"),
        (_Kept.distrust, "its authority is no longer trusted"),
    ],
    ids=["revoked", "expired", "authority taken away"],
)
async def test_an_open_connection_ends_with_its_certificate(room, act, reason, speaks):
    now = [time.time()]
    room.issue("good")
    bad = room.issue("bad", by="other", days=50) if act is _Kept.distrust else room.issue("bad", days=50)
    room.authority("other")
    both = room.put("both.crt", room.read("ca.crt", "other.crt"))
    security = room.security(
        "server", ca="", trusted_ca_file=both, crl_file=room.revoke("crl"), wall_clock=lambda: now[0]
    )
    async with (
        serving(security) as served,
        _open(room, served, speaks, "bad") as ended,
        _open(room, served, speaks, "good") as lives,
    ):
        assert len(security.connections) == 2
        act(_Kept(room, served, now), bad)
        await ended()
        assert len(served.server.connections) == len(security.connections) == 1
        ((key, _),) = security.ended._seen.items()
        assert key[1] == reason.format(serial=bad.certificate.serial_number)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await lives()
    await until(lambda: not security.connections)


@contextlib.asynccontextmanager
async def _open(room: Room, served: Serving, speaks: str, name: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """A connection with a certificate, which has been answered or idles; yields what waits for its end."""
    context = room.security(name).client
    context.set_alpn_protocols([speaks])
    host, port = served.target.split(":")
    before = len(served.security.connections)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    await until(lambda: len(served.security.connections) > before)
    try:
        yield reader.read
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("act", ["revoked", "expired"])
async def test_a_connection_that_was_made_ends_with_the_certificate_of_the_server(room: Room, act: str) -> None:
    now = [time.time()]
    pair = room.issue("server")
    room.issue("caller")
    caller = room.security("caller", crl_file=room.revoke("crl"), wall_clock=lambda: now[0])
    async with serving(room.security("server")) as served, Channel(served.target, caller.dialing, QUICK) as channel:
        assert await channel.unary(WHO, b"", 20) == b"caller"
        if act == "revoked":
            room.revoke("crl", pair)
            caller.refresh()
        else:
            now[0] = pair.certificate.not_valid_after_utc.timestamp()
            caller.connections.look()
        await until(lambda: not served.server.connections)
        assert not caller.connections


async def test_a_turn_looks_at_few_of_very_many_open_connections(room: Room) -> None:
    pair = room.issue("server")
    security = room.security("server", crl_file=room.revoke("crl"))
    cut: list[int] = []
    async with serving(security) as served, Channel(served.target, security.dialing, QUICK) as channel:
        await channel.unary(WHO, b"", 20)
        (opened, *_) = security.connections._open
        for number in range(10 * CHECKED_A_TURN):
            security.connections.add(opened.tls, "", partial(cut.append, number))
        room.revoke("crl", pair)
        security.refresh()
        assert len(cut) <= CHECKED_A_TURN
        await until(lambda: len(cut) == 10 * CHECKED_A_TURN)
