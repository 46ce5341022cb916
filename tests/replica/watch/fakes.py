"""A client's end of a watch stream in memory; it reads on command, so that a test can make it slow."""

from __future__ import annotations

from collections.abc import Callable

from raftkv.pb import rpc_pb2
from raftkv.rpc.framing import PREFIX, PREFIX_BYTES


class FakeCall:
    """The call that a stream writes to. Messages are *queued* until ``read``."""

    def __init__(self) -> None:
        self.queued: list[bytes] = []
        self.responses: list[rpc_pb2.WatchResponse] = []
        self.queued_max_bytes = 0
        self.connection_send_buffer_size = 0
        self.crowded = False
        self._on_room: Callable[[], None] | None = None

    @property
    def send_buffer_size(self) -> int:
        return sum(map(len, self.queued))

    def send_frames_nowait(self, frames: bytes, count: int) -> None:
        position = 0
        while position < len(frames):
            flag, size = PREFIX.unpack_from(frames, position)
            assert flag == 0
            self.queued.append(frames[position + PREFIX_BYTES : position + PREFIX_BYTES + size])
            position += PREFIX_BYTES + size
        assert position == len(frames)
        self.queued_max_bytes = max(self.queued_max_bytes, self.send_buffer_size)

    def on_room(self, callback: Callable[[], None] | None) -> None:
        self._on_room = callback

    def read(self) -> list[rpc_pb2.WatchResponse]:
        """Read everything queued."""
        read = [rpc_pb2.WatchResponse.FromString(message) for message in self.queued]
        self.queued.clear()
        self.responses += read
        if self._on_room is not None:
            self._on_room()
        return read
