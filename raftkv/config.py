"""Everything that can be set on a member, as one frozen value.

Owns the names, defaults, units and limits; knows no flag, file or environment (``raftkv.cli`` reads those and makes
one of these). Units are in the names: ``_s`` seconds, ``_bytes`` bytes; ticks exist only inside ``raftkv.raft``.
A ``ServerConfig`` that exists is valid: what cannot be used raises ``ConfigError`` with one line, in etcd's words
where etcd has them.

>>> ServerConfig(name="a", data_dir="/tmp/a").election_timeout_s
1.0
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from dataclasses import dataclass

from raftkv import cluster_id
from raftkv.errors import ConfigError

DEFAULT_NAME = "default"
DEFAULT_PEER_URL = "http://localhost:2380"
DEFAULT_CLIENT_URL = "http://localhost:2379"
DEFAULT_QUOTA_BYTES = 2 * 1024**3
LOG_LEVELS = ("debug", "info", "warn", "error", "panic", "fatal")
TLS_VERSIONS = ("TLS1.2", "TLS1.3")
_LEASE_TTL_MAX_S = 9_000_000_000
_ELECTION_MAX_S = 50.0
_RUN_ID_BYTES_MAX = 200
_LARGE_QUOTA_BYTES = 8 * 1024**3


@dataclass(frozen=True)
class TLSFiles:
    """Certificates of one kind of port (client or peer). All empty: plain TCP."""

    cert_file: str = ""
    """PEM certificate (chain) that this member shows."""
    key_file: str = ""
    """PEM key of ``cert_file``; must be readable by nobody else."""
    client_cert_file: str = ""
    """Certificate for outgoing connections; empty: ``cert_file``."""
    client_key_file: str = ""
    """Key of ``client_cert_file``; empty: ``key_file``."""
    trusted_ca_file: str = ""
    """PEM authorities that the other side's certificate must come from."""
    client_cert_auth: bool = False
    """Refuse callers without a certificate from ``trusted_ca_file``. Off, anyone who reaches the port may call."""

    @property
    def is_empty(self) -> bool:
        """Whether no certificate is configured."""
        return not (self.cert_file or self.key_file)


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one member; each field says its unit and its danger."""

    # --- the member
    name: str = DEFAULT_NAME
    """Name of this member, unique in ``initial_cluster``."""
    data_dir: str = f"{DEFAULT_NAME}.etcd"
    """Directory of everything durable. Danger: two members must never share it."""
    wal_dir: str = ""
    """Directory of the log on a disk of its own; empty: inside ``data_dir``. Losing it loses acknowledged writes."""
    snapshot_count: int = 10_000
    """Entries between snapshots, after which the log may be cut. Larger: more memory, slower restart."""
    snapshot_catchup_entries: int = 5_000
    """Entries kept behind a snapshot so that a slow follower needs no full copy."""
    heartbeat_interval_s: float = 0.1
    """Time between heartbeats; about one round trip. Danger: the same on all members."""
    election_timeout_s: float = 1.0
    """Silence after which a follower asks for votes; at least 5 heartbeats. Too short: elections without need."""
    initial_election_tick_advance: bool = True
    """Skip most of the first election timeout after a start."""
    quota_backend_bytes: int = 0
    """Database size at which writes stop with NOSPACE; 0: 2 GiB, negative: none. Danger: none can fill the disk."""
    backend_batch_interval_s: float = 0.1
    """Longest time between commits of the database; durability does not depend on it (the log does that)."""
    backend_batch_limit: int = 10_000
    """Operations after which the database commits at once."""
    max_txn_ops: int = 128
    """Operations allowed in each list of a transaction."""
    max_request_bytes: int = 1_572_864
    """Largest write that is accepted. Above 10 MiB heartbeats can be delayed behind it."""
    max_concurrent_streams: int = 2**32 - 1
    """Calls that one connection may have open."""
    max_learners: int = 1
    """Learners that the cluster may have at a time."""
    wait_cluster_ready_timeout_s: float = 5.0
    """A member that starts answers no client before a quorum confirmed its state, or this long if there is none."""
    lease_min_ttl_s: int = 0
    """Shortest TTL of a lease; 0: one and a half election timeouts, as in etcd. Too short: leases end in elections."""

    # --- keepalive of client connections
    grpc_keepalive_min_time_s: float = 5.0
    """Shortest time between pings of a client; faster ones are cut off."""
    grpc_keepalive_interval_s: float = 7200.0
    """Time after which an idle client is pinged; 0: 2 hours, as in etcd."""
    grpc_keepalive_timeout_s: float = 20.0
    """Time to wait for that ping before the connection is closed; 0: 20 s, as in etcd."""

    # --- addresses
    listen_peer_urls: tuple[str, ...] = (DEFAULT_PEER_URL,)
    """Where members connect: IP addresses or localhost."""
    listen_client_urls: tuple[str, ...] = (DEFAULT_CLIENT_URL,)
    """Where clients connect: IP addresses or localhost. Danger: with 0.0.0.0 and no TLS anyone may read and write."""
    listen_metrics_urls: tuple[str, ...] = ()
    """More addresses, for /metrics, /health and /version alone."""
    initial_advertise_peer_urls: tuple[str, ...] = (DEFAULT_PEER_URL,)
    """Peer URLs as the other members reach them; part of the member's id."""
    advertise_client_urls: tuple[str, ...] = (DEFAULT_CLIENT_URL,)
    """Client URLs as clients reach them, shown by ``member list``."""

    # --- the cluster
    initial_cluster: str = f"{DEFAULT_NAME}={DEFAULT_PEER_URL}"
    """``name=URL,...`` of all founding members; the same on each. Read only when the data directory is empty."""
    initial_cluster_state: str = "new"
    """``new`` founds a cluster, ``existing`` joins one."""
    initial_cluster_token: str = "etcd-cluster"
    """Part of all ids: clusters with different tokens never mix."""
    strict_reconfig_check: bool = True
    """Refuse membership changes that would lose the quorum. Danger: off, one call can stop the cluster."""
    pre_vote: bool = True
    """Ask before raising the term, so that a member coming back does not disturb the leader."""

    # --- history
    auto_compaction_mode: str = "periodic"
    """``periodic`` or ``revision``."""
    auto_compaction_retention_s: float = 0.0
    """``periodic``: history to keep; 0: no compaction."""
    auto_compaction_retention_revisions: int = 0
    """``revision``: revisions to keep; 0: no compaction."""
    compaction_batch_limit: int = 1_000
    """Keys looked at in one step of a compaction."""
    compaction_sleep_interval_s: float = 0.01
    """Pause between the steps, in which clients are served."""
    watch_progress_notify_interval_s: float = 600.0
    """Time between progress notifications of watchers that asked for them and had no event."""

    # --- TLS and HTTP
    client_tls: TLSFiles = TLSFiles()
    """Certificates of the client ports."""
    peer_tls: TLSFiles = TLSFiles()
    """Certificates of the peer ports."""
    tls_min_version: str = "TLS1.2"
    """Oldest TLS that is spoken: TLS1.2 or TLS1.3."""
    tls_max_version: str = ""
    """Newest TLS that is spoken; empty: the newest there is."""
    cors: tuple[str, ...] = ("*",)
    """Origins that browsers may call from; ``*``: all."""
    host_whitelist: tuple[str, ...] = ("*",)
    """Host names accepted in plain HTTP requests; ``*``: all."""
    horovod_run: str = ""
    """Training run whose workers may use Horovod's HTTP rendezvous on the client ports; empty: nobody. Danger: who
    reaches a port may then write below /raftkv/horovod/ over plain HTTP. The same on all members."""

    # --- logging
    log_level: str = "info"
    """Least level that is written: debug, info, warn, error, panic, fatal."""
    log_format: str = "json"
    """``json`` or ``console``."""
    log_outputs: tuple[str, ...] = ("default",)
    """``default`` and ``stderr``: standard error; ``stdout``; or files."""

    # --- unsafe
    unsafe_no_fsync: bool = False
    """Never wait for the disk. Danger: acknowledged writes are lost when the machine stops."""

    def __post_init__(self) -> None:
        self._check_member()
        self._check_timing()
        self._check_addresses()
        self._check_choices()
        self._check_horovod()
        self._check_tls("client", self.client_tls)
        self._check_tls("peer", self.peer_tls)

    @property
    def quota_bytes(self) -> int | None:
        """The quota in force; None: none."""
        if self.quota_backend_bytes < 0:
            return None
        return self.quota_backend_bytes or DEFAULT_QUOTA_BYTES

    @property
    def quota_is_large(self) -> bool:
        """Whether the quota is above what etcd recommends, which deserves a warning."""
        return self.quota_backend_bytes > _LARGE_QUOTA_BYTES

    @property
    def election_ticks(self) -> int:
        """Heartbeat intervals in an election timeout, as raft counts them."""
        return round(self.election_timeout_s / self.heartbeat_interval_s)

    @property
    def lease_ttl_min_s(self) -> int:
        """The shortest TTL in force (seconds), by default such that no lease ends while a leader is elected."""
        return self.lease_min_ttl_s or math.ceil(self.election_ticks * 3 // 2 * self.heartbeat_interval_s)

    @property
    def member_id(self) -> int:
        """This member's id if it is a founding member; see ``raftkv.cluster_id``."""
        urls = cluster_id.parse_initial_cluster(self.initial_cluster).get(self.name, ())
        return cluster_id.member_id(urls or self.initial_advertise_peer_urls, self.initial_cluster_token)

    def founding_members(self) -> dict[int, tuple[str, tuple[str, ...]]]:
        """Return all founding members: id to name and peer URLs."""
        return cluster_id.founding_members(self.initial_cluster, self.initial_cluster_token)

    def check_bootstrap(self) -> None:
        """Check what only a member without data needs: its place in ``initial_cluster``.

        Raises:
            ConfigError: this member's name or URLs are not in it, or a URL is there twice.
        """
        cluster = cluster_id.parse_initial_cluster(self.initial_cluster)
        if self.name not in cluster:
            raise ConfigError(f'couldn\'t find local name "{self.name}" in the initial cluster configuration')
        if self.initial_cluster_state == "new":
            self._check_advertised(cluster[self.name])
        counts = Counter(url for urls in cluster.values() for url in urls)
        if any(count > 1 for count in counts.values()):
            raise ConfigError(f"initial cluster {self.initial_cluster} has duplicate url")

    def _check_advertised(self, listed: tuple[str, ...]) -> None:
        theirs = {_loopback(url): url for url in listed}
        ours = {_loopback(url): url for url in self.initial_advertise_peer_urls}
        if missing := [f"{self.name}={url}" for key, url in sorted(theirs.items()) if key not in ours]:
            advertised = ",".join(self.initial_advertise_peer_urls)
            raise ConfigError(
                f"--initial-cluster has {','.join(missing)} but missing from --initial-advertise-peer-urls={advertised}"
            )
        if missing := [url for key, url in sorted(ours.items()) if key not in theirs]:
            expected = cluster_id.format_initial_cluster({self.name: self.initial_advertise_peer_urls})
            raise ConfigError(
                f"--initial-advertise-peer-urls has {','.join(missing)} but missing from --initial-cluster={expected}"
            )

    def _check_member(self) -> None:
        if not self.name:
            raise ConfigError("--name must not be empty")
        if not self.data_dir:
            raise ConfigError("--data-dir must not be empty")
        at_least_one = {
            "--snapshot-count": self.snapshot_count,
            "--backend-batch-limit": self.backend_batch_limit,
            "--max-txn-ops": self.max_txn_ops,
            "--max-request-bytes": self.max_request_bytes,
            "--max-concurrent-streams": self.max_concurrent_streams,
            "--compaction-batch-limit": self.compaction_batch_limit,
        }
        for flag, value in at_least_one.items():
            if value < 1:
                raise ConfigError(f"{flag} must be >0 (set to {value})")

    def _check_timing(self) -> None:
        heartbeat_ms, election_ms = round(self.heartbeat_interval_s * 1000), round(self.election_timeout_s * 1000)
        if heartbeat_ms <= 0:
            raise ConfigError(f"--heartbeat-interval must be >0 (set to {heartbeat_ms}ms)")
        if election_ms <= 0:
            raise ConfigError(f"--election-timeout must be >0 (set to {election_ms}ms)")
        if 5 * heartbeat_ms > election_ms:
            raise ConfigError(
                f"--election-timeout[{election_ms}ms] should be at least as 5 times as "
                f"--heartbeat-interval[{heartbeat_ms}ms]"
            )
        if self.election_timeout_s > _ELECTION_MAX_S:
            raise ConfigError(f"--election-timeout[{election_ms}ms] is too long, and should be set less than 50000ms")
        not_negative = {
            "--backend-batch-interval": self.backend_batch_interval_s,
            "--compaction-sleep-interval": self.compaction_sleep_interval_s,
            "--watch-progress-notify-interval": self.watch_progress_notify_interval_s,
            "--wait-cluster-ready-timeout": self.wait_cluster_ready_timeout_s,
            "--grpc-keepalive-min-time": self.grpc_keepalive_min_time_s,
            "--grpc-keepalive-interval": self.grpc_keepalive_interval_s,
            "--grpc-keepalive-timeout": self.grpc_keepalive_timeout_s,
            "--auto-compaction-retention": self.auto_compaction_retention_s,
        }
        for flag, value in not_negative.items():
            if value < 0:
                raise ConfigError(f"{flag} must not be negative (set to {value:g}s)")
        if not 0 <= self.lease_min_ttl_s <= _LEASE_TTL_MAX_S:
            raise ConfigError(f"--lease-min-ttl must be 0 to {_LEASE_TTL_MAX_S} s (set to {self.lease_min_ttl_s})")

    def _check_addresses(self) -> None:
        for urls in (self.listen_peer_urls, self.listen_client_urls, self.listen_metrics_urls):
            for url in urls:
                _check_bindable(url)
        if not self.listen_peer_urls or not self.listen_client_urls:
            raise ConfigError("--listen-peer-urls and --listen-client-urls must not be empty")
        for flag, urls in (
            ("initial-advertise-peer-urls", self.initial_advertise_peer_urls),
            ("advertise-client-urls", self.advertise_client_urls),
        ):
            for url in cluster_id.parse_urls(",".join(urls)) if urls else ():
                if not cluster_id.split_url(url)[1]:
                    raise ConfigError(
                        f'--{flag} "{",".join(urls)}" must be "host:port" (unexpected empty host ({url}))'
                    )
        if not self.advertise_client_urls:
            raise ConfigError("--advertise-client-urls is required when --listen-client-urls is set explicitly")
        cluster_id.parse_initial_cluster(self.initial_cluster)

    def _check_horovod(self) -> None:
        run = self.horovod_run
        if run and (
            len(run.encode()) > _RUN_ID_BYTES_MAX or not run.isprintable() or " " in run or "" in run.split("/")
        ):
            raise ConfigError(
                f"--horovod-run {run!r} is no run id: at most {_RUN_ID_BYTES_MAX} bytes, without white space, "
                "with slashes only between names"
            )

    def _check_choices(self) -> None:
        for flag, value, choices in (
            ("initial-cluster-state", self.initial_cluster_state, ("new", "existing")),
            ("log-level", self.log_level, LOG_LEVELS),
            ("log-format", self.log_format, ("json", "console")),
            ("tls-min-version", self.tls_min_version, TLS_VERSIONS),
            ("tls-max-version", self.tls_max_version, ("", *TLS_VERSIONS)),
        ):
            if value not in choices:
                raise ConfigError(f'--{flag} "{value}" is not one of {", ".join(choices)}')
        if self.tls_max_version and self.tls_max_version < self.tls_min_version:
            raise ConfigError(
                f"min version ({self.tls_min_version}) is greater than max version ({self.tls_max_version})"
            )
        if self.auto_compaction_mode not in ("periodic", "revision"):
            raise ConfigError(f'unknown auto-compaction-mode "{self.auto_compaction_mode}"')

    def _check_tls(self, kind: str, files: TLSFiles) -> None:
        prefix = "peer-" if kind == "peer" else ""
        if bool(files.cert_file) != bool(files.key_file):
            raise ConfigError(f"--{prefix}cert-file and --{prefix}key-file must be given together")
        if files.client_cert_auth and not files.trusted_ca_file:
            raise ConfigError(f"--{prefix}client-cert-auth needs --{prefix}trusted-ca-file")
        listened = self.listen_peer_urls if kind == "peer" else self.listen_client_urls
        secure = [url for url in listened if url.startswith(("https:", "unixs:"))]
        if secure and files.is_empty:
            raise ConfigError(
                f"cannot listen on TLS for {secure[0]}: --{prefix}cert-file and --{prefix}key-file are not given"
            )


def _check_bindable(url: str) -> None:
    (checked,) = cluster_id.parse_urls(url)
    scheme, host, _ = cluster_id.split_url(checked)
    if scheme in ("unix", "unixs") or host == "localhost":
        return
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        raise ConfigError(f"expected IP in URL for binding ({url})") from None


def _loopback(url: str) -> tuple[str, str, int]:
    """A URL for comparing, in which the two names of this machine are one."""
    scheme, host, port = cluster_id.split_url(url)
    return scheme, "127.0.0.1" if host == "localhost" else host, port
