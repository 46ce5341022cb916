"""A replicated lighthouse for torchft: ``torchft.LighthouseService`` with all its state in raftkv.

::

    raftkv torchft-lighthouse --listen a=127.0.0.1:29510,b=127.0.0.1:29511 --endpoints h1:2379,h2:2379,h3:2379
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python train.py                 # the job "a"
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29511 python train.py                 # the job "b"

The daemon serves unmodified torchft managers. Any number of daemons serve the same jobs, one for all nodes or one on
each node; replicas of one job may use different ones. A manager knows only host and port of its lighthouse, so each job
has a separate listener. A manager has one connection for heartbeats and quorums: when it closes, the replica counts as
lost after a short grace time, without waiting for missed heartbeats.

Owns the listeners, the calls, and the mapping of connections to replicas. The rule for quorums is in ``torchft.rules``,
the agreement between daemons in ``torchft.job``.
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

from google.protobuf.message import DecodeError

from raftkv.client.control import check_whole
from raftkv.client.library import Client
from raftkv.client.records import RecordError
from raftkv.errors import ConfigError
from raftkv.integrations.torchft.job import DaemonLease, Job, Timing
from raftkv.integrations.torchft.rules import REPLICA_ID_MAX, REPLICAS_MAX, WAITING_MAX, Rules, check_job
from raftkv.pb import torchft_pb2
from raftkv.rpc import Code, HttpRequest, HttpResponse, RpcError, Server, ServerLimits, UnaryCall
from raftkv.rpc.server.accept import Connection
from raftkv.rpc.server.http import refuse_host

QUORUM: Final = "/torchft.LighthouseService/Quorum"
HEARTBEAT: Final = "/torchft.LighthouseService/Heartbeat"
_NOTHING: Final = torchft_pb2.LighthouseHeartbeatResponse().SerializeToString()
_LIMITS: Final = ServerLimits(ping_permit_without_stream=True)  # managers ping once a minute, busy or not
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LighthouseConfig:
    """The configuration of a daemon.

    Attributes:
        rules: rules for a quorum.
        timing: when a replica counts as lost.
        lease_ttl_s: time after which other daemons take over from a frozen or disconnected one.
        lease_grace_s: time after which the decisions of a dead daemon are taken over.
    """

    rules: Rules
    timing: Timing = field(default_factory=Timing)
    lease_ttl_s: int = 2
    lease_grace_s: float = 0.1

    def __post_init__(self) -> None:
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
    """The server of one job, which passes requests and closed connections to the job."""

    def __init__(self, job: Job, status: Callable[[HttpRequest], bytes | None]) -> None:
        super().__init__(_LIMITS, self._http, translate=_translated)
        self._job = job
        self._status = status
        self.unary(QUORUM, self._quorum)
        self.unary(HEARTBEAT, self._heartbeat)

    def discard(self, connection: Connection) -> None:
        """Implement ``Server.discard``."""
        super().discard(connection)
        if connection.peer is not None:
            self._job.disconnected(connection.peer)

    def _heartbeat(self, call: UnaryCall, message: bytes) -> None:
        replica_id = torchft_pb2.LighthouseHeartbeatRequest.FromString(message).replica_id
        if not 0 < len(replica_id) <= REPLICA_ID_MAX:
            call.fail(Code.INVALID_ARGUMENT, f"replica_id must have 1 to {REPLICA_ID_MAX} characters")
        elif self._job.heard(replica_id, call.peer, call.peer.identity):
            call.reply(_NOTHING)
        else:
            self._refuse(call)

    def _quorum(self, call: UnaryCall, message: bytes) -> None:
        request = torchft_pb2.LighthouseQuorumRequest.FromString(message)
        if not request.HasField("requester"):
            call.fail(Code.INVALID_ARGUMENT, "missing requester")
        elif self._job.roster.is_crowded(request.requester.replica_id):
            call.fail(Code.RESOURCE_EXHAUSTED, f"{WAITING_MAX} calls wait for the quorum of this replica already")
        else:
            # Serialized again: with all fields, those of versions that are not known here too.
            member, peer = request.requester.SerializeToString(), call.peer
            try:
                withdraw = self._job.ask(member, peer, call, call.reply, peer.identity)
            except RecordError as error:
                call.fail(Code.INVALID_ARGUMENT, str(error))
            else:
                self._refuse(call) if withdraw is None else call.on_cancel(withdraw)

    def _refuse(self, call: UnaryCall) -> None:
        text = f"job {self._job.name} has {REPLICAS_MAX} replicas here already, and this address has its share"
        call.fail(Code.RESOURCE_EXHAUSTED, text)

    async def _http(self, request: HttpRequest) -> HttpResponse:
        if (refusal := refuse_host(request)) is not None:
            return refusal
        body = self._status(request)
        if body is None:
            return HttpResponse(404, b"only GET /status is served here\n")
        return HttpResponse(200, body, (("content-type", "application/json"),))


class Lighthouse:
    """One daemon.

    Arguments:
        kv: a client, not a view of one; not closed by the daemon.
        config: see ``LighthouseConfig``.

    ``await listen(...)``, then ``await run()`` until cancelled.
    """

    def __init__(self, kv: Client, config: LighthouseConfig) -> None:
        self.id = f"{socket.gethostname().replace('/', '_')}-{os.urandom(4).hex()}"
        self.jobs: dict[str, Job] = {}
        self.lease = DaemonLease(kv, config.lease_ttl_s, config.lease_grace_s)
        self._kv = check_whole(kv)
        self._config = config
        self._started_s = asyncio.get_running_loop().time()
        self._servers: list[Server] = []

    async def listen(self, host: str, port: int, job: str) -> list[tuple[str, int]]:
        """Open a listener for a job, before ``run``; return its addresses.

        Arguments:
            host, port: address of the listener; port 0: any free port.
            job: job name.

        Raises:
            ConfigError: the job's name is not valid.
            OSError: the address cannot be used.
        """
        server = _Listener(self._job(job), self._status)
        self._servers.append(server)
        return await server.listen(host or None, port)

    def _job(self, name: str) -> Job:
        if name not in self.jobs:
            config = self._config
            self.jobs[name] = Job(
                check_job(name), self._kv, self.id, self.lease, config.rules, config.timing, started_s=self._started_s
            )
        return self.jobs[name]

    async def run(self) -> None:
        """Serve until cancelled; then revoke the lease and close all connections."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.lease.run())
                for job in self.jobs.values():
                    group.create_task(job.run())
        finally:
            for server in self._servers:
                await server.close()
            await self.lease.end()

    # ---- for people

    def _status(self, request: HttpRequest) -> bytes | None:
        if request.method != "GET" or request.path not in ("/", "/status"):
            return None
        return json.dumps({"daemon": self.id, "jobs": {name: _shown(job) for name, job in self.jobs.items()}}).encode()


def _translated(error: BaseException) -> RpcError | None:
    """Convert decoding errors to an error for the caller, without logging."""
    return RpcError(Code.INVALID_ARGUMENT, f"not a message: {error}") if isinstance(error, DecodeError) else None


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
