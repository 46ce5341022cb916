"""Configurations that a new member refuses before it starts, with etcd's texts and reasons."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from raftkv.apply.membership import Membership
from raftkv.config import ServerConfig
from raftkv.errors import ConfigError, StorageError
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.rpc.server.server import Server
from raftkv.server.joining import MEMBERS, assign, discover, origin_of
from tests.replica.node.durable import close, opened

A, B, C = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))


def member(number: int, *urls: str, name: str = "") -> rpc_pb2.Member:
    return rpc_pb2.Member(ID=number, peerURLs=urls, name=name)


CLUSTER = [member(1, A, name="a"), member(2, B, C)]


def test_a_member_is_found_by_its_urls_in_any_order_and_under_any_name() -> None:
    assert assign(CLUSTER, {"x": (A,), "b": (C, B)}, "b").ID == 2
    assert assign(CLUSTER, {"x": ("http://localhost:1",), "b": (B, C)}, "x").ID == 1


@pytest.mark.parametrize(
    ("local", "text"),
    [
        ({"b": (B, C)}, "member count is unequal: the cluster has 2"),
        ({"a": (A,), "b": (B, C), "c": ("http://127.0.0.1:9",)}, "member count is unequal: the cluster has 2"),
        ({"a": (A,), "b": (B,)}, "PeerURLs: no match found for existing member (2, [http://127.0.0.1:2 "),
        ({"a": (A,), "b": ("http://127.0.0.1:9",)}, "PeerURLs: no match found for existing member (2, "),
    ],
)
def test_other_members_are_refused(local: dict[str, tuple[str, ...]], text: str) -> None:
    with pytest.raises(ConfigError, match="error validating peerURLs") as refused:
        assign(CLUSTER, local, "b")
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def _config(peer: str, **settings: str) -> ServerConfig:
    return ServerConfig(
        name="b", data_dir="/nowhere/b", initial_cluster=f"a={peer},b={B}", initial_cluster_state="existing", **settings
    )


def _discover(answer: raft_pb2.MembersResponse | None) -> object:
    async def scenario() -> object:
        server = Server()

        async def members(_data: bytes, _call: object) -> bytes:
            assert answer is not None
            return answer.SerializeToString()

        if answer is not None:
            server.unary_async(MEMBERS.path, members)
        ((_, port),) = await server.listen("127.0.0.1", 0)
        peer = f"http://127.0.0.1:{port}"
        try:
            if answer is not None:
                answer.members[0].peerURLs[:] = [peer]
            return await discover(_config(peer), None)
        finally:
            await server.close(0.0)

    return asyncio.run(scenario())


def test_joining_member_takes_ids_of_the_cluster() -> None:
    answer = raft_pb2.MembersResponse(cluster_id=77, members=[member(1, A, name="a"), member(2, B)])
    origin = _discover(answer)
    assert (origin.cluster_id, origin.member_id, origin.voters) == (77, 2, ())
    assert [each.ID for each in origin.members] == [1, 2]


def test_started_member_must_not_bootstrap_again() -> None:
    answer = raft_pb2.MembersResponse(cluster_id=77, members=[member(1, A), member(2, B, name="b")])
    answer.members[1].clientURLs.append("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="member 2 has already been bootstrapped") as refused:
        _discover(answer)
    assert "raftkvctl member remove 2" in str(refused.value)


def test_no_answer() -> None:
    with pytest.raises(ConfigError, match="could not retrieve cluster information from the given URLs"):
        asyncio.run(discover(_config("http://127.0.0.1:1"), None))


def test_server_without_members_call_is_an_error() -> None:
    with pytest.raises(ConfigError, match="could not retrieve cluster information from the given URLs"):
        _discover(None)


def test_founder_without_reachable_peers_logs_advice(caplog: pytest.LogCaptureFixture) -> None:
    alone = ServerConfig(
        name="b", data_dir="/nowhere/b", initial_cluster=f"b={B}", initial_advertise_peer_urls=(B,), insecure_peers=True
    )
    asyncio.run(origin_of(alone, None))
    assert caplog.messages == []

    config = dataclasses.replace(alone, initial_cluster=f"a=http://127.0.0.1:1,b={B}")
    asyncio.run(origin_of(config, None))
    (line,) = caplog.messages
    assert "no other initial member answers" in line
    assert f"raftkvctl member remove {config.member_id:x}" in line


def test_remains_of_a_first_start_without_a_log_are_removed(tmp_path: Path) -> None:
    """A wrong URL among its flags would else be that of one member more, known here alone."""

    def first_start(urls: str, wal_dir: str) -> list[str]:
        config = ServerConfig(
            name="b", data_dir=str(tmp_path / "data"), wal_dir=wal_dir, initial_cluster=f"a={urls},b={B}",
            initial_advertise_peer_urls=(B,), listen_peer_urls=(B,),
        )  # fmt: skip
        durable = opened(config)
        found = [url for one in Membership(durable.store).list() for url in one.peerURLs]
        assert durable.store.conf_state.voters == tuple(sorted(config.founding_members()))
        close(durable)
        return sorted(found)

    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        first_start("http://127.0.0.1:99", str(tmp_path / "file"))
    assert first_start(A, "") == [A, B]
