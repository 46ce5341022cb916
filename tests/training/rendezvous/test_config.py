"""Settings of a node: what users may write, and the errors for all else."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.checkpoint import keys as checkpoint_keys
from raftkv.errors import ConfigError
from raftkv.training.config import IGNORED, OPTION_NAMES, RunConfig, parse_options
from raftkv.training.records import RUN_ID_MAX, RunKeys, check_cluster, check_run_id


def test_every_option_has_its_field() -> None:
    given_options = {
        "lease_ttl": "2", "disconnect_grace": 0.5, "last_call_timeout": "30", "join_timeout": 60, "expected_nodes": 3,
        "connect_timeout": "7.5", "return_timeout": "30",
        "rank_policy": "fill", "cluster": "lab", "weight": "2", "fault_limit": 0, "fault_window": "60",
        "fault_cooldown": 5, "node_name": "a", "slots": "8", "host_slots": "16", "topology": "row1/rack7",
        "checkpoint_memory": "8GiB",
    }  # fmt: skip
    assert set(given_options) == set(OPTION_NAMES)
    config = RunConfig(run_id="job", max_nodes=4, **parse_options(given_options)).checked()
    assert (config.lease_ttl_s, config.disconnect_grace_s, config.last_call_timeout_s) == (2, 0.5, 30.0)
    assert (config.connect_timeout_s, config.return_timeout_s) == (7.5, 30.0)
    assert (config.join_timeout_s, config.expected_nodes, config.rank_policy) == (60.0, 3, "fill")
    assert (config.cluster, config.weight) == ("lab", 2)
    assert (config.fault_limit, config.fault_window_s, config.fault_cooldown_s) == (0, 60, 5)
    assert (config.host, config.slots, config.host_slots, config.topology) == ("a", 8, 16, "row1/rack7")
    assert config.memory_bytes == 8 << 30
    assert parse_options({"checkpoint_memory": 4096}) == {"memory_bytes": 4096}


def test_options_injected_by_torch_are_ignored() -> None:
    assert parse_options({"timeout": 900, "rank": 0, "is_host": True, "lease_ttl": 1}) == {"lease_ttl_s": 1}
    assert not IGNORED & set(OPTION_NAMES)


def test_an_unknown_option_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'lease_tll'") as caught:
        parse_options({"lease_tll": 1})
    assert "lease_ttl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("lease_ttl", "1.5", "whole seconds"),
        ("lease_ttl", "", "whole seconds"),
        ("checkpoint_memory", "8 GB", "bytes, as 8GiB"),
        ("join_timeout", "soon", "seconds"),
        ("last_call_timeout", "nan", "seconds"),
        ("last_call_timeout", "inf", "seconds"),
        ("disconnect_grace", "-1", "seconds"),
        ("slots", "many", "a number"),
    ],
)
def test_a_value_of_another_kind_is_named(name: str, value: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({name: value})
    assert f"{name}={value}: {kind} expected" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"min_nodes": 0}, "0:4"),
        ({"min_nodes": 5}, "5:4"),
        ({"max_nodes": 20_000}, "16384"),
        ({"expected_nodes": 5}, "expected_nodes is 5"),
        ({"expected_nodes": -1}, "expected_nodes"),
        ({"lease_ttl_s": 0}, "lease_ttl must be"),
        ({"slots": 0}, "slots must be"),
        ({"slots": 65_537}, "slots must be at most 65536"),
        ({"weight": 0}, "weight must be"),
        ({"weight": 10**30}, "weight must be at most 65536"),
        ({"host_slots": 10**30}, "host_slots must be at most 65536"),
        ({"fault_window_s": 0}, "fault_window must be"),
        ({"fault_cooldown_s": 0}, "fault_cooldown must be"),
        ({"fault_limit": -1}, "fault_limit must not"),
        ({"disconnect_grace_s": -0.1}, "disconnect_grace must not"),
        ({"last_call_timeout_s": -1.0}, "last_call_timeout must not"),
        ({"join_timeout_s": 0.0}, "join_timeout must be"),
        ({"rank_policy": "random"}, "append, fill, topology"),
        ({"host": "a/b"}, "node_name 'a/b'"),
        ({"host": "a\nb"}, "node_name"),
    ],
)
def test_impossible_option_is_refused_in_one_line(changes: dict[str, object], why: str) -> None:
    config = RunConfig(**{"run_id": "job", "max_nodes": 4, **changes})
    with pytest.raises(ConfigError) as caught:
        config.checked()
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_node_is_named_after_its_machine_and_reached_by_its_name() -> None:
    config = RunConfig(run_id="job").checked()
    assert config.host == config.address == socket.gethostname()
    assert RunConfig(run_id="job", host="a", address="10.0.0.1").checked().address == "10.0.0.1"


@pytest.mark.parametrize(
    "run_id",
    [
        *("", " ", "a b", "/a", "a/", "a//b", "a\0", "x" * (RUN_ID_MAX + 1), "é" * RUN_ID_MAX),
        *("a\udcff", ".", "..", "../a", "a/./b", "a/..", "a\\b"),
    ],
)
def test_a_run_id_that_cannot_be_used_is_refused(run_id: str) -> None:
    with pytest.raises(ConfigError, match="run id"):
        check_run_id(run_id)


@pytest.mark.parametrize("part", ["arbiter", "boot", "fault", "node", "round", "state", "store", "sync"])
def test_a_run_never_lies_inside_another(part: str) -> None:
    assert RunKeys("job").base in f"{RunKeys('job').base}{part}/x"
    with pytest.raises(ConfigError, match="run id"):
        check_run_id(f"job/{part}")
    with pytest.raises(ConfigError, match="run id"):
        check_run_id(f"job/{part}/x")


@given(st.text(min_size=1, max_size=RUN_ID_MAX + 1) | st.text("ab./\\\udcff", min_size=1, max_size=12))
def test_a_run_that_can_begin_can_have_checkpoints(run_id: str) -> None:
    try:
        check_run_id(run_id)
    except ConfigError:
        return
    assert checkpoint_keys.check_run_id(run_id) == run_id


def test_a_cluster_whose_name_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="cluster"):
        check_cluster("a\udcff")


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zs", "Zl", "Zp")), min_size=1, max_size=40))
def test_the_keys_of_a_run_lie_below_it_and_apart(text: str) -> None:
    run_id = text.replace("/", "_")
    try:
        check_run_id(run_id)
    except ConfigError:
        return
    keys = RunKeys(run_id)
    single = {keys.arbiter, keys.round, keys.state, keys.node("a-1"), keys.boot(1)}
    assert len(single) == 5
    assert all(key.startswith(keys.base) for key in [*single, keys.faults(1), keys.store(1), keys.sync(1), keys.nodes])


def test_the_interval_that_every_node_watches_holds_just_what_it_should() -> None:
    keys = RunKeys("job")
    first, end = keys.calls[:2]
    assert keys.news[:2] == (keys.state, "")

    def is_call(key: str) -> bool:
        return first.encode() <= key.encode() < end.encode()

    assert all(map(is_call, (keys.arbiter, keys.boot(0), keys.boot(99_999))))
    others = (keys.round, keys.state, keys.node("a-1"), keys.faults(1) + "0", keys.store(1) + "x", keys.sync(12) + "x")
    assert not any(map(is_call, others))
