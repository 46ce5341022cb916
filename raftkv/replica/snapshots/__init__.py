"""Transfer of databases between members: copying, streaming, checking, and installing them.

A follower that needs entries which the leader no longer has gets the database instead. The sender copies it from a
read transaction, so writes continue meanwhile; the applied index of the copy, not of the message, says what it
contains. The sender reads the copy again and verifies all checksums in it before it sends a byte. The receiver writes
the copy to a separate file, reads that file again, verifies the SHA-256 of all bytes, the announced entry and all
checksums, makes the file durable under the name of its index, and only then passes the SNAPSHOT message to the core.

    sender       flush -> copy (N.out.db) -> header chunk, data chunks, digest             ``sender``
    receiver     ....part.tmp -> fsync -> read again -> INDEX.snap.db -> SNAPSHOT message  ``receiver``
    node         marker in the log -> read in steps -> swap -> acknowledge                 ``receiver``

A broken stream is resumed where it stopped, also after a restart of the receiver: both ends keep their files for a
while, and the sender asks how much has arrived. Copying and sending pause in proportion to the disk and loop time that
they use, so that they hardly slow down writes.

Invariants

- A damaged database is not sent: the sender's member is notified (``maintenance/damage``).
- Every message that the core wants sent ends in exactly one report to it, unless another to the same member follows.
- No file has two writers, and no file remains without a reader (``files``): partial files are deleted after a while.
- A copy never takes the disk space that writes need: checked before it is made and while it exists
  (``files.check_room``).
- Up to its last step an installation changes nothing; after a crash past the marker, the next start repeats it.
"""

from raftkv.replica.snapshots.files import remove_leftovers, snapshot_path
from raftkv.replica.snapshots.receiver import Installer, SnapshotReceiver
from raftkv.replica.snapshots.sender import SnapshotSender

__all__ = ["Installer", "SnapshotReceiver", "SnapshotSender", "remove_leftovers", "snapshot_path"]
