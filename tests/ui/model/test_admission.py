"""The queue of a cluster in the dashboard is the one that `raftkvctl run queue` prints."""

from __future__ import annotations

from dataclasses import asdict, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.training.records import CLUSTER_ROOT
from raftkv.training.scheduling.admission import PASSED_OVER_MAX, HostRecord, Ledger, Need, admit, claim
from raftkv.training.scheduling.ledger import ClusterKeys, _Found, _grant_view, _queue
from tests.ui.model.runner import Model, kv, plain

HOSTS = st.dictionaries(st.sampled_from(["h1", "h2", "h3"]), st.integers(0, 4), max_size=3)
NEEDS = st.lists(st.tuples(st.sampled_from(["h1", "h2", "h4"]), st.integers(1, 3)), min_size=1, max_size=4)
PASSED = st.integers(0, PASSED_OVER_MAX)
CLAIMS = st.lists(
    st.tuples(st.sampled_from("abcdef"), NEEDS, st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), PASSED),
    max_size=8,
)


def ledger_of(claims: list, hosts: dict[str, int]) -> Ledger:
    ledger = Ledger()
    for run, needs, low, more, weight, _ in claims:
        nodes = [Need(f"{run}-{number}", host, slots) for number, (host, slots) in enumerate(needs)]
        ledger = admit(claim(ledger, run, nodes, low, low + more, weight=weight, declared={"h4": 2}), hosts)
    passed = {run: times for run, *_, times in claims}
    return replace(ledger, claims=tuple(replace(one, passed=passed[one.run]) for one in ledger.claims))


def check_alike(model: Model, claims: list, hosts: dict[str, int]) -> None:
    ledger = ledger_of(claims, hosts)
    keys = ClusterKeys("gpu")
    stored = {f"{keys.hosts}{host}": HostRecord(slots).encode() for host, slots in hosts.items()}
    stored |= {keys.ledger: ledger.encode(), f"{keys.base}deny/h9": b"it burns", f"{keys.base}strike/h9/1": b""}
    found = model.run("clusters", kvs=[kv(key, value) for key, value in stored.items()])
    assert [one["cluster"] for one in found] == ["gpu"]
    (cluster,) = found
    views = _Found(keys, [Item(key, value) for key, value in stored.items()]).host_views()
    assert cluster["hosts"] == plain([{**asdict(host), "free": host.free} for host in views])
    grants = [plain(asdict(_grant_view(each, set()))) for each in ledger.claims if not each.waits]
    assert [{**one, "alive": False} for one in cluster["grants"]] == grants
    assert [{**one, "alive": False} for one in cluster["queue"]] == plain(_queue(ledger, hosts, set()))
    for waiting in cluster["queue"]:
        place = model.run("place", run=waiting["run"], kvs=[kv(key, value) for key, value in stored.items()])
        assert place == {"cluster": "gpu", "waits": True, "reason": waiting["reason"]}


def test_any_ledger_reads_as_in_the_command_line(model: Model) -> None:
    @settings(max_examples=100)
    @given(CLAIMS, HOSTS)
    def check(claims: list, hosts: dict[str, int]) -> None:
        check_alike(model, claims, hosts)

    check()


def test_a_run_whose_smaller_nodes_fit_is_in_line(model: Model) -> None:
    big = ("a", [("h1", 3)], 1, 0, 1, 0)
    check_alike(model, [big, ("b", [("h1", 2), ("h1", 1), ("h1", 1), ("h1", 1)], 3, 0, 1, 0)], {"h1": 3})


class Item:
    """A key as a client gives it."""

    def __init__(self, key: str, value: bytes) -> None:
        self.key, self.value = key.encode(), value


def test_an_unreadable_ledger_is_reported(model: Model) -> None:
    (found,) = model.run("clusters", kvs=[kv(f"{CLUSTER_ROOT}gpu/ledger", b'{"claims": 5}')])
    assert (found["isReadable"], found["queue"], found["grants"]) == (False, [], [])
