"""A lighthouse for torchft that may die: ``torchft.LighthouseService`` with all of its state in raftkv.

::

    raftkv torchft-lighthouse --listen 127.0.0.1:29510 --endpoints h1:2379,h2:2379,h3:2379 --min-replicas 2
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python train.py                 # the job that --job names
    TORCHFT_LIGHTHOUSE=http://other@127.0.0.1:29510 python train.py           # the job "other"

The daemon serves unmodified torchft managers. Any number of daemons serve the same jobs side by side, one for all nodes
or one on each node; replicas of one job may be on different ones. A manager holds one connection, for heartbeats and
quorums alike: when it closes, the replica is gone after a short grace, without waiting for its heartbeats to be missed.

Owns the listener, the calls and which connection speaks for which replica. What a quorum is: ``lighthouse_rules``; how
the daemons agree on it: ``lighthouse_job``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Final

from raftkv.client.library import Client
from raftkv.errors import ConfigError
from raftkv.pb import torchft_pb2
from raftkv.rpc import Code, HttpRequest, HttpResponse, Server, ServerLimits, UnaryCall
from raftkv.rpc.accept import Connection
from raftkv.rpc.server_core import Peer
from raftkv.training.errors import RecordError
from raftkv.training.lighthouse_job import Job, Timing
from raftkv.training.lighthouse_lease import DaemonLease
from raftkv.training.lighthouse_records import REPLICA_ID_MAX, check_job
from raftkv.training.lighthouse_rules import Rules

QUORUM: Final = "/torchft.LighthouseService/Quorum"
HEARTBEAT: Final = "/torchft.LighthouseService/Heartbeat"
JOBS_MAX: Final = 256
REPLICAS_MAX: Final = 16_384
_NOTHING: Final = torchft_pb2.LighthouseHeartbeatResponse().SerializeToString()
_LIMITS: Final = ServerLimits(ping_permit_without_stream=True)  # managers ping once a minute, busy or not
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseConfig:
    """What a daemon is started with.

    Attributes:
        rules: when a quorum is one.
        timing: when a replica is gone.
        job: of replicas whose address names none.
        lease_ttl_s: other daemons take over from one that is frozen or cut off after so long.
        lease_grace_s: and from one that died after so long.
    """

    rules: Rules
    timing: Timing = field(default_factory=Timing)
    job: str = "default"
    lease_ttl_s: int = 2
    lease_grace_s: float = 0.1

    def __post_init__(self) -> None:
        check_job(self.job)
        if self.rules.min_replicas < 1:
            raise ConfigError(f"--min-replicas must be at least 1, not {self.rules.min_replicas}")
        for name, value in (
            ("--join-timeout-ms", self.rules.join_timeout_s),
            ("--disconnect-grace-ms", self.timing.disconnect_grace_s),
        ):
            if value < 0:
                raise ConfigError(f"{name} must not be negative")
        if self.timing.heartbeat_timeout_s <= 0 or self.lease_ttl_s < 1:
            raise ConfigError("--heartbeat-timeout-ms and --lease-ttl must be positive")


class _Listener(Server):
    """A server that tells which connection has closed."""

    def __init__(self, on_closed: Callable[[Peer], None], status: Callable[[HttpRequest], bytes | None]) -> None:
        super().__init__(_LIMITS, self._http)
        self._on_closed = on_closed
        self._status = status

    def discard(self, connection: Connection) -> None:
        """See ``Server``."""
        super().discard(connection)
        if connection.peer is not None:
            self._on_closed(connection.peer)

    async def _http(self, request: HttpRequest) -> HttpResponse:
        body = self._status(request)
        if body is None:
            return HttpResponse(404, b"only GET /status is served here\n")
        return HttpResponse(200, body, (("content-type", "application/json"),))


class Lighthouse:
    """One daemon.

    Arguments:
        kv: whole, not a view; not closed by the daemon.
        config: see there.

    ``await listen(...)``, then ``await run()`` until cancelled.
    """

    def __init__(self, kv: Client, config: LighthouseConfig) -> None:
        self.id = f"{socket.gethostname().replace('/', '_')}-{os.urandom(4).hex()}"
        self.jobs: dict[str, Job] = {}
        self.lease = DaemonLease(kv, config.lease_ttl_s, config.lease_grace_s)
        self._kv = kv
        self._config = config
        self._group: asyncio.TaskGroup | None = None
        self._started_s = asyncio.get_running_loop().time()
        self._server = _Listener(self._closed, self._status)
        self._server.unary(QUORUM, self._quorum)
        self._server.unary(HEARTBEAT, self._heartbeat)

    async def listen(self, host: str, port: int) -> list[tuple[str, int]]:
        """Open the listener; returns the addresses it has got.

        Raises:
            OSError: it cannot be had.
        """
        return await self._server.listen(host or None, port)

    async def run(self) -> None:
        """Serve until cancelled; then the lease is given back and all connections are closed."""
        try:
            async with asyncio.TaskGroup() as self._group:
                self._group.create_task(self.lease.run())
                for job in self.jobs.values():
                    self._group.create_task(job.run())
                self._job(self._config.job)
        finally:
            self._group = None
            await self._server.close()
            await self.lease.end()

    # ---- calls

    def _heartbeat(self, call: UnaryCall, message: bytes) -> None:
        replica_id = torchft_pb2.LighthouseHeartbeatRequest.FromString(message).replica_id
        if not 0 < len(replica_id) <= REPLICA_ID_MAX:
            call.fail(Code.INVALID_ARGUMENT, f"replica_id must have 1 to {REPLICA_ID_MAX} characters")
            return
        job = self._job_of(call)
        if job is not None and self._has_room(call, job, replica_id):
            job.heard(replica_id, call.peer)
            call.reply(_NOTHING)

    def _quorum(self, call: UnaryCall, message: bytes) -> None:
        request = torchft_pb2.LighthouseQuorumRequest.FromString(message)
        if not request.HasField("requester"):
            call.fail(Code.INVALID_ARGUMENT, "missing requester")
            return
        job = self._job_of(call)
        if job is None or not self._has_room(call, job, request.requester.replica_id):
            return
        try:
            # Serialized again: with all fields, those of versions that are not known here too.
            withdraw = job.ask(request.requester.SerializeToString(), call.peer, call, call.reply)
        except RecordError as error:
            call.fail(Code.INVALID_ARGUMENT, str(error))
            return
        call.on_cancel(withdraw)

    def _has_room(self, call: UnaryCall, job: Job, replica_id: str) -> bool:
        if replica_id in job.roster.replicas or len(job.roster.replicas) < REPLICAS_MAX:
            return True
        call.fail(Code.RESOURCE_EXHAUSTED, f"job {job.name} has {REPLICAS_MAX} replicas here already")
        return False

    def _closed(self, peer: Peer) -> None:
        for job in self.jobs.values():
            job.disconnected(peer)

    # ---- jobs

    def _job_of(self, call: UnaryCall) -> Job | None:
        """The job that the caller's address names, as in ``http://job@host:port``; None: the call was refused."""
        authority = next((value for name, value in call.headers if name == b":authority"), b"")
        user, at, _ = authority.rpartition(b"@")
        name = user.decode(errors="replace") if at else self._config.job
        try:
            job = self._job(name)
        except ConfigError as error:
            call.fail(Code.INVALID_ARGUMENT, str(error))
            return None
        if job is None:
            call.fail(Code.RESOURCE_EXHAUSTED, f"this lighthouse serves {JOBS_MAX} jobs already")
        return job

    def _job(self, name: str) -> Job | None:
        job = self.jobs.get(name)
        if job is not None:
            return job
        if len(self.jobs) >= JOBS_MAX:
            return None
        config = self._config
        job = Job(
            check_job(name),
            self._kv,
            self.id,
            self.lease,
            config.rules,
            config.timing,
            started_s=self._started_s,
        )
        self.jobs[name] = job
        if self._group is not None:
            self._group.create_task(job.run())
        return job

    # ---- for people

    def _status(self, request: HttpRequest) -> bytes | None:
        if request.method != "GET" or request.path not in ("/", "/status"):
            return None
        return json.dumps({"daemon": self.id, "jobs": {name: _shown(job) for name, job in self.jobs.items()}}).encode()


def _shown(job: Job) -> dict[str, object]:
    record = job.record
    now_s = asyncio.get_running_loop().time()
    return {
        "arbiter": job.is_arbiter,
        "quorum_id": record.quorum_id if record is not None else 0,
        "members": list(record.members) if record is not None else [],
        "replicas_here": sorted(job.roster.healthy(now_s)),
        "status": job.decision.reason,
        "rules": asdict(job.rules),
    }
