"""How a member publishes itself to the cluster, and how it learns that it was removed.

Publication tells the cluster how to reach this member: its name, client URLs and version, as an entry of the log.

    await publication.publish()     # at the start: returns when the cluster knows
    publication.again()             # a member with a version that did not store all of it was upgraded
    await promote_itself(...)       # with --auto-promote: the leader promotes this learner once it is in sync

When a member is known with other values, for example after a restart with other ``--advertise-client-urls``, it
publishes again.

Departure stops a removed member:

    its own log shows it    it applies its removal and stops shortly afterwards, so that the others receive its last
                            messages; if so few remain that they may need its vote, it stops when they know
    the others report it    they refuse its connections: it missed the end of its log, or was started with old data

A removed member that is still needed starts again after a crash. A request to a member for its own removal is answered
when the others know: an operator may switch it off then. Their knowledge is certain: ids of removed members are kept
for ever, and only committed entries add one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from raftkv import __version__
from raftkv.apply.membership import Membership
from raftkv.apply.wire import Kind
from raftkv.errors import MemberRemovedError, StatusError
from raftkv.loop.fair import MEMBER as OWN
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.replica.node.node import Node

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attributes:
    """The published attributes of a member.

    Attributes:
        name: ``--name``.
        client_urls: ``--advertise-client-urls``.
    """

    name: str
    client_urls: tuple[str, ...]


class Publication:
    """Publishes the attributes of one member.

    Arguments:
        node: node of the member.
        membership: the members as applied here.
        attributes: attributes to publish.
    """

    def __init__(self, node: Node, membership: Membership, attributes: Attributes) -> None:
        self._node = node
        self._membership = membership
        self._attributes = attributes
        self._again: asyncio.Task[None] | None = None

    async def publish(self) -> None:
        """Return when the cluster knows the attributes of this member."""
        while not self._is_known():
            await self._propose()

    def again(self) -> None:
        """Publish again in the background, even if the cluster seems to know the attributes."""
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
            await self._node.propose(Kind.MEMBER_ATTRIBUTES, record.SerializeToString(), record, None, identity=OWN)
        except StatusError as error:
            _log.warning("could not publish this member's client URLs, retrying: %s", error)
            await asyncio.sleep(self._node.settings.election_s)
            return False
        return True

    def _is_known(self) -> bool:
        mine = self._membership.members.get(self._node.settings.member_id)
        if mine is None:
            return True
        known = (mine.name, tuple(mine.clientURLs), self._membership.version_of(mine.ID))
        return known == (self._attributes.name, self._attributes.client_urls, __version__)


async def promote_itself(
    node: Node, membership: Membership, promote: Callable[[], Awaitable[Sequence[rpc_pb2.Member]]]
) -> None:
    """Promote this learner as soon as the leader finds it in sync (``--auto-promote``).

    Arguments:
        node: node of the member.
        membership: the members as applied here.
        promote: asks the leader, and returns all members; raises StatusError if it refuses.
    """
    said = ""
    while (own := membership.members.get(node.settings.member_id)) is not None and own.isLearner:
        try:
            voters = sum(not each.isLearner for each in await promote())
            _log.info("this member was promoted: it votes now, one of %d voters", voters)
        except StatusError as error:
            if str(error) != said:
                said = str(error)
                _log.info("this learner was not promoted yet: %s", said)
            await asyncio.sleep(node.settings.election_s)


STOP_DELAY_S: Final = 1.0
"""Seconds for which a removed member continues (as in etcd), to spread the commit of its removal."""


NEEDED_BY_MAX: Final = 2
"""Number of remaining voters up to which they may need the vote of a removed member until they know that its removal is
committed: it waits until they refuse its connections."""


class Departure:
    """Waits for the removal of this member.

    Arguments:
        member_id: id of this member.
        membership: the members as applied here.
        leave: called once, when the member must stop.
        hears_leader: tells whether a leader counts this member as one of its own.
    """

    def __init__(
        self, member_id: int, membership: Membership, leave: Callable[[], None], hears_leader: Callable[[], bool]
    ) -> None:
        self._member_id = member_id
        self._membership = membership
        self._leave = leave
        self._hears_leader = hears_leader
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._over = asyncio.Event()

    @property
    def is_removed(self) -> bool:
        """Whether the log applied here contains the removal of this member."""
        return self._member_id in self._membership.removed

    def conf_changed(self) -> None:
        """Check after a membership change whether this member was removed."""
        if self.is_removed and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STOP_DELAY_S, self._end_unless_needed)

    def refused(self, text: str) -> bool:
        """Another member refused a connection of this one; whether this one stops because it was removed.

        The word of a survivor that was forced to go on alone stops no member that a leader still counts as its own: a
        leader sends nothing to a member that it has removed.

        Arguments:
            text: of the refusal; it comes again with each attempt to connect.
        """
        if not text.endswith(MemberRemovedError.text) or (self._hears_leader() and not self.is_removed):
            return False
        self._end()
        return True

    async def wait_until_dispensable(self) -> None:
        """Return when the others know of the removal of this member, if they may need its vote until then."""
        if self.is_removed and self.may_be_needed:
            await self._over.wait()

    def close(self) -> None:
        """Stop waiting, because the member stops anyway."""
        self._is_over = True
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_known(self) -> bool:
        """Whether this member was removed and is no longer needed: it need not even start."""
        return self.is_removed and not self.may_be_needed

    @property
    def may_be_needed(self) -> bool:
        """Whether the remaining voters may still need the vote of this removed member."""
        return sum(not member.isLearner for member in self._membership.members.values()) <= NEEDED_BY_MAX

    def _end_unless_needed(self) -> None:
        if not self.may_be_needed:
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._over.set()
            self._leave()


# -- readiness ------------------------------------------------------------------------------------------------------
#
# When a starting member may serve clients: not before its state is at least as new as any that it has ever shown.
#
#     a configuration with voters                 always awaited: a joining member has none before the leader's database
#     applied again what was committed here       always awaited: the log and the mark show how far
#     a quorum confirmed a read after that, and
#     the cluster knows this member's URLs        awaited for at most ``--wait-cluster-ready-timeout``, as in etcd
#
# The first conditions suffice after a kill: clients see only applied entries, and the mark stores how far that was. The
# quorum covers a power cut, which may have lost the last updates of the mark: everything that this member had applied
# was committed, so the index that a quorum confirms is not before it. A member that finds no quorum in that time serves
# its state to callers that require no more (serializable reads, Status); all other requests wait for the quorum as at
# any other time.
#
# Until then the client port is bound and connections queue in the kernel, as with etcd: a client waits for its first
# response instead of being refused.


class Readiness:
    """Decides once when the member is ready for clients.

    Arguments:
        node: node of the member.
        publish: returns when the cluster knows the member's client URLs.
        timeout_s: longest wait for a quorum.

    Attributes:
        is_ready: whether the member is ready.
    """

    def __init__(self, node: Node, publish: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        self.is_ready = False
        self._node = node
        self._publish = publish
        self._timeout_s = timeout_s

    async def wait(self) -> None:
        """Return when clients may be served."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        node, committed = self._node, self._node.committed
        await node.wait_until(lambda: node.applied >= committed and bool(node.conf_state.voters))
        try:
            async with asyncio.timeout_at(deadline):
                await self._publish()
                await self._confirm()
        except TimeoutError:
            _log.warning(
                "%s within %g s: serving clients from local, perhaps stale data (applied %d, revision %d)",
                "no quorum" if node.is_leaderless else "not caught up with the leader",
                self._timeout_s,
                self._node.applied,
                self._node.store.revision,
            )
        self.is_ready = True

    @staticmethod
    def announce() -> None:
        """Log that connections are accepted: etcd's line and nothing else in it, because scripts wait for it."""
        _log.info("ready to serve client requests")

    async def _confirm(self) -> None:
        while not self._node.stopped:
            with contextlib.suppress(StatusError):
                await self._node.confirm_read()
                return
