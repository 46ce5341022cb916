"""The words of ``raftkv doctor``: what is looked at, how it is printed, the exit code.

Exit codes: 0 nothing is broken (there may be warnings), 1 something is, 2 a flag that cannot be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import json
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raftkv.cli.ctl import top
from raftkv.cli.daemons import daemon
from raftkv.cli.doctor import judgement, machine
from raftkv.cli.doctor.judgement import Answer, Finding, Level, Picture, failure, ok, skipped, warning
from raftkv.cli.goflags.pflag import BOOL, Flag
from raftkv.cli.output.table import Rows, out, progress_bar
from raftkv.cli.program import BAD_FLAGS, ERROR, SUCCESS, CommandError
from raftkv.client.rpc import methods
from raftkv.cluster_id import split_url
from raftkv.config import ServerConfig, TLSFiles
from raftkv.errors import INVALID_ARGUMENT, PERMISSION_DENIED, UNAUTHENTICATED, ConfigError, RaftKVError, StatusError
from raftkv.pb import rpc_pb2
from raftkv.pb.enums import alarm_name
from raftkv.rpc.client.connect import addresses
from raftkv.server.tls.certificates import WARNING_S, ends_of, is_open_to_others

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.client.rpc.core import Client as Core

# -- certificates ---------------------------------------------------------------------------------------------------
#
# Certificates of a member, or of this client: when they end, whom they name, whether the keys are private.

_DAY_S: Final = 86_400


def check_certificates(config: ServerConfig) -> list[Finding]:
    """Look at the files that a member is configured with.

    Arguments:
        config: of the member.
    """
    found: list[Finding] = []
    for subject, files, urls in (
        ("client port", config.client_tls, config.advertise_client_urls),
        ("peer port", config.peer_tls, config.initial_advertise_peer_urls),
    ):
        found += check_files(f"certificates of the {subject}", files, _hosts(urls))
    return found


def check_files(subject: str, files: TLSFiles, hosts: Iterable[str] = ()) -> list[Finding]:
    """Look at certificates of one use; nothing, if there are none.

    Arguments:
        subject: what they are of.
        files: where they are.
        hosts: that the certificate must name.
    """
    if not any(files.paths):
        return []
    try:
        found = [_check_end(f"{subject}: {end.what}", end.path, end.time_s) for end in ends_of(files, None).values()]
        keys = filter(None, (files.key_file, files.client_key_file))
        found += [_check_mode(f"{subject}: key", key) for key in keys]
        if files.cert_file and files.key_file:
            _check_pair(files.cert_file, files.key_file)
    except ConfigError as error:
        return [failure(subject, str(error), "mend the file; raftkv certs makes new ones")]
    except OSError as error:
        return [failure(subject, f"{error.filename}: {error.strerror}", "name files that this user can read")]
    if files.cert_file and hosts:
        found.append(_check_names(f"{subject}: names", files.cert_file, hosts))
    return found


def _check_end(subject: str, path: str, ends_s: float) -> Finding:
    days = (ends_s - time.time()) / _DAY_S
    advice = "raftkv certs renew, or have your authority make new ones: members take them up while they run"
    if days < 0:
        return failure(subject, f"{path} ended {-days:.0f} days ago", advice)
    figure = f"{path} ends in {days:.0f} days"
    return warning(subject, figure, advice) if days * _DAY_S < WARNING_S else ok(subject, figure)


def _check_mode(subject: str, key: str) -> Finding:
    if is_open_to_others(key):
        return warning(subject, f"other users of this machine may read {key}", f"chmod 0600 {key}")
    return ok(subject, f"{key} is private")


def _check_pair(certificate: str, key: str) -> None:
    try:
        # An empty password: a key that has one would ask for it here, and in every handshake.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"certificate {certificate} and key {key} cannot be used together") from None


def _check_names(subject: str, path: str, hosts: Iterable[str]) -> Finding:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificates(Path(path).read_bytes())[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return failure(subject, f"{path} names no host", "make one with the names and addresses of the member")
    known = {str(name).lower() for name in names.get_values_for_type(x509.DNSName)}
    known |= {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    missing = sorted({host for host in hosts if not _is_named(host, known)})
    if missing:
        figure = f"{path} does not name {', '.join(missing)}"
        return failure(subject, figure, "make one that names the host of every URL that the member advertises")
    return ok(subject, ", ".join(sorted(known)))


def _is_named(host: str, known: set[str]) -> bool:
    try:
        return str(ipaddress.ip_address(host)) in known
    except ValueError:
        return host.lower() in known or f"*.{host.lower().partition('.')[2]}" in known


def _hosts(urls: Iterable[str]) -> list[str]:
    parts = [split_url(url) for url in urls]
    return [host.strip("[]") for scheme, host, _ in parts if scheme == "https"]


# -- cluster --------------------------------------------------------------------------------------------------------
#
# Asks the members of a cluster, side by side; ``judgement`` tells what their answers mean.
#
# Each call has a deadline of a few seconds, and a member that does not answer is part of the picture.

_FSYNC: Final = "etcd_disk_wal_fsync_duration_seconds"
_ROUND_TRIP: Final = "etcd_network_peer_round_trip_time_seconds"

_REFUSALS: Final = (PERMISSION_DENIED, UNAUTHENTICATED, INVALID_ARGUMENT)
"""Codes by which a member refuses a user without the right, an old token, and a call without a user."""

FIGURES_MIN: Final = 100
"""Fewer figures tell nothing: the slowest one of a start would be the 99th percentile."""

TIMEOUT_S: Final = 3.0
TRIES: Final = 5
"""Number of round trips that are timed; the shortest counts: longer ones include other work of the two machines."""


async def ask(kv: Client) -> Picture:
    """Ask the members that the client knows, and those that they name.

    Arguments:
        kv: a client of the cluster.
    """
    core = kv.scope.core
    picture = Picture()
    try:
        members = await core.call(methods.MEMBER_LIST, rpc_pb2.MemberListRequest(), timeout_s=TIMEOUT_S)
        picture.members = list(members.members)
    except StatusError as error:
        picture.error = str(error)
    with contextlib.suppress(StatusError):
        request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET)
        alarms = await core.call(methods.ALARM, request, timeout_s=TIMEOUT_S)
        picture.alarms = [(alarm.memberID, alarm_name(alarm.alarm)) for alarm in alarms.alarms]
    given = [endpoint.text for endpoint in core.endpoints]
    answers = await asyncio.gather(*(_ask_member(core, endpoint) for endpoint in given))
    known = {answer.member_id for answer in answers}
    others = [member.clientURLs[0] for member in picture.members if member.ID not in known and member.clientURLs]
    # An endpoint of a member that does not answer need not be the URL that the member list has.
    more = [url for url in others if url not in given]
    picture.answers = [*answers, *await asyncio.gather(*(_ask_member(core, url) for url in more))]
    urls = [(member.name or f"{member.ID:x}", url) for member in picture.members for url in member.peerURLs]
    rtts = await asyncio.gather(*(_reach(url) for _, url in urls))
    picture.peers = [(name, url, rtt_ms) for (name, url), rtt_ms in zip(urls, rtts, strict=True)]
    return picture


async def _ask_member(core: Core, endpoint: str) -> Answer:
    async def ask_status() -> rpc_pb2.StatusResponse:
        return await core.call_at(endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=TIMEOUT_S)

    try:
        status = await ask_status()  # opens the connection
        rtt_ms = await _shortest_ms(ask_status)
    except (StatusError, ConfigError) as error:
        is_refusal = isinstance(error, StatusError) and error.code in _REFUSALS
        return Answer(endpoint, error=str(error), is_refusal=is_refusal)
    program, clock_s = await asyncio.to_thread(_ask_http, core, endpoint)
    fsync_ms, peers_ms = await asyncio.to_thread(_ask_metrics, core, endpoint)
    return Answer(
        endpoint,
        status=status,
        rtt_ms=rtt_ms,
        clock_s=clock_s,
        program=program,
        fsync_p99_ms=fsync_ms,
        peers_p99_ms=peers_ms,
    )


async def _shortest_ms(call: Callable[[], Awaitable[object]]) -> float:
    times: list[float] = []
    for _ in range(TRIES):
        began = time.perf_counter()
        await call()
        times.append((time.perf_counter() - began) * 1000)
    return min(times)


async def _reach(url: str) -> float | None:
    """Milliseconds of a TCP connection from here to a peer port; None: it cannot be reached."""
    host, _, port = url.partition("://")[2].rpartition(":")

    async def connect() -> None:
        address, *_ = await addresses(host.strip("[]"), int(port))
        _, writer = await asyncio.open_connection(address, int(port))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _shortest_ms(connect)
    except (OSError, ValueError, TimeoutError):
        return None


def _ask_metrics(core: Core, endpoint: str) -> tuple[float | None, float | None]:
    """99th percentiles that a member has measured (ms): of its syncs, of round trips to its peers; None: unknown."""
    try:
        text = top.fetch_text(endpoint, core.options.tls, TIMEOUT_S)
        found = [top.quantile(text, name, 0.99, FIGURES_MIN) for name in (_FSYNC, _ROUND_TRIP)]
    except (OSError, ValueError):
        return None, None
    fsync_ms, peers_ms = (None if seconds is None else seconds * 1000 for seconds in found)
    return fsync_ms, peers_ms


def _ask_http(core: Core, endpoint: str) -> tuple[str, tuple[float, float] | None]:
    """What runs there, and between which two figures its clock is ahead of this one (seconds), by its HTTP answer.

    The date is a whole second, so the two figures lie a second and a round trip apart. Empty and None: it does not say.
    """
    try:
        connection = top.connect(endpoint, core.options.tls, TIMEOUT_S)
    except OSError:
        return "", None
    with contextlib.closing(connection):
        try:
            sent_s = time.time()
            connection.request("GET", "/version")
            answer = connection.getresponse()
            received_s = time.time()
            program, date = answer.getheader("Server", ""), answer.getheader("Date")
            theirs_s = None if date is None else parsedate_to_datetime(date).timestamp()
        except (OSError, http.client.HTTPException, ValueError):
            return "", None
    return program, None if theirs_s is None else (theirs_s - received_s, theirs_s + 1.0 - sent_s)


BACKUP_AGE_S: Final = 2 * 86_400.0
"""A warning tells of a last backup older than this."""

CLOCK_S: Final = 300.0
"""A warning tells of a last backup from further in the future than this: it would hide that backups have stopped."""

CLUSTER_TIME_S: Final = 20.0
"""Longest time for all questions to a cluster."""

FLAGS: Final = (
    Flag("config-file", usage="the member's own settings: directories, certificates, timing, addresses"),
    Flag("data-dir", usage="data directory of a member, stopped or not"),
    Flag("wal-dir", usage="directory of its log, if on its own disk"),
    Flag("endpoints", usage="members of a running cluster, comma-separated"),
    *daemon.CREDENTIALS,
    Flag("backup", usage="URL that raftkv backup writes to: when was the last one"),
    Flag("json", BOOL, usage="print JSON"),
)
_USAGE = """Usage:
  raftkv doctor [flags]    look at this machine, a data directory and a cluster, and say what to do

Without flags it looks at this machine, and at the cluster on 127.0.0.1:2379 if there is one.

Examples:
  raftkv doctor --config-file /etc/raftkv/raftkv.yml
  raftkv doctor --data-dir /var/lib/raftkv
  raftkv doctor --endpoints 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379 --backup s3://bucket/raftkv

Flags:"""
_STYLES: Final = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.FAILURE: "bold red"}
DEFAULT_ENDPOINT: Final = "127.0.0.1:2379"


def main(words: Sequence[str]) -> int:
    """Run ``raftkv doctor``.

    Arguments:
        words: the command line after ``doctor``.

    Returns:
        The exit code.

    Raises:
        CommandError: a flag cannot be used; one line.
    """
    parsed = daemon.parse(FLAGS, words, "doctor", _USAGE)
    if parsed is None:
        return SUCCESS
    values = parsed.values
    config = _config_of(values)
    found = list(_examine(_parts(values, config), hidden=values["json"]))
    if values["json"]:
        _print_json(found)
    else:
        _print_table(found)
    return ERROR if any(finding.level is Level.FAILURE for finding in found) else SUCCESS


def _config_of(values: dict[str, Any]) -> ServerConfig | None:
    """Return the settings of the member, if its file is given; only the file counts, as for a member."""
    if not values["config-file"]:
        return None
    from raftkv.cli.server.options import read_options

    try:
        return read_options([f"--config-file={values['config-file']}"], {}).config
    except CommandError as error:
        raise CommandError(str(error), BAD_FLAGS) from None


Part = tuple[str, Callable[[], list[Finding]]]


def _parts(values: dict[str, Any], config: ServerConfig | None) -> Iterator[Part]:
    """What is looked at, in this order."""
    yield "machine", machine.check_machine
    data_dir = values["data-dir"] or (config.data_dir if config else "")
    if data_dir:
        wal_dir = values["wal-dir"] or (config.wal_dir if config else "")
        yield "disk", lambda: machine.check_disk(data_dir, wal_dir)
    if config is not None:
        yield "certificates", lambda: check_certificates(config)
    files = TLSFiles(values["cert"], values["key"], trusted_ca_file=values["cacert"])
    if any(files.paths):
        yield "certificates", lambda: check_files("certificates of this client", files)
    if values["backup"]:
        yield "backup", lambda: [_check_backup(values["backup"])]
    endpoints = values["endpoints"] or (",".join(config.advertise_client_urls) if config else "")
    is_asked = bool(values["endpoints"])
    if endpoints or not data_dir:
        yield "cluster", lambda: _check_cluster(values, endpoints or DEFAULT_ENDPOINT, config, is_asked)


def _examine(parts: Iterator[Part], *, hidden: bool) -> Iterator[Finding]:
    every = list(parts)
    with progress_bar("looking", (), len(every), hidden=hidden) as update:
        for name, look in every:
            update(description=f"looking at the {name}", advance=1)
            try:
                yield from look()
            except OSError as error:
                yield skipped(name, f"{error.filename or ''} {error.strerror or error}".strip())


def _check_backup(url: str) -> Finding:
    from raftkv.cli.backup.place import Place

    subject, advice = "backup", "raftkv backup URL --every 1h, and look at its log"
    try:
        backups = Place(url).backups()
    except (RaftKVError, CommandError) as error:
        return failure(subject, " ".join(str(error).split()), advice)
    if not backups:
        return failure(subject, f"there is none in {url}", advice)
    age_s = time.time() - backups[-1].taken_s
    if age_s < -CLOCK_S:
        figure = f"the last of {len(backups)} was taken {-age_s / 3600:.1f} h from now"
        return warning(subject, figure, "set the clocks of this machine and of the one that takes the backups")
    figure = f"the last of {len(backups)} is {age_s / 3600:.1f} h old"
    return warning(subject, figure, advice) if age_s > BACKUP_AGE_S else ok(subject, figure)


def _check_cluster(
    values: dict[str, Any], endpoints: str, config: ServerConfig | None, is_asked: bool
) -> list[Finding]:
    """Ask a cluster. A member that does not run is a failure only if ``--endpoints`` was given."""
    from raftkv.client.library import connect

    async def ask_cluster() -> judgement.Picture:
        async with connect(endpoints.split(","), **daemon.connection(values)) as kv:
            async with asyncio.timeout(CLUSTER_TIME_S):
                return await ask(kv)

    try:
        picture = asyncio.run(ask_cluster())
    except TimeoutError:
        return [failure("cluster", f"no answer within {CLUSTER_TIME_S:g} s", "name members that run with --endpoints")]
    except RaftKVError as error:
        raise CommandError(" ".join(str(error).split()), BAD_FLAGS) from None
    if not is_asked and all(answer.status is None for answer in picture.answers):
        return [skipped("cluster", f"no member at {endpoints}: --endpoints names others")]
    return list(judgement.judge(picture, config))


def _print_json(found: list[Finding]) -> None:
    worst = max((finding.level for finding in found), default=Level.OK)
    lines = [
        {"subject": one.subject, "level": one.level.word, "figure": one.figure, "advice": one.advice} for one in found
    ]
    print(json.dumps({"level": (Level.OK if worst is Level.SKIPPED else worst).word, "findings": lines}, indent=1))


def _print_table(found: list[Finding]) -> None:
    rows = [(one.level.word, one.subject, one.figure, one.advice) for one in found]
    out(Rows(("", "subject", "found", "what to do"), rows, [_STYLES[one.level] for one in found]))
    counts = {level: sum(one.level is level for one in found) for level in (Level.WARNING, Level.FAILURE)}
    print(os.linesep.join(["", f"{counts[Level.FAILURE]} failures, {counts[Level.WARNING]} warnings"]))
