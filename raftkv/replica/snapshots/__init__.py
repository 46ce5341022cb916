"""Databases on their way between members: made, streamed, checked, and kept until they are installed.

A follower that needs entries which the leader no longer has gets the database instead. The sender copies it from a
read transaction, so writes go on meanwhile; the copy's own applied index, not the message's, says what it holds. The
sender reads the copy again and checks everything in it that a checksum covers, before a byte leaves. The receiver
writes it to a file of its own, reads that file again, checks the SHA-256 of all bytes, that the database in it is of
the entry that was announced, and everything in it, makes it durable under the name of its index, and only then hands
the SNAPSHOT message to the core.

    sender       flush -> copy (N.out.db) -> header chunk, data chunks, digest             ``sender``
    receiver     ....part.tmp -> fsync -> read again -> INDEX.snap.db -> SNAPSHOT message  ``receiver``
    node         marker in the log -> read in steps -> swap -> acknowledge                 ``receiver``

A stream that breaks is gone on with where it stopped, also after a restart of the receiver: both ends keep what they
have for a while, and the sender asks how much that is. Copying and sending rest in proportion to what they take of the
disk and of the loop, so that writes are hardly slower.

Invariants

- A damaged database stays where it is: the sender's member hears of it (``maintenance/damage``).
- Every message that the core wants sent ends in exactly one report to it, unless another to the same member follows.
- No file has two writers; none is left behind without a reader (``files``): parts are deleted after a while.
- A copy never takes the room that writes need: before it is made, and as long as it is there (``files.check_room``).
- Up to its last step an installation changes nothing; every crash after the marker has it done again at the start.
"""

from raftkv.replica.snapshots.files import remove_leftovers, snapshot_path
from raftkv.replica.snapshots.receiver import Installer, SnapshotReceiver
from raftkv.replica.snapshots.sender import SnapshotSender

__all__ = ["Installer", "SnapshotReceiver", "SnapshotSender", "remove_leftovers", "snapshot_path"]
