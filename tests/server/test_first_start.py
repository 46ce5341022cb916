"""Starts: of two first starts on a directory one succeeds; no member starts with the data of another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raftkv.config import ServerConfig
from raftkv.errors import ConfigError, StorageError
from raftkv.pb import rpc_pb2
from raftkv.replica.node import bootstrap
from raftkv.storage.wal.disk import RealDisk
from raftkv.storage.wal.segment import LOCK_NAME
from tests.replica.node.durable import close, opened

FOUNDERS = "a=http://10.0.0.1:2380,b=http://10.0.0.2:2380"


def _config(directory: Path, owner: str = "a", **settings: Any) -> ServerConfig:
    url = f"http://10.0.0.{'ab'.index(owner) + 1}:2380"
    given: dict[str, Any] = {"name": owner, "initial_advertise_peer_urls": (url,), "initial_cluster": FOUNDERS}
    return ServerConfig(data_dir=str(directory), insecure_peers=True, **{**given, **settings})


def test_a_start_that_finds_the_log_locked_writes_nothing(tmp_path: Path) -> None:
    """The database was written before the lock was taken: a start a moment later could write over a member's."""
    wal = tmp_path / "member" / "wal"
    wal.mkdir(0o700, parents=True)
    lock = RealDisk().lock(str(wal / LOCK_NAME))
    with pytest.raises(StorageError, match="is in use by another process"):
        opened(_config(tmp_path))
    os.close(lock)
    assert not (tmp_path / "member" / "snap" / "db").exists()
    close(opened(_config(tmp_path)))


def test_a_start_after_the_log_was_made_takes_it_as_it_is(tmp_path: Path) -> None:
    """Leave alone the log that another start has made: this one said that it is missing, which it was not."""
    config = _config(tmp_path)
    first = opened(config)
    close(first)
    # As a start that had looked for the log a moment before the first one made it.
    bootstrap._begin(config, bootstrap._founder(config), first.wal.directory, first.snapshots)
    second = opened(config)
    assert (second.cluster_id, second.member_id) == (first.cluster_id, first.member_id)
    close(second)


def test_the_data_of_another_member_is_refused_by_name(tmp_path: Path) -> None:
    """Refuse exchanged disks by name: each member said only that no other answers it."""
    close(opened(_config(tmp_path)))
    with pytest.raises(ConfigError, match=r"holds the data of member a \(.* are those of member b \("):
        opened(_config(tmp_path, "b"))


def test_the_data_of_another_member_is_refused_also_before_this_one_has_a_name(tmp_path: Path) -> None:
    """A member that was added and never started is known by its URL alone: two ran as the owner of the data."""
    owner = rpc_pb2.Member(ID=1, name="a", peerURLs=["http://10.0.0.1:2380"])
    added = rpc_pb2.Member(ID=2, peerURLs=["http://10.0.0.2:2380"])
    with pytest.raises(ConfigError, match=r"holds the data of member a \(.* are those of member to be started \("):
        bootstrap._refuse_data_of_another(_config(tmp_path, "b"), 1, {1: owner, 2: added})


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "new"},
        {"initial_advertise_peer_urls": ("http://10.0.0.3:2380",), "initial_cluster": "b=http://10.0.0.3:2380"},
        {"force_new_cluster": True},
    ],
)
def test_a_member_may_have_another_name_or_address_than_before(settings: dict[str, object], tmp_path: Path) -> None:
    """And a survivor goes on wherever its disk is."""
    close(opened(_config(tmp_path)))
    close(opened(_config(tmp_path, "b", **settings)))


def test_an_address_that_the_cluster_does_not_know_is_told_with_its_remedy(tmp_path, caplog):
    """The others look for the member at its old address: it stays without a leader, and said nothing."""

    def told() -> list[str]:
        return [line for record in caplog.records if "look for this member" in (line := record.getMessage())]

    for _ in range(2):
        close(opened(_config(tmp_path)))
    assert not told()
    moved = "http://10.0.0.3:2380"
    durable = opened(_config(tmp_path, initial_advertise_peer_urls=(moved,), initial_cluster=f"a={moved}"))
    close(durable)
    (line,) = told()
    assert line.startswith(f"the others look for this member at http://10.0.0.1:2380, not at {moved} ")
    assert line.endswith(f"raftkvctl member update {durable.member_id:x} --peer-urls {moved}")
