"""Where the log lines of this process go, how they look, and how many one place in the sources may write.

    configure(config)      # the root logger writes to the outputs of the flags, and to nothing else
    close()                # all lines are written

``Repeats`` bounds the lines that another machine can cause at will. A request of an administrator, a message of a
member, a stranger's attempt may each have a line that tells an operator what happened; a million such lines help no
reader and fill the disk. So each place in the sources may write ``BURST`` lines at once, and one each ``INTERVAL_S``
after that; its next line says how many were left out. Levels below INFO were asked for and are not bounded, and the
last words of a member are always written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Final

from raftkv.config import ServerConfig
from raftkv.server.logs.files import open_output
from raftkv.server.logs.handler import ThreadedHandler

BURST: Final = 50
"""Lines of one place at once: as many as a large cluster has members that are lost and found in one moment."""

INTERVAL_S: Final = 1.0

PLACES_MAX: Final = 10_000
"""Places that texts distinguish, far more than there are: a text that others make up would be one more."""

_OWN: Final = "raftkv"


class Repeats(logging.Filter):
    """Lets so many lines of each place in the sources pass, for one handler.

    Compiled code has no frames: all that it logs seems to come from the interpreted line that called it, such as one
    of the event loop. So the text before its values are filled in, which is unique in raftkv, belongs to the place.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int, str, str], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is written; its attribute ``more`` then says what was left out before it.

        Arguments:
            record: any.
        """
        record.more = ""
        if not logging.INFO <= record.levelno < logging.CRITICAL:
            return True
        place = self._place(record)
        now_s = self._clock()
        # The time up to which its lines are spent: in the past, it has all of them.
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
        # Other people's texts without values have them in the text.
        text = str(record.msg) if record.args or record.name.startswith(_OWN) else ""
        key = (record.pathname, record.lineno, record.name, text)
        if key not in self._places and len(self._places) >= PLACES_MAX:
            key = (record.pathname, record.lineno, record.name, "")
        return self._places.setdefault(key, _Place())


class _Place:
    """A line of the sources that logs."""

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
    """Send the log where the flags say.

    Raises:
        ConfigError: a file cannot be written.
    """
    console = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s%(more)s", defaults={"more": ""})
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
    """Write what waits, and write nothing any more: the process ends."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, ThreadedHandler)]:
        root.removeHandler(handler)
        handler.close()
