"""Stored values: records of the store, of runs, checkpoints and datasets; and what a hostile server answers."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import zlib
from collections.abc import Iterator
from random import Random

from raftkv.client.library import Client as Library
from raftkv.client.library import open_scope
from raftkv.client.records import Record, RecordError
from raftkv.client.rpc.core import Client as Core
from raftkv.dataset import codec
from raftkv.dataset.errors import ChunkCorrupted
from raftkv.errors import CorruptionError, InvariantError, RaftKVError, StorageError
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.storage import schema
from raftkv.storage.key_value import KeyValueView, encode
from raftkv.storage.revision import describe, from_key, is_well_formed, seal, to_key, unseal
from raftkv.training import records as training
from tests.apply.arbitrary import payload
from tests.apply.machine import Machine
from tests.client.fakes import FakeCluster
from tests.fuzz.target import Target
from tests.storage.memory import MemoryBackend


def _subclasses(kind: type[Record]) -> Iterator[type[Record]]:
    for child in sorted(kind.__subclasses__(), key=lambda one: one.__qualname__):
        yield child
        yield from _subclasses(child)


_ALL = (kind for kind in _subclasses(Record) if kind.NAME != "?")
KINDS = [kind for kind in _ALL if getattr(sys.modules[kind.__module__], kind.__name__) is kind]
"""Without the classes that ``dataclass(slots=True)`` has replaced."""


def _record(data: bytes) -> None:
    """Input: which kind of record (one byte), then its JSON; what is taken is written and read again as it was."""
    kind = KINDS[(data[0] if data else 0) % len(KINDS)]
    record = kind.decode(data[1:])
    again = kind.decode(record.encode())
    assert again == record or "nan" in repr(record)
    repr(record)


def _records() -> list[bytes]:
    names = {
        "int": b"1", "float": b"0.5", "str": b'"x"', "bool": b"true",
        "Mapping[str, str]": b'{"a":"b"}', "Mapping[str, float]": b'{"a":"NaN"}', "Mapping[str, Any]": b"{}",
    }  # fmt: skip
    found = []
    for number, kind in enumerate(KINDS):
        from raftkv.client.records import _layout

        fields = [
            b'"%s":%s' % (name.encode(), names.get(annotation, b"[]")) for _, name, annotation, *_ in _layout(kind)
        ]
        found.append(bytes((number,)) + b"{" + b",".join(fields) + b"}")
    found.append(bytes((KINDS.index(training.Fault),)) + b"{}")
    return found


def _blob(data: bytes) -> None:
    """Input: what is stored under its own digest, as another publisher may."""
    digest = hashlib.sha256(data).hexdigest()
    raw = codec.unseal(digest, data)
    (codec.decode_node if raw[:1] == b"N" else codec.decode_chunk)(digest, raw)


def _raw(data: bytes) -> None:
    """Input: a chunk or node as it is after unpacking."""
    digest = "0" * 64
    found = (codec.decode_chunk if data[:1] == b"C" else codec.decode_node)(digest, data)
    if isinstance(found, codec.Chunk):
        assert len(list(found)) == len(found)


def _chunks() -> list[bytes]:
    from raftkv.dataset.entry import Entry

    columns = codec.Columns()
    for number in range(3):
        columns.add(Entry(f"train/{number}.jpg", 10 + number, "a.tar", 512 * number, bytes(32)))
    index = codec.Node(1, (codec.Child("0" * 64, "train/0.jpg", 3, 33), codec.Child("1" * 64, "train/9.jpg", 1, 3)))
    return [columns.encode(), index.encode()]


def _key_value(data: bytes) -> None:
    """Input: a revision key of 17 bytes, then a KeyValue in our form; read, sealed and read again."""
    key, value = data[:17], data[17:]
    if is_well_formed(key):
        from_key(key)
        describe(key)
        assert unseal(key, seal(key, value)) == value
    view = KeyValueView(value)
    parsed = kv_pb2.KeyValue.FromString(
        encode(view.key, view.create_revision, view.mod_revision, view.version, view.value)
    )
    assert (parsed.key, parsed.value) == (view.key, view.value)


def _stored(data: bytes) -> None:
    """Input: rows of a database whose records of the key space have right checksums; opened as a member opens it."""
    from tests.fuzz.targets.snapshots import _unpack

    backend = MemoryBackend()
    for bucket, key, value in _unpack(data):
        backend.buckets[bucket][key] = seal(key, value) if bucket == schema.KEY else value
    machine = Machine(backend)
    machine.store.range(b"\0", b"\0")
    machine.membership.list()
    machine.store.close()


def _databases() -> list[bytes]:
    from tests.fuzz.targets.snapshots import _pack, _rows

    return [_pack([(b, k, unseal(k, v) if b == schema.KEY else v) for b, k, v in _rows()])]


class _Hostile:
    """A client library whose every answer is what the input says; each call returns, or fails as one of its errors."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def __call__(self, data: bytes) -> None:
        self._loop.run_until_complete(self._call(data[0] if data else 0, data[1:]))

    def close(self) -> None:
        """Close the loop."""
        self._loop.close()

    async def _call(self, which: int, answer: bytes) -> None:
        core = Core("m", open_transport=FakeCluster(m=[answer]).open)
        async with core, open_scope(core, 0.2) as scope:
            kv = Library(scope)
            calls = (
                lambda: kv.get("k"),
                lambda: kv.put("k", "v", prev_kv=True),
                lambda: kv.range("k", prefix=True),
                lambda: kv.delete("k", prev_kv=True),
                lambda: kv.count("", prefix=True),
                kv.members,
                kv.status,
                kv.alarms,
                kv.quotas,
                lambda: kv.compact(1),
            )
            repr(await calls[which % len(calls)]())


def _answers() -> list[bytes]:
    rng = Random(2)
    item = kv_pb2.KeyValue(key=b"k", value=b"v", create_revision=2, mod_revision=3, version=2)
    header = rpc_pb2.ResponseHeader(cluster_id=1, member_id=2, revision=3, raft_term=4)
    first = rpc_pb2.RangeResponse(header=header, kvs=[item], count=1).SerializeToString()
    kinds = (
        rpc_pb2.RangeResponse, rpc_pb2.PutResponse, rpc_pb2.RangeResponse, rpc_pb2.DeleteRangeResponse,
        rpc_pb2.RangeResponse, rpc_pb2.MemberListResponse, rpc_pb2.StatusResponse, rpc_pb2.AlarmResponse,
    )  # fmt: skip
    return [b"\0" + first] + [bytes((at,)) + payload(rng, kind, 2)[:500] for at, kind in enumerate(kinds)]


TARGETS = (
    Target(
        "records", lambda directory: _record, _records, (RecordError,), tokens=(b'":', b"null", b"[]", b"{}", b"1e400")
    ),
    Target(
        "dataset-blob", lambda directory: _blob, lambda: [zlib.compress(one) for one in _chunks()], (ChunkCorrupted,)
    ),
    Target("dataset-chunk", lambda directory: _raw, _chunks, (ChunkCorrupted,), tokens=(b'"count":', b'"widths":"')),
    Target(
        "key-value",
        lambda directory: _key_value,
        lambda: [to_key(5 << 24) + encode(b"k", 5, 7, 2, b"v" * 9, -1)],
        (CorruptionError, ValueError),
    ),
    Target("stored-rows", lambda directory: _stored, _databases, (InvariantError, StorageError), examples=40),
    Target("client-answers", lambda directory: _Hostile(), _answers, (RaftKVError,), examples=60),
)
