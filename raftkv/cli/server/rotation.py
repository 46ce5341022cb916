"""``--log-rotation-config-json``: lumberjack's settings as JSON, refused in the words of etcd and Go.

    read_rotation('{"maxsize": 10, "maxbackups": 3}')

Names count in any case, and unknown ones are passed over, as in Go.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Final

from raftkv.config import LogRotation
from raftkv.errors import ConfigError

_FIELDS: Final = {field.name: type(field.default) for field in dataclasses.fields(LogRotation)}
_GO_NAMES: Final = {bool: "bool", int: "number", float: "number", str: "string", list: "array", dict: "object"}


_WHOLE: Final = re.compile("-?[0-9]{1,12}")


class _Number(str):
    """A number as it was written."""


def read_rotation(text: str) -> LogRotation:
    """Return the settings.

    Arguments:
        text: of the flag.

    Raises:
        ConfigError: they cannot be read.
    """
    _check_syntax(text.encode())
    # Numbers stay texts: what is a number to Go and no whole one is refused as it was written.
    document = json.loads(text, parse_int=_Number, parse_float=_Number)
    if document is None:
        return LogRotation()
    if not isinstance(document, dict):
        raise ConfigError(
            f"invalid log rotation config: json: cannot unmarshal {_go_name(document)} into Go value of type "
            "embed.logRotationConfig"
        )
    found: dict[str, Any] = {}
    for name, value in document.items():
        kind = _FIELDS.get(name.lower())
        if kind is not None and value is not None:
            found[name.lower()] = _value(name.lower(), kind, value)
    return LogRotation(**found)


def _check_syntax(data: bytes) -> None:
    from raftkv.server.gateway.syntax import CutError, JsonError, quoted, scan, skip_space

    try:
        for _ in scan(data, skip_space(data, 0)):
            pass
    except JsonError as error:
        fault = "unexpected end of JSON input" if isinstance(error, CutError) else error
        raise ConfigError(f"improperly formatted log rotation config: {fault}") from None
    try:
        json.loads(data, parse_int=_Number)
    except json.JSONDecodeError as error:
        text = f"invalid character {quoted(data[error.pos])} after top-level value"
        raise ConfigError(f"improperly formatted log rotation config: {text}") from None
    except RecursionError:
        raise ConfigError("improperly formatted log rotation config: exceeded max depth") from None


def _value(name: str, kind: type, value: Any) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, _Number) and _WHOLE.fullmatch(value):
        if value.startswith("-"):
            raise ConfigError(f"--log-rotation-config-json: {name} must not be negative (set to {value})")
        return int(value)
    shown = f"{_go_name(value)} {value}" if kind is int and isinstance(value, _Number) else _go_name(value)
    raise ConfigError(
        f"invalid log rotation config: json: cannot unmarshal {shown} into Go struct field "
        f"logRotationConfig.{name} of type {kind.__name__}"
    )


def _go_name(value: Any) -> str:
    return "number" if isinstance(value, _Number) else _GO_NAMES[type(value)]
