"""A test of a cluster of one member: does it acknowledge a put that its log does not hold yet?

A tracer (strace) delays the member's writes to its newest log file, or all its syncs. A put is sent; then the member is
killed with ``kill -9`` and started again. If the put was acknowledged and is lost, it was acknowledged too early. An
acknowledgement during the delay is too early even if the put survives, as it may when only the sync is delayed.

    python -m jepsen held-write --sut etcd      etcd 3.5.1: acknowledged after 4 ms, gone (etcd issue 14370)
    python -m jepsen held-write --sut raftkv    not acknowledged
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from jepsen.db import Cluster, DbError, Member, Settings, require_disk
from jepsen.probe import Probe
from jepsen.runner import RUNS
from raftkv.pb import rpc_pb2

CALLS = {"write": "write,writev,pwrite64,pwritev,pwritev2", "sync": "fdatasync,fsync,io_submit"}
"""System calls to delay, by purpose; with ``io_submit``, raftkv lets the kernel sync concurrently with its loop."""

_HELD_S = 2.0
_PUT_S = 1.5
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The fate of the put; ``acked_s`` is None if it was not acknowledged during the delay."""

    acked_s: float | None
    kept: bool

    @property
    def sound(self) -> bool:
        """Whether no put was acknowledged too early."""
        return self.acked_s is None


async def ask(system: str, what: str) -> Answer:
    """Delay writes or syncs of a fresh cluster of one, put, kill, restart, read.

    Arguments:
        system: ``raftkv`` or ``etcd``.
        what: calls to delay, ``write`` or ``sync``.

    Raises:
        DbError: strace is missing, or the member does not start.
    """
    if shutil.which("strace") is None:
        raise DbError("strace is needed to hold a member's writes")
    folder = RUNS / f"held-{what}-{time.time_ns():x}"
    cluster = Cluster(folder, Settings(system=system, size=1))
    require_disk(folder)
    probe = Probe(cluster)
    try:
        return await _ask(cluster, probe, what)
    finally:
        await probe.close()
        cluster.close()
        shutil.rmtree(folder)


async def _ask(cluster: Cluster, probe: Probe, what: str) -> Answer:
    member = cluster.members[0]
    await _start(cluster, probe)
    await _put(probe, member, b"before")
    async with _held(member, what):
        began = time.monotonic()
        acked = await _put(probe, member, b"held")
        took_s = time.monotonic() - began
        cluster.kill([member])
    await _start(cluster, probe)
    response = await probe.retry(rpc_pb2.RangeRequest(key=b"held"), _START_S)
    return Answer(took_s if acked else None, bool(response.kvs))


async def _start(cluster: Cluster, probe: Probe) -> None:
    cluster.start(cluster.members)
    if not await probe.wait_healthy(_START_S):
        raise DbError("the member does not come up")


async def _put(probe: Probe, member: Member, key: bytes) -> bool:
    message = rpc_pb2.PutRequest(key=key, value=b"v")
    try:
        await probe.ask(member, "/etcdserverpb.KV/Put", message, rpc_pb2.PutResponse, _PUT_S)
    except grpc.aio.AioRpcError:
        return False
    return True


@contextlib.asynccontextmanager
async def _held(member: Member, what: str) -> AsyncIterator[None]:
    """Delay every write to the newest log file, or every sync, by ``_HELD_S`` before it takes effect."""
    calls = CALLS[what]
    delay = f"inject={calls}:delay_enter={int(_HELD_S * 1e6)}"
    if member.process is None:
        raise DbError(f"{member.name} does not run")
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(member.process.pid)]
    command += ["-e", f"trace={calls}", "-e", delay]
    if what == "write":  # a tracer cannot tell which file io_submit syncs
        command += ["-P", str(sorted(member.folder.glob("data/**/*.wal"))[-1])]
    tracer = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await _wait_traced(member.process.pid, tracer.pid)
        yield
    finally:
        tracer.terminate()
        await tracer.wait()


async def _wait_traced(pid: int, tracer: int) -> None:
    """Wait until every thread of a process is traced."""
    deadline = time.monotonic() + _START_S
    while not all(f"TracerPid:\t{tracer}\n" in text for text in _thread_statuses(pid)):
        if time.monotonic() > deadline:
            raise DbError("strace cannot attach to the member")
        await asyncio.sleep(0.02)


def _thread_statuses(pid: int) -> list[str]:
    return [status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/status")]
