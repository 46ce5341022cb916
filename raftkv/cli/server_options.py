"""Builds a ``ServerConfig`` from the command line, the environment and a file, by etcd's rules.

Precedence: with ``--config-file`` only the file counts; otherwise flags, then ``ETCD_*``. A setting that is given both
as a flag and in the environment is refused. ``Options.warnings`` has a line for each setting without effect.

    options = read_options(["--name=a", "-data-dir", "/tmp/a"], os.environ)
    options.config.name

Flags are those of ``FLAGS``, with one dash or two, ``--flag=value`` or ``--flag value``; booleans take a value only
after ``=``; the first word that is not a flag is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from raftkv import cluster_id
from raftkv.cli import pflag
from raftkv.cli.pflag import did_you_mean
from raftkv.cli.program import BAD_FLAGS, ERROR, CommandError, refused
from raftkv.config import FEATURES, LogRotation, ServerConfig, TLSFiles, Tracing
from raftkv.errors import ConfigError
from raftkv.server.insecure_settings import hardened, list_insecure_settings, refusal

# -- flags ----------------------------------------------------------------------------------------------------------
#
# Every flag of the etcd server, and its treatment in raftkv.
#
# A row of the table is one of four things:
#
# - a *setting*: it has a field of ``ServerConfig``;
# - an *alias*: etcd's older ``experimental-`` name of a setting;
# - *idle*: the flag has no effect in raftkv, which is harmless: raftkv starts, and prints one line about it;
# - *refused*: the flag has no effect in raftkv, but safety or security may depend on it: raftkv does not start.
#
# Some values of idle and refused flags have no effect in etcd either (mostly etcd's defaults). These are accepted
# silently.
#
# Any other flag is unknown.


def urls(text: str) -> tuple[str, ...]:
    """Return the URLs in a text; empty for an empty text."""
    return cluster_id.parse_urls(text) if text else ()


def words(text: str) -> tuple[str, ...]:
    """Return the items of a comma-separated list."""
    return tuple(sorted({part.strip() for part in text.split(",")} - {""}))


def origins(text: str) -> tuple[str, ...]:
    """Return the URLs of a comma-separated list; ``*`` means all."""
    return tuple(part if part == "*" else urls(part)[0] for part in words(text))


def _parse_error(parse: Callable[[str], Any], wanted: str) -> Callable[[str], Any]:
    """Replace the error texts of a parser with those of Go's flag package, which has only two, and say what to give."""

    def wrapped(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            known = "value out of range"
            raise ValueError(f"{known if str(error).endswith(known) else 'parse error'}; give {wanted}") from None

    return wrapped


string: Callable[[str], str] = str
boolean = _parse_error(pflag.parse_bool, "true or false")
duration = _parse_error(pflag.parse_duration_s, "a duration such as 300ms, 1.5s or 2m")
integer = _parse_error(pflag.parse_int, "a whole number")
unsigned = _parse_error(lambda text: pflag.parse_int(text, signed=False), "a whole number, 0 or more")
milliseconds = _parse_error(lambda text: pflag.parse_int(text, signed=False) / 1000, "a whole number of milliseconds")


def choice(*choices: str) -> Callable[[str], str]:
    """Return a parser for one of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"invalid value; give one of {', '.join(choices)}")
        return text

    return parse


def extensive(text: str) -> bool:
    """Parse the kind of metrics; True for ``extensive``, False for ``basic``."""
    return choice("basic", "extensive")(text) == "extensive"


GATE_FIELDS: Final = {"InitialCorruptCheck": "initial_corrupt_check", "CompactHashCheck": "compact_hash_check"}
"""Feature gates of etcd that are settings in raftkv, with the field of ``ServerConfig``. Both are alpha."""
ALL_ALPHA: Final = "AllAlpha"
_IDLE_GATES: Final = frozenset((*FEATURES, ALL_ALPHA, "AllBeta")) - GATE_FIELDS.keys()


def feature_gates(text: str) -> dict[str, bool]:
    """Parse ``NAME=BOOL,...``, with the gates of etcd 3.6 and 3.7.

    Raises:
        ValueError: an invalid gate; the text is etcd's.
    """
    found: dict[str, bool] = {}
    for part in filter(None, text.split(",")):
        name, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator:
            raise ValueError(f"missing bool value for {name}")
        try:
            is_on = pflag.parse_bool(value)
        except ValueError as error:
            raise ValueError(f"invalid value of {name}={value}, err: {error}") from None
        if name not in GATE_FIELDS and name not in _IDLE_GATES:
            raise ValueError(f"unrecognized feature gate: {name}")
        found[name] = is_on
    return found


SETTING: Final = "setting"
IDLE: Final = "idle"
REFUSED: Final = "refused"


@dataclass(frozen=True)
class ServerFlag:
    """One flag.

    ``field`` is a path in ``ServerConfig`` such as ``client_tls.cert_file``. ``allowed`` are the values of an idle or
    refused flag that have no effect in etcd either.
    """

    name: str
    parse: Callable[[str], Any]
    fate: str = SETTING
    field: str = ""
    help: str = ""
    allowed: tuple[Any, ...] = ()
    group: str = ""


def _rows_of_settings() -> Iterator[ServerFlag]:
    group = ""
    for row in _SETTINGS:
        if isinstance(row, str):
            group = row
            continue
        name, parse, text, *field = row
        unit = "_s" if parse in (duration, milliseconds) else ""
        alike = name.replace("-", "_") + unit
        yield ServerFlag(name, parse, SETTING, field[0] if field else alike, text, group=group)


def _without_effect(
    fate: str, parse: Callable[[str], Any], *names: str, allowed: tuple[Any, ...] = ()
) -> list[ServerFlag]:
    return [ServerFlag(name, parse, fate, allowed=allowed) for name in names]


_idle, _refused = partial(_without_effect, IDLE), partial(_without_effect, REFUSED)

_CERT_AUTH: Final = "require certificates; needs --{}trusted-ca-file (false)"
_CA_FILE: Final = "CA file for {} certificates, which are then required"
_SELF_SIGNED: Final = "use a self-signed certificate, which proves no identity (false)"
_ANY_NAME: Final = "accept peers whose certificate names neither their address nor a member's (false)"
_VALIDITY: Final = "validity of self-signed certificates, in years (1)"
_AUDIT_SIZE: Final = "size in bytes at which the audit log is rotated, 0: never (104857600)"
_SAMPLING: Final = "calls per million that start a trace when the client sends none (0)"
_ROTATION: Final = (
    'rules: {"maxsize": 100 (MiB), "maxage": 0 (days), "maxbackups": 0, "localtime": false, "compress": false}'
)
_SETTINGS: Final[tuple[str | tuple[Any, ...], ...]] = (
    "Member",
    ("name", string, "name of this member ('default')"),
    ("data-dir", string, "directory of the member's data ('${name}.etcd')"),
    ("wal-dir", string, "directory of the write-ahead log, if not in the data directory"),
    ("snapshot-count", unsigned, "entries between snapshots (10000)"),
    ("snapshot-bytes", unsigned, "log bytes between snapshots (67108864)"),
    ("snapshot-catchup-entries", unsigned, "log entries kept for slow followers (5000)"),
    ("snapshot-catchup-bytes", unsigned, "log bytes kept for slow followers (67108864)"),
    ("heartbeat-interval", milliseconds, "milliseconds between heartbeats (100)"),
    ("election-timeout", milliseconds, "milliseconds without a leader before an election (1000)"),
    ("initial-election-tick-advance", boolean, "hold the first election sooner after a start (true)"),
    ("listen-peer-urls", urls, "URLs to listen on for other members (http://localhost:2380)"),
    ("listen-client-urls", urls, "URLs to listen on for clients (http://localhost:2379)"),
    ("listen-client-http-urls", urls, "URLs for HTTP requests; --listen-client-urls then serve gRPC only"),
    ("metrics", extensive, "basic, or extensive with the duration of every call (basic)", "extensive_metrics"),
    ("listen-metrics-urls", urls, "additional URLs that serve only metrics and health"),
    ("quota-backend-bytes", integer, "database size limit in bytes, 0 for 2 GiB, negative for none (0)"),
    ("backend-batch-interval", duration, "time between database commits (100ms)"),
    ("backend-batch-limit", integer, "operations between database commits (10000)"),
    ("max-txn-ops", unsigned, "largest number of operations in a transaction (128)"),
    ("max-request-bytes", unsigned, "largest write in bytes (1572864)"),
    ("max-concurrent-streams", unsigned, "open calls on one connection, at most 10000 (4294967295)"),
    ("auto-promote", boolean, "promote this member as soon as it is in sync, if it is a learner (false)"),
    ("max-learners", integer, "largest number of learners in the cluster (1)"),
    ("watch-progress-notify-interval", duration, "time between progress notifications of idle watches (10m)"),
    ("wait-cluster-ready-timeout", duration, "longest wait for a quorum before this member serves clients (5s)"),
    ("lease-min-ttl", integer, "shortest TTL of a lease in seconds (1.5 election timeouts)", "lease_min_ttl_s"),
    ("grpc-keepalive-min-time", duration, "shortest time between client pings (5s)"),
    ("grpc-keepalive-interval", duration, "idle time before a ping, 0 for never (2h)"),
    ("grpc-keepalive-timeout", duration, "time to wait for the answer to a ping (20s)"),
    "Clustering",
    ("initial-advertise-peer-urls", urls, "peer URLs at which other members reach this one"),
    ("advertise-client-urls", urls, "client URLs at which clients reach this member"),
    ("initial-cluster", string, "name=URL,... of all initial members"),
    ("initial-cluster-state", choice("new", "existing"), "new, or existing to join a running cluster (new)"),
    ("initial-cluster-token", string, "token that goes into the ids of the cluster and its members ('etcd-cluster')"),
    ("strict-reconfig-check", boolean, "refuse membership changes that would lose the quorum (true)"),
    ("pre-vote", boolean, "ask other members for a pre-vote before an election (true)"),
    ("read-leases", boolean, "the leader reads without a round trip; clock rates must differ by less than 5% (false)"),
    ("auto-compaction-mode", string, "periodic or revision (periodic)"),
    ("auto-compaction-retention", string, "history to keep: hours, a duration or a number of revisions (0: all)"),
    ("compaction-batch-limit", integer, "keys that a compaction visits in one batch (1000)"),
    ("compaction-sleep-interval", duration, "pause of a compaction between batches (10ms)"),
    "Security",
    ("secure", boolean, "refuse to start with insecure settings, and write an audit log (false)"),
    ("cert-file", string, "certificate of the client ports", "client_tls.cert_file"),
    ("key-file", string, "its key", "client_tls.key_file"),
    ("client-cert-auth", boolean, _CERT_AUTH.format(""), "client_tls.client_cert_auth"),
    ("trusted-ca-file", string, _CA_FILE.format("client"), "client_tls.trusted_ca_file"),
    ("client-crl-file", string, "revoked client certificates", "client_tls.crl_file"),
    ("client-cert-allowed-cn", words, "allowed common names of client certificates", "client_tls.allowed_cn"),
    ("client-cert-allowed-hostname", words, "allowed host names of client certificates", "client_tls.allowed_hostname"),
    ("auto-tls", boolean, _SELF_SIGNED, "client_tls.self_signed"),
    ("peer-cert-file", string, "certificate of the peer ports", "peer_tls.cert_file"),
    ("peer-key-file", string, "its key", "peer_tls.key_file"),
    ("peer-client-cert-file", string, "certificate for outgoing peer connections", "peer_tls.client_cert_file"),
    ("peer-client-key-file", string, "its key", "peer_tls.client_key_file"),
    ("peer-client-cert-auth", boolean, _CERT_AUTH.format("peer-"), "peer_tls.client_cert_auth"),
    ("peer-trusted-ca-file", string, _CA_FILE.format("peer"), "peer_tls.trusted_ca_file"),
    ("peer-crl-file", string, "revoked peer certificates", "peer_tls.crl_file"),
    ("peer-cert-allowed-cn", words, "allowed common names of peer certificates", "peer_tls.allowed_cn"),
    ("peer-cert-allowed-hostname", words, "allowed host names of peer certificates", "peer_tls.allowed_hostname"),
    ("peer-skip-client-san-verification", boolean, _ANY_NAME, "peer_tls.skip_san_verification"),
    ("peer-auto-tls", boolean, _SELF_SIGNED, "peer_tls.self_signed"),
    ("insecure-peers", boolean, "accept peers from other machines without certificates (false)"),
    ("self-signed-cert-validity", unsigned, _VALIDITY, "self_signed_validity_years"),
    ("cipher-suites", words, "cipher suites up to TLS1.2, by Go's names (OpenSSL's defaults)"),
    ("tls-min-version", string, "oldest TLS version: TLS1.2 or TLS1.3 (TLS1.2)"),
    ("tls-max-version", string, "newest TLS version (the newest available)"),
    ("cors", origins, "origins whose web pages may send requests, * for all (none)"),
    ("audit-log", string, "audit log of requests: a file, - or stderr (none)"),
    ("audit-level", string, "requests in the audit log: auth, writes or all (writes)"),
    ("audit-log-max-size", integer, _AUDIT_SIZE, "audit_log_max_size_bytes"),
    ("audit-log-keep", integer, "number of rotated audit logs to keep, 0: all (10)"),
    ("host-whitelist", words, "host names allowed in plain HTTP, * for all (all; few on loopback)"),
    ("enable-ui", boolean, "serve the dashboard on the client ports, at /ui/ (true)"),
    "Auth",
    ("auth-token", string, "simple, or jwt,pub-key=FILE,priv-key=FILE,sign-method=RS256,... (simple)"),
    ("auth-token-ttl", unsigned, "seconds after which an unused simple token expires (300)", "auth_token_ttl_s"),
    ("bcrypt-cost", unsigned, "bcrypt cost of password hashes, 4 to 31 (10)"),
    ("auth-min-password-length", unsigned, "smallest number of characters of a new password (0: any)"),
    "Recovery",
    ("wal-archive-dir", string, "directory to copy closed log segments to"),
    ("wal-archive-command", string, "command to run for each closed log segment: %p is its path, %f its name"),
    ("wal-archive-timeout", duration, "close a log segment after this time, 0 for never (5m)"),
    ("wal-archive-held-bytes", integer, "log bytes kept for a failing archive; more are deleted (4294967296)"),
    "Training",
    ("horovod-run", string, "run whose Horovod workers rendezvous on the client ports over HTTP (none)"),
    "Monitoring and logging",
    ("feature-gates", feature_gates, "GATE=true|false,... : InitialCorruptCheck, CompactHashCheck"),
    ("corrupt-check-time", duration, "time between checks that all members have the same data (0: none)"),
    ("compact-hash-check-time", duration, "time between checks of the same at compacted revisions (1m)"),
    ("experimental-initial-corrupt-check", boolean, "the same as its feature gate (false)", "initial_corrupt_check"),
    ("experimental-compact-hash-check-enabled", boolean, "the same as its feature gate (false)", "compact_hash_check"),
    ("enable-pprof", boolean, "answer /debug/pprof/ on the client ports (false)"),
    ("log-level", string, "debug, info, warn, error, panic or fatal (info)"),
    ("log-format", string, "json or console (json)"),
    ("log-outputs", words, "default, stderr, stdout or files (default)"),
    ("enable-log-rotation", boolean, "rotate the log file, the only one in --log-outputs (false)", "log_rotation"),
    ("log-rotation-config-json", string, _ROTATION, "log_rotation_json"),
    "Tracing",
    ("enable-distributed-tracing", boolean, "send spans; needs raftkv[tracing] (false)", "tracing.enabled"),
    ("distributed-tracing-address", string, "OTLP address of the collector (localhost:4317)", "tracing.address"),
    ("distributed-tracing-service-name", string, "service.name of the spans (etcd)", "tracing.service_name"),
    ("distributed-tracing-instance-id", string, "service.instance.id of this member (none)", "tracing.instance_id"),
    ("distributed-tracing-sampling-rate", integer, _SAMPLING, "tracing.sampling_rate"),
    "Unsafe",
    ("unsafe-no-fsync", boolean, "do not sync writes to disk: a power failure loses data (false)"),
    ("force-new-cluster", boolean, "drop all other members, after a quorum is lost for good (false)"),
)
"""The rows of a group follow its name: flag, parser, help, and the field if its name differs from the flag's."""

_TRACING = [row[0] for row in _SETTINGS if "distributed-tracing" in row[0]]
_ALIASES = {
    "experimental-corrupt-check-time": "corrupt-check-time",
    "experimental-compact-hash-check-time": "compact-hash-check-time",
    "experimental-snapshot-catchup-entries": "snapshot-catchup-entries",
    "experimental-compaction-batch-limit": "compaction-batch-limit",
    "experimental-compaction-sleep-interval": "compaction-sleep-interval",
    "experimental-max-learners": "max-learners",
    "experimental-peer-skip-client-san-verification": "peer-skip-client-san-verification",
    "experimental-watch-progress-notify-interval": "watch-progress-notify-interval",
    "experimental-wait-cluster-ready-timeout": "wait-cluster-ready-timeout",
    **{f"experimental-{name}": name for name in _TRACING},
}


_IDLE = [
    # Log segments are deleted as soon as they are not needed, and there are no snapshot files.
    *_idle(unsigned, "max-snapshots", "max-wals"),
    *_idle(string, "logger", allowed=("zap",)),
    # Certificates with which etcd's HTTP gateway calls its own server.
    *_idle(string, "client-cert-file", "client-key-file"),
    *_idle(string, "backend-bbolt-freelist-type", "v2-deprecation", "discovery-fallback"),
    *_idle(boolean, "socket-reuse-port", "socket-reuse-address", "enable-grpc-gateway"),
    *_idle(duration, "raft-read-timeout", "raft-write-timeout"),
    *_idle(duration, "warning-apply-duration", "experimental-warning-apply-duration"),
    *_idle(duration, "warning-unary-request-duration", "experimental-warning-unary-request-duration"),
    *_idle(duration, "downgrade-check-time", "experimental-downgrade-check-time"),
    *_idle(boolean, "memory-mlock", "experimental-memory-mlock", "experimental-txn-mode-write-with-shared-buffer"),
    *_idle(unsigned, "bootstrap-defrag-threshold-megabytes", "experimental-bootstrap-defrag-threshold-megabytes"),
    *_idle(boolean, "experimental-enable-lease-checkpoint", "experimental-enable-lease-checkpoint-persist"),
    *_idle(boolean, "experimental-stop-grpc-service-on-defrag", allowed=(False,)),
    *_idle(string, "cluster-active-size", "cluster-remove-delay", "cluster-sync-interval", "config", "force"),
    *_idle(string, "max-result-buffer", "max-retry-attempts", "peer-heartbeat-interval", "peer-election-timeout"),
    *_idle(string, "retry-interval", "snapshot", "v", "vv"),
]

_REFUSED = [
    *_refused(string, "discovery", "discovery-proxy", "discovery-srv", "discovery-srv-name", allowed=("",)),
    *_refused(string, "discovery-token", "discovery-endpoints", "discovery-user", "discovery-password", allowed=("",)),
    *_refused(string, "discovery-cert", "discovery-key", "discovery-cacert", allowed=("",)),
    *_refused(duration, "discovery-dial-timeout", "discovery-keepalive-time", allowed=(2.0,)),
    *_refused(duration, "discovery-request-timeout", allowed=(5.0,)),
    *_refused(duration, "discovery-keepalive-timeout", allowed=(6.0,)),
    *_refused(boolean, "discovery-insecure-transport", allowed=(True,)),
    *_refused(boolean, "discovery-insecure-skip-tls-verify", allowed=(False,)),
    *_refused(boolean, "enable-v2", allowed=(False,)),
    *_refused(string, "experimental-enable-v2v3", allowed=("",)),
    *_refused(string, "proxy", allowed=("off",)),
    *_refused(unsigned, "proxy-failure-wait", "proxy-write-timeout", allowed=(5000,)),
    *_refused(unsigned, "proxy-refresh-interval", allowed=(30000,)),
    *_refused(unsigned, "proxy-dial-timeout", allowed=(1000,)),
    *_refused(unsigned, "proxy-read-timeout", allowed=(0,)),
]

_ROWS = [*_rows_of_settings(), *_IDLE, *_REFUSED]
FLAGS: Final[dict[str, ServerFlag]] = {flag.name: flag for flag in _ROWS}
FLAGS.update({alias: FLAGS[name] for alias, name in _ALIASES.items()})

BOOLEANS: Final = frozenset(name for name, flag in FLAGS.items() if flag.parse is boolean) | {"version", "help", "h"}
"""Flags that take a value only after ``=``."""


def usage() -> str:
    """Return the part of ``raftkv --help`` about flags."""
    lines = []
    for group in dict.fromkeys(flag.group for flag in _ROWS if flag.group):
        lines += ["", f"{group}:"]
        lines += [f"  --{flag.name:<30} {flag.help}" for flag in _ROWS if flag.group == group]
    return "\n".join(lines)


_ROTATION_FIELDS: Final[dict[str, Any]] = {field.name: type(field.default) for field in dataclasses.fields(LogRotation)}


def read_rotation(text: str) -> LogRotation:
    """Parse ``--log-rotation-config-json``, lumberjack's settings as JSON.

    Names are case-insensitive, and unknown ones are ignored, as in Go.

    Arguments:
        text: value of the flag, such as ``{"maxsize": 10, "maxbackups": 3}``.

    Raises:
        ConfigError: the text is malformed.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"improperly formatted log rotation config: {error}") from None
    if document is not None and not isinstance(document, dict):
        raise ConfigError("invalid log rotation config: want an object, as {}")
    found: dict[str, Any] = {}
    for name, value in (document or {}).items():
        kind = _ROTATION_FIELDS.get(name.lower())
        if kind is None or value is None:
            continue
        if type(value) is not kind or not 0 <= value < 10**12:
            wanted = "true or false" if kind is bool else "a whole number, 0 or more"
            raise ConfigError(f"invalid log rotation config: {name} is {json.dumps(value)}; give {wanted}")
        found[name.lower()] = value
    return LogRotation(**found)


ENVIRONMENT_PREFIX = "ETCD_"
# Environment variables that etcd reads or its packages set, but that are not flags.
_OTHER_ENVIRONMENT = {"ETCD_UNSUPPORTED_ARCH", "ETCD_VERSION", "ETCD_CONFIG_FILE"}
_PARTS: dict[str, Callable[..., Any]] = {"client_tls": TLSFiles, "peer_tls": TLSFiles, "tracing": Tracing}
"""Fields of the configuration that group several settings."""
_DEPTH_MAX: Final = 64
"""Maximum nesting of a configuration file; settings need two levels."""

_SECTIONS = {"client-transport-security": "", "peer-transport-security": "peer-"}
_SECTIONS |= {"socket-options": "socket-", "discovery-config": "discovery-"}
"""Settings of a file that contain further settings, and the prefix of their flags."""
_NAMES_OF_SECTIONS: Final = {
    (prefix, name): f"{prefix or 'client-'}cert-{name}"
    for prefix in ("", "peer-")
    for name in ("allowed-cn", "allowed-hostname")
}
"""Settings in sections whose flags have other names."""


_EMPTY_IS_DEFAULT: Final = frozenset(
    {"auto-compaction-mode", "auto-compaction-retention", "initial-cluster-state", "log-level"}
)
"""Settings of a file that may be an empty text."""

_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
"""Numbers of YAML 1.2; PyYAML parses ``1e4`` as a text."""


@dataclass
class Options:
    """The configuration, and the warnings about it."""

    config: ServerConfig
    warnings: list[str] = field(default_factory=list)
    help: bool = False
    version: bool = False


Complete = Callable[[dict[str, str]], None]
"""Adds the texts of missing flags."""


def read_options(
    words: Sequence[str], environment: Mapping[str, str], complete: Complete = lambda texts: None
) -> Options:
    """Read the complete configuration of a member.

    Arguments:
        words: the command line after the program's name.
        environment: environment of the process.
        complete: receives the given flags, and adds the texts of missing ones.

    Raises:
        CommandError: the text is one line for the user; code 2 for an invalid flag, otherwise 1.
    """
    given = _read_words(words)
    if given.keys() & {"help", "h"}:
        return Options(ServerConfig(), help=True)
    if pflag.parse_bool(given.pop("version", "false")):
        return Options(ServerConfig(), version=True)
    warnings: list[str] = []
    path = given.pop("config-file", "") or environment.get("ETCD_CONFIG_FILE", "")
    with refused(ConfigError):
        if path:
            if idle := [*(f"--{name}" for name in sorted(given)), *_settings_in(environment)]:
                warnings.append(
                    f"{path} counts alone: {', '.join(idle)} {'have' if len(idle) > 1 else 'has'} no effect"
                )
            texts = _read_file(path, warnings)
        else:
            texts = {**_read_environment(environment, given, warnings), **given}
        complete(texts)
        values = _convert(texts, warnings, from_file=bool(path))
        _apply_own_certificates(values, warnings)
        config = _make_config(values, warnings, from_file=bool(path))
        if config.secure:
            config = hardened(config)
            if insecure := list_insecure_settings(config):
                raise ConfigError(refusal(insecure))
    if config.quota_is_large:
        warnings.append("--quota-backend-bytes is above the recommended maximum of 8 GiB")
    return Options(config, warnings)


def _read_words(words: Sequence[str]) -> dict[str, str]:
    """Return the text of each flag by name; if a flag is repeated, the last one counts."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            raise CommandError(f"'{word}' is not a valid flag", ERROR)
        name, separator, value = word[2 if word.startswith("--") else 1 :].partition("=")
        if not name or name.startswith("-"):
            raise CommandError(f"bad flag syntax: {word}", BAD_FLAGS)
        if name not in FLAGS and name not in ("version", "help", "h", "config-file"):
            advice = did_you_mean(name, FLAGS, "--") or "; see raftkv --help"
            raise CommandError(f"flag provided but not defined: -{name}{advice}", BAD_FLAGS)
        if not separator:
            if name in BOOLEANS:
                value = "true"
            elif not rest:
                raise CommandError(f"flag needs an argument: -{name}", BAD_FLAGS)
            else:
                value = rest.pop(0)
        given[name] = value
        _parse_flag(name, value)
    if rest:
        raise CommandError(f"'{rest[0]}' is not a valid flag", ERROR)
    return given


def _parse_flag(name: str, text: str) -> Any:
    """Parse a flag of the command line; an invalid value ends the command with code 2."""
    kind, where = ("boolean value", f"-{name}") if name in BOOLEANS else ("value", f"flag -{name}")
    with refused(ConfigError, BAD_FLAGS):
        return _parsed(name, text, f"invalid {kind}", where)


def _parsed(name: str, text: str, complaint: str, where: str) -> Any:
    """Parse the value of a flag; on failure raise ConfigError with the complaint, the text and its place."""
    parse = FLAGS[name].parse if name in FLAGS else boolean if name == "version" else string
    try:
        return parse(text)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{complaint} {pflag.quote(text)} for {where}: {error}") from None


def _settings_in(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the environment variables that configure a member, sorted."""
    names = {ENVIRONMENT_PREFIX + name.upper().replace("-", "_") for name in FLAGS}
    return sorted(key for key in environment if key in names and environment[key])


def _read_environment(environment: Mapping[str, str], given: Mapping[str, str], warnings: list[str]) -> dict[str, str]:
    names = {ENVIRONMENT_PREFIX + name.upper().replace("-", "_"): name for name in FLAGS}
    found: dict[str, str] = {}
    for key, text in sorted(environment.items()):
        if not key.startswith(ENVIRONMENT_PREFIX) or key in _OTHER_ENVIRONMENT:
            continue
        name = names.get(key)
        if name is None:
            warnings.append(f"unrecognized environment variable {key}={text}{did_you_mean(key, names)}")
        elif name in given:
            raise ConfigError(
                f"conflicting environment variable {key} is shadowed by corresponding command-line flag "
                "(either unset environment variable or disable flag)"
            )
        elif text:
            _parsed(name, text, "invalid value", key)
            found[name] = text
    return found


def _read_file(path: str, warnings: list[str]) -> dict[str, str]:
    document = _read_document(path)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected settings as 'name: value'")
    texts: dict[str, str] = {}
    for key, value in document.items():
        for name, item in _file_entry(path, str(key), value):
            if item is None or (item == "" and name in _EMPTY_IS_DEFAULT):
                continue
            if name in FLAGS:
                texts[name] = _file_text(path, name, item)
            else:
                warnings.append(f"{path}: unknown setting {name!r} is ignored{did_you_mean(name, FLAGS)}")
    return texts


def _read_document(path: str) -> Any:
    """Return the content of a YAML or JSON file."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"open {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    if "\t" in text:
        # JSON may contain tabs between tokens. PyYAML refuses tabs; etcd's parser accepts them.
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    try:
        _check_depth(text)

        class Loader(yaml.SafeLoader):
            """Parses the same texts as numbers as etcd."""

        Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
        return Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    # PyYAML raises these for impossible dates and numbers, and for deep nesting.
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: it cannot be read as YAML: {type(error).__name__}: {error}") from None


def _check_depth(text: str) -> None:
    """Refuse deep nesting, because PyYAML's time grows with the square of the depth."""
    import yaml

    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEPTH_MAX:
            raise ValueError(f"more than {_DEPTH_MAX} levels")


def _file_entry(path: str, key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the flags set by an entry of the file; a section of certificates sets several.

    Raises:
        ConfigError: a section has a scalar value. Ignoring it could leave open a port that the user believes closed.
    """
    prefix = _SECTIONS.get(key)
    if prefix is None:
        return [(key, value)]
    if value is None:
        return []
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key} has settings of its own, as 'name: value' below it; it is given {value!r}")
    return [(_NAMES_OF_SECTIONS.get((prefix, str(name)), prefix + str(name)), item) for name, item in value.items()]


def _file_text(path: str, name: str, value: Any) -> str:
    """Return a value of the file as the text of the flag, checked."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list):
        text = ",".join(map(str, value))
    elif isinstance(value, dict):
        given = ", ".join(map(str, value))
        raise ConfigError(f"{path}: {name} takes a value, and is given settings of its own: {given}")
    else:
        # etcd first converts YAML to JSON, where a float with an integral value becomes an integer.
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        text = str(value)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{path}: {name} has what no name of a file can have: {text!r}")
    # In etcd's files, a plain number for a duration means nanoseconds.
    if isinstance(value, int) and FLAGS[name].parse is duration:
        text += "ns"
    _parsed(name, text, f"{path}: invalid value", name)
    return text


def _convert(texts: Mapping[str, str], warnings: list[str], *, from_file: bool) -> dict[str, Any]:
    """Return the settings as field path to value; warn about the other flags, or refuse them."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        flag = FLAGS[name]
        value = flag.parse(text)
        dashes = "" if from_file else "--"
        if flag.fate == IDLE:
            if value not in flag.allowed:
                warnings.append(f"{dashes}{name} has no effect in raftkv")
        elif flag.fate == REFUSED:
            if value not in flag.allowed:
                raise ConfigError(f"{dashes}{name} is not implemented in raftkv")
        else:
            values[flag.field] = value
    return values


def _make_config(values: dict[str, Any], warnings: list[str], *, from_file: bool) -> ServerConfig:
    _apply_retention(values)
    _apply_gates(values, warnings)
    text = values.pop("log_rotation_json", "{}")
    values["log_rotation"] = read_rotation(text) if values.get("log_rotation") else None
    parts: dict[str, Any] = {
        kind: made(**{key.split(".")[1]: values.pop(key) for key in list(values) if key.startswith(f"{kind}.")})
        for kind, made in _PARTS.items()
    }
    default = ServerConfig()
    if "listen_client_urls" in values and not from_file:
        values.setdefault("advertise_client_urls", ())
    values["tls_min_version"] = values.get("tls_min_version") or default.tls_min_version
    name = values.get("name", default.name)
    values["data_dir"] = values.get("data_dir") or f"{name}.etcd"
    if values.get("initial_cluster", default.initial_cluster) == default.initial_cluster and name != default.name:
        advertised = values.get("initial_advertise_peer_urls", default.initial_advertise_peer_urls)
        values["initial_cluster"] = ",".join(f"{name}={url}" for url in advertised)
    return replace(default, **values, **parts)


def _apply_own_certificates(values: dict[str, Any], warnings: list[str]) -> None:
    """Prefer a given certificate over a self-signed one, as etcd does."""
    for kind, flag in (("client_tls", "auto-tls"), ("peer_tls", "peer-auto-tls")):
        if values.get(f"{kind}.self_signed") and values.get(f"{kind}.cert_file"):
            del values[f"{kind}.self_signed"]
            warnings.append(f"--{flag} is ignored: a certificate is given")


def _apply_gates(values: dict[str, Any], warnings: list[str]) -> None:
    """Apply ``feature-gates``, unless an older flag sets the same field; warn about gates without effect.

    Raises:
        ConfigError: both the gate and the older flag are given.
    """
    gates: dict[str, bool] = values.pop("feature_gates", {})
    if ALL_ALPHA in gates:
        gates = {**dict.fromkeys(GATE_FIELDS, gates.pop(ALL_ALPHA)), **gates}
    for gate, is_on in gates.items():
        if gate not in GATE_FIELDS:
            if is_on != FEATURES.get(gate, (False, ""))[0]:
                warnings.append(f"feature gate {gate} has no effect in raftkv")
            continue
        field_name = GATE_FIELDS[gate]
        if field_name in values:
            flag = next(name for name, flag in FLAGS.items() if flag.field == field_name)
            old, new = f"--{flag}={str(values[field_name]).lower()}", f"--feature-gates={gate}={str(is_on).lower()}"
            raise ConfigError(f"cannot specify both flags: {old} and {new} at the same time, please just use {new}")
        values[field_name] = is_on


def _apply_retention(values: dict[str, Any]) -> None:
    """Read ``auto-compaction-retention`` as revisions, hours or a duration, by the mode."""
    text = values.pop("auto_compaction_retention", "0")
    if text.isascii() and text.isdigit():
        number = int(text)
        if values.get("auto_compaction_mode") == "revision":
            values["auto_compaction_retention_revisions"] = number
        else:
            values["auto_compaction_retention_s"] = number * 3600.0
        return
    try:
        values["auto_compaction_retention_s"] = pflag.parse_duration_s(text)
    except ValueError as error:
        wanted = "--auto-compaction-retention is a number, or a duration such as 24h"
        raise ConfigError(f"error parsing CompactionRetention: {error}; {wanted}") from None
    if values.get("auto_compaction_mode") == "revision":
        raise ConfigError(f"--auto-compaction-retention must be a number of revisions (set to {text})")
