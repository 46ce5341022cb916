"""A client: one request outstanding, every failure classified as definite or indefinite, everything recorded.

A client is pinned to one member, or moves to the next member after each failure. Nothing is retried, because a retry
would be a second request; grpc's own retries are switched off.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import grpc
import grpc.aio

from jepsen.db import Member
from jepsen.history import Operation, Recorder
from jepsen.ops import Request, may_write
from jepsen.outcome import classify
from jepsen.wire import METHODS, STREAMING, request_message, result_of

CHANNEL_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_receive_message_length", -1),
]


_ENDED = "the stream ended without an answer"


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a separate connection to a member's address."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class Gate:
    """The gate of all clients: it lets requests pass, or blocks them at a quiet point."""

    def __init__(self) -> None:
        self._open = asyncio.Event()

    def open(self) -> None:
        """Let requests pass."""
        self._open.set()

    def shut(self) -> None:
        """Block requests that have not started."""
        self._open.clear()

    async def wait_open(self) -> None:
        """Wait until requests may pass."""
        await self._open.wait()


class Client:
    """A client with one request outstanding at a time; each request is recorded with its outcome.

    Arguments:
        name: name, unique in the run; values of ``fresh_value`` start with it.
        members: members to ask; with several, the client moves on after a failure. The list may change between
            requests.
        recorder: recorder of the operations.
        gate: gate that blocks requests at quiet points.
        timeout_s: seconds after which an answer counts as lost.
        rng: source of this client's random choices.
    """

    def __init__(
        self, name: str, members: list[Member], recorder: Recorder, gate: Gate, timeout_s: float, rng: random.Random
    ) -> None:
        self.name = name
        self.rng = rng
        self.last_rev = 1
        self._members = members
        self._recorder = recorder
        self._gate = gate
        self._timeout_s = self._patience_s = timeout_s
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._at = 0
        self._asked = members[0]
        self._values = 0

    def fresh_value(self) -> str:
        """Return a value that no other client of the run writes."""
        self._values += 1
        return f"{self.name}.{self._values}"

    async def call(self, request: Request, timeout_s: float | None = None) -> Operation:
        """Send one request to one member and wait for its outcome.

        Arguments:
            request: request to send.
            timeout_s: seconds after which the answer counts as lost; None: the client's.
        """
        await self._gate.wait_open()
        member = self._asked = self._members[self._at % len(self._members)]
        operation = self._recorder.begin(self.name, member.number, member.lives, request)
        try:
            self._patience_s = timeout_s or self._timeout_s
            await self._send(operation)
        finally:
            await self._recorder.end(operation, member.lives)
        return operation

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()

    async def _send(self, operation: Operation) -> None:
        request = operation.request
        try:
            response = await self._exchange(request)
        except grpc.aio.AioRpcError as error:
            text = error.details() or ""
            operation.failure = classify(error.code().name, text, may_write(request))
            self._at += 1
            return
        operation.result = result_of(request, response)
        operation.rev, operation.by = response.header.revision, response.header.member_id
        self.last_rev = max(self.last_rev, operation.rev)

    async def _exchange(self, request: Request) -> Any:
        path, response_class = METHODS[type(request)]
        if self._asked.number not in self._channels:
            self._channels[self._asked.number] = open_channel(self._asked.address)
        channel = self._channels[self._asked.number]
        kinds = {"request_serializer": _serialized, "response_deserializer": response_class.FromString}
        if type(request) not in STREAMING:
            return await channel.unary_unary(path, **kinds)(request_message(request), timeout=self._patience_s)
        call = channel.stream_stream(path, **kinds)(timeout=self._patience_s)
        response = grpc.aio.EOF
        try:
            # A write to a call that has ended raises InvalidStateError; the outcome is read below.
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(request_message(request))
                response = await call.read()
            if response is grpc.aio.EOF:
                nothing = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(await call.code(), nothing, nothing, await call.details() or _ENDED)
            return response
        finally:
            call.cancel()


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())
