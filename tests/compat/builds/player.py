"""Plays odd requests on two members of raftkv of different builds, and compares the answers.

Any number of them, which prints every difference and ends with 1 if there is one:

    python -m tests.compat.builds.player --count 20000 --seed 3

An answer is the status with its text, and each message as JSON, compared as ``compat/gateway`` does: without the ids
that each cluster makes up. After every message of a stream of watches another watch is asked for, whose answer says
that all before it have theirs; events are left to ``compat/differential``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from raftkv.pb import rpc_pb2
from tests.compat.builds.odd import PATHS, STREAMS, OddRequests
from tests.compat.gateway.compare import Answer as Compared
from tests.compat.gateway.compare import difference
from tests.compat.gateway.generator import Request
from tests.compat.gateway.requests import FAST, OPEN
from tests.compat.streams import Streams
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Program

INTERPRETED = Program("raftkv", (sys.executable, "-m", "tests.compat.builds.interpreted"))
"""A member that runs interpreted, also with compiled modules beside the sources."""

WATCH = "etcdserverpb.Watch/Watch"
FENCE = 1 << 40
"""Id of the watch that is asked for last."""

UNORDERED = ("etcdserverpb.Lease/LeaseKeepAlive",)
"""Streams whose answers overtake each other: at once if a lease was renewed just before, else when it is."""

LARGE = ("etcdserverpb.Maintenance/Snapshot",)
"""RPCs whose messages are each cluster's own."""
DIFFERENCES_MAX = 20
_MESSAGES_MAX = 3


@dataclass(frozen=True)
class Told:
    """How a call ended, and what came before."""

    status: str
    text: str
    messages: tuple[Compared, ...] = ()

    def describe(self) -> str:
        """Return it on one line."""
        return f"{self.status} {self.text!r} {[message.text[:800] for message in self.messages]}"


@dataclass
class Report:
    """What was played, and what differed."""

    seed: int
    played: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the counts, and every difference."""
        count = sum(self.played.values())
        first = f"seed {self.seed}: {count} requests to {len(self.played)} RPCs, answers {dict(self.statuses)}"
        return "\n".join([first, f"{len(self.differences)} differences", *self.differences])


class BuildSide:
    """One member."""

    def __init__(self, wire: Wire) -> None:
        self._streams = Streams(wire)
        status = wire.call("etcdserverpb.Maintenance/Status", b"").message
        self._ids = (int(status.header.member_id),)

    def play(self, rpc: str, payloads: Sequence[bytes]) -> Told:
        """Call with these messages, and wait for the end of all answers."""
        with contextlib.closing(self._streams.open(rpc)) as stream:
            for payload in payloads:
                stream.send(payload)
            if rpc == WATCH:
                stream.send(_FENCE_REQUEST)
                self._streams.wait(lambda: stream.ended is not None or _has_fence(stream.messages), rpc)
            else:
                stream.half_close()
                self._streams.wait(lambda: stream.ended is not None, rpc)
            messages = list(stream.messages)
        ended = stream.ended if rpc != WATCH or not _has_fence(messages) else None
        self._streams.forget(stream)
        if rpc == WATCH:
            # Events and progress come before the fence or behind it, as a watcher that is behind catches up.
            messages = [each for each in messages if (each.created or each.canceled) and not each.compact_revision]
        is_cut = rpc in STREAMS and ended is not None and ended.code != "OK"  # before or after an answer on its way
        if rpc in LARGE or is_cut:
            messages = []
        if rpc in UNORDERED:
            messages.sort(key=str)
        told = tuple(Compared(200, {}, _json(message), self._ids) for message in messages)
        return Told("open", "", told) if ended is None else Told(ended.code, ended.text, told)

    def close(self) -> None:
        """End all calls."""
        self._streams.close()


_FENCE_REQUEST = rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"fence", watch_id=FENCE))


def _has_fence(messages: Sequence[Any]) -> bool:
    return any(message.watch_id == FENCE for message in messages)


def _json(message: Any) -> bytes:
    told = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(told, separators=(",", ":")).encode()


class BuildPlayer:
    """Leads both members through one stream of odd requests."""

    def __init__(self, first: BuildSide, second: BuildSide, seed: int) -> None:
        self._sides = (first, second)
        self._requests = OddRequests(seed)
        self.report = Report(seed)

    def run(self, count: int) -> Report:
        """Play so many calls, fewer if too much differs."""
        while sum(self.report.played.values()) < count and len(self.report.differences) < DIFFERENCES_MAX:
            rpc = self._requests.next_rpc()
            payloads = [self._requests.payload(rpc)]
            if rpc in STREAMS:
                payloads += [self._requests.payload(rpc) for _ in range(_MESSAGES_MAX - 1)]
            self._step(rpc, payloads)
            for later, payload in self._requests.pending():
                self._step(later, [payload])
        return self.report

    def _step(self, rpc: str, payloads: Sequence[bytes]) -> None:
        first, second = (side.play(rpc, payloads) for side in self._sides)
        self.report.played[rpc] += 1
        self.report.statuses[first.status] += 1
        answer = first.messages[0].message if first.messages else None
        self._requests.observe(rpc, payloads[0], 200 if first.status == "OK" else 400, answer)
        if _differ(rpc, first, second):
            sent = [payload[:300].hex() for payload in payloads]
            self.report.differences.append(
                f"\n{rpc} {sent}\n  interpreted {first.describe()}\n  compiled    {second.describe()}"
            )


def _differ(rpc: str, first: Told, second: Told) -> bool:
    if (first.status, first.text, len(first.messages)) != (second.status, second.text, len(second.messages)):
        return True
    request = Request("POST", f"/v3/{PATHS.get(rpc, rpc)}", b"")
    pairs = zip(first.messages, second.messages, strict=True)
    return any(difference(request, one, other) is not None for one, other in pairs)


@contextlib.contextmanager
def clusters(*flags: str) -> Iterator[tuple[Cluster, Cluster]]:
    """Start one member of each build."""
    flags = (*FAST, *OPEN, *flags)
    with Cluster(INTERPRETED, flags=flags) as first, Cluster(RAFTKV, flags=flags) as second:
        yield first, second


def main(words: Sequence[str]) -> int:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(words)
    report = play(asked.seed, asked.count)
    print(report.describe())
    return 1 if report.differences else 0


def play(seed: int, count: int) -> Report:
    """Play so many requests of a seed on new members."""
    with clusters() as (one, other), Wire(one.endpoints) as first, Wire(other.endpoints) as second:
        sides = BuildSide(first), BuildSide(second)
        with contextlib.closing(sides[0]), contextlib.closing(sides[1]):
            return BuildPlayer(*sides, seed).run(count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
