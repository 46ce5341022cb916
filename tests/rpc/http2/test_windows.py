"""Both ends on a pipe that carries octets in pieces: no window is overrun, and none is lost (RFC 9113 section 6.9)."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.rpc.framing import frame
from raftkv.rpc.http2 import PREFACE
from raftkv.rpc.http2.frames import settings_frame
from raftkv.rpc.limits import ChannelOptions, ServerLimits
from tests.rpc.http2.ends import REQUEST, RESPONSE, TRAILERS, ClientEnd, End, ServerEnd, frames_of
from tests.rpc.raw import DATA, END_STREAM, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE

STREAM, CONNECTION = 65_535, 80_000
INITIAL_WINDOW_SIZE = 4


class Ledger:
    """What one end may send, by the frames that it has got and sent."""

    def __init__(self) -> None:
        self.connection = 65_535
        self.initial = 65_535
        self.streams: dict[int, int] = defaultdict(int)
        """What a stream's window is beyond the initial one."""
        self.ended: set[int] = set()
        self.settings: list[int] = []
        """Initial windows that the end has got; what it sends before its acknowledgement keeps the ones before."""
        self.rest = b""
        self.skip = 0

    def got(self, octets: bytes) -> None:
        """Octets have reached the end."""
        self.rest += octets[self.skip :]
        self.skip = max(0, self.skip - len(octets))
        while len(self.rest) >= 9 and len(self.rest) >= (size := 9 + int.from_bytes(self.rest[:3], "big")):
            ((kind, flags, stream_id, payload),) = frames_of(self.rest[:size])
            self.rest = self.rest[size:]
            if kind == WINDOW_UPDATE and not stream_id:
                self.connection += int.from_bytes(payload, "big")
            elif kind == WINDOW_UPDATE:
                self.streams[stream_id] += int.from_bytes(payload, "big")
            elif kind == SETTINGS and not flags:
                entries = [payload[at : at + 6] for at in range(0, len(payload), 6)]
                sizes = [int.from_bytes(entry[2:], "big") for entry in entries if entry[1] == INITIAL_WINDOW_SIZE]
                self.settings += sizes

    def sent(self, octets: bytes) -> None:
        """The end has sent whole frames."""
        for kind, flags, stream_id, payload in frames_of(octets):
            if kind == SETTINGS and flags:
                self.initial = self.settings.pop(0)
            if kind in (DATA, HEADERS):
                assert stream_id not in self.ended, "nothing follows the end of a stream"
            if kind == DATA and payload:
                self.connection -= len(payload)
                self.streams[stream_id] -= len(payload)
                assert self.connection >= 0
                assert self.initial + self.streams[stream_id] >= 0
            if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.ended.add(stream_id)


class Pipe:
    """Two ends, and what is under way from one to the other."""

    def __init__(self) -> None:
        limits = ServerLimits(stream_window_bytes=STREAM, connection_window_bytes=CONNECTION)
        options = ChannelOptions(stream_window_bytes=STREAM, connection_window_bytes=CONNECTION)
        client, server = ClientEnd(options, start=b""), ServerEnd(limits, start=b"")
        self.ends: tuple[End, End] = (client, server)
        self.ledgers = (Ledger(), Ledger())
        self.under_way = [client.greeting, server.greeting]
        self.ledgers[1].skip = len(PREFACE)
        self.held: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        self.bodies: tuple[dict[int, bytearray], dict[int, bytearray]] = ({}, {})
        self.written: tuple[dict[int, bytearray], dict[int, bytearray]] = ({}, {})
        self.reset: set[int] = set()
        for end in self.ends:
            end.recorder.keeps = True

    def move(self, way: int, size: int) -> None:
        """Let octets of one end (0: the client's) reach the other."""
        if not self.ends[way].connection.is_blocked:
            out = self.ends[way].octets()
            self.ledgers[way].sent(out)
            self.under_way[way] += out
        octets, self.under_way[way] = self.under_way[way][:size], self.under_way[way][size:]
        other = 1 - way
        self.ledgers[other].got(octets)
        self.ends[other].connection.receive(octets)
        self._hear(other)

    def _hear(self, who: int) -> None:
        for event in self.ends[who].events:
            assert event[0] != "failed", event
            if event[0] == "data":
                self.held[who][event[1]] += len(event[2])
                self.bodies[who].setdefault(event[1], bytearray()).extend(event[2])
            elif event[0] == "closed" and event[2]:
                self.reset.add(event[1])
        self.ends[who].events.clear()

    def acknowledge(self, who: int, stream_id: int, size: int) -> None:
        size = min(size, self.held[who][stream_id])
        self.held[who][stream_id] -= size
        self.ends[who].connection.acknowledge(size, stream_id)

    def send(self, who: int, stream_id: int, size: int, ends: bool) -> None:
        """Write a body, and what ends it, if the end is still open."""
        connection = self.ends[who].connection
        stream = connection._streams.get(stream_id)
        if stream is None or stream.is_local_closed:
            return
        if who and stream_id not in self.written[who]:
            connection.send_headers(stream_id, RESPONSE)
        written = self.written[who].setdefault(stream_id, bytearray())
        piece = bytes((len(written) + n) % 251 for n in range(size))
        written += piece
        connection.send_data(stream_id, piece)
        if ends and who and stream.is_remote_closed:
            connection.send_headers(stream_id, TRAILERS, end_stream=True)
        elif ends and not who:
            connection.end_stream(stream_id)

    def finish(self) -> None:
        """Open everything, and let all that is left be said and read."""
        for who in (0, 1):
            self.ends[who].connection.is_blocked = False
            self.narrow(who, STREAM)
        for who in (0, 1):
            for stream_id in list(self.ends[who].connection._streams):
                self.send(who, stream_id, 1, ends=not who)
        for _ in range(3):
            self._drain()
            for stream_id in list(self.ends[1].connection._streams):
                self.send(1, stream_id, 1, ends=True)
        self._drain()

    def _drain(self) -> None:
        for _ in range(60):
            for way in (0, 1):
                self.move(way, 1 << 20)
                for stream_id in list(self.held[1 - way]):
                    self.acknowledge(1 - way, stream_id, 1 << 20)

    def narrow(self, who: int, size: int) -> None:
        """Tell an end of another SETTINGS_INITIAL_WINDOW_SIZE, which is not above what its peer takes."""
        connection = self.ends[1 - who].connection
        connection._settings_sent += 1
        connection._out.append(settings_frame({INITIAL_WINDOW_SIZE: size}))

    def check(self) -> None:
        """All that was written has come, and no octet of a window is lost."""
        for who in (0, 1):
            mine, theirs = self.ends[who].connection, self.ends[1 - who].connection
            assert mine.queued_body_size() == 0
            assert not mine._streams
            assert not mine._waiting
            assert not mine._stuck
            assert not mine._waiting_heads
            assert mine.send_window == self.ledgers[who].connection
            assert theirs._credit + theirs._returned == CONNECTION
            assert mine.send_window + theirs._returned == CONNECTION
            for stream_id, body in self.bodies[1 - who].items():
                written = self.written[who][stream_id]
                assert written.startswith(body)
                assert stream_id in self.reset or written == body


STREAMS = st.sampled_from((1, 3, 5, 7))
SIZES = st.sampled_from((0, 1, 5, 1000, 16_384, 16_385, 40_000, 100_000))
WHO = st.integers(0, 1)
STEPS = st.one_of(
    st.tuples(st.just("ask")),
    st.tuples(st.just("send"), WHO, STREAMS, SIZES, st.booleans()),
    st.tuples(st.just("send"), WHO, STREAMS, SIZES, st.booleans()),
    st.tuples(st.sampled_from(("answer", "answer_stream")), STREAMS, SIZES),
    st.tuples(st.just("reset"), WHO, STREAMS),
    st.tuples(st.just("read"), WHO, STREAMS, SIZES),
    st.tuples(st.just("move"), WHO, st.sampled_from((1, 9, 100, 20_000, 1 << 20))),
    st.tuples(st.just("move"), WHO, st.just(1 << 20)),
    st.tuples(st.just("block"), WHO, st.booleans()),
    st.tuples(st.just("narrow"), WHO, st.sampled_from((0, 1, 100, 30_000, STREAM))),
)


def _do(pipe: Pipe, what: str, *rest: int) -> None:
    client, server = (end.connection for end in pipe.ends)
    if what == "ask" and client._next_id < 9:
        client.send_request(REQUEST)
    elif what == "send":
        who, stream_id, size, ends = rest
        pipe.send(who, stream_id, size, bool(ends))
    elif what in ("answer", "answer_stream"):
        stream_id, size = rest
        message = bytes(min(size, 16_000))
        framed = frame(message)
        if stream_id in pipe.written[1]:
            return
        if server.answer(stream_id, message) if what == "answer" else server.answer(stream_id, framed, True):
            pipe.written[1][stream_id] = bytearray(framed)
    elif what == "reset":
        who, stream_id = rest
        pipe.ends[who].connection.reset(stream_id, 8)
        pipe._hear(who)
    elif what == "read":
        pipe.acknowledge(*rest)
    elif what == "move":
        pipe.move(*rest)
    elif what == "block":
        pipe.ends[rest[0]].connection.is_blocked = bool(rest[1])
    elif what == "narrow":
        pipe.narrow(*rest)


@settings(max_examples=150)
@given(st.lists(STEPS, min_size=5, max_size=60))
def test_windows_are_held_and_come_back(steps: list[tuple[str | int, ...]]) -> None:
    pipe = Pipe()
    for what, *rest in [("ask",), ("ask",), ("move", 0, 1 << 20), ("move", 1, 1 << 20), *steps]:
        _do(pipe, str(what), *map(int, rest))
    pipe.finish()
    pipe.check()
