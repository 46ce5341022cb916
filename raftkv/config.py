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
from raftkv.urls import split_address

DEFAULT_NAME = "default"
DEFAULT_PEER_URL = "http://localhost:2380"
DEFAULT_CLIENT_URL = "http://localhost:2379"
DEFAULT_QUOTA_BYTES = 2 * 1024**3
LOG_LEVELS = ("debug", "info", "warn", "error", "panic", "fatal")
ETCD_VERSION = "3.7.1"
"""The etcd version whose behaviour a member shows: clients choose what to send by it."""
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
"""Feature gates of etcd 3.6 and 3.7: whether each is on unless it is set, and its stage."""
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
    """Certificates of one kind of port (client or peer). All empty: plain TCP."""

    cert_file: str = ""
    """PEM certificate (chain) that this member shows."""
    key_file: str = ""
    """PEM key of ``cert_file``; must be readable by its owner alone."""
    client_cert_file: str = ""
    """Certificate for outgoing connections; empty: ``cert_file``."""
    client_key_file: str = ""
    """Key of ``client_cert_file``; empty: ``key_file``."""
    trusted_ca_file: str = ""
    """PEM authorities that the other side's certificate must come from."""
    client_cert_auth: bool = False
    """Refuse callers without a certificate from ``trusted_ca_file``, as that file alone does too."""
    crl_file: str = ""
    """Lists of revoked certificates, PEM or DER; empty: none is revoked."""
    allowed_cn: tuple[str, ...] = ()
    """Common names that the other side's certificate may have; empty: any."""
    allowed_hostname: tuple[str, ...] = ()
    """Host names of which the other side's certificate must have one; empty: any."""
    skip_san_verification: bool = False
    """Let in peers whose certificate names neither their address nor a member's. Danger: any certificate will do."""
    self_signed: bool = False
    """Make a certificate if none is given. Danger: callers cannot verify this member."""

    @property
    def is_empty(self) -> bool:
        """Whether no certificate is configured."""
        return not (self.cert_file or self.key_file)

    @property
    def verifies(self) -> bool:
        """Whether callers must show a certificate: an authority implies it. Off, all who reach the port may call."""
        return bool(self.trusted_ca_file) or self.client_cert_auth

    @property
    def paths(self) -> tuple[str, ...]:
        """All files, those that are not given as empty texts."""
        files = self.cert_file, self.key_file, self.client_cert_file, self.client_key_file
        return (*files, self.trusted_ca_file, self.crl_file)


@dataclass(frozen=True)
class LogRotation:
    """When a file of the log is rotated, and what becomes of what it was; lumberjack's settings."""

    maxsize: int = 100
    """MiB above which it is rotated; 0: 100."""
    maxage: int = 0
    """Days that rotated files stay; 0: any number."""
    maxbackups: int = 0
    """Rotated files that stay; 0: all."""
    localtime: bool = False
    """Their names have local time instead of UTC."""
    compress: bool = False
    """They are compressed with gzip."""

    @property
    def size_max_bytes(self) -> int:
        """The size in force."""
        return (self.maxsize or 100) * 1024**2


@dataclass(frozen=True)
class Tracing:
    """Spans for a collector of OpenTelemetry."""

    enabled: bool = False
    """Trace calls; needs the extra ``tracing``."""
    address: str = "localhost:4317"
    """Where the collector takes OTLP over gRPC, in plain text."""
    service_name: str = "etcd"
    """``service.name`` of the spans."""
    instance_id: str = ""
    """``service.instance.id``, unique to this member; empty: none."""
    sampling_rate: int = 0
    """How many of a million calls that belong to no trace begin one. Clients' own traces are recorded anyway."""


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
    snapshot_bytes: int = 64 * 1024**2
    """The same in bytes, for large entries: whichever comes first. Larger: more memory, more log on disk."""
    snapshot_catchup_entries: int = 5_000
    """Entries kept behind a snapshot so that a slow follower needs no full copy."""
    snapshot_catchup_bytes: int = 64 * 1024**2
    """The same in bytes: whichever are fewer. Larger: more memory; smaller: slow followers get full copies sooner."""
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
    auto_promote: bool = False
    """Let this member vote as soon as it is in sync, if it was added as a learner."""
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
    """Where clients connect: IP addresses or localhost. Danger: 0.0.0.0 without TLS lets all hosts read and write."""
    listen_client_http_urls: tuple[str, ...] = ()
    """Where clients find plain HTTP, which ``listen_client_urls`` then refuse; empty: both have one address."""
    extensive_metrics: bool = False
    """Whether every call is timed, for histograms of each RPC."""
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
    read_leases: bool = False
    """Serve linearizable reads without a round while leading (``raft/read_lease``). Danger: a clock that runs more than
    5 % fast or slow, or that stands still while the world goes on, can make a read stale."""

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
    initial_corrupt_check: bool = False
    """Compare the history with the other members' before clients are served; a difference stops the member."""
    corrupt_check_time_s: float = 0.0
    """Time between comparisons of all members by the leader; 0: none. Each reads a member's whole history."""
    compact_hash_check: bool = False
    """Compare all members at compacted revisions."""
    compact_hash_check_time_s: float = 60.0
    """Time between these comparisons."""
    watch_progress_notify_interval_s: float = 600.0
    """Time between progress notifications of watchers that asked for them and had no event."""

    # --- the archive of the log
    wal_archive_dir: str = ""
    """Directory that every closed segment of the log is copied to, for restores to a point in time; empty: none."""
    wal_archive_command: str = ""
    """Shell command that archives a file: %p its path, %f its name; empty: none. It excludes ``wal_archive_dir``."""
    wal_archive_timeout_s: float = 300.0
    """Longest time that an entry waits in the open segment; 0: until it is full. Shorter: more segments of 64 MiB."""
    wal_archive_held_bytes: int = 4 * 1024**3
    """Segments that may wait for an archive that fails, before the oldest are deleted and the archive has a gap."""

    # --- users
    auth_token: str = "simple"
    """Tokens for passwords: ``simple``, or ``jwt,pub-key=FILE,priv-key=FILE,sign-method=METHOD,ttl=5m``."""
    auth_token_ttl_s: int = 300
    """How long an unused simple token lives."""
    bcrypt_cost: int = 10
    """Cost of new hashes of passwords, 4 to 31: each step doubles the time. 10: about 60 ms of a core."""
    auth_min_password_length: int = 0
    """Characters that a new password has at least; 0: any, as in etcd."""

    # --- TLS and HTTP
    client_tls: TLSFiles = TLSFiles()
    """Certificates of the client ports."""
    peer_tls: TLSFiles = TLSFiles()
    """Certificates of the peer ports."""
    tls_min_version: str = "TLS1.2"
    """Oldest TLS that is spoken: TLS1.2 or TLS1.3."""
    tls_max_version: str = ""
    """Newest TLS that is spoken; empty: the newest there is."""
    cipher_suites: tuple[str, ...] = ()
    """Cipher suites up to TLS 1.2 by Go's names; empty: OpenSSL's choice. Those of TLS 1.3 are always on."""
    self_signed_validity_years: int = 1
    """For how long certificates are valid that a member makes for itself (years of 365 days)."""
    insecure_peers: bool = False
    """Take peers off this machine that prove nothing. Danger: every host that reaches the port can rewrite all data."""
    secure: bool = False
    """Start only if nothing is left open to strangers (``server.insecure_settings``), and with the audit log on."""
    cors: tuple[str, ...] = ()
    """Origins whose web pages may call; empty: none; ``*``: all. Danger: any page that a browser visits may call."""
    host_whitelist: tuple[str, ...] = ()
    """Host names accepted in plain HTTP requests; ``*``: all; empty: all but, at loopback addresses, names that a
    stranger's page may have (DNS rebinding)."""
    audit_log: str = ""
    """Where calls are noted, a line of JSON each: a file, ``-`` (standard output) or ``stderr``; empty: nowhere."""
    audit_level: str = "writes"
    """Which calls are noted: ``auth`` (logins, administration, refusals), ``writes``, or ``all`` (reads, too)."""
    audit_log_max_size_bytes: int = 100 * 1024**2
    """Size above which the file is rotated; 0: never, or by another program."""
    audit_log_keep: int = 10
    """Rotated files that stay. Danger: lines older than they are deleted."""
    enable_ui: bool = True
    """Serve the dashboard on the client ports, below ``/ui/``."""
    horovod_run: str = ""
    """Training run whose workers may use Horovod's HTTP rendezvous on the client ports; empty: none. Danger: all who
    reach a port may then write below /raftkv/horovod/ over plain HTTP. The same on all members."""

    # --- logging
    log_level: str = "info"
    """Least level that is written: debug, info, warn, error, panic, fatal."""
    log_format: str = "json"
    """``json`` or ``console``."""
    log_outputs: tuple[str, ...] = ("default",)
    """``default`` and ``stderr``: standard error; ``stdout``; or files."""
    log_rotation: LogRotation | None = None
    """Rotation of the one file among ``log_outputs``; None: it grows, or another program rotates it."""
    enable_pprof: bool = False
    """Answer /debug/pprof/ on the client ports. Danger: while users are off, any caller may slow the member."""

    tracing: Tracing = Tracing()
    """Spans for a collector."""

    # --- unsafe
    unsafe_no_fsync: bool = False
    """Never wait for the disk. Danger: acknowledged writes are lost when the machine stops."""
    force_new_cluster: bool = False
    """Go on alone with the data that is here, all other members removed for good. Danger: for a cluster that has lost
    its quorum for ever; acknowledged writes that this member does not have are lost."""

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
            # etcd's words, with its letters.
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
                raise ConfigError(f"{flag} needs --{prefix}trusted-ca-file: it is about certificates that are verified")

    def _check_peer_ports(self) -> None:
        """Refuse peer ports without certificates: a stranger there can vote and append, and so rewrite all data."""
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
    """Return whether a host of a URL is this machine by a loopback address, or localhost."""
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
