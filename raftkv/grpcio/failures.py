"""Converts failures of grpcio to errors of raftkv.

A member's status has etcd's texts, which ``raftkv.client.errors`` converts. Failures inside grpcio (no connection,
timeout, message too large) are first translated to the texts of raftkv's own channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from raftkv import errors
from raftkv.client.errors import ConnectionLost, from_status

_Make = Callable[[str], errors.StatusError]

_BROKEN: Final = (
    r"Socket closed|.*Connection reset by peer|.*Broken pipe|Connection (refused|aborted|closed)|.*GOAWAY|"
    r"Stream removed|(keepalive|ping) .*timeout|recvmsg:|End of TCP stream|Transport closed"
)


def _sized(words: str) -> _Make:
    def make(text: str) -> errors.StatusError:
        sizes = re.search(r"\((\d+) vs\. (\d+)\)", text)
        return from_status(errors.RESOURCE_EXHAUSTED, words + (sizes[0] if sizes is not None else "(?)"))

    return make


_LOCAL: Final[tuple[tuple[int, re.Pattern[str], _Make], ...]] = (
    (errors.DEADLINE_EXCEEDED, re.compile("Deadline Exceeded"), lambda _: errors.ContextDeadlineExceededError()),
    (
        errors.UNAVAILABLE,
        re.compile("failed to connect to all addresses|DNS resolution failed"),
        lambda text: from_status(errors.UNAVAILABLE, text, definite=True),
    ),
    (errors.UNAVAILABLE, re.compile(_BROKEN), lambda _: ConnectionLost(definite=False)),
    (
        errors.RESOURCE_EXHAUSTED,
        re.compile(r".*Sent message larger than max"),
        _sized("trying to send message larger than max "),
    ),
    (
        errors.RESOURCE_EXHAUSTED,
        re.compile(r".*Received message larger than max"),
        _sized("grpc: received message larger than max "),
    ),
)
"""Code and text of a grpcio failure, and the corresponding error."""


def error_of(failure: Any) -> errors.StatusError:
    """Return raftkv's error for a failed call.

    Arguments:
        failure: ``grpc.RpcError`` of a call, sync or async.
    """
    code, text = failure.code().value[0], failure.details() or ""
    for local, words, make in _LOCAL:
        if code == local and words.match(text):
            return make(text)
    return from_status(code, text)
