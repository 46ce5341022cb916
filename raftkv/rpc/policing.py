"""Limits of a server on a client's control frames: token buckets, resets of young calls, grpc-go's ping strikes.

Pure: times come in as arguments. Source of the ping rules: grpc-go, ``keepalive.EnforcementPolicy``.
"""

from __future__ import annotations

from collections import deque
from typing import Final

UPDATE_BYTES: Final = 32
UPDATES_PER_CALL: Final = 4
UPDATES_MAX: Final = 20_000
"""However much was sent: so many WINDOW_UPDATE frames are a few milliseconds of work."""

RESETS_FREE_MAX: Final = 10_000
"""However many calls have aged: so many RST_STREAM frames are some milliseconds of work."""

_GROUPS: Final = 4
"""How many groups there are, about, of calls that have not aged yet."""


class TokenBucket:
    """``burst`` events at once, ``per_s`` each second after that."""

    __slots__ = ("_burst", "_per_s", "_since", "_tokens")

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._tokens = burst
        self._since = 0.0

    def take(self, now: float) -> bool:
        """Count one event; False when the bucket is empty."""
        self._tokens = min(self._burst, self._tokens + (now - self._since) * self._per_s)
        self._since = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class ResetAllowance:
    """How many calls a client may take back: all those that were open for a while, and others as a bucket allows.

    Many calls whose time is up together are no attack, as when a quorum is lost; many that are taken back as soon as
    they have begun are one (CVE-2023-44487). Ages are known to some calls and some of the time: enough to tell these
    two apart, without a clock at each call.

    Arguments:
        burst, per_s: of the bucket.
        free_after_s: the age from which a call may be reset uncounted.
    """

    __slots__ = ("_aged_id", "_bucket", "_free", "_free_after_s", "_groups")

    def __init__(self, burst: float, per_s: float, free_after_s: float) -> None:
        self._bucket = TokenBucket(burst, per_s)
        self._free_after_s = free_after_s
        self._groups: deque[_Group] = deque()
        self._aged_id = 0
        self._free = 0

    def begun(self, stream_id: int, now: float) -> None:
        """Note that a call has begun: one of a few dozen is enough.

        Arguments:
            stream_id: of the call; a client's streams have odd ids, and later ones higher ids.
            now: seconds of the owner's clock.
        """
        groups = self._groups
        if groups and now - groups[-1].first_s < self._free_after_s / _GROUPS:
            groups[-1].last_s, groups[-1].last_id = now, stream_id
        else:
            groups.append(_Group(stream_id, now))
        self._age(now)

    def take(self, stream_id: int, now: float) -> bool:
        """Count the reset of a call; False when there were too many.

        Arguments:
            stream_id: of the call, open or not: each call that has aged pays for one reset.
            now: seconds of the owner's clock.
        """
        self._age(now)
        if self._free and stream_id <= self._aged_id:
            self._free -= 1
            return True
        return self._bucket.take(now)

    def _age(self, now: float) -> None:
        while self._groups and now - self._groups[0].last_s >= self._free_after_s:
            last_id = self._groups.popleft().last_id
            self._free = min(RESETS_FREE_MAX, self._free + (last_id - self._aged_id + 1) // 2)
            self._aged_id = last_id


class _Group:
    """Calls that began at about one time."""

    __slots__ = ("first_s", "last_id", "last_s")

    def __init__(self, stream_id: int, now: float) -> None:
        self.first_s = self.last_s = now
        self.last_id = stream_id


class UpdateAllowance:
    """How many WINDOW_UPDATE frames a client may send: some at first, then as many as it has reasons for.

    A reason is ``UPDATE_BYTES`` sent to it: a client says how much it has read. Even one that says so after each DATA
    frame, for stream and connection, stays below. Another is a call that it begins: gRPC's core opens the window of
    each stream up to twice before anything is answered, so 2,000 calls that wait come with 4,000 updates.
    """

    __slots__ = ("_last_stream_id", "_left", "_sent_bytes")

    def __init__(self, burst: int) -> None:
        self._left = burst
        self._sent_bytes = 0
        self._last_stream_id = 0

    def take(self, sent_bytes: int, last_stream_id: int) -> bool:
        """Count one frame; False when there were too many.

        Arguments:
            sent_bytes: all that was ever sent to the client.
            last_stream_id: of the newest call that is open, 0 without one; a client's streams have odd ids.
        """
        if self._left <= 0:
            read = (sent_bytes - self._sent_bytes) // UPDATE_BYTES
            begun = max(0, last_stream_id - self._last_stream_id) // 2
            earned = read + UPDATES_PER_CALL * begun
            if earned <= 0:
                return False
            self._sent_bytes += read * UPDATE_BYTES
            self._last_stream_id += 2 * begun
            self._left = min(earned, UPDATES_MAX)
        self._left -= 1
        return True


class PingPolicy:
    """Counts early pings of one connection.

    A ping is early when it follows the last one by less than ``interval_min_s`` (with open calls) or
    ``interval_idle_min_s`` (without). Any answer that we send resets the count: the client may then ping once
    for its bandwidth estimate.
    """

    __slots__ = ("_idle_min_s", "_interval_min_s", "_last", "_strikes", "_strikes_max", "forgiven")

    def __init__(self, interval_min_s: float, interval_idle_min_s: float, strikes_max: int) -> None:
        self._interval_min_s = interval_min_s
        self._idle_min_s = interval_idle_min_s
        self._strikes_max = strikes_max
        self._strikes = 0
        self._last = float("-inf")
        self.forgiven = False

    def too_many(self, now: float, has_calls: bool) -> bool:
        """Count one ping; True when the connection has used up its strikes.

        Arguments:
            now: seconds of the owner's clock.
            has_calls: whether calls are open, for which pings may come more often.
        """
        interval = self._interval_min_s if has_calls else self._idle_min_s
        early = now - self._last < interval
        self._last = now
        if self.forgiven:
            self.forgiven = False
            self._strikes = 0
        elif early:
            self._strikes += 1
        return self._strikes > self._strikes_max
