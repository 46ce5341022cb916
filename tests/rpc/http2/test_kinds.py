"""Requests whose headers differ in their timeouts: what is remembered of one must be true of the next."""

from __future__ import annotations

from random import Random
from typing import Any

import hpack
import pytest

from raftkv.rpc.http2 import Headers
from raftkv.rpc.http2.connection import ServerConnection
from raftkv.rpc.limits import ServerLimits
from tests.rpc.http2.ends import PREFACE, REQUEST, SETTLED, Recorder, ServerEnd
from tests.rpc.raw import END_HEADERS, END_STREAM, HEADERS, frame

TIMEOUT = b"grpc-timeout"
BAD = "stream {} PROTOCOL_ERROR"


class Client:
    """A client that puts every field into its table, as Go's does; what the server hears of its requests."""

    def __init__(self) -> None:
        self.heard = Recorder()
        self.heard.connection = ServerConnection(self.heard, ServerLimits())
        self.heard.connection.receive(PREFACE + SETTLED)
        self._encoder = hpack.Encoder()
        self._next_id = 1

    def ask(self, fields: Headers) -> list[Any]:
        """Send a request; returns the events that it led to."""
        block = self._encoder.encode([hpack.HeaderTuple(*field) for field in fields])
        self.heard.events.clear()
        self.heard.connection.receive(frame(HEADERS, END_HEADERS | END_STREAM, self._next_id, block))
        self._next_id += 2
        return [event[2] for event in self.heard.events if event[0] == "request"]


def test_each_request_is_heard_as_it_was_sent() -> None:
    client = Client()
    for number in range(300):  # more than the table holds: entries come and go
        fields = (*REQUEST, (TIMEOUT, b"%du" % (4_990_000 + number)), (b"hasleader", b"true"))
        assert client.ask(fields) == [fields]


@pytest.mark.parametrize("seed", range(20))
def test_a_remembered_kind_is_judged_as_one_that_is_new(seed: int) -> None:
    """After anything that came before, a request on an old connection is taken or refused as on a fresh one."""
    rng = Random(seed)
    client = Client()
    more = [
        (TIMEOUT, b"1S"),
        (TIMEOUT, b""),
        (TIMEOUT, b"\0"),
        (b"te", b"gzip"),
        (b"content-length", b"0"),
        (b"x", b"y"),
    ]
    for _ in range(60):
        fields = list(REQUEST)
        for field in rng.choices(more, k=rng.randrange(4)):
            fields.insert(rng.randrange(len(fields) + 1), field)
        if rng.random() < 0.1:
            rng.shuffle(fields)
        assert client.ask(tuple(fields)) == Client().ask(tuple(fields))


def test_an_unsound_timeout_is_refused_though_its_kind_is_known() -> None:
    end = ServerEnd()
    for number, value in enumerate((b"1S", b"2S", b"3\n")):
        block = hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*one) for one in (*REQUEST, (TIMEOUT, value))])
        end.feed(frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, block))
    assert end.verdict == BAD.format(5)
    assert [event[1] for event in end.events if event[0] == "request"] == [1, 3]
