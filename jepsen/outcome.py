"""The classification of failures: definite (certainly not executed) or indefinite (perhaps executed, perhaps later).

If an indefinite failure is classified as definite, the checkers become blind or wrong; the reverse only costs them
time. So a failure is indefinite unless it is in the tables below, matched by code and by the whole text (for failures
of grpc itself, by the beginning of the text). Failed reads are always definite, because they changed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

_REFUSALS: dict[str, frozenset[str]] = {
    # Checked before the proposal, or deterministically when it is applied: no effect on any member.
    "INVALID_ARGUMENT": frozenset(
        {
            "etcdserver: key is not provided",
            "etcdserver: key not found",
            "etcdserver: value is provided",
            "etcdserver: lease is provided",
            "etcdserver: too many operations in txn request",
            "etcdserver: duplicate key given in txn request",
            "etcdserver: request is too large",
        }
    ),
    "OUT_OF_RANGE": frozenset(
        {
            "etcdserver: mvcc: required revision has been compacted",
            "etcdserver: mvcc: required revision is a future revision",
        }
    ),
    "RESOURCE_EXHAUSTED": frozenset({"etcdserver: mvcc: database space exceeded"}),
    "NOT_FOUND": frozenset({"etcdserver: requested lease not found"}),
    "FAILED_PRECONDITION": frozenset({"etcdserver: lease already exists", "etcdserver: rpc not supported for learner"}),
    # The gap between committed and applied entries was too large: refused before the proposal. Elections: checked
    # first.
    "UNKNOWN": frozenset({"etcdserver: too many requests", "election: not leader", "election: no leader"}),
}

_NEVER_SENT = (
    # grpc had no connected address for the call (retries are off, so there was no earlier attempt).
    ("UNAVAILABLE", "failed to connect to all addresses"),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request: gRPC code name, text, and whether it certainly had no effect."""

    code: str
    text: str
    definite: bool


def classify(code: str, text: str, writes: bool) -> Failure:
    """Classify the failure of one request.

    Arguments:
        code: gRPC status code name, such as ``UNAVAILABLE``.
        text: status message.
        writes: whether the request could change the store.
    """
    refused = text in _REFUSALS.get(code, ())
    never_sent = any(code == known and text.startswith(start) for known, start in _NEVER_SENT)
    return Failure(code, text, definite=refused or never_sent or not writes)
