"""Insecure settings: each has a log line, and ``--secure`` refuses to start with any."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest

from raftkv.config import ServerConfig, TLSFiles
from raftkv.server import insecure_settings
from raftkv.server.insecure_settings import InsecureSetting, hardened, list_insecure_settings, refusal

FILES = TLSFiles(cert_file="c.crt", key_file="c.key", trusted_ca_file="ca.crt")
CLOSED = ServerConfig(
    name="a",
    data_dir="d",
    initial_cluster="a=https://10.0.0.1:2380",
    listen_peer_urls=("https://10.0.0.1:2380",),
    initial_advertise_peer_urls=("https://10.0.0.1:2380",),
    listen_client_urls=("https://10.0.0.1:2379", "unixs://socket:1"),
    advertise_client_urls=("https://10.0.0.1:2379",),
    listen_metrics_urls=("http://127.0.0.1:2381", "http://localhost:2382", "https://10.0.0.1:2383"),
    client_tls=FILES,
    peer_tls=FILES,
    secure=True,
)
LOCAL = "http://127.0.0.1:1"


def test_a_closed_member_has_no_line() -> None:
    assert list_insecure_settings(CLOSED) == []


@pytest.mark.parametrize(
    ("change", "beginning"),
    [
        ({"listen_peer_urls": (LOCAL,)}, f"peers on {LOCAL} use no TLS"),
        ({"listen_client_urls": ("HTTP://0.0.0.0:2379",)}, "clients on HTTP://0.0.0.0:2379 use no TLS"),
        ({"initial_advertise_peer_urls": (LOCAL,)}, f"peers on {LOCAL} use no TLS"),
        ({"listen_client_urls": (LOCAL,)}, f"clients on {LOCAL} use no TLS"),
        ({"advertise_client_urls": (LOCAL,)}, f"clients on {LOCAL} use no TLS"),
        ({"client_tls": replace(FILES, trusted_ca_file="")}, "clients need no certificate"),
        ({"client_tls": TLSFiles(self_signed=True)}, "--auto-tls does not verify"),
        ({"peer_tls": TLSFiles(self_signed=True)}, "--peer-auto-tls does not verify"),
        (
            {"peer_tls": replace(FILES, trusted_ca_file=""), "listen_peer_urls": ("https://127.0.0.1:1",)},
            "peers need no certificate",
        ),
        ({"peer_tls": replace(FILES, skip_san_verification=True)}, "--peer-skip-client-san-verification"),
        ({"insecure_peers": True}, "--insecure-peers"),
        ({"listen_metrics_urls": ("http://0.0.0.0:1",)}, "metrics on http://0.0.0.0:1 use no TLS"),
        ({"cors": ("http://a:1",)}, "--cors: web pages of http://a:1 can send requests"),
        ({"host_whitelist": ("a", "*")}, "--host-whitelist '*'"),
        ({"bcrypt_cost": 4}, "--bcrypt-cost 4"),
        ({"auth_min_password_length": 3}, "--auth-min-password-length 3"),
        ({"unsafe_no_fsync": True}, "--unsafe-no-fsync"),
    ],
)
def test_each_choice_that_opens_a_member_has_a_line(change: dict[str, object], beginning: str) -> None:
    (found,) = list_insecure_settings(replace(CLOSED, **change))
    assert found.what.startswith(beginning)
    assert found.remedy
    assert "\n" not in str(found)


def test_every_insecure_flag_is_looked_at() -> None:
    """A setting whose name says that it is dangerous for strangers' sake is not forgotten."""
    looked_at = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(insecure_settings)))
        if isinstance(node, ast.Attribute)
    }
    names = {*ServerConfig.__dataclass_fields__, *TLSFiles.__dataclass_fields__}
    named = {
        name for name in names if "insecure" in name or "skip" in name or name == "self_signed" or "unsafe" in name
    }
    assert named == {"insecure_peers", "skip_san_verification", "self_signed", "unsafe_no_fsync"}
    assert named <= looked_at


def test_private_keys_that_others_may_read_have_a_line_each(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("server", "client", "peer", "tokens")]
    for name in names:
        Path(name).touch(0o600)
    config = replace(
        CLOSED,
        client_tls=replace(FILES, key_file=names[0], client_cert_file="x.crt", client_key_file=names[1]),
        peer_tls=replace(FILES, key_file=names[2]),
        auth_token=f"jwt,priv-key={names[3]},sign-method=HS256",
    )
    assert list_insecure_settings(config) == []
    for name in names:
        Path(name).chmod(0o644)
    assert [one.remedy for one in list_insecure_settings(config)] == [f"chmod 0600 {name}" for name in names]


def test_missing_settings_are_made_safe() -> None:
    assert hardened(CLOSED).auth_min_password_length == 8
    assert hardened(replace(CLOSED, auth_min_password_length=20)).auth_min_password_length == 20


def test_the_audit_log_is_in_the_data_directory_unless_it_is_elsewhere() -> None:
    assert hardened(CLOSED).audit_log == str(Path("d", "audit.log"))
    assert hardened(replace(CLOSED, audit_log="-")).audit_log == "-"


def test_a_refusal_is_one_list() -> None:
    assert refusal([InsecureSetting("this is open", "--flag"), InsecureSetting("that too", "leave it out")]) == (
        "--secure: these settings are insecure (`raftkv certs` makes certificates):\n"
        "  - this is open\n"
        "      --flag\n"
        "  - that too\n"
        "      leave it out"
    )
