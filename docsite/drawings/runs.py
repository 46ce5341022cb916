"""The generations of a training run, and what a fence refuses: ``generations.svg`` and ``fence.svg``."""

from __future__ import annotations

from docsite.drawings.canvas import AMBER, BLUE, GREEN, GREY, RED, Canvas


def generations() -> Canvas:
    """Draw a run of three nodes that loses one and gets another."""
    canvas = Canvas(780, 380, "A fault ends a generation everywhere; the next begins when all nodes have stopped")
    nodes = {"node a": 90, "node b": 150, "node c": 210, "node d": 270}
    for name, y in nodes.items():
        canvas.lane(y, name)
    for number, (name, end) in enumerate((("node a", 300), ("node b", 300), ("node c", 280))):
        canvas.bar(130, nodes[name], end - 130, f"rank {number}", BLUE)
    canvas.text(215, 66, "generation 1", BLUE, 13, "middle", bold=True)
    canvas.cross(280, 210)
    canvas.text(290, 234, "killed", RED, 12)
    canvas.bar(304, 90, 56, "stop", AMBER)
    canvas.bar(304, 150, 40, "stop", AMBER)
    canvas.mark(366, 60, 290, "", GREY)
    canvas.bar(372, 90, 158, "rank 0", GREEN)
    canvas.bar(372, 150, 158, "rank 1", GREEN)
    canvas.text(450, 66, "generation 2", GREEN, 13, "middle", bold=True)
    canvas.arrow((500, 270), (528, 164), "joins", GREY)
    canvas.bar(534, 90, 40, "stop", AMBER)
    canvas.bar(534, 150, 40, "stop", AMBER)
    canvas.mark(580, 60, 290, "", GREY)
    for number, name in enumerate(("node a", "node b", "node d")):
        canvas.bar(586, nodes[name], 160, f"rank {number}", BLUE)
    canvas.text(666, 66, "generation 3", BLUE, 13, "middle", bold=True)
    canvas.text(
        20,
        320,
        "Each node writes that it has stopped; until all have, or their leases ended, no generation begins. So two\n"
        "generations never run at the same time. Survivors keep the order of their ranks; one fault, one generation.",
        GREY,
    )
    canvas.text(
        20, 30, "The arbiter, one of the nodes, decides. If it dies, the next node takes over from its keys.", GREY
    )
    return canvas


def fence() -> Canvas:
    """Draw a holder that wakes up after its lock has passed to another."""
    canvas = Canvas(780, 270, "A write under a fence is refused once the lock has passed to another process")
    canvas.lane(70, "process 1")
    canvas.lane(140, "raftkv")
    canvas.lane(210, "process 2")
    canvas.bar(130, 70, 110, "holds the lock", BLUE)
    canvas.bar(246, 70, 240, "asleep (frozen, swapped out)", GREY)
    canvas.mark(360, 112, 168, "", RED)
    canvas.text(354, 130, "lease ends", RED, 12, "end")
    canvas.bar(380, 210, 360, "holds the lock, fence 12", GREEN)
    canvas.arrow((366, 144), (378, 200), "", GREEN)
    canvas.arrow((500, 70), (530, 134), "write, fence 7", RED)
    canvas.arrow((536, 134), (568, 74), "", RED)
    canvas.text(566, 62, "FenceLost: nothing was written", RED, 12)
    canvas.arrow((620, 198), (640, 144), "write, fence 12: OK", GREEN)
    canvas.text(
        20, 252, "A lock alone cannot stop a process that believes to hold it. The condition in the write does.", GREY
    )
    canvas.text(
        20, 30, "The fence of a lock is the revision at which its key was made: later holders have greater ones.", GREY
    )
    return canvas
