"""Operators, who add, promote, remove, replace and update members through the API step by step during faults; and the
machines on which members run.

Owns which machines run, and the answers to operators. A plan is a generator that asks members and waits; after an
uncertain answer it asks again, as a careful operator does.

    add        MemberAdd, voter or learner; its machine is switched on some time later, with an empty disk
    promote    MemberPromote until it is granted or refused for good
    replace    a new learner, then MemberReplace of a voter, the leader too
    remove     MemberRemove of any member, the leader too
    wipe       a voter's disk is lost; it is removed, however long that takes, and another one added
    update     MemberUpdate with another peer URL

Plans are always survivable: a disk is wiped only while the remaining voters have a quorum without it, even if an
unanswered removal takes effect.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from raftkv.pb import admin_pb2, rpc_pb2
from raftkv.pb.services import SERVICES, Method
from raftkv.raft.types import ConfState
from raftkv.rpc.status import RpcError
from tests.sim.clients.history import ViolationError
from tests.sim.cluster import Cluster
from tests.sim.journal import slowness

_CLUSTER = SERVICES["etcdserverpb.Cluster"]
ADD, REMOVE, UPDATE, PROMOTE = (_CLUSTER[f"Member{name}"] for name in ("Add", "Remove", "Update", "Promote"))
REPLACE = SERVICES["raftkvpb.Admin"]["MemberReplace"]

MEMBERS_MAX = 6
ANSWER_S = 8.0
"""An operator waits longer than a member does."""
NOT_FOUND = "etcdserver: member not found"
NOT_LEARNER = "etcdserver: can only promote a learner member"
_UNCERTAIN = ("timed out", "stopped", "lost", "leader changed", "deadline", "no leader")


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to any member."""

    method: Method
    request: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """A definite answer: a response, or the text of a refusal."""

    response: Any = None
    refusal: str = ""

    @property
    def is_final(self) -> bool:
        """Whether asking again would not help."""
        return self.response is not None or self.refusal in (NOT_FOUND, NOT_LEARNER)


Plan = Generator[Ask | float, Answer | None, None]


class Machines:
    """The members' machines: switched on when a member was added, off when it was removed.

    Arguments:
        cluster, rng: of the simulation.
        delay_s_mean: from the change to the start.
    """

    def __init__(self, cluster: Cluster, rng: random.Random, delay_s_mean: float) -> None:
        self._cluster = cluster
        self._rng = rng
        self._delay_s_mean = delay_s_mean
        self._known = set(cluster.members)
        cluster.on_conf_applied = self._conf_applied

    def _conf_applied(self, index: int, conf: ConfState) -> None:
        for member_id in (*conf.voters, *conf.learners):
            if member_id not in self._known:
                self._known.add(member_id)
                self._switch_on_later(member_id)

    def _switch_on_later(self, member_id: int) -> None:
        delay_s = self._rng.expovariate(1.0 / self._delay_s_mean)
        self._cluster.scheduler.after(delay_s, self._switch_on, member_id)

    def _switch_on(self, member_id: int) -> None:
        """Start a machine with the cluster's answer; without an answer, try again later."""
        members = self._cluster.newest_members()
        if any(member_id == member.ID for member in members):
            self._cluster.join(member_id, members)
        elif members and member_id in self._cluster.newest_removed():
            self._known.discard(member_id)
        else:
            self._switch_on_later(member_id)

    def are_on(self) -> bool:
        """Whether all added members have been started."""
        return self._known <= set(self._cluster.members)


class Operator:
    """One operator; ``done`` counts granted requests by plan."""

    def __init__(self, number: int, cluster: Cluster, rng: random.Random, *, wipes: bool, calm: float = 1.0) -> None:
        self._calm = calm
        self.done: Counter[str] = Counter()
        self._number = number
        self._cluster = cluster
        self._rng = rng
        self._running = True
        self._plan: Plan | None = None
        self._name = ""
        self._step = 0
        self._urls_count = 0
        self._unanswered = 0
        self._added: set[int] = set()
        self._promoted: set[int] = set()
        self._removed: set[int] = set()
        self._plans: dict[str, Callable[[], Plan]] = {
            "add": self._add,
            "learn": self._learn,
            "promote": self._promote,
            "remove": self._remove,
            "replace": self._replace,
            "update": self._update,
        }
        if wipes:
            self._plans["wipe"] = self._wipe

    def start(self) -> None:
        """Begin."""
        self._think()

    def stop(self) -> None:
        """Start no new plan; the current plan is finished."""
        self._running = False

    @property
    def is_idle(self) -> bool:
        """Whether no plan is in progress."""
        return self._plan is None

    def describe(self) -> str:
        """One line for a person."""
        return f"operator {self._number} {self._name or 'idle'}"

    # -- plans ----------------------------------------------------------------------------------------------

    def _add(self, is_learner: bool = False) -> Plan:
        if len(self._conf_ids()) >= MEMBERS_MAX:
            return
        answer = yield Ask(ADD, rpc_pb2.MemberAddRequest(peerURLs=[self._new_url()], isLearner=is_learner))
        if answer is not None and answer.response is not None:
            self._added.add(answer.response.member.ID)

    def _learn(self) -> Plan:
        yield from self._add(is_learner=True)

    def _promote(self) -> Plan:
        learners = self._cluster.newest_conf().learners
        if not learners:
            return
        member_id = self._rng.choice(learners)
        for _ in range(10):
            answer = yield Ask(PROMOTE, rpc_pb2.MemberPromoteRequest(ID=member_id))
            if answer is not None and answer.response is not None:
                self._promoted.add(member_id)
            if answer is not None and answer.is_final:
                return
            yield 0.3

    def _remove(self) -> Plan:
        ids = self._conf_ids()
        if len(ids) < 2:
            return
        member_id = self._choose(ids)
        answer = yield Ask(REMOVE, rpc_pb2.MemberRemoveRequest(ID=member_id))
        if answer is None:
            self._unanswered += 1
        elif answer.response is not None:
            self._removed.add(member_id)

    def _choose(self, ids: list[int]) -> int:
        """Choose a member, often the leader."""
        leader = self._cluster.leader_hint()
        return leader if leader in ids and self._rng.random() < 0.4 else self._rng.choice(ids)

    def _replace(self) -> Plan:
        if not self._cluster.newest_conf().learners:
            yield from self._add(is_learner=True)
            yield 1.0
        conf = self._cluster.newest_conf()
        if not conf.learners:
            return
        old, new = self._choose(list(conf.voters)), self._rng.choice(conf.learners)
        for _ in range(8):
            answer = yield Ask(REPLACE, admin_pb2.MemberReplaceRequest(old_id=old, new_id=new))
            if answer is None:
                self._unanswered += 1
            elif answer.response is not None:
                self._removed.add(old)
                self._promoted.add(new)
            if answer is not None and answer.is_final:
                return
            yield 0.5

    def _update(self) -> Plan:
        member_id = self._rng.choice(self._conf_ids())
        yield Ask(UPDATE, rpc_pb2.MemberUpdateRequest(ID=member_id, peerURLs=[self._new_url()]))

    def _wipe(self) -> Plan:
        conf = self._cluster.newest_conf()
        # A removed member may still be a voter to members that are down and have not heard of it.
        voters = [voter for voter in conf.voters if voter not in self._removed]
        if len(voters) < 3 + self._unanswered or conf.voters_outgoing:
            return
        victim = self._choose(voters)
        if victim not in self._cluster.members:  # its machine is off yet
            return
        self._cluster.wipe(victim)
        while victim not in self._removed:
            answer = yield Ask(REMOVE, rpc_pb2.MemberRemoveRequest(ID=victim))
            if answer is not None and answer.is_final:
                self._removed.add(victim)
            yield 0.5
        yield from self._add()

    def _conf_ids(self) -> list[int]:
        conf = self._cluster.newest_conf()
        return [*conf.voters, *conf.learners]

    def _new_url(self) -> str:
        self._urls_count += 1
        return f"http://10.{self._number}.0.{self._urls_count}:2380"

    # -- carrying them out ----------------------------------------------------------------------------------

    def _think(self) -> None:
        mean_s = slowness(self._cluster.scheduler.now, self._calm)
        self._cluster.scheduler.after(self._rng.expovariate(1.0 / mean_s), self._begin)

    def _begin(self) -> None:
        if not self._running:
            return
        self._name = self._rng.choice(sorted(self._plans))
        self._cluster.journal.record("plan", self._number, self._name)
        self._plan = self._plans[self._name]()
        self._advance(None)

    def _advance(self, answer: Answer | None) -> None:
        """Take the next step of the plan."""
        if self._plan is None:
            return
        self._step += 1
        try:
            step = self._plan.send(answer)
        except StopIteration:
            self._plan, self._name = None, ""
            self._think()
            return
        if isinstance(step, Ask):
            self._ask(step, self._step)
        else:
            self._cluster.scheduler.after(step, self._advance, None)

    def _ask(self, ask: Ask, number: int) -> None:
        members = self._cluster.members_reachable()
        if not members:
            self._cluster.scheduler.after(0.2, self._ask, ask, number)
            return
        member = self._cluster.members[self._rng.choice(members)]
        self._cluster.journal.record("operate", self._number, ask.method.path, member.id)

        def answered(message: bytes | None, error: RpcError | None) -> None:
            if number != self._step:
                return
            self._cluster.journal.record("operated", self._number, str(error))
            if error is None:
                self.done[self._name] += 1
                self._advance(Answer(ask.method.response.FromString(message or b"")))
            else:
                is_certain = not any(word in error.text for word in _UNCERTAIN)
                self._advance(Answer(refusal=error.text) if is_certain else None)

        member.call(ask.method.path, ask.request.SerializeToString(), answered)
        self._cluster.scheduler.after(ANSWER_S, self._give_up, number)

    def _give_up(self, number: int) -> None:
        if number == self._step:
            self._advance(None)

    # -- the end --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that granted changes hold. Raises ViolationError."""
        alive = [member for member in self._cluster.members.values() if member.alive]
        membership = max(alive, key=lambda member: member.applied).applier.membership
        for member_id in sorted(self._added | self._promoted):
            member = membership.members.get(member_id)
            if member is None and member_id not in membership.removed:
                raise ViolationError("R9", f"member {member_id:x} was added, and is unknown")
            if member is not None and member.isLearner and member_id in self._promoted:
                raise ViolationError("R9", f"member {member_id:x} was promoted, and is a learner")
        for member_id in sorted(self._removed):
            if member_id not in membership.removed:
                raise ViolationError("R9", f"member {member_id:x} was removed, and is not known as such")
