"""The outputs and format of the log of this process, and the limit on lines from one place in the source.

    configure(config)      # the root logger writes to the outputs of the flags, and to nothing else
    close()                # all lines are written

``Repeats`` limits the lines that other machines can cause at will. A request of an administrator, a message of a
member, or an attempt of a stranger may each be logged for an operator; a million such lines help no reader and fill the
disk. So each place in the source may write ``BURST`` lines at once, and one per ``INTERVAL_S`` after that; its next
line says how many were left out. Lines below level INFO are requested by a flag and not limited, and the last lines of
a member that stops after a failure are always written.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Final

from raftkv.config import ServerConfig
from raftkv.errors import printable
from raftkv.server.logs.files import open_output
from raftkv.server.logs.handler import ThreadedHandler

BURST: Final = 50
"""Lines of one place at once: a large cluster may lose and find this many members at the same time."""

INTERVAL_S: Final = 1.0

PLACES_MAX: Final = 10_000
"""Most distinct places, far more than there are: each text invented by others would be another one."""

_OWN: Final = "raftkv"


class Repeats(logging.Filter):
    """Limits the lines of each place in the source, for one handler.

    Compiled code has no frames: its lines all seem to come from the interpreted line that called it, such as one of the
    event loop. So the text before its values are filled in, which is unique in raftkv, is part of the place.

    Arguments:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int, str, str], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written. Its attribute ``more`` tells how many were left out before it.

        Arguments:
            record: any record.
        """
        record.more = ""
        if not logging.INFO <= record.levelno < logging.CRITICAL:
            return True
        place = self._place(record)
        now_s = self._clock()
        # The time up to which the place has used its lines; if it is in the past, all lines are available.
        spent_s = max(place.spent_s, now_s) + INTERVAL_S
        if spent_s > now_s + BURST * INTERVAL_S:
            place.left_out += 1
            return False
        place.spent_s = spent_s
        if place.left_out:
            record.more = f" ({place.left_out} more like it were left out before)"
            place.left_out = 0
        return True

    def _place(self, record: logging.LogRecord) -> _Place:
        # The texts of other packages may contain their values if they have no arguments.
        text = str(record.msg) if record.args or record.name.startswith(_OWN) else ""
        key = (record.pathname, record.lineno, record.name, text)
        if key not in self._places and len(self._places) >= PLACES_MAX:
            key = (record.pathname, record.lineno, record.name, "")
        return self._places.setdefault(key, _Place())


class _Place:
    """A place in the source that logs."""

    __slots__ = ("left_out", "spent_s")

    def __init__(self) -> None:
        self.spent_s = float("-inf")
        self.left_out = 0


_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "panic": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}
_NAMES: Final = {level: name for name, level in _LEVELS.items()}


class LineFormatter(logging.Formatter):
    """A format for people: a text from another program neither begins a line nor controls the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and the lines of its traceback."""
        shown = logging.makeLogRecord({**record.__dict__, "msg": printable(record.getMessage()), "args": None})
        return "\n".join(map(printable, super().format(shown).split("\n")))


def stderr_handler(line_format: str) -> logging.Handler:
    """Return a handler for programs beside a member; their clients can cause as few lines as those of a member.

    Arguments:
        line_format: format of a line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(f"{line_format}%(more)s"))
    handler.addFilter(Repeats())
    return handler


class _JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "level": _NAMES.get(record.levelno, "info"),
            "ts": moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z",
            "logger": record.name,
            "msg": record.getMessage() + getattr(record, "more", ""),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(config: ServerConfig) -> None:
    """Direct the log to the outputs of the flags.

    Raises:
        ConfigError: a file cannot be written.
    """
    console = LineFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s%(more)s", defaults={"more": ""})
    formatter = _JSONFormatter() if config.log_format == "json" else console
    root = logging.getLogger()
    close()
    root.handlers.clear()
    root.setLevel(_LEVELS[config.log_level])
    for output in config.log_outputs:
        is_stream = output in ("default", "stderr", "stdout")
        handler = ThreadedHandler(open_output(output, None if is_stream else config.log_rotation))
        handler.setFormatter(formatter)
        handler.addFilter(Repeats())
        root.addHandler(handler)


def close() -> None:
    """Write the waiting lines, and stop logging: the process ends."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, ThreadedHandler)]:
        root.removeHandler(handler)
        handler.close()
