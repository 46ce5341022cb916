"""Rate limit for log lines that clients can cause: a few per place, then one a second with the number dropped."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from raftkv.config import ServerConfig
from raftkv.server.logs import outputs
from raftkv.server.logs.outputs import BURST, INTERVAL_S, Repeats


class Kept(logging.Handler):
    """Keeps the texts of what passes."""

    def __init__(self, repeats: Repeats) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.addFilter(repeats)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage() + getattr(record, "more", ""))


def test_a_place_has_some_lines_and_then_one_a_second() -> None:
    now_s = 0.0
    kept = Kept(Repeats(lambda: now_s))
    logger = logging.Logger("test")
    logger.addHandler(kept)

    def dropped(number: int) -> None:
        logger.warning("dropped a message of %x", number)

    for number in range(1000):
        dropped(number)
    assert kept.texts == [f"dropped a message of {number:x}" for number in range(BURST)]
    logger.info("another place")
    assert kept.texts.pop() == "another place"
    for number in range(5):
        now_s += INTERVAL_S
        for _ in range(10):
            dropped(number)
    expected = [f" ({1000 - BURST} more like it were left out before)", *[" (9 more like it were left out before)"] * 4]
    assert [text.partition("of ")[2] for text in kept.texts[BURST:]] == [f"{n:x}{expected[n]}" for n in range(5)]
    now_s += 2 * BURST * INTERVAL_S
    del kept.texts[:]
    for number in range(1000):
        dropped(number)
    assert len(kept.texts) == BURST


@pytest.mark.parametrize(("name", "values"), [("raftkv.server", ()), ("other", (7,))])
def test_places_that_look_like_one_are_told_apart_by_their_texts(name: str, values: tuple[int, ...]) -> None:
    """Lines of compiled code seem to come from its caller: the loop, for nearly all of them."""
    kept = Kept(Repeats(lambda: 0.0))
    logger = logging.Logger(name)
    logger.addHandler(kept)
    texts = ["refused" + " %d" * len(values), "lost the leader" + " %d" * len(values)]
    for text in texts:
        for _ in range(2 * BURST):
            logger.warning(text, *values)
    assert kept.texts == [text % values for text in texts for _ in range(BURST)]


def test_texts_with_their_values_in_them_make_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "PLACES_MAX", 3)
    kept = Kept(Repeats(lambda: 0.0))
    for name, few in (("other", 0), ("raftkv.server", 2)):
        logger = logging.Logger(name)
        logger.addHandler(kept)
        for number in range(5 * BURST):
            logger.warning(f"number {number}")
        assert len(kept.texts) == BURST + few
        del kept.texts[:]


@pytest.mark.parametrize("level", [logging.DEBUG, logging.CRITICAL])
def test_requested_and_final_lines_are_never_suppressed(level: int) -> None:
    kept = Kept(Repeats(lambda: 0.0))
    logger = logging.Logger("test")
    logger.addHandler(kept)
    for _ in range(2 * BURST):
        logger.log(level, "line")
    assert kept.texts == ["line"] * (2 * BURST)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_outputs_are_bounded(tmp_path: Path, log_format: str) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    path = tmp_path / "raftkv.log"
    try:
        outputs.configure(ServerConfig(log_outputs=(str(path),), log_format=log_format))
        for _ in range(100 * BURST):
            logging.getLogger("test").warning("again")
        outputs.close()
    finally:
        root.handlers[:], root.level = before
    lines = path.read_text().splitlines()
    texts = [json.loads(line)["msg"] if log_format == "json" else line.partition("test: ")[2] for line in lines]
    assert BURST <= len(texts) < 50 * BURST
    assert set(texts[:BURST]) == {"again"}


def test_console_lines_neither_begin_lines_nor_control_the_terminal(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    path = tmp_path / "raftkv.log"
    try:
        outputs.configure(ServerConfig(log_outputs=(str(path),), log_format="console"))
        try:
            raise ValueError("\x1b[31mred")
        except ValueError:
            logging.getLogger("test").exception("from %s", "a\n2026-01-01 forged\x1b[2J\x9b")
        outputs.close()
    finally:
        root.handlers[:], root.level = before
    first, *traceback = path.read_text().splitlines()
    assert first.endswith("test: from a\\n2026-01-01 forged\\x1b[2J\\x9b")
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: \\x1b[31mred"
