"""``raftkv torchft-lighthouse``: what cannot work is refused in one line; several jobs; what is going on, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from raftkv.cli import main as cli
from raftkv.integrations.torchft.lighthouse import HEARTBEAT
from raftkv.integrations.torchft.rules import REPLICAS_MAX
from raftkv.pb import torchft_pb2
from raftkv.rpc import Channel
from tests.procs import wait_for
from tests.rpc import raw


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line that a command line is answered with."""
    assert cli.main(["torchft-lighthouse", *words]) != 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told.strip()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--bogus"], "unknown flag: --bogus"),
        (["here"], "'here' is not a valid flag of raftkv torchft-lighthouse"),
        (["--listen=nowhere"], "--listen must be HOST:PORT (set to 'nowhere')"),
        (["--listen=127.0.0.1:70000"], "--listen must be HOST:PORT (set to '127.0.0.1:70000')"),
        (["--listen=a b=127.0.0.1:0"], "job name 'a b' cannot be used"),
        (["--min_replicas=0"], "--min-replicas must be at least 1, not 0"),
        (["--join_timeout_ms=-1"], "--join-timeout-ms must not be negative"),
        (["--heartbeat-timeout-ms=0"], "--heartbeat-timeout-ms and --lease-ttl must be positive"),
        (["--endpoints=ftp://x"], "endpoint 'ftp://x' is not host:port"),
    ],
)
def test_impossible_option_is_refused_in_one_line(capsys, words, line):
    assert line in refusal(capsys, *words)


def test_an_address_in_use_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--listen {address}:" in refusal(capsys, f"--bind={address}")


@contextlib.contextmanager
def daemon(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "raftkv", "torchft-lighthouse", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def status(address: str, **headers: str) -> Any:
    request = urllib.request.Request(f"{address}/status", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_jobs_have_ports_of_their_own_and_a_signal_ends_it_well(raftkv_cluster):
    with daemon("--listen=one=127.0.0.1:0,0.0.0.0:0", f"--endpoints={raftkv_cluster.endpoints[0]}") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [process.stdout.readline().split() for _ in range(2)]
        assert [line[5] for line in lines] == ["one", "default"]
        assert set(status(lines[0][-1])["jobs"]) == {"one", "default"}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{lines[0][-1]}/elsewhere", timeout=60)
        with pytest.raises(urllib.error.HTTPError, match="421"):  # a page of evil.example, whose name leads here
            status(lines[0][-1], Host="evil.example")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        warnings = [line for line in process.stderr if "has no authentication" in line]
        assert len(warnings) == 1
        assert "can take part in job default" in warnings[0]
    with raftkv_cluster.connect() as kv:
        assert list(kv.range("/raftkv/", prefix=True)) == []


def beat(address: str, replica_id: str) -> None:
    """Send one heartbeat of a replica, and leave."""

    async def send() -> None:
        async with Channel(address.removeprefix("http://")) as channel:
            request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id).SerializeToString()
            await channel.unary(HEARTBEAT, request, 60.0)

    asyncio.run(send())


def test_name_of_a_replica_neither_begins_a_line_nor_controls_the_terminal(raftkv_cluster):
    with daemon("--listen=127.0.0.1:0", f"--endpoints={raftkv_cluster.endpoints[0]}") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        beat(process.stdout.readline().split()[-1], "a\n2026-01-01 forged\x1b[2J\x9b2J")
        line = next(line for line in process.stderr if "replica" in line)
        assert line.endswith("default: replica a\\n2026-01-01 forged\\x1b[2J\\x9b2J connected\n")


@contextlib.contextmanager
def replicas(address: str, host: str, count: int) -> Iterator[None]:
    """Send heartbeats of replicas on one connection from a host, which is closed at the end of the block."""
    port = int(address.rpartition(":")[2])
    fields = raw.grpc_headers(HEARTBEAT)
    with socket.create_connection(("127.0.0.1", port), 60.0, (host, 0)) as connection:
        connection.sendall(raw.PREFACE + raw.settings())
        for number in range(count):
            body = torchft_pb2.LighthouseHeartbeatRequest(replica_id=f"{host}-{number}").SerializeToString()
            framed = b"\0" + len(body).to_bytes(4, "big") + body
            stream = 2 * number + 1
            connection.sendall(raw.headers(stream, fields) + raw.message(stream, framed, raw.END_STREAM))
        yield


def test_replicas_of_one_host_keep_no_replica_of_another_out(raftkv_cluster):
    kept = ("--heartbeat-timeout-ms=600000", "--disconnect-grace-ms=600000")
    flags = ("--listen=127.0.0.1:0", *kept, f"--endpoints={raftkv_cluster.endpoints[0]}")
    with daemon(*flags) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]

        def present() -> list[str]:
            found: list[str] = status(address)["jobs"]["default"]["replicas_here"]
            return found

        with replicas(address, "127.0.0.2", REPLICAS_MAX):
            wait_for(lambda: len(present()) == REPLICAS_MAX, "the many replicas")
            with replicas(address, "127.0.0.1", 1):
                wait_for(lambda: "127.0.0.1-0" in present(), "the replica of another host")
                assert len(present()) == REPLICAS_MAX


def test_help_names_every_flag(capsys):
    assert cli.main(["torchft-lighthouse", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"--{flag} " in told for flag in ("listen", "min-replicas", "join-timeout-ms", "disconnect-grace-ms"))
