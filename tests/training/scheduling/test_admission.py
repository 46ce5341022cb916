"""The rule of admission: stories of two and three runs, and properties over random claims and releases."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.client.records import RecordError
from raftkv.errors import ConfigError
from raftkv.training.records import check_cluster
from raftkv.training.scheduling.admission import (
    PASSED_OVER_MAX,
    Ledger,
    Need,
    admit,
    capacity,
    claim,
    forget,
    read_hosts,
    release,
    slots_by_host,
    why,
)


def nodes(run: str, *hosts: str, slots: int = 1) -> list[Need]:
    return [Need(f"{run}-{number}", host, slots) for number, host in enumerate(hosts)]


def ask(ledger: Ledger, run: str, *hosts: str, low: int = 1, high: int = 0, slots: int = 1, weight: int = 1) -> Ledger:
    return claim(ledger, run, nodes(run, *hosts, slots=slots), low, high or len(hosts), weight=weight)


def granted(ledger: Ledger) -> dict[str, int]:
    return {each.run: len(each.granted) for each in ledger.claims}


# ---- stories


def test_all_or_nothing() -> None:
    hosts = {"h1": 1, "h2": 1, "h3": 1}
    ledger = admit(ask(Ledger(), "a", "h1", "h2", low=2), hosts)
    ledger = admit(ask(ledger, "b", "h2", "h3", low=2), hosts)
    assert granted(ledger) == {"a": 2, "b": 0}
    ledger = admit(release(ledger, "a"), hosts)
    assert granted(ledger) == {"b": 2}


def test_a_run_grows_up_to_its_maximum_and_not_before_one_that_waits() -> None:
    hosts = dict.fromkeys("pqrs", 1)
    ledger = admit(ask(Ledger(), "elastic", "p", "q", "r", "s", low=1, high=3), hosts)
    assert granted(ledger) == {"elastic": 3}
    ledger = admit(ask(ledger, "gang", "p", "q", low=2), hosts)
    ledger = admit(release(ledger, "elastic", ["elastic-0", "elastic-1"]), hosts)
    assert granted(ledger) == {"elastic": 2, "gang": 2}  # r and, instead of p and q, s


def test_weights_share_what_runs_grow_into() -> None:
    names = [f"h{number}" for number in range(12)]
    ledger = ask(ask(Ledger(), "light", *names), "heavy", *names, weight=3)
    assert granted(admit(ledger, dict.fromkeys(names, 1))) == {"light": 3, "heavy": 9}


def test_a_run_that_loses_a_node_keeps_the_others_and_its_place() -> None:
    hosts = {"h1": 1, "h2": 1, "h3": 1}
    ledger = admit(ask(Ledger(), "a", "h1", "h2", low=2), hosts)
    ledger = admit(ask(ledger, "b", "h2", "h3", low=2), hosts)
    ledger = admit(claim(ledger, "a", nodes("a", "h1"), 2, 2), hosts)
    assert granted(ledger) == {"a": 0, "b": 2}, "one node cannot run, so its slot must not be held"
    again = [*nodes("a", "h1"), Need("a-new", "h2", 1)]
    ledger = admit(claim(ledger, "a", again, 2, 2), hosts)
    ledger = admit(ask(ledger, "c", "h1", "h2", low=2), hosts)
    ledger = admit(release(ledger, "b"), hosts)
    assert granted(ledger) == {"a": 2, "c": 0}


def test_a_big_run_is_passed_over_only_so_often() -> None:
    hosts = {"h1": 2, "h2": 2}
    ledger = admit(ask(ask(Ledger(), "s0", "h1"), "s1", "h2"), hosts)
    ledger = admit(ask(ledger, "big", "h1", "h2", low=2, slots=2), hosts)
    for number in range(2, 2 + PASSED_OVER_MAX):
        ledger = admit(ask(ledger, f"s{number}", "h1", "h2", high=1), hosts)
        assert granted(ledger)[f"s{number}"] == 1
        ledger = release(ledger, f"s{number}")
    late = admit(ask(ledger, "late", "h1", "h2"), hosts)
    assert granted(late) == {"s0": 1, "s1": 1, "big": 0, "late": 0}
    assert "reserves" in why(late, "big", hosts)
    assert why(late, "late", hosts) == "number 2 in line for slots that s0, s1 hold"
    late = admit(release(admit(release(late, "s0"), hosts), "s1"), hosts)
    assert granted(late) == {"big": 2, "late": 0}


def test_run_that_can_never_start_delays_no_other() -> None:
    hosts = {"h1": 1}
    ledger = admit(ask(Ledger(), "huge", "h1", slots=8), hosts)
    for number in range(10):
        ledger = admit(ask(ledger, f"s{number}", "h1"), hosts)
        assert granted(ledger)[f"s{number}"] == 1
        ledger = release(ledger, f"s{number}")
    huge = ledger.find("huge")
    assert huge is not None
    assert huge.passed == 0, "it would reserve as soon as it could be served"
    assert "more slots than there are on h1" in why(ledger, "huge", hosts)
    assert why(ask(Ledger(), "few", "h1", low=2, high=4), "few", {}) == "1 of 2 nodes are present"


def test_a_host_of_which_nothing_is_known_serves_one_run_at_a_time() -> None:
    ledger = admit(ask(ask(Ledger(), "a", "h", "h", "h", low=3), "b", "h", "h", low=2), {})
    assert granted(ledger) == {"a": 3, "b": 0}
    assert granted(admit(ask(Ledger(), "c", "h", slots=8), {})) == {"c": 1}


def test_slots_of_the_host_key_override_declared_slots() -> None:
    ledger = claim(Ledger(), "a", nodes("a", "h", "i"), 1, 2, declared={"h": 4, "i": 4})
    assert capacity(ledger, {"h": 8}) == {"h": 8, "i": 4}
    assert release(ledger, "a") == Ledger(arrivals=1), "hosts without a node are forgotten"


def test_a_preferred_node_that_is_too_big_does_not_keep_a_run_waiting() -> None:
    wanted = [Need("big", "h", 2), Need("one", "h", 1), Need("two", "h", 1)]
    ledger = admit(claim(Ledger(), "a", wanted, 2, 2), {"h": 2})
    assert set(ledger.claims[0].granted) == {"one", "two"}


def test_fewer_slots_revoke_no_grant() -> None:
    ledger = admit(ask(Ledger(), "a", "h", "h", low=2), {"h": 2})
    ledger = admit(ask(ledger, "b", "h"), {"h": 1})
    assert granted(ledger) == {"a": 2, "b": 0}


def test_the_dead_are_forgotten() -> None:
    ledger = admit(ask(ask(Ledger(), "a", "h"), "b", "h"), {"h": 1})
    assert granted(admit(forget(ledger, ["a"]), {"h": 1})) == {"b": 1}


# ---- records


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b'{"claims":[{"run":"a","since":0,"granted":["x"]}]}',
        b'{"claims":[{"run":"a","since":0,"nodes":[{"id":"x","host":"h"}],"min_nodes":2,"granted":["x"]}]}',
        b'{"claims":[{"run":"a","since":0,"weight":0}]}',
        b'{"claims":[{"run":"a","since":-1}]}',
        b'{"claims":[{"run":"a","since":true}]}',
        b'{"declared":{"h":"many"}}',
    ],
)
def test_foreign_ledger_is_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        Ledger.decode(value)


def test_hosts_that_cannot_be_read_say_nothing() -> None:
    assert read_hosts([("h", b'{"slots":8}'), ("i", b"?")]) == {"h": 8}


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 201, "a\n"])
def test_names_of_clusters(name: str) -> None:
    with pytest.raises(ConfigError):
        check_cluster(name)


# ---- properties

HOSTS = ("h0", "h1", "h2", "h3")
RUNS = ("r0", "r1", "r2", "r3", "r4")


@st.composite
def claims(draw: st.DrawFn, ledger: Ledger) -> Ledger:
    run = draw(st.sampled_from(RUNS))
    count = draw(st.integers(0, 5))
    numbers = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count, unique=True))
    wanted = [Need(f"{run}-{number}", HOSTS[number % 4], 1 + number % 3) for number in numbers]
    low = draw(st.integers(1, 3))
    return claim(ledger, run, wanted, low, low + draw(st.integers(0, 3)), weight=draw(st.integers(1, 3)))


@st.composite
def steps(draw: st.DrawFn, ledger: Ledger) -> Ledger:
    kind = draw(st.sampled_from(["claim", "claim", "release", "part", "forget"]))
    run = draw(st.sampled_from(RUNS))
    if kind == "claim":
        return draw(claims(ledger))
    if kind == "forget":
        return forget(ledger, [run])
    held = ledger.find(run)
    return release(ledger, run, [held.granted[0]] if kind == "part" and held and held.granted else None)


@given(st.data())
def test_any_sequence_keeps_the_rule(data: st.DataObject) -> None:
    hosts = data.draw(st.dictionaries(st.sampled_from(HOSTS), st.integers(0, 6)))
    ledger = Ledger()
    for _ in range(data.draw(st.integers(1, 12))):
        before = data.draw(steps(ledger))
        ledger = admit(before, hosts)
        assert Ledger.decode(ledger.encode()) == ledger, "and so every claim holds nothing, or its minimum"
        assert admit(ledger, hosts) == ledger, "once is enough"
        check_step(before, ledger, hosts)


def check_step(before: Ledger, after: Ledger, hosts: dict[str, int]) -> None:
    room = capacity(after, hosts)
    old, new = (sum((slots_by_host(each.holding) for each in it.claims), Counter()) for it in (before, after))
    for host, slots in new.items():
        assert slots <= max(room[host], old[host]), "overcommitted"
    for was, now in zip(before.claims, after.claims, strict=True):
        assert set(was.granted) <= set(now.granted), "driven out"
    if not any(each.waits and each.passed >= PASSED_OVER_MAX for each in after.claims):
        check_nothing_lies_idle(after, {host: room[host] - new[host] for host in room})


def check_nothing_lies_idle(ledger: Ledger, free: dict[str, int]) -> None:
    for each in ledger.claims:
        fitting = Counter()
        for need in sorted(each.wanting, key=lambda need: need.slots):
            if fitting[need.host] + need.slots <= free[need.host]:
                fitting[need.host] += need.slots
                fitting[None] += 1
        enough = each.min_nodes if each.waits else 1
        assert each.is_complete or fitting[None] < enough, f"{each.run} could be served"


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), min_size=2, max_size=5), st.integers(5, 30))
def test_growth_is_fair_by_weight(runs: list[tuple[int, int]], room: int) -> None:
    """Max-min fairness: no run below its maximum has less for its weight than another had before its last slot."""
    ledger = Ledger()
    for number, (weight, high) in enumerate(runs):
        ledger = ask(ledger, f"r{number}", *["h"] * 12, high=high, weight=weight)
    ledger = admit(ledger, {"h": room})
    assert sum(granted(ledger).values()) == min(room, sum(high for _, high in runs))
    for poor in ledger.claims:
        for rich in ledger.claims:
            if not poor.is_complete and len(rich.granted) > 1:
                assert Fraction(len(rich.granted) - 1, rich.weight) <= Fraction(len(poor.granted), poor.weight)


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=60))
def test_no_run_starves(size: int, stream: list[tuple[int, int]]) -> None:
    """A gang of whole hosts against an endless stream of small runs, each of which gives back its slots in its turn."""
    hosts = dict.fromkeys(HOSTS, 2)
    ledger, holders, number, releases = Ledger(), [], 0, 0
    for host in HOSTS:
        ledger = admit(ask(ledger, f"first-{host}", host, slots=2), hosts)
        holders.append(f"first-{host}")
    ledger = admit(ask(ledger, "gang", *HOSTS, low=size, slots=2), hosts)
    while granted(ledger)["gang"] == 0:
        host, slots = stream[number % len(stream)]
        number += 1
        ledger = admit(ask(ledger, f"s{number}", HOSTS[host], slots=slots), hosts)
        ledger = admit(release(ledger, holders.pop(0)), hosts) if holders else ledger
        releases += 1
        holders += [run for run, count in granted(ledger).items() if count and run != "gang" and run not in holders]
        assert releases < 30, f"still waiting: {why(ledger, 'gang', hosts)}"


def test_a_thousand_nodes() -> None:
    names = [f"h{number}" for number in range(1000)]
    ledger = admit(ask(ask(Ledger(), "a", *names, low=500), "b", *names, low=1, high=10), dict.fromkeys(names, 1))
    assert granted(ledger) == {"a": 990, "b": 10}
