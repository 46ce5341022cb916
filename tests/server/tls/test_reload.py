"""Files that are replaced while connections come: the new count from the next handshake on, broken ones never do."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import pytest

from raftkv.client import ClientOptions
from raftkv.client.rpc.transport import channel_arguments, tls_context
from raftkv.config import TLSFiles
from raftkv.errors import ConfigError
from raftkv.rpc import Channel, Code
from raftkv.server.tls import ports as module
from raftkv.server.tls.context import Rules
from raftkv.server.tls.ports import RETRY_S, PortSecurity
from raftkv.urls import parse_endpoint
from tests.rpc.loop import failure
from tests.server.tls.room import QUICK, WHO, Room, asked, serving


def _serial(security: PortSecurity) -> str:
    context = security.listening.context() if security.listening is not None else None
    assert context is not None
    return str(id(context))


async def test_a_new_certificate_and_a_new_authority_count_at_once(room: Room) -> None:
    room.issue("alice")
    security = room.security("server")
    alice = room.security("alice")
    async with serving(security) as served:
        assert await asked(served.target, alice.dialing) == "alice"
        room.issue("alice", common_name="bob")
        assert await asked(served.target, alice.dialing) == "bob"
        # The authority is replaced on both sides, and with it all certificates.
        del room.authorities["ca"]
        room.issue("server")
        assert (await failure(asked(served.target, room.security("alice").dialing))).code is Code.UNAVAILABLE
        room.issue("alice")
        assert await asked(served.target, alice.dialing) == "alice"


async def test_running_client_reloads_its_certificate_files(room: Room) -> None:
    """Take up what files became before the first connection too, and nothing while they are of no use."""
    room.issue("alice")
    context = tls_context(room.path("ca.crt"), room.path("alice.crt"), room.path("alice.key"))
    room.issue("alice", common_name="bob")
    async with serving(room.security("server")) as served:
        _, security, _ = channel_arguments(parse_endpoint(served.target), ClientOptions(tls=context))
        assert await asked(served.target, security) == "bob"
        kept = room.read("alice.key")
        room.issue("other")
        for damage in ("key of another", "not PEM", "gone"):
            room.damage("alice.key", damage)
            assert await asked(served.target, security) == "bob"
        room.put("alice.key", kept)
        # The authority is replaced on both sides, and with it all certificates.
        del room.authorities["ca"]
        room.issue("server")
        assert (await failure(asked(served.target, security))).code is Code.UNAVAILABLE
        room.issue("alice", common_name="carol")
        assert await asked(served.target, security) == "carol"


@pytest.mark.parametrize("damage", ["key of another", "not PEM", "gone"])
async def test_unusable_certificate_changes_nothing(room: Room, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    security = room.security("server")
    kept = room.read("server.key")
    caplog.set_level(logging.INFO)
    async with serving(security) as served:
        room.issue("other")
        room.damage("server.key", damage)
        for _ in range(3):
            assert await asked(served.target, room.security("other").dialing) == "other"
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert line.startswith(
            "the changed TLS files of the peer port cannot be loaded, the previous ones stay in use: "
        )
        assert "\n" not in line
        room.put("server.key", kept)
        assert await asked(served.target, room.security("server").dialing) == "server"
        assert caplog.records[-1].getMessage().endswith("TLS files of the peer port")


@pytest.mark.long
async def test_no_call_fails_while_files_change(room: Room) -> None:
    """Calls over old connections and over new ones, with the certificate and the key replaced one after the other."""
    room.issue("alice")
    dialing = room.security("alice").dialing
    done = 0
    async with serving(room.security("server")) as served, Channel(served.target, dialing, QUICK) as old:

        async def call() -> None:
            nonlocal done
            while done < 120:
                assert await asked(served.target, dialing) == "alice"
                assert await old.unary(WHO, b"", 20) == b"alice"
                done += 1

        async def replace() -> None:
            rounds = 0
            while done < 120:
                await asyncio.sleep(0)
                if done > 10 * rounds:
                    rounds += 1
                    room.issue("server" if rounds % 2 else "alice")

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(call())
            group.create_task(replace())
        assert served.security.rejected.count == 0


def test_nothing_is_loaded_again_that_has_not_changed(room: Room) -> None:
    security = room.security("server")
    assert _serial(security) == _serial(security)
    room.issue("server")
    first = _serial(security)
    assert first == _serial(security)


def test_files_that_could_not_be_read_for_a_moment_are_tried_again(room, caplog, monkeypatch):
    """A key that is its owner's only after `chown`, or no descriptor left: nothing of the file changes then."""
    caplog.set_level(logging.INFO)
    now_s = [1000.0]
    security = PortSecurity("peer", room.files("server"), Rules(), clock=lambda: now_s[0])
    first = _serial(security)
    room.issue("server")
    loads: list[str] = []

    def cannot_be_read(files: TLSFiles, rules: Rules) -> NoReturn:
        loads.append(files.cert_file)
        raise ConfigError("cannot use certificate: Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(module, "server_context", cannot_be_read)
        for _ in range(3):
            assert _serial(security) == first
        now_s[0] += RETRY_S
        assert _serial(security) == first
    assert len(loads) == 2
    assert _serial(security) == first
    now_s[0] += RETRY_S
    assert _serial(security) != first
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    second = _serial(security)
    now_s[0] += RETRY_S
    assert _serial(security) == second


def test_unusable_certificate_is_refused_at_the_start(room: Room) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        room.security("nobody")
    room.put("empty.crt", b"x")
    with pytest.raises(ConfigError, match=r"cannot use certificate authorities .*empty\.crt"):
        room.security("server", ca="", trusted_ca_file=room.path("empty.crt"))
