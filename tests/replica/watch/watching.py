"""A watch stream over grpcio, for tests on real processes: requests in, responses gathered as they come.

with Watch(address) as watch:
    watch.create(key=b"k")
    watch.wait(lambda: watch.events(0))
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import grpc

from raftkv.pb import rpc_pb2
from tests.compat.wire import CHANNEL_OPTIONS
from tests.procs import wait_for

PATH = "/etcdserverpb.Watch/Watch"


class Watch:
    """One stream; a thread reads it unless ``reading`` is false."""

    def __init__(self, address: str, *, metadata: tuple[tuple[str, str], ...] = (), reading: bool = True) -> None:
        self.responses: list[Any] = []
        self.error: grpc.RpcError | None = None
        self.ended = False
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        method = self._channel.stream_stream(
            PATH,
            request_serializer=rpc_pb2.WatchRequest.SerializeToString,
            response_deserializer=rpc_pb2.WatchResponse.FromString,
        )
        self._call = method(self._ask(), metadata=metadata)
        self._thread = threading.Thread(target=self._read)
        if reading:
            self._thread.start()

    def _ask(self) -> Iterator[Any]:
        while (request := self._requests.get()) is not None:
            yield request

    def _read(self) -> None:
        try:
            for response in self._call:
                self.responses.append(response)
        except grpc.RpcError as error:
            self.error = error
        self.ended = True

    def start_reading(self) -> None:
        """Begin to read, on a stream that was opened without."""
        self._thread.start()

    def create(self, **fields: Any) -> None:
        """Ask for a watcher."""
        self._requests.put(rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(**fields)))

    def cancel(self, watch_id: int) -> None:
        """End a watcher."""
        self._requests.put(rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=watch_id)))

    def ask_progress(self) -> None:
        """Ask how far the stream is."""
        self._requests.put(rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()))

    def half_close(self) -> None:
        """Say that no more requests come."""
        self._requests.put(None)

    def of(self, watch_id: int) -> list[Any]:
        """The responses to a watcher so far."""
        return [response for response in list(self.responses) if response.watch_id == watch_id]

    def events(self, watch_id: int) -> list[Any]:
        """Its events so far."""
        return [event for response in self.of(watch_id) for event in response.events]

    def is_created(self, watch_id: int) -> bool:
        """Whether the watcher is there."""
        return any(response.created for response in self.of(watch_id))

    def wait(self, condition: Callable[[], object], what: str = "a watch response") -> None:
        """Wait until something has come."""
        wait_for(lambda: bool(condition()), what)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.half_close()
        self._call.cancel()
        if self._thread.is_alive():
            self._thread.join()
        self._channel.close()
