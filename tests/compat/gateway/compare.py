"""When two answers of the JSON gateway count as equal, and what may differ.

Compared are the status, the headers that callers read, and the body, byte for byte, once the ids and terms that each
cluster makes up itself are replaced by names. Where the order of a list or a time is nobody's promise, the parsed
bodies are compared without it. ``ALLOWED`` has what is left: each row says why, and each is counted by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.compat.gateway.generator import Request

HEADERS = ("content-type", "grpc-metadata-content-type", "allow", "x-content-type-options", "location")
CORS = ("access-control-allow-origin", "access-control-allow-methods", "access-control-allow-headers")
SHORT_BYTES = 1024
"""Go says the length of a body that is whole before 2 KiB of it were written."""

_OWN = re.compile(rb'"(cluster_id|member_id|raft_term|raftTerm)":"(\d+)"')

_TOKEN = re.compile(rb'"token":"[A-Za-z]{16,24}\.\d+"')


@dataclass(frozen=True)
class Answer:
    """One HTTP response; of a stream, what came before it was given up."""

    status: int
    headers: dict[str, str]
    body: bytes
    ids: tuple[int, ...] = field(default=(), compare=False)

    @property
    def text(self) -> bytes:
        """The body, with what each cluster makes up itself replaced by names."""
        text = _TOKEN.sub(rb'"token":"@"', _OWN.sub(rb'"\1":"@"', self.body))
        for number, name in enumerate((b"@self", b"@learner")[: len(self.ids)]):
            text = text.replace(b'"%d"' % self.ids[number], b'"%s"' % name)
        return text

    @property
    def message(self) -> Any:
        """The parsed body; None: it is no JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    @property
    def seen_headers(self) -> dict[str, str]:
        """The headers that are compared."""
        seen = {name: self.headers[name] for name in (*HEADERS, *CORS) if name in self.headers}
        if len(self.body) <= SHORT_BYTES:
            seen["framed by"] = "length" if "content-length" in self.headers else "chunks"
        return {**seen, "dated": str("date" in self.headers)}

    def describe(self) -> str:
        """Return the answer on one line."""
        headers = {name: value for name, value in self.seen_headers.items() if name not in CORS}
        return f"{self.status} {headers} {self.text[:1500].decode(errors='backslashreplace')}"


def path_of(request: Request) -> str:
    """Return the path below /v3/, without its query."""
    return request.path.partition("?")[0].removeprefix("/v3beta/").removeprefix("/v3/")


# -- what no server promises ---------------------------------------------------------------------------------------


def _sorted(name: str) -> Callable[[Any], Any]:
    def change(message: Any) -> Any:
        return {**message, name: sorted(message.get(name, []), key=json.dumps)}

    return change


def _without(*names: str) -> Callable[[Any], Any]:
    def change(message: Any) -> Any:
        return {name: value for name, value in message.items() if name not in names}

    return change


def _intervals(message: Any) -> Any:
    """The intervals of a role: etcd looks for the key alone, and may have one several times."""
    found = {(each.get("key"), each.get("range_end")) for each in message.get("perm", [])}
    return {**message, "perm": sorted(found, key=str)}


def _time_left(message: Any) -> Any:
    """The seconds that a lease has left (both were granted long ones), and the order of its keys."""
    left = int(message.get("TTL", 0)) > 3000
    return {**message, "TTL": left, "keys": sorted(message.get("keys", []))}


LOOSE: dict[str, Callable[[Any], Any]] = {
    "lease/leases": _sorted("leases"),
    "kv/lease/leases": _sorted("leases"),
    "auth/role/get": _intervals,
    "lease/timetolive": _time_left,
    "kv/lease/timetolive": _time_left,
    "cluster/member/list": lambda message: {"members": len(message["members"])},
    "cluster/member/remove": lambda message: {"members": len(message["members"])},
    "cluster/member/add": lambda message: {"member": sorted(message["member"])},
    # Sizes, indexes and versions are each server's own; what 3.6 adds is 3.6's.
    "maintenance/status": lambda message: {"header": message["header"], "leader": message["leader"]},
    "maintenance/hash": _without("hash"),
    # raftkv's fencing token.
    "lock/lock": _without("create_revision"),
}
"""What is compared of an answer beyond its bytes, by path."""


# -- what is allowed to differ -------------------------------------------------------------------------------------


def _is_new_path(request: Request, oracle: Answer, ours: Answer) -> bool:
    return path_of(request) == "maintenance/hashkv" and oracle.status == 404


def _is_sort_nonsense(request: Request, oracle: Answer, ours: Answer) -> bool:
    return oracle.status == 200 and "invalid sort option" in _error(ours)


def _is_update_of_nobody(request: Request, oracle: Answer, ours: Answer) -> bool:
    return path_of(request) == "cluster/member/update" and oracle.status == 404 and "URLs are invalid" in _error(ours)


def _is_nobody(request: Request, oracle: Answer, ours: Answer) -> bool:
    is_unnamed = path_of(request) == "auth/user/get" and "user name not found" in _error(oracle)
    is_nested = path_of(request) == "kv/txn" and oracle.status == 200 and b"xn" in request.body
    return not request.user and (is_nested or is_unnamed) and "user name is empty" in _error(ours)


def _is_without_password(request: Request, oracle: Answer, ours: Answer) -> bool:
    return "no password user" in _error(oracle) and "invalid user ID or password" in _error(ours)


def _is_header_of_error(request: Request, oracle: Answer, ours: Answer) -> bool:
    kept = {**oracle.seen_headers}
    kept.pop("grpc-metadata-content-type", "")
    return oracle.status >= 400 and oracle.text == ours.text and kept == ours.seen_headers


def _error(answer: Answer) -> str:
    message = answer.message
    return str(message.get("error", "")) if isinstance(message, dict) else ""


def _is_head(request: Request, oracle: Answer, ours: Answer) -> bool:
    return request.method == "HEAD" and (oracle.status, ours.status) == (405, 400)


def _is_wording(request: Request, oracle: Answer, ours: Answer) -> bool:
    told = ("invalid character", "unexpected E")
    is_syntax = _error(oracle).startswith(told) and _error(ours).startswith(told)
    return is_syntax and oracle.status == ours.status and oracle.seen_headers == ours.seen_headers


def _is_cancel(request: Request, oracle: Answer, ours: Answer) -> bool:
    return "no inflight downgrade job" in _error(oracle) and ours.status == 200


def _without_leases(message: Any) -> Any:
    """An answer without the leases of keys: of those without a value, which is left out in both."""
    if isinstance(message, list):
        return [_without_leases(each) for each in message]
    if not isinstance(message, dict):
        return message
    dropped = {"lease"} if "mod_revision" in message and "value" not in message else set()
    return {name: _without_leases(value) for name, value in message.items() if name not in dropped}


def _is_lease_of_key(request: Request, oracle: Answer, ours: Answer) -> bool:
    asked = b"keys_only" in request.body or b"keysOnly" in request.body
    alike = (oracle.status, oracle.seen_headers) == (ours.status, ours.seen_headers)
    return asked and alike and _without_leases(oracle.message) == _without_leases(ours.message)


Allowed = Callable[[Request, Answer, Answer], bool]
ALLOWED: dict[str, tuple[str, Allowed]] = {
    "hashkv": ("3.5 has no path for HashKV, 3.6 has", _is_new_path),
    "sort": ("3.5 ignores values outside of the enums of sorting, 3.6 refuses them", _is_sort_nonsense),
    "nobody": (
        "etcd passes a txn of empty txns, and a question for the user without a name, of a caller without a user",
        _is_nobody,
    ),
    "no password": ("etcd says which users have no password", _is_without_password),
    "tls": ("under TLS etcd's other gRPC server sends Grpc-Metadata-Content-Type with errors too", _is_header_of_error),
    "downgrade": ("from 3.6 on, to cancel a downgrade succeeds where there is none", _is_cancel),
    "wording": ("Python's parser finds the place where JSON is wrong, and tells fewer reasons apart", _is_wording),
    "head": ("3.7 answers HEAD of a call with 400", _is_head),
    "keys only": ("from 3.7 on, ranges of keys alone have no leases", _is_lease_of_key),
    "urls": ("a member's URLs are looked at before the member is", _is_update_of_nobody),
}


def allowed(request: Request, oracle: Answer, ours: Answer) -> str | None:
    """Return the name of the row of ``ALLOWED`` that explains a difference, if one does."""
    return next((name for name, (_, check) in ALLOWED.items() if check(request, oracle, ours)), None)


def difference(request: Request, oracle: Answer, ours: Answer) -> str | None:
    """Return what differs, None if nothing does."""
    if oracle.status != ours.status:
        return "status"
    if oracle.seen_headers != ours.seen_headers:
        return "headers"
    if oracle.text == ours.text:
        return None
    loosen = LOOSE.get(path_of(request))
    if loosen is None or oracle.status != 200 or request.method != "POST":
        return "body"
    return None if loosen(oracle.message) == loosen(ours.message) else "body"
