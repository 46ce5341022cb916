"""The guide to Kubernetes, typed as it stands, with real etcd 3.5.1 as the cluster that moves to raftkv and back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
import pytest

from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, ROOT, find_tool, wait_for
from tests.site.player import Block, Player, blocks, clone_to, here
from tests.test_documentation import BESIDE_ETCD

(PAGE,) = BESIDE_ETCD
RANGE, PUT = "etcdserverpb.KV/Range", "etcdserverpb.KV/Put"
OBJECTS = rpc_pb2.RangeRequest(key=b"/registry/", range_end=b"/registry0")
SOURCE, TARGET = "10.0.0.7", "10.0.0.8"


def _etcd(player: Player) -> None:
    """Start the etcd that the guide moves, with objects that were changed and that have a lease."""
    command = " ".join(ETCD_FAST.command + ETCD_FAST.flags)
    url = f"http://{SOURCE}:2379 --advertise-client-urls http://{SOURCE}:2379 --listen-peer-urls http://{SOURCE}:2380"
    start = f"$ {command} --data-dir source --listen-client-urls {url} > source.log 2>&1 & echo $! > source.pid\n"
    player.play(Block("console", start, ""))
    with Wire([here(f"{SOURCE}:2379")]) as wire:
        grpc.channel_ready_future(wire.channel()).result(60)
        lease = wire.call("etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=3600)).message.ID
        for number in range(20):
            put = rpc_pb2.PutRequest(key=b"/registry/pods/p%d" % (number % 7), value=b"%d" % number, lease=lease)
            assert wire.call(PUT, put).code == "OK"


def _objects(endpoint: str) -> list[bytes]:
    with Wire([endpoint]) as wire:
        return [kv.SerializeToString() for kv in wire.call(RANGE, OBJECTS).message.kvs]


@pytest.mark.long
def test_the_guide_moves_a_cluster_to_raftkv_and_back(tmp_path: Path) -> None:
    clone = clone_to(tmp_path / "raftkv")
    path = f"{Path(find_tool('etcd')).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with Player(clone, environment, PAGE) as player:
        _etcd(player)
        before = _objects(here(f"{SOURCE}:2379"))
        assert len(before) == 7
        for block in blocks(PAGE):
            if block.is_played:
                player.play(block)
        # Revisions, versions and leases are those of before.
        wait_for(lambda: bool(_objects(here(f"{TARGET}:2379"))), "etcd to serve what came back")
        assert _objects(here(f"{TARGET}:2379")) == before
