"""When replicas of a torchft job form a quorum: torchft's rule, as a pure function.

>>> ask = Ask("a", number="d/1")
>>> decide(View(healthy=frozenset({"a"}), asks={"a": (ask, 0.0)}), Rules(min_replicas=1), now_s=0.0).members
(Ask(replica_id='a', number='d/1', shrink_only=False, commit_failures=0, message=b''),)

A replica is *healthy* while it is heard of, and *asks* once a step. The replicas that are healthy and ask form a quorum

1. at once, if every replica of the quorum before it is among them;
2. at once, if every replica of the quorum before it *that is still healthy* is, and they satisfy 3;
3. if they are at least ``min_replicas`` and more than half of the healthy ones (so that of two groups of which neither
   knows what the other asks only one goes on), and no healthy one is missing or the first has waited
   ``join_timeout_s``.

If one of them asks to only shrink, newcomers wait for a later quorum. Rule 2 is raftkv's: torchft waits in that case
for newcomers that are alive but not ready, up to the join timeout.

The quorum id grows when the members differ from those of the quorum before, or one of them could not commit its step:
then all connect to each other anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """What the service was started with.

    Attributes:
        min_replicas: no smaller quorum, but for one that has lost nobody.
        join_timeout_s: a quorum waits so long for healthy replicas that do not ask.
    """

    min_replicas: int
    join_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A replica that waits for its next quorum.

    Attributes:
        replica_id: of the replica, new with every start of it.
        number: of this ask, ``DAEMON/COUNT``; no other ask ever has it, and counts of a daemon only grow.
        shrink_only: newcomers are to wait.
        commit_failures: steps in a row that this replica could not commit.
        message: its ``QuorumMember``, as it came.
    """

    replica_id: str
    number: str
    shrink_only: bool = False
    commit_failures: int = 0
    message: bytes = b""


@dataclass(frozen=True, slots=True)
class View:
    """What is known at one moment.

    Attributes:
        healthy: ids of replicas that are heard of.
        asks: by replica id, with the time since when it waits, seconds of any clock.
        previous: ids of the members of the last quorum; None: there was none.
    """

    healthy: frozenset[str]
    asks: Mapping[str, tuple[Ask, float]]
    previous: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows.

    Attributes:
        members: in the order of their ids; empty: no quorum now.
        reason: why (not), in words.
        new_id: the quorum needs a new id.
        ask_again_s: seconds after which the answer may differ though nothing happens; None: it will not.
    """

    members: tuple[Ask, ...] = ()
    reason: str = ""
    new_id: bool = False
    ask_again_s: float | None = None


def decide(view: View, rules: Rules, now_s: float) -> Decision:
    """Decide whether the replicas form a quorum now, and which.

    Arguments:
        now_s: by the clock of ``View.asks``.
    """
    there = {name: ask for name, (ask, _) in view.asks.items() if name in view.healthy}
    members = _members(there, view.previous)
    if not members:
        return Decision(reason=f"nobody who may join has asked; {_counts(there, view)}")
    if view.previous and all(name in there for name in view.previous):
        return _quorum(members, view, f"all of the last quorum; {_counts(there, view)}")
    if len(there) < rules.min_replicas:
        return Decision(reason=f"{rules.min_replicas} replicas are needed; {_counts(there, view)}")
    if 2 * len(there) <= len(view.healthy):
        return Decision(reason=f"more than half of the healthy replicas are needed; {_counts(there, view)}")
    missing = view.healthy - there.keys()
    if not missing or _survivors_are_there(there, view):
        return _quorum(members, view, f"all that were expected; {_counts(there, view)}")
    waited_s = now_s - min(since for name, (_, since) in view.asks.items() if name in there)
    if waited_s < rules.join_timeout_s:
        reason = f"waiting for {', '.join(sorted(missing))}; {_counts(there, view)}"
        return Decision(reason=reason, ask_again_s=rules.join_timeout_s - waited_s)
    return _quorum(members, view, f"the join timeout has passed; {_counts(there, view)}")


def _members(there: Mapping[str, Ask], previous: tuple[str, ...] | None) -> tuple[Ask, ...]:
    allowed = set(there)
    if previous is not None and any(ask.shrink_only for ask in there.values()):
        allowed &= set(previous)
    return tuple(there[name] for name in sorted(allowed))


def _survivors_are_there(there: Mapping[str, Ask], view: View) -> bool:
    survivors = view.healthy.intersection(view.previous or ())
    return bool(survivors) and survivors <= there.keys()


def _quorum(members: tuple[Ask, ...], view: View, reason: str) -> Decision:
    changed = tuple(ask.replica_id for ask in members) != view.previous
    return Decision(members, reason, new_id=changed or any(ask.commit_failures > 0 for ask in members))


def _counts(there: Mapping[str, Ask], view: View) -> str:
    return f"{len(there)} of {len(view.healthy)} healthy replicas ask"
