"""What workers find in their environment, out of a world: every style, alone."""

from __future__ import annotations

import json

import pytest

from raftkv.errors import ConfigError
from raftkv.training.process.environment import STYLES, Extras, Meeting, make_environment, parse_styles
from raftkv.training.records import Member
from raftkv.training.rendezvous.world import World

MEMBERS = (
    Member("a-1", "a", "10.0.0.1", slots=2),
    Member("b-1", "b", "fd00::2", slots=1),
    Member("a-2", "a", "10.0.0.1", slots=2),
)
MEETING = Meeting("10.0.0.1", 29511)


def world(index: int) -> World:
    return World("jobs/j", 7, MEMBERS, index, 40)


def variables(index: int, local_rank: int, *styles: str, **extras: object) -> dict[str, str]:
    return make_environment(world(index), local_rank, MEETING, Extras(**extras), styles or STYLES)


def test_ranks_are_a_permutation_and_torch_counts_local_ranks_by_node() -> None:
    found = [variables(index, slot) for index, member in enumerate(MEMBERS) for slot in range(member.slots)]
    assert [one["RANK"] for one in found] == ["0", "1", "2", "3", "4"]
    assert {one["WORLD_SIZE"] for one in found} == {"5"}
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "2", "1", "2", "2"]
    assert [one["GROUP_RANK"] for one in found] == ["0", "0", "1", "2", "2"]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found} == {("10.0.0.1", "29511")}


def test_horovod_counts_local_ranks_by_host() -> None:
    found = [
        variables(index, slot, "horovod", endpoints=["10.9.9.9:2379", "10.9.9.8:2379"])
        for index, member in enumerate(MEMBERS)
        for slot in range(member.slots)
    ]
    assert [one["HOROVOD_LOCAL_RANK"] for one in found] == ["0", "1", "0", "2", "3"]
    assert [one["HOROVOD_LOCAL_SIZE"] for one in found] == ["4", "4", "1", "4", "4"]
    assert [one["HOROVOD_CROSS_RANK"] for one in found] == ["0", "0", "1", "0", "0"]
    assert [one["HOROVOD_CROSS_SIZE"] for one in found] == ["2", "1", "2", "1", "1"]
    assert found[0]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.9.9.9"
    assert found[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "2379"
    assert "RANK" not in found[0]


def test_tf_config_is_what_the_operator_writes() -> None:
    ports = {"a-1": [11001, 11002], "a-2": [12001, 12002]}
    config = json.loads(variables(2, 1, "tf", ports=ports)["TF_CONFIG"])
    assert config == {
        "cluster": {
            "worker": ["10.0.0.1:11001", "10.0.0.1:11002", "[fd00::2]:2222", "10.0.0.1:12001", "10.0.0.1:12002"]
        },
        "task": {"type": "worker", "index": 4},
        "environment": "cloud",
    }


def test_pet_and_the_names_that_are_always_there() -> None:
    found = variables(2, 0, "pet", endpoints=["h1:2379", "h2:2379"], restarts=1, max_restarts=3)
    assert found == {
        "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29511", "RAFTKV_RUN_ID": "jobs/j", "RAFTKV_EPOCH": "7",
        "RAFTKV_ENDPOINTS": "h1:2379,h2:2379", "RAFTKV_RANK": "3", "RAFTKV_WORLD_SIZE": "5", "RAFTKV_NODE_ID": "a-2",
        "RAFTKV_RESTARTS": "1",
    }  # fmt: skip


def test_restarts_are_told_as_torchrun_tells_them() -> None:
    found = variables(0, 0, "torch", restarts=1, max_restarts=3)
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "3")
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_styles_by_name() -> None:
    assert parse_styles([]) == parse_styles(["all"]) == STYLES
    assert parse_styles(["horovod", "torch"]) == ("torch", "horovod")
    assert parse_styles(["none"]) == ()
    with pytest.raises(ConfigError, match="'mpi'; there are torch, pet, tf, horovod"):
        parse_styles(["mpi"])


def test_there_are_no_more_workers_than_slots() -> None:
    with pytest.raises(ConfigError, match="node b-1 has 1 workers"):
        variables(1, 1)


@pytest.mark.parametrize("meeting", [Meeting("10.0.0.1", 1), Meeting("fd00::1", 29500), Meeting("node-1", 65535)])
def test_a_meeting_is_read_as_it_was_written(meeting: Meeting) -> None:
    assert Meeting.parse(str(meeting)) == meeting


@pytest.mark.parametrize("text", ["", "host", "host:", ":29500", "host:port", "host:-1"])
def test_other_texts_are_no_meeting(text: str) -> None:
    with pytest.raises(ConfigError, match="not an address and a port"):
        Meeting.parse(text)
