"""A client of TCPStore's protocol on a raw socket, for torch's own server and the gateway alike; and both of those."""

from __future__ import annotations

import contextlib
import datetime
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from raftkv.training.tcpstore.wire import VALIDATION, Op, pack_bytes, pack_int

TIMEOUT_S = 120.0
EOF = b"<closed>"
SILENT = (Op.SET, Op.MULTI_SET, Op.APPEND, Op.QUEUE_PUSH)


def encode(op: Op, *fields: bytes | int | Sequence[bytes]) -> bytes:
    """A request: bytes are strings, integers 64 bits, sequences are counted."""
    parts = [bytes([op])]
    for field in fields:
        if isinstance(field, int):
            parts.append(struct.pack("<I", field) if op is Op.PING else pack_int(field))
        elif isinstance(field, bytes):
            parts.append(pack_bytes(field))
        else:
            size = len(field) // 2 if op is Op.MULTI_SET else len(field)
            parts += [pack_int(size), *map(pack_bytes, field)]
    return b"".join(parts)


class RawClient:
    """One connection."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S, (host, 0))
        self.send(VALIDATION)

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, size: int) -> bytes:
        """So many bytes; fewer and ``EOF`` if the server closes the connection."""
        data = b""
        while len(data) < size:
            try:
                more = self.socket.recv(size - len(data))
            except ConnectionError:
                more = b""
            if not more:
                return data + EOF
            data += more
        return data

    def arrived(self) -> bytes:
        """What has come by now, without waiting for more."""
        self.socket.setblocking(False)
        try:
            return self.socket.recv(1024)
        except BlockingIOError:
            return b""
        finally:
            self.socket.settimeout(TIMEOUT_S)

    def ask(self, op: Op, *fields: bytes | int | Sequence[bytes]) -> bytes:
        """A request and its answer; a PING behind one that has none."""
        request = encode(op, *fields)
        try:
            self.send(request + encode(Op.PING, 7) if op in SILENT else request)
        except ConnectionError:
            return EOF
        count = len(fields[0]) if op is Op.MULTI_GET and not isinstance(fields[0], int) else 1
        return self._answer(op, count)

    def _answer(self, op: Op, count: int) -> bytes:
        if op in SILENT or op is Op.PING:
            return self.read(4)
        if op in (Op.CHECK, Op.WAIT, Op.CANCEL_WAIT, Op.BARRIER):
            return self.read(1)
        if op in (Op.GET, Op.COMPARE_SET, Op.MULTI_GET):
            return b"".join(self._string() for _ in range(count))
        number = self.read(8)
        if op is Op.QUEUE_POP and number.strip(b"\0"):
            return number + self._string()
        if op is Op.LIST_KEYS and not number.endswith(EOF):
            return number + b"".join(sorted(self._string() for _ in range(int.from_bytes(number, "little"))))
        return number

    def _string(self) -> bytes:
        size = self.read(8)
        return size if size.endswith(EOF) else size + self.read(int.from_bytes(size, "little"))


@contextlib.contextmanager
def torch_server(*, libuv: bool) -> Iterator[int]:
    """Torch's own server; its port."""
    from torch.distributed import TCPStore

    store = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        use_libuv=libuv,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    yield store.port


@contextlib.contextmanager
def gateway(endpoints: Sequence[str], *flags: str, log: Path | None = None) -> Iterator[int]:
    """The gateway as its users start it; its port. It must end as it is asked to."""
    process = start_gateway(endpoints, *flags, log=log)
    try:
        yield gateway_port(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()


def start_gateway(
    endpoints: Sequence[str], *flags: str, log: Path | None = None, before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """A gateway; ``before``: what its command line begins with."""
    command = [*before, sys.executable, "-m", "raftkv", "tcpstore-gateway", f"--endpoints={','.join(endpoints)}"]
    with contextlib.ExitStack() as stack:
        errors = None if log is None else stack.enter_context(log.open("w"))
        return subprocess.Popen(
            [*command, "--listen=127.0.0.1:0", *flags], stdout=subprocess.PIPE, stderr=errors, text=True
        )


def gateway_port(process: subprocess.Popen[str]) -> int:
    """Wait for the line that says where it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("raftkv: TCPStore gateway on 127.0.0.1:"), line
    return int(line.split(",")[0].rpartition(":")[2])
