"""``raftkv join URL``: run a new member of a running cluster, given only the client URL of any of its members.

    cluster: MemberList  ->  added as a learner: MemberAdd  ->  started with --initial-cluster-state existing
        ->  in sync: it asks the leader to promote it (--auto-promote)  ->  a voter, which continues to serve

Defaults of the flags: the member listens on this machine's address for connections to the URL, on ports 2380 and 2379;
its name is the machine's; the cluster names the other members. A given flag takes precedence.

After any interruption, the same command continues where it stopped. A data directory with data is started as it is,
unless the URL belongs to another cluster. A learner with this member's peer URL that was never started is taken to be
this member. With ``--learner`` the member is not promoted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from raftkv import cluster_id
from raftkv.cli.ctl.members import with_urls
from raftkv.cli.program import BAD_FLAGS, ERROR, CommandError
from raftkv.cli.server_options import read_options
from raftkv.client import Client, ClientOptions
from raftkv.client.credentials import file_settings
from raftkv.client.errors import EndpointsFailed
from raftkv.client.rpc import methods
from raftkv.client.rpc.retry import until_answered
from raftkv.config import ServerConfig
from raftkv.errors import ConfigError, PeerURLExistsError, RaftKVError, StatusError
from raftkv.offline.archive import MemberArchive
from raftkv.offline.directory import log_of
from raftkv.pb import rpc_pb2
from raftkv.server.listening import addresses, check_free
from raftkv.server.tls.context import client_context
from raftkv.server.tls.ports import rules_of
from raftkv.urls import Endpoint, parse_endpoint

PEER_PORT: Final = 2380
CLIENT_PORT: Final = 2379
CALL_TIMEOUT_S: Final = 5.0
LOOK_TIMEOUT_S: Final = 2.0
"""Longest wait for the cluster id when a member with data starts again."""
HEALTH_S: Final = 15.0
"""Time during which the request to add this member is repeated, until all voters are connected."""
PAUSE_S: Final = 0.5
"""Longest pause between two requests to add the member or to promote it."""

USAGE: Final = """\
Usage:
  raftkv join URL [--learner] [flags]

Add a member to the cluster with the client URL, and run it. It starts as a learner, receives the data and
votes as soon as it is in sync; with --learner it stays a learner. After any interruption, run the same command again.

If the cluster requires client certificates, RAFTKV_CERT and RAFTKV_KEY name the files of one, as for raftkvctl, until
the member votes; if it has users, use the certificate of root.

Flags are those of raftkv. By default the member listens on the address of this machine that reaches URL, on
ports 2380 (members) and 2379 (clients), and is named after the machine.

Examples:
  raftkv join http://10.0.0.1:2379 --insecure-peers
  raftkv join http://127.0.0.1:2379 --name b --listen-peer-urls http://127.0.0.1:3380 \\
    --listen-client-urls http://127.0.0.1:3379"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a join.

    Attributes:
        config: configuration of the member, still without the cluster; without ``--learner`` it promotes itself.
        url: client URL of a member of the cluster.
        tls: TLS context of connections to it, for https.
        advice: advice if the cluster rejects the certificate; empty if a client's certificate is presented.
    """

    config: ServerConfig
    url: str
    tls: ssl.SSLContext | None
    advice: str = ""


def main(words: Sequence[str]) -> int:
    """Join, then serve until a signal or a failure.

    Arguments:
        words: the command line after ``join``.

    Returns:
        The exit code.

    Raises:
        CommandError: the join failed; the text is one line.
    """
    if words and words[0].lstrip("-") in ("help", "h"):
        print(USAGE)
        return 0
    from raftkv.replica.node.bootstrap import is_new
    from raftkv.server.main import run

    try:
        plan = read_plan(words, os.environ)
        new = is_new(plan.config)
        config = asyncio.run(added(plan) if new else _its_own(plan))
        return run(config, removed_status=ERROR)
    except StatusError as error:
        reason = _reason(error)
        advice = plan.advice if "alert" in reason else ""
        raise CommandError(f"join: {plan.url}: {reason}{advice}", ERROR) from None
    except RaftKVError as error:
        raise CommandError(f"join: {' '.join(str(error).split())}", ERROR) from None


def read_plan(words: Sequence[str], environment: Mapping[str, str]) -> Plan:
    """Parse the command line and fill in defaults.

    Arguments:
        words: the command line after ``join``.
        environment: environment of the process.

    Raises:
        CommandError, ConfigError: the text is one line for the user.
    """
    url, *rest = words or ("",)
    if not url or url.startswith("-"):
        raise CommandError("join: the URL of a member comes first: raftkv join http://10.0.0.1:2379", BAD_FLAGS)
    flags = [word for word in rest if word not in ("-learner", "--learner")]
    endpoint = parse_endpoint(url)
    options = read_options(flags, environment, partial(_complete, _address_towards(endpoint)))
    for warning in options.warnings:
        print(f"raftkv: {warning}", file=sys.stderr)
    shown = file_settings(environment)
    tls = _tls_context(options.config, endpoint, shown)
    advice = "" if tls is None or "cert_file" in shown else "; name a client's certificate: RAFTKV_CERT, RAFTKV_KEY"
    promotes = options.config.auto_promote or len(flags) == len(rest)
    return Plan(replace(options.config, auto_promote=promotes), url, tls, advice)


def _address_towards(endpoint: Endpoint) -> str:
    """Return this machine's address for connections to an endpoint, without sending any data."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            host = str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"cannot find the way to {endpoint.text}: {why}") from None
    # In a URL, the percent sign before the zone of a link-local address is escaped.
    return f"[{host.replace('%', '%25')}]" if ":" in host else host


def _complete(host: str, texts: dict[str, str]) -> None:
    """Add defaults for missing flags: name, URLs, and the state of the cluster."""
    for name in ("initial-cluster", "initial-cluster-state", "force-new-cluster"):
        if name in texts:
            raise ConfigError(f"join: --{name} is not for a member that joins: the cluster says who it is")
    texts["initial-cluster-state"] = "existing"
    texts.setdefault("name", socket.gethostname())
    for listen, advertise, certificate, port in (
        ("listen-peer-urls", "initial-advertise-peer-urls", "peer-cert-file", PEER_PORT),
        ("listen-client-urls", "advertise-client-urls", "cert-file", CLIENT_PORT),
    ):
        scheme = "https" if texts.get(certificate) else "http"
        texts.setdefault(listen, f"{scheme}://{host}:{port}")
        texts.setdefault(advertise, ",".join(_reachable(texts[listen].split(","), host)))


def _reachable(urls: Iterable[str], host: str) -> tuple[str, ...]:
    """Return the URLs for other machines: ``host`` replaces a wildcard address."""
    split = [(url, *cluster_id.split_url(url)) for url in urls]
    hosts = ("0.0.0.0", "::", "localhost")
    return tuple(f"{scheme}://{host}:{port}" if name in hosts else url for url, scheme, name, port in split)


def _tls_context(config: ServerConfig, endpoint: Endpoint, shown: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the TLS context to reach the cluster: own authorities, and a client's or the member's certificate."""
    if not endpoint.secure:
        return None
    # Always verify the cluster, even if the new member will use a self-signed certificate.
    files = replace(config.client_tls, self_signed=False)
    if "cert_file" in shown:
        files = replace(files, client_cert_file=shown["cert_file"], client_key_file=shown.get("key_file", ""))
    return client_context(files, rules_of(config))


async def added(plan: Plan) -> ServerConfig:
    """Add this member to the cluster, unless that was done before.

    Arguments:
        plan: settings of the join.

    Returns:
        The configuration, completed with the cluster.

    Raises:
        StatusError: no answer in time, or a refusal.
        ConfigError: a member with this peer URL has run before, or an address to listen on is in use.
    """
    config = plan.config
    async with _voter(plan) as client:
        said: set[str] = set()

        def say(text: str) -> None:
            if text not in said:
                said.add(text)
                _say(text)

        def tell(trouble: StatusError | None) -> None:
            if trouble is not None:
                say(f"not added yet: {_reason(trouble)}")

        step = partial(_among, client, config, say)
        members = await until_answered(step, HEALTH_S, max_wait_s=PAUSE_S, on_trouble=tell)
    own = with_urls(members, config.initial_advertise_peer_urls)
    cluster = {f"{member.ID:x}": tuple(member.peerURLs) for member in members if member is not own}
    cluster[config.name] = config.initial_advertise_peer_urls
    return replace(config, initial_cluster=cluster_id.format_initial_cluster(cluster))


async def _among(client: Client, config: ServerConfig, say: Callable[[str], None]) -> list[rpc_pb2.Member]:
    """Return the member list including this member, which is added unless it is listed.

    Safe to repeat: no second member is added, even if an attempt with a lost answer is applied after the list was read.

    Raises:
        StatusError: no answer in time, or a refusal. A cluster that just started adds no member until its own members
            have been connected for a while.
        ConfigError: as for ``added``.
    """
    listed = await _listed(client)
    say(f"cluster {listed.header.cluster_id:x} has {len(listed.members)} members: {_names(listed.members)}")
    own = with_urls(listed.members, config.initial_advertise_peer_urls)
    if own is None:
        clients = (*addresses(config.listen_client_urls), *addresses(config.listen_client_http_urls))
        check_free((*config.listen_peer_urls, *clients))
        request = rpc_pb2.MemberAddRequest(peerURLs=config.initial_advertise_peer_urls, isLearner=True)
        try:
            added = await client.call(methods.MEMBER_ADD, request, timeout_s=CALL_TIMEOUT_S)
        except PeerURLExistsError:
            listed = await _listed(client)
            own = with_urls(listed.members, config.initial_advertise_peer_urls)
            if own is None:
                raise
        else:
            say(f"added as learner {added.member.ID:x} at {','.join(added.member.peerURLs)}")
            return list(added.members)
    if own.name:
        raise ConfigError(
            f"member {own.ID:x} ({own.name}) has run with this peer URL, and its data is not in {config.data_dir}: "
            f"bring the data back, or let it go (raftkvctl member remove {own.ID:x}) and join again"
        )
    say(f"an earlier attempt had added this member already: {own.ID:x}")
    return list(listed.members)


async def _listed(client: Client) -> rpc_pb2.MemberListResponse:
    request = rpc_pb2.MemberListRequest(linearizable=True)
    return await client.call(methods.MEMBER_LIST, request, timeout_s=CALL_TIMEOUT_S)


async def _its_own(plan: Plan) -> ServerConfig:
    """Return the configuration for starting with existing data; refuse if the URL belongs to another cluster.

    If no member answers, this member starts anyway: it may be the first of its cluster.
    """
    try:
        async with Client([plan.url], ClientOptions(tls=plan.tls)) as client:
            listed = await client.call(methods.MEMBER_LIST, rpc_pb2.MemberListRequest(), timeout_s=LOOK_TIMEOUT_S)
    except StatusError:
        return plan.config
    directory = plan.config.data_dir
    stored = MemberArchive.open(Path(log_of(plan.config.wal_dir or directory))).cluster_id
    if listed.header.cluster_id != stored:
        raise ConfigError(
            f"{directory} has a member of cluster {stored:x}, and {plan.url} is of cluster "
            f"{listed.header.cluster_id:x}: name another --data-dir, or move this one away"
        )
    return plan.config


@contextlib.asynccontextmanager
async def _voter(plan: Plan) -> AsyncIterator[Client]:
    """Yield a client of a voter, because a learner refuses the calls of a join.

    A URL whose name resolves to all members also leads to learners, even to the joining member itself.

    Raises:
        StatusError: no member answers.
    """
    options = ClientOptions(tls=plan.tls, explain=True)
    async with Client([plan.url], options) as client:
        listed = await client.call(methods.MEMBER_LIST, rpc_pb2.MemberListRequest(), timeout_s=CALL_TIMEOUT_S)
        learners = {member.ID for member in listed.members if member.isLearner}
        if listed.header.member_id not in learners:
            yield client
            return
    voters = [url for member in listed.members if member.ID not in learners for url in member.clientURLs]
    async with Client(voters or [plan.url], options) as client:
        yield client


def _names(members: Iterable[rpc_pb2.Member]) -> str:
    return ", ".join(f"{member.name or 'unstarted'} ({member.ID:x})" for member in members)


def _reason(error: StatusError) -> str:
    """Return why the only endpoint failed, without its URL, which the caller names."""
    failures = error.failures if isinstance(error, EndpointsFailed) else {}
    return "; ".join(failures.values()) or str(error)


def _say(text: str) -> None:
    print(f"raftkv join: {text}", flush=True)
