"""How a write is agreed on, and how a leader is found: ``write.svg`` and ``election.svg``."""

from __future__ import annotations

from docsite.drawings.canvas import AMBER, BLUE, GREEN, GREY, RED, Canvas

CLIENT, LEADER, FIRST, SECOND = 60, 130, 200, 270


def write() -> Canvas:
    """Draw the life of a put: three members, two disks, one answer."""
    canvas = Canvas(780, 350, "A put is answered when a majority of the members has it on disk")
    for y, name in ((CLIENT, "client"), (LEADER, "leader"), (FIRST, "follower"), (SECOND, "follower")):
        canvas.lane(y, name)
    canvas.arrow((140, CLIENT), (180, LEADER), "put")
    canvas.arrow((200, LEADER), (240, FIRST), "append", BLUE)
    canvas.arrow((200, LEADER), (252, SECOND), "", BLUE)
    canvas.bar(206, LEADER, 120, "log, fsync", BLUE)
    canvas.bar(244, FIRST, 110, "log, fsync", BLUE)
    canvas.bar(256, SECOND, 300, "", AMBER)
    canvas.text(268, SECOND + 4, "log, a slow fsync", AMBER, 12)
    canvas.arrow((354, FIRST), (396, LEADER), "acknowledged", GREEN)
    canvas.mark(400, 36, 300, "two of three have it: committed", GREEN)
    canvas.bar(406, LEADER, 80, "apply", GREEN)
    canvas.arrow((486, LEADER), (520, CLIENT), "OK, revision 8", GREEN)
    canvas.arrow((486, LEADER), (530, FIRST), "commit index", GREY)
    canvas.bar(534, FIRST, 80, "apply", GREEN)
    canvas.arrow((486, LEADER), (560, SECOND), "", GREY)
    canvas.bar(570, SECOND, 80, "apply", GREEN)
    canvas.text(
        120,
        322,
        "The slow disk delays no answer. If the leader dies now, one of the two that have the entry leads next.",
        GREY,
    )
    return canvas


def election() -> Canvas:
    """Draw an election after the death of a leader."""
    canvas = Canvas(
        780, 300, "A follower that hears nothing asks for pre-votes, then for votes, and leads the next term"
    )
    for y, name in ((70, "member a"), (140, "member b"), (210, "member c")):
        canvas.lane(y, name)
    canvas.bar(126, 70, 130, "leads term 4", BLUE)
    for x in (160, 210):
        canvas.arrow((x, 82), (x + 14, 138), "", GREY)
        canvas.arrow((x, 82), (x + 30, 208), "", GREY)
    canvas.text(132, 112, "heartbeats", GREY, 12)
    canvas.cross(262, 70, "killed")
    canvas.bar(246, 140, 138, "1 to 2 s of silence", AMBER)
    canvas.arrow((388, 140), (412, 208), "pre-vote?", BLUE)
    canvas.arrow((414, 208), (440, 142), "", GREEN)
    canvas.arrow((470, 140), (494, 208), "vote, term 5?", BLUE)
    canvas.bar(498, 210, 78, "vote, fsync", GREEN)
    canvas.arrow((578, 208), (604, 142), "yes", GREEN)
    canvas.bar(608, 140, 150, "leads term 5", BLUE)
    canvas.text(
        120,
        256,
        "A pre-vote changes nothing, so a member that was cut off disturbs no leader when it comes back.\n"
        "Each member votes once a term, and never for a candidate whose log lacks one of its own entries.",
        GREY,
    )
    canvas.text(390, 126, "no leader: writes wait", RED, 12)
    return canvas
