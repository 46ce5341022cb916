"""The identities of a cluster and its members: member ids, the cluster id, the initial cluster.

All members compute the same ids from the same flags. The rules are etcd's, so that ids in logs and dashboards stay the
same after a migration: a member id is the head of a SHA-1 over the member's peer URLs and the cluster token; the
cluster id is the head of a SHA-1 over the ids of the founding members. Nothing here touches a file or a socket.

>>> cluster = parse_initial_cluster("a=http://127.0.0.1:2380,b=http://127.0.0.1:22380")
>>> sorted(cluster)
['a', 'b']
>>> f"{member_id(('http://localhost:2380',), 'etcd-cluster'):x}"
'8e9e05c52164694d'
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from raftkv.errors import ConfigError
from raftkv.urls import check_unicode, comparable, parse_urls, split_url

__all__ = [
    "cluster_id",
    "comparable",
    "format_initial_cluster",
    "founding_members",
    "member_id",
    "parse_initial_cluster",
    "parse_urls",
    "split_url",
]


def member_id(peer_urls: Iterable[str], cluster_token: str, added_at_s: int | None = None) -> int:
    """Return the id of a member: 64 bits, always printed in hexadecimal.

    Arguments:
        peer_urls: peer URLs of the member, in any order.
        cluster_token: value of ``initial-cluster-token``.
        added_at_s: Unix time at which the member was added at run time; None for a founding member.
    """
    text = "".join(sorted(peer_urls)) + cluster_token
    return _head(text.encode() if added_at_s is None else f"{text}{added_at_s}".encode())


def cluster_id(member_ids: Iterable[int]) -> int:
    """Return the id of the cluster with these founding members, given in any order."""
    return _head(b"".join(member.to_bytes(8, "big") for member in sorted(member_ids)))


def _head(data: bytes) -> int:
    return int.from_bytes(hashlib.sha1(data, usedforsecurity=False).digest()[:8], "big")


def founding_members(initial_cluster: str, cluster_token: str) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Return all founding members in order of id: a map of the id to the name and the peer URLs.

    Arguments:
        initial_cluster: ``name=URL,name=URL``.
        cluster_token: ``initial-cluster-token``.

    Raises:
        ConfigError: the text is malformed, or two members share an id (the same URLs twice).
    """
    members: dict[int, tuple[str, tuple[str, ...]]] = {}
    for name, urls in parse_initial_cluster(initial_cluster).items():
        identifier = member_id(urls, cluster_token)
        if identifier in members:
            raise ConfigError(
                f"initial cluster {initial_cluster} has the same URLs for {name!r} and {members[identifier][0]!r}"
            )
        members[identifier] = (name, urls)
    return dict(sorted(members.items()))


def parse_initial_cluster(text: str) -> dict[str, tuple[str, ...]]:
    """Parse ``name=URL,name=URL``; a name that occurs twice has two URLs.

    Raises:
        ConfigError: an entry without a URL, or a malformed one.
    """
    check_unicode(text)
    found: dict[str, list[str]] = {}
    for entry in filter(None, text.split(",")):
        name, sign, url = entry.partition("=")
        if not sign:
            raise ConfigError(f"--initial-cluster={text}: {entry} has no URL; give NAME=URL,NAME=URL")
        found.setdefault(name.strip(), []).append(url)
    return {name: parse_urls(",".join(urls)) for name, urls in found.items()}


def format_initial_cluster(cluster: Mapping[str, Iterable[str]]) -> str:
    """Return the sorted text that ``parse_initial_cluster`` reads."""
    return ",".join(sorted(f"{name}={url}" for name, urls in cluster.items() for url in urls))
