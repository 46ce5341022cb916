"""``raftkv join`` with lost, late and temporarily refusing answers of the cluster."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from raftkv.cli import join
from raftkv.config import ServerConfig
from raftkv.errors import LeaderChangedError, PeerURLExistsError, RequestTimeoutError, StatusError, UnhealthyError
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.server import Server
from raftkv.rpc.status import RpcError
from tests.procs import free_port

CLUSTER = SERVICES["etcdserverpb.Cluster"]
ADDED, UNANSWERED, ADDED_UNANSWERED, ADDED_LATE = "added", "unanswered", "added, unanswered", "added late"
Answer = StatusError | str
OTHER = "http://127.0.0.1:1"


class Members:
    """A one-member cluster with scripted answers to MemberAdd.

    Arguments:
        answers: one for each MemberAdd.
    """

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.members = [rpc_pb2.Member(ID=1, name="a", peerURLs=[OTHER])]

    async def list(self, _data: bytes, _call: object) -> bytes:
        return rpc_pb2.MemberListResponse(members=self.members).SerializeToString()

    async def add(self, data: bytes, _call: object) -> bytes:
        request = rpc_pb2.MemberAddRequest.FromString(data)
        answer = self.answers.pop(0)
        if answer in (ADDED, ADDED_UNANSWERED, ADDED_LATE):
            self.members.append(rpc_pb2.Member(ID=2, peerURLs=request.peerURLs, isLearner=request.isLearner))
        if answer == ADDED_LATE:  # the attempt before this one
            answer = PeerURLExistsError()
        if isinstance(answer, StatusError):
            raise RpcError(answer.code, answer.text)
        if answer != ADDED:
            await asyncio.Event().wait()
        return rpc_pb2.MemberAddResponse(member=self.members[-1], members=self.members).SerializeToString()


def _added(cluster: Members, directory: Path) -> ServerConfig:
    """Join a cluster; return the configuration that the new member then starts with."""

    async def scenario() -> ServerConfig:
        server = Server()
        server.unary_async(CLUSTER["MemberList"].path, cluster.list)
        server.unary_async(CLUSTER["MemberAdd"].path, cluster.add)
        ((_, port),) = await server.listen("127.0.0.1", 0)
        peer, client = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        words = [f"http://127.0.0.1:{port}", "--name", "b", "--data-dir", str(directory / "b")]
        words += ["--listen-peer-urls", peer, "--listen-client-urls", client]
        try:
            return await join.added(join.read_plan(words, {}))
        finally:
            await server.close(0.0)

    return asyncio.run(scenario())


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "CALL_TIMEOUT_S", 1.5)
    monkeypatch.setattr(join, "PAUSE_S", 0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    "trouble",
    [UnhealthyError(), RequestTimeoutError(), LeaderChangedError(), UNANSWERED],
    ids=["not connected yet", "timed out", "another leader", "no answer"],
)
def test_join_retries_while_cluster_has_trouble(trouble: Answer, tmp_path: Path) -> None:
    cluster = Members(trouble, ADDED)
    assert [word.split("=")[0] for word in _added(cluster, tmp_path).initial_cluster.split(",")] == ["1", "b"]
    assert [member.isLearner for member in cluster.members] == [False, True]


@pytest.mark.long
@pytest.mark.parametrize("trouble", [ADDED_UNANSWERED, ADDED_LATE], ids=["before the list", "after the list"])
def test_a_member_that_was_added_without_an_answer_is_not_added_again(trouble, tmp_path, capsys):
    cluster = Members(trouble)
    assert [word.split("=")[0] for word in _added(cluster, tmp_path).initial_cluster.split(",")] == ["1", "b"]
    assert len(cluster.members) == 2
    assert "an earlier attempt had added this member already: 2" in capsys.readouterr().out


def test_advertised_urls_are_the_listened_ones_except_for_wildcards(tmp_path: Path) -> None:
    """An IPv6 address lost its brackets, and a socket file got a port."""
    words = ["http://127.0.0.1:1", "--data-dir", str(tmp_path), "--insecure-peers"]
    words += ["--listen-peer-urls", "http://[fd00::5]:3380"]
    words += ["--listen-client-urls", "http://[::]:3379,unix:///run/raftkv.sock"]
    config = join.read_plan(words, {}).config
    assert config.initial_advertise_peer_urls == ("http://[fd00::5]:3380",)
    assert config.advertise_client_urls == ("http://127.0.0.1:3379", "unix:///run/raftkv.sock")


def test_member_listens_on_the_link_local_address_that_reaches_the_cluster(tmp_path, monkeypatch):
    """The percent sign before the zone is escaped in a URL, and was not."""

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET6, 2, 17, "", ("fe80::1", 2379, 0, 2))])
    probe = MagicMock()
    probe.return_value.__enter__.return_value.getsockname.return_value = ("fe80::2%eth0", 1, 0, 2)
    monkeypatch.setattr(socket, "socket", probe)
    words = ["http://[fe80::1%25eth0]:2379", "--data-dir", str(tmp_path), "--insecure-peers"]
    config = join.read_plan(words, {}).config
    assert config.initial_advertise_peer_urls == config.listen_peer_urls == ("http://[fe80::2%25eth0]:2380",)


def test_a_peer_url_of_another_member_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(PeerURLExistsError):
        _added(Members(PeerURLExistsError()), tmp_path)


def test_join_gives_up_on_silent_cluster_after_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "HEALTH_S", 0.5)
    with pytest.raises(UnhealthyError):
        _added(Members(*[UnhealthyError() for _ in range(1000)]), tmp_path)
