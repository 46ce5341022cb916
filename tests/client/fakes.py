"""A transport without a network, with scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from raftkv.client.rpc.core import ClientOptions
from raftkv.rpc.status import RpcError
from raftkv.urls import Endpoint

Answer = bytes | RpcError | Callable[[str, bytes, tuple], bytes]


class FakeTransport:
    """Gives its answers in turn, repeats the last one, and records the calls."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, bytes, tuple]] = []
        self.closed = False

    async def unary(self, path, message, timeout_s=None, metadata=()):
        self.calls.append((path, message, tuple(metadata)))
        await asyncio.sleep(0)  # as on a real connection, others run before the answer is there
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RpcError):
            raise RpcError(answer.code, answer.text, definite=answer.definite)
        return answer(path, message, tuple(metadata)) if callable(answer) else answer

    async def first_attempt(self):
        return True

    async def close(self) -> None:
        self.closed = True


class FakeCluster:
    """One fake transport per endpoint."""

    def __init__(self, **answers: list[Answer]) -> None:
        self.members = {name: FakeTransport(list(script)) for name, script in answers.items()}

    def open(self, endpoint: Endpoint, options: ClientOptions) -> FakeTransport:
        return self.members[endpoint.host]
