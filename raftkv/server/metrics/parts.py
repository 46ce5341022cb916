"""Parts of a member that are not the store or the loop: watches, leases, users, quotas, health."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from raftkv.apply.auth.store import AuthStore
from raftkv.apply.quotas import Quotas
from raftkv.histograms import histogram_family
from raftkv.server.auth.users import Users
from raftkv.server.http.routes import HttpService
from raftkv.server.lease.times import LeaseTimes
from raftkv.server.metrics.exposition import counter, counters, gauge, gauges
from raftkv.server.watch.hub import WatchHub


class WatchMetrics(Collector):
    """The watches of a member.

    Arguments:
        hub: of the member.
    """

    def __init__(self, hub: WatchHub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """All families."""
        hub = self._hub
        yield from gauges(
            ("etcd_debugging_mvcc_watch_stream_total", "Total number of watch streams.", len(hub.streams)),
            ("etcd_debugging_mvcc_watcher_total", "Total number of watchers.", hub.watcher_count),
            ("etcd_debugging_mvcc_slow_watcher_total", "Total number of unsynced slow watchers.", hub.unsynced_count),
            (
                "etcd_debugging_mvcc_pending_events_total",
                "Total number of pending events to be sent.",
                hub.pending_count,
            ),
            ("etcd_debugging_store_watchers", "Count of currently active watchers.", 0),  # of the v2 store
            ("raftkv_watch_lag_revisions", "How far the slowest watcher is behind.", hub.lag_revisions),
        )
        text = "Total number of events sent by this member."
        yield from counters(("etcd_debugging_mvcc_events_total", text, hub.events_total))


class LeaseMetrics(Collector):
    """Counts of leases. Every member counts what it applied, only the leader renewals.

    Arguments:
        times: of the member.
    """

    def __init__(self, times: LeaseTimes) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        """All families."""
        times = self._times
        yield from counters(
            ("etcd_debugging_lease_granted_total", "The total number of granted leases.", times.granted_total),
            ("etcd_debugging_lease_revoked_total", "The total number of revoked leases.", times.revoked_total),
            (
                "etcd_debugging_lease_renewed_total",
                "The number of renewed leases seen by the leader.",
                times.renewed_total,
            ),
            ("etcd_debugging_server_lease_expired_total", "The total number of expired leases.", times.expired_total),
        )
        text = "Bucketed histogram of lease TTLs."
        yield histogram_family("etcd_debugging_lease_ttl_total", text, {(): times.ttls})
        yield from gauges(("raftkv_leases", "Leases that exist now.", len(times)))


class AuthMetrics(Collector):
    """Users of the cluster, and logins at this member.

    Arguments:
        auth: users and roles, as applied.
        users: of the member.
    """

    def __init__(self, auth: AuthStore, users: Users) -> None:
        self._auth = auth
        self._users = users

    def collect(self) -> Iterator[Metric]:
        """All families."""
        auth, users = self._auth, self._users
        yield from gauges(
            ("etcd_debugging_auth_revision", "The current revision of auth store.", auth.revision),
            ("raftkv_auth_enabled", "Whether calls need a user.", auth.is_enabled),
            ("raftkv_auth_users", "Users that exist.", len(auth.users)),
            ("raftkv_auth_roles", "Roles that exist.", len(auth.roles)),
            ("raftkv_auth_tokens", "Tokens that went through the log and have not ended.", len(users.tokens)),
            ("raftkv_auth_live_calls", "Calls that last and are looked at again when users change.", len(users.live)),
            ("raftkv_auth_waiting_passwords", "Passwords that wait to be hashed or compared.", users.waiting_passwords),
        )


class QuotaMetrics(Collector):
    """Quotas of prefixes, of which there are few.

    Arguments:
        quotas: of the cluster.
    """

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def collect(self) -> Iterator[Metric]:
        """All families."""
        quotas = {(one.prefix.decode("utf-8", "backslashreplace"),): one for one in self._quotas.by_prefix()}
        for unit, used, most in (
            ("bytes", {k: q.bytes_used for k, q in quotas.items()}, {k: q.bytes_max for k, q in quotas.items()}),
            ("keys", {k: q.keys_used for k, q in quotas.items()}, {k: q.keys_max for k, q in quotas.items()}),
        ):
            yield gauge(
                f"raftkv_prefix_quota_used_{unit}", f"What a prefix uses of its quota, in {unit}.", used, ["prefix"]
            )
            limits = {prefix: limit for prefix, limit in most.items() if limit}
            yield gauge(f"raftkv_prefix_quota_limit_{unit}", f"Quota of a prefix, in {unit}.", limits, ["prefix"])


class HealthMetrics(Collector):
    """Answers to health probes.

    Arguments:
        http: of the member.
    """

    def __init__(self, http: HttpService) -> None:
        self._http = http

    def collect(self) -> Iterator[Metric]:
        """All families."""
        http = self._http
        yield from counters(
            ("etcd_server_health_success", "The total number of successful health checks", http.healthy),
            ("etcd_server_health_failures", "The total number of failed health checks", http.unhealthy),
        )
        yield gauge(
            "etcd_server_healthcheck",
            "The result of each kind of healthcheck.",
            {(kind, name): not failed for (kind, name), failed in http.failing.items()},
            ["type", "name"],
        )
        yield counter(
            "etcd_server_healthchecks_total",
            "The total number of each kind of healthcheck.",
            {(kind, name, "error" if failed else "success"): n for (kind, name, failed), n in http.checks.items()},
            ["type", "name", "status"],
        )
