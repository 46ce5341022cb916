"""One member: a replica (``replica.replica``) with its disks, connections to other members, services and ports.

Owns the order of start and stop. Start: read the disk, listen (so that a port in use is found before the member takes
any part), join consensus, serve clients once the state has caught up (``readiness``). Stop: hand leadership over,
finish open calls, leave consensus, close the disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from prometheus_client.core import Metric

from raftkv.apply.auth.rights import Rights
from raftkv.apply.wire import MEMBER
from raftkv.config import ServerConfig
from raftkv.errors import CorruptionError, ForkedError, MemberRemovedError, StorageError, UnknownEntryError, explain
from raftkv.histograms import DISK_S, Buckets
from raftkv.loop.cork import Cork
from raftkv.loop.turns import LoopTurns
from raftkv.raft.types import Message
from raftkv.replica.archiver import make_archiver
from raftkv.replica.membership import past
from raftkv.replica.membership.presence import promote_itself
from raftkv.replica.metrics import Collecting, durations, new_registry
from raftkv.replica.node.bootstrap import Durable, Origin, open_durable, open_writer
from raftkv.replica.node.disk import Disk
from raftkv.replica.node.leadership import LeaderLog, StalledLeader, hand_over
from raftkv.replica.node.proposals import new_start, request_ids
from raftkv.replica.node.waits import UNAPPLIED_MAX, UNAPPLIED_MAX_BYTES, NodeSettings
from raftkv.replica.replica import Devices, Replica
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.http import HostCheck, HttpHandler, Origins
from raftkv.rpc.server.router import Around
from raftkv.rpc.server.server import Server
from raftkv.server import memory
from raftkv.server.audit.calls import make_audit
from raftkv.server.auth.users import Users
from raftkv.server.gateway.handler import Gateway
from raftkv.server.http.access import HttpAccess, own_names
from raftkv.server.http.debug import DebugService
from raftkv.server.http.routes import HttpService
from raftkv.server.insecure_settings import list_insecure_settings
from raftkv.server.joining import check_restored
from raftkv.server.listening import (
    METRICS_LIMITS,
    RECEIVE_OVERHEAD_BYTES,
    addresses,
    client_limits,
    listen,
    peer_limits,
)
from raftkv.server.maintenance.quotas import QuotaService
from raftkv.server.maintenance.service import MaintenanceService
from raftkv.server.maintenance.snapshot import SnapshotService
from raftkv.server.metrics.budgets import budget_metrics, identity_metrics
from raftkv.server.metrics.calls import CallTimes, auth_metrics, call_metrics, health_metrics
from raftkv.server.metrics.exposition import Exposition, text_of
from raftkv.server.metrics.peers import peer_metrics
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import Transport
from raftkv.server.recipes.election import ElectionService
from raftkv.server.recipes.local_client import Recipe
from raftkv.server.recipes.lock import LockService
from raftkv.server.services import crowded, health
from raftkv.server.services.cluster import ClusterService
from raftkv.server.services.kv import KVService
from raftkv.server.services.range_stream import RangeStreamService
from raftkv.server.services.responder import Responder
from raftkv.server.streams.lease import LeaseService
from raftkv.server.streams.watch import WatchService
from raftkv.server.tls.ports import Ports, peer_hosts
from raftkv.server.ui.cluster import ClusterFigures, Identity
from raftkv.server.ui.figures import Events, Figures
from raftkv.server.ui.service import Dashboard
from raftkv.storage.wal.disk import KernelSync

if TYPE_CHECKING:
    from raftkv.server.tracing.assembly import MemberTracing

_log = logging.getLogger(__name__)

ExtendHttp = Callable[[Recipe, HttpHandler], HttpHandler]
"""Returns an HTTP handler; arguments: the member's keys, and the next handler for all other requests."""

OnReady = Callable[["Member"], Awaitable[None]]
"""Runs once a member serves clients."""

STOP_GRACE_S: Final = 5.0

_EXPLAINED: Final = (UnknownEntryError, StorageError, CorruptionError, ForkedError, OSError, MemoryError)
"""Errors that are not bugs of raftkv: the message says what to do, and a traceback would hide it."""


class Member:
    """A member; ``run`` serves until ``stop`` is called.

    Arguments:
        config: settings of the member.
        turns: statistics of the loop, for ``/metrics``; None: not measured.
        extend_http: wraps the handler of clients' HTTP requests; None: only the member's own routes.
        origin: initial state of a member without data that joins a running cluster (``server.joining``).

    Attributes:
        failure: error that stopped the member.
        is_removed: whether the member stopped because it was removed from the cluster.
    """

    def __init__(
        self,
        config: ServerConfig,
        turns: LoopTurns | None = None,
        extend_http: ExtendHttp | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.config = config
        self._extend_http = extend_http
        self.failure: BaseException | None = None
        self.is_removed = False
        self._stop = asyncio.Event()
        self._cork = Cork()
        self._loop = asyncio.get_running_loop()
        self._durable = self._open(origin)
        self._registry = new_registry()
        self._tracing = self._make_tracing()
        if turns is not None:
            self._registry.register(turns)
        self._assemble(self._durable)
        self._registry.register(Collecting(self._metrics))

    def puts(self) -> int:
        """Return the number of keys put since the data was opened."""
        return self._durable.store.puts_total

    def _open(self, origin: Origin | None) -> Durable:
        began_s = time.perf_counter()
        self._writer = open_writer(self._loop, self._fatal)
        durable = open_durable(self.config, self._writer, self._fatal, origin)
        store, behind = durable.store, durable.log.last_index() - durable.store.applied_index
        took_s = time.perf_counter() - began_s
        text = "opened the data in %.2f s: %d keys, revision %d, %d entries of the log behind the database"
        _log.info(text, took_s, store.key_count, store.revision, behind)
        return durable

    # -- assembly ----------------------------------------------------------------------------------------------------

    def _assemble(self, durable: Durable) -> None:
        beside = None if self.config.unsafe_no_fsync else KernelSync.open()
        self._syncs = Buckets(DISK_S)
        busy_since_s = partial(attrgetter("busy_since_s"), self._writer)
        self._disk = Disk(durable.wal, self._loop, self._fatal, self._syncs.observe, beside, busy_since_s)
        self._transport = self._make_transport(durable)
        self.replica = self._make_replica(durable)
        self.node = self.replica.node
        self._archiver = make_archiver(
            self.config, durable.wal, self._disk, durable.store, (durable.cluster_id, durable.member_id)
        )
        if self._archiver is not None:
            self._registry.register(self._archiver)
        replica = self.replica
        exposition = Exposition(self._registry)
        self._http = HttpService(self.node, replica.applier, replica.readiness, replica.admission, exposition)
        # Shared by all ports that clients reach. The peer ports have their own budget, which clients cannot fill.
        self._answers = AnswerBudget(client_limits(self.config), self.node.uses)
        self._audit = make_audit(self.config, self._registry, self._tls)
        self._client_server = self._make_client_server(durable)
        metrics_http = self._guarded(self._http.handle)
        self._metrics_server = Server(
            METRICS_LIMITS, metrics_http, answers=self._answers, cork=self._cork, identify=self._users.guard.identify
        )
        self._peer_server = self._make_peer_server(durable)
        is_connected = self._transport.connected_since
        self._leader_log = LeaderLog(
            self.node,
            self._loop,
            self._name_of,
            lambda peer_id: is_connected(peer_id) is not None,
            self._peer_service.hears,
        )
        self._stalled_leader = StalledLeader(self.node, self._loop, is_connected)
        replica.connect(
            graces=self._lease_service.graces,
            check_rights=self._users.live.applied,
            forget_tokens=self._users.tokens.forget_all,
            leader_changed=(self._stalled_leader.leader_changed, self._leader_log.leader_changed),
            followers=(self._peer_service.follow,),
        )

    def _make_transport(self, durable: Durable) -> Transport:
        self._tls = Ports.of(self.config, lambda: peer_hosts(self.replica.membership.members))
        self._registry.register(self._tls)
        return Transport(
            durable.cluster_id,
            durable.member_id,
            self._tls.peer.dialing,
            self._report_unreachable,
            self._send_database,
            self._refused,
            self._report_gone,
            None if self._tracing is None else self._tracing.encoder,
            lambda: past.statement(self.node.raw.raft),
        )

    def _make_tracing(self) -> MemberTracing | None:
        """Start tracing if the flag is set; otherwise nothing of the tracing package is imported."""
        if not self.config.tracing.enabled:
            return None
        from raftkv.server.tracing.assembly import make_tracing

        return make_tracing(self.config, self._registry)

    def _make_replica(self, durable: Durable) -> Replica:
        """Create the replica; where memory is short, it holds less for clients, and less of the log."""
        config, fits = self.config, memory.share_bytes
        times_s, writes_bytes = (config.heartbeat_interval_s, config.election_timeout_s), fits(8, UNAPPLIED_MAX_BYTES)
        devices = Devices(
            disk=self._disk,
            peers=self._transport,
            cork=self._cork,
            ids=request_ids(durable.member_id, new_start()),
            settings=NodeSettings(durable.member_id, *times_s, UNAPPLIED_MAX, writes_bytes, writes_bytes),
            syncs=self._syncs,
            stages=None if self._tracing is None else self._tracing.stages,
        )
        config = replace(
            config,
            snapshot_bytes=_fit_log("--snapshot-bytes", config.snapshot_bytes, ServerConfig.snapshot_bytes),
            snapshot_catchup_bytes=_fit_log(
                "--snapshot-catchup-bytes", config.snapshot_catchup_bytes, ServerConfig.snapshot_catchup_bytes
            ),
        )
        replica = Replica(config, durable, devices, self._fatal, self._leave)
        for part, shares in ((8, replica.node.proposals.shares), (4, replica.hub.shares)):
            shares.limit = fits(part, shares.limit)
        return replica

    def _make_client_server(self, durable: Durable) -> Server:
        config, replica = self.config, self.replica
        guard, check_capable = replica.leader_guard, replica.versions.check_capable
        responder = Responder(
            self.node, replica.applier, replica.header, replica.admission, check_capable, self.node.uses
        )
        self._users = Users(config, replica.applier, self.node, responder.slices)
        self._recipe = Recipe(responder, replica.hub, replica.lessor)
        identities = partial(identity_metrics, self.node, replica.hub, replica.lessor.granters.shares.held)
        handler: HttpHandler = DebugService(
            self._http.handle,
            self._users,
            self.node.raw.status,
            lambda: "".join(map(text_of, identities())),
            pprof=config.enable_pprof,
        ).handle
        if self._extend_http is not None:
            handler = self._extend_http(self._recipe, handler)
        self._dashboard = self._make_dashboard(durable)
        if config.enable_ui:
            handler = self._dashboard.around(handler)
        gateway = Gateway(handler, responder.slices)
        server = Server(
            client_limits(config),
            self._guarded(gateway.handle),
            answers=self._answers,
            cork=self._cork,
            origins=Origins(config.cors),
            around=self._arounds(),
            identify=self._users.guard.identify,
        )
        if self._audit is not None:
            server.router.on_refused = self._audit.refused
        KVService(responder, config.max_txn_ops).register(server)
        self._lease_service = LeaseService(responder, replica.lessor, guard, self._cork, self._users.live)
        self._lease_service.register(server)
        WatchService(
            replica.hub,
            replica.admission,
            guard,
            self._users.live,
            fragment_bytes=config.max_request_bytes + RECEIVE_OVERHEAD_BYTES,
            progress_interval_s=config.watch_progress_notify_interval_s,
            on_refused=None if self._audit is None else self._audit.watch_refused,
        ).register(server)
        LockService(self._recipe).register(server)
        ElectionService(self._recipe, guard).register(server)
        RangeStreamService(responder, config.max_request_bytes).register(server)
        self._cluster_service = ClusterService(responder, replica.changes)
        self._cluster_service.register(server)
        MaintenanceService(
            responder, durable.store, config.quota_bytes or 0, replica.defragmenter, replica.hashes
        ).register(server)
        self._snapshot_service = SnapshotService(
            durable.store, durable.backend, replica.damaged, lambda call: responder.check_again(call, Rights.check_root)
        )
        self._snapshot_service.register(server)
        QuotaService(responder).register(server)
        health.register(server)
        self._users.serve(server, responder)
        gateway.serve(server)
        return server

    def _arounds(self) -> tuple[Around, ...]:
        """Return the wrappers of clients' handlers. The audit log also sees calls that the guard refuses."""
        noting = () if self._audit is None else (self._audit.around,)
        tracing = () if self._tracing is None else (self._tracing.calls.around,)
        timing = (self._times().around,) if self.config.extensive_metrics else ()
        return (crowded.around, *noting, *tracing, *timing, self._users.guard.around)

    def _make_dashboard(self, durable: Durable) -> Dashboard:
        identity = Identity(durable.cluster_id, durable.member_id, self.config.name)
        applier, transport = self.replica.applier, self._transport
        events = Events(self.replica, transport.on_noted)
        figures = Figures(self.replica, transport.peers, lambda: len(self._client_server.connections), events)
        self._everybody = ClusterFigures(figures, applier, identity, transport.channel)
        return Dashboard(identity, self._everybody, applier, self._users, self.replica.hub)

    def _times(self) -> CallTimes:
        times = CallTimes()
        self._registry.register(times)
        return times

    def _guarded(self, handler: HttpHandler) -> HttpHandler:
        config = self.config
        access = HttpAccess(handler, HostCheck(config.host_whitelist, own_names(config)), Origins(config.cors))
        return access.handle if self._audit is None else self._audit.http(access.handle)

    def _make_peer_server(self, durable: Durable) -> Server:
        server, replica = Server(peer_limits(self.config), cork=self._cork), self.replica
        self._peer_service = PeerService(
            durable.cluster_id,
            durable.member_id,
            replica.membership,
            self.node.receive,
            replica.receiver,
            {
                **self._lease_service.for_members(),
                **self._cluster_service.for_members(),
                **replica.hashes.for_members(),
                **replica.receiver.for_members(),
                **self._everybody.for_members(),
            },
            replica.versions,
            self._cluster_service.for_non_members(),
            self._transport.heard_of,
            partial(past.refusal, self.node.raw.raft),
            compares_names=not self.config.peer_tls.skip_san_verification,
            **({} if self._tracing is None else {"decode": self._tracing.decode}),
        )
        self._peer_service.register(server)
        return server

    def _metrics(self) -> Iterator[Metric]:
        """Yield the metrics of all parts, as they are now, for /metrics."""
        replica, transport = self.replica, self._transport
        servers = {"client": self._client_server, "peer": self._peer_server, "metrics": self._metrics_server}
        yield from replica.metrics()
        text = "The latency distribution of backend snapshots."
        yield from durations([("disk_backend_snapshot", text, self._snapshot_service.durations)])
        yield from call_metrics(self._client_server, replica.admission)
        yield from peer_metrics(self._durable.member_id, transport, self._peer_service)
        yield from auth_metrics(replica.applier.auth)
        yield from health_metrics(self._http)
        yield from budget_metrics(self._answers, servers, self.node, replica.hub, replica.admission, transport)

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: OnReady | None = None) -> None:
        """Serve until ``stop``, or until the member fails; ``failure`` is then the error.

        Arguments:
            on_ready: awaited once clients are served; must report its own failures.

        Raises:
            ConfigError: an address cannot be bound, or the data was restored while other members run.
            MemberRemovedError: this member was removed from the cluster before.
        """
        replica = self.replica
        if replica.departure.is_known:
            raise MemberRemovedError(self.removed_text)
        if self._durable.is_as_restored:
            await check_restored(self._durable, self.config.data_dir, self._tls.peer.dialing)
        await self._listen()
        self._log_start()
        self._leader_log.start()
        replica.receiver.start()
        replica.start()
        async with asyncio.TaskGroup() as group:
            works = (
                replica.housekeeping.run(),
                self._serve_clients(on_ready),
                replica.corruption.run(),
                replica.scrub.run(),
                self._tls.watch(),
            )
            tasks = [group.create_task(work) for work in works]
            if self._archiver is not None:
                tasks.append(group.create_task(self._archiver.run()))
            await self._stop.wait()
            for task in tasks:
                task.cancel()
        await self._shut_down()

    def stop(self) -> None:
        """Begin to stop."""
        self._stop.set()

    async def _listen(self) -> None:
        for url in self.config.listen_peer_urls:
            await listen(self._peer_server, url, self._tls.peer.listening)
        http_urls = self.config.listen_client_http_urls
        for urls, grpc_only in ((self.config.listen_client_urls, bool(http_urls)), (http_urls, False)):
            for url, plain_too in addresses(urls).items():
                # Connections queue in the kernel until the member is ready: see ``readiness``.
                await listen(
                    self._client_server,
                    url,
                    self._tls.client.listening,
                    accepting=False,
                    plain_too=plain_too,
                    grpc_only=grpc_only,
                )
        for url in self.config.listen_metrics_urls:
            await listen(self._metrics_server, url, self._tls.client.listening)

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
        for setting in list_insecure_settings(self.config):
            _log.warning("insecure setting: %s", setting)
        if not self.replica.applier.auth.is_enabled:
            _log.warning(
                "authentication is off: every client may read and write everything; to enable it: raftkvctl auth enable"
            )

    async def _serve_clients(self, on_ready: OnReady | None) -> None:
        """Serve clients as soon as that is safe. Requests that wait for a quorum continue to wait."""
        replica = self.replica
        await replica.readiness.wait()
        try:
            await replica.corruption.check_start()
        except CorruptionError as error:
            self._fatal(error)
            return
        if self._stop.is_set():
            # The member may just have found that its disk lost data that was shown before: no client gets an answer.
            return
        self._client_server.start_accepting()
        replica.readiness.announce()
        await replica.publication.publish()
        if on_ready is not None:
            await on_ready(self)
        if self.config.auto_promote:
            own = self.node.settings.member_id
            await promote_itself(self.node, replica.membership, lambda: replica.changes.promote(own, MEMBER))

    async def _shut_down(self) -> None:
        self._stalled_leader.close()
        if self.failure is None and not self.is_removed:
            await hand_over(self.node, self._transport.connected_since)
        self._client_server.stop_listening()
        self.replica.leave()
        self._recipe.close()
        self._users.close()
        self._dashboard.close()
        await self._client_server.close(STOP_GRACE_S if self.failure is None else 0.0)
        self._leader_log.stop()
        await self.replica.stop()
        await self._transport.close()
        await self._peer_server.close()
        await self._metrics_server.close()
        if self._audit is not None:
            await asyncio.to_thread(self._audit.trail.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.thread.close)
        self._durable.store.close()
        self._durable.mark.close()
        if self.failure is None:
            self._disk.close()
            if self._archiver is not None:
                await self._archiver.finish()
            self._durable.wal.close()
            self._durable.backend.close()

    # -- events ------------------------------------------------------------------------------------------------------

    def _fatal(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            _log.critical(
                "this member is stopping: %s", explain(error), exc_info=None if isinstance(error, _EXPLAINED) else error
            )
            self.node.stop()
            self._stop.set()

    @property
    def removed_text(self) -> str:
        """Message of a removed member: one line."""
        return (
            f"{MemberRemovedError.text}: member {self._durable.member_id:x} of cluster {self._durable.cluster_id:x}; "
            f"its data in {self.config.data_dir} must be removed before the host can join again, as a new member"
        )

    def _leave(self) -> None:
        """Stop: this member was removed from the cluster."""
        self.is_removed = True
        _log.warning("this member is stopping: %s", self.removed_text)
        self.stop()

    # The transport is created before the replica, so these methods look up the replica's parts when they are called.

    def _report_unreachable(self, peer_id: int) -> None:
        self.node.report_unreachable(peer_id)

    def _send_database(self, message: Message) -> None:
        self.replica.snapshots.send(message)

    def _refused(self, text: str) -> None:
        if past.is_refusal(text):
            self.node.fatal(CorruptionError(text.removeprefix("raftkv: ")))
        else:
            self.replica.departure.refused(text)

    def _report_gone(self, peer_id: int) -> None:
        self.replica.lost_leader.is_gone(peer_id)

    def _name_of(self, member_id: int) -> str:
        """Return the human-readable name of a member: its published name, if any, and its id."""
        member = self.replica.membership.members.get(member_id)
        return f"{member.name} ({member_id:x})" if member is not None and member.name else f"member {member_id:x}"


def _fit_log(flag: str, wanted_bytes: int, default_bytes: int) -> int:
    """Return a limit of the log that fits the memory; warn if it is below the value that an operator has set."""
    fit_bytes = memory.share_bytes(16, wanted_bytes)
    if fit_bytes < wanted_bytes != default_bytes:
        _log.warning(
            "%s=%d is more than a sixteenth of the memory of this process: %d is used", flag, wanted_bytes, fit_bytes
        )
    return fit_bytes
