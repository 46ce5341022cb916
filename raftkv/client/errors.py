"""Converts a gRPC status to an error of raftkv.

The reverse of a server's conversion: the text of a status is looked up in the tree of ``raftkv.errors``, so a caller
catches ``CompactedError`` whether the answer came over the wire or not. A status that is not in the tree becomes an
``UnknownStatus``, which prints as in Go's clients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from raftkv import errors
from raftkv.errors import CODE_NAMES, ContextDeadlineExceededError, StatusError
from raftkv.rpc.status import CLOSED_TEXT

# -- reasons --------------------------------------------------------------------------------------------------------
#
# Why an endpoint did not answer, in plain words, with advice where the words alone do not suggest a remedy.

_OURS: Final = "--cert and --key, cert_file and key_file"
_AUTHORITY: Final = "name the file of the authority that signed it: --cacert, ca_file"
_ADVICE: Final = {
    "none was shown": f"show a client's: {_OURS}",
    "does not know the authority of our certificate": f"show one that its authority signed: {_OURS}",
    "our certificate has expired": f"renew it, or show another: {_OURS}",
    "our certificate is revoked": f"show another: {_OURS}",
    "refused our certificate": f"its log says why; to show another: {_OURS}",
    "unable to get local issuer certificate": _AUTHORITY,
    "self-signed certificate": _AUTHORITY,
    "certificate has expired": "renew it on that member; a clock that is ahead says so, too",
    "certificate is not yet valid": "set the clock, here or where it was made",
    "IP address mismatch": "use a name that the certificate has, or make it anew with this address",
    "Hostname mismatch": "use a name that the certificate has, or make it anew with this one",
    "does not speak TLS": "write http:// before it to reach it without TLS",
    "closed the connection before its HTTP/2 settings came": "if it speaks TLS, write https:// before it",
}
"""Words in a reason, and the advice; the first matching row counts."""


def explain_failures(failures: Mapping[str, str]) -> dict[str, str]:
    """Replace the wording of Go's clients for why each endpoint did not answer with plain words.

    Arguments:
        failures: endpoint to the text of its last failure.
    """
    return {endpoint: explain_failure(text) for endpoint, text in failures.items()}


def explain_failure(text: str) -> str:
    """Return a reason in plain words, with advice in parentheses.

    Arguments:
        text: text of a failed connection attempt or call.

    >>> explain_failure('connection error: desc = "transport: Error while dialing: dial tcp a:1: connect: refused"')
    'connect: refused'
    >>> explain_failure("the other end does not speak TLS")
    'the other end does not speak TLS (write http:// before it to reach it without TLS)'
    """
    text = _unframed(text)
    advice = next((advice for words, advice in _ADVICE.items() if words in text), "")
    return f"{text} ({advice})" if advice else text


def _unframed(text: str) -> str:
    """Strip the frame that Go's clients print around a connection failure."""
    text = re.sub(r"^rpc error: code = \w+ desc = ", "", text)
    if text == ContextDeadlineExceededError.text:
        return "connected, but did not answer"
    if text == _EOF:
        return "it closed the connection before it answered"
    if not text.startswith('connection error: desc = "'):
        return text
    text = re.sub(r"^.*dial (?:tcp|unix) \S+: ", "", text[26:].removesuffix('"'))
    # Under TLS 1.3, only this shows the client that the server rejected its certificate.
    return re.sub(r"^transport: \S+ (?=closed)(closed the connection before its HTTP/2 settings came: )?", "", text)


class WireStatus(StatusError):
    """A status without a class in the tree; ``code`` and ``definite`` are set for each error, not for the class."""

    def __init__(self, code: int, text: str, definite: bool = True) -> None:
        super().__init__(text)
        self.__dict__.update(code=code, definite=definite)


class UnknownStatus(WireStatus):
    """A status that is not in etcd's table either; ``desc`` is its text without the frame."""

    def __init__(self, code: int, desc: str, definite: bool = False) -> None:
        super().__init__(code, f"rpc error: code = {CODE_NAMES.get(code, f'Code({code})')} desc = {desc}", definite)
        self.desc = desc


class MessageTooLarge(errors.RequestTooLargeError):
    """A request larger than the client's limit; it was not sent."""

    code = errors.RESOURCE_EXHAUSTED

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}: split the request, or raise --max-request-bytes of this client and of the members")


class ReceivedTooLarge(errors.ResponseTooLargeError):
    """A message too large for its receiver: an answer for this client, or a request for a member.

    The error is the same in both cases, so the request may have been executed.
    """

    code = errors.RESOURCE_EXHAUSTED
    definite = False

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}; the request may have happened")


class WrongPort(errors.UnimplementedError):
    """The endpoint speaks gRPC but has no etcd service: it is a peer port, or not a member."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}: this is a peer port, or no member; clients use the URLs of --listen-client-urls")


class ConnectionLost(WireStatus, ConnectionError):
    """The connection broke while a call waited for its answer; see ``definite``."""

    def __init__(self, definite: bool) -> None:
        outcome = "did not happen" if definite else "may have happened"
        text = f"the member closed the connection before it answered; the request {outcome}"
        super().__init__(errors.UNAVAILABLE, text, definite)


class AuthenticationFailed(StatusError):
    """The user could not be authenticated, so the call was not made; ``cause`` is the reason."""

    def __init__(self, cause: StatusError) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.__dict__.update(code=cause.code)


class EndpointsFailed(errors.ContextDeadlineExceededError, ConnectionError):
    """No endpoint answered in time; the text names each endpoint and its failure. Also a ``ConnectionError``.

    Arguments:
        failures: endpoint to its last failure.
        timeout_s: time spent waiting for an answer.
        definite: True: the call certainly did not happen.
        explain: False: the text is etcd's, and the reasons are only in ``failures``.

    Attributes:
        failures: endpoint to its last failure, in plain words.
    """

    def __init__(self, failures: dict[str, str], timeout_s: float, *, definite: bool, explain: bool = True) -> None:
        self.failures = explain_failures(failures)
        reasons = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in self.failures.items())
        waited = f"{round(timeout_s, 3):g} s"
        super().__init__(f"no answer within {waited} from {reasons or 'any endpoint'}" if explain else None)
        self.__dict__["definite"] = definite


class LeaseLost(errors.RaftKVError):
    """A lease has ended, or is no longer safe to use: no keep-alive was confirmed within its TTL.

    Attributes:
        lease_id: id of the lease.
        definite: True: the call that raised this did not happen.
    """

    definite = True

    def __init__(self, lease_id: int, reason: str) -> None:
        super().__init__(f"lease {lease_id:x} is lost: {reason}")
        self.lease_id = lease_id
        self.reason = reason


class FenceLost(errors.RaftKVError):
    """Nothing was written: the lock or term that guards the write has ended (its key is gone or has a new owner).

    Attributes:
        key: key of the lock or term, as the store knows it.
        fence: create revision that the key had.
        definite: True: the write did not happen.
    """

    definite = True

    def __init__(self, key: bytes, fence: int, reason: str = "") -> None:
        cause = reason or "its key is gone, or belongs to another client"
        which = f" {key!r} at revision {fence}" if key else ""
        super().__init__(f"the lock or term{which} is lost: {cause}")
        self.key = key
        self.fence = fence


class LockLost(FenceLost):
    """A lock was lost while it was held or waited for."""


class TermLost(FenceLost):
    """An election was lost while leading or waiting to lead."""


class LockNotFree(errors.RaftKVError, TimeoutError):
    """Another holder kept the lock or term until the timeout; this client left the queue and holds nothing."""

    definite = True

    def __init__(self, name: str | bytes, timeout_s: float | None, holder: str = "by others") -> None:
        shown = name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")
        within = "" if timeout_s is None else f" for all of {timeout_s:g} s"
        super().__init__(f"{shown!r} is held or waited for {holder}{within}")
        self.name = name


class TxnConflict(errors.RaftKVError):
    """An STM transaction conflicted with other writers at every attempt; nothing was written."""

    definite = True


CLIENT_CLOSED: Final = "the client is closed"
ANOTHER_LOOP: Final = (
    "this client belongs to the event loop that it was first used on: make one in each (raftkv.aio.connect), or one "
    "for all threads (raftkv.connect)"
)
"""The text of a RuntimeError like asyncio's; the calling program is wrong."""


def is_client_closed(error: Exception) -> bool:
    """Return whether a call or a watch ended because this client was closed."""
    is_end = isinstance(error, errors.StatusError) and error.code == errors.CANCELED
    return is_end and str(error).endswith((CLIENT_CLOSED, CLOSED_TEXT))


class WatchCanceled(errors.StatusError):
    """A member ended a watch for good; the text says why."""

    code = errors.CANCELED


class HistoryReplaced(errors.CompactedError):
    """The history that a watch would continue was replaced, for example because the cluster was restored.

    Revisions seen so far may reappear with other contents, or never. This is a ``Compacted``: start with a read.
    """

    text = "the history of another cluster: this one was restored since, or the endpoints lead to several clusters"


class CacheTooLarge(errors.RaftKVError):
    """A cache exceeded its ``max_bytes``: it has dropped its content and answers no more reads."""

    definite = True

    def __init__(self, prefix: bytes, max_bytes: int) -> None:
        advice = "raise max_bytes, or cache a longer prefix"
        super().__init__(f"the cache of {prefix!r} would hold more than max_bytes={max_bytes:,}: {advice}")
        self.prefix = prefix
        self.max_bytes = max_bytes


class CacheBehind(errors.ContextDeadlineExceededError, TimeoutError):
    """A cache did not reach the state required by a read in time; it continues, and has not answered from older state.

    Attributes:
        revision: revision that the cache has reached.
    """

    definite = True

    def __init__(self, prefix: bytes, revision: int, wanted: str, timeout_s: float, reason: str) -> None:
        text = f"the cache of {prefix!r} is at revision {revision} and did not come to {wanted} within {timeout_s:g} s"
        super().__init__(f"{text}: {reason}" if reason else text)
        self.revision = revision


class StreamLost(errors.StatusError):
    """A stream has ended and may be replaced by another one, at this or another endpoint."""

    code = errors.UNAVAILABLE
    definite = False


_EOF: Final = "error reading from server: EOF"
"""Go's text, which ``raftkv.rpc`` uses too."""

# Rows of etcd's table that raftkv never raises yet. Go's clients print them without the "rpc error" frame.
_OTHER_TEXTS = frozenset(
    f"etcdserver: {text}"
    for text in ("cluster version not found during downgrade", "watch canceled", "request canceled")
)


def _classes(root: type[StatusError]) -> Iterator[type[StatusError]]:
    for child in root.__subclasses__():
        yield child
        yield from _classes(child)


# Classes that inherit their text (such as ``ShareError``) are left out.
_BY_TEXT = {
    kind.text: kind for kind in _classes(StatusError) if vars(kind).get("text") and kind.__module__ == errors.__name__
}


# Texts that vary because they name a cause or a limit.
_BY_PATTERN: Final[tuple[tuple[re.Pattern[str], type[StatusError]], ...]] = tuple(
    (re.compile(pattern, re.DOTALL), kind)
    for pattern, kind in (
        (re.escape(f"{errors.NoSpaceError.text} (raftkv: quota "), errors.QuotaExceededError),
        (".* has its share of the ", errors.ShareError),
        ("trying to send message larger than max ", MessageTooLarge),
        ("grpc: received message larger than max ", ReceivedTooLarge),
        (re.escape(errors.AuthLimitError.text), errors.AuthLimitError),
        (re.escape(errors.ConfChangeRefusedError.text), errors.ConfChangeRefusedError),
        (re.escape(errors.SnapshotGivenUpError.text), errors.SnapshotGivenUpError),
        (errors.InvalidAlarmError.text.split(" or ")[0], errors.InvalidAlarmError),
        ("raftkv: (a password must have|hashedPassword must be) ", errors.InvalidPasswordError),
        (r"unknown service (etcdserverpb|v3lockpb|v3electionpb)\.", WrongPort),
    )
)


def from_status(code: int, text: str, *, definite: bool = False) -> StatusError:
    """Return the error for a status.

    Arguments:
        code: gRPC code, not OK.
        text: message of the status.
        definite: whether the request certainly never reached a handler.
    """
    kind = _BY_TEXT.get(text)
    if kind is errors.NoPasswordUserError:  # not in etcd's table, so Go's clients print the frame
        return errors.NoPasswordUserError(f"rpc error: code = Unknown desc = {text}")
    if kind is not None:
        error = kind()
        error.__dict__["code"] = code
        return error
    if code == errors.UNAVAILABLE and text == _EOF:
        return ConnectionLost(definite)
    for pattern, named in _BY_PATTERN:
        if named.code == code and pattern.match(text):
            return named(text)
    return WireStatus(code, text) if text in _OTHER_TEXTS else UnknownStatus(code, text, definite)
