"""Keys, revisions and leases in time: ``revisions.svg`` and ``leases.svg``."""

from __future__ import annotations

from docsite.drawings.canvas import AMBER, BLUE, GREEN, GREY, INK, RED, Canvas

STEP, BEGIN = 80, 150
WRITES = (
    (2, 0, "put a=1", "a", "v1", BLUE),
    (3, 1, "put b=1", "b", "v1", BLUE),
    (4, 0, "put a=2", "a", "v2", BLUE),
    (5, 0, "del a", "a", "gone", RED),
    (6, 1, "txn", "b", "v2", GREEN),
    (6, 2, "txn", "c", "v1", GREEN),
    (7, 0, "put a=3", "a", "v1", BLUE),
)


def revisions() -> Canvas:
    """Draw three keys over seven revisions, with a compaction."""
    canvas = Canvas(780, 330, "Each write makes a revision; a key has a version in each of its generations")
    lanes = (110, 165, 220)
    for y, name in zip(lanes, ("key a", "key b", "key c"), strict=True):
        canvas.lane(y, name, end=740)
    for revision in range(2, 8):
        x = BEGIN + (revision - 2) * STEP + 50
        canvas.text(x, 50, str(revision), INK, 15, "middle", bold=True)
        text = next(label for number, _, label, _, _, _ in WRITES if number == revision)
        canvas.text(x, 70, text, GREY, 12, "middle")
    canvas.text(108, 50, "revision", GREY, 13, "end")
    for revision, lane, _, _, text, colour in WRITES:
        canvas.bar(BEGIN + (revision - 2) * STEP + 20, lanes[lane], 60, text, colour)
    canvas.mark(BEGIN + 2 * STEP + 90, 88, 240, "", AMBER)
    canvas.text(BEGIN + 2 * STEP + 90, 258, "compact 4", AMBER, 12, "middle")
    canvas.text(
        20,
        286,
        "Read at revision 4: a=2, b=1. Read at 6: b and c, and no a. A txn makes one revision, whatever it writes.\n"
        "After compact 4, reads and watches of older revisions are refused; what was valid at 4 stays readable.",
        GREY,
    )
    return canvas


def leases() -> Canvas:
    """Draw a lease that is kept, and then lost in two ways."""
    canvas = Canvas(780, 330, "A lease lives while its owner keeps it alive; its end deletes its keys in one revision")
    canvas.lane(80, "owner")
    canvas.lane(150, "leader")
    for x in (150, 240, 330):
        canvas.arrow((x, 80), (x + 12, 146), "", GREEN)
    canvas.text(130, 62, "keep-alives, every third of the TTL", GREEN, 12)
    canvas.bar(344, 150, 230, "TTL: 10 s by the leader's clock", AMBER)
    canvas.cross(400, 80)
    canvas.text(414, 84, "frozen, or cut off", RED, 12)
    canvas.bar(574, 150, 50, "0.5 s", GREY)
    canvas.mark(628, 120, 176, "lease ends", RED)
    canvas.text(636, 172, "keys deleted,\nwatchers see it", RED, 12)
    canvas.lane(220, "owner, killed")
    canvas.lane(270, "leader")
    canvas.arrow((150, 220), (162, 266), "", GREEN)
    canvas.arrow((240, 220), (252, 266), "", GREEN)
    canvas.cross(300, 220)
    canvas.arrow((306, 224), (318, 266), "connection breaks", RED, dashed=True)
    canvas.bar(320, 270, 60, "grace", AMBER)
    canvas.mark(384, 244, 292, "", RED)
    canvas.text(392, 288, "keys deleted 50 ms after the kill, with disconnect_grace_s", RED, 12)
    canvas.text(
        20,
        316,
        "Ends are in the log like writes: all members delete the keys at the same revision. A lease never ends early.",
        GREY,
    )
    return canvas
