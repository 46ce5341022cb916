"""A server whose every answer the test writes itself: for what our client makes of odd ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import ngh2

from jepsen.faults.network import close_server

OK_HEADERS = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK_TRAILERS = ((b"grpc-status", b"0"),)


class FakeConnection:
    """The server's end of one connection: events in, any action out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, settings: dict[int, int]) -> None:
        self.h2 = ngh2.Connection(ngh2.Role.SERVER)
        self.h2.initiate_connection(settings)
        self.requests: list[int] = []
        self._events: list[ngh2.Event] = []
        self._reader = reader
        self._writer = writer
        self.flush()

    def flush(self) -> None:
        self._writer.write(self.h2.data_to_send())

    async def event(self, kind: type[ngh2.Event]) -> ngh2.Event:
        """Return the next event of that kind."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kind):
                    return event
            data = await self._reader.read(65_536)
            if not data:
                raise EOFError
            self.h2.receive_data(data)
            self._events += self.h2.events()
            self.flush()

    async def request(self) -> int:
        """Return the stream of the next request whose body is complete."""
        while True:
            event = await self.event(ngh2.DataReceived)
            if event.end_stream:
                return event.stream_id

    def answer(self, stream_id: int, *pieces: bytes, trailers=OK_TRAILERS, headers=OK_HEADERS) -> None:
        self.h2.send_response(stream_id, headers)
        for piece in pieces:
            self.h2.send_data(stream_id, piece)
        if trailers is None:
            self.h2.end_stream(stream_id)
        else:
            self.h2.send_trailers(stream_id, trailers)
        self.flush()

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def drop(self) -> None:
        self._writer.transport.abort()


Script = Callable[[FakeConnection], Awaitable[None]]


@contextlib.asynccontextmanager
async def fake_server(script: Script, settings: dict[int, int] | None = None) -> AsyncIterator[str]:
    """Run ``script`` for every connection; yields the target."""
    failures: list[BaseException] = []
    tasks: list[asyncio.Task[None]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        task.add_done_callback(lambda done: writer.transport.abort())
        tasks.append(task)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(FakeConnection(reader, writer, settings or {}))
            while await reader.read(65_536):
                pass
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        except Exception as error:
            failures.append(error)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        await close_server(server)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert failures == []
