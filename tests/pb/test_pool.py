"""The wire contract in its private pool: beside other etcd clients, and on old and new protobuf runtimes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.pb.services import SERVICES

ROOT = Path(__file__).resolve().parents[2]

# What another client's generated module does at import: it registers its file in the process-wide pool.
FOREIGN = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
file = descriptor_pb2.FileDescriptorProto(name="kv.proto", package="mvccpb", syntax="proto3")
message = file.message_type.add(name="KeyValue")
message.field.add(name="key", number=1, type=12, label=1)
descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
foreign = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName("mvccpb.KeyValue"))
"""
OURS = "from raftkv.pb import kv_pb2"
CHECK = """
data = kv_pb2.KeyValue(key=b"k", value=b"v").SerializeToString()
assert foreign.FromString(data).key == b"k"
assert kv_pb2.KeyValue.FromString(data).value == b"v"
assert foreign is not kv_pb2.KeyValue
"""


def _run(source: str, extra_path: Path | None = None) -> None:
    paths = [str(path) for path in (extra_path, ROOT) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", [(FOREIGN, OURS), (OURS, FOREIGN)], ids=["after", "before"])
def test_another_clients_messages_live_in_the_same_process(order: tuple[str, str]) -> None:
    _run("\n".join((*order, CHECK)))


RUNTIME = """
import google.protobuf
from raftkv.pb import admin_pb2, auth_pb2, election_pb2, health_pb2, kv_pb2, lock_pb2, raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
assert google.protobuf.__version__.startswith(VERSION), google.protobuf.__version__
request = rpc_pb2.TxnRequest(
    compare=[rpc_pb2.Compare(key=b"k", target=rpc_pb2.Compare.VALUE, value=b"v")],
    success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"k", value=b"w"))],
)
back = rpc_pb2.TxnRequest.FromString(request.SerializeToString())
assert back == request
assert back.success[0].WhichOneof("request") == "request_put"
assert rpc_pb2.AlarmType.Name(rpc_pb2.NOSPACE) == "NOSPACE"
assert sum(len(methods) for methods in SERVICES.values()) == 69
"""


@pytest.mark.parametrize("version", ["4.25", "7."])
def test_the_messages_work_on_protobuf(version: str) -> None:
    # `make test` puts the old runtime beside the environment's own, which is the newest.
    old = Path(sys.prefix) / "protobuf-4.25"
    assert old.is_dir(), f"{old} is missing: run `make test`"
    _run(f"VERSION = {version!r}\n{RUNTIME}", old if version == "4.25" else None)


def test_field_numbers_are_those_of_etcd() -> None:
    compare = rpc_pb2.Compare.DESCRIPTOR.fields_by_name
    assert (compare["range_end"].number, compare["lease"].number) == (64, 8)
    assert kv_pb2.KeyValue(key=b"a", lease=1).SerializeToString() == b"\x0a\x01a\x30\x01"
    assert [field.number for field in rpc_pb2.WatchResponse.DESCRIPTOR.fields] == [1, 2, 3, 4, 5, 6, 7, 11]


def test_services_have_etcds_paths_and_kinds() -> None:
    assert SERVICES["etcdserverpb.KV"]["Put"].path == "/etcdserverpb.KV/Put"
    watch = SERVICES["etcdserverpb.Watch"]["Watch"]
    assert watch.client_streaming
    assert watch.server_streaming
    assert SERVICES["etcdserverpb.Maintenance"]["Snapshot"].server_streaming
    assert not SERVICES["etcdserverpb.Maintenance"]["Snapshot"].client_streaming
