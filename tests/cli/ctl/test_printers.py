"""What cannot be compared with etcdctl 3.5.1: the columns of 3.6, and tables of times."""

from __future__ import annotations

import json

import pytest

from raftkv.cli.printer import EndpointAnswer, EndpointHealth, encode, make_printer
from raftkv.cli.program import BAD_FEATURE, CommandError
from raftkv.pb import rpc_pb2

STATUS = rpc_pb2.StatusResponse(
    header=rpc_pb2.ResponseHeader(cluster_id=1, member_id=0xABC, revision=7, raft_term=2),
    version="3.6.14",
    dbSize=100_000,
    leader=0xABC,
    raftIndex=9,
    raftTerm=2,
    raftAppliedIndex=9,
    dbSizeInUse=25_000,
    storageVersion="3.6.0",
    dbSizeQuota=2**31,
)
SIMPLE = "http://a, abc, 3.6.14, 3.6.0, 100 kB, 25 kB, 75%, 2.1 GB, true, false, 2, 9, 9, , , false\n"
FIELDS = """\
"ClusterID" : 1
"MemberID" : 2748
"Revision" : 7
"RaftTerm" : 2
"Version" : "3.6.14"
"StorageVersion" : "3.6.0"
"DBSize" : 100000
"DBSizeInUse" : 25000
"DBSizeQuota" : 2147483648
"Leader" : 2748
"IsLearner" : false
"RaftIndex" : 9
"RaftAppliedIndex" : 9
"Errors" : []
"Endpoint" : "http://a"
"DowngradeTargetVersion" : ""
"DowngradeEnabled" : false

"""


@pytest.mark.parametrize(("form", "expected"), [("simple", SIMPLE), ("fields", FIELDS)])
def test_status_of_a_member_of_3_6(capsys, form, expected):
    make_printer(form).show("endpoint_status", [EndpointAnswer("http://a", STATUS)])
    assert capsys.readouterr().out == expected


def test_hashes_of_a_member_of_3_6(capsys):
    answer = rpc_pb2.HashKVResponse(hash=5, hash_revision=7)
    make_printer("simple").show("endpoint_hashkv", [EndpointAnswer("http://a", answer)])
    assert capsys.readouterr().out == "http://a, 5, 7\n"


def test_changes_of_members_in_hexadecimal_as_in_3_7(capsys):
    member = rpc_pb2.Member(ID=0xDEF, peerURLs=["http://b"], isLearner=True)
    answer = rpc_pb2.MemberAddResponse(header=STATUS.header, member=member, members=[member])
    make_printer("json", hexadecimal=True).show("member_add", answer, "b", "http://b")
    shown = {"ID": "def", "peerURLs": ["http://b"], "isLearner": True}
    header = {"cluster_id": "1", "member_id": "abc", "revision": 7, "raft_term": 2}
    assert json.loads(capsys.readouterr().out) == {"header": header, "member": shown, "members": [shown]}


HEALTH_TABLE = """\
+----------+--------+-----------+---------------------------+
| ENDPOINT | HEALTH |   TOOK    |           ERROR           |
+----------+--------+-----------+---------------------------+
| http://a |   true | 1.25025ms |                           |
| http://b |  false |        5s | context deadline exceeded |
+----------+--------+-----------+---------------------------+
"""


def test_health_as_a_table(capsys):
    rows = [
        EndpointHealth("http://a", True, "1.25025ms"),
        EndpointHealth("http://b", False, "5s", "context deadline exceeded"),
    ]
    make_printer("table").show("endpoint_health", rows)
    assert capsys.readouterr().out == HEALTH_TABLE


@pytest.mark.parametrize("form", ["table"])
def test_commands_that_a_format_lacks(form):
    with pytest.raises(CommandError, match=r"^table not supported as output format$") as raised:
        make_printer(form).show("put", rpc_pb2.PutResponse())
    assert raised.value.code == BAD_FEATURE


def test_json_is_read_back_and_escaped_as_go_does():
    value = ['a\\b\b\f<é\u2028\n\x01\x7f&>"/']
    assert json.loads(encode(value)) == value
    assert encode(value) == '["a\\\\b\\u0008\\u000c\\u003cé\\u2028\\n\\u0001\x7f\\u0026\\u003e\\"/"]'
