"""The drawings of the documentation are those that their programs make, and are whole SVG files."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from docsite.drawings.__main__ import DRAWINGS, FOLDER
from docsite.drawings.canvas import Canvas


@pytest.mark.parametrize("draw", DRAWINGS, ids=lambda draw: draw.__name__)
def test_a_drawing_is_the_one_that_its_program_makes(draw: Callable[[], Canvas]) -> None:
    canvas = draw()
    made = canvas.svg()
    assert (FOLDER / f"{draw.__name__}.svg").read_text(encoding="utf-8") == made, "python -m docsite.drawings"
    ends = [float(text.get("x", 0)) for text in ElementTree.fromstring(made).iter("{http://www.w3.org/2000/svg}text")]
    assert 0 < min(ends) <= max(ends) < canvas.width
