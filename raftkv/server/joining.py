"""Joining a cluster: before it starts, a new member asks for the cluster's id, the members, and its own id.

    origin = await origin_of(config, ssl)       # asks the other members of --initial-cluster, one after the other

``--initial-cluster`` must name exactly the members of the cluster, including this one, which was added by
``member add`` before (``assign``, etcd's ValidateClusterAndAssignIDs, with its error texts). The ids come from the
cluster. The token is not used: only founders derive their ids from it.

A member that the cluster knows as started is refused: its data is lost, and with it its votes and acknowledgements.
Under its old id it could help to elect a leader that lacks acknowledged writes. The same holds for a member that is
started as a founder again (``check_founder``): it asks the other members, and founds the cluster only if none of them
knows it as started.

Also refused are a member whose data is a restored snapshot, if others know it as started (``check_restored``), and a
member that would continue alone although others form a quorum with it (``check_survivor``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError

from raftkv import cluster_id
from raftkv.apply.membership import Membership
from raftkv.config import ServerConfig
from raftkv.errors import ConfigError
from raftkv.offline.database import members_in
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.bootstrap import Durable, Origin
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError
from raftkv.rpc.tls import Security
from raftkv.server.peer.transport import PEER_CHANNEL, targets

_log = logging.getLogger(__name__)
MEMBERS: Final = SERVICES["raftkvpb.Peer"]["Members"]
ASK_TIMEOUT_S: Final = 5.0
"""Longest wait for one peer URL."""

FOUNDER_ASK_TIMEOUT_S: Final = 1.0
"""How long a founder waits for the other founders, which may not run yet."""


async def origin_of(config: ServerConfig, ssl: Security | None) -> Origin | None:
    """Return the initial state of a member without data; None if it is a founder.

    Arguments:
        config: settings of the member.
        ssl: TLS policy for https URLs.

    Raises:
        ConfigError: the member must not start.
    """
    if config.initial_cluster_state == "existing":
        return await discover(config, ssl)
    if not await check_founder(config, ssl):
        _log.warning(
            "no other initial member answers, so this member founds a new cluster: right on its first start. If it has "
            "run before, its data is missing from %s: stop it and restore the data, or remove the member and add it "
            "again (raftkvctl member remove %x, then member add)",
            config.data_dir,
            config.member_id,
        )
    return None


async def discover(config: ServerConfig, ssl: Security | None) -> Origin:
    """Ask the cluster that this member will join.

    Arguments:
        config: names the members, and this one among them.
        ssl: TLS policy for https URLs.

    Raises:
        ConfigError: no member answers, or the flags do not match the cluster; a one-line message.
    """
    config.check_bootstrap()
    local = cluster_id.parse_initial_cluster(config.initial_cluster)
    others = sorted(url for name, urls in local.items() if name != config.name for url in urls)
    answer = await ask_any(others, ssl)
    own = assign(answer.members, local, config.name)
    _check_not_started(own, config)
    return Origin(answer.cluster_id, own.ID, tuple(answer.members))


async def check_founder(config: ServerConfig, ssl: Security | None) -> bool:
    """Refuse to found a cluster again that already runs with this member.

    Arguments:
        config: settings of a member without data.
        ssl: TLS policy for https URLs.

    Returns:
        whether another founder answers, or there are no other founders.

    Raises:
        ConfigError: another member knows this one as started, or a new member in its place.
    """
    config.check_bootstrap()
    founders = config.founding_members()
    others = sorted(url for _, (name, urls) in founders.items() if name != config.name for url in urls)
    answers = await _ask_all(others, ssl)
    for answer in answers:
        if answer.cluster_id == cluster_id.cluster_id(founders):
            for member in answer.members:
                if config.member_id == member.ID:
                    _check_not_started(member, config)
                else:
                    _check_not_replaced(member, config)
    return bool(answers) or not others


def _check_not_started(own: rpc_pb2.Member, config: ServerConfig) -> None:
    """Refuse a member that has published its client URLs: it has been started before."""
    if own.clientURLs:
        raise ConfigError(
            f"member {own.ID:x} has already been bootstrapped, and its data is not in {config.data_dir}: bring the "
            f"data back, or remove the member and add it again (raftkvctl member remove {own.ID:x}, then member add)"
        )


def _check_not_replaced(other: rpc_pb2.Member, config: ServerConfig) -> None:
    """Refuse a removed founder if another member was added with its peer URL."""
    if not set(config.initial_advertise_peer_urls).isdisjoint(other.peerURLs):
        raise ConfigError(
            f"member {config.member_id:x} was removed from the cluster, and {other.ID:x} was added in its place: "
            "start it with --initial-cluster-state existing"
        )


async def check_restored(durable: Durable, data_dir: str, ssl: Security | None) -> None:
    """Refuse data that was restored from a snapshot while other members run with this one.

    Their log continues after the snapshot: entries that the snapshot contains already would be applied a second time.
    And the snapshot lacks this member's earlier votes and acknowledgements.

    Arguments:
        durable: the restored data.
        data_dir: directory of the data.
        ssl: TLS policy for https URLs.

    Raises:
        ConfigError: another member knows this one as started.
    """
    members = Membership(durable.store).members
    others = sorted(url for key, each in members.items() if key != durable.member_id for url in each.peerURLs)
    for answer in await _ask_all(others, ssl):
        if answer.cluster_id == durable.cluster_id:
            for member in answer.members:
                if member.clientURLs and durable.member_id == member.ID:
                    raise ConfigError(
                        f"member {member.ID:x} has taken part in the cluster that runs, and {data_dir} was restored "
                        "from a snapshot, which founds a new cluster of all its members: remove the data and the "
                        f"member (raftkvctl member remove {member.ID:x}), and let it join (raftkv join); or stop all "
                        "members, and restore each; or restore with another --initial-cluster-token"
                    )


async def check_survivor(config: ServerConfig, ssl: Security | None) -> None:
    """Refuse ``--force-new-cluster`` while this member and the running others form a quorum.

    The member would tell the others that they were removed, and they would stop, with writes that it may lack.

    Arguments:
        config: settings of a member with data.
        ssl: TLS policy for https URLs.

    Raises:
        ConfigError: the others that run form a quorum with this member.
        StorageError, CorruptionError: the members cannot be read.
    """
    voters = [member for member in members_in(config.data_dir) if not member.isLearner]
    answers = await asyncio.gather(*(_ask_all(member.peerURLs, ssl) for member in voters))
    running = [
        member.name or f"{member.ID:x}"
        for member, answered in zip(voters, answers, strict=True)
        if any(member.ID in {each.ID for each in answer.members} for answer in answered)
    ]
    if running and len(running) + 1 > len(voters) // 2:
        names = ", ".join(sorted(running))
        raise ConfigError(
            f"--force-new-cluster is for the one member that is left, but {names} run, a quorum with this one: start "
            "it without --force-new-cluster; or stop the others for good first, with the writes that only they have"
        )


async def ask_any(urls: Iterable[str], ssl: Security | None) -> raft_pb2.MembersResponse:
    """Return what the first peer URL to answer says of its cluster.

    Arguments:
        urls: peer URLs, asked in turn.
        ssl: TLS policy for https URLs.

    Raises:
        ConfigError: none answers.
    """
    failures = []
    for url in urls:
        try:
            return await _ask(url, ssl)
        except (RpcError, TimeoutError, DecodeError) as error:
            failures.append(f"{url}: {getattr(error, 'text', '') or error or 'no answer in time'}")
    raise ConfigError(
        "cannot fetch cluster info from peer urls: could not retrieve cluster information from the given URLs "
        f"({'; '.join(failures) or '--initial-cluster names no other member'})"
    )


async def _ask_all(urls: Iterable[str], ssl: Security | None) -> list[raft_pb2.MembersResponse]:
    """Return the answers of the peer URLs that answer in time, about their clusters."""
    asked = (_ask(url, ssl, FOUNDER_ASK_TIMEOUT_S) for url in urls)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    return [answer for answer in answers if isinstance(answer, raft_pb2.MembersResponse)]


async def _ask(url: str, ssl: Security | None, timeout_s: float = ASK_TIMEOUT_S) -> raft_pb2.MembersResponse:
    hosts, secure = targets([url])
    channel = Channel(hosts, ssl if secure else None, PEER_CHANNEL)
    try:
        async with asyncio.timeout(timeout_s):
            data = await channel.unary(MEMBERS.path, b"", timeout_s, wait_for_ready=False)
        return raft_pb2.MembersResponse.FromString(data)
    finally:
        await channel.close()


def assign(members: Iterable[rpc_pb2.Member], local: Mapping[str, tuple[str, ...]], name: str) -> rpc_pb2.Member:
    """Return this member as the cluster knows it, after checking that both sides name the same members.

    Arguments:
        members: members of the cluster.
        local: ``--initial-cluster``: name to peer URLs.
        name: name of this member; it is in ``local``.

    Raises:
        ConfigError: the two sides differ.
    """
    members = list(members)
    if len(members) != len(local):
        theirs = ",".join(
            sorted(f"{member.name or 'unstarted'}={url}" for member in members for url in member.peerURLs)
        )
        raise ConfigError(
            f"error validating peerURLs: member count is unequal: the cluster has {len(members)} ({theirs}), "
            f"--initial-cluster names {len(local)}"
        )
    named = {frozenset(map(cluster_id.comparable, urls)): each for each, urls in local.items()}
    own: rpc_pb2.Member | None = None
    for member in members:
        found = named.get(frozenset(map(cluster_id.comparable, member.peerURLs)))
        if found is None:
            raise ConfigError(
                f"error validating peerURLs: PeerURLs: no match found for existing member "
                f"({member.ID:x}, [{' '.join(member.peerURLs)}])"
            )
        if found == name:
            own = member
    if own is None:
        raise ConfigError(f"error validating peerURLs: the cluster has no member at {','.join(local[name])}")
    return own
