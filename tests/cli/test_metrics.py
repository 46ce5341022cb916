"""Figures of members for the command lines: over TLS beside a channel of gRPC, too, and percentiles of histograms."""

from __future__ import annotations

import asyncio
import math
import ssl
from pathlib import Path

import pytest

from raftkv.cli.ctl import top
from raftkv.client.rpc.transport import tls_context
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.rpc.server.server import Server
from tests.secure import Files

TEXT = """\
# TYPE x_seconds histogram
x_seconds_bucket{to="a",le="0.1"} 98
x_seconds_bucket{to="a",le="0.2"} 100
x_seconds_bucket{to="a",le="+Inf"} 100
x_seconds_bucket{to="b",le="0.1"} 5
x_seconds_bucket{to="b",le="0.2"} 5
x_seconds_bucket{to="b",le="+Inf"} 5
# TYPE y_seconds histogram
y_seconds_bucket{le="0.1"} 0
y_seconds_bucket{le="+Inf"} 3
# TYPE z_seconds histogram
z_seconds_bucket{le="+Inf"} 0
"""


def test_percentiles():
    assert top.quantile(TEXT, "x_seconds", 0.5) == 0.1
    assert top.quantile(TEXT, "x_seconds", 0.99) == 0.2
    assert top.quantile(TEXT, "x_seconds", 0.5, count_min=101) is None
    assert top.quantile(TEXT, "y_seconds", 0.5) == math.inf
    assert top.quantile(TEXT, "z_seconds", 0.5) is None
    assert top.quantile(TEXT, "absent", 0.5) is None


async def test_over_tls_beside_a_channel(tmp_path: Path):
    """A channel has its context speak HTTP/2 alone: figures were missing in ``top`` of clusters under TLS."""
    files = Files.make(tmp_path)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(files.folder / "server.crt", files.folder / "server.key")
    ours = tls_context(ca_file=str(files.folder / "ca.crt"))

    async def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200, b"a_total 7\n")

    server = Server(http_handler=answer)
    server.unary("/a.B/C", lambda call, data: call.reply(data))
    ((host, port),) = await server.listen("127.0.0.1", 0, theirs)
    channel = Channel([f"{host}:{port}"], ours)
    assert await channel.unary("/a.B/C", b"x", 10.0) == b"x"
    found = await asyncio.to_thread(top.fetch, f"{host}:{port}", ours, 10.0)
    await channel.close()
    await server.close()
    assert found == {"a_total": 7.0}


def test_a_certificate_that_is_gone_is_a_failure_of_the_asking(tmp_path: Path):
    files = Files.make(tmp_path)
    ours = tls_context(ca_file=str(files.folder / "ca.crt"))
    (files.folder / "ca.crt").unlink()
    with pytest.raises(OSError, match="No such file"):
        top.fetch("127.0.0.1:1", ours, 1.0)
