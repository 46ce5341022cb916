"""Odd requests in bytes, for every RPC: what ``compat/gateway`` makes of the descriptors, spoiled as in ``tests/fuzz``.

    stream = OddRequests(seed=7)
    rpc = stream.next_rpc()              # "etcdserverpb.KV/Put"
    payload = stream.payload(rpc)        # as it may be sent; half of them are valid

Values that no JSON can have are added in bytes: enums without a name, numbers at the edges of their types, wrong wire
types, texts that are none, fields twice, messages nested in themselves.

What is left out depends on time, or on ids that each cluster makes up itself: see ``_is_left_out``.
"""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from raftkv.pb.services import SERVICES
from tests.compat.gateway.generator import FREQUENT, MESSAGES, Generator, Request, _message
from tests.compat.gateway.paths import METHODS
from tests.fuzz.mutate import COMMON, NUMBERS, Mutator, varint

PATHS = {f"{service}/{method}": path for path, (service, method) in METHODS.items() if not path.startswith("kv/lease")}
"""Paths of the gateway by RPC, for those that have one."""

OTHERS = ("etcdserverpb.KV/RangeStream", "grpc.health.v1.Health/Check", "raftkvpb.Admin/MemberReplace")
QUOTAS = tuple(f"raftkvpb.Admin/Quota{what}" for what in ("Set", "Remove", "List"))
RPCS = (*PATHS, *OTHERS, *QUOTAS)

STREAMS = ("etcdserverpb.Watch/Watch", "etcdserverpb.Lease/LeaseKeepAlive")
"""RPCs that take several messages."""

LONG_S = 1_000
DEPTHS = (1, 3, 40, 110)
"""How deep a message is nested in itself; a request may have 100 levels."""


def request_class(rpc: str) -> Any:
    """Return the message class that an RPC takes."""
    service, _, method = rpc.partition("/")
    return SERVICES[service][method].request


class OddRequests:
    """A seeded stream of them; ``observe`` tells it what became of each."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._messages = Generator(seed)
        self._mutators: dict[str, Mutator] = {}
        self._names: set[bytes] = set()

    def next_rpc(self) -> str:
        """Draw an RPC."""
        if self._random.random() < 0.35:
            frequent = self._random.choice(FREQUENT)
            return next(rpc for rpc, path in PATHS.items() if path == frequent)
        return self._random.choice(RPCS)

    def payload(self, rpc: str) -> bytes:
        """Make a request."""
        while True:
            data = self._payload(rpc)
            parsed = _parsed(rpc, data)
            if parsed is None or not self._is_left_out(rpc, parsed):
                return data

    def observe(self, rpc: str, payload: bytes, status: int, answer: Any) -> None:
        """Take the answer of the interpreted member into account; ``pending`` may have more to send then."""
        message = _parsed(rpc, payload)
        told = {} if message is None else json_format.MessageToDict(message)
        path = PATHS.get(rpc, rpc)
        self._messages.observe(Request("POST", f"/v3/{path}", b"", told), status, answer)

    def pending(self) -> list[tuple[str, bytes]]:
        """Return what undoes earlier requests that would have all others refused (alarms)."""
        later, self._messages.later = self._messages.later, []
        rpcs = {path: rpc for rpc, path in PATHS.items()}
        found = [(rpcs[request.path.removeprefix("/v3/")], request.message) for request in later]
        return [(rpc, _encoded(rpc, message)) for rpc, message in found]

    # -- payloads ------------------------------------------------------------------------------------------------

    def _payload(self, rpc: str) -> bytes:
        draw = self._random
        data = self._valid(rpc)
        mutator = self._mutators.setdefault(rpc, Mutator(draw, [data], ()))
        mutator.keep(data)
        kind = draw.random()
        if kind < 0.4:
            return data
        if kind < 0.75:
            for _ in range(draw.choice((1, 1, 2, 4))):
                data += self._odd_field(request_class(rpc).DESCRIPTOR, 0)
            return data
        return mutator.make()

    def _valid(self, rpc: str) -> bytes:
        path = PATHS.get(rpc)
        if path is None:
            return b""
        return _encoded(rpc, MESSAGES.get(path, _message)(self._messages, path))

    def _odd_field(self, descriptor: Any, depth: int) -> bytes:
        """A field of a message, or of none, with a value that may be anything."""
        draw = self._random
        if not descriptor.fields or draw.random() < 0.1:
            number = draw.choice((15, 99, 19_000, 2**29 - 1))
            return varint(number << 3) + varint(draw.choice(NUMBERS))
        each = draw.choice(descriptor.fields)
        wire_type = _WIRE_TYPES.get(each.type, 0)
        if draw.random() < 0.1:
            wire_type = draw.randrange(8)
        tag = varint(each.number << 3 | wire_type)
        if wire_type == 0:
            return tag + varint(draw.choice((*NUMBERS, 2**64 - draw.randint(1, 9))))
        if wire_type in (1, 5):
            return tag + draw.choice(NUMBERS).to_bytes(9, "little")[: 8 if wire_type == 1 else 4]
        if wire_type != 2:
            return tag
        inner = draw.choice(COMMON)
        if each.type == FieldDescriptor.TYPE_MESSAGE and depth < 4 and draw.random() < 0.9:
            parts = [self._odd_field(each.message_type, depth + 1) for _ in range(draw.choice((0, 1, 1, 2)))]
            inner = b"".join(parts)
            if draw.random() < 0.2:
                inner = self._nested(each, inner)
        return tag + varint(len(inner)) + inner

    def _nested(self, each: Any, inner: bytes) -> bytes:
        """A message in a field of itself, where there is one, many times."""
        way = [inside for inside in each.message_type.fields if inside.type == FieldDescriptor.TYPE_MESSAGE]
        tags = [varint(inside.number << 3 | 2) for inside in (*way, each)]
        for _ in range(self._random.choice(DEPTHS)):
            inner = self._random.choice(tags) + varint(len(inner)) + inner
        return inner

    def _is_left_out(self, rpc: str, message: Any) -> bool:
        """Whether an answer would depend on time, or on what a cluster makes up."""
        match rpc.partition("/")[2]:
            case "LeaseGrant":  # it would end, or have an id of its own
                return not message.ID or message.TTL < LONG_S  # also none, or less: the shortest
            case "Lock" | "Campaign":  # a lease of its own, or a wait for another holder
                is_new = message.name not in self._names
                self._names.add(message.name)
                return not message.lease or not is_new
            case "MemberAdd":  # an id is made of the URLs and the time
                return any(url.startswith(("http", "unix")) for url in message.peerURLs)
            case "MoveLeader" | "Defragment" | "Snapshot":
                return self._random.random() < 0.8
            case "Observe":
                return True
        return False


_WIRE_TYPES = {
    FieldDescriptor.TYPE_MESSAGE: 2,
    FieldDescriptor.TYPE_BYTES: 2,
    FieldDescriptor.TYPE_STRING: 2,
    FieldDescriptor.TYPE_FIXED64: 1,
    FieldDescriptor.TYPE_SFIXED64: 1,
    FieldDescriptor.TYPE_FIXED32: 5,
}
"""Those that are not varints."""


def _parsed(rpc: str, payload: bytes) -> Any:
    try:
        return request_class(rpc).FromString(payload)
    except DecodeError:
        return None


def _encoded(rpc: str, message: Any) -> bytes:
    """The bytes of a message of the gateway; ids that stand for a cluster's own are an unknown member's."""
    parsed = request_class(rpc)()
    json_format.ParseDict(_without_names(message), parsed, ignore_unknown_fields=True)
    return bytes(parsed.SerializeToString())


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_names(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_names(each) for each in value]
    return "77" if value in ("@self", "@learner") else value
