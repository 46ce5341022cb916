"""Streams of the JSON gateway on etcd 3.5.1 and on raftkv: watches, elections observed, keep-alives, snapshots.

    python -m tests.compat.gateway.streams --count 200 --seed 3

An episode writes, opens a stream, writes on, and reads until what was written last has come. What is compared: status
and headers, and the lines, with the names of fields in their order; how events are spread over lines is nobody's
promise, so they are looked at one after the other.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.compat.gateway.compare import Answer
from tests.compat.gateway.requests import Side, sides

TIMEOUT_S = 90.0
KEYS = (b"a", b"ab", b"b", b"<", b"\xff")
Lines = list[Any]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Stream:
    """One streaming request to a server."""

    def __init__(self, side: Side, path: str, body: bytes, token: str = "") -> None:
        self._connection = http.client.HTTPConnection(side.host, side.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json", **({"Authorization": token} if token else {})}
        self._connection.request("POST", f"/v3/{path}", body, headers)
        self._response = self._connection.getresponse()
        self._side = side
        found = {name.lower(): value for name, value in self._response.getheaders()}
        self.head = (self._response.status, Answer(self._response.status, found, b"").seen_headers)

    def lines(self) -> Iterator[Any]:
        """Yield each line, parsed, with ids and terms replaced; the order of fields is kept."""
        while line := self._response.readline():
            yield json.loads(Answer(200, {}, line, self._side.ids).text)

    def close(self) -> None:
        """Leave."""
        self._connection.close()


@contextmanager
def opened(side: Side, path: str, *messages: Any, user: str = "") -> Iterator[Stream]:
    """Open a stream with the messages as its body, and the token of a user."""
    body = b"".join(json.dumps(message).encode() for message in messages)
    stream = Stream(side, path, body, side.tokens[user])
    try:
        yield stream
    finally:
        stream.close()


# -- watches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watching:
    """An episode: what is written before, the watch, what is written while it is open."""

    before: Sequence[tuple[str, dict[str, Any]]]
    create: dict[str, Any]
    after: Sequence[tuple[str, dict[str, Any]]]

    def play(self, side: Side) -> Lines:
        """Return the head, then what was told: each event by itself, and all else that a line says."""
        for path, message in self.before:
            side.must(path, **message)
        key = self.create["key"]
        with opened(side, "watch", {"create_request": self.create}) as stream:
            lines = stream.lines()
            told: Lines = [stream.head, _created(next(lines))]
            if told[-1].get("canceled"):
                return told
            for path, message in (*self.after, ("kv/put", {"key": key, "value": "ZW5k"}), _deletion(key)):
                side.must(path, **message)
            while (line := _next(lines)) is not None:
                result = line.get("result", line)
                if events := result.pop("events", []):
                    told += [list(event.items()) for event in events]
                    result.pop("watch_id", None)
                result.pop("header", None)
                told += [list(result.items())] if result else []
                if "canceled" in result or "error" in line or self._is_last(told):
                    return told
        return told

    def _is_last(self, told: Lines) -> bool:
        """Whether the end has come: the last deletion, or the last put where deletions are not told."""
        event = dict(told[-1]) if told and isinstance(told[-1], list) else {}
        last = int(told[1]["header"]["revision"]) + len(self.after) + 2
        if self.create.get("filters") in (["NODELETE"], [1]):
            last -= 1
        return bool(event.get("kv", {}).get("mod_revision") == str(last))


def _next(lines: Iterator[Any]) -> Any:
    """The next line; None at the end, or where none comes: what was told so far shows the difference."""
    try:
        return next(lines, None)
    except TimeoutError:
        return None


def _deletion(key: str) -> tuple[str, dict[str, Any]]:
    return "kv/deleterange", {"key": key}


def _created(line: Any) -> Any:
    result = line.get("result", line)
    return {**result, "fields": list(result)}


def watching(draw: random.Random, revision: int, compacted: int) -> Watching:
    """Draw an episode; every write makes one revision."""

    def writes(count: int) -> list[tuple[str, dict[str, Any]]]:
        return [_write(draw) for _ in range(count)]

    before = writes(draw.randint(1, 6))
    now = revision + len(before)
    create: dict[str, Any] = {"key": _text(draw.choice(KEYS))}
    if draw.random() < 0.6:
        create[draw.choice(("range_end", "rangeEnd"))] = draw.choice((_text(b"\0"), _text(b"\xff\xff")))
    if draw.random() < 0.7:
        start = draw.choice((0, 1, compacted - 1, compacted + 1, now, now + 1, now - draw.randint(0, 8)))
        start += start == compacted  # 3.6 alone tells a deletion of that revision
        create[draw.choice(("start_revision", "startRevision"))] = draw.choice((str, int))(max(start, 0))
    if draw.random() < 0.4:
        create["prev_kv"] = True
    if draw.random() < 0.3:
        create["filters"] = draw.choice((["NOPUT"], ["NODELETE"], [0], [1]))
    if draw.random() < 0.3:
        create["watch_id"] = draw.choice(("7", 7, 0))
    if draw.random() < 0.2:
        create[draw.choice(("fragment", "progress_notify", "nonsense"))] = True
    return Watching(before, create, writes(draw.randint(0, 5)))


def _write(draw: random.Random) -> tuple[str, dict[str, Any]]:
    key = _text(draw.choice(KEYS))
    put = {"key": key, "value": _text(draw.choice((b"", b"1", b"<&>")))}
    if draw.random() < 0.7:
        return "kv/put", put
    return "kv/txn", {"success": [{"request_delete_range": {"key": key}}, {"request_put": {**put, "key": "eA=="}}]}


# -- the others ----------------------------------------------------------------------------------------------------


def keep_alives(side: Side) -> Lines:
    """Leases that exist and that do not, one that cannot be read in the end."""
    side.must("lease/grant", ID=4, TTL=600)
    with opened(side, "lease/keepalive", {"ID": 4}, {"ID": "5"}, {"ID": "4"}, {"ID": "x"}, {"ID": 4}) as stream:
        answers = [list(line["result"].items()) for line in stream.lines()]
        # raftkv answers at once for leases that there are not.
        return [stream.head, *sorted(answers, key=str)]


def observed(side: Side) -> Lines:
    """Who leads, what is proclaimed, who leads next."""
    name = _text(b"observed")
    side.must("lease/grant", ID=6, TTL=600)
    campaign = {"name": name, "lease": 6, "value": _text(b"first")}
    leader = json.loads(side.ask("POST", "/v3/election/campaign", json.dumps(campaign).encode()).body)["leader"]
    told: Lines = []
    with opened(side, "election/observe", {"name": name}) as stream:
        told.append(stream.head)
        for line, value in zip(stream.lines(), (b"second", b"third", None), strict=False):
            told.append(list(line["result"]["kv"].items()))
            if value is None:
                break
            side.must("election/proclaim", leader=leader, value=_text(value))
    side.must("election/resign", leader=leader)
    return told


def several_requests(side: Side) -> Lines:
    """Two watches on one stream, of which one is cancelled; a third with an id that is taken, one that is not there."""
    asked: tuple[dict[str, Any], ...] = (
        {"create_request": {"key": _text(b"a"), "watch_id": 3}},
        {"createRequest": {"key": _text(b"b")}},
        {"create_request": {"key": _text(b"b"), "watch_id": "3"}},
        {"cancel_request": {"watch_id": 77}},
        {},
        {"cancelRequest": {"watchId": "3"}},
    )
    with opened(side, "watch", *asked) as stream:
        return [stream.head, *(list(line["result"].items()) for _, line in zip(range(4), stream.lines(), strict=False))]


def snapshot(side: Side) -> Lines:
    """What each line of a snapshot has; raftkv tells the version too, as 3.6 does."""
    side.must("kv/put", key="eA==", value=_text(b"v" * 300_000))  # enough for several lines
    with opened(side, "maintenance/snapshot", {}) as stream:
        found = [line["result"] for line in stream.lines()]
    sizes = [len(base64.b64decode(each.get("blob", ""))) for each in found]
    left = [int(each.get("remaining_bytes", 0)) for each in found]
    fields = {name for each in found for name in each} - {"version", "header"}
    counted = all(left[at] - left[at + 1] == sizes[at + 1] for at in range(len(found) - 2))
    return [stream.head, sorted(fields), counted, left[-1]]


def refused(side: Side) -> Lines:
    """Streams that do not begin."""
    asked = [
        ("POST", "watch", b"{"),
        ("POST", "watch", b'{"create_request":{"key":1}}'),
        ("POST", "watch", b'{"create_request":[]}'),
        ("GET", "watch", b""),
        ("POST", "lease/keepalive", b'{"ID":{}}'),
        ("POST", "election/observe", b"[]"),
        ("PUT", "election/observe", b"{}"),
        ("POST", "maintenance/snapshot", b"nonsense"),
    ]
    answers = [side.ask(method, f"/v3/{path}", body) for method, path, body in asked]
    return [(answer.status, answer.seen_headers, answer.text) for answer in answers]


def as_users(side: Side) -> Lines:
    """Watches of root, and of carol who may read ``a``. (3.6 tells others why, 3.5 only that they may not.)"""
    told: Lines = []
    for user in ("root", "carol"):
        for key in (b"a", b"b"):
            with opened(side, "watch", {"create_request": {"key": _text(key)}}, user=user) as stream:
                line = next(stream.lines(), None)
                if line is not None and "result" in line:
                    line["result"].pop("watch_id", None)  # 3.6 says -1 where a watch is refused
                told.append([user, stream.head, line])
    return told


FIXED: tuple[Callable[[Side], Lines], ...] = (keep_alives, observed, several_requests, snapshot, refused)


# -- both sides ----------------------------------------------------------------------------------------------------


def compare(what: str, play: Callable[[Side], Lines], pair: tuple[Side, Side]) -> list[str]:
    """Play on both servers; return what differs, as a text."""
    with ThreadPoolExecutor(2) as pool:
        expected, found = pool.map(play, pair)
    return [] if expected == found else [f"{what}\n  etcd   {expected}\n  raftkv {found}"]


def run(pair: tuple[Side, Side], seed: int, count: int) -> list[str]:
    """Play what is fixed and so many watches; return the differences."""
    draw = random.Random(seed)
    differences = [text for play in FIXED for text in compare(play.__name__, play, pair)]
    compacted = 0
    for _ in range(count):
        revision = pair[0].revision()
        if draw.random() < 0.2:
            compacted = revision - draw.randint(0, 3)
            for side in pair:
                side.ask("POST", "/v3/kv/compaction", json.dumps({"revision": compacted}).encode())
        episode = watching(draw, revision, compacted)
        differences += compare(repr(episode), episode.play, pair)
    return differences


def main(words: Sequence[str]) -> int:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(words)
    with sides() as pair:
        differences = run(pair, asked.seed, asked.count)
    print(f"seed {asked.seed}: {len(FIXED)} streams and {asked.count} watches, {len(differences)} differences")
    print("\n".join(differences[:20]))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
