"""A seeded stream of requests to the JSON gateway, made from the descriptors: valid ones, and spoiled in every way.

Owns what is sent, never what is right. Both servers are led through the same states, so the ids that each makes up
itself stand in the bodies as names (``@self``, ``@learner``), which the player replaces.

    generator = Generator(seed=7)
    request = generator.next_request()        # Request("POST", "/v3/kv/put", b'{"key":"YQ==",...}')
    generator.observe(request, answer)        # etcd's answer

Leaves out, because the answers depend on time or on ids: leases that end, locks and elections on new leases, members
that vote, sorting by what may be equal (``tests/compat/differential`` has all of them), and streams (``streams``).
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tests.compat.gateway.paths import LASTING, METHODS, request_of

KEYS = (b"a", b"a", b"b", b"ab", b"abc", b"b\xff", b"\x00", b"\xff", b"", b"d/1", b"d/2")
VALUES = (b"", b"1", b"<&>", "\u2028\N{GREEK SMALL LETTER ALPHA}".encode(), b"\xff\x00", b"v" * 300)
NAMES = ("alice", "bob", "", "r\xf6le", "a/b", "<c>")
PASSWORDS = ("secret", "other", "")
LEASES = (1, 2, 3, 0, 7, -1)
NUMBERS = (0, 1, 2, 5, -1, 2**31, 2**63 - 1, -(2**63))
PREFIXES = ("/v3/", "/v3/", "/v3/", "/v3/", "/v3/", "/v3/", "/v3beta/")
UNARY = sorted(path for path in METHODS if path not in (*LASTING, "maintenance/defragment"))
"""Without streams, and without what makes a Range that comes soon after end etcd 3.5.1."""
OF_USERS = (
    *("kv/range", "kv/put", "kv/deleterange", "kv/txn"),
    *("auth/user/list", "auth/user/get", "auth/role/list", "auth/role/get", "auth/authenticate"),
)
"""What is played with tokens: who may do what is compared by ``tests/compat/differential/auth_requests``."""

NEED_VERSIONS = ("auth/", "maintenance/downgrade")
USERS = ("root", "root", "carol", "carol", "", "stranger")
NOBODY = ("",)
FREQUENT = ("kv/put", "kv/range", "kv/txn", "kv/deleterange", "lease/grant")


@dataclass(frozen=True)
class Request:
    """One HTTP request.

    Attributes:
        message: the body as parsed; None if it was spoiled.
        user: whose token it carries; empty: none.
        headers: beside those of the body.
    """

    method: str
    path: str
    body: bytes
    message: Any = None
    user: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def describe(self) -> str:
        """Return the request as a command line."""
        body = self.body[:400].decode(errors="backslashreplace")
        return f"{self.method} {self.path} {body} (user: {self.user!r}) {self.headers}"


@dataclass
class Generator:
    """Makes what the module's text says. The same seed and the same answers give the same stream.

    Attributes:
        users: whose tokens are sent; empty: none.
        members: learners come, which never run, and users do not change: raftkv waits with that for their versions.
    """

    seed: int
    users: tuple[str, ...] = NOBODY
    members: bool = False
    random: random.Random = field(init=False)
    revision: int = 1
    leader: dict[str, Any] | None = None
    later: list[Request] = field(default_factory=list)
    contests: int = 0
    paths: list[str] = field(init=False)
    frequent: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.frequent = FREQUENT[: 4 if len(self.users) > 1 else None]
        self.paths = [path for path in UNARY if not self.members or not path.startswith(NEED_VERSIONS)]
        if len(self.users) > 1:
            self.paths = list(OF_USERS)

    # -- the stream ----------------------------------------------------------------------------------------------

    def next_request(self) -> Request:
        """Draw the next request; one in ten has headers that say nothing new, or something wrong."""
        request = self._next_request()
        return replace(request, headers=self.random.choice(HEADERS)) if self._often(10) else request

    def _next_request(self) -> Request:
        if self.later and self._often(50):
            return self.later.pop(0)
        draw = self.random
        path = draw.choice(self.frequent if self._often(40) else self.paths)
        message = MESSAGES.get(path, _message)(self, path)
        user = draw.choice(self.users)
        target = draw.choice(PREFIXES) + path
        if self._often(25):
            return self._spoiled(target, message, user)
        body = json.dumps(message, ensure_ascii=self._often(50)).encode()
        return Request("POST", target, body, message, user)

    def one_for_each_path(self) -> Iterator[Request]:
        """A request for every path of `paths`, one after the other."""
        for path in self.paths:
            message = MESSAGES.get(path, _message)(self, path)
            yield Request("POST", f"/v3/{path}", json.dumps(message).encode(), message)

    def observe(self, request: Request, status: int, answer: Any) -> None:
        """Take etcd's answer into account."""
        if status != 200 or not isinstance(answer, dict):
            return
        self.revision = int(answer.get("header", {}).get("revision", self.revision))
        if request.path.endswith("/campaign"):
            self.leader = answer.get("leader")
        if request.path.endswith("/alarm") and _is_activation(request.message):
            # Nothing is learned from refusals alone.
            off = {**request.message, "action": "DEACTIVATE"}
            self.later.append(Request("POST", request.path, json.dumps(off).encode(), off, request.user))

    def _often(self, percent: float) -> bool:
        return self.random.random() * 100 < percent

    # -- messages ------------------------------------------------------------------------------------------------

    def message(self, descriptor: Any, depth: int = 0) -> dict[str, Any]:
        """A message with some of its fields, in either spelling."""
        found: dict[str, Any] = {}
        chosen = {oneof: self.random.choice(oneof.fields) for oneof in descriptor.oneofs}
        for each in descriptor.fields:
            if each.name == "hashedPassword" or chosen.get(each.containing_oneof, each) is not each:
                continue  # raftkv takes no hash that is none
            likely = 90 if each.name in ("key", "name", "ID", "TTL", "user", "role") or each.containing_oneof else 45
            if self._often(likely):
                name = each.json_name if self._often(40) else each.name
                found[name] = self._field(each, depth)
        return found

    def _field(self, each: Any, depth: int) -> Any:
        if each.is_repeated:
            count = self.random.choice((0, 1, 1, 2)) if depth < 2 else 0
            return [self._value(each, depth) for _ in range(count)]
        return self._value(each, depth)

    def _value(self, each: Any, depth: int) -> Any:
        draw = self.random
        if each.type == FieldDescriptor.TYPE_MESSAGE:
            return self.message(each.message_type, depth + 1) if depth < 3 else {}
        if each.type == FieldDescriptor.TYPE_BYTES:
            return _base64(draw.choice(VALUES if each.name == "value" else KEYS))
        if each.type == FieldDescriptor.TYPE_STRING:
            return draw.choice(PASSWORDS if each.name == "password" else NAMES)
        if each.type == FieldDescriptor.TYPE_BOOL:
            return self._often(50)
        if each.type == FieldDescriptor.TYPE_ENUM:
            value = draw.choice(each.enum_type.values)
            return value.name if self._often(60) else value.number
        return self._spelled(self._number(each))

    def _number(self, each: Any) -> int:
        draw = self.random
        if each.name in ("lease", "ID"):
            return draw.choice(LEASES)
        if "revision" in each.name:
            return draw.choice((0, 0, self.revision, self.revision + 1, self.revision - draw.randint(0, 9), 1, -1))
        if each.name == "limit":
            return draw.choice((0, 1, 2, 100, -1))
        if each.type in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_UINT32):
            return draw.choice((0, 1, 77))
        return draw.choice((0, 1, 2, -1))

    def _spelled(self, number: int) -> int | str:
        """Numbers are taken with and without quotes."""
        return str(number) if self._often(50) else number

    def contest(self) -> bytes:
        """A name that was never used, so that no client waits."""
        self.contests += 1
        return b"contest-%d" % self.contests

    # -- spoiling ------------------------------------------------------------------------------------------------

    def _spoiled(self, target: str, message: dict[str, Any], user: str) -> Request:
        draw = self.random
        text = json.dumps(message).encode()
        kind = draw.randrange(9)
        if kind == 0:
            return Request(draw.choice(("GET", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS")), target, b"", None, user)
        if kind == 1:
            ending = draw.choice(("/", "x", "/x", "?a=b", "?key=YQ", "%00"))
            return Request("POST", target + ending, text, message if ending.startswith("?") else None, user)
        kept = KEPT.get(target.rpartition("/")[2], ())
        if kind == 2 and not kept:
            body = draw.choice((b"", b"null", b"[]", b"{}", b'"a"', b"1", b"true", b" ", b"{", b"}", b"\xff", b"[{}]"))
            return Request("POST", target, body, None, user)
        if kind in (2, 3):
            return Request("POST", target, text[: draw.randrange(1, len(text))], None, user)
        if kind == 4:
            after = draw.choice((b" ", b"\n", b"x", b"{}", b"]", b"{"))
            return Request("POST", target, text + after, message, user)
        if kind == 5:
            unknown = {**message, draw.choice(("nope", "KEY", "Key", "header", "")): draw.choice(ODD)}
            return Request("POST", target, json.dumps(unknown).encode(), None, user)
        return Request("POST", target, self._with_odd_value(message, kept), None, user)

    def _with_odd_value(self, message: dict[str, Any], kept: tuple[str, ...]) -> bytes:
        """One value, at any depth, is of another kind."""
        places = [place for place in _places(message) if place[1] not in kept]
        if not places:
            return json.dumps(message).encode() if kept else json.dumps(self.random.choice(ODD)).encode()
        holder, name = self.random.choice(places)
        before, holder[name] = holder[name], "@odd"
        text = json.dumps(message)
        holder[name] = before
        return text.replace('"@odd"', self.random.choice(ODD_TEXTS), 1).encode("utf-8", "surrogatepass")


HEADERS = (
    *((("Content-Type", kind),) for kind in ("", "text/plain", "application/x-www-form-urlencoded", "nonsense")),
    (("Content-Type", "application/json; charset=utf-8"), ("Accept", "text/html"), ("Accept-Encoding", "gzip")),
    *((("Grpc-Timeout", text),) for text in ("10S", "x", "")),
    *((("Grpc-Metadata-Hasleader", "true"),), (("Grpc-Metadata-Client-Api-Version", "3.5"), ("X-Other", "1"))),
)

KEPT = {
    "add": ("isLearner",),
    "grant": ("ID", "TTL", "key", "range_end"),
    "lock": ("lease",),
    "campaign": ("lease",),
    "proclaim": ("leader", "lease"),
    "resign": ("leader", "lease"),
}
"""Fields that no value spoils which stands for none: a member would vote, a lease would end or have an id of its own,
or a role could do nothing, which 3.6 refuses."""

ODD: tuple[Any, ...] = (None, True, 1, -1, 1.5, 1e30, "x", "1", "", [], {}, [1], {"a": 1}, "YQ==", "YQ=", "Y!", "_/8=")
"""Without what etcd refuses before 3.6 and reads from then on, as raftkv does: base64 of another form, 1.0 and 1e3."""
ODD_TEXTS = (
    *(json.dumps(odd) for odd in ODD),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", '"18446744073709551615"', "1e-3", '"1.5"'),
    *("-0", "01", "+1", ".5", "NaN", "Infinity", "tru", "'a'", '"\\u00"', '"\\ud800"', '"a\tb"', '"YQ=="x', '" 1"'),
    "[" * 50 + "]" * 50,
    '{"a":' * 50 + "1" + "}" * 50,
)


def _places(value: Any) -> Any:
    """Yield each place that holds something."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, held in list(items):
        yield value, name
        yield from _places(held)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _is_activation(message: Any) -> bool:
    return isinstance(message, dict) and message.get("action") in ("ACTIVATE", 1)


# -- messages of which the descriptor does not say enough ----------------------------------------------------------


def _message(generator: Generator, path: str) -> dict[str, Any]:
    return generator.message(request_of(path))


def _range(generator: Generator, path: str) -> dict[str, Any]:
    message = generator.message(request_of(path))
    for name in ("sort_target", "sortTarget"):
        if message.get(name, 0) not in (0, "KEY"):
            message["count_only"] = True  # what is equal has no order
    return message


def _txn(generator: Generator, path: str) -> dict[str, Any]:
    message = generator.message(request_of(path))
    for holder, name in list(_places(message)):
        if name in ("sort_target", "sortTarget"):
            holder[name] = 0
        elif name in ("request_txn", "requestTxn"):
            # etcd overlooks what is put there while there is no space.
            for inner, put in list(_places(holder[name])):
                if put in ("request_put", "requestPut"):
                    del inner[put]
    return message


def _grant_role(generator: Generator, path: str) -> dict[str, Any]:
    message = generator.message(request_of(path))
    permission = {"key": _base64(b"a"), "range_end": generator.random.choice(("", _base64(b"b"), "AA=="))}
    kind = generator.random.choice(("READ", "WRITE", "READWRITE", 2))
    return {"name": message.get("name", ""), "perm": {"permType": kind, **permission}}


def _grant(generator: Generator, path: str) -> dict[str, Any]:
    lease = generator.random.choice((1, 2, 3, 7, -1))
    ttl = generator.random.choice((3600, 7200, 9_000_000_000, 9_000_000_001))
    return {"ID": generator._spelled(lease), "TTL": generator._spelled(ttl)}


def _add(generator: Generator, path: str) -> dict[str, Any]:
    # An id is made of the URLs and the second.
    good = [[f"http://127.0.0.1:{generator.contests + 1}"]] * 2 if generator.members else []
    generator.contests += 1
    urls = generator.random.choice((*good, ["nonsense"], ["http://a"], []))
    return {"peerURLs": urls, "isLearner": True}


def _member(generator: Generator, path: str) -> dict[str, Any]:
    return {"ID": generator.random.choice(("@learner", "77", 0))}


def _update(generator: Generator, path: str) -> dict[str, Any]:
    return {"ID": 77, "peerURLs": generator.random.choice((["http://127.0.0.1:1"], ["nonsense"], []))}


def _alarm(generator: Generator, path: str) -> dict[str, Any]:
    draw = generator.random
    action = draw.choice(("GET", "GET", "ACTIVATE", "DEACTIVATE"))
    return {
        "action": action,
        "memberID": draw.choice(("@self", "0", 77)),
        "alarm": draw.choice(("NOSPACE", 1, 0, "NONE")),
    }


def _transfer(generator: Generator, path: str) -> dict[str, Any]:
    return {"targetID": generator.random.choice(("@self", "77", 0))}


def _downgrade(generator: Generator, path: str) -> dict[str, Any]:
    return {"action": generator.random.choice(("CANCEL", "VALIDATE", 7)), "version": "nonsense"}


def _lock(generator: Generator, path: str) -> dict[str, Any]:
    return {"name": _base64(generator.contest()), "lease": generator.random.choice((1, 2, 3, 7))}


def _campaign(generator: Generator, path: str) -> dict[str, Any]:
    return {**_lock(generator, path), "value": _base64(generator.random.choice(VALUES))}


def _led(generator: Generator, path: str) -> dict[str, Any]:
    leader = generator.leader or {"name": "YQ==", "key": "YQ==", "rev": "1", "lease": "1"}
    return {"leader": leader, "value": _base64(generator.random.choice(VALUES))}


def _leader(generator: Generator, path: str) -> dict[str, Any]:
    return {"name": _base64(b"contest-%d" % generator.random.randint(0, generator.contests + 1))}


MESSAGES: dict[str, Callable[[Generator, str], dict[str, Any]]] = {
    "kv/range": _range, "kv/txn": _txn, "auth/role/grant": _grant_role, "lease/grant": _grant,
    "cluster/member/add": _add, "cluster/member/remove": _member, "cluster/member/promote": _member,
    "cluster/member/update": _update, "maintenance/alarm": _alarm, "maintenance/transfer-leadership": _transfer,
    "maintenance/downgrade": _downgrade, "lock/lock": _lock, "election/campaign": _campaign,
    "election/proclaim": _led, "election/resign": _led, "election/leader": _leader,
}  # fmt: skip
