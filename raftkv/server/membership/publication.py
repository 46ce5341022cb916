"""Tells the cluster how this member is reached: its name, client URLs and version, as an entry of the log.

    await publication.publish()     # at the start: returns when the cluster knows
    publication.again()             # a member ran a version that did not keep all of it, and was upgraded

Once a member is known with other values, as after a restart with other ``--advertise-client-urls``, it publishes anew.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from raftkv import __version__
from raftkv.apply.membership import Membership
from raftkv.apply.request import Kind
from raftkv.errors import StatusError
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.server.node.node import Node

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a member says of itself.

    Attributes:
        name: ``--name``.
        client_urls: ``--advertise-client-urls``.
    """

    name: str
    client_urls: tuple[str, ...]


class Publication:
    """Publishes the attributes of one member.

    Arguments:
        node: of the member.
        membership: the members as applied here.
        attributes: to be known to the cluster.
    """

    def __init__(self, node: Node, membership: Membership, attributes: Attributes) -> None:
        self._node = node
        self._membership = membership
        self._attributes = attributes
        self._again: asyncio.Task[None] | None = None

    async def publish(self) -> None:
        """Return when the cluster knows what this member says of itself."""
        while not self._is_known():
            await self._propose()

    def again(self) -> None:
        """Publish once more, beside all else, whatever the cluster seems to know."""
        if self._again is None or self._again.done():
            self._again = asyncio.get_running_loop().create_task(self._until_done())

    async def _until_done(self) -> None:
        while not self._node.stopped and not await self._propose():
            pass

    async def _propose(self) -> bool:
        record = raft_pb2.MemberRecord(
            member=rpc_pb2.Member(
                ID=self._node.settings.member_id, name=self._attributes.name, clientURLs=self._attributes.client_urls
            ),
            update=True,
            version=__version__,
        )
        try:
            await self._node.propose(Kind.MEMBER_ATTRIBUTES, record.SerializeToString(), record, None)
        except StatusError as error:
            _log.warning("could not publish this member's client URLs yet: %s", error)
            await asyncio.sleep(self._node.settings.election_s)
            return False
        return True

    def _is_known(self) -> bool:
        mine = self._membership.members.get(self._node.settings.member_id)
        if mine is None:
            return True
        known = (mine.name, tuple(mine.clientURLs), self._membership.version_of(mine.ID))
        return known == (self._attributes.name, self._attributes.client_urls, __version__)
