"""The member's log: one line an event, JSON as etcd writes it, or plain for people."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from raftkv.config import ServerConfig
from raftkv.errors import ConfigError

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
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(config: ServerConfig) -> None:
    """Send the log where the flags say.

    Raises:
        ConfigError: a file cannot be written.
    """
    console = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    formatter = _JSONFormatter() if config.log_format == "json" else console
    root = logging.getLogger()
    root.handlers.clear()
    root.setLevel(_LEVELS[config.log_level])
    for output in config.log_outputs:
        handler = _handler(output)
        handler.setFormatter(formatter)
        root.addHandler(handler)


def _handler(output: str) -> logging.Handler:
    if output in ("default", "stderr"):
        return logging.StreamHandler(sys.stderr)
    if output == "stdout":
        return logging.StreamHandler(sys.stdout)
    try:
        return logging.FileHandler(Path(output))
    except OSError as error:
        raise ConfigError(f"cannot write the log to {output}: {error.strerror}") from error
