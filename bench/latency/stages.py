"""Computes the duration of each stage of a put from stamps.

    client --> received, checked, proposed, sent --> heard, synced --> acknowledged, applied, answered --> client
                                        \\-- the leader's own sync, beside all that

A put starts when the one before it is answered, so everything recorded between its sending and its answer belongs to
it. Of two followers, the one whose sync ends first counts, because it completes the quorum with the leader.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

Span = Sequence[float]
"""Start and end of a call, in seconds of the monotonic clock."""

Stamps = dict[str, list[tuple[float, float]]]
"""The records of a member, by name; see ``member.PLACES``."""


@dataclass(frozen=True)
class Stage:
    """A stage: the moments at its ends, and who is busy or waits in it."""

    name: str
    begin: str
    end: str
    who: str


STAGES = (
    Stage("on the way to the leader", "begin", "received", "between processes"),
    Stage("received, checked", "received", "checked", "leader"),
    Stage("waits for the turn", "checked", "proposed", "leader"),
    Stage("proposed", "proposed", "sent", "leader"),
    Stage("leader's log written, wal sync begins", "sent", "sync begins", "leader"),
    Stage("leader's wal sync", "sync begins", "sync ends", "disk"),
    Stage("sent: on the way to the follower", "sent", "heard", "between processes"),
    Stage("follower's log written", "heard", "follower's sync begins", "follower"),
    Stage("follower's wal sync", "follower's sync begins", "follower's sync ends", "disk"),
    Stage("acknowledged: on the way back", "follower's sync ends", "acknowledged", "between processes"),
    Stage("committed, applied", "acknowledged", "applied", "leader"),
    Stage("answered", "applied", "answered", "leader"),
    Stage("on the way to the client", "answered", "end", "between processes"),
)


_ON_THE_WAY = (
    *((name, name) for name in ("received", "checked", "proposed", "sent")),
    ("synced", "sync begins"),
)
_ON_THE_WAY_BACK = (("heard", "acknowledged"), ("applied", "applied"), ("answered", "answered"))
"""Records of the leader in this order, and the moment that each stands for."""


@dataclass(frozen=True)
class Noted:
    """The records of one member for one put: spans that began between its sending and its answer."""

    stamps: dict[str, Sequence[Span]]

    def first(self, name: str, since: float) -> Span | None:
        """Return the first span of a name that began at or after a time."""
        return next((span for span in self.stamps[name] if span[0] >= since), None)

    def last(self, name: str, until: float) -> Span | None:
        """Return the last span of a name that began before a time."""
        return next((span for span in reversed(self.stamps[name]) if span[0] < until), None)


def during(stamps: Stamps, put: Span) -> Noted:
    """Return the spans that belong to a put; the spans of a name are ordered by their start."""
    cut = {}
    for name, spans in stamps.items():
        cut[name] = spans[bisect_left(spans, (put[0],)) : bisect_left(spans, (put[1],))]
    return Noted(cut)


def moments_of(put: Span, leader: Noted, followers: Sequence[Noted]) -> dict[str, float] | None:
    """Return the moments of one put in seconds since its sending; None if one was not recorded."""
    synced = [found for each in followers if (found := _synced(each, put[0])) is not None]
    if not synced:
        return None
    heard, follower_sync = min(synced, key=lambda pair: pair[1][1])
    moments = {"begin": put[0], "heard": heard[0], "end": put[1]}
    moments |= {"follower's sync begins": follower_sync[0], "follower's sync ends": follower_sync[1]}
    for names, since in ((_ON_THE_WAY, put[0]), (_ON_THE_WAY_BACK, follower_sync[1])):
        for name, moment in names:
            span = leader.first(name, since)
            if span is None:
                return None
            moments[moment] = since = span[0]
            if name == "synced":
                moments["sync ends"] = span[1]
    return {name: moment - put[0] for name, moment in moments.items()}


def _synced(follower: Noted, since: float) -> tuple[Span, Span] | None:
    """Return when a follower received the put, and its sync."""
    sync = follower.first("synced", since)
    heard = follower.last("heard", sync[0]) if sync is not None else None
    return (heard, sync) if heard is not None and sync is not None else None


def medians_us(puts: Sequence[Span], leader: Stamps, followers: Sequence[Stamps]) -> dict[str, dict[str, float]]:
    """Return where each stage begins and ends, in microseconds since the sending: medians over all puts.

    Returns:
        For each stage "begin_us" and "end_us", and of its duration "p50_us" and "p90_us".
    """
    seen = []
    for put in puts:
        moments = moments_of(put, during(leader, put), [during(each, put) for each in followers])
        if moments is not None:
            seen.append(moments)
    if not seen:
        missing = ", ".join(name for name, spans in leader.items() if not spans) or "each"
        raise SystemExit(f"bench: no put has all its stamps; the leader has none of: {missing}")
    found = {}
    for stage in STAGES:
        took = sorted(moments[stage.end] - moments[stage.begin] for moments in seen)
        begin = statistics.median(moments[stage.begin] for moments in seen)
        p50, p90 = statistics.median(took), took[len(took) * 9 // 10]
        figures = {"begin_us": begin, "end_us": begin + p50, "p50_us": p50, "p90_us": p90}
        found[stage.name] = {name: round(value * 1e6, 1) for name, value in figures.items()}
    return found
