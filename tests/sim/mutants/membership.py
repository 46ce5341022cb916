"""Planted bugs in changes of the members."""

from __future__ import annotations

from typing import Any

from raftkv.apply.membership import Decision, Membership, _Draft
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft.types import ConfState
from tests.sim.corners import operators_corner, replacement_corner
from tests.sim.member import Member
from tests.sim.mutants.registry import Patches, mutant


@mutant("ids that have left are forgotten", "an id that has left is kept for ever (R9)", operators_corner)
def _forgotten(patches: Patches) -> None:
    def remove(membership: Membership, member_id: int) -> None:
        original(membership, member_id)
        membership.removed.discard(member_id)

    original = patches.set(Membership, "_remove", remove)


@mutant("outgoing voter is no member", "who leaves by a joint change is one until that is left (R9)", operators_corner)
def _leaves_early(patches: Patches) -> None:
    def execute(membership: Membership, decision: Decision, conf_state: ConfState) -> None:
        for member_id in decision.removed:
            membership._remove(member_id)
        original(membership, decision, conf_state)

    original = patches.set(Membership, "execute", execute)


@mutant("update promotes a learner", "an update changes URLs alone (R9)", operators_corner)
def _update_promotes(patches: Patches) -> None:
    def put(draft: _Draft, member: rpc_pb2.Member, peer_urls: Any = None, promoted: bool = False) -> None:
        original(draft, member, peer_urls, promoted=promoted or peer_urls is not None)

    original = patches.set(_Draft, "_put", put)


@mutant("a part of a refused change is made", "a change that is refused changes nothing (R9)", operators_corner)
def _half_made(patches: Patches) -> None:
    def draft(membership: Membership, record: raft_pb2.MembershipChange) -> _Draft:
        for part in record.changes:
            if part.kind == raft_pb2.MemberChange.ADD:
                membership.members[part.member.ID] = part.member
        return original(membership, record)

    original = patches.set(Membership, "draft", draft)


@mutant("members that are unknown are refused", "who was away hears those who came meanwhile (R10)", replacement_corner)
def _unknown_refused(patches: Patches) -> None:
    def hears(member: Member, peer_id: int) -> bool:
        known = member.node is None or not member._peers or peer_id in member._peers
        return known and original(member, peer_id)

    original = patches.set(Member, "hears", hears)
