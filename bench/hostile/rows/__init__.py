"""The rows: one hostile thing each, in the order of the table."""

from __future__ import annotations

from bench.hostile.rows import bursts, connections, frames, leases, logins, ranges, watches, writes
from bench.hostile.rows.row import Row

ROWS: tuple[Row, ...] = (
    *ranges.ROWS,
    *writes.ROWS,
    *watches.ROWS,
    *leases.ROWS,
    *frames.ROWS,
    *bursts.ROWS,
    *connections.ROWS,
    *logins.ROWS,
)

__all__ = ["ROWS", "Row"]
