"""One member, put together and run: durable state, core, loop, transport, services, listeners.

Owns the order of start and stop. Start: read the disk, listen (so that a port in use is found before anything is
promised), take part, serve clients once the state is as new as it ever was (``readiness``). Stop: hand leadership
over, finish calls under way, leave, close the disk.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from raftkv.apply.alarms import Alarms
from raftkv.apply.applier import Applier
from raftkv.apply.leases import Leases
from raftkv.apply.membership import Membership
from raftkv.apply.request import MEMBER
from raftkv.apply.response import HeaderEncoder
from raftkv.config import ServerConfig
from raftkv.errors import CorruptionError, MemberRemovedError, StorageError, UnknownEntryError, explain
from raftkv.histograms import DISK_S, Buckets, doubling
from raftkv.loop.cork import Cork
from raftkv.loop.turns import LoopTurns
from raftkv.raft.raw_node import RawNode
from raftkv.raft.types import Message, RaftConfig, StateRole
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.server.budget import AnswerBudget
from raftkv.rpc.server.http import HttpHandler, Origins
from raftkv.rpc.server.router import Around
from raftkv.rpc.server.server import Server
from raftkv.server.archiver import make_archiver
from raftkv.server.audit.calls import make_audit
from raftkv.server.auth.users import Users
from raftkv.server.gateway.handler import Gateway
from raftkv.server.http.access import HostCheck, HttpAccess, own_names
from raftkv.server.http.debug import DebugService
from raftkv.server.http.routes import HttpService
from raftkv.server.insecure_settings import list_insecure_settings
from raftkv.server.lease.lessor import Lessor
from raftkv.server.lease.service import LeaseService
from raftkv.server.listening import (
    METRICS_LIMITS,
    RECEIVE_OVERHEAD_BYTES,
    addresses,
    client_limits,
    listen,
    peer_limits,
)
from raftkv.server.maintenance.corruption import CorruptionChecker, CorruptionSettings, Members
from raftkv.server.maintenance.damage import Damage, Scrub
from raftkv.server.maintenance.defragmentation import Defragmenter
from raftkv.server.maintenance.hashes import Hashes
from raftkv.server.maintenance.quotas import QuotaService
from raftkv.server.maintenance.service import MaintenanceService, hand_over
from raftkv.server.maintenance.snapshot import SnapshotService
from raftkv.server.maintenance.space import Space, tell_alarm
from raftkv.server.membership.changes import Changes, PeerAccess
from raftkv.server.membership.presence import Attributes, Departure, Publication, promote_itself
from raftkv.server.membership.service import ClusterService
from raftkv.server.metrics.assembly import Sources, register
from raftkv.server.metrics.calls import CallTimes
from raftkv.server.metrics.exposition import Exposition
from raftkv.server.metrics.member import new_registry
from raftkv.server.node.admission import Admission
from raftkv.server.node.auto_compaction import AutoCompaction, PeriodicPolicy, Policy, RevisionPolicy
from raftkv.server.node.bootstrap import Durable, Origin, open_durable, open_writer
from raftkv.server.node.disk import Disk
from raftkv.server.node.housekeeping import Housekeeping
from raftkv.server.node.leader_log import LeaderLog
from raftkv.server.node.log_cut import LogCut, Retention
from raftkv.server.node.lost_leader import LostLeader
from raftkv.server.node.node import Node
from raftkv.server.node.proposals import new_start, request_ids
from raftkv.server.node.readiness import Readiness
from raftkv.server.node.surroundings import NodeSettings
from raftkv.server.peer.service import PeerService
from raftkv.server.peer.transport import Transport, peer_metadata
from raftkv.server.peer.versions import Versions
from raftkv.server.recipes.election import ElectionService
from raftkv.server.recipes.local_client import Recipe
from raftkv.server.recipes.lock import LockService
from raftkv.server.services import crowded, health
from raftkv.server.services.kv import KVService
from raftkv.server.services.leader_guard import LeaderGuard
from raftkv.server.services.range_stream import RangeStreamService
from raftkv.server.services.responder import Responder
from raftkv.server.snapshots import Installer, SnapshotReceiver, SnapshotSender
from raftkv.server.tls.ports import Ports, peer_hosts
from raftkv.server.ui.cluster import ClusterFigures, Identity
from raftkv.server.ui.figures import Figures, FigureSources
from raftkv.server.ui.service import Dashboard
from raftkv.server.watch.hub import WatchHub
from raftkv.server.watch.service import WatchRunner, WatchService
from raftkv.server.wiring import Parts, wire
from raftkv.storage import schema
from raftkv.storage.wal.kernel_sync import KernelSync

if TYPE_CHECKING:
    from raftkv.server.tracing.assembly import MemberTracing

_log = logging.getLogger(__name__)

ExtendHttp = Callable[[Recipe, HttpHandler], HttpHandler]
"""Makes a handler of HTTP requests from the member's keys and the handler that answers what is not its own."""

OnReady = Callable[["Member"], Awaitable[None]]
"""What is done once a member serves clients."""

STOP_GRACE_S: Final = 5.0


class Member:
    """A member; ``run`` serves until ``stop`` is called.

    Arguments:
        config: its settings.
        turns: of the loop, for ``/metrics``; None: not measured.
        extend_http: makes what the HTTP requests of clients go through; None: the member's own routes are all.
        origin: what a member without data that joins a running cluster begins as (``membership.joining``).

    Attributes:
        failure: the error that stopped it.
        is_removed: whether it stopped because it was removed from the cluster.
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
        self._wire()
        self._measure(self._durable)

    def puts(self) -> int:
        """Return how many keys have been put since the data was opened."""
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
        store = durable.store
        self._syncs, self._defragmentations = Buckets(DISK_S), Buckets(doubling(0.1, 13))
        beside = None if self.config.unsafe_no_fsync else KernelSync.open()
        self._disk = Disk(durable.wal, self._loop, self._fatal, self._syncs.observe, beside, self._writer.is_busy_for)
        self._membership = Membership(store)
        self._departure = Departure(durable.member_id, self._membership, self._leave)
        self.versions = Versions(self._membership, durable.member_id)
        self._applier = Applier(store, Alarms(store, schema.ALARM, tell_alarm), self._membership, Leases(store))
        self._make_snapshots(durable)
        self._transport = self._make_transport(durable)
        self.node = self._make_node(durable)
        self._make_scrub(durable)
        attributes = Attributes(self.config.name, tuple(self.config.advertise_client_urls))
        self._publication = Publication(self.node, self._membership, attributes)
        self.versions.on_upgraded = self._publication.again
        self.readiness = Readiness(self.node, self._publication.publish, self.config.wait_cluster_ready_timeout_s)
        space = Space(self.node, self._applier.alarms, self._snapshots, self._receiver)
        self._admission = Admission(
            self.node,
            self._applier,
            max_request_bytes=self.config.max_request_bytes,
            quota_bytes=self.config.quota_bytes,
            # Pages that a compaction freed are written again, so they count as space.
            size_bytes=lambda: store.size_in_use_bytes,
            data_dir=self.config.data_dir,
            raise_no_space=space.raise_no_space,
            make_room=space.make_room,
        )
        self._housekeeping = Housekeeping(
            self.node,
            store,
            durable.wal,
            self._admission,
            LogCut(self.node, store, self._disk, _retention(self.config), self._snapshots),
            commit_interval_s=self.config.backend_batch_interval_s,
            compaction_pause_s=self.config.compaction_sleep_interval_s,
            compaction_keys=self.config.compaction_batch_limit,
            on_no_space=space.raise_no_space,
            auto_compaction=self._make_auto_compaction(),
        )
        identity = durable.cluster_id, durable.member_id
        self._archiver = make_archiver(self.config, durable.wal, self._disk, store, identity)
        if self._archiver is not None:
            self._registry.register(self._archiver)
        self._http = HttpService(self.node, self._applier, self.readiness, self._admission, Exposition(self._registry))
        self._make_watches_and_leases(durable)
        self._corruption = self._make_corruption_checker(durable)
        # Shared by all ports that clients reach; members have a budget of their own, which clients cannot fill.
        self._answers = AnswerBudget()
        self._audit = make_audit(self.config, self._registry, self._tls)
        self._client_server = self._make_client_server(durable)
        metrics_http = self._guarded(self._http.handle)
        self._metrics_server = Server(METRICS_LIMITS, metrics_http, answers=self._answers, cork=self._cork)
        self._peer_server = self._make_peer_server(durable)

    def _make_watches_and_leases(self, durable: Durable) -> None:
        store, header = durable.store, HeaderEncoder(durable.cluster_id, durable.member_id)
        self._watch_runner = WatchRunner()
        self._watch_hub = WatchHub(
            store, lambda revision: header.encode(revision, self.node.term), self._watch_runner.wake, self._cork
        )
        self._leader_guard = LeaderGuard(self.node)
        self._lessor = Lessor(
            self.node,
            self._applier,
            ttl_min_s=self.config.lease_ttl_min_s,
            channel=self._channel,
            introduction=self._introduction,
            cork=self._cork,
        )

    def _make_transport(self, durable: Durable) -> Transport:
        self._tls = Ports.of(self.config, lambda: peer_hosts(self._membership.members))
        self._registry.register(self._tls)
        return Transport(
            durable.cluster_id,
            durable.member_id,
            self._tls.peer.dialing,
            self._report_unreachable,
            self._snapshots.send,
            self._departure.refused,
            self._report_gone,
            None if self._tracing is None else self._tracing.encoder,
        )

    def _make_tracing(self) -> MemberTracing | None:
        """Begin to trace, if the flag asks for it; else nothing of the tracing is imported."""
        if not self.config.tracing.enabled:
            return None
        from raftkv.server.tracing.assembly import make_tracing

        return make_tracing(self.config, self._registry)

    def _make_snapshots(self, durable: Durable) -> None:
        store = durable.store
        self._snapshots = SnapshotSender(
            store,
            durable.snapshots,
            self._channel,
            self._introduction,
            self._is_snapshot_wanted,
            self._is_served,
            self._report_snapshot,
            self._damaged,
        )
        self._installer = Installer(store, durable.snapshots, self._fatal)
        self._defragmenter = Defragmenter(
            store, durable.snapshots, self._fatal, self._defragmentations.observe, on_damage=self._damaged
        )
        self._registry.register(self._defragmenter)
        self._receiver = SnapshotReceiver(durable.snapshots, self._awaits_snapshot)

    def _make_node(self, durable: Durable) -> Node:
        config, store = self.config, durable.store
        raft_config = RaftConfig(
            id=durable.member_id,
            election_ticks=config.election_ticks,
            pre_vote=config.pre_vote,
            quiet_commits=True,
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
            ids=request_ids(durable.member_id, new_start()),
            conf_state=store.conf_state,
            applied=store.applied_index,
            on_fatal=self._fatal,
            install_snapshot=self._installer.install,
            note_applied=durable.mark.note,
            cork=self._cork,
            stages=None if self._tracing is None else self._tracing.stages,
        )

    def _make_scrub(self, durable: Durable) -> None:
        where = f"{durable.backend.path} of this member ({self.config.name}, {durable.member_id:x})"
        self._damage = Damage(self.node, where, self._transport.connected_since, self._fatal)
        self.node.on_damage = self._damaged
        self._registry.register(self._damage)
        self._scrub = Scrub(durable.store, self._damage)

    def _make_auto_compaction(self) -> AutoCompaction | None:
        config, node = self.config, self.node
        if config.auto_compaction_retention_revisions > 0:
            policy: Policy = RevisionPolicy(config.auto_compaction_retention_revisions)
        elif config.auto_compaction_retention_s > 0:
            policy = PeriodicPolicy(config.auto_compaction_retention_s, self._loop.time())
        else:
            return None
        return AutoCompaction(policy, node, lambda: node.role == StateRole.LEADER, lambda: node.store.revision)

    def _make_corruption_checker(self, durable: Durable) -> CorruptionChecker:
        config = self.config
        settings = CorruptionSettings(
            config.initial_corrupt_check,
            config.corrupt_check_time_s,
            config.compact_hash_check,
            config.compact_hash_check_time_s,
        )
        self._hashes = Hashes(durable.store, durable.member_id, self._damaged)
        members = Members(self._membership, durable.member_id, self._channel, self._introduction)
        checker = CorruptionChecker(settings, self.node, self._hashes, members)
        self._registry.register(checker)
        return checker

    def _make_client_server(self, durable: Durable) -> Server:
        config = self.config
        header = HeaderEncoder(durable.cluster_id, durable.member_id)
        responder = Responder(self.node, self._applier, header, self._admission)
        self._users = Users(config, self._applier, self.node, responder.slices)
        self._recipe = Recipe(responder, self._watch_hub, self._lessor)
        pprof = config.enable_pprof
        handler: HttpHandler = DebugService(self._http.handle, self._users, self.node.raw.status, pprof=pprof).handle
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
        )
        if self._audit is not None:
            server.router.on_refused = self._audit.refused
        KVService(responder, config.max_txn_ops).register(server)
        self._lease_service = LeaseService(responder, self._lessor, self._leader_guard, self._cork, self._users.live)
        self._lease_service.register(server)
        WatchService(
            self._watch_hub,
            self._admission,
            self._leader_guard,
            self._users.live,
            fragment_bytes=config.max_request_bytes + RECEIVE_OVERHEAD_BYTES,
            progress_interval_s=config.watch_progress_notify_interval_s,
            on_refused=None if self._audit is None else self._audit.watch_refused,
        ).register(server)
        LockService(self._recipe).register(server)
        ElectionService(self._recipe, self._leader_guard).register(server)
        RangeStreamService(responder, config.max_request_bytes).register(server)
        self._changes = self._make_changes(durable)
        self._cluster_service = ClusterService(responder, self._changes)
        self._cluster_service.register(server)
        MaintenanceService(
            responder,
            durable.store,
            config.quota_bytes or 0,
            self.versions.check_capable,
            self._defragmenter,
            self._hashes,
        ).register(server)
        self._snapshot_service = SnapshotService(durable.store, durable.backend, self._damaged)
        self._snapshot_service.register(server)
        QuotaService(responder, self.versions.check_capable).register(server)
        health.register(server)
        self._users.serve(server, responder, self.versions.check_capable)
        gateway.serve(server)
        return server

    def _arounds(self) -> tuple[Around, ...]:
        """What the handlers of clients' calls are wrapped in; the audit log also sees calls that the guard refuses."""
        noting = () if self._audit is None else (self._audit.around,)
        tracing = () if self._tracing is None else (self._tracing.calls.around,)
        timing = (self._times().around,) if self.config.extensive_metrics else ()
        return (crowded.around, *noting, *tracing, *timing, self._users.guard.around)

    def _make_dashboard(self, durable: Durable) -> Dashboard:
        sources = FigureSources(
            node=self.node,
            store=durable.store,
            disk=self._disk,
            hub=self._watch_hub,
            leases=self._lessor.times,
            transport=self._transport,
            quota_bytes=self.config.quota_bytes or 0,
            connections=lambda: len(self._client_server.connections),
        )
        identity = Identity(durable.cluster_id, durable.member_id, self.config.name)
        self._everybody = ClusterFigures(Figures(sources), self._applier, identity, self._channel, self._introduction)
        return Dashboard(identity, self._everybody, self._applier, self._users, self._watch_hub)

    def _times(self) -> CallTimes:
        times = CallTimes()
        self._registry.register(times)
        return times

    def _guarded(self, handler: HttpHandler) -> HttpHandler:
        config = self.config
        access = HttpAccess(handler, HostCheck(config.host_whitelist, own_names(config)), Origins(config.cors))
        return access.handle if self._audit is None else self._audit.http(access.handle)

    def _make_peer_server(self, durable: Durable) -> Server:
        server = Server(peer_limits(self.config), cork=self._cork)
        self._peer_service = PeerService(
            durable.cluster_id,
            durable.member_id,
            self._membership,
            self.node.receive,
            self._receiver,
            {
                **self._lease_service.for_members(),
                **self._cluster_service.for_members(),
                **self._hashes.for_members(),
                **self._receiver.for_members(),
                **self._everybody.for_members(),
            },
            self.versions,
            self._cluster_service.for_non_members(),
            self._transport.heard_of,
            compares_names=not self.config.peer_tls.skip_san_verification,
            **({} if self._tracing is None else {"decode": self._tracing.decode}),
        )
        self._peer_service.register(server)
        return server

    def _make_changes(self, durable: Durable) -> Changes:
        return Changes(
            self.node,
            self._membership,
            PeerAccess(
                connected_since=self._transport.connected_since,
                channel=self._channel,
                introduction=self._introduction,
                wait_until_dispensable=self._departure.wait_until_dispensable,
            ),
            cluster_id=durable.cluster_id,
            strict=self.config.strict_reconfig_check,
            learners_max=self.config.max_learners,
            check_capable=self.versions.check_started_capable,
        )

    def _wire(self) -> None:
        is_connected = self._transport.connected_since
        self._lost_leader = LostLeader(self.node, self._loop)
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
                admission=self._admission,
                departure=self._departure,
                peers=(self._transport, self._peer_service),
                hashes=self._hashes,
                users=self._users,
            )
        )

    def _measure(self, durable: Durable) -> None:
        """Show in /metrics what the parts count."""
        register(
            self._registry,
            Sources(
                durable=durable,
                node=self.node,
                applier=self._applier,
                admission=self._admission,
                quota_bytes=self.config.quota_bytes or 0,
                features={
                    "InitialCorruptCheck": self.config.initial_corrupt_check,
                    "CompactHashCheck": self.config.compact_hash_check,
                },
                disk=self._disk,
                syncs=self._syncs,
                defragmentations=self._defragmentations,
                hashes=self._hashes,
                snapshot_service=self._snapshot_service,
                housekeeping=self._housekeeping,
                snapshots=self._snapshots,
                receiver=self._receiver,
                installer=self._installer,
                transport=self._transport,
                peer_service=self._peer_service,
                changes=self._changes,
                hub=self._watch_hub,
                lease_times=self._lessor.times,
                users=self._users,
                http=self._http,
                answers=self._answers,
                servers={"client": self._client_server, "peer": self._peer_server, "metrics": self._metrics_server},
            ),
        )

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self, on_ready: OnReady | None = None) -> None:
        """Serve until ``stop``, or until the member fails: ``failure`` says why.

        Arguments:
            on_ready: awaited once clients are served, beside all else; it reports its own failures.

        Raises:
            ConfigError: an address cannot be listened on.
            MemberRemovedError: this member was removed from the cluster before.
        """
        if self._departure.is_known:
            raise MemberRemovedError(self.removed_text)
        await self._listen()
        self._transport.follow(self._membership.members, self._membership.removed)
        self._log_start()
        self._leader_log.start()
        self.node.start()
        self._lessor.start()
        self._receiver.start()
        if self.config.initial_election_tick_advance:
            self._advance_ticks()
        async with asyncio.TaskGroup() as group:
            works = (
                self._housekeeping.run(),
                self._serve_clients(on_ready),
                self._corruption.run(),
                self._scrub.run(),
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
                # Nobody is answered yet: see ``readiness``.
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
            _log.warning("open to strangers: %s", setting)
        if not self._applier.auth.is_enabled:
            _log.warning("open to clients: users are off, so who is let in may do everything; raftkvctl auth enable")

    def _advance_ticks(self) -> None:
        """Skip most of the first election timeout: a member that has just started has nobody to wait for."""
        only_voter = self.node.conf_state.voters == (self._durable.member_id,)
        if only_voter:
            self.node.campaign()
            return
        # Leave enough for a heartbeat of a leader that is there already.
        for _ in range(self.config.election_ticks - 3):
            self.node.raw.tick()

    async def _serve_clients(self, on_ready: OnReady | None) -> None:
        """Answer clients as soon as that is safe; what waits for a quorum goes on waiting behind it."""
        await self.readiness.wait()
        try:
            await self._corruption.check_start()
        except CorruptionError as error:
            self._fatal(error)
            return
        self._client_server.start_accepting()
        self.readiness.announce()
        await self._publication.publish()
        if on_ready is not None:
            await on_ready(self)
        if self.config.auto_promote:
            own = self.node.settings.member_id
            await promote_itself(self.node, self._applier.membership, lambda: self._changes.promote(own, MEMBER))

    async def _shut_down(self) -> None:
        if self.failure is None and not self.is_removed:
            await hand_over(self.node, self._transport.connected_since)
        self._client_server.stop_listening()
        self._damage.close()
        self._departure.close()
        self._leader_guard.close()
        self._recipe.close()
        self._users.close()
        self._dashboard.close()
        await self._client_server.close(STOP_GRACE_S if self.failure is None else 0.0)
        self._lessor.stop()
        self._leader_log.stop()
        self.node.stop()
        await self._installer.close()
        await self._defragmenter.close()
        await self._snapshots.close()
        self._receiver.close()
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
            # These are no bugs of raftkv: the message says what to do, and a traceback would only hide it.
            is_explained = isinstance(error, UnknownEntryError | StorageError | CorruptionError | OSError | MemoryError)
            _log.critical("the member stops: %s", explain(error), exc_info=None if is_explained else error)
            self.node.stop()
            self._stop.set()

    def _damaged(self, error: CorruptionError) -> None:
        self._damage.found(error)

    @property
    def removed_text(self) -> str:
        """What a removed member says: one line."""
        return (
            f"{MemberRemovedError.text}: member {self._durable.member_id:x} of cluster {self._durable.cluster_id:x}; "
            f"its data in {self.config.data_dir} must be removed before the host can join again, as a new member"
        )

    def _leave(self) -> None:
        """This member was removed from the cluster."""
        self.is_removed = True
        _log.warning("the member stops: %s", self.removed_text)
        self.stop()

    def _channel(self, peer_id: int) -> Channel | None:
        peer = self._transport.peers.get(peer_id)
        return peer.channel if peer is not None else None

    def _name_of(self, member_id: int) -> str:
        """Return how people know a member: its name if it has published it, and its id."""
        member = self._membership.members.get(member_id)
        return f"{member.name} ({member_id:x})" if member is not None and member.name else f"member {member_id:x}"

    def _introduction(self, peer_id: int) -> tuple[tuple[str, str], ...]:
        return peer_metadata(self._durable.cluster_id, self._durable.member_id, peer_id)

    def _report_unreachable(self, peer_id: int) -> None:
        self.node.report_unreachable(peer_id)

    def _report_gone(self, peer_id: int) -> None:
        self._lost_leader.is_gone(peer_id)

    def _report_snapshot(self, peer_id: int, ok: bool) -> None:
        self.node.report_snapshot(peer_id, ok)

    def _is_snapshot_wanted(self, message: Message) -> bool:
        return self.node.role == StateRole.LEADER and self.node.term == message.term

    def _is_served(self, peer_id: int, index: int) -> bool:
        return self.node.role != StateRole.LEADER or self.node.has_log(peer_id, index)

    def _awaits_snapshot(self, index: int) -> bool:
        return self.node.awaits_snapshot(index)


def _retention(config: ServerConfig) -> Retention:
    return Retention(
        snapshot_entries=config.snapshot_count,
        snapshot_bytes=config.snapshot_bytes,
        catchup_entries=config.snapshot_catchup_entries,
        catchup_bytes=config.snapshot_catchup_bytes,
    )
