"""Texts that people and programs write: URLs, endpoints, Go's values, the language of txns, manifests."""

from __future__ import annotations

import io
import json
import struct
from contextlib import suppress
from dataclasses import asdict

from raftkv import cluster_id
from raftkv.cli import pflag
from raftkv.cli.backup import FORMAT, Manifest, not_needed
from raftkv.cli.ctl.kv import read_txn
from raftkv.cli.program import CommandError
from raftkv.client.records import RecordError
from raftkv.errors import ConfigError
from raftkv.training.tcpstore.wire import STRING_OVERHEAD_BYTES, FrameError, Op, Reader
from raftkv.urls import parse_endpoint
from tests.fuzz.target import Target


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _urls(data: bytes) -> None:
    text = _text(data)
    if "=" in text:
        cluster = cluster_id.parse_initial_cluster(text)
        assert cluster_id.parse_initial_cluster(cluster_id.format_initial_cluster(cluster)) == cluster
        cluster_id.founding_members(text, "token")
        return
    for url in cluster_id.parse_urls(text):
        cluster_id.split_url(url)
        cluster_id.comparable(url)


def _values(data: bytes) -> None:
    text = _text(data)
    for read in (pflag.parse_duration_s, pflag.parse_bool, pflag.parse_int, pflag.parse_list):
        with suppress(ValueError):
            read(text)
    pflag.parse_duration_ns(text)


def _manifest(data: bytes) -> None:
    manifest = Manifest.decode(data)
    assert Manifest.decode(manifest.encode()) == manifest
    not_needed([manifest, manifest], 1, 1.0, 1e9)


def _manifests() -> list[bytes]:
    one = Manifest("raftkv-20261122T183000Z-00000000000000ff", 0.0, 255, -1, 7, 301, 4096, "ab", 1, 2, "h:2379", 1.0, 1)
    return [one.encode(), json.dumps({"format": FORMAT, **asdict(one)}).encode()]


def _tcpstore(data: bytes) -> None:
    reader = Reader()
    for at in range(0, len(data), 50):
        reader.feed(data[at : at + 50])
        for request in reader.requests():
            assert request.op in Op
        # An empty string is eight bytes on the wire, and counts as much as Python takes for it.
        assert reader.held_bytes <= len(data) * (1 + STRING_OVERHEAD_BYTES // 8) + 1024


def _string(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _store_requests() -> list[bytes]:
    hello = bytes((Op.VALIDATE,)) + struct.pack("<I", 0x3C85F7CE)
    rest = _string(b"key") + _string(b"value") + struct.pack("<q", 1)
    return [hello, *(hello + bytes((op,)) + rest for op in Op)]


TXN = b'mod("a") > "0"\nvalue("b") = "x\\x00"\n\nput a b\nget c --prefix\n\ndel "d e"\n\n'
TARGETS = (
    Target(
        "member-urls",
        lambda directory: _urls,
        lambda: [b"http://127.0.0.1:2380,https://[::1]:1", b"a=http://x:1,a=http://y:2,b=unix://z:3"],
        (ConfigError,),
        tokens=(b"http://", b"[::1]", b":99999", b"@", b"%zz", b"\xe2\x84\x80"),
    ),
    Target(
        "endpoints",
        lambda directory: lambda data: parse_endpoint(_text(data)),
        lambda: [b"127.0.0.1:2379", b"https://[::1]", b"http://u:p@h:1"],
        (ConfigError,),
        tokens=(b"https://", b"[", b"]", b"@", b":"),
    ),
    Target(
        "go-values",
        lambda directory: _values,
        lambda: [b"1h2m3.5s", b"-0x10", b"true", b'a,"b,c",d', b"100"],
        (ValueError,),
        tokens=(b"ns", b"h", b"0x", b"0b", b"_", b"1e9", b"9" * 500),
    ),
    Target(
        "txn-language",
        lambda directory: lambda data: read_txn(io.BytesIO(data), lambda text: None),
        lambda: [TXN, b"\n\n\n"],
        (CommandError,),
        tokens=(b"lease(", b"put ", b"--lease=", b"\n\n", b'\\"', b"\\x", b"\\u0000", b"--"),
    ),
    Target("backup-manifest", lambda directory: _manifest, _manifests, (RecordError,)),
    Target("tcpstore", lambda directory: _tcpstore, _store_requests, (FrameError,), tokens=(b"\xff" * 8, b"\0" * 8)),
)
