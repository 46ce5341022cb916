"""Every flag of the etcd server, and what raftkv does with it.

Owns the table. A row is one of four things:

- a *setting*: it has a field of ``ServerConfig``;
- an *alias*: etcd's older ``experimental-`` name of a setting;
- *idle*: raftkv does nothing for it, and nobody is harmed, so a script that gives it still starts; one line says
  that it has no effect;
- *refused*: raftkv would not do what was asked, and safety or security may rest on it, so it does not start.

Of the last two, values that ask for nothing (mostly etcd's defaults) pass without a word.

A flag that is not here is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from raftkv import cluster_id
from raftkv.cli.goflags import values as govalues


def urls(text: str) -> tuple[str, ...]:
    """Return a list of URLs; empty text is an empty list."""
    return cluster_id.parse_urls(text) if text else ()


def words(text: str) -> tuple[str, ...]:
    """Return a comma-separated list."""
    return tuple(sorted({part.strip() for part in text.split(",")} - {""}))


def origins(text: str) -> tuple[str, ...]:
    """Return a comma-separated list of URLs; ``*`` stands for all."""
    return tuple(part if part == "*" else urls(part)[0] for part in words(text))


def _parse_error(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Go's flag package tells only two errors apart, whatever the parser knew."""

    def wrapped(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            known = "value out of range"
            raise ValueError(known if str(error).endswith(known) else "parse error") from None

    return wrapped


string: Callable[[str], str] = str
boolean = _parse_error(govalues.parse_bool)
duration = _parse_error(govalues.parse_duration_s)
integer = _parse_error(govalues.parse_int)
unsigned = _parse_error(lambda text: govalues.parse_int(text, signed=False))
milliseconds = _parse_error(lambda text: govalues.parse_int(text, signed=False) / 1000)


def choice(*choices: str) -> Callable[[str], str]:
    """Make a reader of one of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("invalid value")
        return text

    return parse


SETTING: Final = "setting"
IDLE: Final = "idle"
REFUSED: Final = "refused"


@dataclass(frozen=True)
class ServerFlag:
    """One flag.

    ``field`` is a path in ``ServerConfig`` such as ``client_tls.cert_file``; ``allowed`` are the values of an idle or
    refused flag that ask for nothing.
    """

    name: str
    parse: Callable[[str], Any]
    fate: str = SETTING
    field: str = ""
    help: str = ""
    allowed: tuple[Any, ...] = ()
    group: str = ""


def _settings(group: str, *rows: tuple[str, Callable[[str], Any], str, str]) -> list[ServerFlag]:
    return [ServerFlag(name, parse, SETTING, field, text, group=group) for name, parse, field, text in rows]


_MEMBER = _settings(
    "Member",
    ("name", string, "name", "name of this member ('default')"),
    ("data-dir", string, "data_dir", "directory of everything durable ('${name}.etcd')"),
    ("wal-dir", string, "wal_dir", "directory of the write-ahead log, if on its own disk"),
    ("snapshot-count", unsigned, "snapshot_count", "entries between snapshots (10000)"),
    ("snapshot-catchup-entries", unsigned, "snapshot_catchup_entries", "entries kept for slow followers (5000)"),
    ("heartbeat-interval", milliseconds, "heartbeat_interval_s", "milliseconds between heartbeats (100)"),
    ("election-timeout", milliseconds, "election_timeout_s", "milliseconds of silence before an election (1000)"),
    ("initial-election-tick-advance", boolean, "initial_election_tick_advance", "shorten the first wait (true)"),
    ("listen-peer-urls", urls, "listen_peer_urls", "where members connect (http://localhost:2380)"),
    ("listen-client-urls", urls, "listen_client_urls", "where clients connect (http://localhost:2379)"),
    ("listen-metrics-urls", urls, "listen_metrics_urls", "more addresses, for metrics and health alone"),
    ("quota-backend-bytes", integer, "quota_backend_bytes", "database size limit, 0 for 2 GiB, negative for none"),
    ("backend-batch-interval", duration, "backend_batch_interval_s", "time between database commits (100ms)"),
    ("backend-batch-limit", integer, "backend_batch_limit", "operations between database commits (10000)"),
    ("max-txn-ops", unsigned, "max_txn_ops", "operations in a transaction (128)"),
    ("max-request-bytes", unsigned, "max_request_bytes", "largest write (1572864)"),
    ("max-concurrent-streams", unsigned, "max_concurrent_streams", "open calls of one connection (4294967295)"),
    ("max-learners", integer, "max_learners", "learners in the cluster (1)"),
    (
        "watch-progress-notify-interval",
        duration,
        "watch_progress_notify_interval_s",
        "time between progress notifications of idle watches (10m)",
    ),
    (
        "wait-cluster-ready-timeout",
        duration,
        "wait_cluster_ready_timeout_s",
        "longest wait for a quorum before clients are served (5s)",
    ),
    ("lease-min-ttl", integer, "lease_min_ttl_s", "shortest TTL of a lease in seconds (1.5 election timeouts)"),
    ("grpc-keepalive-min-time", duration, "grpc_keepalive_min_time_s", "shortest time between client pings (5s)"),
    ("grpc-keepalive-interval", duration, "grpc_keepalive_interval_s", "idle time before a ping, 0 for never (2h)"),
    ("grpc-keepalive-timeout", duration, "grpc_keepalive_timeout_s", "wait for that ping (20s)"),
)

_CLUSTERING = _settings(
    "Clustering",
    ("initial-advertise-peer-urls", urls, "initial_advertise_peer_urls", "peer URLs as other members reach them"),
    ("advertise-client-urls", urls, "advertise_client_urls", "client URLs as clients reach them"),
    ("initial-cluster", string, "initial_cluster", "name=URL,... of all founding members"),
    ("initial-cluster-state", choice("new", "existing"), "initial_cluster_state", "new or existing (new)"),
    ("initial-cluster-token", string, "initial_cluster_token", "part of all ids ('etcd-cluster')"),
    ("strict-reconfig-check", boolean, "strict_reconfig_check", "refuse changes that lose the quorum (true)"),
    ("pre-vote", boolean, "pre_vote", "ask before raising the term (true)"),
    ("auto-compaction-mode", string, "auto_compaction_mode", "periodic or revision (periodic)"),
    ("auto-compaction-retention", string, "auto_compaction_retention", "hours, a duration, or revisions (0: off)"),
    ("compaction-batch-limit", integer, "compaction_batch_limit", "keys looked at in one step (1000)"),
    ("compaction-sleep-interval", duration, "compaction_sleep_interval_s", "pause between the steps (10ms)"),
)

_SECURITY = _settings(
    "Security",
    ("cert-file", string, "client_tls.cert_file", "certificate of the client ports"),
    ("key-file", string, "client_tls.key_file", "its key"),
    ("client-cert-auth", boolean, "client_tls.client_cert_auth", "require client certificates (false)"),
    ("trusted-ca-file", string, "client_tls.trusted_ca_file", "authorities of client certificates"),
    ("peer-cert-file", string, "peer_tls.cert_file", "certificate of the peer ports"),
    ("peer-key-file", string, "peer_tls.key_file", "its key"),
    ("peer-client-cert-file", string, "peer_tls.client_cert_file", "certificate for outgoing peer connections"),
    ("peer-client-key-file", string, "peer_tls.client_key_file", "its key"),
    ("peer-client-cert-auth", boolean, "peer_tls.client_cert_auth", "require peer certificates (false)"),
    ("peer-trusted-ca-file", string, "peer_tls.trusted_ca_file", "authorities of peer certificates"),
    ("tls-min-version", string, "tls_min_version", "oldest TLS: TLS1.2 or TLS1.3 (TLS1.2)"),
    ("tls-max-version", string, "tls_max_version", "newest TLS (the newest there is)"),
    ("cors", origins, "cors", "origins that browsers may call from (*)"),
    ("host-whitelist", words, "host_whitelist", "host names accepted in plain HTTP (*)"),
)

_TRAINING = _settings(
    "Training",
    ("horovod-run", string, "horovod_run", "run whose Horovod workers meet on the client ports, over HTTP (none)"),
)

_MONITORING = _settings(
    "Monitoring and logging",
    ("log-level", string, "log_level", "debug, info, warn, error, panic or fatal (info)"),
    ("log-format", string, "log_format", "json or console (json)"),
    ("log-outputs", words, "log_outputs", "default, stderr, stdout or files (default)"),
)

_UNSAFE = _settings(
    "Unsafe",
    ("unsafe-no-fsync", boolean, "unsafe_no_fsync", "never wait for the disk: loses data"),
)

_ALIASES = {
    "experimental-snapshot-catchup-entries": "snapshot-catchup-entries",
    "experimental-compaction-batch-limit": "compaction-batch-limit",
    "experimental-compaction-sleep-interval": "compaction-sleep-interval",
    "experimental-max-learners": "max-learners",
    "experimental-watch-progress-notify-interval": "watch-progress-notify-interval",
    "experimental-wait-cluster-ready-timeout": "wait-cluster-ready-timeout",
}


def _idle(parse: Callable[[str], Any], *names: str, allowed: tuple[Any, ...] = ()) -> list[ServerFlag]:
    return [ServerFlag(name, parse, IDLE, allowed=allowed) for name in names]


_IDLE = [
    # Segments of the log go as soon as nothing needs them, and there are no snapshot files.
    *_idle(unsigned, "max-snapshots", "max-wals"),
    *_idle(boolean, "enable-pprof", allowed=(False,)),
    *_idle(choice("basic", "extensive"), "metrics", allowed=("basic",)),
    *_idle(string, "logger", allowed=("zap",)),
    # Certificates of etcd's HTTP gateway for calling itself.
    *_idle(string, "client-cert-file", "client-key-file"),
    *_idle(string, "backend-bbolt-freelist-type", "v2-deprecation", "discovery-fallback", "log-rotation-config-json"),
    *_idle(boolean, "socket-reuse-port", "socket-reuse-address", "enable-grpc-gateway"),
    *_idle(duration, "raft-read-timeout", "raft-write-timeout"),
    *_idle(duration, "warning-apply-duration", "experimental-warning-apply-duration"),
    *_idle(duration, "warning-unary-request-duration", "experimental-warning-unary-request-duration"),
    *_idle(duration, "downgrade-check-time", "experimental-downgrade-check-time"),
    *_idle(duration, "compact-hash-check-time", "experimental-compact-hash-check-time"),
    *_idle(boolean, "memory-mlock", "experimental-memory-mlock", "experimental-txn-mode-write-with-shared-buffer"),
    *_idle(unsigned, "bootstrap-defrag-threshold-megabytes", "experimental-bootstrap-defrag-threshold-megabytes"),
    *_idle(unsigned, "self-signed-cert-validity", "bcrypt-cost", "auth-token-ttl"),
    *_idle(string, "cluster-active-size", "cluster-remove-delay", "cluster-sync-interval", "config", "force"),
    *_idle(string, "max-result-buffer", "max-retry-attempts", "peer-heartbeat-interval", "peer-election-timeout"),
    *_idle(string, "retry-interval", "snapshot", "v", "vv"),
]


def _refused(parse: Callable[[str], Any], allowed: tuple[Any, ...], *names: str) -> list[ServerFlag]:
    return [ServerFlag(name, parse, REFUSED, allowed=allowed) for name in names]


_REFUSED = [
    *_refused(string, ("",), "discovery", "discovery-proxy", "discovery-srv", "discovery-srv-name"),
    *_refused(string, ("",), "discovery-token", "discovery-endpoints", "discovery-user", "discovery-password"),
    *_refused(string, ("",), "discovery-cert", "discovery-key", "discovery-cacert"),
    *_refused(duration, (2.0,), "discovery-dial-timeout", "discovery-keepalive-time"),
    *_refused(duration, (5.0,), "discovery-request-timeout"),
    *_refused(duration, (6.0,), "discovery-keepalive-timeout"),
    *_refused(boolean, (True,), "discovery-insecure-transport"),
    *_refused(boolean, (False,), "discovery-insecure-skip-tls-verify"),
    *_refused(boolean, (False,), "auto-tls", "peer-auto-tls", "enable-v2", "enable-log-rotation"),
    *_refused(boolean, (False,), "force-new-cluster"),
    *_refused(boolean, (False,), "peer-skip-client-san-verification"),
    *_refused(boolean, (False,), "experimental-peer-skip-client-san-verification"),
    *_refused(boolean, (False,), "experimental-initial-corrupt-check", "experimental-compact-hash-check-enabled"),
    *_refused(boolean, (False,), "experimental-enable-lease-checkpoint"),
    *_refused(boolean, (False,), "experimental-enable-lease-checkpoint-persist"),
    *_refused(boolean, (False,), "experimental-stop-grpc-service-on-defrag"),
    *_refused(boolean, (False,), "enable-distributed-tracing", "experimental-enable-distributed-tracing"),
    *_refused(string, ("localhost:4317",), "distributed-tracing-address", "experimental-distributed-tracing-address"),
    *_refused(string, ("etcd",), "distributed-tracing-service-name", "experimental-distributed-tracing-service-name"),
    *_refused(string, ("",), "distributed-tracing-instance-id", "experimental-distributed-tracing-instance-id"),
    *_refused(integer, (0,), "distributed-tracing-sampling-rate", "experimental-distributed-tracing-sampling-rate"),
    *_refused(duration, (0.0,), "corrupt-check-time", "experimental-corrupt-check-time"),
    *_refused(string, ("",), "client-crl-file", "peer-crl-file", "cipher-suites", "feature-gates"),
    *_refused(string, ("",), "client-cert-allowed-hostname", "peer-cert-allowed-cn", "peer-cert-allowed-hostname"),
    *_refused(string, ("",), "listen-client-http-urls", "experimental-enable-v2v3"),
    *_refused(string, ("simple",), "auth-token"),
    *_refused(string, ("off",), "proxy"),
    *_refused(unsigned, (5000,), "proxy-failure-wait", "proxy-write-timeout"),
    *_refused(unsigned, (30000,), "proxy-refresh-interval"),
    *_refused(unsigned, (1000,), "proxy-dial-timeout"),
    *_refused(unsigned, (0,), "proxy-read-timeout"),
]

_ROWS = [*_MEMBER, *_CLUSTERING, *_SECURITY, *_TRAINING, *_MONITORING, *_UNSAFE, *_IDLE, *_REFUSED]
FLAGS: Final[dict[str, ServerFlag]] = {flag.name: flag for flag in _ROWS}
FLAGS.update({alias: FLAGS[name] for alias, name in _ALIASES.items()})

BOOLEANS: Final = frozenset(name for name, flag in FLAGS.items() if flag.parse is boolean) | {"version", "help", "h"}
"""Flags that take a value only after ``=``."""


def usage() -> str:
    """Return what ``raftkv --help`` prints about flags."""
    lines = []
    for group in dict.fromkeys(flag.group for flag in _ROWS if flag.group):
        lines += ["", f"{group}:"]
        lines += [f"  --{flag.name:<30} {flag.help}" for flag in _ROWS if flag.group == group]
    return "\n".join(lines)
