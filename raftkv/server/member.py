"""One member, put together and run: durable state, core, loop, transport, services, listeners.

Owns the order of start and stop. Start: read the disk, listen (so that a port in use is found before anything is
promised), take part, serve clients once the state is as new as it ever was (``readiness``). Stop: hand leadership
over, finish calls under way, leave, close the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from ssl import SSLContext
from typing import Final

from raftkv import cluster_id
from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import Applier
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.apply.request import Kind
from raftkv.apply.response import HeaderEncoder
from raftkv.config import ServerConfig
from raftkv.errors import ConfigError, StatusError, UnknownEntryError
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.config import RaftConfig
from raftkv.raft.raw_node import RawNode
from raftkv.raft.types import NONE, Message, StateRole
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.cork import Cork
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.http import HttpHandler
from raftkv.rpc.server.server import Server
from raftkv.server import descriptors, tls
from raftkv.server.http import metrics
from raftkv.server.http.access import HttpAccess
from raftkv.server.http.routes import HttpService
from raftkv.server.lease.lessor import Lessor
from raftkv.server.lease.service import LeaseService
from raftkv.server.node.admission import Admission
from raftkv.server.node.auto_compaction import AutoCompaction, PeriodicPolicy, Policy, RevisionPolicy
from raftkv.server.node.bootstrap import Durable, open_durable
from raftkv.server.node.disk import Disk
from raftkv.server.node.housekeeping import Housekeeping
from raftkv.server.node.leader_log import LeaderLog
from raftkv.server.node.node import Node, NodeSettings
from raftkv.server.node.proposals import request_ids
from raftkv.server.node.readiness import Readiness
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import Transport, peer_metadata
from raftkv.server.recipes.election import ElectionService
from raftkv.server.recipes.local_client import Recipe
from raftkv.server.recipes.lock import LockService
from raftkv.server.services import health
from raftkv.server.services.cluster import ClusterService
from raftkv.server.services.kv import KVService
from raftkv.server.services.leader_guard import LeaderGuard
from raftkv.server.services.maintenance import MaintenanceService
from raftkv.server.services.range_stream import RangeStreamService
from raftkv.server.services.responder import Responder
from raftkv.server.snapshots import Installer, SnapshotReceiver, SnapshotSender
from raftkv.server.turns import LoopTurns
from raftkv.server.watch.hub import WatchHub
from raftkv.server.watch.service import WatchRunner, WatchService
from raftkv.server.wiring import Parts, wire
from raftkv.storage import schema
from raftkv.storage.backend.writer import ThreadWriter

_log = logging.getLogger(__name__)

ExtendHttp = Callable[[Recipe, HttpHandler], HttpHandler]
"""Makes a handler of HTTP requests from the member's keys and the handler that answers what is not its own."""

RECEIVE_OVERHEAD_BYTES: Final = 512 * 1024
"""What a message may be larger than max-request-bytes before it is refused unread (etcd: grpcOverheadBytes)."""

PEER_LIMITS: Final = ServerLimits(
    max_receive_message_bytes=64 * 1024 * 1024,
    assembly_bytes=256 * 1024 * 1024,
    process_assembly_bytes=1024 * 1024 * 1024,
    stream_window_bytes=16 * 1024 * 1024,
    connection_window_bytes=32 * 1024 * 1024,
    ping_interval_min_s=0.5,
    ping_interval_idle_min_s=0.5,
    ping_permit_without_stream=True,
    connections=descriptors.PEER_CONNECTIONS,
)
"""Members trust each other's volume, not each other's bytes."""

METRICS_LIMITS: Final = ServerLimits(connections=descriptors.METRICS_CONNECTIONS)

STOP_GRACE_S: Final = 5.0


class Member:
    """A member; ``run`` serves until ``stop`` is called.

    Arguments:
        config: its settings.
        turns: of the loop, for ``/metrics``; None: nobody measures them.
        extend_http: makes what the HTTP requests of clients go through; None: the member's own routes are all.
    """

    def __init__(
        self, config: ServerConfig, turns: LoopTurns | None = None, extend_http: ExtendHttp | None = None
    ) -> None:
        self.config = config
        self._extend_http = extend_http
        self.failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._cork = Cork()
        self._loop = asyncio.get_running_loop()
        self._raising_no_space: asyncio.Task[None] | None = None
        self._durable = open_durable(config, ThreadWriter(self._notify), self._fatal)
        self._registry = metrics.new_registry()
        if turns is not None:
            self._registry.register(turns)
        self._assemble(self._durable)
        self._wire()

    def _notify(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    # -- assembly ----------------------------------------------------------------------------------------------------

    def _assemble(self, durable: Durable) -> None:
        store = durable.store
        self._disk = Disk(durable.wal, self._loop, self._fatal, metrics.wal_sync_histogram(self._registry).observe)
        self._membership = Membership(store, schema.MEMBERS)
        self._applier = Applier(store, Alarms(store, schema.ALARM), self._membership, Leases(store))
        self._make_snapshots(durable)
        self._transport = Transport(
            durable.cluster_id,
            durable.member_id,
            tls.client_context(self.config.peer_tls),
            self._report_unreachable,
            self._snapshots.send,
        )
        self.node = self._make_node(durable)
        self.readiness = Readiness(self.node, self._publish, self.config.wait_cluster_ready_timeout_s)
        self._admission = Admission(
            self.node,
            self._applier,
            max_request_bytes=self.config.max_request_bytes,
            quota_bytes=self.config.quota_bytes,
            # Pages that a compaction freed are written again, so they count as space.
            size_bytes=lambda: store.size_in_use_bytes,
            data_dir=self.config.data_dir,
            raise_no_space=self._raise_no_space,
            make_room=self._make_room,
        )
        self._housekeeping = Housekeeping(
            self.node,
            store,
            durable.wal,
            self._disk,
            self._admission,
            commit_interval_s=self.config.backend_batch_interval_s,
            compaction_pause_s=self.config.compaction_sleep_interval_s,
            compaction_keys=self.config.compaction_batch_limit,
            snapshot_entries=self.config.snapshot_count,
            catchup_entries=self.config.snapshot_catchup_entries,
            snapshots=self._snapshots,
            on_no_space=self._raise_no_space,
            auto_compaction=self._make_auto_compaction(),
        )
        quota_bytes = self.config.quota_bytes or 0
        self._registry.register(metrics.MemberCollector(self.node, store, self._transport, quota_bytes))
        self._http = HttpService(
            self.node, self._applier, self.readiness, self._admission, metrics.exposition(self._registry)
        )
        self._watch_runner = WatchRunner()
        header = HeaderEncoder(durable.cluster_id, durable.member_id)
        self._watch_hub = WatchHub(
            store, lambda revision: header.encode(revision, self.node.term), self._watch_runner.wake, self._cork
        )
        self._leader_guard = LeaderGuard(self.node)
        self._registry.register(metrics.WatchCollector(self._watch_hub))
        self._lessor = Lessor(
            self.node,
            self._applier.leases,
            ttl_min_s=self.config.lease_ttl_min_s,
            channel=self._channel,
            introduction=self._introduction,
            cork=self._cork,
        )
        self._registry.register(metrics.LeaseCollector(self._lessor.times))
        # Shared by all ports that clients reach; members have a budget of their own, which clients cannot fill.
        self._answers = AnswerBudget()
        self._client_server = self._make_client_server(durable, quota_bytes)
        self._metrics_server = Server(METRICS_LIMITS, self._http.handle, answers=self._answers, cork=self._cork)
        self._peer_server = self._make_peer_server(durable)

    def _make_snapshots(self, durable: Durable) -> None:
        store = durable.store
        self._snapshots = SnapshotSender(
            store,
            durable.snapshots,
            self._channel,
            self._introduction,
            self._is_snapshot_wanted,
            self._report_snapshot,
        )
        self._installer = Installer(store, durable.snapshots, self._fatal)
        self._receiver = SnapshotReceiver(durable.snapshots, self._awaits_snapshot)

    def _make_node(self, durable: Durable) -> Node:
        config, store = self.config, durable.store
        raft_config = RaftConfig(
            id=durable.member_id,
            election_ticks=config.election_ticks,
            heartbeat_ticks=1,
            pre_vote=config.pre_vote,
            applied=store.applied_index,
        )
        seed = random.SystemRandom().getrandbits(64)
        return Node(
            raw=RawNode(raft_config, durable.log, random.Random(seed)),
            log=durable.log,
            disk=self._disk,
            store=store,
            applier=self._applier,
            sender=self._transport,
            settings=NodeSettings(durable.member_id, config.heartbeat_interval_s, config.election_timeout_s),
            ids=request_ids(durable.member_id, time.time_ns() // 1_000_000),
            conf_state=store.conf_state,
            applied=store.applied_index,
            on_fatal=self._fatal,
            install_snapshot=self._installer.install,
            note_applied=durable.mark.note,
            cork=self._cork,
        )

    def _make_auto_compaction(self) -> AutoCompaction | None:
        config, node = self.config, self.node
        if config.auto_compaction_retention_revisions > 0:
            policy: Policy = RevisionPolicy(config.auto_compaction_retention_revisions)
        elif config.auto_compaction_retention_s > 0:
            policy = PeriodicPolicy(config.auto_compaction_retention_s, self._loop.time())
        else:
            return None
        return AutoCompaction(policy, node, lambda: node.role == StateRole.LEADER, lambda: node.store.revision)

    def _make_client_server(self, durable: Durable, quota_bytes: int) -> Server:
        config = self.config
        header = HeaderEncoder(durable.cluster_id, durable.member_id)
        responder = Responder(self.node, self._applier, header, self._admission)
        self._recipe = Recipe(responder, self._watch_hub, self._lessor)
        handler: HttpHandler = self._http.handle
        if self._extend_http is not None:
            handler = self._extend_http(self._recipe, handler)
        access = HttpAccess(handler, config.host_whitelist, config.cors)
        server = Server(_client_limits(config), access.handle, answers=self._answers, cork=self._cork)
        KVService(responder, config.max_txn_ops).register(server)
        self._lease_service = LeaseService(responder, self._lessor, self._leader_guard, self._cork)
        self._lease_service.register(server)
        WatchService(
            self._watch_hub,
            self._admission,
            self._leader_guard,
            fragment_bytes=config.max_request_bytes + RECEIVE_OVERHEAD_BYTES,
            progress_interval_s=config.watch_progress_notify_interval_s,
        ).register(server)
        LockService(self._recipe).register(server)
        ElectionService(self._recipe, self._leader_guard).register(server)
        RangeStreamService(responder, config.max_request_bytes).register(server)
        ClusterService(responder).register(server)
        MaintenanceService(responder, durable.store, quota_bytes).register(server)
        health.register(server)
        return server

    def _make_peer_server(self, durable: Durable) -> Server:
        # One message holds at least one entry, however large requests may be here.
        message_bytes = max(PEER_LIMITS.max_receive_message_bytes, 2 * self.config.max_request_bytes)
        assembly_bytes = max(PEER_LIMITS.assembly_bytes, 4 * message_bytes)
        limits = replace(PEER_LIMITS, max_receive_message_bytes=message_bytes, assembly_bytes=assembly_bytes)
        server = Server(limits, cork=self._cork)
        PeerService(
            durable.cluster_id,
            durable.member_id,
            self._membership.members.__contains__,
            self.node.receive,
            self._receiver,
            self._lease_service.for_members(),
        ).register(server)
        return server

    def _wire(self) -> None:
        is_connected = self._transport.connected_since
        self._leader_log = LeaderLog(
            self.node, self._loop, self._name_of, lambda peer_id: is_connected(peer_id) is not None
        )
        wire(
            Parts(
                store=self._durable.store,
                applier=self._applier,
                node=self.node,
                disk=self._disk,
                installer=self._installer,
                hub=self._watch_hub,
                watch_runner=self._watch_runner,
                lessor=self._lessor,
                guard=self._leader_guard,
                graces=self._lease_service.graces,
                leader_log=self._leader_log,
            )
        )

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serve until ``stop``, or until the member fails: ``failure`` says why.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        await self._listen()
        for member in self._membership.list():
            if self._durable.member_id != member.ID:
                self._transport.add_peer(member.ID, member.peerURLs)
        self._log_start()
        self._leader_log.start()
        self.node.start()
        self._lessor.start()
        if self.config.initial_election_tick_advance:
            self._advance_ticks()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._housekeeping.run()), group.create_task(self._serve_clients())]
            await self._stop.wait()
            for task in tasks:
                task.cancel()
        await self._shut_down()

    def stop(self) -> None:
        """Begin to stop."""
        self._stop.set()

    async def _listen(self) -> None:
        versions = (self.config.tls_min_version, self.config.tls_max_version)
        client_tls = tls.server_context(self.config.client_tls, *versions)
        peer_tls = tls.server_context(self.config.peer_tls, *versions)
        for url in self.config.listen_peer_urls:
            await _listen(self._peer_server, url, peer_tls)
        for url in self.config.listen_client_urls:
            # Nobody is answered yet: see ``readiness``.
            await _listen(self._client_server, url, client_tls, accepting=False)
        for url in self.config.listen_metrics_urls:
            await _listen(self._metrics_server, url, client_tls)

    def _log_start(self) -> None:
        durable = self._durable
        _log.info(
            "member %x (%s) of cluster %x: clients on %s, peers on %s, applied %d, revision %d",
            durable.member_id,
            self.config.name,
            durable.cluster_id,
            ",".join(self.config.listen_client_urls),
            ",".join(self.config.listen_peer_urls),
            durable.store.applied_index,
            durable.store.revision,
        )
        if self.config.client_tls.is_empty:
            _log.warning("client traffic is not encrypted: anyone who reaches the port may read and write")

    def _advance_ticks(self) -> None:
        """A member that just started has nobody to wait for: most of its first election timeout is skipped."""
        only_voter = self.node.conf_state.voters == (self._durable.member_id,)
        ticks = self.config.election_ticks - 1
        if only_voter:
            self.node.raw.campaign()
            return
        # Leave enough for a heartbeat of a leader that is there already.
        for _ in range(ticks - 2):
            self.node.raw.tick()

    async def _serve_clients(self) -> None:
        """Answer clients as soon as that is safe; what waits for a quorum goes on waiting behind it."""
        await self.readiness.wait()
        await self._client_server.start_accepting()
        await self._publish()

    async def _publish(self) -> None:
        """Tell the cluster our name and client URLs, unless it knows them."""
        record = raft_pb2.MemberRecord(
            member=rpc_pb2.Member(
                ID=self._durable.member_id, name=self.config.name, clientURLs=self.config.advertise_client_urls
            ),
            update=True,
        )
        while not self._is_published():
            try:
                await self.node.propose(Kind.MEMBER_ATTRIBUTES, record.SerializeToString(), record)
            except StatusError as error:
                _log.warning("could not publish this member's client URLs yet: %s", error)
                await asyncio.sleep(self.config.election_timeout_s)

    def _is_published(self) -> bool:
        mine = self._membership.members.get(self._durable.member_id)
        return mine is None or (mine.name, tuple(mine.clientURLs)) == (
            self.config.name,
            tuple(self.config.advertise_client_urls),
        )

    async def _shut_down(self) -> None:
        if self.failure is None:
            await self._hand_over()
        self._client_server.stop_listening()
        self._leader_guard.close()
        self._recipe.close()
        await self._client_server.close(STOP_GRACE_S if self.failure is None else 0.0)
        self._lessor.stop()
        self._leader_log.stop()
        self.node.stop()
        await self._installer.close()
        await self._snapshots.close()
        await self._transport.close()
        await self._peer_server.close()
        await self._metrics_server.close()
        self._durable.store.close()
        self._durable.mark.close()
        if self.failure is None:
            self._disk.close()
            self._durable.wal.close()
            self._durable.backend.close()

    async def _hand_over(self) -> None:
        """Give leadership to the member that has been connected longest, as etcd does."""
        node = self.node
        connected = {
            peer_id: since
            for peer_id in node.conf_state.voters
            if (since := self._transport.connected_since(peer_id)) is not None
        }
        if node.leader != self._durable.member_id or not connected:
            return
        node.transfer_leader(min(connected, key=connected.__getitem__))
        try:
            async with asyncio.timeout(self.config.election_timeout_s):
                await node.wait_until(lambda: node.leader not in (NONE, self._durable.member_id))
        except TimeoutError:
            _log.warning("leadership was not taken over in time")

    # -- events ------------------------------------------------------------------------------------------------------

    def _fatal(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            _log.critical(
                "the member stops: %s", error, exc_info=None if isinstance(error, UnknownEntryError) else error
            )
            self.node.stop()
            self._stop.set()

    def _channel(self, peer_id: int) -> Channel | None:
        peer = self._transport.peers.get(peer_id)
        return peer.channel if peer is not None else None

    def _name_of(self, member_id: int) -> str:
        """How people know a member: its name if it has published it, and its id."""
        member = self._membership.members.get(member_id)
        return f"{member.name} ({member_id:x})" if member is not None and member.name else f"member {member_id:x}"

    def _introduction(self, peer_id: int) -> tuple[tuple[str, str], ...]:
        return peer_metadata(self._durable.cluster_id, self._durable.member_id, peer_id)

    def _report_unreachable(self, peer_id: int) -> None:
        self.node.report_unreachable(peer_id)

    def _report_snapshot(self, peer_id: int, ok: bool) -> None:
        self.node.report_snapshot(peer_id, ok)

    def _is_snapshot_wanted(self, message: Message) -> bool:
        return self.node.role == StateRole.LEADER and self.node.term == message.term

    def _awaits_snapshot(self, index: int) -> bool:
        return self.node.awaits_snapshot(index)

    def _make_room(self) -> bool:
        """Give up copies of databases, whoever they are for: they come again, and writes must go on."""
        given_up = self._snapshots.give_up("the disk is full")
        return self._receiver.give_up() or given_up

    def _raise_no_space(self) -> None:
        """Raise the NOSPACE alarm, unless that is under way."""
        if self._raising_no_space is None or self._raising_no_space.done():
            _log.warning("no space left: raising the NOSPACE alarm")
            self._raising_no_space = self._loop.create_task(self._propose_no_space())

    async def _propose_no_space(self) -> None:
        request = rpc_pb2.AlarmRequest(
            action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=self._durable.member_id, alarm=rpc_pb2.NOSPACE
        )
        with contextlib.suppress(StatusError):  # the next write that finds no space raises it again
            await self.node.propose(Kind.ALARM, request.SerializeToString(), request)


def _client_limits(config: ServerConfig) -> ServerLimits:
    default = ServerLimits()
    return ServerLimits(
        connections=descriptors.client_connections(default.connections),
        max_receive_message_bytes=config.max_request_bytes + RECEIVE_OVERHEAD_BYTES,
        max_concurrent_streams=min(config.max_concurrent_streams, default.max_concurrent_streams),
        ping_interval_min_s=config.grpc_keepalive_min_time_s,
        keepalive_time_s=config.grpc_keepalive_interval_s or default.keepalive_time_s,
        keepalive_timeout_s=config.grpc_keepalive_timeout_s or default.keepalive_timeout_s,
    )


async def _listen(server: Server, url: str, ssl: SSLContext | None, *, accepting: bool = True) -> None:
    scheme, host, port = cluster_id.split_url(url)
    try:
        # As in etcd, unix://NAME:PORT is a socket file of just that name.
        unix = f"{host}:{port}" if scheme.startswith("unix") else None
        ssl = ssl if scheme in ("https", "unixs") else None
        await server.listen(host, port, ssl, unix=unix, accepting=accepting)
    except OSError as error:
        # asyncio puts the address into the text once more; names that cannot be resolved have numbers of their own.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise ConfigError(f"cannot listen on {url}: {reason}") from error
