"""TLS contexts: private keys, cipher suites by Go's names, and warnings before certificates expire."""

from __future__ import annotations

import logging
import os
import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raftkv.config import ServerConfig, TLSFiles
from raftkv.errors import ConfigError
from raftkv.rpc.tls import CLIENT_PROTOCOLS, fixed
from raftkv.server.tls.certificates import WARNING_S, is_open_to_others, warn
from raftkv.server.tls.context import Rules, openssl_names, server_context
from raftkv.server.tls.issue import with_self_signed
from raftkv.server.tls.ports import INTERVAL_S, REMEMBERED_MAX, FailureLog, Ports
from tests.server.tls.room import Room, asked, serving


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666])
def test_a_key_that_others_may_read_is_used_and_known_as_open(room, mode, monkeypatch):
    """etcd takes such keys; ``--secure`` does not start with one."""
    key = room.path("server.key")
    os.chmod(key, mode)
    assert server_context(room.files("server"), Rules())
    assert is_open_to_others(key)
    # Keys that the system keeps for a service: root's, for its group to read.
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    assert is_open_to_others(key) == (not (Path(key).stat().st_uid == 0 and mode == 0o640))
    for private in (0o600, 0o400):
        os.chmod(key, private)
        assert not is_open_to_others(key)
    assert not is_open_to_others(room.path("absent.key"))


def test_cipher_suites_have_the_names_of_go(room: Room) -> None:
    chosen = ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "TLS_AES_128_GCM_SHA256")
    context = server_context(room.files("server"), Rules(cipher_suites=chosen))
    old = [suite["name"] for suite in context.get_ciphers() if suite["protocol"] != "TLSv1.3"]
    assert old == ["ECDHE-ECDSA-AES256-GCM-SHA384"]
    only_new = server_context(room.files("server"), Rules(cipher_suites=("TLS_CHACHA20_POLY1305_SHA256",)))
    assert only_new.minimum_version is ssl.TLSVersion.TLSv1_3
    for name, text in (
        ("TLS_FOO", 'unexpected TLS cipher suite "TLS_FOO"'),
        ("TLS_RSA_WITH_RC4_128_SHA", "is not safe, and raftkv does not speak it"),
    ):
        with pytest.raises(ConfigError, match=text):
            openssl_names([name])


async def test_both_ends_keep_to_the_chosen_suite(room: Room) -> None:
    rules = Rules(max_version="TLS1.2", cipher_suites=("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",))
    async with serving(room.security("server", rules=rules)) as served:
        assert await asked(served.target, room.security("server").dialing) == "server"


def test_ends_are_warned_of_in_the_log_and_are_metrics(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    room.issue("server", days=20)
    room.issue("peer", days=3)
    crl = room.revoke("crl")
    config = ServerConfig(client_tls=room.files("server", crl_file=crl), peer_tls=room.files("peer"))
    ports = Ports.of(config)
    for port in (ports.client, ports.peer):
        warn(port.ends)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" expires in ")[1][:7] for line in lines] == ["19 days", "4 days,", "2 days,"]
    assert lines[1].startswith(f"list of revoked certificates {crl} expires in 4 days")
    ends, failures = ports.collect()
    found = {(sample.labels["port"], sample.labels["use"]): sample.value for sample in ends.samples}
    assert set(found) == {("client", "server"), ("client", "ca"), ("client", "crl"), ("peer", "server"), ("peer", "ca")}
    assert {sample.name for sample in ends.samples} == {"raftkv_certificate_expires_seconds"}
    assert sum(sample.value for sample in failures.samples) == 0
    caplog.clear()
    end, now_s = ports.peer.ends["server"], time.time()
    warn({"server": replace(end, time_s=now_s + WARNING_S + 60)})
    assert caplog.records == []
    warn({"server": replace(end, time_s=now_s - 1)})
    assert caplog.records[0].levelno == logging.ERROR
    assert " expired on " in caplog.text


def test_failures_cost_a_line_for_each_address_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log = FailureLog("%s: %s", lambda: now_s)
    for port in range(100):
        log.note(f"10.0.0.1:{port}", "bad")
        log.note(f"10.0.0.1:{port}", "worse")
    assert [record.getMessage() for record in caplog.records] == ["10.0.0.1:0: bad", "10.0.0.1:0: worse"]
    now_s = INTERVAL_S
    log.note("10.0.0.1:7", "bad")
    assert caplog.records[-1].getMessage() == "10.0.0.1:7: bad (99 more like it since the last line)"
    caplog.clear()
    for number in range(10 * REMEMBERED_MAX):
        log.note(f"10.1.{number // 256}.{number % 256}:1", "bad")
    assert len(log._seen) <= REMEMBERED_MAX + 1
    assert len(caplog.records) <= REMEMBERED_MAX
    assert log.count == 201 + 10 * REMEMBERED_MAX


async def test_a_member_makes_its_own_certificates_once(room: Room) -> None:
    data_dir = room.folder / "data"
    config = ServerConfig(
        data_dir=str(data_dir),
        client_tls=TLSFiles(self_signed=True),
        peer_tls=TLSFiles(self_signed=True),
        listen_client_urls=("https://127.0.0.1:2379",),
        advertise_client_urls=("https://db.example:2379",),
        self_signed_validity_years=2,
    )
    made = with_self_signed(config)
    assert made == with_self_signed(config)
    assert made.client_tls.cert_file == str(data_dir / "fixtures" / "client" / "cert.pem")
    for path in data_dir.rglob("*.pem"):
        assert path.stat().st_mode & 0o077 == 0
    assert data_dir.stat().st_mode & 0o077 == 0
    first = room.read("data/fixtures/peer/cert.pem")
    assert with_self_signed(config).peer_tls.cert_file == room.path("data/fixtures/peer/cert.pem")
    assert room.read("data/fixtures/peer/cert.pem") == first
    ports = Ports.of(made)
    assert (ports.client.ends["server"].time_s - time.time()) / 86_400 == pytest.approx(730, abs=1)
    # It encrypts, and proves nothing: peers take each other's, and none has a name.
    async with serving(ports.peer) as served:
        assert await asked(served.target, Ports.of(made).peer.dialing) == ""
    context = ssl.create_default_context(cafile=made.client_tls.cert_file)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    async with serving(ports.client) as served:
        assert await asked(served.target, fixed(context, CLIENT_PROTOCOLS)) == ""
