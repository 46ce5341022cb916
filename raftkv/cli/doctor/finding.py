"""What a check has found.

>>> at_most("p99", 0.2, "ms", warning=10, failure=100, advice="use an SSD").level.word
'ok'
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Level(IntEnum):
    """How well it is; the highest of a report decides its exit code."""

    OK = 0
    SKIPPED = 1
    WARNING = 2
    FAILURE = 3

    @property
    def word(self) -> str:
        """Return the text that is printed."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        level: how well it is.
        figure: what was found, or why nothing was.
        advice: what to do, in one line; empty if nothing.
    """

    subject: str
    level: Level
    figure: str
    advice: str = ""


def ok(subject: str, figure: str) -> Finding:
    """Return that all is well."""
    return Finding(subject, Level.OK, figure)


def skipped(subject: str, reason: str) -> Finding:
    """Return that nobody could look, and why."""
    return Finding(subject, Level.SKIPPED, reason)


def warning(subject: str, figure: str, advice: str) -> Finding:
    """Return what should be changed."""
    return Finding(subject, Level.WARNING, figure, advice)


def failure(subject: str, figure: str, advice: str) -> Finding:
    """Return what must be changed."""
    return Finding(subject, Level.FAILURE, figure, advice)


def at_most(subject: str, value: float, unit: str, *, warning: float, failure: float, advice: str) -> Finding:
    """Return a finding about a figure that should be small.

    Arguments:
        subject: what it is of.
        value, unit: the figure.
        warning, failure: from which on it is one.
        advice: what to do then.
    """
    level = Level.FAILURE if value >= failure else Level.WARNING if value >= warning else Level.OK
    figure = f"{value:.3g} {unit}"
    return Finding(subject, level, figure, advice if level is not Level.OK else "")
