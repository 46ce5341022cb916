"""Where the lines of this process go, and how they look.

configure(config)      # the root logger writes to the outputs of the flags, and to nothing else
close()                # all lines are written
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Final

from raftkv.config import ServerConfig
from raftkv.server.logs.files import open_output
from raftkv.server.logs.handler import ThreadedHandler
from raftkv.server.logs.repeats import Repeats

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "panic": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}
_NAMES: Final = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warn",
    logging.ERROR: "error",
    logging.CRITICAL: "fatal",
}


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
