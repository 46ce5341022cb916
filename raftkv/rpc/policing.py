"""What a server holds against a client's control frames: token buckets and grpc-go's ping strikes.

Pure: times come in as arguments. Source of the ping rules: grpc-go, ``keepalive.EnforcementPolicy``.
"""

from __future__ import annotations

from typing import Final

UPDATE_BYTES: Final = 32
UPDATES_PER_CALL: Final = 4
UPDATES_MAX: Final = 20_000
"""However much was sent: so many WINDOW_UPDATE frames are a few milliseconds of work."""


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
    ``interval_idle_min_s`` (without). Whatever we send as an answer wipes the slate: the client may then ping once
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

        Args:
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
