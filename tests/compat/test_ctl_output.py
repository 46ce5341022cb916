"""raftkvctl beside etcdctl 3.5.1: the same command lines, the same bytes on standard output, the same exit codes.

Both talk to real etcd 3.5.1. Commands that change nothing ask one server; the scripts that write run on two servers
that are made to have the same ids (same name, token and advertised URLs), so that nothing needs to be replaced before
comparing but the time that a health check took. The error line is compared too; etcdctl repeats it after a wrong
flag, with its usage page on standard output, and logs retries as JSON: these are left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest

from raftkv.pb import rpc_pb2
from tests.cli.runner import Ran, run_ctl
from tests.compat.wire import Wire
from tests.long import long_except
from tests.procs import ETCD_FAST, Cluster, find_tool, wait_for

ONE_IDENTITY = (
    "--initial-cluster=m0=http://127.0.0.1:1",
    "--initial-advertise-peer-urls=http://127.0.0.1:1",
    "--advertise-client-urls=http://127.0.0.1:2",
)
TIMEOUT_S = 90.0
TOOK = re.compile(rb'(took = |"took":"|"Took" : )[0-9.]+(\xc2\xb5|m)?s')


@dataclass(frozen=True)
class Line:
    """One command line and what goes to its standard input."""

    words: tuple[str, ...]
    standard_input: bytes = b""


def line(text: str) -> Line:
    r"""``get a`` or, with input after ``<<<`` (where ``\n`` is a line end), ``txn <<< \nget a\n\n\n``."""
    command, _, given = text.partition("<<<")
    return Line(tuple(shlex.split(command)), given.strip().replace("\\n", "\n").encode())


@pytest.fixture(scope="module")
def same() -> Iterator[Cluster]:
    """One real etcd, for commands that change nothing; it holds a few keys and an alarm-free history."""
    with Cluster(ETCD_FAST) as cluster:
        for words in ("put a 1", "put a 2", "put b two", "put c/1 x", "put c/2 y", "del b"):
            assert run_ctl(["--endpoints", cluster.endpoints[0], *words.split()]).code == 0
        yield cluster


@pytest.fixture(scope="module")
def twins() -> Iterator[tuple[Cluster, Cluster]]:
    """Two real etcds that no client can tell apart."""
    with Cluster(ETCD_FAST, flags=ONE_IDENTITY) as first, Cluster(ETCD_FAST, flags=ONE_IDENTITY) as second:
        yield first, second


def run_etcdctl(words: list[str], standard_input: bytes, environment: dict[str, str] | None = None) -> Ran:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ETCDCTL_")}
    done = subprocess.run(
        [find_tool("etcdctl"), *words],
        input=standard_input,
        capture_output=True,
        timeout=TIMEOUT_S,
        env={**inherited, **(environment or {})},
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr.decode())


def normal(ran: Ran) -> tuple[int, bytes, str]:
    """What is compared: exit code, output, and standard error without causes: JSON of etcdctl, lines of raftkvctl."""
    output = b"" if ran.output.startswith(b"NAME:\n") else TOOK.sub(b"<took>", ran.output)
    errors: list[str] = []
    in_usage = False  # in a txn the usage page goes to standard error
    for text in filter(str.strip, ran.errors.split("\n")):
        in_usage = text == "Usage:" or (in_usage and not text.startswith("Error: "))
        if not in_usage and not text.startswith(("{", "raftkvctl: ")) and text not in errors:
            errors.append(text)
    return ran.code, output, TOOK.sub(b"<took>", "\n".join(errors).encode()).decode()


def leader_id(cluster: Cluster) -> str:
    with Wire(cluster.endpoints) as wire:
        return f"{wire.call('etcdserverpb.Maintenance/Status', rpc_pb2.StatusRequest()).message.leader:x}"


def compare(theirs: str, ours: str, text: str) -> None:
    given = line(text)
    expected = run_etcdctl(["--endpoints", theirs, *given.words], given.standard_input)
    found = run_ctl(["--endpoints", ours, *given.words], given.standard_input)
    assert normal(found) == normal(expected)


READS = [
    *(f"get a -w {form}" for form in ("simple", "fields", "json", "protobuf", "table", "xml")),
    *(f"member list -w {form}" for form in ("simple", "fields", "json", "protobuf", "table")),
    *(f"endpoint status -w {form}" for form in ("simple", "fields", "json", "protobuf", "table")),
    *(f"endpoint hashkv -w {form}" for form in ("simple", "fields", "json", "protobuf", "table")),
    *(f"endpoint health -w {form}" for form in ("simple", "fields", "json", "protobuf")),
    *(f"alarm list -w {form}" for form in ("simple", "fields", "json", "protobuf", "table")),
    "member list -w json --hex",
    "endpoint status --cluster",
    "endpoint --cluster status -w json",
    "endpoint hashkv --cluster",
    "endpoint health --cluster",
    "endpoint hashkv --rev=3",
    "endpoint hashkv --rev=300",
    "member add",
    "member add x",
    "member add x y --peer-urls=http://127.0.0.1:9",
    "member add x --peer-urls=nonsense",
    "member add x --peer-urls=http://127.0.0.1:9/path",
    "member add x --peer-urls=",
    "member remove",
    "member remove 1 2",
    "member remove zz",
    "member remove 12345678123456781",
    "member remove 1234",
    "member update",
    "member update 1234",
    "member update 1 2 --peer-urls=http://127.0.0.1:9",
    "member update zz --peer-urls=http://127.0.0.1:9",
    "member update 1234 --peer-urls=nonsense",
    "member update 1234 --peer-urls=http://127.0.0.1:9",
    "member promote",
    "member promote zz",
    "member promote 1234",
    "member promote <leader>",
    "member remove <leader>",
    "alarm list x",
    "alarm disarm",
    "alarm disarm -w json",
    *(f"defrag -w {form}" for form in ("simple", "fields", "json", "protobuf", "table")),
    "defrag --cluster",
    "defrag --cluster --endpoints 127.0.0.1:1 --dial-timeout=10s --command-timeout=30s",
    *(f"move-leader <leader> -w {form}" for form in ("simple", "fields", "json", "protobuf", "table")),
    "move-leader",
    "move-leader 1 2",
    "move-leader zz",
    "move-leader -- -1",
    "move-leader 12345678123456781",
    "snapshot save",
    "snapshot save a b",
    "move-leader 1",
    "get a --hex",
    "get a --hex=false",
    "get a --hex true",
    "get -w=json a",
    "get a -wjson",
    "get --write-out json a",
    "get",
    "get a zz",
    "get zz a",
    "get nothing",
    "get nothing -w fields",
    "get '' --prefix",
    "get '' --from-key --limit=2 -w json",
    "get c/ --prefix --keys-only",
    "get c/ --prefix --keys-only -w json",
    "get c/ --prefix --print-value-only",
    "get c/ --prefix --order=DESCEND",
    "get c/ --prefix --order=descend --limit 1 -w json",
    "get '' --prefix --sort-by=modify --order=descend -w fields",
    "get '' --prefix --sort-by=version --limit=2",
    "get a --count-only",
    "get a --count-only -w fields",
    "get a --print-value-only -w json",
    "get a --rev=2",
    "get b --rev=4 -w fields",
    "get a --rev=-5",
    "get a --rev=100",
    "get a --limit=-1",
    "get a --consistency=s",
    "get a --consistency=x",
    "get a --order=up",
    "get a --sort-by=name",
    "get a --prefix --from-key",
    "get a --keys-only --count-only",
    "get a b --prefix",
    "get ''",
    "put",
    "put k",
    "put k v --lease=zz",
    "put k v --lease=123",
    "put k v --lease=ffffffffffffffffff",
    "put k v --ignore-value",
    "put k --ignore-value",
    "put k v --ignore-lease --lease=1",
    "put '' x",
    "del",
    "del a b c",
    "del ''",
    "del nothing",
    "del nothing -w fields",
    "compaction",
    "compaction x",
    "compaction 1000",
    "compaction 99999999999999999999",
    "compaction 0x1",
    "txn x",
    "endp hash",
    "endpoint st",
    "get a --nothing",
    "get a -x",
    "get a --rev",
    "get a --rev abc",
    "get a --rev=1.5",
    "get a --hex=maybe",
    "get a --command-timeout=1",
    "get a --command-timeout=0",
    "put a b --command-timeout=0s",
    "put a b --command-timeout=-1s",
    "member list --command-timeout=0s",
    "lease grant 10 --command-timeout=0s",
    "alarm list --command-timeout=0s",
    "endpoint status --command-timeout=0s",
    "get a --dial-timeout=abc",
    "get a --cert ''",
    "get a --user root:x",
    "put k -1",
    "lease grant",
    "lease grant x",
    "lease grant 1 2",
    "lease grant 9999999999999",
    "lease grant 10 -w table",
    "lease revoke",
    "lease revoke zz",
    "lease revoke 123",
    "lease revoke 123 -w json",
    "lease timetolive",
    "lease timetolive 1 2",
    "lease timetolive zz",
    *(f"lease timetolive 1 -w {form}" for form in ("simple", "fields", "json", "protobuf", "table")),
    "lease timetolive 1 --keys",
    *(f"lease keep-alive 1 -w {form}" for form in ("simple", "fields", "json", "protobuf", "table")),
    *(f"lease keep-alive --once 1 -w {form}" for form in ("simple", "json", "table")),
    "lease keep-alive",
    "lease keep-alive zz",
    "lease keep-alive ffffffffffffffffff",
    "watch",
    "watch a b --prefix",
    "watch b a",
    "lock",
    "elect",
    "elect a",
    "make-mirror",
    "check perf --load zz",
    # Numbers, durations and words as Go's flags read them.
    *(f"get a --rev {number}" for number in ("0x3", "010", "1_0", "+3", "0b11", "1e1", "0o7", "1__0", "_1")),
    *(f"get a --command-timeout {time}" for time in ("1m0.5s", "1h1", ".5s", "5.s", "+5s", "1e3s", "5S", "1d")),
    *(f"get a --hex={value}" for value in ("T", "0", "yes", "")),
    *(f"get a -w {form}" for form in ("''", "JSON", "Simple")),
    *(f"get a --{flag} ''" for flag in ("consistency", "order", "sort-by", "rev", "command-timeout")),
    "get a --dial-timeout 0",
    "get a --keepalive-time=-1s",
    "get '' --prefix --limit 0b10 --order=AScend --sort-by=vaLUE",
    "get '' --prefix --print-value-only --hex",
    "get '' --prefix --keys-only --hex",
    "get '' --prefix --count-only --print-value-only -w fields",
    "get a --user :x",
    "get a --password x",
    *(f"put a v --lease={lease}" for lease in ("-1", "0x7b", "7fffffffffffffff", "8000000000000000")),
    "put a --ignore-value --ignore-lease",
    *(f"lease timetolive {lease}" for lease in ("0", "-- -1", "xyz", "''", "1 2", "1 -w json", "1 --keys -w table")),
    *(f"lease revoke {lease}" for lease in ("0", "xyz", "1 -w json")),
    *(f"lease keep-alive {lease}" for lease in ("", "xyz", "1", "1 --once -w json")),
    *(f"compaction {revision}" for revision in ("1_0", "''", "1 2", "-- -5")),
    *(f"endpoint hashkv --rev={revision}" for revision in ("-1", "x")),
    r'txn <<< mod("a") != "1" more words\n\nget a --prefix=true\n\n\n',
    r'txn <<< value("a") = "\x32"\n\nget a --keys-only\n\nget b\n\n',
    r"txn <<< \nget a --count-only\n\n\n",
    r"txn <<< \nget --limit x k\n\n\n",
    r"txn <<< \nwatch a\n\n\n",
    "lock l --ttl x a",
    "move-leader ''",
]


@pytest.mark.parametrize("text", long_except(READS, READS[::9]))
def test_one_server(same, text):
    words = text.replace("<leader>", leader_id(same)) if "<leader>" in text else text
    compare(same.endpoints[0], same.endpoints[0], words)


WRITES = r"""
put a 1
put a 2 --prev-kv
put a 3 --prev-kv -w json
put a 4 --prev-kv -w fields
put a 5 --prev-kv -w protobuf
put a 6 -w table
get a
put b/1 x
put b/2 y
put b/3 z
put -- -k -v
get -- -k
put c <<< two\nlines
get c -w json
get c -w fields
put c <<<
put c --ignore-value --prev-kv
put missing --ignore-value
put c x --ignore-lease
put html '<&>"'
get html -w json
get html -w fields
put é ü
get é -w fields
get é --hex
get --from-key -- -k
get '' --from-key --count-only -w fields
del b/1 --prev-kv
del b/2 b/4 --prev-kv -w fields
put b/1 x
put b/2 y
del b/ --prefix --prev-kv -w json
put b/1 x
del b/1 --prev-kv -w protobuf
put b/1 x
del b/1 -w table
get b/1
compaction 5
get a --rev=3
compaction 6 --physical
compaction 6
compaction 7 -w json
compaction -- -1
get '' --from-key -w json
get '' --from-key
del é --from-key
del '' --prefix
alarm disarm
""".strip().split("\n")

TXNS = r"""
put a 6
put b/1 x
txn <<< value("a") = "6"\n\nput a 7\nget a\n\nget b/1\n\n
txn -w json <<< value("a") = "6"\n\nput a 7\n\nget b/1\ndel b/1 --prev-kv\nput b/9 "v v"\n\n
txn -w fields <<< mod("a") > "1"\nver("a") = "2"\ncreate("a") < "100"\nc("a") != "0"\n\nput "a\x00\n" "v"\nget a\n\n\n
txn -w protobuf <<< \nget a\n\n\n
txn -w table <<< \nget a\n\n\n
txn -i <<< m("zz") = "0"\n\nput zz "1"\n\nget zz\n\n
txn -i <<< val("zz") = "x"\n\n put zz "1"\n\nget zz\nget a\ndel zz --prev-kv\n\n
txn <<< create("a") = "1" junk\n\nget a\n\nget b/9\n\n
txn <<< mod(`a`) > `1`\n\nget a\n\nget b/9\n\n
txn <<< mod("a")   >     "1"\n\nget a\n\nget b/9\n\n
txn <<< mod( "a") >  "1"\n\nget a\n\nget b/9\n\n
txn <<< version("a") > "x"\n\n\n\n
txn <<< value("none") != "x"\n\n\nget a\n\n
txn <<< foo\n\n\n\n
txn <<< foo("a") = "1"\n\n\n\n
txn <<< mod("a") = 1\n\n\n\n
txn <<< mod("a") =\n\n\n\n
txn <<< mod("a")="1"\n\n\n\n
txn <<< mod("a" ) = "1"\n\n\n\n
txn <<< mod("a) = "1"\n\n\n\n
txn <<< mod("\q") = "1"\n\n\n\n
txn <<< mod(a) = "1"\n\n\n\n
txn <<< \nfoo a\n\n\n
txn <<< \nput\n\n\n
txn <<< \nput a\n\n\n
txn <<< \nget a --nothing\n\n\n
txn <<< \nget a --hex\n\n\n
txn <<< \nget a --rev=x\n\n\n
txn <<< \nget --prefix --from-key k\n\n\n
txn <<< \nget k --order=up\n\n\n
txn <<< \nput a 1\nput a 2\n\n\n
txn <<< \ng a\nde a\np a 3\n\n\n
txn <<< \nget a\n\n
txn <<< \nget a
txn <<<
txn <<< \n\n\n
txn -w json <<< \n\n\n
txn <<< \nput k "bad\qescape"\n\n\n
txn <<< \nput -- -k -v\nget -- -k\n\n\n
txn <<< \nput "k \"q\"" "\u00e9\t"\nget "k \"q\""\n\n\n
txn <<< \nput k ""\nget k\n\n\n
txn <<< \nget "" --prefix\n\n\n
txn <<< \nget a b --rev=3\n\n\n
txn <<< \nget a --rev=300\n\n\n
txn <<< \nput k v --lease=77\n\n\n
txn <<< \ndel k --prefix\ndel "" --prefix --prev-kv\n\n\n
get '' --prefix -w json
""".strip().split("\n")


@pytest.mark.long
@pytest.mark.parametrize("script", [WRITES, TXNS], ids=["writes", "txns"])
def test_two_servers_of_one_history(twins, script):
    theirs, ours = (cluster.endpoints[0] for cluster in twins)
    for text in script:
        compare(theirs, ours, text)


MEMBERS = r"""
member add d --learner --peer-urls=http://127.0.0.1:8,http://127.0.0.1:7
member add e --learner --peer-urls=http://127.0.0.1:9
member list
member promote <learner>
member update <learner> --peer-urls=http://127.0.0.1:9,http://127.0.0.1:7 -w FORM
member update <learner> --peer-urls=http://127.0.0.1:6
member list -w FORM
member remove <learner>
member remove <learner>
member add 'two words' --learner --peer-urls=http://127.0.0.1:8 -w FORM
member add e --peer-urls=http://127.0.0.1:8,http://127.0.0.1:4
member remove <learner> -w FORM
""".strip().split("\n")


@pytest.mark.long
@pytest.mark.parametrize("form", ["simple", "fields", "json", "protobuf", "table"])
def test_members(twins, form):
    """Ids hold the second of the command: they are replaced before comparing."""
    learners = [0, 0]

    def outcomes_of(text: str) -> list[tuple[int, bytes, str]]:
        outcomes = []
        for number, (cluster, run) in enumerate(zip(twins, (run_etcdctl, run_ctl), strict=True)):
            words = line(text.replace("<learner>", f"{learners[number]:x}").replace("FORM", form)).words
            ran = run(["--endpoints", cluster.endpoints[0], *words], b"")
            learners[number] = _learner(cluster) or learners[number]
            outcomes.append(_without_id(normal(ran), learners[number]))
        return outcomes

    for text in MEMBERS:
        outcomes = outcomes_of(text)
        # Members are listed in the order of their ids: an id of another second may be on the other side of the first.
        while text.startswith("member add") and outcomes[0][0] == 0 and not _are_on_one_side(twins, learners):
            for cluster, learner in zip(twins, learners, strict=True):
                with Wire(cluster.endpoints) as wire:
                    wire.call("etcdserverpb.Cluster/MemberRemove", rpc_pb2.MemberRemoveRequest(ID=learner))
            _wait_for_the_next_second()
            outcomes = outcomes_of(text)
        assert outcomes[1] == outcomes[0], text
    _wait_for_the_next_second()


def _are_on_one_side(twins: tuple[Cluster, Cluster], learners: list[int]) -> bool:
    first = int(leader_id(twins[0]), 16)
    return (learners[0] > first) == (learners[1] > first)


def _learner(cluster: Cluster) -> int:
    with Wire(cluster.endpoints) as wire:
        listed = wire.call("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest()).message.members
    return next((member.ID for member in listed if member.isLearner), 0)


def _without_id(outcome: tuple[int, bytes, str], member_id: int) -> tuple[int, bytes, str]:
    code, output, errors = outcome
    for form in (f"{member_id:16x}".encode(), f"{member_id:x}".encode(), str(member_id).encode()):
        output = output.replace(form, b"<id>")
    # In protobuf it has nine bytes or ten, which count in the byte before it: the size of the member.
    field = rpc_pb2.Member(ID=member_id).SerializeToString()
    sized = re.compile(b"(.)" + re.escape(field), re.DOTALL)
    output = sized.sub(lambda found: bytes([max(0, found[1][0] - len(field))]) + b"<id>", output)
    return code, output, errors


def test_ids_of_nine_and_ten_bytes_leave_the_same() -> None:
    kinds = []
    for member_id in (1 << 62, 1 << 63):
        answer = rpc_pb2.MemberListResponse(members=[rpc_pb2.Member(ID=member_id, peerURLs=["http://a:1"])])
        kinds.append(_without_id((0, answer.SerializeToString(), ""), member_id))
    assert kinds[0] == kinds[1] == (0, b"\x12\x0c<id>\x1a\nhttp://a:1", "")


def _wait_for_the_next_second() -> None:
    """An id that was removed in this second would be made again."""
    second = int(time.time())
    wait_for(lambda: int(time.time()) > second, "the next second")


def test_leases_in_hexadecimal(same):
    endpoint = same.endpoints[0]
    with grpc.insecure_channel(endpoint) as channel:
        grant = channel.unary_unary("/etcdserverpb.Lease/LeaseGrant")
        grant(rpc_pb2.LeaseGrantRequest(ID=0x7B, TTL=600).SerializeToString())
        revoke = channel.unary_unary("/etcdserverpb.Lease/LeaseRevoke")
        for text in ("put leased x --lease=7b", "get leased -w fields", "get leased -w json"):
            assert run_ctl(["--endpoints", endpoint, *text.split()]).code == 0
        compare(endpoint, endpoint, "get leased -w fields")
        compare(endpoint, endpoint, "get leased -w json")
        revoke(rpc_pb2.LeaseRevokeRequest(ID=0x7B).SerializeToString())


def test_large_requests(same):
    """Over the server's limit of 1.5 MiB, and over the client's of 2 MiB, where raftkvctl adds what to do."""
    endpoint = same.endpoints[0]
    for size, advice in ((1_600_000, ""), (2_200_000, ": split the request, or raise --max-request-bytes")):
        words, value = ["--endpoints", endpoint, "put", "k"], b"x" * size
        code, output, errors = normal(run_ctl(words, value))
        expected = normal(run_etcdctl(words, value))
        assert (code, output) == expected[:2]
        assert errors.startswith(expected[2].rstrip() + advice)


def test_alarms(twins):
    theirs, ours = (cluster.endpoints[0] for cluster in twins)
    for endpoint in (theirs, ours):
        _raise_alarm(endpoint)
    for form in ("simple", "fields", "json", "protobuf", "table"):
        compare(theirs, ours, f"alarm list -w {form}")
        compare(theirs, theirs, f"endpoint status -w {form}")
    for form in ("simple", "fields", "json", "protobuf"):  # the width of a table follows the time taken
        compare(theirs, theirs, f"endpoint health -w {form}")
    compare(theirs, ours, "put k v")
    compare(theirs, ours, "alarm disarm")
    compare(theirs, ours, "alarm list")


def _raise_alarm(endpoint: str) -> None:
    with grpc.insecure_channel(endpoint) as channel:
        request = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc_pb2.NOSPACE)
        channel.unary_unary("/etcdserverpb.Maintenance/Alarm")(request.SerializeToString())


UNREACHABLE = [
    "get a", "put a b", "member list", "endpoint status", "endpoint status -w json", "endpoint hashkv -w fields",
    "endpoint health", "endpoint health -w json", "alarm list", "endpoint status --cluster",
]  # fmt: skip


REFUSED = "raftkvctl: no answer from 127.0.0.1:{}: connect: connection refused"


@pytest.mark.long
@pytest.mark.parametrize("text", UNREACHABLE)
def test_no_listener(text):
    words = ["--endpoints", "127.0.0.1:1", *text.split(), "--command-timeout=300ms"]
    found = run_ctl(words)
    assert found.errors.count(REFUSED.format(1)) == 1, "the cause is named"
    assert normal(found) == normal(run_etcdctl(words, b""))


@pytest.mark.long
def test_every_endpoint_that_was_tried_is_named_behind_the_line_of_etcdctl():
    found = run_ctl(["--endpoints=127.0.0.1:1,127.0.0.1:2", "get", "a", "--command-timeout=2s"])
    first = "Error: context deadline exceeded"
    assert found.errors.splitlines() == [first, REFUSED.format(1), REFUSED.format(2)]


@pytest.mark.parametrize(
    "text", ["put k v w", "get a b c", "member list x", "endpoint health x", "defrag x", "lease list x"]
)
def test_words_that_etcdctl_drops_are_refused(same, text):
    words = ["--endpoints", same.endpoints[0], *text.split()]
    assert run_etcdctl(words, b"").code == 0
    found = run_ctl(words)
    assert (found.code, found.output) == (128, b"")
    assert found.errors.startswith('Error: unexpected argument "')


@pytest.mark.parametrize(
    "environment", [{}, {"ETCDCTL_WRITE_OUT": "json", "ETCDCTL_NOTHING": "x"}], ids=["plain", "set"]
)
def test_snapshot_status(same, tmp_path, environment):
    """What counts as a key differs between versions of etcd: 3.6, and raftkv, count no leases and users."""
    path = str(tmp_path / "file")
    assert run_ctl(["--endpoints", same.endpoints[0], "snapshot", "save", path]).code == 0
    keys = [
        json.loads(run(["snapshot", "status", path, "-w", "json"], b"").output)["totalKey"]
        for run in (run_etcdctl, run_ctl)
    ]
    for form in ("", "-w simple", "-w fields", "-w json", "-w table", "-w protobuf", "-w xml"):
        words = ["snapshot", "status", path, *form.split()]
        expected, found = run_etcdctl(words, b"", environment), run_ctl(words, b"", environment)
        number = re.compile(rb'(^\w+, \d+, |"totalKey":|"Keys" : |\| +\d+ \| +)%d\b' % keys[0])
        counted = (b"%d" % keys[1]).rjust(len(str(keys[0])) if form == "-w table" else 0)
        output = number.sub(lambda given, counted=counted: given[1] + counted, expected.output)
        assert (found.code, found.output) == (expected.code, output)
        assert found.errors == expected.errors.removeprefix("Deprecated: Use `etcdutl snapshot status` instead.\n\n")


ENVIRONMENTS = [
    ("get a", {"ETCDCTL_WRITE_OUT": "json"}),
    ("get a --write-out=json", {"ETCDCTL_WRITE_OUT": "fields"}),
    ("get a", {"ETCDCTL_HEX": "true"}),
    ("get a", {"ETCDCTL_HEX": "maybe"}),
    ("get a", {"ETCDCTL_WRITE_OUT": ""}),
    ("get a", {"ETCDCTL_NOTHING": "x"}),
    ("get a", {"ETCDCTL_REV": "2"}),
    ("get a", {"ETCDCTL_API": "3"}),
    ("endpoint status", {"ETCDCTL_CLUSTER": "true"}),
    ("get", {"ETCDCTL_WRITE_OUT": "json"}),
]


@pytest.mark.parametrize(("text", "environment"), ENVIRONMENTS)
def test_environment(same, text, environment):
    words = text.split()
    variables = {"ETCDCTL_ENDPOINTS": same.endpoints[0], **environment}
    expected = normal(run_etcdctl(words, b"", variables))
    found = normal(run_ctl(words, b"", variables))
    assert found[:2] == expected[:2]
