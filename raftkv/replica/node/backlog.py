"""What is committed and not applied: how much of it there may be, and who waits when there is too much.

    backlog.tick()                    # with every tick of Raft
    backlog.is_long                   # clients' writes are refused: "etcdserver: too many requests"
    backlog.takes(message)            # False: leave it lying, it is an append for which there is no room

A member commits what the others have, however slowly it applies itself: behind one entry that takes minutes, or a
database whose disk hangs. Its entries are in memory until they are applied and in the database. So above
``NodeSettings.unapplied_max_bytes`` it takes no more, as if appends were lost: the leader probes it until it takes one,
waits for it if there is no quorum without it, and sends it the database if its own log is cut before. Empty appends are
left lying too: a refusal would bring the whole database, which cannot be installed while something is being applied,
each time anew. Heartbeats say what is committed.

This ends by itself: committed entries are applied without anything more from any leader.

A client is refused earlier, as in etcd, since its answer would come with the application here.
"""

from __future__ import annotations

from raftkv.raft.log import RaftLog
from raftkv.raft.types import Message, MessageType
from raftkv.replica.node.surroundings import NodeSettings


class Backlog:
    """Looks at the log of one member.

    Arguments:
        log: of the core.
        settings: its limits.

    Attributes:
        is_long: whether this member applies so much later than it commits that it should take no writes of clients.
        appends_dropped: messages of leaders that were left lying.
    """

    def __init__(self, log: RaftLog, settings: NodeSettings) -> None:
        self._log = log
        self._settings = settings
        self._committed_at_tick = log.committed
        self.is_long = False
        self.appends_dropped = 0

    @property
    def size_bytes(self) -> int:
        """What is committed and not applied."""
        return self._log.unapplied_bytes()

    def tick(self) -> None:
        """Compare what is applied with what was committed at the last tick: what came since may be one large batch."""
        log, settings = self._log, self._settings
        entries = self._committed_at_tick - log.applied
        self._committed_at_tick = log.committed
        self.is_long = entries > settings.unapplied_max or self.size_bytes > settings.unapplied_max_bytes

    def takes(self, message: Message) -> bool:
        """Return whether there is room for a message of another member."""
        if message.type != MessageType.APPEND or self.size_bytes <= self._settings.unapplied_max_bytes:
            return True
        self.appends_dropped += 1
        return False
