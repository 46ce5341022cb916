"""When replicas form a quorum: the rule against torchft's own words, and what must hold in every view."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from raftkv.integrations.torchft.rules import Ask, Rules, View, decide

RULES = Rules(min_replicas=2, join_timeout_s=60.0)
NAMES = "abcde"


def view(healthy: str, asks: str, previous: str | None = None, *, shrink: str = "", failed: str = "") -> View:
    """Replicas are letters; who asks has done so at 0 s."""
    made = {name: (Ask(name, f"d/{name}", name in shrink, int(name in failed)), 0.0) for name in asks}
    return View(frozenset(healthy), made, None if previous is None else tuple(previous))


def members(seen: View, rules: Rules = RULES, now_s: float = 0.0) -> str:
    """Letters of the quorum; empty: none."""
    return "".join(ask.replica_id for ask in decide(seen, rules, now_s).members)


def test_survivors_wait_for_no_newcomer():
    assert members(view("abd", "ab", "abc")) == "ab"
    assert members(view("abd", "a", "abc")) == ""
    assert members(view("abd", "d", "abc"), Rules(min_replicas=1)) == ""
    assert members(view("ab", "a", "abc"), Rules(min_replicas=1)) == ""


def test_the_id_grows_with_another_membership_or_a_failed_step():
    assert decide(view("ab", "ab", None), RULES, 0.0).new_id
    assert not decide(view("ab", "ab", "ab"), RULES, 0.0).new_id
    assert decide(view("ab", "ab", "abc"), RULES, 0.0).new_id
    assert decide(view("abc", "abc", "ab"), RULES, 0.0).new_id
    assert decide(view("ab", "ab", "ab", failed="b"), RULES, 0.0).new_id


def torchft(seen: View, rules: Rules, now_s: float) -> str | None:
    """The rule as torchft's documentation and tests tell it, written down a second time, without the others' help."""
    present = "".join(sorted(name for name in seen.asks if name in seen.healthy))
    shrinking = any(seen.asks[name][0].shrink_only for name in present)
    chosen = present
    if seen.previous is not None:
        if shrinking:
            chosen = "".join(name for name in present if name in seen.previous)
        if all(name in present for name in seen.previous):
            return chosen
    if len(present) < rules.min_replicas or len(present) <= len(seen.healthy) // 2:
        return None
    waited_s = now_s - min((seen.asks[name][1] for name in present), default=now_s)
    if len(present) != len(seen.healthy) and waited_s < rules.join_timeout_s:
        return None
    return chosen


@st.composite
def views(draw: st.DrawFn) -> View:
    some = st.sets(st.sampled_from(NAMES))
    asks = {
        name: (
            Ask(name, f"d/{name}", draw(st.booleans()) and draw(st.booleans()), draw(st.integers(0, 1))),
            draw(st.sampled_from((0.0, 30.0, 59.0))),
        )
        for name in sorted(draw(some))
    }
    previous = draw(st.none() | some.filter(bool).map(lambda names: tuple(sorted(names))))
    return View(frozenset(draw(some)), asks, previous)


rules_of_any_kind = st.builds(Rules, st.integers(1, 4), st.sampled_from((0.0, 60.0)))


@given(views(), rules_of_any_kind, st.sampled_from((59.0, 60.0, 1000.0)))
@example(view("abd", "ab", "abc"), RULES, 0.0)
@example(view("abc", "ab"), RULES, 0.0)
@example(view("abc", "ab"), RULES, 60.0)
@example(view("abcd", "ab"), RULES, 1000.0)
@example(view("a", "abc"), RULES, 0.0)
@example(view("abcd", "a", "a"), Rules(min_replicas=3), 0.0)
@example(view("def", "de", "abc"), RULES, 0.0)
@example(view("bc", "bc", "ab", shrink="c"), RULES, 0.0)
@example(view("cd", "cd", "ab", shrink="c"), RULES, 0.0)
def test_the_rule_is_torchfts_but_for_survivors(seen, rules, now_s):
    theirs, ours = torchft(seen, rules, now_s), members(seen, rules, now_s)
    if ours != (theirs or ""):
        survivors = seen.healthy & set(seen.previous or ())
        assert theirs is None
        assert survivors
        assert survivors <= set(ours)


@given(views(), rules_of_any_kind, st.sampled_from((59.0, 60.0, 1000.0)))
def test_a_quorum_is_of_those_who_are_there_and_ask_in_order(seen, rules, now_s):
    chosen = members(seen, rules, now_s)
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= seen.healthy & seen.asks.keys()


@given(views(), rules_of_any_kind)
def test_decision_names_the_time_of_the_next_look(seen, rules):
    """Either nothing changes as time goes by, or it changes exactly when it was said to."""
    now_s = 59.0
    first = decide(seen, rules, now_s)
    if first.members or first.ask_again_s is None:
        assert decide(seen, rules, 1e9).members == first.members
    else:
        assert decide(seen, rules, now_s + first.ask_again_s).members
        assert not decide(seen, rules, now_s + first.ask_again_s - 0.5).members


@given(st.sets(st.sampled_from(NAMES)), views(), views(), rules_of_any_kind)
def test_of_two_halves_that_know_only_their_own_asks_one_goes_on(healthy, one, other, rules):
    others_asks = {name: ask for name, ask in other.asks.items() if name not in one.asks}
    halves = [View(frozenset(healthy), asks, None) for asks in (one.asks, others_asks)]
    assert not all(members(half, rules, 1000.0) for half in halves)
