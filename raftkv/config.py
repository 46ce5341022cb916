"""All settings of a member, as one frozen value.

This module holds the names, defaults, units and limits. Flags, files and the environment are read by ``raftkv.cli``,
which creates a ``ServerConfig`` from them. Units are in the names: ``_s`` seconds, ``_bytes`` bytes; ticks exist only
inside ``raftkv.raft``. An existing ``ServerConfig`` is valid: an unusable setting raises ``ConfigError`` with a text of
one line, in etcd's words where etcd has this error.

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
from raftkv.urls import split_address

DEFAULT_NAME = "default"
DEFAULT_PEER_URL = "http://localhost:2380"
DEFAULT_CLIENT_URL = "http://localhost:2379"
DEFAULT_QUOTA_BYTES = 2 * 1024**3
LOG_LEVELS = ("debug", "info", "warn", "error", "panic", "fatal")
ETCD_VERSION = "3.7.1"
"""The etcd version whose behaviour a member shows. Clients choose their requests by this version."""
FEATURES = {
    "CompactHashCheck": (False, "ALPHA"),
    "FastLeaseKeepAlive": (True, "BETA"),
    "InitialCorruptCheck": (False, "ALPHA"),
    "LeaseCheckpoint": (False, "ALPHA"),
    "LeaseCheckpointPersist": (False, "ALPHA"),
    "PriorityRequest": (False, "ALPHA"),
    "SetMemberLocalAddr": (False, "ALPHA"),
    "StopGRPCServiceOnDefrag": (False, "ALPHA"),
    "TxnModeWriteWithSharedBuffer": (True, "BETA"),
}
"""Feature gates of etcd 3.6 and 3.7: the default of each (on or off), and its stage."""
AUDIT_LEVELS = ("auth", "writes", "all")
TLS_VERSIONS = ("TLS1.2", "TLS1.3")
SAMPLING_WHOLE = 1_000_000
_LEASE_TTL_MAX_S = 9_000_000_000
_ELECTION_MAX_S = 50.0
_RUN_ID_BYTES_MAX = 200
_PASSWORD_BYTES_MAX = 72
_LARGE_QUOTA_BYTES = 8 * 1024**3


@dataclass(frozen=True)
class TLSFiles:
    """The certificates of one kind of port (client or peer). All empty: plain TCP."""

    cert_file: str = ""
    """PEM certificate (chain) that this member presents."""
    key_file: str = ""
    """PEM key of ``cert_file``; must be readable by its owner only."""
    client_cert_file: str = ""
    """Certificate for outgoing connections; empty: ``cert_file``."""
    client_key_file: str = ""
    """Key of ``client_cert_file``; empty: ``key_file``."""
    trusted_ca_file: str = ""
    """PEM authorities that must have signed the other side's certificate."""
    client_cert_auth: bool = False
    """Refuse callers without a certificate from ``trusted_ca_file``; setting ``trusted_ca_file`` has the same
    effect."""
    crl_file: str = ""
    """Lists of revoked certificates, PEM or DER; empty: no certificate is revoked."""
    allowed_cn: tuple[str, ...] = ()
    """Accepted common names of the other side's certificate; empty: any."""
    allowed_hostname: tuple[str, ...] = ()
    """Host names; the other side's certificate must contain one of these. Empty: any."""
    skip_san_verification: bool = False
    """Accept peers whose certificate names neither their address nor a member's. Danger: any certificate is
    accepted."""
    self_signed: bool = False
    """Create a certificate if none is given. Danger: callers cannot verify this member."""

    @property
    def is_empty(self) -> bool:
        """Whether no certificate is configured."""
        return not (self.cert_file or self.key_file)

    @property
    def verifies(self) -> bool:
        """Whether callers must present a certificate, which an authority implies; if False, everyone may call."""
        return bool(self.trusted_ca_file) or self.client_cert_auth

    @property
    def paths(self) -> tuple[str, ...]:
        """All files; those not set are empty strings."""
        files = self.cert_file, self.key_file, self.client_cert_file, self.client_key_file
        return (*files, self.trusted_ca_file, self.crl_file)


@dataclass(frozen=True)
class LogRotation:
    """When a log file is rotated, and how long rotated files are kept; the settings of lumberjack."""

    maxsize: int = 100
    """Size in MiB above which the file is rotated; 0: 100."""
    maxage: int = 0
    """Days after which rotated files are deleted; 0: never."""
    maxbackups: int = 0
    """Number of rotated files that are kept; 0: all."""
    localtime: bool = False
    """Use local time instead of UTC in the names of rotated files."""
    compress: bool = False
    """Compress rotated files with gzip."""

    @property
    def size_max_bytes(self) -> int:
        """The effective maximum size in bytes."""
        return (self.maxsize or 100) * 1024**2


@dataclass(frozen=True)
class Tracing:
    """Settings of the spans that are sent to an OpenTelemetry collector."""

    enabled: bool = False
    """Trace calls; requires the extra ``tracing``."""
    address: str = "localhost:4317"
    """Address of the collector: OTLP over gRPC, in plain text."""
    service_name: str = "etcd"
    """``service.name`` of the spans."""
    instance_id: str = ""
    """``service.instance.id``, unique to this member; empty: none."""
    sampling_rate: int = 0
    """Number of traces started per million calls without a client's trace. Calls with a client's trace are always
    recorded."""


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one member; each field states its unit and its danger."""

    # --- the member
    name: str = DEFAULT_NAME
    """Name of this member, unique in ``initial_cluster``."""
    data_dir: str = f"{DEFAULT_NAME}.etcd"
    """Directory of all durable data. Danger: two members must never share one."""
    wal_dir: str = ""
    """Directory of the log, for example on a separate disk; empty: inside ``data_dir``. Losing it loses acknowledged
    writes."""
    snapshot_count: int = 10_000
    """Entries between snapshots; after a snapshot the log may be truncated. Larger: more memory, slower restart."""
    snapshot_bytes: int = 64 * 1024**2
    """The same in bytes, for large entries; the limit reached first applies. Larger: more memory, more log on disk."""
    snapshot_catchup_entries: int = 5_000
    """Entries kept before a snapshot's index, so that a slow follower needs no full copy."""
    snapshot_catchup_bytes: int = 64 * 1024**2
    """The same in bytes; the smaller amount is kept. Larger: more memory; smaller: slow followers get full copies
    sooner."""
    heartbeat_interval_s: float = 0.1
    """Time between heartbeats; about one round trip. Danger: must be the same on all members."""
    election_timeout_s: float = 1.0
    """Time without a heartbeat after which a follower campaigns; at least 5 heartbeats. Too short: needless
    elections."""
    initial_election_tick_advance: bool = True
    """Skip most of the first election timeout after a start."""
    quota_backend_bytes: int = 0
    """Database size at which writes stop with NOSPACE; 0: 2 GiB, negative: none. Danger: none can fill the disk."""
    backend_batch_interval_s: float = 0.1
    """Longest time between commits of the database. Durability does not depend on it: the log is synced separately."""
    backend_batch_limit: int = 10_000
    """Operations after which the database is committed at once."""
    max_txn_ops: int = 128
    """Maximum number of operations in each list of a transaction."""
    max_request_bytes: int = 1_572_864
    """Largest accepted write. Above 10 MiB, a write can delay heartbeats."""
    max_concurrent_streams: int = 2**32 - 1
    """Maximum number of concurrent calls on one connection."""
    max_learners: int = 1
    """Maximum number of learners in the cluster."""
    auto_promote: bool = False
    """Promote this member to a voter as soon as it is in sync, if it was added as a learner."""
    wait_cluster_ready_timeout_s: float = 5.0
    """Longest time that a starting member waits for a quorum to confirm its state before it serves clients."""
    lease_min_ttl_s: int = 0
    """Shortest TTL of a lease; 0: 1.5 election timeouts, as in etcd. Too short: leases expire during elections."""

    # --- keepalive of client connections
    grpc_keepalive_min_time_s: float = 5.0
    """Shortest time between pings of a client; a client that pings faster is disconnected."""
    grpc_keepalive_interval_s: float = 7200.0
    """Idle time after which a client is pinged; 0: 2 hours, as in etcd."""
    grpc_keepalive_timeout_s: float = 20.0
    """Time to wait for the ping's answer before the connection is closed; 0: 20 s, as in etcd."""

    # --- addresses
    listen_peer_urls: tuple[str, ...] = (DEFAULT_PEER_URL,)
    """Addresses for other members: IP addresses or localhost."""
    listen_client_urls: tuple[str, ...] = (DEFAULT_CLIENT_URL,)
    """Addresses for clients: IP addresses or localhost. Danger: 0.0.0.0 without TLS lets all hosts read and write."""
    listen_client_http_urls: tuple[str, ...] = ()
    """Addresses for plain HTTP, which ``listen_client_urls`` then refuse; empty: gRPC and HTTP share one address."""
    extensive_metrics: bool = False
    """Time every call, for histograms of each RPC."""
    listen_metrics_urls: tuple[str, ...] = ()
    """Further addresses that serve only /metrics, /health and /version."""
    initial_advertise_peer_urls: tuple[str, ...] = (DEFAULT_PEER_URL,)
    """Peer URLs at which the other members reach this one; part of the member id."""
    advertise_client_urls: tuple[str, ...] = (DEFAULT_CLIENT_URL,)
    """Client URLs at which clients reach this member; ``member list`` shows them."""

    # --- the cluster
    initial_cluster: str = f"{DEFAULT_NAME}={DEFAULT_PEER_URL}"
    """``name=URL,...`` of all founding members; must be the same on each. Read only when the data directory is
    empty."""
    initial_cluster_state: str = "new"
    """``new`` founds a cluster, ``existing`` joins one."""
    initial_cluster_token: str = "etcd-cluster"
    """Part of all ids: clusters with different tokens never mix."""
    strict_reconfig_check: bool = True
    """Refuse membership changes that would lose the quorum. Danger: when off, one call can stop the cluster."""
    pre_vote: bool = True
    """Hold a pre-vote before raising the term, so that a returning member does not disturb the leader."""
    read_leases: bool = False
    """Let the leader serve linearizable reads without a round of heartbeats (``raft/read_lease``). Danger: a clock that
    runs more than 5 % fast or slow, or that stops while other machines continue, can make a read stale."""

    # --- history
    auto_compaction_mode: str = "periodic"
    """``periodic`` or ``revision``."""
    auto_compaction_retention_s: float = 0.0
    """``periodic``: history to keep; 0: no compaction."""
    auto_compaction_retention_revisions: int = 0
    """``revision``: revisions to keep; 0: no compaction."""
    compaction_batch_limit: int = 1_000
    """Keys examined in one step of a compaction."""
    compaction_sleep_interval_s: float = 0.01
    """Pause between the steps of a compaction, in which clients are served."""
    initial_corrupt_check: bool = False
    """Compare the history with the other members' before serving clients; a difference stops the member."""
    corrupt_check_time_s: float = 0.0
    """Time between comparisons of all members by the leader; 0: none. Each comparison reads a member's whole
    history."""
    compact_hash_check: bool = False
    """Compare the members' hashes at compacted revisions."""
    compact_hash_check_time_s: float = 60.0
    """Time between the comparisons of ``compact_hash_check``."""
    watch_progress_notify_interval_s: float = 600.0
    """Time without events after which a watcher that requested progress notifications gets one."""

    # --- the archive of the log
    wal_archive_dir: str = ""
    """Directory that every closed log segment is copied to, for point-in-time restores; empty: none."""
    wal_archive_command: str = ""
    """Shell command that archives a file: %p its path, %f its name; empty: none. Mutually exclusive with
    ``wal_archive_dir``."""
    wal_archive_timeout_s: float = 300.0
    """Longest time that an entry stays in the open segment; 0: until the segment is full. Shorter: more segments of 64
    MiB."""
    wal_archive_held_bytes: int = 4 * 1024**3
    """Bytes of segments kept while archiving fails. Above it the oldest are deleted, and the archive has a gap."""

    # --- users
    auth_token: str = "simple"
    """Kind of auth tokens: ``simple``, or ``jwt,pub-key=FILE,priv-key=FILE,sign-method=METHOD,ttl=5m``."""
    auth_token_ttl_s: int = 300
    """Idle time after which a simple token expires."""
    bcrypt_cost: int = 10
    """Cost of new password hashes, 4 to 31: each step doubles the time. 10: about 60 ms of a core."""
    auth_min_password_length: int = 0
    """Minimum number of characters in a new password; 0: any, as in etcd."""

    # --- TLS and HTTP
    client_tls: TLSFiles = TLSFiles()
    """Certificates of the client ports."""
    peer_tls: TLSFiles = TLSFiles()
    """Certificates of the peer ports."""
    tls_min_version: str = "TLS1.2"
    """Oldest accepted TLS version: TLS1.2 or TLS1.3."""
    tls_max_version: str = ""
    """Newest accepted TLS version; empty: the newest available."""
    cipher_suites: tuple[str, ...] = ()
    """Cipher suites up to TLS 1.2 by Go's names; empty: OpenSSL's choice. The suites of TLS 1.3 are always on."""
    self_signed_validity_years: int = 1
    """Validity of the certificates that a member creates for itself (years of 365 days)."""
    insecure_peers: bool = False
    """Accept unauthenticated peers on other hosts. Danger: every host that reaches the port can rewrite all data."""
    secure: bool = False
    """Start only if no setting is insecure (``server.insecure_settings``), and turn the audit log on."""
    cors: tuple[str, ...] = ()
    """Origins whose web pages may call; empty: none; ``*``: all. Danger: every page open in a browser may then call."""
    host_whitelist: tuple[str, ...] = ()
    """Host names accepted in plain HTTP requests; ``*``: all. Empty: all, except that requests to loopback addresses
    must not carry a host name that a foreign web page may have (DNS rebinding)."""
    audit_log: str = ""
    """Destination of the audit log (one line of JSON for each call): a file, ``-`` (stdout) or ``stderr``; empty:
    none."""
    audit_level: str = "writes"
    """Calls in the audit log: ``auth`` (logins, administration, refusals), ``writes``, or ``all`` (with reads)."""
    audit_log_max_size_bytes: int = 100 * 1024**2
    """Size above which the audit log is rotated; 0: never, or by another program."""
    audit_log_keep: int = 10
    """Number of rotated audit logs that are kept; 0: all. Danger: older ones are deleted."""
    enable_ui: bool = True
    """Serve the dashboard on the client ports, below ``/ui/``."""
    horovod_run: str = ""
    """Training run whose workers may use Horovod's HTTP rendezvous on the client ports; empty: none. Danger: everyone
    who reaches a port may then write below /raftkv/horovod/ over plain HTTP. Must be the same on all members."""

    # --- logging
    log_level: str = "info"
    """Lowest level that is logged: debug, info, warn, error, panic, fatal."""
    log_format: str = "json"
    """``json`` or ``console``."""
    log_outputs: tuple[str, ...] = ("default",)
    """Destinations: ``default`` and ``stderr`` (standard error), ``stdout``, or files."""
    log_rotation: LogRotation | None = None
    """Rotation of the one file among ``log_outputs``; None: the file grows, or another program rotates it."""
    enable_pprof: bool = False
    """Serve /debug/pprof/ on the client ports. Danger: without authentication, any caller may slow the member down."""

    tracing: Tracing = Tracing()
    """Settings of the spans for a collector."""

    # --- unsafe
    unsafe_no_fsync: bool = False
    """Never sync to the disk. Danger: acknowledged writes are lost when the machine stops."""
    force_new_cluster: bool = False
    """Continue as a cluster of one with the local data; all other members are removed for good. Danger: use it only for
    a cluster that has lost its quorum for ever; acknowledged writes that this member does not have are lost."""

    def __post_init__(self) -> None:
        self._check_member()
        self._check_timing()
        self._check_addresses()
        self._check_choices()
        self._check_archive()
        self._check_horovod()
        self._check_audit()
        self._check_tracing()
        self._check_log_rotation()
        self._check_auth()
        self._check_tls("client", self.client_tls)
        self._check_tls("peer", self.peer_tls)
        self._check_peer_ports()
        if self.self_signed_validity_years < 1:
            raise ConfigError("--self-signed-cert-validity must be 1 year or more")

    def _check_archive(self) -> None:
        if self.wal_archive_dir and self.wal_archive_command:
            raise ConfigError("--wal-archive-dir and --wal-archive-command exclude each other")
        if self.wal_archive_timeout_s < 0:
            raise ConfigError(f"--wal-archive-timeout must not be negative (set to {self.wal_archive_timeout_s:g}s)")
        if self.wal_archive_held_bytes < 0:
            raise ConfigError(f"--wal-archive-held-bytes must not be negative (set to {self.wal_archive_held_bytes})")

    def _check_tracing(self) -> None:
        rate = self.tracing.sampling_rate
        fault = "must be positive" if rate < 0 else f"must be less than {SAMPLING_WHOLE}"
        if self.tracing.enabled and not 0 <= rate <= SAMPLING_WHOLE:
            # etcd's words, with its misspelling.
            raise ConfigError(f"distributed tracing configurition is not valid: (tracing sampling rate {fault})")
        if self.tracing.enabled:
            try:
                split_address(self.tracing.address.removeprefix("http://").removesuffix("/"))
            except ValueError:
                address = self.tracing.address
                raise ConfigError(f"--distributed-tracing-address must be HOST:PORT (set to {address!r})") from None

    def _check_log_rotation(self) -> None:
        files = len(set(self.log_outputs) - {"default", "stderr", "stdout"})
        if self.log_rotation is not None and files != 1:
            raise ConfigError("--log-outputs requires a single file path when --log-rotate-config-json is defined")

    def _check_audit(self) -> None:
        if self.audit_level not in AUDIT_LEVELS:
            raise ConfigError(f"--audit-level must be {', '.join(AUDIT_LEVELS)} (set to {self.audit_level!r})")
        for flag, value in (
            ("--audit-log-max-size", self.audit_log_max_size_bytes),
            ("--audit-log-keep", self.audit_log_keep),
        ):
            if value < 0:
                raise ConfigError(f"{flag} must not be negative (set to {value})")

    @property
    def quota_bytes(self) -> int | None:
        """The effective quota in bytes; None: no quota."""
        if self.quota_backend_bytes < 0:
            return None
        return self.quota_backend_bytes or DEFAULT_QUOTA_BYTES

    @property
    def quota_is_large(self) -> bool:
        """Whether the quota is above etcd's recommended maximum; the member then logs a warning."""
        return self.quota_backend_bytes > _LARGE_QUOTA_BYTES

    @property
    def election_ticks(self) -> int:
        """Election timeout in heartbeat intervals, which are raft's ticks."""
        return round(self.election_timeout_s / self.heartbeat_interval_s)

    @property
    def lease_ttl_min_s(self) -> int:
        """The effective shortest TTL (seconds). The default ensures that no lease expires while a leader is elected."""
        return self.lease_min_ttl_s or math.ceil(self.election_ticks * 3 // 2 * self.heartbeat_interval_s)

    @property
    def member_id(self) -> int:
        """This member's id if it is a founding member; see ``raftkv.cluster_id``."""
        urls = cluster_id.parse_initial_cluster(self.initial_cluster).get(self.name, ())
        return cluster_id.member_id(urls or self.initial_advertise_peer_urls, self.initial_cluster_token)

    def founding_members(self) -> dict[int, tuple[str, tuple[str, ...]]]:
        """Return all founding members: a map of the id to the name and the peer URLs."""
        return cluster_id.founding_members(self.initial_cluster, self.initial_cluster_token)

    def check_bootstrap(self) -> None:
        """Check the settings that only a member without data needs: its entry in ``initial_cluster``.

        Raises:
            ConfigError: this member's name or URLs are missing from ``initial_cluster``, or a URL occurs twice.
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
        theirs = {cluster_id.comparable(url): url for url in listed}
        ours = {cluster_id.comparable(url): url for url in self.initial_advertise_peer_urls}
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
            "--snapshot-bytes": self.snapshot_bytes,
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
            "--corrupt-check-time": self.corrupt_check_time_s,
            "--compact-hash-check-time": self.compact_hash_check_time_s,
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
        for url in (
            *(*self.listen_peer_urls, *self.listen_client_urls),
            *(*self.listen_client_http_urls, *self.listen_metrics_urls),
        ):
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
            len(run.encode("utf-8", "surrogateescape")) > _RUN_ID_BYTES_MAX
            or not run.isprintable()
            or " " in run
            or "" in run.split("/")
        ):
            raise ConfigError(
                f"--horovod-run {run!r} is not a run id: at most {_RUN_ID_BYTES_MAX} bytes, without white space, "
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

    def _check_auth(self) -> None:
        if not 4 <= self.bcrypt_cost <= 31:
            raise ConfigError(f"--bcrypt-cost must be 4 to 31 (set to {self.bcrypt_cost})")
        if self.auth_token_ttl_s < 1:
            raise ConfigError(f"--auth-token-ttl must be >0 (set to {self.auth_token_ttl_s})")
        length_min = self.auth_min_password_length
        if not 0 <= length_min <= _PASSWORD_BYTES_MAX:
            raise ConfigError(f"--auth-min-password-length must be 0 to {_PASSWORD_BYTES_MAX} (set to {length_min})")

    def _check_tls(self, kind: str, files: TLSFiles) -> None:
        prefix = "peer-" if kind == "peer" else ""
        for cert, key, middle in (
            (files.cert_file, files.key_file, ""),
            (files.client_cert_file, files.client_key_file, "client-"),
        ):
            if bool(cert) != bool(key):
                raise ConfigError(f"--{prefix}{middle}cert-file and --{prefix}{middle}key-file must be given together")
        if files.client_cert_auth and not files.trusted_ca_file:
            raise ConfigError(f"--{prefix}client-cert-auth needs --{prefix}trusted-ca-file")
        self._check_tls_of_names(kind, prefix, files)
        listened = (
            self.listen_peer_urls if kind == "peer" else (*self.listen_client_urls, *self.listen_client_http_urls)
        )
        secure = [url for url in listened if cluster_id.split_url(url)[0] in ("https", "unixs")]
        if secure and files.is_empty and not files.self_signed:
            raise ConfigError(
                f"cannot listen on TLS for {secure[0]}: --{prefix}cert-file and --{prefix}key-file are not given"
            )

    def _check_tls_of_names(self, kind: str, prefix: str, files: TLSFiles) -> None:
        if kind == "peer" and files.self_signed and files.trusted_ca_file:
            raise ConfigError(
                "--peer-auto-tls and --peer-trusted-ca-file exclude each other: no authority knows a certificate that "
                "its member made for itself"
            )
        if files.allowed_cn and files.allowed_hostname:
            raise ConfigError(
                f"--{prefix}cert-allowed-cn and --{prefix}cert-allowed-hostname are mutually exclusive "
                f"(cn={','.join(files.allowed_cn)}, hostname={','.join(files.allowed_hostname)})"
            )
        crl = "--peer-crl-file" if kind == "peer" else "--client-crl-file"
        hostname = f"--{kind}-cert-allowed-hostname"
        for flag, value in (
            (crl, files.crl_file),
            (f"--{kind}-cert-allowed-cn", files.allowed_cn),
            (hostname, files.allowed_hostname),
        ):
            if value and not files.trusted_ca_file:
                raise ConfigError(f"{flag} needs --{prefix}trusted-ca-file, whose authorities verify the certificates")

    def _check_peer_ports(self) -> None:
        """Refuse peer ports without certificates: a stranger could vote and append there, and so rewrite all data."""
        for url in self.listen_peer_urls:
            scheme, host, _ = cluster_id.split_url(cluster_id.parse_urls(url)[0])
            if self.insecure_peers or scheme.startswith("unix") or is_loopback(host):
                continue
            files = self.peer_tls
            if scheme == "http":
                what, remedy = "without TLS", "https URLs, --peer-cert-file, --peer-key-file and --peer-trusted-ca-file"
            elif not files.verifies and not files.self_signed:
                what, remedy = "without asking for certificates", "--peer-trusted-ca-file"
            else:
                continue
            raise ConfigError(
                f"refusing to listen for peers on {url} {what}: every host that reaches it can rewrite all data; give "
                f"{remedy} (`raftkv certs` makes them), or accept it with --insecure-peers"
            )


def is_loopback(host: str) -> bool:
    """Return whether the host of a URL is a loopback address or ``localhost``."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _check_bindable(url: str) -> None:
    (checked,) = cluster_id.parse_urls(url)
    scheme, host, _ = cluster_id.split_url(checked)
    if scheme in ("unix", "unixs") or host == "localhost":
        return
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        raise ConfigError(f"expected IP in URL for binding ({url})") from None
