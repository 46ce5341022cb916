"""python etcd3 (grpcio): ranges and watches of any size, see `report`."""

from __future__ import annotations

from collections.abc import Iterator

import etcd3
from report import Task, run


def ranged(task: Task) -> Iterator[bytes]:
    """The values of a prefix in one answer."""
    for value, _ in _client(task).get_prefix(task.prefix):
        yield value


def watched(task: Task) -> Iterator[bytes]:
    """The values of the events under a prefix since a revision."""
    events, cancel = _client(task).watch_prefix(task.prefix, start_revision=task.revision)
    for _ in range(task.count):
        yield next(events).value
    cancel()


def _client(task: Task) -> etcd3.Etcd3Client:
    options = [("grpc.max_receive_message_length", -1)]
    return etcd3.client(host=task.host, port=task.port, timeout=task.timeout_s, grpc_options=options)


if __name__ == "__main__":
    run(ranged, watched)
