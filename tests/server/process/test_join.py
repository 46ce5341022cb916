"""``raftkv join URL``: from an empty directory to a voter, and continued after any interruption."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from raftkv.pb import rpc_pb2
from tests import forked
from tests.compat.wire import Wire
from tests.procs import RAFTKV, ROOT, Cluster, free_port, wait_for
from tests.server.process.process import RANGE, must_put, run_to_end, value_of

LIST = "etcdserverpb.Cluster/MemberList"
ADD = "etcdserverpb.Cluster/MemberAdd"


class Joiner:
    """A machine on which ``raftkv join`` is run, again and again."""

    def __init__(self, cluster: Cluster) -> None:
        self.client, self.peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.directory = cluster.directory
        self.words = [
            *("join", f"http://{cluster.endpoints[0]}", "--name", "joiner"),
            *("--data-dir", str(self.directory / "joiner.data")),
            *("--listen-peer-urls", f"http://{self.peer}", "--listen-client-urls", f"http://{self.client}"),
        ]
        self.output = self.directory / "joiner.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, failpoints: str = "") -> None:
        """Run it in the background."""
        environment = {**os.environ, "RAFTKV_FAILPOINTS": failpoints}
        with self.output.open("ab") as output:
            words = [*RAFTKV.command, *self.words, *flags]
            self.process = forked.start(words, cwd=ROOT, environment=environment, log=output)

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def said(self, text: str) -> bool:
        """Whether it has printed something."""
        return text in self.output.read_text()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV) as cluster:
        yield cluster


@pytest.fixture
def joiner(cluster: Cluster) -> Iterator[Joiner]:
    joiner = Joiner(cluster)
    yield joiner
    joiner.kill()


def members(wire: Wire) -> list[tuple[str, bool]]:
    listed = wire.call(LIST, rpc_pb2.MemberListRequest(linearizable=True)).message.members
    return sorted((member.name, member.isLearner) for member in listed)


@pytest.mark.long
def test_one_argument_makes_a_voter(cluster: Cluster, joiner: Joiner) -> None:
    with Wire([cluster.endpoints[0], joiner.client]) as wire:
        must_put(wire, "k", b"before")
        joiner.start()
        wait_for(lambda: joiner.said("votes now, one of 2 voters"), "the joiner to vote")
        assert members(wire) == [("joiner", False), ("m0", False)]
        wait_for(lambda: value_of(wire, "k", member=1) == b"before", "the data")
        must_put(wire, "k", b"after", member=1)
        joiner.kill()
        joiner.start()
        wait_for(lambda: wire.call(RANGE, rpc_pb2.RangeRequest(key=b"k")).code == "OK", "the quorum")
        assert members(wire) == [("joiner", False), ("m0", False)], "the same command starts it again"


@pytest.mark.long
def test_a_url_that_leads_to_a_learner_is_as_good() -> None:
    """Resolves as a name for all members does, which may lead to the very one that joins."""
    with Cluster(RAFTKV.with_flags("--experimental-max-learners=2")) as cluster, ExitStack() as running:
        first, second = Joiner(cluster), Joiner(cluster)
        for each in (first, second):
            running.callback(each.kill)
        second.words[1] = f"http://{first.client}"
        second.words = [word.replace("joiner", "second") for word in second.words]
        second.output = cluster.directory / "second.log"
        first.start("--learner")
        wait_for(lambda: first.said("ready to serve client requests"), "the learner")
        second.start()
        wait_for(lambda: second.said("votes now, one of 2 voters") or second.said("join: http"), "the second one")
        assert second.said("votes now"), second.output.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Certificates as `raftkv certs` makes them, of two members and a client."""
    tls = tmp_path / "tls"
    assert run_to_end("certs", str(tls), "m0=127.0.0.1", "joiner=127.0.0.1", "--client", "root").status == 0
    return tls


def _files(folder: Path) -> list[str]:
    kinds = {"cert-file": "server.crt", "key-file": "server.key", "trusted-ca-file": "ca.crt"}
    peers = {"peer-cert-file": "peer.crt", "peer-key-file": "peer.key", "peer-trusted-ca-file": "peer-ca.crt"}
    return [f"--{flag}={folder / file}" for flag, file in {**kinds, **peers}.items()]


@pytest.mark.long
def test_under_tls_a_client_s_certificate_opens_the_way(folder: Path, tmp_path: Path) -> None:
    client, peer, own_client, own_peer = (f"https://127.0.0.1:{free_port()}" for _ in range(4))
    founder = [*RAFTKV.command, "--name=m0", f"--data-dir={tmp_path / 'm0'}", f"--initial-cluster=m0={peer}"]
    urls = [f"--listen-client-urls={client}", f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}"]
    command = [*founder, *urls, f"--initial-advertise-peer-urls={peer}", *_files(folder / "members/m0")]
    words = [*RAFTKV.command, "join", client, "--name=joiner", f"--data-dir={tmp_path / 'joiner'}"]
    words += [
        f"--listen-client-urls={own_client}",
        f"--listen-peer-urls={own_peer}",
        *_files(folder / "members/joiner"),
    ]
    shown = {"RAFTKV_CERT": str(folder / "clients/root.crt"), "RAFTKV_KEY": str(folder / "clients/root.key")}
    log = tmp_path / "log"
    with log.open("wb") as output, ExitStack() as running:

        def start(words: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
            process = forked.start(words, cwd=ROOT, environment={**os.environ, **variables}, log=output)
            running.callback(process.wait)
            running.callback(process.kill)
            return process

        start(command, {})
        wait_for(lambda: "ready to serve" in log.read_text(), "the founder")
        assert start(words, {}).wait(90) == 1
        assert "; name a client's certificate: RAFTKV_CERT, RAFTKV_KEY\n" in log.read_text()
        start(words, shown)
        wait_for(lambda: "votes now, one of 2 voters" in log.read_text(), "the joiner to vote")


STEPS = ["walBeforeCutRename", "snapshotAfterRename", "raftAfterSaveSnap", "beforeCommit"]


@pytest.mark.long
@pytest.mark.parametrize("failpoint", STEPS)
def test_the_same_command_continues_after_any_interruption(cluster: Cluster, joiner: Joiner, failpoint: str) -> None:
    with Wire([cluster.endpoints[0]]) as wire:
        must_put(wire, "k", b"v")
        joiner.start(failpoints=f"{failpoint}=panic")
        assert joiner.process is not None
        assert joiner.process.wait(90) == 66, joiner.output.read_text()
        joiner.start()
        wait_for(lambda: joiner.said("votes now, one of 2 voters"), "the joiner to vote")
        assert members(wire) == [("joiner", False), ("m0", False)]


def test_one_that_was_added_and_never_started_is_found(cluster: Cluster, joiner: Joiner) -> None:
    with Wire([cluster.endpoints[0]]) as wire:
        added = wire.call(ADD, rpc_pb2.MemberAddRequest(peerURLs=[f"http://{joiner.peer}"], isLearner=True))
        assert added.code == "OK", added
        joiner.start("--learner")
        wait_for(lambda: ("joiner", True) in members(wire), "the joiner to start")
        assert joiner.said(f"an earlier attempt had added this member already: {added.message.member.ID:x}")
        with Wire([joiner.client]) as replica:
            bound = (("raftkv-max-staleness-ms", "60000"),)
            wait_for(
                lambda: replica.call(RANGE, rpc_pb2.RangeRequest(key=b"k"), metadata=bound).code == "OK",
                "the learner to serve reads with a bound",
            )
            answer = replica.call(RANGE, rpc_pb2.RangeRequest(key=b"k"))
            assert (answer.code, answer.text) == ("FAILED_PRECONDITION", "etcdserver: rpc not supported for learner")


@pytest.mark.long
def test_data_of_a_member_that_was_removed_are_an_error(cluster: Cluster, joiner: Joiner) -> None:
    with Wire([cluster.endpoints[0]]) as wire:
        joiner.start("--learner")
        wait_for(lambda: ("joiner", True) in members(wire), "the joiner to start")
        joiner.kill()
        listed = wire.call(LIST, rpc_pb2.MemberListRequest()).message.members
        (own,) = [member.ID for member in listed if member.name == "joiner"]
        assert wire.call("etcdserverpb.Cluster/MemberRemove", rpc_pb2.MemberRemoveRequest(ID=own)).code == "OK"
    for _ in range(2):  # it learns that from the others, and knows it from then on
        ended = run_to_end(*joiner.words)
        assert ended.status == 1, ended.output
        assert ended.output.endswith("joiner.data must be removed before the host can join again, as a new member\n")


def test_data_of_another_cluster_are_not_started(cluster: Cluster, joiner: Joiner) -> None:
    """A host that comes from another cluster would otherwise go on in that one, and look as if it had joined."""
    with Cluster(RAFTKV) as other:
        with Wire([other.endpoints[0]]) as wire:
            theirs = wire.call(LIST, rpc_pb2.MemberListRequest()).message.header.cluster_id
        other.members[0].kill()
        data = str(other.members[0].data_dir)
        ended = run_to_end(*joiner.words[:4], "--data-dir", data, *joiner.words[6:])
        assert (ended.status, ended.output.count("\n")) == (1, 1), ended.output
        said = f"join: {data} has a member of cluster {theirs:x}, and http://{cluster.endpoints[0]} is of cluster "
        assert said in ended.output
        assert ended.output.endswith(": name another --data-dir, or move this one away\n")
        other.members[0].restart()


@pytest.mark.long
def test_refused_join_is_one_line_and_changes_nothing(cluster: Cluster, joiner: Joiner, tmp_path: Path) -> None:
    (name, client), (peer_flag, peer) = ("--listen-client-urls", joiner.client), ("--listen-peer-urls", joiner.peer)
    common = ["--data-dir", str(tmp_path / "data"), name, f"http://{client}"]
    url = f"http://{cluster.endpoints[0]}"
    taken = f"http://127.0.0.1:{cluster.members[0].peer_port}"
    silent = f"http://127.0.0.1:{free_port()}"
    for words, line in (
        (["--name", "x"], "join: the URL of a member comes first: raftkv join http://10.0.0.1:2379"),
        ([silent, *common, peer_flag, f"http://{peer}"], f"join: {silent}: "),
        ([url, *common, peer_flag, f"http://{client}"], f"join: cannot listen on http://{client}: Address already in"),
        ([url, *common, peer_flag, url], f"join: cannot listen on {url}: Address already in use"),
        ([url, *common, peer_flag, taken], "has run with this peer URL, and its data is not in"),
        ([url, "--initial-cluster", "a=http://1.2.3.4:1"], "--initial-cluster is not for a member that joins"),
        (["ftp://x"], "join: endpoint 'ftp://x' is not host:port, http://, https:// or unix://"),
    ):
        ended = run_to_end("join", *words)
        assert line in ended.output.splitlines()[-1], words
        assert ended.status in (1, 2)
        assert "Traceback" not in ended.output
    with Wire([cluster.endpoints[0]]) as wire:
        assert members(wire) == [("m0", False)]
