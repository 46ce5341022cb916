"""What a follower does when its leader's process is gone: it stands for election within some ticks, not within seconds.

An election timeout is long because silence says little. A refused connection says more: the machine of the leader
answers, and nothing listens on the peer port any more. So a follower whose stream to the leader broke, and whose next
connection was refused, forgets the leader (etcd-raft's ``ForgetLeader``, made for this), and unless it hears of one

    leader killed      broken, refused           +1 tick                  +2 ticks
    ---------|----------------|---------------------|------------------------|----->
                              forgotten             1st voter campaigns      2nd voter campaigns, if there is no leader

it asks for pre-votes. The voters campaign one tick apart, in order of id, so that they do not split the votes.

Invariants: nothing here is needed for safety, and a wrong report costs nothing: without the pre-votes of a quorum,
which members that hear from their leader do not give, no term begins; the next heartbeat, at most a tick later, makes
the leader known again. Members without pre-vote or without the check of the quorum therefore never do it.

Leaves out: machines that are gone, networks that are cut: no connection is refused there, and the timeout decides.
"""

from __future__ import annotations

import asyncio

from raftkv.raft.types import NONE, StateRole
from raftkv.replica.node.node import Node


class LostLeader:
    """Campaigns soon after the leader's process is gone.

    Arguments:
        node: of the member.
        loop: its loop.
    """

    def __init__(self, node: Node, loop: asyncio.AbstractEventLoop) -> None:
        self._node = node
        self._loop = loop

    def is_gone(self, peer_id: int) -> None:
        """Take note that a member's port refuses connections.

        Arguments:
            peer_id: of the member.
        """
        node = self._node
        own_id = node.settings.member_id
        if node.stopped or node.leader != peer_id or node.role != StateRole.FOLLOWER:
            return
        config = node.raw.raft.config
        others = [voter for voter in sorted(node.conf_state.voters) if voter != peer_id]
        if own_id not in others or not (config.pre_vote and config.check_quorum):
            return
        node.forget_leader()
        # A tick at least: a leader that is there after all is heard of before it ends, and the others have noticed too.
        self._loop.call_later(node.settings.tick_s * (1 + others.index(own_id)), self._campaign, node.term)

    def _campaign(self, term: int) -> None:
        node = self._node
        if not node.stopped and node.leader == NONE and node.role == StateRole.FOLLOWER and node.term == term:
            node.campaign()
