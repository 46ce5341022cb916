"""Tables on a terminal: framed where whole words fit, else plain columns, so that a narrow one loses nothing."""

from __future__ import annotations

import io
import sys

import pytest

from raftkv.cli.table import Rows, out, plain

ROWS = Rows(("run", "phase", "reason"), [("bert-large-2026", "waiting", "1 of 2 nodes are there")])


class Terminal(io.StringIO):
    """Standard output of a person."""

    def isatty(self) -> bool:
        """Say that a terminal is there."""
        return True


@pytest.mark.parametrize(("columns", "is_framed"), [(20, False), (37, False), (38, True), (43, True), (80, True)])
def test_no_name_is_cut(monkeypatch: pytest.MonkeyPatch, columns: int, is_framed: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    out(ROWS)
    shown = terminal.getvalue()
    assert "bert-large-2026" in shown
    assert (shown == plain(ROWS) + "\n") == (not is_framed)


def test_foreign_names_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The text of a fault, or the name of a run, was written as it is: it could clear the screen, or forge a row."""
    out(Rows(("run",), [("a\x1b[2J",), ("b\nc",), ("d\x9b2J",)]))
    assert capsys.readouterr().out == "run\na\\x1b[2J\nb\\nc\nd\\x9b2J\n"
