"""The engine beside nghttp2 and hyper's ``h2``: the same frames, and whether they make the same of them.

    python -m tests.rpc.http2.differential --frames 1000000 --seed 1

After every frame is compared: whether it is taken, what stream or connection ends over it and with which code, what the
application hears, which PINGs and SETTINGS are answered, and how much may be sent. Ours must agree with nghttp2, or
with ``h2``, which is asked only then, or differ for a ``reason``: a connection is over with the first difference, for
the states are no longer the same.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import ngh2
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, RequestReceived, ResponseReceived, TrailersReceived
from h2.exceptions import H2Error, ProtocolError

from raftkv.rpc.http2 import PREFACE
from raftkv.rpc.http2 import frames as f
from raftkv.rpc.http2.hpack import Decoder, Headers
from raftkv.rpc.limits import ChannelOptions, ServerLimits
from tests.rpc.http2.ends import REQUEST, RESPONSE, SETTLED, TRAILERS, ClientEnd, Frame, ServerEnd, frames_of
from tests.rpc.http2.generator import Generator
from tests.rpc.raw import ACK, DATA, END_STREAM, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS

WINDOW = 65_535
LIMITS = ServerLimits(stream_window_bytes=WINDOW, connection_window_bytes=WINDOW)
OPTIONS = ChannelOptions(stream_window_bytes=WINDOW, connection_window_bytes=WINDOW, header_list_bytes=16_384)
ASKED = tuple(range(1, 30, 2))
ENDED = ASKED[:10]
"""Streams of a client, and those of them whose requests have ended."""

FRAMES = 60
"""Most frames that one connection is played with."""

MANY = 1 << 30


@dataclass
class Step:
    """What an end made of a frame.

    Attributes:
        failed: code of the connection's end; None: it goes on.
        resets: streams that it has reset, and why.
        heard: what the application hears, in order.
        answers: PING and SETTINGS that it has acknowledged.
        sent: DATA octets, header blocks and ends of streams that it has sent.
    """

    failed: int | None = None
    resets: dict[int, int] = field(default_factory=dict)
    heard: list[tuple[Any, ...]] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    sent: Counter[Any] = field(default_factory=Counter)

    def say(self, frames: list[Frame]) -> None:
        for kind, flags, stream_id, payload in frames:
            if kind == GOAWAY:
                code = int.from_bytes(payload[4:8], "big")
                self.failed = code or self.failed
            elif kind == RST_STREAM:
                self.resets.setdefault(stream_id, int.from_bytes(payload, "big"))
            elif kind in (PING, SETTINGS) and flags & ACK:
                self.answers.append(payload)
            elif kind == DATA:
                self.sent[stream_id, "data"] += len(payload)
            elif kind == HEADERS:
                self.sent[stream_id, "headers"] += 1
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                self.sent[stream_id, "end"] += 1

    @property
    def verdict(self) -> tuple[Any, ...]:
        return ("connection",) if self.failed is not None else tuple(sorted(self.resets))


class Ours:
    """The engine under test."""

    name = "ours"

    def __init__(self, is_server: bool) -> None:
        self.end = ServerEnd(LIMITS) if is_server else ClientEnd(OPTIONS)
        if not is_server:
            self.end = ClientEnd(OPTIONS, start=b"")
            self.end.feed(SETTLED)
            for stream_id in ASKED:
                self.end.connection.send_request(REQUEST)
                if stream_id in ENDED:
                    self.end.connection.end_stream(stream_id)
            self.end.flush()
            self.end.forget()
        self.connection = self.end.connection

    def feed(self, octets: bytes) -> Step:
        self.connection.receive(octets)
        return self._step()

    def _step(self) -> Step:
        step = Step()
        step.say(self.end.flush())
        for event in self.end.events:
            if event[0] in ("request", "response", "trailers", "data"):
                step.heard.append(event)
            elif event[0] == "goaway":
                step.heard.append(event[:3])
        self.end.forget()
        return step

    def do(self, what: str, stream_id: int, size: int) -> Step:
        if what == "reset":
            self.connection.reset(stream_id, 8)
        elif what == "head":
            self.connection.send_headers(stream_id, RESPONSE)
        elif what == "trailers":
            self.connection.send_headers(stream_id, TRAILERS, end_stream=True)
        else:
            self.connection.send_data(stream_id, bytes(size), end_stream=what == "last")
        return self._step()

    @property
    def window(self) -> int:
        return int(self.connection.send_window)


class Nghttp2:
    """libnghttp2, by the binding that raftkv once ran on."""

    name = "nghttp2"

    def __init__(self, is_server: bool) -> None:
        config = ngh2.Configuration(
            auto_window_update=False,
            stream_reset_rate_limit=(MANY, MANY),
            glitch_rate_limit=(MANY, MANY),
            max_settings=32,
            max_inbound_header_list_size=16_384,
            max_inbound_header_count=128 if is_server else 1024,
            max_outbound_ack=1000,
        )
        self.connection = ngh2.Connection(ngh2.Role.SERVER if is_server else ngh2.Role.CLIENT, config)
        self.connection.initiate_connection({} if is_server else {2: 0})
        self.connection.data_to_send()
        self._is_server = is_server
        self.feed(PREFACE + SETTLED if is_server else SETTLED)
        if not is_server:
            for stream_id in ASKED:
                self.connection.send_request(REQUEST, end_stream=stream_id in ENDED)
            self.connection.data_to_send()

    def feed(self, octets: bytes) -> Step:
        try:
            self.connection.receive_data(octets)
        except ngh2.ConnectionStateError:
            return Step()  # it has ended before
        return self._step()

    def _step(self) -> Step:
        step = Step()
        for event in self.connection.events():
            self._hear(step, event)
        step.say(frames_of(self.connection.data_to_send()))
        return step

    def _hear(self, step: Step, event: Any) -> None:
        if isinstance(event, ngh2.RequestReceived):
            step.heard.append(("request", event.stream_id, event.headers, event.end_stream))
        elif isinstance(event, ngh2.ResponseReceived):
            step.heard.append(("response", event.stream_id, event.headers, event.end_stream))
        elif isinstance(event, ngh2.TrailersReceived):
            if self._is_server:
                step.heard.append(("data", event.stream_id, b"", True))
            else:
                step.heard.append(("trailers", event.stream_id, event.headers))
        elif isinstance(event, ngh2.DataReceived):
            step.heard.append(("data", event.stream_id, event.data, event.end_stream))
            if event.data:
                self.connection.acknowledge_received_data(len(event.data), event.stream_id)
        elif isinstance(event, ngh2.GoAwayReceived):
            step.heard.append(("goaway", event.last_stream_id, event.error_code))

    def do(self, what: str, stream_id: int, size: int) -> Step:
        if what == "reset":
            self.connection.reset_stream(stream_id, 8)
        elif what == "head":
            self.connection.send_response(stream_id, RESPONSE)
        elif what == "trailers":
            self.connection.send_trailers(stream_id, TRAILERS)
        else:
            self.connection.send_data(stream_id, bytes(size), end_stream=what == "last")
        return self._step()

    @property
    def window(self) -> int | None:
        try:
            return self.connection.remote_window_size
        except ngh2.ConnectionStateError:
            return None  # it has ended: the peer goes, and no stream is left


class Hyper:
    """hyper's ``h2``, asked when the others do not agree."""

    name = "h2"

    def __init__(self, is_server: bool) -> None:
        self.connection = H2Connection(H2Configuration(client_side=not is_server, header_encoding=None))
        self._is_server = is_server
        if not is_server:
            self.connection.update_settings({2: 0})
        self.connection.initiate_connection()
        self.connection.data_to_send()
        self.feed(PREFACE + SETTLED if is_server else SETTLED)
        if not is_server:
            for stream_id in ASKED:
                self.connection.send_headers(stream_id, list(REQUEST), end_stream=stream_id in ENDED)
            self.connection.data_to_send()

    def feed(self, octets: bytes) -> Step:
        step = Step()
        try:
            events = self.connection.receive_data(octets)
        except ProtocolError:
            events = []
            step.failed = 1
        for event in events:
            self._hear(step, event)
        step.say(frames_of(self.connection.data_to_send() or b""))
        return step

    def _hear(self, step: Step, event: Any) -> None:
        name = {RequestReceived: "request", ResponseReceived: "response", TrailersReceived: "trailers"}.get(type(event))
        if name == "trailers" and self._is_server:
            step.heard.append(("data", event.stream_id, b"", True))
        elif name == "trailers":
            step.heard.append((name, event.stream_id, tuple(map(tuple, event.headers))))
        elif name is not None:
            fields = tuple((bytes(a), bytes(b)) for a, b in event.headers)
            step.heard.append((name, event.stream_id, fields, event.stream_ended is not None))
        elif isinstance(event, DataReceived):
            step.heard.append(("data", event.stream_id, bytes(event.data), event.stream_ended is not None))
            if event.flow_controlled_length:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, ConnectionTerminated):
            step.heard.append(("goaway", event.last_stream_id, int(event.error_code)))

    def do(self, what: str, stream_id: int, size: int) -> Step:
        step = Step()
        try:
            if what == "reset":
                self.connection.reset_stream(stream_id, 8)
            elif what in ("head", "trailers"):
                fields = RESPONSE if what == "head" else TRAILERS
                self.connection.send_headers(stream_id, list(fields), end_stream=what == "trailers")
            else:
                self.connection.send_data(stream_id, bytes(size), end_stream=what == "last")
        except H2Error:
            step.failed = 1
        step.say(frames_of(self.connection.data_to_send() or b""))
        return step


Action = bytes | tuple[str, int, int]


def _play(end: Any, action: Action) -> Step:
    return end.feed(action) if isinstance(action, bytes) else end.do(*action)


def _heard(step: Step) -> list[tuple[Any, ...]]:
    """What was heard, but for empty DATA that ends nothing."""
    return [event for event in step.heard if event[0] != "data" or event[2] or event[3]]


def _said(step: Step) -> str:
    if step.failed is not None:
        return f"connection {step.failed}"
    return ", ".join(f"stream {code}" for code in sorted(step.resets.values())) or "taken"


def compare(ours: Step, theirs: Step) -> str:
    """What two ends differ in; empty: nothing."""
    if ours.verdict != theirs.verdict or ours.failed != theirs.failed or ours.resets != theirs.resets:
        return f"{_said(ours)} / {_said(theirs)}"
    if ours.failed is not None:
        return ""
    if _heard(ours) != _heard(theirs):
        return "heard"
    if ours.answers != theirs.answers:
        return "answers"
    return "sent" if ours.sent != theirs.sent else ""


KINDS = (
    "DATA", "HEADERS", "PRIORITY", "RST_STREAM", "SETTINGS", "PUSH_PROMISE", "PING", "GOAWAY", "WINDOW",
    "CONTINUATION",
)  # fmt: skip
EXTENSIONS = (0x0A, 0x0C, 0x10)
"""ALTSVC, ORIGIN and PRIORITY_UPDATE, which nghttp2 knows."""

CONTENT_LENGTH_LAST = "a content-length among trailers is a rule for senders (RFC 9110, 6.5.1)"


def last_fields(actions: Sequence[Action]) -> Headers:
    """Return the fields of the last header block: a server does not tell of the trailers of a request."""
    decoder = Decoder(MANY, MANY)
    fields: Headers = ()
    block = b""
    for action in actions:
        for kind, flags, _, payload in frames_of(action) if isinstance(action, bytes) else ():
            if kind == f.HEADERS:
                is_padded, has_priority = flags & f.PADDED != 0, flags & f.HAS_PRIORITY != 0
                end = len(payload) - payload[0] if is_padded else len(payload)
                block = payload[is_padded + has_priority * f.PRIORITY_BYTES : end]
            elif kind == f.CONTINUATION:
                block += payload
            if kind in (f.HEADERS, f.CONTINUATION) and flags & f.END_HEADERS:
                fields = decoder.decode(block)[0]
    return fields


def reason(actions: Sequence[Action], ours: Step, theirs: Step, difference: str) -> str:
    """Why ours differs from nghttp2 over the last action, and rightly; empty: it is not known."""
    action = actions[-1]
    if action[0] == "trailers" and difference == "sent":
        return "trailers need no window (6.9); the binding of nghttp2 sends them by way of a body"
    if difference == "sent" and _bodies(ours) == _bodies(theirs):
        return "streams take turns in another way where the connection's window is short"
    if set(ours.resets.values()) == {0} and theirs.verdict == ():
        return "an answer before the end of its request asks the client to stop (8.1)"
    if not isinstance(action, bytes):
        return ""
    for event in ours.heard:
        names = [name for name, _ in event[2]] if event[0] in ("request", "response") else [b":authority"]
        if event[0] == "request" and (b":authority" not in names or (b"host", b"") in event[2]):
            return "nghttp2 wants :authority or host, and not empty; 8.3.1 says that there may be none"
        if event[0] == "trailers" and b"content-length" in dict(event[2]):
            return CONTENT_LENGTH_LAST
        if event[0] == "request" and re.search(rb"[#/]", dict(event[2])[b":authority"]):
            return "an authority as etcd's client 3.5.0 says it, which RFC 3986 does not have"
        if names.count(b"content-length") > 1:
            return "a content-length that is there twice, and the same (RFC 9110, 8.6)"
    kinds = {kind for kind, *_ in frames_of(action)}
    if ours.failed is not None and theirs.failed is not None:
        return "the connection ends; which of two rules is looked at first is free"
    codes = set(ours.resets.values())
    if ours.failed is None and theirs.failed is not None and codes == {theirs.failed}:
        return "an error of the stream, which nghttp2 makes one of the connection (5.4.2)"
    if ours.failed is None and theirs.failed == 5 and 1 in codes and 1 in kinds:
        return "a HEADERS frame that does not end the stream after one that did, together: malformed (8.1)"
    if codes == {1} and kinds == {0} and not any(map(_content, frames_of(action))):
        return "an empty DATA frame before a header: malformed (8.1), which nghttp2 takes"
    is_closed = 5 in codes or ours.failed == 5
    if is_closed and kinds & {0, 1} and (not theirs.resets or 5 in theirs.resets.values()):
        return "a frame of a closed stream: STREAM_CLOSED (5.1), which nghttp2 leaves out"
    if 4 in kinds and ours.failed in (1, 3) and theirs.failed is None:
        return "a value out of its range that the same frame replaces (6.5.2, 6.5.3)"
    if 7 in kinds and difference == "answers":
        return "what comes with a GOAWAY and after it, when no stream is left: nghttp2 looks at nothing more"
    if 7 in kinds and theirs.failed == 1:
        return "a GOAWAY that names a stream that was never opened: there is no rule (6.8)"
    if not is_closed and kinds & {1, 9} and not ours.resets and 1 in theirs.resets.values():
        fields = last_fields(actions)
        return _interim(action) or ("" if _is_head(fields) else _of_trailers(fields))
    if kinds == {4} and difference == "taken / connection 1" and _has_foreign_setting(action):
        return "a setting of an extension, which is ignored (6.5.2)"
    if kinds & {*EXTENSIONS} and ours.failed is None:
        return "a frame of an extension that we leave alone (5.5)"
    if len(frames_of(action)) > 1 and difference == "heard" and ours.resets:
        return "a request and its end in one piece: we tell of both"
    return ""


def _is_head(fields: Headers) -> bool:
    return any(name[:1] == b":" for name, _ in fields)


def _of_trailers(fields: Headers) -> str:
    """Why trailers are taken that nghttp2 refuses, as it does the header of a message with such fields."""
    if b"content-length" in dict(fields):
        return CONTENT_LENGTH_LAST
    return "an empty host among trailers: no rule looks for one there" if (b"host", b"") in fields else ""


def _has_foreign_setting(action: bytes) -> bool:
    payloads = [payload for _, _, _, payload in frames_of(action)]
    return any(payload[at : at + 2] == b"\0\x09" for payload in payloads for at in range(0, len(payload), 6))


def _content(frame: Frame) -> int:
    """Octets of a DATA frame but for padding."""
    _, flags, _, payload = frame
    return len(payload) - 1 - payload[0] if flags & 8 and payload else len(payload)


def _bodies(step: Step) -> int:
    return sum(size for (_, what), size in step.sent.items() if what == "data")


def _interim(action: bytes) -> str:
    """Whether a block is that of an interim response with a content-length: a rule for its sender (RFC 9110, 8.6)."""
    block = b"".join(payload for kind, _, _, payload in frames_of(action) if kind in (1, 9))
    is_interim = b"\x82\x08\x19" in block or b"103" in block
    return "content-length of an interim response" if is_interim else ""


def _block_is_open(action: Action) -> bool:
    """Whether a header block goes on: nghttp2 may find it wrong before it is whole."""
    if not isinstance(action, bytes):
        return False
    kind, flags, _, _ = frames_of(action)[-1]
    return kind in (1, 9) and not flags & 4


class Differential:
    """Runs of the ends beside each other.

    Attributes:
        frames: so far.
        asked: connections on which ``h2`` had to be asked.
        reasons: differences that are known, and how often.
        found: others: seed and what it is.
    """

    def __init__(self, is_server: bool) -> None:
        self.is_server = is_server
        self.frames = self.asked = 0
        self.reasons: Counter[str] = Counter()
        self.found: list[str] = []

    def run(self, seed: int) -> None:
        """Play one connection."""
        rng = Random(seed)
        made = Generator(seed, self.is_server, () if self.is_server else ASKED).frames(FRAMES)
        ours, theirs = Ours(self.is_server), Nghttp2(self.is_server)
        said: dict[int, str] = {} if self.is_server else {one: "head" for one in ASKED if one not in ENDED}
        ended: set[int] = set()
        actions: list[Action] = []
        for octets in made:
            self.frames += 1
            actions.append(octets)
            if not self._same(seed, actions, ours, theirs, said, ended):
                return
            while rng.random() < 0.3:
                action = self._act(rng, said, ended)
                if action is not None:
                    actions.append(action)
                    if not self._same(seed, actions, ours, theirs, said, ended):
                        return

    def _act(self, rng: Random, said: dict[int, str], ended: set[int]) -> Action | None:
        """What the application says next on some stream."""
        if not said:
            return None
        stream_id = rng.choice(list(said))
        if rng.random() < 0.1:
            del said[stream_id]
            return ("reset", stream_id, 0)
        if said[stream_id] == "":
            said[stream_id] = "head"
            return ("head", stream_id, 0)
        what = rng.choice(("data", "data", "last", "trailers" if self.is_server else "last"))
        if self.is_server and stream_id not in ended and rng.random() < 0.98:
            what = "data"
        if what != "data":
            del said[stream_id]
        return (what, stream_id, rng.choice((1, 10, 1000, 20_000)))

    def _same(
        self, seed: int, actions: list[Action], ours: Ours, theirs: Nghttp2, said: dict[int, str], ended: set[int]
    ) -> bool:
        """Play the last action on both; whether the connection goes on and they agree."""
        action = actions[-1]
        mine, other = _play(ours, action), _play(theirs, action)
        difference = compare(mine, other)
        if not difference and mine.failed is None and theirs.window not in (None, ours.window):
            difference = "window"
        if difference:
            self._differ(seed, actions, mine, other, difference)
            return False
        for event in mine.heard:
            if event[0] == "goaway":
                return False  # the others ignore what comes after it
            if event[0] == "request":
                said[event[1]] = ""
            if event[-1] is True:
                ended.add(event[1])
        for stream_id in [*mine.resets, *(one for one in said if one not in ours.connection._streams)]:
            said.pop(stream_id, None)
        return mine.failed is None

    def _differ(self, seed: int, actions: list[Action], mine: Step, other: Step, difference: str) -> None:
        action = actions[-1]
        known = (
            "a header block that is not whole" if _block_is_open(action) else reason(actions, mine, other, difference)
        )
        if not known:
            self.asked += 1
            hyper = Hyper(self.is_server)
            third = Step()
            for one in actions:
                third = _play(hyper, one)
            if (mine.failed is None) == (third.failed is None) and mine.resets.keys() == third.resets.keys():
                known = f"h2 does as we do: {difference}"
        if known:
            self.reasons[known] += 1
            return
        what = f"{KINDS[action[3]] if action[3] < 10 else action[3]}" if isinstance(action, bytes) else action
        shown = action[:60].hex() if isinstance(action, bytes) else ""
        self.found.append(f"seed {seed}, step {len(actions)}, {what}: {difference} (h2: {_said(third)}) {shown}")


def main() -> int:
    """Run what the command line asks for; 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.rpc.http2.differential")
    parser.add_argument("--frames", type=int, default=1_000_000, help="of both ends together")
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000)
    given = parser.parse_args()
    runs = [Differential(is_server) for is_server in (True, False)]
    seed, shown = given.seed, 0
    while sum(run.frames for run in runs) < given.frames:
        for run in runs:
            run.run(seed)
            for text in run.found[:]:
                if shown < 50:
                    print("server" if run.is_server else "client", text, flush=True)
                shown += 1
            run.found.clear()
        seed += 1
    for run in runs:
        print(f"{'server' if run.is_server else 'client'}: {run.frames:,} frames, h2 asked {run.asked:,} times")
        for text, count in run.reasons.most_common():
            print(f"{count:>10,}  {text}")
    print(f"seeds {given.seed} to {seed}; {shown} findings")
    return bool(shown)


if __name__ == "__main__":
    sys.exit(main())
