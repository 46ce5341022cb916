"""What drawings are made of: boxes, bars, arrows and text on a light card, as SVG.

::

    canvas = Canvas(720, 300, "A write is answered when two of three members have it on disk")
    canvas.lane(80, "leader")
    canvas.bar(200, 80, 60, "fsync", GREEN)
    canvas.arrow((100, 40), (200, 80), "put")
    canvas.text(20, 280, "what the reader should see")

Coordinates are pixels from the top left corner. The card is light in both colour schemes of the site.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

INK, GREY, LIGHT = "#22262b", "#6b727c", "#d5d9df"
BLUE, GREEN, RED, AMBER = "#3056a8", "#1f7a4c", "#b3392f", "#9a6200"
PALE = {BLUE: "#dfe8f8", GREEN: "#d8f0e3", RED: "#f8dedb", AMBER: "#f9ebcf", GREY: "#eceef1", INK: "#eceef1"}
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
LEFT = 120
"""Where lanes begin: their names stand to the left."""

Point = tuple[float, float]


class Canvas:
    """A drawing that grows by calls.

    Arguments:
        width, height: in pixels.
        title: what it shows, for readers who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = INK,
        size: int = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Write lines of text; `y` is the base line of the first."""
        weight = ' font-weight="600"' if bold else ""
        for number, line in enumerate(text.split("\n")):
            place = f'x="{x:g}" y="{y + number * (size + 4):g}" font-size="{size}" text-anchor="{anchor}"'
            self._parts.append(f'<text {place} fill="{colour}"{weight}>{escape(line)}</text>')

    def lane(self, y: float, name: str, begin: float = LEFT, end: float | None = None, colour: str = LIGHT) -> None:
        """Draw the time line of a party, with the name to its left."""
        self.text(begin - 12, y + 4, name, anchor="end")
        stop = self.width - 20 if end is None else end
        self._parts.append(f'<path d="M{begin:g} {y:g}H{stop:g}" stroke="{colour}" stroke-width="2"/>')

    def bar(self, x: float, y: float, width: float, text: str = "", colour: str = BLUE, height: float = 22) -> None:
        """Draw a stretch of time on a lane, or a box around `y`."""
        place = f'x="{x:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="4"'
        self._parts.append(f'<rect {place} fill="{PALE[colour]}" stroke="{colour}"/>')
        lines = text.split("\n") if text else []
        if lines:
            self.text(x + width / 2, y + 4 - (len(lines) - 1) * 7.5, text, colour, 12, "middle")

    def arrow(self, begin: Point, end: Point, text: str = "", colour: str = BLUE, dashed: bool = False) -> None:
        """Draw an arrow; its text stands beside its middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        (x, y), (to_x, to_y) = begin, end
        path = f'd="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="1.6"{dash}'
        self._parts.append(f'<path {path} marker-end="url(#{_mark(colour)})"/>')
        if text:
            self.text((x + to_x) / 2 + 7, (y + to_y) / 2 + 4, text, colour, 12)

    def mark(self, x: float, begin: float, end: float, text: str = "", colour: str = GREY) -> None:
        """Draw a vertical line at a moment, with its text above."""
        self._parts.append(f'<path d="M{x:g} {begin:g}V{end:g}" stroke="{colour}" stroke-dasharray="3 4"/>')
        if text:
            self.text(x, begin - 6, text, colour, 12, "middle")

    def cross(self, x: float, y: float, text: str = "") -> None:
        """Draw what ends a party."""
        self._parts.append(f'<path d="M{x - 7:g} {y - 7:g}l14 14m0 -14l-14 14" stroke="{RED}" stroke-width="3"/>')
        if text:
            self.text(x, y - 14, text, RED, 12, "middle")

    def svg(self) -> str:
        """Return the file."""
        heads = "".join(
            f'<marker id="{_mark(colour)}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
            for colour in PALE
        )
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family=\'{FONT}\'>'
        card = '<rect width="100%" height="100%" rx="8" fill="#fbfcfd"/>'
        body = "\n".join(self._parts)
        return f"{head}\n<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n{card}\n{body}\n</svg>\n"


def _mark(colour: str) -> str:
    return f"to{colour.removeprefix('#')}"
