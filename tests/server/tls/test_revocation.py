"""Revoked certificates are turned away, on every listener, and lists that are forged are not used."""

from __future__ import annotations

import pytest

from raftkv.errors import ConfigError
from tests.rpc.loop import failure, on_loop
from tests.server.tls.room import Room, asked, serving


@pytest.mark.parametrize("der", [False, True])
@on_loop
async def test_a_revoked_certificate_is_turned_away_from_the_moment_that_the_list_has_it(room: Room, der: bool) -> None:
    room.issue("server")
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


@on_loop
async def test_the_serial_number_of_another_authority_is_not_revoked(room: Room) -> None:
    room.issue("server")
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


@on_loop
async def test_who_connects_refuses_a_revoked_server(room: Room) -> None:
    pair = room.issue("server")
    async with serving(room.security("server")) as served:
        error = await failure(asked(served.target, room.security("server", crl_file=room.revoke("crl", pair)).dialing))
        assert error.text.endswith(f'certificate {pair.certificate.serial_number:x} is revoked"')


def test_a_forged_or_damaged_list_is_refused(room: Room) -> None:
    room.issue("server")
    forged = room.revoke("crl", signed_by="other")
    with pytest.raises(ConfigError, match="has not signed them"):
        room.security("server", crl_file=forged)
    room.put("crl", b"x")
    with pytest.raises(ConfigError, match="no list of revoked certificates, in PEM or DER"):
        room.security("server", crl_file=room.path("crl"))
    with pytest.raises(ConfigError, match="No such file"):
        room.security("server", crl_file=room.path("nothing"))
