"""The page of errors and the program agree: each text on the page exists, and each text of an answer is on the page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import raftkv.errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
TEXTS = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
PIECE_MIN = 6
CUT_LITERAL = re.compile(r'"\s*\n\s*f?"')


def answers() -> set[str]:
    """Return the texts of all errors that a member answers with."""
    kinds = [kind for kind in vars(raftkv.errors).values() if inspect.isclass(kind)]
    texts = {kind.text for kind in kinds if issubclass(kind, raftkv.errors.StatusError)}
    return {*texts, raftkv.errors.MemberRemovedError.text} - {""}


def test_every_answer_of_a_member_is_on_the_page() -> None:
    assert sorted(answers() - set(TEXTS)) == []


def test_every_text_on_the_page_exists() -> None:
    known = answers()
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "raftkv").rglob("*.py"))
    sources += "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "storage").rglob("*.py"))
    whole = CUT_LITERAL.sub("", sources)
    others = [text for text in TEXTS if text not in known]
    pieces = [piece.strip() for text in others for piece in text.split("...") if len(piece.strip()) >= PIECE_MIN]
    assert [piece for piece in pieces if piece not in whole] == []


def test_no_text_is_explained_twice() -> None:
    assert sorted({text for text in TEXTS if TEXTS.count(text) > 1}) == []


def test_the_page_says_after_which_errors_a_write_may_have_happened() -> None:
    kinds = [kind for kind in vars(raftkv.errors).values() if inspect.isclass(kind)]
    unknown = {kind.text for kind in kinds if not getattr(kind, "definite", True)} - {""}
    rows = {line.split("`")[1]: line for line in PAGE.splitlines() if line.startswith("| `")}
    assert {text for text, line in rows.items() if "**unknown**" in line} == unknown
