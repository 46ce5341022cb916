"""Ids that pair a proposal or a read round with whoever waits for it.

    16 bits of the member id | 40 bits of milliseconds since the epoch at start | 8 bits, counting on into the others

Unique among members by the first part and across restarts of one member by the second, as in etcd (pkg/idutil): an
entry proposed before a crash can not be taken for one proposed after it. The clock is read once, at start; it only
has to differ from the last start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator


def request_ids(member_id: int, start_ms: int) -> Iterator[int]:
    """An endless supply of ids.

    Arguments:
        member_id: of this member.
        start_ms: wall clock at the start of the process.
    """
    prefix = (member_id & 0xFFFF) << 48
    start = (start_ms & ((1 << 40) - 1)) << 8
    return (prefix | (number & ((1 << 48) - 1)) for number in itertools.count(start + 1))
